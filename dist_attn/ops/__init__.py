"""Operations along the sequence: naive oracles, fast forms, and the seam that models use."""

from dist_attn.ops.affine import (
    AffineState,
    affine_recurrence,
    affine_step,
    gated_delta_rule,
    gated_delta_step,
)
from dist_attn.ops.convolution import convolve, convolve_streaming
from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.linear_attention import absorb_keys, linear_attention, linear_attention_read, linear_attention_step
from dist_attn.ops.local_sequence_ops import LocalSequenceOps
from dist_attn.ops.selective_scan import gated_scan, gated_step, selective_scan, selective_step
from dist_attn.ops.sequence_call import SequenceCall, local_form
from dist_attn.ops.sequence_ops import SequenceOps
from dist_attn.ops.softmax_attention import (
    KeyValueCache,
    RelativePositions,
    SoftmaxOptions,
    softmax_attention,
    softmax_attention_streaming,
)
from dist_attn.ops.state import LinearState
from dist_attn.ops.watch import FiniteCheck, Watch, current_watch, watching

__all__ = [
    "AffineState",
    "Denominator",
    "FeatureMap",
    "FiniteCheck",
    "KeyValueCache",
    "LinearState",
    "LocalSequenceOps",
    "RelativePositions",
    "SequenceCall",
    "SequenceOps",
    "SoftmaxOptions",
    "Watch",
    "absorb_keys",
    "affine_recurrence",
    "affine_step",
    "convolve",
    "convolve_streaming",
    "current_watch",
    "gated_delta_rule",
    "gated_delta_step",
    "gated_scan",
    "gated_step",
    "linear_attention",
    "linear_attention_read",
    "linear_attention_step",
    "local_form",
    "selective_scan",
    "selective_step",
    "softmax_attention",
    "softmax_attention_streaming",
    "watching",
]

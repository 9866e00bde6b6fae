"""Text from a model: draws, and decoding step by step from the recurrent state."""

from dist_attn.generation.captured_step import CapturedStep, StepGraphs, StepMode, takes_captured_steps
from dist_attn.generation.decode import generate
from dist_attn.generation.sampling import generator_for, sample, sequence_scores, token_logprobs
from dist_attn.generation.state_snapshot import (
    RestoredState,
    StateShapes,
    computation_of,
    identity_of,
    pack_state,
    restore_state,
)

__all__ = [
    "CapturedStep",
    "RestoredState",
    "StateShapes",
    "StepGraphs",
    "StepMode",
    "computation_of",
    "generate",
    "generator_for",
    "identity_of",
    "pack_state",
    "restore_state",
    "sample",
    "sequence_scores",
    "takes_captured_steps",
    "token_logprobs",
]

"""A call of the C kernels as they read it: `csrc/attention_call.h`, field by field, filled from tensors.

Shape letters: B batch, H heads, L tokens, K head size, D projections, M features.
"""

import ctypes
from typing import Final

import torch

from dist_attn.ops.c_call import CCall, Chunks, ints, kernels_of, pointers, views
from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap, FusedForm, HasFusedForm

KINDS: Final = {"gaussian": 1, "arc_cosine": 2, "elu": 3}
POLICIES: Final = {"floor": 0, "exact": 1, "clamp": 2, "sign_clamp": 3, "mass": 4, "one": 5, "abs_clamp": 6}


class NativeCall(ctypes.Structure):
    """One call; what is not set is not there."""

    _fields_ = [
        *ints("batch heads tokens size values projections features"),
        *ints("kind unit_norm policy undivided threads num_chunks save_every"),
        ("eps", ctypes.c_double),
        *pointers("chunks fresh w"),
        *views("q k v out log_gate key_scale"),
        *pointers("s zm s_after zm_after den mass kept"),
        *views("grad_out grad_q grad_k grad_v"),
        *pointers("grad_w grad_log_gate grad_key_scale grad_s_after grad_zm_after grad_s grad_zm"),
        *views("sums grad_sums"),
        *pointers("memory"),
        *ints("memory_floats"),
    ]


def kernels() -> ctypes.CDLL:
    """The compiled kernels.

    Raises: NoLibraryError where there are none.
    """
    return kernels_of("attention", NativeCall)


def half_products() -> bool:
    """Return whether bfloat16 tensors are multiplied by bfloat16 instructions here, in place of float32 ones.

    Raises: NoLibraryError where there are no kernels.
    """
    return bool(kernels().dist_attn_half_products())


def num_features(feature_map: FeatureMap | None, size: int) -> int:
    """M of a map of heads of this size."""
    if feature_map is None:
        return size
    tensors = feature_map.tensors()
    projections = tensors[0].shape[1] if tensors else size
    return 2 * projections if _form(feature_map).kind == "gaussian" else projections


def _form(feature_map: FeatureMap) -> FusedForm:
    assert isinstance(feature_map, HasFusedForm)  # `choose` lets no other come here
    return feature_map.fused_form()


class KernelCall(CCall):
    """A call of linear attention being filled in."""

    def __init__(self, tokens: torch.Tensor, values: int, chunks: Chunks) -> None:
        """Begin a call for queries or keys of this shape, [B, H, L, K], and so many values."""
        batch, heads, length, size = tokens.shape
        super().__init__(kernels(), NativeCall(batch, heads, length, size, values), chunks)

    def compute(self, feature_map: FeatureMap | None, w_HDK: torch.Tensor | None, policy: Denominator) -> None:
        """Set the features and the denominators to compute with."""
        fields = self.fields
        fields.projections = fields.size if w_HDK is None else w_HDK.shape[1]
        fields.features = num_features(feature_map, fields.size)
        if feature_map is not None:
            form = _form(feature_map)
            fields.kind, fields.unit_norm = KINDS[form.kind], form.unit_norm
        fields.policy, fields.eps = POLICIES[policy.kind], policy.eps
        self.point(w=None if w_HDK is None else w_HDK.float())

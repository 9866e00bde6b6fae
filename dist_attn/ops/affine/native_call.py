"""A call of the C kernels of affine recurrences as they read it: `csrc/affine_call.h`, field by field."""

import ctypes

import torch

from dist_attn.ops.c_call import CCall, Chunks, ints, kernels_of, pointers, views


class Call(ctypes.Structure):
    """One call; what is not set is not there."""

    _fields_ = [
        *ints("batch heads tokens size values decays reads_before threads num_chunks save_every"),
        *pointers("chunks fresh"),
        *views("q k v out log_decay a b beta"),
        *pointers("bonus s s_after kept"),
        *views("grad_out grad_q grad_k grad_v grad_log_decay grad_a grad_b grad_beta"),
        *pointers("grad_bonus grad_s_after grad_s memory"),
        *ints("memory_floats"),
    ]


def kernels() -> ctypes.CDLL:
    """The compiled kernels.

    Raises: NoLibraryError where there are none.
    """
    return kernels_of("affine", Call)


class KernelCall(CCall):
    """A call of an affine recurrence being filled in."""

    def __init__(self, k_BHLK: torch.Tensor, values: int, decays: int, *, before: bool, documents: tuple[int, ...]):
        """For keys of this shape, so many values, and so many decays of a head."""
        batch, heads, tokens, size = k_BHLK.shape
        fields = Call(batch, heads, tokens, size, values, decays, before)
        super().__init__(kernels(), fields, Chunks.of(tokens, documents))

"""Affine recurrences against the plain forms of transformers, float32: what loads such models must compute the same."""

import inspect
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dist_attn.ops import AffineState, affine_recurrence, gated_delta_rule

pytest.importorskip("transformers", reason="transformers is not installed; `pip install -e .[dev]` adds it")
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.mamba2.modeling_mamba2 import mamba2_chunk_scan
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

BATCH, HEADS, SIZE, VALUES = 1, 2, 16, 24


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def delta_inputs(tokens: int, decays: int) -> tuple[Tensor, ...]:
    """q, k of norm 1, v, log decays, beta, and a state before."""
    q, k, v = (normal(BATCH, HEADS, tokens, size, seed=n) for n, size in enumerate((SIZE, SIZE, VALUES)))
    decay = -0.2 * normal(BATCH, HEADS, tokens, decays, seed=3).abs()
    beta = normal(BATCH, HEADS, tokens, seed=4).sigmoid()
    return F.normalize(q, dim=-1), F.normalize(k, dim=-1), v, decay, beta, normal(BATCH, HEADS, SIZE, VALUES, seed=5)


def plain(function: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """The function without what takes kernels of other packages in its place."""
    return inspect.unwrap(function)


def token_first(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


@pytest.mark.parametrize("decays", [1, SIZE])
@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1_000, 4_097])
def test_the_delta_rule_is_theirs(tokens: int, decays: int) -> None:
    """With one decay a head Qwen3-Next's, with one a channel Kimi Linear's: outputs and the state after."""
    q, k, v, decay, beta, before = delta_inputs(tokens, decays)
    out, after = gated_delta_rule(
        q, k, v, beta_BHL=beta, log_decay_BHLK=decay, state=AffineState.from_sums(before), implementation="auto"
    )
    theirs = plain(torch_chunk_gated_delta_rule if decays == 1 else chunk_kimi_delta_attention)
    g = decay[..., 0] if decays == 1 else decay
    # They divide queries by the root of the key size.
    tensors = [token_first(x) for x in (q * SIZE**0.5, k, v, g, beta)]
    want, want_state = theirs(*tensors, initial_state=before, output_final_state=True)
    torch.testing.assert_close(out, token_first(want), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.s_BHKV, want_state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 1_000, 4_097])
def test_the_state_space_dual_is_theirs(tokens: int) -> None:
    """Mamba-2's scan: keys are B, values dt x, queries C, log decays dt A, and x passes by D."""
    x, b, c = (normal(BATCH, tokens, HEADS, size, seed=n) for n, size in enumerate((VALUES, SIZE, SIZE)))
    dt, a, d = normal(BATCH, tokens, HEADS, seed=3).sigmoid(), -normal(HEADS, seed=4).abs(), normal(HEADS, seed=5)
    want, want_state = plain(mamba2_chunk_scan)(x, dt, a, b, c, 64, D=d, return_final_states=True)
    q, k, v = (token_first(t) for t in (c, b, dt[..., None] * x))
    out, after = affine_recurrence(q, k, v, log_decay_BHLK=token_first(dt * a)[..., None])
    torch.testing.assert_close(token_first(out) + d[:, None] * x, want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.s_BHKV.mT, want_state, rtol=1e-4, atol=1e-4)

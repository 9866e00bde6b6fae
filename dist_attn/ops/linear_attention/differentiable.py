"""What implementations by kernels share: the state behind a call, and gradients that are to be differentiated again.

Kernels have a backward pass of their own, which autograd cannot look into. A gradient of gradients therefore goes
through the same function in another implementation, all of whose operations autograd knows.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.linear_attention.block import bounded
from dist_attn.ops.plain_scan import plain_gradients
from dist_attn.ops.state import LinearState
from dist_attn.ops.watch import watching

__all__ = ["Attention", "Replay", "again", "attention_again", "map_of", "state_after", "state_of", "sums_of"]

_Tensors = tuple[torch.Tensor, ...]
_Optional = tuple[torch.Tensor | None, ...]
Replay = Callable[..., _Tensors]  # an implementation's function of all its tensors, in operations that autograd knows


class Attention(Protocol):
    """`linear_attention` with everything but the tensors and their documents settled."""

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        /,
        *,
        feature_map: FeatureMap | None,
        log_gate_BHS: torch.Tensor | None,
        key_scale_BHS: torch.Tensor | None,
        state: LinearState | None,
        denominator: Denominator | None,
        documents: tuple[int, ...] | None,
    ) -> tuple[torch.Tensor, LinearState]: ...


def state_after(
    before: LinearState,
    s_BHMV: torch.Tensor,
    zm_BHE: torch.Tensor,
    log_gate_BHL: torch.Tensor | None,
    documents: tuple[int, ...],
) -> LinearState:
    """The state behind a call from its sums, z and mass beside each other, and what the gates say of its decay."""
    log_decay_BH, reset_BH = before.log_decay_BH, before.reset_BH
    if documents:
        log_decay_BH, reset_BH = torch.zeros_like(log_decay_BH), torch.ones_like(reset_BH)
    if log_gate_BHL is not None:
        last = documents[-1] if documents else 0
        log_decay_BH = log_decay_BH + bounded(log_gate_BHL[:, :, last:], torch.float32).sum(-1)
    return LinearState(s_BHMV, zm_BHE[..., :-1], zm_BHE[..., -1], log_decay_BH, reset_BH)


def attention_again(
    attention: Attention, feature_map: FeatureMap | None, policy: Denominator, documents: tuple[int, ...]
) -> Replay:
    """`attention` as a function of q, k, v, log gate, key scale, S, z beside the mass, and the map's tensors."""

    def replay(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        log_gate: torch.Tensor | None,
        key_scale: torch.Tensor | None,
        s: torch.Tensor,
        zm: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> _Tensors:
        out, after = attention(
            q,
            k,
            v,
            feature_map=map_of(feature_map, parameters),
            log_gate_BHS=log_gate,
            key_scale_BHS=key_scale,
            state=state_of(s, zm),
            denominator=policy,
            documents=documents,
        )
        return out, *sums_of(after)

    return replay


def map_of(feature_map: FeatureMap | None, parameters: _Tensors) -> FeatureMap | None:
    """The map over these values of its tensors."""
    return None if feature_map is None else feature_map.with_tensors(*parameters)


def state_of(s: torch.Tensor, zm: torch.Tensor) -> LinearState:
    """A state of S [B, H, M, V] and z beside the mass [B, H, M + 1] that nothing has decayed."""
    nothing = zm.new_zeros(zm.shape[:2])
    return LinearState(s, zm[..., :-1], zm[..., -1], nothing, nothing.bool())


def sums_of(state: LinearState) -> tuple[torch.Tensor, torch.Tensor]:
    """S, and z beside the mass."""
    return state.s_BHMV, torch.cat([state.z_BHM, state.mass_BH[..., None]], dim=-1)


def again(replay: Replay, tensors: _Optional, needs: tuple[bool, ...], grads: _Optional) -> list[torch.Tensor | None]:
    """The gradients of all inputs as differentiable functions of the inputs and of `grads`."""
    # Aliases, so that gradients stop here and do not run on into what the inputs were computed from.
    inputs = tuple(t.view_as(t) if need and t is not None else t for t, need in zip(tensors, needs, strict=True))
    with watching(None):
        results = replay(*inputs)
    return plain_gradients(results, grads, inputs, needs)

"""Linear attention of any shape by the C kernels: what queries and keys share, keys behind, queries behind."""

from typing import Protocol

import torch

from dist_attn.ops.denominator import Denominator
from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.linear_attention.differentiable import Attention, Replay, attention_again, map_of, state_of, sums_of
from dist_attn.ops.linear_attention.joined import Rooms
from dist_attn.ops.linear_attention.native import native_absorb, native_attention, native_read
from dist_attn.ops.linear_attention.native_call import num_features
from dist_attn.ops.state import LinearState

__all__ = ["Absorb", "Complete", "absorb_again", "natively", "natively_absorbed", "natively_completed"]

_Tensors = tuple[torch.Tensor, ...]


class Absorb(Protocol):
    """`absorb_keys` with everything but the tensors settled."""

    def __call__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        /,
        *,
        feature_map: FeatureMap | None,
        log_gate_BHS: torch.Tensor | None,
        key_scale_BHS: torch.Tensor | None,
        state: LinearState | None,
    ) -> LinearState: ...


class Complete(Protocol):
    """`complete_sums` with everything but the tensors settled."""

    def __call__(
        self,
        sums: torch.Tensor,
        q: torch.Tensor,
        before: LinearState,
        /,
        *,
        feature_map: FeatureMap | None,
        log_gate_BHL: torch.Tensor | None,
        denominator: Denominator,
        out_dtype: torch.dtype,
    ) -> torch.Tensor: ...


def natively(
    sequence: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    feature_map: FeatureMap | None,
    causal: bool,
    state: LinearState | None,
    policy: Denominator,
    documents: tuple[int, ...],
    *,
    attend: Attention,
    read: Attention,
    absorb: Absorb,
    rooms: Rooms | None = None,
) -> tuple[torch.Tensor, LinearState]:
    """`linear_attention` of (q, k, v, log gate, key scale).

    `attend`, `read` (not causal) and `absorb` are the same in operations that autograd knows.
    """
    q, k, v, log_gate, key_scale = sequence
    queries, keys = q.shape[2], k.shape[2]
    if state is not None:
        state.check(*q.shape[:2], num_features(feature_map, q.shape[3]), v.shape[3])
    shared = min(queries, keys) if causal else 0
    outputs: list[torch.Tensor] = []
    if shared:
        gates = (_part(log_gate, 0, shared), _part(key_scale, 0, shared))
        out, state = native_attention(
            q[:, :, :shared],
            k[:, :, :shared],
            v[:, :, :shared],
            *gates,
            feature_map=feature_map,
            state=state,
            denominator=policy,
            documents=documents,
            replay=attention_again(attend, feature_map, policy, documents),
            rooms=rooms if shared == queries == keys else None,
        )
        outputs.append(out)
    if shared < keys:
        gates = (_part(log_gate, shared, keys), _part(key_scale, shared, keys))
        state = natively_absorbed(k[:, :, shared:], v[:, :, shared:], *gates, feature_map, state, absorb=absorb)
    if shared < queries:
        assert state is not None  # there were keys, or a state was given
        outputs.append(_natively_read(q[:, :, shared:], state, feature_map, policy, v.dtype, read))
    assert state is not None
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), state


def natively_absorbed(
    k: torch.Tensor,
    v: torch.Tensor,
    log_gate: torch.Tensor | None,
    key_scale: torch.Tensor | None,
    feature_map: FeatureMap | None,
    state: LinearState | None,
    *,
    absorb: Absorb,
) -> LinearState:
    """`absorb_keys`; `absorb` is the same in operations that autograd knows."""
    replay = absorb_again(absorb, feature_map)
    return native_absorb(k, v, log_gate, key_scale, feature_map=feature_map, state=state, replay=replay)


def absorb_again(absorb: Absorb, feature_map: FeatureMap | None) -> Replay:
    """`absorb` as a function of nothing, k, v, log gate, key scale, S, z beside the mass, and the map's tensors."""

    def replay(
        _: None,
        k: torch.Tensor,
        v: torch.Tensor,
        log_gate: torch.Tensor | None,
        key_scale: torch.Tensor | None,
        s: torch.Tensor,
        zm: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> _Tensors:
        return sums_of(
            absorb(
                k,
                v,
                feature_map=map_of(feature_map, parameters),
                log_gate_BHS=log_gate,
                key_scale_BHS=key_scale,
                state=state_of(s, zm),
            )
        )

    return replay


def natively_completed(
    sums: torch.Tensor,
    q: torch.Tensor,
    before: LinearState,
    feature_map: FeatureMap | None,
    log_gate: torch.Tensor | None,
    policy: Denominator,
    out_dtype: torch.dtype,
    *,
    complete: Complete,
    rooms: Rooms | None = None,
) -> torch.Tensor:
    """`complete_sums`; `complete` is the same in operations that autograd knows."""

    def replay(
        q: torch.Tensor,
        log_gate: torch.Tensor | None,
        sums: torch.Tensor,
        s: torch.Tensor,
        zm: torch.Tensor,
        *parameters: torch.Tensor,
    ) -> _Tensors:
        out = complete(
            sums,
            q,
            state_of(s, zm),
            feature_map=map_of(feature_map, parameters),
            log_gate_BHL=log_gate,
            denominator=policy,
            out_dtype=out_dtype,
        )
        return (out,)

    return native_read(
        q,
        before,
        feature_map=feature_map,
        denominator=policy,
        out_dtype=out_dtype,
        replay=replay,
        log_gate_BHL=log_gate,
        sums_BHLX=sums,
        rooms=rooms,
    )


def _natively_read(
    q: torch.Tensor,
    state: LinearState,
    feature_map: FeatureMap | None,
    policy: Denominator,
    out_dtype: torch.dtype,
    read: Attention,
) -> torch.Tensor:
    def replay(
        q: torch.Tensor, log_gate: None, sums: None, s: torch.Tensor, zm: torch.Tensor, *parameters: torch.Tensor
    ) -> _Tensors:
        # Attention that is not causal, over no keys.
        no_keys, no_values = q[:, :, :0], s[:, :, :0].to(out_dtype)
        again = attention_again(read, feature_map, policy, ())
        return again(q, no_keys, no_values, log_gate, sums, s, zm, *parameters)[:1]

    return native_read(q, state, feature_map=feature_map, denominator=policy, out_dtype=out_dtype, replay=replay)


def _part(x: torch.Tensor | None, start: int, stop: int) -> torch.Tensor | None:
    return None if x is None else x[:, :, start:stop]

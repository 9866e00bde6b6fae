"""Recurrences in which every number of the state decays by itself, token by token, with decays that tokens choose.

    gated_scan        h_t = exp(g_t) h_{t-1} + x_t                                    (RG-LRU, HGRN)
    selective_scan    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t,  y_t = C_t h_t + D x_t    (Mamba)

A block of tokens is cut into chunks of 16. Their tokens are walked for all chunks at once, from zeros; then the chunks,
for the state before each; then what is left of that is added. Log decays are only ever added from a chunk's start, so
none that is exponentiated is a difference, and -inf, a closed gate, gives 0. Memory is flat in the length.

Shape letters: B batch, L tokens, T tokens of a block, D channels, N numbers of a channel's state; n chunks of C tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
import torch.nn.functional as F

from dist_attn.errors import ShapeError
from dist_attn.ops.device import without_autocast
from dist_attn.ops.documents import check_documents, chunk_blocks, start_flags
from dist_attn.ops.scan import BlockBody, MaybeTensors, Tensors, scan
from dist_attn.ops.sequence_call import SequenceCall, local_form
from dist_attn.ops.state import writes_in_place

__all__ = [
    "GatedCall",
    "SelectiveCall",
    "absorb_gated",
    "absorb_selected",
    "gated_scan",
    "gated_scan_naive",
    "gated_step",
    "scan_gated",
    "scan_selected",
    "selective_scan",
    "selective_scan_naive",
    "selective_step",
    "sums_dtype",
]

CHUNK_TOKENS = 16
BLOCK_TOKENS = 1024
# So large are the states of a block's tokens, of which its backward pass holds about ten such tensors.
BLOCK_BYTES = {"cpu": 2**21, "cuda": 2**26}


def gated_scan(
    x_BLD: torch.Tensor,
    log_decay_BLD: torch.Tensor,
    *,
    state: torch.Tensor | None = None,
    documents: tuple[int, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h_t = exp(log_decay_t) h_{t-1} + x_t for each number by itself.

    `state` is h before the first token, 0 when None. `documents` are the positions at which documents start; each
    begins from zeros. The state in is that of the tokens before the first start, the state out that of the last
    document.

    Shapes: x, log_decay [B, L, D], state [B, D] -> h [B, L, D] in x's dtype and the state after the last token, float32
        or wider.
    Raises: ShapeError when they do not fit together.
    Reference: De et al. 2024, Griffin, Eq. 4.
    """
    return scan_gated(GatedCall(x_BLD, log_decay_BLD, state, documents=documents or ()))


@dataclass(frozen=True)
class GatedCall(SequenceCall[tuple[torch.Tensor, torch.Tensor]]):
    """The arguments of `gated_scan`, which explains them."""

    x_BLD: torch.Tensor
    log_decay_BLD: torch.Tensor
    state: torch.Tensor | None = None

    operation: ClassVar[str] = "gated_scan"
    along: ClassVar[tuple[str, ...]] = ("x_BLD", "log_decay_BLD")


@local_form(GatedCall)
def scan_gated(call: GatedCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`gated_scan` of a call.

    Raises: as `gated_scan`.
    """
    x_BLD, log_decay_BLD, state = call.x_BLD, call.log_decay_BLD, call.state
    _check_gated(x_BLD, log_decay_BLD, state)
    dtype = sums_dtype(x_BLD, log_decay_BLD, state)
    first_BD = _first(x_BLD.shape[::2], dtype, x_BLD.device, state)
    return _scanned(_Gated(dtype), (x_BLD, log_decay_BLD), first_BD, (), call.documents)


def selective_scan(
    x_BLD: torch.Tensor,
    dt_BLD: torch.Tensor,
    a_DN: torch.Tensor,
    b_BLN: torch.Tensor,
    c_BLN: torch.Tensor,
    *,
    skip_D: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    documents: tuple[int, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t, y_t = sum_n C_t[n] h_t[:, n] + D x_t: Mamba's state space.

    `skip_D` is D. States and documents as in `gated_scan`. The states of all tokens exist for one block at a time.

    Shapes: x, dt [B, L, D], a [D, N], b, c [B, L, N], skip [D], state [B, D, N] -> y [B, L, D] in x's dtype and the
        state after the last token, float32 or wider.
    Raises: ShapeError when they do not fit together.
    Reference: Gu and Dao 2023, Mamba, Algorithm 2.
    """
    return scan_selected(SelectiveCall(x_BLD, dt_BLD, a_DN, b_BLN, c_BLN, skip_D, state, documents=documents or ()))


@dataclass(frozen=True)
class SelectiveCall(SequenceCall[tuple[torch.Tensor, torch.Tensor]]):
    """The arguments of `selective_scan`, which explains them."""

    x_BLD: torch.Tensor
    dt_BLD: torch.Tensor
    a_DN: torch.Tensor
    b_BLN: torch.Tensor
    c_BLN: torch.Tensor
    skip_D: torch.Tensor | None = None
    state: torch.Tensor | None = None

    operation: ClassVar[str] = "selective_scan"
    along: ClassVar[tuple[str, ...]] = ("x_BLD", "dt_BLD", "b_BLN", "c_BLN")

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the state."""
        return sums_dtype(self.x_BLD, self.dt_BLD, self.a_DN, self.b_BLN, self.c_BLN, self.skip_D, self.state)

    def check(self) -> None:
        """Raise ShapeError in words when the tensors do not fit together."""
        x, dt, a, b, c, skip = self.x_BLD, self.dt_BLD, self.a_DN, self.b_BLN, self.c_BLN, self.skip_D
        if (
            x.dim() != 3
            or a.dim() != 2
            or x.shape != dt.shape
            or a.shape[0] != x.shape[2]
            or not b.shape == c.shape == (*x.shape[:2], a.shape[1])
        ):
            raise ShapeError(
                f"x {tuple(x.shape)}, dt {tuple(dt.shape)}, a {tuple(a.shape)}, b {tuple(b.shape)}, c "
                f"{tuple(c.shape)}: needed are x and dt [B, L, D], a [D, N], b and c [B, L, N]"
            )
        if skip is not None and skip.shape != a.shape[:1]:
            raise ShapeError(f"skip has shape {tuple(skip.shape)}; needed is [D] = {tuple(a.shape[:1])}")
        _check_state(self.state, (x.shape[0], *a.shape), "[B, D, N]")


@local_form(SelectiveCall)
def scan_selected(call: SelectiveCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`selective_scan` of a call.

    Raises: as `selective_scan`.
    """
    call.check()
    x_BLD, a_DN, dtype = call.x_BLD, call.a_DN, call.dtype
    first_BDN = _first((x_BLD.shape[0], *a_DN.shape), dtype, x_BLD.device, call.state)
    parameters = (a_DN,) if call.skip_D is None else (a_DN, call.skip_D)
    sequence = (x_BLD, call.dt_BLD, call.b_BLN, call.c_BLN)
    return _scanned(_Selected(dtype), sequence, first_BDN, parameters, call.documents)


def absorb_gated(x_BLD: torch.Tensor, log_decay_BLD: torch.Tensor, *, like: torch.dtype) -> torch.Tensor:
    """The state [B, D] of `gated_scan` after these tokens, from zeros, in at least the precision `like`."""
    _check_gated(x_BLD, log_decay_BLD, None)
    dtype = torch.promote_types(like, sums_dtype(x_BLD, log_decay_BLD))
    first_BD = _first(x_BLD.shape[::2], dtype, x_BLD.device, None)
    return _scanned(_Gated(dtype, has_output=False), (x_BLD, log_decay_BLD), first_BD, (), ())[1]


def absorb_selected(
    x_BLD: torch.Tensor, dt_BLD: torch.Tensor, a_DN: torch.Tensor, b_BLN: torch.Tensor, *, like: torch.dtype
) -> torch.Tensor:
    """The state [B, D, N] of `selective_scan` after these tokens, from zeros, in at least the precision `like`."""
    SelectiveCall(x_BLD, dt_BLD, a_DN, b_BLN, b_BLN).check()
    dtype = torch.promote_types(like, sums_dtype(x_BLD, dt_BLD, a_DN, b_BLN))
    first_BDN = _first((x_BLD.shape[0], *a_DN.shape), dtype, x_BLD.device, None)
    return _scanned(_Selected(dtype, has_output=False), (x_BLD, dt_BLD, b_BLN, None), first_BDN, (a_DN,), ())[1]


def gated_step(
    x_BD: torch.Tensor, log_decay_BD: torch.Tensor, state: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`gated_scan` for the one token after `state`, [B, D] each."""
    out = state if writes_in_place() else None
    after_BD = torch.add(state * log_decay_BD.to(state.dtype).exp(), x_BD, out=out)
    return after_BD.to(x_BD.dtype), after_BD


def selective_step(
    x_BD: torch.Tensor,
    dt_BD: torch.Tensor,
    a_DN: torch.Tensor,
    b_BN: torch.Tensor,
    c_BN: torch.Tensor,
    state: torch.Tensor,
    *,
    skip_D: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`selective_scan` for the one token after `state`.

    Shapes: x, dt [B, D], a [D, N], b, c [B, N], state [B, D, N] -> y [B, D] and the state after.
    """
    with without_autocast(x_BD.device):
        x, dt, b, c = (t.to(state.dtype) for t in (x_BD, dt_BD, b_BN, c_BN))
        out = state if writes_in_place() else None
        kept_BDN = torch.mul(state, (dt[..., None] * a_DN).exp(), out=out)
        after_BDN = torch.addcmul(kept_BDN, (dt * x)[..., None], b[:, None], out=out)
        y_BD = (after_BDN @ c[..., None])[..., 0]
        y_BD = y_BD if skip_D is None else y_BD + skip_D * x
    return y_BD.to(x_BD.dtype), after_BDN


def _scanned(
    body: BlockBody,
    sequence_BLX: MaybeTensors,
    first: torch.Tensor,
    parameters: Tensors,
    documents: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, L, D], if the body has any, and the state after the last token."""
    x_BLD = sequence_BLX[0]
    assert x_BLD is not None
    length, device = x_BLD.shape[1], x_BLD.device
    check_documents(documents, length)
    starts_11L = start_flags(documents, length, device)[None, None] if documents else None
    most = BLOCK_BYTES.get(device.type, BLOCK_BYTES["cpu"]) // max(1, first.numel() * first.element_size())
    out_B1LD, (after,) = scan(
        body,
        chunk_blocks(
            length,
            CHUNK_TOKENS,
            min(max(1, most // CHUNK_TOKENS), BLOCK_TOKENS // CHUNK_TOKENS) * CHUNK_TOKENS,
            documents,
        ),
        (*(None if t is None else t[:, None] for t in sequence_BLX), starts_11L),
        (first,),
        parameters,
        output_shape=tuple(x_BLD[:, None].shape),
        output_dtype=x_BLD.dtype,
    )
    return out_B1LD[:, 0] if body.has_output else out_B1LD, after


@dataclass(frozen=True)
class _Gated:
    """A block of `gated_scan`: whole chunks, or one shorter chunk at the end of a document."""

    dtype: torch.dtype
    has_output: bool = True

    def run(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> tuple[torch.Tensor | None, Tensors]:
        if not self.has_output:
            return None, self.advance(sequence, carry, parameters)
        x_nCD, decay_nCD = (_chunks(t, self.dtype) for t in sequence[:2])
        h_nCD, after = _walk(decay_nCD.exp(), decay_nCD.cumsum(2).exp(), x_nCD, _begun(carry, sequence[2]))
        return h_nCD.flatten(1, 2)[:, None], (after,)

    def advance(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> Tensors:
        x_BTD, decay_BTD = (_tokens(t, self.dtype) for t in sequence[:2])
        kept_BD = decay_BTD.sum(1).exp() * _begun(carry, sequence[2])
        return (kept_BD + (_to_end(decay_BTD).exp() * x_BTD).sum(1),)


@dataclass(frozen=True)
class _Selected:
    """A block of `selective_scan`: whole chunks, or one shorter chunk at the end of a document."""

    dtype: torch.dtype
    has_output: bool = True

    def run(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> tuple[torch.Tensor | None, Tensors]:
        if not self.has_output:
            return None, self.advance(sequence, carry, parameters)
        x_nCD, dt_nCD, b_nCN, c_nCN = (_chunks(t, self.dtype) for t in sequence[:4])
        a_DN = parameters[0].to(self.dtype)
        h_nCDN, after = _walk(
            (dt_nCD[..., None] * a_DN).exp(),
            (dt_nCD.cumsum(2)[..., None] * a_DN).exp(),
            (dt_nCD * x_nCD)[..., None] * b_nCN[..., None, :],
            _begun(carry, sequence[4]),
        )
        y_nCD = (h_nCDN @ c_nCN[..., None])[..., 0]
        if len(parameters) > 1:
            y_nCD = y_nCD + parameters[1].to(self.dtype) * x_nCD
        return y_nCD.flatten(1, 2)[:, None], (after,)

    def advance(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> Tensors:
        x_BTD, dt_BTD, b_BTN = (_tokens(t, self.dtype) for t in sequence[:3])
        a_DN = parameters[0].to(self.dtype)
        kept_BDN = (dt_BTD.sum(1)[..., None] * a_DN).exp() * _begun(carry, sequence[4])
        left_BTDN = (_to_end(dt_BTD)[..., None] * a_DN).exp() * (dt_BTD * x_BTD)[..., None]
        return (kept_BDN + (left_BTDN * b_BTN[:, :, None]).sum(1),)


def _walk(
    decay_nCX: torch.Tensor, so_far_nCX: torch.Tensor, added_nCX: torch.Tensor, state_X: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The states after every token, [B, n, C, X], and after the last, where X are the sizes of a state.

    `decay` is what a token leaves of a state, `so_far` what the chunk up to and with it does.
    """
    added = added_nCX.unbind(2)
    states = [added[0]]
    for decay_nX, added_nX in zip(decay_nCX.unbind(2)[1:], added[1:], strict=True):
        states.append(torch.addcmul(added_nX, decay_nX, states[-1]))
    from_zeros_nCX = torch.stack(states, dim=2)
    before = [state_X]
    for kept_X, added_X in zip(so_far_nCX[:, :, -1].unbind(1), states[-1].unbind(1), strict=True):
        before.append(torch.addcmul(added_X, kept_X, before[-1]))
    return torch.addcmul(from_zeros_nCX, so_far_nCX, torch.stack(before[:-1], dim=1)[:, :, None]), before[-1]


def _begun(carry: Tensors, starts_11T: torch.Tensor | None) -> torch.Tensor:
    """The state before a block: documents start at its first token, or not in it."""
    return carry[0] if starts_11T is None else torch.where(starts_11T[0, 0, 0], 0.0, carry[0])


def _tokens(x_B1TX: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    assert x_B1TX is not None
    return x_B1TX[:, 0].to(dtype)


def _chunks(x_B1TX: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    """[B, n, C, X]."""
    x_BTX = _tokens(x_B1TX, dtype)
    x_BnCX: torch.Tensor = x_BTX.unflatten(1, (-1, min(x_BTX.shape[1], CHUNK_TOKENS)))
    return x_BnCX


def _to_end(x_BTD: torch.Tensor) -> torch.Tensor:
    """The sum over the later tokens, for each token."""
    return F.pad(x_BTD[:, 1:].flip(1).cumsum(1).flip(1), (0, 0, 0, 1))


def _first(shape: Sequence[int], dtype: torch.dtype, device: torch.device, state: torch.Tensor | None) -> torch.Tensor:
    return torch.zeros(tuple(shape), dtype=dtype, device=device) if state is None else state.to(dtype)


def sums_dtype(*tensors: torch.Tensor | None) -> torch.dtype:
    """The precision of the state: the widest of all inputs, float32 at least."""
    return reduce(torch.promote_types, (t.dtype for t in tensors if t is not None), torch.float32)


def _check_gated(x: torch.Tensor, log_decay: torch.Tensor, state: torch.Tensor | None) -> None:
    """Raise ShapeError in words when the inputs do not fit together."""
    if x.dim() != 3 or x.shape != log_decay.shape:
        raise ShapeError(f"x {tuple(x.shape)}, log_decay {tuple(log_decay.shape)}: needed are two times [B, L, D]")
    _check_state(state, tuple(x.shape[::2]), "[B, D]")


def _check_state(state: torch.Tensor | None, needed: tuple[int, ...], letters: str) -> None:
    if state is not None and tuple(state.shape) != needed:
        raise ShapeError(f"the state has shape {tuple(state.shape)}; needed is {letters} = {needed}")


def gated_scan_naive(
    x_BLD: torch.Tensor,
    log_decay_BLD: torch.Tensor,
    *,
    state: torch.Tensor | None = None,
    documents: tuple[int, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h_t = exp(g_t) h_{t-1} + x_t, token by token; see `gated_scan`."""
    zeros_BD = x_BLD.new_zeros(x_BLD.shape[::2])
    h_BD = zeros_BD if state is None else state
    outputs = []
    for t in range(x_BLD.shape[1]):
        before_BD = zeros_BD if t in (documents or ()) else h_BD
        h_BD = log_decay_BLD[:, t].exp() * before_BD + x_BLD[:, t]
        outputs.append(h_BD)
    return torch.stack(outputs, dim=1) if outputs else torch.zeros_like(x_BLD), h_BD


def selective_scan_naive(
    x_BLD: torch.Tensor,
    dt_BLD: torch.Tensor,
    a_DN: torch.Tensor,
    b_BLN: torch.Tensor,
    c_BLN: torch.Tensor,
    *,
    skip_D: torch.Tensor | None = None,
    state: torch.Tensor | None = None,
    documents: tuple[int, ...] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t, y_t = C_t h_t + D x_t, token by token; see `selective_scan`."""
    zeros_BDN = x_BLD.new_zeros((x_BLD.shape[0], *a_DN.shape))
    h_BDN = zeros_BDN if state is None else state
    outputs = []
    for t in range(x_BLD.shape[1]):
        dt_BD1, x_BD1 = dt_BLD[:, t, :, None], x_BLD[:, t, :, None]
        before_BDN = zeros_BDN if t in (documents or ()) else h_BDN
        h_BDN = (dt_BD1 * a_DN).exp() * before_BDN + dt_BD1 * x_BD1 * b_BLN[:, t, None]
        outputs.append((h_BDN * c_BLN[:, t, None]).sum(-1))
    y_BLD = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(x_BLD)
    return y_BLD if skip_D is None else y_BLD + skip_D * x_BLD, h_BDN

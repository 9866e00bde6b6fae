"""The diagonal recurrence in chunks: inside a chunk a convolution as a matrix product, between chunks the state.

With kernel K_l = 2 Re sum_n c a^l b, a chunk of C tokens that starts from state x gives y = K * u + 2 Re(c a^(t+1) x)
and leaves a^C x + sum_s a^(C-1-s) b u_s. All products are real: a complex number is a pair of columns. Powers are
whole ones, by products: exact at 0, and differentiable everywhere. Packed documents of a length share one scan.

Reference: A Unified View of Long-Sequence Models, Sec. 7 (S4D, recurrent form).
"""

from dataclasses import dataclass, replace
from functools import reduce
from typing import ClassVar

import torch
import torch.nn.functional as F

from dist_attn.errors import ShapeError
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn.ops.device import send
from dist_attn.ops.documents import check_documents, chunk_blocks
from dist_attn.ops.scan import MaybeTensors, StateOnly, Tensors, scan
from dist_attn.ops.sequence_call import SequenceCall, local_form
from dist_attn.sharded import Sharding, over_ranks
from dist_attn.sharded.document_exchange import hear_from, ranks_heard
from dist_attn_papers.ops.columns import documents_by_length
from dist_attn_papers.ops.powers import scan_powers


def power(a_DN: torch.Tensor, exponent: int) -> torch.Tensor:
    """a^exponent by repeated squaring; 1 for exponent 0, whatever a is."""
    result, square = torch.ones_like(a_DN), a_DN
    while exponent:
        if exponent & 1:
            result = result * square
        exponent >>= 1
        square = square * square if exponent else square
    return result


def powers(a_DN: torch.Tensor, count: int) -> torch.Tensor:
    """a^0 .. a^(count - 1), [D, N, count], by doubling: a logarithm would not do for a = 0."""
    found_DNC = torch.ones_like(a_DN)[..., None]
    next_DN1 = a_DN[..., None]
    while found_DNC.shape[2] < count:
        found_DNC = torch.cat([found_DNC, found_DNC * next_DN1], dim=2)
        next_DN1 = next_DN1 * next_DN1
    return found_DNC[..., :count]


CHUNK_TOKENS = 64
BLOCK_CHUNKS = 8


def diagonal_scan(
    u_BLD: torch.Tensor,
    a_DN: torch.Tensor,
    b_DN: torch.Tensor,
    c_DN: torch.Tensor,
    *,
    state: torch.Tensor | None = None,
    ops: SequenceOps | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A diagonal, discrete state-space model per channel: x_t = a x_{t-1} + b u_t, y_t = 2 Re(sum_n c x_t).

    The factor 2 stands for conjugate pairs of which one half is kept. `state` is x before the first token, 0 when
    None. Forward and backward need memory for the inputs and a state every few blocks, not for every token's state.
    Packed documents each start from 0: `state` is then that of the tokens before the first
    start, and the state returned is the last document's.

    Shapes: u [B, L, D] real, a, b, c [D, N] complex, state [B, D, N] complex -> y [B, L, D] in u's dtype and the state
        after the last token (complex64; complex128 for any float64 or complex128 input).
    Cost: one scan per length of document that occurs, at most sqrt(2 L) of them.
    Raises: ShapeError when they do not fit together.
    """
    return (LocalSequenceOps() if ops is None else ops).run(DiagonalCall(u_BLD, a_DN, b_DN, c_DN, state))


@dataclass(frozen=True)
class DiagonalCall(SequenceCall[tuple[torch.Tensor, torch.Tensor]]):
    """The arguments of `diagonal_scan`, which explains them."""

    u_BLD: torch.Tensor
    a_DN: torch.Tensor
    b_DN: torch.Tensor
    c_DN: torch.Tensor
    state: torch.Tensor | None = None

    operation: ClassVar[str] = "diagonal_scan"
    along: ClassVar[tuple[str, ...]] = ("u_BLD",)

    @property
    def types(self) -> tuple[torch.dtype, torch.dtype]:
        """The real and the complex type of sums."""
        return state_types(self.u_BLD, self.a_DN, self.b_DN, self.c_DN, self.state)

    def check(self) -> None:
        """Raise ShapeError in words when the tensors do not fit together."""
        u, a, b, c = self.u_BLD, self.a_DN, self.b_DN, self.c_DN
        if (
            u.dim() != 3
            or u.is_complex()
            or a.dim() != 2
            or not u.shape[2:] == a.shape[:1]
            or not a.shape == b.shape == c.shape
        ):
            raise ShapeError(
                f"u {tuple(u.shape)} ({u.dtype}), a {tuple(a.shape)}, b {tuple(b.shape)}, c {tuple(c.shape)}: needed "
                "are a real u [B, L, D] and a, b, c [D, N]"
            )
        wanted = (u.shape[0], *a.shape)
        if self.state is not None and tuple(self.state.shape) != wanted:
            raise ShapeError(f"the state has shape {tuple(self.state.shape)}; needed is [B, D, N] = {wanted}")


@local_form(DiagonalCall)
def scan_diagonal(call: DiagonalCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`diagonal_scan` of a call.

    Raises: as `diagonal_scan`.
    """
    if call.documents:
        return _scan_documents(call)
    call.check()
    u_BLD, (real, kind) = call.u_BLD, call.types
    a, b, c = (t.to(kind) for t in (call.a_DN, call.b_DN, call.c_DN))
    powers_DNC = powers(a, CHUNK_TOKENS + 1)
    write_DNC = powers_DNC[..., :-1] * b[..., None]
    read_DNC = powers_DNC[..., 1:] * c[..., None]
    kernel_DC = 2 * (write_DNC * c[..., None]).sum(1).real
    parameters = (kernel_DC, *(torch.view_as_real(t.resolve_conj()) for t in (write_DNC, read_DNC, powers_DNC)))
    u_BDL = u_BLD.to(real).transpose(1, 2)
    y_BDL, (x_BDN2,) = scan(
        _Respond(),
        chunk_blocks(u_BLD.shape[1], CHUNK_TOKENS, BLOCK_CHUNKS * CHUNK_TOKENS),
        (u_BDL,),
        (_start(u_BDL, a, call.state),),
        parameters,
        output_shape=tuple(u_BDL.shape),
        output_dtype=real,
    )
    return y_BDL.transpose(1, 2).to(u_BLD.dtype), torch.view_as_complex(x_BDN2.contiguous())


def absorb_inputs(
    u_BLD: torch.Tensor, a_DN: torch.Tensor, b_DN: torch.Tensor, *, like: torch.dtype = torch.float32
) -> torch.Tensor:
    """The state [B, D, N] that these tokens leave behind when they start from 0, in at least the precision `like`."""
    DiagonalCall(u_BLD, a_DN, b_DN, b_DN).check()
    real = torch.promote_types(like, state_types(u_BLD, a_DN, b_DN)[0])
    a, b = (t.to(_complex(real)) for t in (a_DN, b_DN))
    powers_DNC = powers(a, CHUNK_TOKENS + 1)
    parameters = tuple(torch.view_as_real(t) for t in (powers_DNC[..., :-1] * b[..., None], powers_DNC))
    u_BDL = u_BLD.to(real).transpose(1, 2)
    _, (x_BDN2,) = scan(
        StateOnly(_advance),
        chunk_blocks(u_BLD.shape[1], CHUNK_TOKENS, BLOCK_CHUNKS * CHUNK_TOKENS),
        (u_BDL,),
        (_start(u_BDL, a, None),),
        parameters,
    )
    return torch.view_as_complex(x_BDN2.contiguous())


def state_types(*tensors: torch.Tensor | None) -> tuple[torch.dtype, torch.dtype]:
    """The real and the complex type in which states over these inputs are summed: single precision at least."""
    parts = [t.real.dtype if t.is_complex() else t.dtype for t in tensors if t is not None]
    real = reduce(torch.promote_types, parts, torch.float32)
    return real, _complex(real)


@dataclass(frozen=True)
class _Respond:
    """One block: outputs [B, D, T] and the state after it, [B, D, N, 2]."""

    has_output = True

    def run(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> tuple[torch.Tensor | None, Tensors]:
        kernel_DC, write_DNC2, read_DNC2, powers_DNC2 = parameters
        (u_BDT,) = sequence
        assert u_BDT is not None
        u_DBGC = _chunks(u_BDT)
        size = u_DBGC.shape[3]
        before_DBGN2, after_BDN2 = _states(u_DBGC, carry[0], write_DNC2, powers_DNC2)
        # Row s, column t: K_{t-s}, 0 where t < s.
        toeplitz_DCC = F.pad(kernel_DC[:, :size], (size - 1, 0)).unfold(1, size, 1).flip(1)
        # 2 Re(r x) = [Re x, Im x] . [2 Re r, -2 Im r].
        read_DNC2 = read_DNC2[:, :, :size] * torch.arange(2, -3, -4, dtype=read_DNC2.dtype, device=read_DNC2.device)
        y_DGC = u_DBGC.flatten(1, 2) @ toeplitz_DCC
        y_DGC = y_DGC + before_DBGN2.flatten(1, 2).flatten(2) @ read_DNC2.transpose(2, 3).flatten(1, 2)
        return y_DGC.reshape(u_DBGC.shape).flatten(2).transpose(0, 1), (after_BDN2,)

    def advance(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> Tensors:
        return _advance(sequence, carry, (parameters[1], parameters[3]))


def _advance(sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> Tensors:
    (u_BDT,) = sequence
    assert u_BDT is not None
    write_DNC2, powers_DNC2 = parameters
    return (_states(_chunks(u_BDT), carry[0], write_DNC2, powers_DNC2)[1],)


def _chunks(u_BDT: torch.Tensor) -> torch.Tensor:
    """[D, B, chunks, C]: a block is whole chunks, or one shorter chunk at the end of the sequence."""
    batch, channels, length = u_BDT.shape
    size = min(length, CHUNK_TOKENS)
    return u_BDT.transpose(0, 1).reshape(channels, batch, length // size, size)


def _states(
    u_DBGC: torch.Tensor, x_BDN2: torch.Tensor, write_DNC2: torch.Tensor, powers_DNC2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The state before each chunk, [D, B, chunks, N, 2], and the one after the last, [B, D, N, 2]."""
    size = u_DBGC.shape[3]
    # Token s of a chunk enters with a^(C-1-s) b.
    weights_DCN2 = write_DNC2[:, :, :size].flip(2).transpose(1, 2)
    gains_DGN = u_DBGC.flatten(1, 2) @ weights_DCN2.flatten(2)
    gains_DBGN2 = gains_DGN.reshape(*u_DBGC.shape[:3], *weights_DCN2.shape[2:])
    decay_DN = torch.view_as_complex(powers_DNC2[:, :, size].contiguous())
    x_DBN = torch.view_as_complex(x_BDN2.contiguous()).transpose(0, 1)
    states = [x_DBN]
    for gain_DBN in torch.view_as_complex(gains_DBGN2).unbind(2):
        states.append(decay_DN[:, None] * states[-1] + gain_DBN)
    before_DBGN = torch.stack(states[:-1], dim=2)
    return torch.view_as_real(before_DBGN), torch.view_as_real(states[-1].transpose(0, 1))


def _start(u_BDL: torch.Tensor, a_DN: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
    if state is None:
        return u_BDL.new_zeros((u_BDL.shape[0], *a_DN.shape, 2))
    return torch.view_as_real(state.to(a_DN.dtype).resolve_conj())


def _complex(real: torch.dtype) -> torch.dtype:
    return torch.complex128 if real == torch.float64 else torch.complex64


def _scan_documents(call: DiagonalCall) -> tuple[torch.Tensor, torch.Tensor]:
    u_BLD, documents, alone = call.u_BLD, call.documents, replace(call, documents=())
    length, first = u_BLD.shape[1], documents[0]
    check_documents(documents, length)
    head_BLD, u_BTD = u_BLD.split((first, length - first), dim=1)
    y_head_BLD, after = scan_diagonal(replace(alone, u_BLD=head_BLD))
    starts_of = documents_by_length(tuple(start - first for start in documents), length - first)
    done, order = [], []
    for tokens, starts in starts_of:
        at_NT = torch.tensor(starts, device="cpu")[:, None] + torch.arange(tokens, device="cpu")
        at_NT = send(at_NT, u_BLD.device)
        rows_RTD = u_BTD[:, at_NT.flatten()].unflatten(1, (len(starts), tokens)).flatten(0, 1)
        y_RTD, after_RDN = scan_diagonal(replace(alone, u_BLD=rows_RTD, state=None))
        done.append(y_RTD.unflatten(0, (u_BLD.shape[0], len(starts))).flatten(1, 2))
        order.append(at_NT.flatten())
        if starts[-1] == documents[-1] - first:
            after = after_RDN.unflatten(0, (u_BLD.shape[0], len(starts)))[:, -1]
    y_BTD = torch.cat(done, dim=1)[:, torch.cat(order).argsort()]
    return torch.cat([y_head_BLD, y_BTD], dim=1), after


def diagonal_scan_naive(
    u_BLD: torch.Tensor,
    a_DN: torch.Tensor,
    b_DN: torch.Tensor,
    c_DN: torch.Tensor,
    *,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x_t = a x_{t-1} + b u_t, y_t = 2 Re(sum_n c x_t), step by step; see `diagonal_scan`."""
    batch, length, channels = u_BLD.shape
    kind = torch.promote_types(torch.promote_types(u_BLD.dtype, torch.complex64), a_DN.dtype)
    x_BDN = a_DN.new_zeros((batch, channels, a_DN.shape[1]), dtype=kind) if state is None else state.to(kind)
    outputs = []
    for t in range(length):
        x_BDN = a_DN * x_BDN + b_DN * u_BLD[:, t, :, None]
        outputs.append(2 * (c_DN * x_BDN).sum(-1).real)
    y_BLD = torch.stack(outputs, dim=1) if outputs else u_BLD.new_zeros(u_BLD.shape)
    return y_BLD.to(u_BLD.dtype), x_BDN


@over_ranks(DiagonalCall)
def sharded_diagonal_scan(sharding: Sharding, call: DiagonalCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`diagonal_scan` on this rank's slice, whose documents are the layout's.

    The call's state is the one before the first global token, equal on all ranks; the state returned is the global
    final one, on every rank. Gradients of a, b, c and of the state are this rank's share.

    Shapes: as `diagonal_scan`, L local, which may be 0.
    Cost: a scan of 8 B D N + 8 bytes (twice for float64); a second pass over the local inputs for the state they
        leave. One rank alone: nothing of both.
    """
    if sharding.packed:
        return _packed_diagonal_scan(sharding, call)
    if sharding.comm.size == 1:
        return scan_diagonal(call)
    real, kind = call.types
    own_BDN = absorb_inputs(call.u_BLD, call.a_DN, call.b_DN, like=real)
    before_BDN, after_BDN = scan_powers(sharding, call.a_DN.to(kind), own_BDN, call.state)
    return scan_diagonal(replace(call, state=before_BDN))[0], after_BDN


def _packed_diagonal_scan(sharding: Sharding, call: DiagonalCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`sharded_diagonal_scan` of every document by itself.

    If the state before the first global token is given, the global final state is returned on every rank; otherwise
    the state after this rank's last token, as in `sharded_packed_linear_attention`.

    Shapes: as `diagonal_scan`, L local, which may be 0.
    Cost: per rank that hears from this one a message of 8 B D N bytes (16 for float64), backward the same the other
        way, and a second pass over the inputs of the last document here. No document over a cut and no state: nothing.
    """
    comm, layout, state = sharding.comm, sharding.layout, call.state
    sources = ranks_heard(layout, causal=True, final=state is not None)
    starts = layout.documents_on(comm.rank)
    call = replace(call, documents=starts)
    if not any(sources):
        return scan_diagonal(call)
    real, kind = call.types
    left_BDN = absorb_inputs(call.u_BLD[:, starts[-1] if starts else 0 :], call.a_DN, call.b_DN, like=real)
    heard = hear_from(comm, sources, torch.view_as_real(left_BDN), label="carry")

    def after(ranks: tuple[int, ...], begun: bool) -> torch.Tensor:
        """The state of one document after these ranks' tokens; `begun`: it starts in this sequence, so from zeros."""
        x_BDN = torch.zeros_like(left_BDN) if begun or state is None else state.to(kind)
        for rank in ranks:
            own = left_BDN if rank == comm.rank else torch.view_as_complex(heard.messages[rank])
            # Where the document starts on that rank x is 0, so its power counts for nothing.
            x_BDN = power(call.a_DN.to(kind), layout.lengths[rank]) * x_BDN + own
        return torch.view_as_complex(heard.connect(torch.view_as_real(x_BDN)))

    first, last = layout.document_of(layout.range(comm.rank)[0]), layout.document_of(layout.total - 1)
    y_BLD, here_BDN = scan_diagonal(replace(call, state=after(layout.ranks_before(comm.rank), first > 0)))
    return y_BLD, here_BDN if state is None else after(layout.ranks_of_last_document(), last > 0)

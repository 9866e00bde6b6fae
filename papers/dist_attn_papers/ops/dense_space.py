"""The recurrence with a full matrix in chunks: inside a chunk a convolution, between chunks the state.

With K_l = C A^l b, a chunk of T tokens that starts from x gives y = K * u + C A^(t+1) x and leaves
A^T x + sum_s A^(T-1-s) b u_s: all of it matrix products. Powers of A come by doubling, whose errors add up, so all of
them keep the precision of the matrix under autocast.

Reference: A Unified View of Long-Sequence Models, Sec. 7 (LSSL, recurrent form).
"""

from dataclasses import dataclass, replace
from functools import reduce
from typing import ClassVar

import torch
import torch.nn.functional as F

from dist_attn.errors import ShapeError
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn.ops.device import without_autocast
from dist_attn.ops.documents import chunk_blocks
from dist_attn.ops.scan import MaybeTensors, StateOnly, Tensors, scan
from dist_attn.ops.sequence_call import SequenceCall, local_form
from dist_attn.sharded import Sharding, over_ranks
from dist_attn_papers.ops.powers import scan_powers


def columns_of_powers(a_DNN: torch.Tensor, b_DN: torch.Tensor, count: int) -> torch.Tensor:
    """b, A b, …, A^(count - 1) b, [D, N, count]."""
    found_DNC, square_DNN = b_DN[..., None], a_DNN
    with without_autocast(a_DNN.device):
        while found_DNC.shape[2] < count:
            found_DNC = torch.cat([found_DNC, square_DNN @ found_DNC], dim=2)
            square_DNN = square_DNN @ square_DNN
    return found_DNC[..., :count]


def rows_of_powers(c_DMN: torch.Tensor, a_DNN: torch.Tensor, count: int) -> torch.Tensor:
    """C A, C A^2, …, C A^count, [D, count, M, N]."""
    with without_autocast(a_DNN.device):
        found_DCMN, square_DNN = (c_DMN @ a_DNN)[:, None], a_DNN
        while found_DCMN.shape[1] < count:
            found_DCMN = torch.cat([found_DCMN, found_DCMN @ square_DNN[:, None]], dim=1)
            square_DNN = square_DNN @ square_DNN
    return found_DCMN[:, :count]


def matrix_power(a_DNN: torch.Tensor, exponent: int) -> torch.Tensor:
    """A^exponent in the precision of A; the identity for exponent 0."""
    with without_autocast(a_DNN.device):
        power_DNN: torch.Tensor = torch.linalg.matrix_power(a_DNN, exponent)
    return power_DNN


CHUNK_TOKENS = 64


def dense_scan(
    u_BLD: torch.Tensor,
    a_DNN: torch.Tensor,
    b_DN: torch.Tensor,
    c_DMN: torch.Tensor,
    *,
    state: torch.Tensor | None = None,
    ops: SequenceOps | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """A discrete state-space model per channel, M outputs each: x_t = A x_{t-1} + b u_t, y_t = C x_t.

    `state` is x before the first token, 0 when None. Memory as in `diagonal_scan`; precision also under autocast.

    Shapes: u [B, L, D], A [D, N, N], b [D, N], C [D, M, N], state [B, D, N], all real -> y [B, L, D, M] in u's dtype
        and the state after the last token (float32; float64 for any such input).
    Cost: per token and channel N^2 / 64 + (64 + 2 N) M multiplications and N to absorb it; N^3 log L for the powers.
    Raises: ShapeError when they do not fit together.
    """
    return (LocalSequenceOps() if ops is None else ops).run(DenseCall(u_BLD, a_DNN, b_DN, c_DMN, state))


@dataclass(frozen=True)
class DenseCall(SequenceCall[tuple[torch.Tensor, torch.Tensor]]):
    """The arguments of `dense_scan`, which explains them."""

    u_BLD: torch.Tensor
    a_DNN: torch.Tensor
    b_DN: torch.Tensor
    c_DMN: torch.Tensor
    state: torch.Tensor | None = None

    operation: ClassVar[str] = "dense_scan"
    along: ClassVar[tuple[str, ...]] = ("u_BLD",)
    packs: ClassVar[bool] = False

    def check(self) -> None:
        """Raise ShapeError in words when the tensors do not fit together."""
        u, a, b, c, state = self.u_BLD, self.a_DNN, self.b_DN, self.c_DMN, self.state
        fits = u.dim() == 3 and b.dim() == 2 and c.dim() == 3 and b.shape[0] == u.shape[2]
        if not fits or a.shape != (*b.shape, b.shape[1]) or (c.shape[0], c.shape[2]) != tuple(b.shape):
            raise ShapeError(
                f"u {tuple(u.shape)}, a {tuple(a.shape)}, b {tuple(b.shape)}, c {tuple(c.shape)}: needed are u "
                "[B, L, D], a [D, N, N], b [D, N] and c [D, M, N]"
            )
        wanted = (u.shape[0], *b.shape)
        if state is not None and tuple(state.shape) != wanted:
            raise ShapeError(f"the state has shape {tuple(state.shape)}; needed is [B, D, N] = {wanted}")


@local_form(DenseCall)
def scan_dense(call: DenseCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`dense_scan` of a call.

    Raises: as `dense_scan`.
    """
    call.check()
    u_BLD, system, state = call.u_BLD, (call.a_DNN, call.b_DN, call.c_DMN), call.state
    tensors = (u_BLD, *system, *(() if state is None else (state,)))
    real = reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
    a, b, c = (t.to(real) for t in system)
    write_DNC = columns_of_powers(a, b, CHUNK_TOKENS)
    with without_autocast(u_BLD.device):
        kernel_DMC = c @ write_DNC
    read_DCMN = rows_of_powers(c, a, CHUNK_TOKENS)
    u_BDL = u_BLD.to(real).transpose(1, 2)
    y_BDLM, (x_BDN,) = scan(
        _Respond(),
        chunk_blocks(u_BLD.shape[1], CHUNK_TOKENS, CHUNK_TOKENS),
        (u_BDL,),
        (_start(u_BDL, a, state),),
        (kernel_DMC, write_DNC, read_DCMN, *_decays(a, u_BLD.shape[1])),
        output_shape=(*u_BDL.shape, c.shape[1]),
        output_dtype=real,
    )
    return y_BDLM.transpose(1, 2).to(u_BLD.dtype), x_BDN


def absorb_dense_inputs(
    u_BLD: torch.Tensor, a_DNN: torch.Tensor, b_DN: torch.Tensor, *, like: torch.dtype = torch.float32
) -> torch.Tensor:
    """The state [B, D, N] that these tokens leave behind when they start from 0, in at least the precision `like`."""
    real = reduce(torch.promote_types, (t.dtype for t in (u_BLD, a_DNN, b_DN)), like)
    a, b = a_DNN.to(real), b_DN.to(real)
    u_BDL = u_BLD.to(real).transpose(1, 2)
    parameters = (columns_of_powers(a, b, CHUNK_TOKENS), *_decays(a, u_BLD.shape[1]))
    blocks = chunk_blocks(u_BLD.shape[1], CHUNK_TOKENS, CHUNK_TOKENS)
    _, (x_BDN,) = scan(StateOnly(_advance), blocks, (u_BDL,), (_start(u_BDL, a, None),), parameters)
    return x_BDN


@dataclass(frozen=True)
class _Respond:
    """One chunk: outputs [B, D, T, M] and the state after it, [B, D, N]."""

    has_output = True

    def run(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> tuple[torch.Tensor | None, Tensors]:
        kernel_DMC, _, read_DCMN, _, _ = parameters
        (u_BDT,), (x_BDN,) = sequence, carry
        assert u_BDT is not None
        size = u_BDT.shape[2]
        # Row s, column t: K_{t-s}, 0 where t < s.
        toeplitz_DMTT = F.pad(kernel_DMC[..., :size], (size - 1, 0)).unfold(2, size, 1).flip(2)
        y_BDTM = torch.einsum("bds,dmst->bdtm", u_BDT, toeplitz_DMTT)
        y_BDTM = y_BDTM + torch.einsum("bdn,dtmn->bdtm", x_BDN, read_DCMN[:, :size])
        return y_BDTM, self.advance(sequence, carry, parameters)

    def advance(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> Tensors:
        _, write_DNC, _, whole_DNN, rest_DNN = parameters
        return _advance(sequence, carry, (write_DNC, whole_DNN, rest_DNN))


def _advance(sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> Tensors:
    (u_BDT,), (x_BDN,) = sequence, carry
    assert u_BDT is not None
    write_DNC, whole_DNN, rest_DNN = parameters
    size = u_BDT.shape[2]
    decay_DNN = whole_DNN if size == CHUNK_TOKENS else rest_DNN
    # Token s of a chunk enters with A^(T-1-s) b.
    gained_BDN = torch.einsum("bds,dns->bdn", u_BDT, write_DNC[..., :size].flip(2))
    return (torch.einsum("dnm,bdm->bdn", decay_DNN, x_BDN) + gained_BDN,)


def _decays(a_DNN: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The powers of a by which a whole chunk and the shorter last one change a state."""
    return matrix_power(a_DNN, CHUNK_TOKENS), matrix_power(a_DNN, length % CHUNK_TOKENS)


def _start(u_BDL: torch.Tensor, a_DNN: torch.Tensor, state: torch.Tensor | None) -> torch.Tensor:
    return u_BDL.new_zeros((*u_BDL.shape[:2], a_DNN.shape[1])) if state is None else state.to(a_DNN.dtype)


def dense_scan_naive(
    u_BLD: torch.Tensor,
    a_DNN: torch.Tensor,
    b_DN: torch.Tensor,
    c_DMN: torch.Tensor,
    *,
    state: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x_t = A x_{t-1} + b u_t, y_t = C x_t, step by step; see `dense_scan`."""
    batch, length, channels = u_BLD.shape
    x_BDN = a_DNN.new_zeros((batch, channels, a_DNN.shape[1])) if state is None else state
    outputs = []
    for t in range(length):
        x_BDN = (a_DNN @ x_BDN[..., None])[..., 0] + b_DN * u_BLD[:, t, :, None]
        outputs.append((c_DMN @ x_BDN[..., None])[..., 0])
    y_BLDM = torch.stack(outputs, dim=1) if outputs else u_BLD.new_zeros((batch, 0, *c_DMN.shape[:2]))
    return y_BLDM.to(u_BLD.dtype), x_BDN


@over_ranks(DenseCall)
def sharded_dense_scan(sharding: Sharding, call: DenseCall) -> tuple[torch.Tensor, torch.Tensor]:
    """`dense_scan` on this rank's slice; states and gradients as in `sharded_diagonal_scan`.

    Shapes: as `dense_scan`, L local, which may be 0.
    Cost: a scan of 4 B D N + 8 bytes (twice for float64); a second pass over the local inputs for the state they
        leave, and powers of A where two states join. One rank alone: nothing.
    """
    if sharding.comm.size == 1:
        return scan_dense(call)
    like = call.c_DMN.dtype if call.state is None else torch.promote_types(call.c_DMN.dtype, call.state.dtype)
    like = torch.promote_types(like, torch.float32)
    own_BDN = absorb_dense_inputs(call.u_BLD, call.a_DNN, call.b_DN, like=like)
    before_BDN, after_BDN = scan_powers(sharding, call.a_DNN.to(own_BDN.dtype), own_BDN, call.state)
    return scan_dense(replace(call, state=before_BDN))[0], after_BDN

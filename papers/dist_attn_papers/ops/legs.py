"""The LegS memory in chunks: all coefficients of a chunk are one product with the state before it and its tokens.

The step changes with every token, so each chunk has matrices of its own. They depend on nothing but the tokens' numbers
and are the same for all channels, so making them costs as much as N + T further channels. It takes T steps, for some
chunks side by side.

A step solves (I - A / 2t) c_t = (I + A / 2t) c_{t-1} + (B / t) f_t. With M_t = (I - A / 2t)^-1 (I + A / 2t), and
since B = -A e_0, it is c_t = c_{t-1} - F_t (c_{t-1} - e_0 f_t), F_t = I - M_t: what is remembered is forgotten towards
the constant signal f_t. A is lower triangular and semiseparable, so F_t has a closed form, without a solve and without
a difference of nearly equal numbers however large t is. A + A^T = -I - B B^T, so no M_t lengthens a vector.

All M_t are functions of one matrix and commute. A transition over a stretch is then known by its first column: with
b_n = sqrt(2n + 1), e_{n+1} / b_{n+1} = -M_{(n+1)/2} e_n / b_n, and the same recurrence runs through the columns of
every transition.
"""

from dataclasses import dataclass, replace
from math import comb
from typing import ClassVar

import torch
import torch.nn.functional as F

from dist_attn.errors import ShapeError
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn.ops.monoid import MONOIDS
from dist_attn.ops.scan import MaybeTensors, StateOnly, Tensors, scan
from dist_attn.ops.sequence_call import SequenceCall, local_form
from dist_attn.sharded import Sharding, over_ranks
from dist_attn.sharded.prefix_scan import scan_over_ranks

CHUNK_TOKENS = 32
# At most so many chunks side by side, and numbers in their matrices (float64) and in their tokens' coefficients.
BLOCK_CHUNKS, BLOCK_WEIGHTS, BLOCK_COEFFICIENTS = 16, 1 << 19, 1 << 22


@dataclass(frozen=True)
class LegsState:
    """Coefficients c [B, D, N] of every channel's past, in float64, and the tokens seen [B] so far, int64.

    A token changes the coefficients by about 1/t of their size: in float32 a memory would lose the digits of its
    updates after a million tokens, and stop at ten million.
    """

    c_BDN: torch.Tensor
    seen_B: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors in a fixed order."""
        return (self.c_BDN, self.seen_B)

    def replace(self, tensors: tuple[torch.Tensor, ...]) -> "LegsState":
        """Return a state of the same kind over other tensors."""
        return LegsState(*tensors)

    @staticmethod
    def empty(batch: int, channels: int, size: int, *, device: torch.device | None = None) -> "LegsState":
        """The state before any token."""
        c_BDN = torch.zeros((batch, channels, size), dtype=torch.float64, device=device)
        return LegsState(c_BDN, torch.zeros(batch, dtype=torch.int64, device=device))


def legs_memory(
    f_BLD: torch.Tensor, read_DN: torch.Tensor, *, state: LegsState | None = None, ops: SequenceOps | None = None
) -> tuple[torch.Tensor, LegsState]:
    """Every channel's whole past as N coefficients, optimal for the Legendre basis, and what is read of them.

    (I - A / 2t) c_t = (I + A / 2t) c_{t-1} + (B / t) f_t and y_t = read . c_t, with LegS's A and B and t counted from 1
    at the beginning of the text, which a `state` may come from. Only states are kept for the backward pass.

    Shapes: f [B, L, D], read [D, N] -> y [B, L, D] in f's dtype; the state in float64.
    Cost: per token 2 D N (N + T) operations and 2 N^2 (N + T / 2) for the matrices, T = 32.
    Raises: ShapeError when they do not fit together.
    Reference: Gu et al. 2020 (HiPPO), LegS with the bilinear rule; A Unified View of Long-Sequence Models, Sec. 7.
    """
    return (LocalSequenceOps() if ops is None else ops).run(LegsCall(f_BLD, read_DN, state))


@dataclass(frozen=True)
class LegsCall(SequenceCall[tuple[torch.Tensor, LegsState]]):
    """The arguments of `legs_memory`, which explains them."""

    f_BLD: torch.Tensor
    read_DN: torch.Tensor
    state: LegsState | None = None

    operation: ClassVar[str] = "legs_memory"
    along: ClassVar[tuple[str, ...]] = ("f_BLD",)
    packs: ClassVar[bool] = False


@local_form(LegsCall)
def remember(call: LegsCall) -> tuple[torch.Tensor, LegsState]:
    """`legs_memory` of a call."""
    f_BLD, read_DN, state = call.f_BLD, call.read_DN, call.state
    before = _before(f_BLD, read_DN, state)
    real = torch.promote_types(torch.promote_types(f_BLD.dtype, read_DN.dtype), torch.float32)
    f_BDL = f_BLD.to(real).transpose(1, 2)
    y_BDL, (c_BDN,) = scan(
        _Respond(),
        _blocks(f_BLD.shape, read_DN.shape[1]),
        (f_BDL, _times(before, f_BLD.shape[1], alike=state is None)),
        (before.c_BDN,),
        (read_DN.to(real),),
        output_shape=tuple(f_BDL.shape),
        output_dtype=real,
    )
    return y_BDL.transpose(1, 2).to(f_BLD.dtype), LegsState(c_BDN, before.seen_B + f_BLD.shape[1])


def absorb_signal(f_BLD: torch.Tensor, state: LegsState) -> LegsState:
    """The memory after these tokens, without reading it."""
    f_BDL = f_BLD.to(torch.promote_types(f_BLD.dtype, torch.float32)).transpose(1, 2)
    times = _times(state, f_BLD.shape[1], alike=False)
    _, (c_BDN,) = scan(
        StateOnly(_advance), _blocks(f_BLD.shape, state.c_BDN.shape[2]), (f_BDL, times), (state.c_BDN,), ()
    )
    return LegsState(c_BDN, state.seen_B + f_BLD.shape[1])


@dataclass(frozen=True)
class _Respond:
    """Some chunks: what is read [B, D, T] and the coefficients after them, [B, D, N]."""

    has_output = True

    def run(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> tuple[torch.Tensor | None, Tensors]:
        (read_DN,) = parameters
        weights_RKTNJ, f_BKTD, c_BKND, after_BDN = _walk(sequence, carry)
        given_BKJD = torch.cat([c_BKND.to(read_DN.dtype), f_BKTD.to(read_DN.dtype)], dim=2)
        flat_RKFJ = weights_RKTNJ.flatten(2, 3).to(read_DN.dtype)
        outputs = []
        for chunk in range(flat_RKFJ.shape[1]):  # one by one, so that coefficients stay in the cache
            c_BFD = flat_RKFJ[:, chunk] @ given_BKJD[:, chunk]
            outputs.append((c_BFD.unflatten(1, weights_RKTNJ.shape[2:4]) * read_DN.mT).sum(2))
        return torch.cat(outputs, dim=1).mT, (after_BDN,)

    def advance(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> Tensors:
        return _advance(sequence, carry, parameters)


def _advance(sequence: MaybeTensors, carry: Tensors, _: Tensors) -> Tensors:
    return (_walk(sequence, carry)[3],)


def _walk(sequence: MaybeTensors, carry: Tensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Walk from chunk to chunk: their weights and tokens, the coefficients before each and those after the last one."""
    f_BDL, t_R1L = sequence
    (c_BDN,) = carry
    assert f_BDL is not None and t_R1L is not None
    chunks, size = max(1, f_BDL.shape[2] // CHUNK_TOKENS), c_BDN.shape[2]
    f_BKTD = f_BDL.unflatten(2, (chunks, -1)).permute(0, 2, 3, 1)
    t_RKT = t_R1L[:, 0].unflatten(1, (chunks, -1))
    weights_RKTNJ = _weights(t_RKT.flatten(0, 1), size).unflatten(0, t_RKT.shape[:2])
    last_RKNJ = weights_RKTNJ[:, :, -1]
    gained_BKND = last_RKNJ[..., size:] @ f_BKTD.to(c_BDN.dtype)
    c_BND, before = c_BDN.mT, []
    for chunk in range(chunks):
        before.append(c_BND)
        c_BND = last_RKNJ[:, chunk, :, :size] @ c_BND + gained_BKND[:, chunk]
    return weights_RKTNJ, f_BKTD, torch.stack(before, dim=1), c_BND.mT


def _weights(t_RT: torch.Tensor, size: int) -> torch.Tensor:
    """The weights of earlier coefficients and of tokens in those at each time of a chunk, [R, T, N, N + T]."""
    with torch.no_grad():
        forget_RTNN = forgetting(t_RT, size)
        rows, length = t_RT.shape
        weights_RTNJ = forget_RTNN.new_zeros((rows, length, size, size + length))
        weights_RTNJ[:, 0, :, :size] = torch.eye(size, dtype=torch.float64, device=t_RT.device) - forget_RTNN[:, 0]
        for step in range(length):
            if step:
                known_RNK = weights_RTNJ[:, step - 1, :, : size + step]
                weights_RTNJ[:, step, :, : size + step] = known_RNK - forget_RTNN[:, step] @ known_RNK
            # (I - M) e_0 f_t: the first column of F.
            weights_RTNJ[:, step, :, size + step] = forget_RTNN[:, step, :, 0]
        return weights_RTNJ


def _blocks(shape: torch.Size, size: int) -> list[tuple[int, int]]:
    """Token ranges of several whole chunks, then of the rest, which is less than one; nothing is padded or dropped."""
    batch, length, channels = shape
    whole, step = length - length % CHUNK_TOKENS, side_by_side(batch * channels, size) * CHUNK_TOKENS
    blocks = [(start, min(start + step, whole)) for start in range(0, whole, step)]
    return blocks if whole == length else [*blocks, (whole, length)]


def side_by_side(channels: int, size: int) -> int:
    """The number of chunks that are worked on at once, for so many channels times batch."""
    of_weights = BLOCK_WEIGHTS // (CHUNK_TOKENS * size * (size + CHUNK_TOKENS))
    of_coefficients = BLOCK_COEFFICIENTS // (CHUNK_TOKENS * size * max(1, channels))
    return max(1, min(BLOCK_CHUNKS, of_weights, of_coefficients))


def _times(before: LegsState, length: int, *, alike: bool) -> torch.Tensor:
    """Numbers of the tokens, counted from 1, [R, 1, L]: one row where all sequences are known to begin."""
    seen_R = before.seen_B[:1] if alike else before.seen_B
    return (seen_R[:, None] + torch.arange(1, length + 1, device=seen_R.device)).double()[:, None]


def _before(f: torch.Tensor, read: torch.Tensor, state: LegsState | None) -> LegsState:
    """The state before the first token. Raises ShapeError in words when the inputs do not fit together."""
    if f.dim() != 3 or read.dim() != 2 or read.shape[0] != f.shape[2] or not read.shape[1]:
        raise ShapeError(f"f {tuple(f.shape)} and read {tuple(read.shape)}: needed are f [B, L, D] and read [D, N]")
    if state is None:
        return LegsState.empty(f.shape[0], read.shape[0], read.shape[1], device=f.device)
    wanted = (f.shape[0], *read.shape)
    if tuple(state.c_BDN.shape) != wanted or tuple(state.seen_B.shape) != wanted[:1]:
        raise ShapeError(
            f"the state has coefficients {tuple(state.c_BDN.shape)} and tokens seen {tuple(state.seen_B.shape)}; "
            f"needed are [B, D, N] = {wanted} and [B]"
        )
    return LegsState(state.c_BDN.double(), state.seen_B)


def forgetting(t: torch.Tensor, size: int) -> torch.Tensor:
    """F_t = I - M_t for the times t > 0, [...] -> [..., N, N] in float64.

    F_nn = 2 (n + 1) / d_n, and for n > m: 4 t b_n b_m / (d_n d_m) prod_{m < k < n} (2t - k) / d_k, d_n = 2t + n + 1.
    """
    n_N = torch.arange(size, dtype=torch.float64, device=t.device)
    twice = 2 * t.double()[..., None]
    d = twice + n_N + 1
    scaled = (2 * n_N + 1).sqrt() / d
    # Row n, column m: the factor of k = n - 1 where m < k, so that the running product along n has those between.
    ratio = ((twice - n_N) / d).roll(1, -1)[..., :, None]
    between = (n_N[:, None] - 1 > n_N).expand(*ratio.shape[:-1], size)
    product = torch.where(between, ratio, 1.0).cumprod(-2)
    lower = (2 * twice[..., None] * scaled[..., :, None] * scaled[..., None, :] * product).tril(-1)
    return lower + torch.diag_embed(2 * (n_N + 1) / d)


def legs_step(f_BD: torch.Tensor, state: LegsState) -> LegsState:
    """The memory after one more token.

    Shapes: f [B, D]. Cost: 2 B D N^2 operations.
    """
    forget_BNN = forgetting(state.seen_B + 1, state.c_BDN.shape[2])
    off_BDN = torch.cat([state.c_BDN[..., :1] - f_BD[..., None], state.c_BDN[..., 1:]], dim=2)
    return LegsState(state.c_BDN - off_BDN @ forget_BNN.mT, state.seen_B + 1)


def transition_of(first_RN: torch.Tensor) -> torch.Tensor:
    """The transitions [R, N, N] over some stretches of tokens, from their first columns [R, N].

    Cost: 2 R N^3 operations.
    """
    size = first_RN.shape[1]
    n_N = torch.arange(1, size, dtype=torch.float64, device=first_RN.device)
    columns = [first_RN]
    for forget_NN in forgetting(n_N / 2, size).unbind(0):
        columns.append(columns[-1] @ forget_NN.mT - columns[-1])
    scale_N = (2 * torch.arange(size, dtype=torch.float64, device=first_RN.device) + 1).sqrt()
    return torch.stack(columns, dim=2) * scale_N


def reconstruct(c: torch.Tensor, points_P: torch.Tensor) -> torch.Tensor:
    """The past as a polynomial of degree N - 1: its values at shares `points` of the time, 0 the first token, 1 now.

    sum_n c_n sqrt(2n + 1) P_n(2x - 1), the Legendre polynomials by their recurrence, which is stable on [0, 1].

    Shapes: c [..., N], points [P] -> [..., P].
    Cost: 2 N P multiplications per signal.
    Raises: ShapeError for points that are no row.
    Reference: Gu et al. 2020 (HiPPO), LegS; A Unified View of Long-Sequence Models, Sec. 7.
    """
    if points_P.dim() != 1:
        raise ShapeError(f"points have shape {tuple(points_P.shape)}; needed is [P]")
    x_P = 2 * points_P.to(c.dtype) - 1
    rows = [torch.ones_like(x_P), x_P]
    for n in range(1, c.shape[-1]):
        rows.append(((2 * n + 1) * x_P * rows[n] - n * rows[n - 1]) / (n + 1))
    basis_NP = torch.stack(rows[: c.shape[-1]])
    scale_N = (2 * torch.arange(c.shape[-1], dtype=c.dtype, device=c.device) + 1).sqrt()
    return (c * scale_N) @ basis_NP


def legs_memory_naive(
    f_BLD: torch.Tensor, read_DN: torch.Tensor, *, state: LegsState | None = None
) -> tuple[torch.Tensor, LegsState]:
    """(I - A / 2t) c_t = (I + A / 2t) c_{t-1} + (B / t) f_t and y_t = read . c_t, token by token; see `legs_memory`."""
    batch, length, channels = f_BLD.shape
    size = read_DN.shape[1]
    before = LegsState.empty(batch, channels, size) if state is None else state
    n = torch.arange(size, dtype=torch.float64, device="cpu")
    b_N = (2 * n + 1).sqrt()
    a_NN = -(b_N[:, None] * b_N).tril(-1) - torch.diag(n + 1)
    one_NN = torch.eye(size, dtype=torch.float64, device="cpu")
    c_BDN, outputs = before.c_BDN, []
    for step in range(length):
        t_B11 = (before.seen_B + step + 1).double()[:, None, None]
        right_BDN = c_BDN @ (one_NN + a_NN / (2 * t_B11)).mT + b_N / t_B11 * f_BLD[:, step, :, None]
        c_BDN = torch.linalg.solve(one_NN - a_NN / (2 * t_B11), right_BDN.mT).mT
        outputs.append((c_BDN * read_DN).sum(2))
    y_BLD = torch.stack(outputs, dim=1) if outputs else f_BLD.new_zeros((batch, 0, channels))
    return y_BLD.to(f_BLD.dtype), LegsState(c_BDN, before.seen_B + length)


def reconstruct_naive(c: torch.Tensor, points_P: torch.Tensor) -> torch.Tensor:
    """sum_n c_n sqrt(2n + 1) P_n(2x - 1), each polynomial by its powers of x; see `reconstruct`. For N up to 8."""
    signal = c.new_zeros((*c.shape[:-1], len(points_P)))
    for n in range(c.shape[-1]):
        powers = [(-1) ** (n + k) * comb(n, k) * comb(n + k, k) * points_P**k for k in range(n + 1)]
        signal = signal + c[..., n, None] * (2 * n + 1) ** 0.5 * torch.stack(powers).sum(0)
    return signal


@dataclass(frozen=True)
class LegsForgets:
    """Coefficients of a LegS memory: [B as K rows, the first column of A without its 1].

    A depends on the numbers of the tokens alone, so it has no gradient, and all such A commute.
    """

    rows: int
    adjoint: bool = False

    @property
    def weights(self) -> int:
        return self.rows

    @property
    def name(self) -> str:
        return f"legs {self.rows} {int(self.adjoint)}"

    @property
    def known(self) -> tuple[torch.Tensor, ...]:
        return ()

    def combine(self, earlier: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
        change_KK = self._change(later[..., -self.rows :].detach())
        b_KN = earlier[..., : -self.rows].unflatten(-1, (self.rows, -1))
        kept_KN = b_KN + (change_KK.mT if self.adjoint else change_KK) @ b_KN
        column_K1 = earlier[..., -self.rows :].detach()[..., None]
        kept = torch.cat([kept_KN.flatten(-2), (column_K1 + change_KK @ column_K1)[..., 0]], dim=-1)
        return kept + later

    def transposed(self) -> "LegsForgets":
        return LegsForgets(self.rows, not self.adjoint)

    def backward_message(self, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return torch.cat([grad[..., : -self.rows], x[..., -self.rows :].detach()], dim=-1)

    def of_result(self, later: torch.Tensor) -> torch.Tensor:
        return torch.cat([later[..., : -self.rows], torch.zeros_like(later[..., -self.rows :])], dim=-1)

    def _change(self, column_RK: torch.Tensor) -> torch.Tensor:
        """A - I; 0 where nothing changes, which rounding would not give."""
        one_K = torch.zeros_like(column_RK)
        one_K[..., 0] = 1.0
        identity_KK = torch.eye(self.rows, dtype=column_RK.dtype, device=column_RK.device)
        changes = (column_RK != 0).any(-1)[..., None, None]
        return torch.where(changes, transition_of(column_RK + one_K) - identity_KK, 0.0)


MONOIDS["legs"] = lambda sizes, _: LegsForgets(sizes[0], bool(sizes[1]))


@over_ranks(LegsCall)
def sharded_legs_memory(sharding: Sharding, call: LegsCall) -> tuple[torch.Tensor, LegsState]:
    """`legs_memory` on this rank's slice.

    The state in is the one before the first global token, the one out that after the last, equal on all ranks.
    Gradients of read and of the state are this rank's share.

    Shapes: as `legs_memory`, L local, which may be 0.
    Cost: a scan of 8 B (D + 1) N bytes; a second pass over the local tokens for what they leave, and B products with
        N x N matrices where two memories join. One rank alone: nothing of both.
    """
    f_BLD, read_DN, state = call.f_BLD, call.read_DN, call.state
    if sharding.comm.size == 1:
        return remember(call)
    layout = sharding.layout
    (batch, _, channels), size = f_BLD.shape, read_DN.shape[1]
    first = LegsState.empty(batch, channels, size, device=f_BLD.device) if state is None else state
    seen_B = first.seen_B + layout.range(sharding.comm.rank)[0]
    silent_BEN = F.pad(torch.zeros_like(first.c_BDN, dtype=torch.float64), (0, 0, 0, 1))
    silent_BEN[:, -1, 0] = 1.0
    own_BEN = absorb_signal(F.pad(f_BLD, (0, 1)), LegsState(silent_BEN, seen_B)).c_BDN
    own_BX = torch.cat([own_BEN[:, :-1].mT.flatten(1), (own_BEN - silent_BEN)[:, -1]], dim=1)
    first_BX = F.pad(first.c_BDN.double().mT.flatten(1), (0, size))
    scanned = scan_over_ranks(sharding.comm, LegsForgets(size), own_BX, first_BX, sharding.exchange)
    before_BDN, after_BDN = (x_BX[:, :-size].unflatten(1, (size, channels)).mT for x_BX in scanned)
    y_BLD, _ = remember(replace(call, state=LegsState(before_BDN, seen_B)))
    return y_BLD, LegsState(after_BDN, first.seen_B + layout.total)

"""Half-precision inputs across ranks, and denominators where sigma is large: errors and bounds in every mode."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dist_attn.comm import Communicator, run_simulated
from dist_attn.feature_maps import Gaussian
from dist_attn.layout import SequenceLayout
from dist_attn.ops import Denominator, LinearState, LocalSequenceOps, SequenceOps, linear_attention_step
from dist_attn.sharded import ShardedSequenceOps
from tests.support.attention import weighted_sum
from tests.support.pairs import each_pair

pytestmark = pytest.mark.usefixtures("computed_by")  # some of these are in float32

WORSE_AT_MOST = 1.1


class Case:
    """One head of attention over `length` tokens whose q, k and v are whole numbers of bfloat16."""

    def __init__(self, length: int, size: int, *, gated: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        self.qkv = [torch.randn(1, 1, length, size, generator=generator).bfloat16() for _ in range(3)]
        self.w_HDK = torch.randn(1, size, size, generator=generator)
        # Gates from 0.88 to nearly 1: strong ones would forget whatever a long sum has lost.
        logit = 4 + torch.randn(1, 1, length, generator=generator)
        self.gates = {"log_gate_BHS": F.logsigmoid(logit), "key_scale_BHS": torch.sigmoid(-logit)} if gated else {}

    def attend(self, ops: SequenceOps, start: int, stop: int, dtype: torch.dtype, *, backward: bool) -> list[Tensor]:
        """Output of tokens [start, stop), and the gradients of q, k and v where asked for."""
        wide = torch.promote_types(dtype, torch.float32)
        leaves = [x[:, :, start:stop].to(dtype).requires_grad_(backward) for x in self.qkv]
        gates = {name: x[:, :, start:stop].to(wide) for name, x in self.gates.items()}
        out, _ = ops.linear_attention(*leaves, feature_map=Gaussian(self.w_HDK.to(wide), unit_norm=True), **gates)
        if not backward:
            return [out]
        out.backward(torch.ones_like(out))
        return [out.detach(), *(leaf.grad for leaf in leaves)]


def _errors(got: list[Tensor], want: list[Tensor]) -> list[float]:
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(got, want, strict=True)]


def _check_half_precision(case: Case, lengths: tuple[int, ...], *, backward: bool) -> None:
    """Each result of the ranks is at most WORSE_AT_MOST times as far from float64 as that of one rank."""
    layout, local = SequenceLayout.from_lengths(lengths), LocalSequenceOps()
    want = case.attend(local, 0, layout.total, torch.float64, backward=backward)
    one = _errors(case.attend(local, 0, layout.total, torch.bfloat16, backward=backward), want)

    def on_rank(comm: Communicator) -> list[Tensor]:
        ops = ShardedSequenceOps(comm, layout)
        return case.attend(ops, *layout.range(comm.rank), torch.bfloat16, backward=backward)

    ranks = run_simulated(on_rank, layout.size)
    got = _errors([torch.cat(parts, 2) for parts in zip(*ranks, strict=True)], want)
    assert all(0 < error <= WORSE_AT_MOST * alone for error, alone in zip(got, one, strict=True)), (got, one)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("lengths", [(1500, 1500), (700, 0, 2000, 1, 299)])
def test_half_precision_over_ranks_is_as_good_as_on_one(lengths: tuple[int, ...], gated: bool) -> None:
    """With bf16 inputs, ranks add at most a tenth to one rank's error, in outputs and in gradients."""
    _check_half_precision(Case(sum(lengths), 8, gated=gated), lengths, backward=True)


@pytest.mark.slow
def test_half_precision_over_ranks_at_a_million_tokens() -> None:
    """A sum over 2**20 tokens across ranks is as close to float64 as on one rank: it is carried in float32."""
    _check_half_precision(Case(2**20, 4, gated=False), (600_000, 0, 2**20 - 600_000), backward=False)


LENGTH, SIZE, EPS = 150, 16, 0.3
SEGMENTS = (70, 0, 80)


def _large_sigma(sigma: float, gated: bool) -> tuple[list[Tensor], dict[str, Tensor], Gaussian]:
    generator = torch.Generator().manual_seed(1)
    leaves = [torch.randn(1, 2, LENGTH, SIZE, generator=generator).requires_grad_() for _ in range(3)]
    logit = torch.randn(1, 2, LENGTH, generator=generator).requires_grad_()
    gates = {"log_gate_BHS": F.logsigmoid(logit), "key_scale_BHS": torch.sigmoid(-logit)} if gated else {}
    w_HDK = (sigma * torch.randn(2, SIZE, SIZE, generator=generator)).requires_grad_()
    return [*leaves, w_HDK, *([logit] if gated else [])], gates, Gaussian(w_HDK, unit_norm=True)


Attend = Callable[[list[Tensor], dict[str, Tensor], Gaussian], Tensor]


def _whole(qkv: list[Tensor], gates: dict[str, Tensor], phi: Gaussian) -> Tensor:
    return LocalSequenceOps().linear_attention(*qkv, feature_map=phi, **gates, denominator=Denominator("floor", EPS))[0]


def _full(qkv: list[Tensor], gates: dict[str, Tensor], phi: Gaussian) -> Tensor:
    policy = Denominator("floor", EPS)
    return LocalSequenceOps().linear_attention(*qkv, feature_map=phi, **gates, causal=False, denominator=policy)[0]


def _streamed(qkv: list[Tensor], gates: dict[str, Tensor], phi: Gaussian) -> Tensor:
    outs, state = [], None
    parts = zip(*(x.split(SEGMENTS, 2) for x in (*qkv, *gates.values())), strict=True)
    for q, k, v, *own in parts:
        given = dict(zip(gates, own, strict=True))
        policy = Denominator("floor", EPS)
        out, state = LocalSequenceOps().linear_attention(
            q, k, v, feature_map=phi, **given, state=state, denominator=policy
        )
        outs.append(out)
    return torch.cat(outs, 2)


def _decoded(qkv: list[Tensor], gates: dict[str, Tensor], phi: Gaussian) -> Tensor:
    state, outs = LinearState.identity(1, 2, 2 * SIZE, SIZE), []
    for q, k, v, *own in zip(*(x.unbind(2) for x in (*qkv, *gates.values())), strict=True):
        given = dict(zip(("log_gate_BH", "key_scale_BH"), own, strict=False))
        out, state = linear_attention_step(
            q, k, v, state, feature_map=phi, **given, denominator=Denominator("floor", EPS)
        )
        outs.append(out)
    return torch.stack(outs, 2)


MODES: dict[str, Attend] = {"whole": _whole, "full": _full, "streamed": _streamed, "decoded": _decoded}


def _check_bounded(out: Tensor, v: Tensor, gradients: list[Tensor | None]) -> None:
    # Features have length 1, so no weight exceeds its key's scale and no numerator max |v| times the mass; the floor is
    # EPS times the mass.
    assert float(out.abs().max()) <= 1.0001 * float(v.abs().max()) / EPS
    assert all(g is not None and bool(torch.isfinite(g).all()) for g in gradients)


@pytest.mark.parametrize(("mode", "sigma", "gated"), each_pair(MODES, (1.0, 2.0, 3.0), (False, True)))
def test_outputs_stay_bounded_where_sigma_is_large(mode: str, gated: bool, sigma: float) -> None:
    """With any sigma up to 3 the floor bounds outputs by max |v| / eps, and every gradient is finite."""
    leaves, gates, phi = _large_sigma(sigma, gated)
    out = MODES[mode](leaves[:3], gates, phi)
    weighted_sum(out).backward()
    _check_bounded(out.detach(), leaves[2].detach(), [leaf.grad for leaf in leaves])


@pytest.mark.parametrize("sigma", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("gated", [False, True])
def test_outputs_of_ranks_stay_bounded_where_sigma_is_large(gated: bool, sigma: float) -> None:
    """The same bound holds across ranks, where the floor is a share of the mass of all ranks before."""
    layout = SequenceLayout.from_lengths(SEGMENTS)

    def on_rank(comm: Communicator) -> None:
        leaves, gates, phi = _large_sigma(sigma, gated)
        own = slice(*layout.range(comm.rank))
        out, _ = ShardedSequenceOps(comm, layout).linear_attention(
            *(x[:, :, own] for x in leaves[:3]),
            feature_map=phi,
            **{name: x[:, :, own] for name, x in gates.items()},
            denominator=Denominator("floor", EPS),
        )
        weighted_sum(out).backward()
        gradients = [leaf.grad for leaf in leaves]
        if own.start < own.stop:
            _check_bounded(out.detach(), leaves[2].detach(), gradients)

    run_simulated(on_rank, layout.size)

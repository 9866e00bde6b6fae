"""Linear attention over ranks whose local work is done by C kernels, or not: results of one rank in float64."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LinearState
from dist_attn.ops.linear_attention import LinearCall
from dist_attn.sharded.carry_scan import Walks, sharded_linear_attention
from tests.support.closeness import assert_close
from tests.support.native import Case, by_streaming
from tests.support.pairs import each_pair

pytestmark = pytest.mark.usefixtures("computed_by")

LAYOUTS = [SequenceLayout.from_lengths(lengths) for lengths in ([200], [70, 130], [64, 0, 100, 36], [1, 199])]
LOSSES = ["outputs", "state", "both"]


@dataclass(frozen=True)
class Use:
    """What is used of the results, by which weights; which inputs want gradients; how often one goes back."""

    used: str
    names: Sequence[str]
    passes: int
    weights: tuple[torch.Tensor, ...]

    def loss(self, out: torch.Tensor, after: LinearState, start: int, share: float) -> torch.Tensor:
        """Of outputs from `start` on, and a share of what the last state adds."""
        of_out, of_s, of_mass = self.weights
        of_state = (after.s_BHMV * of_s).sum() + (after.mass_BH * of_mass).sum()
        # Every rank goes back through the state, whether it counts there or not.
        loss = of_state * (share if self.used != "outputs" else 0.0)
        if self.used != "state":
            loss = loss + (out * of_out[:, :, start : start + out.shape[2]]).sum()
        return loss


def on_a_rank(
    use: Use, leaves: dict[str, torch.Tensor], out: torch.Tensor, after: LinearState, start: int, share: float
) -> list[torch.Tensor]:
    """Output, S and the gradients."""
    loss = use.loss(out, after, start, share)
    for number in range(use.passes):
        if loss.requires_grad:
            loss.backward(retain_graph=number + 1 < use.passes)
    grads = [(leaves[name], leaves[name].grad) for name in use.names]
    return [out.detach(), after.s_BHMV.detach(), *(torch.zeros_like(t) if g is None else g for t, g in grads)]


def slices(case: Case, names: Sequence[str], start: int, stop: int) -> dict[str, torch.Tensor]:
    """The inputs of a rank as leaves, of which these require gradients."""
    cut = {name: t[:, :, start:stop] if name in case.sequence else t for name, t in case.leaves().items()}
    return {name: t.detach().clone().requires_grad_(name in names) for name, t in cut.items()}


def check(
    case: Case,
    layout: SequenceLayout,
    used: str = "both",
    names: Sequence[str] | None = None,
    passes: int = 1,
    walks: Walks | None = None,
) -> None:
    """Ranks give what one gives: slices beside each other, and the sum of shares of what all ranks have."""
    leaves = case.leaves(torch.Tensor.double)
    args, kwargs = case.arguments(leaves)
    out, after = by_streaming(*args, **kwargs)
    generator = torch.Generator().manual_seed(1)
    weights = (torch.randn(t.shape, generator=generator) for t in (out, after.s_BHMV, after.mass_BH))
    use = Use(used, [*case.sequence, *case.shared] if names is None else names, passes, tuple(weights))
    want = on_a_rank(use, leaves, out, after, 0, 1.0)

    def body(comm: Communicator) -> list[torch.Tensor]:
        start, stop = layout.range(comm.rank)
        leaves = slices(case, use.names, start, stop)
        args, kwargs = case.arguments(leaves)
        out, after = sharded_linear_attention(comm, LinearCall(*args, **kwargs), walks=walks)  # type: ignore[arg-type]
        return on_a_rank(use, leaves, out, after, start, float(comm.rank == comm.size - 1))

    ranks = run_simulated(body, layout.size, timeout_s=30.0)
    assert_close(torch.cat([rank[0] for rank in ranks], 2), want[0].float())
    for rank in ranks:
        assert_close(rank[1], want[1].float(), kind="state")
    for number, name in enumerate(use.names, 2):
        shares = [rank[number] for rank in ranks]
        got = torch.cat(shares, 2) if name in case.sequence else torch.stack(shares).sum(0)
        assert_close(got, want[number].float(), kind="gradient", what=name)


@pytest.mark.parametrize(
    ("layout", "strength", "walks", "computed_by"),
    each_pair(LAYOUTS, (0.0, 0.01, 1.0, 40.0), (None, "one_walk", "two_walks"), ("native", "streaming")),
    indirect=["computed_by"],
)
def test_ranks_give_what_one_gives(layout: SequenceLayout, strength: float, walks: Walks | None) -> None:
    """Outputs, the last state and every gradient, without gates and with gates that keep or forget the state before."""
    case = Case(200, kind="gaussian_unit", gate=strength > 0, scale=True, state=True)
    if strength:
        case.sequence["log_gate"] *= strength
    check(case, layout, walks=walks)


@pytest.mark.parametrize("strength", [0.01, 40.0])
def test_a_gate_that_is_nan_spoils_one_head(strength: float) -> None:
    """A NaN gate on the second of three ranks leaves the other head's outputs, on all ranks, as they are."""
    case = Case(200, gate=True, scale=True, state=True)
    case.sequence["log_gate"] *= strength

    def body(comm: Communicator) -> torch.Tensor:
        leaves = slices(case, (), *SequenceLayout.from_lengths([70, 60, 70]).range(comm.rank))
        args, kwargs = case.arguments(leaves)
        return sharded_linear_attention(comm, LinearCall(*args, **kwargs))[0]  # type: ignore[arg-type]

    want = torch.cat(run_simulated(body, 3, timeout_s=30.0), 2)
    case.sequence["log_gate"][:, 0, 100] = float("nan")
    got = torch.cat(run_simulated(body, 3, timeout_s=30.0), 2)
    assert_close(got[:, 1], want[:, 1])
    assert_close(got[:, 0, :100], want[:, 0, :100])
    assert bool(got[:, 0, 100:131].isnan().all())


@pytest.mark.parametrize(
    ("names", "used", "gate", "computed_by"),
    each_pair(("q", "k", "v", "w", "s", "q w", "k s", "q k v"), LOSSES, (False, True), ("native", "streaming")),
    indirect=["computed_by"],
)
def test_some_results_and_some_gradients(used: str, gate: bool, names: str) -> None:
    """Whatever is used of the results and whatever wants gradients, they are those of one rank."""
    check(Case(200, gate=gate, scale=True, state=True), LAYOUTS[1], used, names.split())


@pytest.mark.parametrize("gate", [False, True])
def test_two_backward_passes_add_up(gate: bool) -> None:
    """A graph that is kept is gone through twice, with twice the gradients."""
    check(Case(200, gate=gate, scale=True, state=True), LAYOUTS[2], passes=2)


def test_passes_that_go_through_a_part_of_the_graph() -> None:
    """What one pass leaves behind that wants the gradient of the state before only, the next one does not find."""
    case = Case(200, scale=True, state=True)
    found = []
    for mixed in (False, True):

        def body(comm: Communicator, mixed: bool = mixed) -> torch.Tensor:
            leaves = slices(case, ["s", "k"], *LAYOUTS[1].range(comm.rank))
            args, kwargs = case.arguments(leaves)
            out, after = sharded_linear_attention(comm, LinearCall(*args, **kwargs))  # type: ignore[arg-type]
            if mixed:
                torch.autograd.grad(out.sum(), [leaves["s"]], retain_graph=True)
            return torch.autograd.grad(after.s_BHMV.sum(), [leaves["k"]])[0]

        found.append(torch.cat(run_simulated(body, 2, timeout_s=30.0), 2))
    assert torch.equal(found[0], found[1])

"""Every exchange of the scan over ranks against a left fold on one rank: states, gradients, and what is refused."""

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Literal

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.costs import Calibration, ScanTime
from dist_attn.errors import ConfigError
from dist_attn.ops import LinearState
from dist_attn.sharded.prefix_scan import (
    LogDecay,
    Matrix,
    Monoid,
    ScanExchange,
    exclusive_scan,
    scan_over_ranks,
)
from tests.support.attention import weighted_sum
from tests.support.closeness import assert_close
from tests.support.pairs import each_pair
from tests.support.ranks import run_ranks

Depends = Literal["before", "after", "both"]
SIZES = range(1, 9)


def states(size: int) -> tuple[list[LinearState], LinearState]:
    """What each rank contributes, and the initial state, with leaves that require gradients."""
    generator = torch.Generator().manual_seed(size)

    def one() -> LinearState:
        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        tensors = normal(2, 3, 4, 3), normal(2, 3, 4), normal(2, 3).abs(), -normal(2, 3).abs() / 4
        return LinearState(*(t.requires_grad_() for t in tensors), torch.zeros(2, 3, dtype=torch.bool))

    return [one() for _ in range(size)], one()


def floats(state: LinearState) -> tuple[torch.Tensor, ...]:
    """The fields that have gradients."""
    return state.tensors()[:4]


def loss_of(before: LinearState, after: LinearState, rank: int, depends: Depends) -> torch.Tensor:
    """A loss of one rank, in which both results or one of them counts."""
    parts = {"before": floats(before), "after": floats(after), "both": (*floats(before), *floats(after))}[depends]
    return weighted_sum(*(t.sin() for t in parts), seed=rank)


def expected(size: int, depends: Depends):
    """Prefixes, the last of which is the total, and all gradients by plain folds."""
    elements, initial = states(size)
    prefixes = [initial]
    for element in elements:
        prefixes.append(prefixes[-1].combine(element))
    losses = [loss_of(prefixes[rank], prefixes[-1], rank, depends) for rank in range(size)]
    leaves = [t for state in (*elements, initial) for t in floats(state)]
    return prefixes, torch.autograd.grad(torch.stack(losses).sum(), leaves, materialize_grads=True)


def on_a_rank(comm: Communicator, exchange: ScanExchange, depends: Depends, with_initial: bool = True):
    """Results of one rank, gradients of its element and its share of those of the initial state."""
    elements, initial = states(comm.size)
    element = elements[comm.rank]
    before, after = exclusive_scan(comm, element, initial if with_initial else None, exchange)
    leaves = [*floats(element), *floats(initial)]
    grads = torch.autograd.grad(loss_of(before, after, comm.rank, depends), leaves, materialize_grads=True)
    return [t.detach() for t in floats(before)], [t.detach() for t in floats(after)], list(grads)


def check(kind: str, exchange: ScanExchange, size: int, depends: Depends = "both") -> None:
    """Compare all ranks with the fold."""
    prefixes, grads = expected(size, depends)
    ranks = run_ranks(kind, partial(on_a_rank, exchange=exchange, depends=depends), size)
    for rank, (before, after, own) in enumerate(ranks):
        for got, want in zip((*before, *after), (*floats(prefixes[rank]), *floats(prefixes[-1])), strict=True):
            assert_close(got, want, kind="state", what=f"rank {rank}")
        for got, want in zip(own[:4], grads[4 * rank : 4 * rank + 4], strict=True):
            assert_close(got, want, kind="gradient", what=f"rank {rank}")
    for number, want in enumerate(grads[-4:]):
        got = torch.stack([own[4 + number] for _, _, own in ranks]).sum(0)
        assert_close(got, want, kind="gradient", what="initial")


def hosts(*sizes: int) -> tuple[tuple[int, ...], ...]:
    """Hosts of so many ranks."""
    edges = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return tuple(tuple(range(a, b)) for a, b in pairwise(edges))


EXCHANGES = [
    *(ScanExchange(name) for name in ("auto", "gather", "exscan", "log_step", "serial_ring")),
    *(ScanExchange("pipelined_ring", pieces=pieces) for pieces in (1, 3, 20)),
]
TWO_LEVELS = [(1,), (3,), (1, 1), (2, 2), (3, 1), (1, 2, 4), (2, 2, 2), (4, 4), (1, 1, 1, 1, 1)]


def name_of(exchange: ScanExchange) -> str:
    """For the list of tests."""
    return f"{exchange.algorithm}-{exchange.pieces}"


@pytest.mark.parametrize(
    ("exchange", "size", "depends"),
    each_pair(EXCHANGES, SIZES, ("both", "before", "after")),
    ids=lambda value: name_of(value) if isinstance(value, ScanExchange) else str(value),
)
def test_every_exchange_is_the_fold(exchange: ScanExchange, size: int, depends: Depends) -> None:
    """Each exchange gives the states and gradients of a left fold, for any number of ranks and whatever is used."""
    check("simulated", exchange, size, depends)


@pytest.mark.parametrize("depends", ["before", "after", "both"])
def test_a_pair(depends: Depends) -> None:
    """Two ranks that swap their states have the fold's results and gradients."""
    check("simulated", ScanExchange("pair"), 2, depends)


@pytest.mark.parametrize("depends", ["before", "after", "both"])
@pytest.mark.parametrize("sizes", TWO_LEVELS, ids=str)
def test_two_levels(sizes: tuple[int, ...], depends: Depends) -> None:
    """Hosts of equal or different size give the fold's results and gradients."""
    check("simulated", ScanExchange("two_level", hosts=hosts(*sizes)), sum(sizes), depends)


@pytest.mark.parametrize("exchange", [*EXCHANGES, ScanExchange("two_level", hosts=hosts(2, 1))], ids=name_of)
def test_without_an_initial_state(exchange: ScanExchange) -> None:
    """Without an initial state the first rank begins from nothing."""
    elements, _ = states(3)
    ranks = run_simulated(partial(on_a_rank, exchange=exchange, depends="both", with_initial=False), 3)
    assert all(t.abs().max() == 0 for t in ranks[0][0])
    for _, after, _ in ranks:
        assert_close(after[0], LinearState.fold(elements).s_BHMV, kind="state")


@pytest.mark.parametrize("exchange", [*EXCHANGES, ScanExchange("two_level", hosts=hosts(2, 2, 1))], ids=name_of)
def test_second_derivatives(exchange: ScanExchange) -> None:
    """Gradients of gradients through each exchange are those of the fold."""
    size = 5

    def body(comm: Communicator) -> list[torch.Tensor]:
        elements, initial = states(size)
        element = elements[comm.rank]
        results = exclusive_scan(comm, element, initial, exchange)
        loss = loss_of(*results, comm.rank, "both")
        grads = torch.autograd.grad(loss, floats(element), create_graph=True)
        return list(torch.autograd.grad(torch.stack([g.square().sum() for g in grads]).sum(), floats(element)))

    leaves, initial = states(size)
    prefixes = [initial]
    for element in leaves:
        prefixes.append(prefixes[-1].combine(element))
    loss = torch.stack([loss_of(prefixes[rank], prefixes[-1], rank, "both") for rank in range(size)]).sum()
    flat = [t for state in leaves for t in floats(state)]
    grads = torch.autograd.grad(loss, flat, create_graph=True)
    want = torch.autograd.grad(torch.stack([g.square().sum() for g in grads]).sum(), flat)
    for rank, got in enumerate(run_simulated(body, size)):
        for one, other in zip(got, want[4 * rank : 4 * rank + 4], strict=True):
            assert_close(one, other, kind="gradient", what=f"rank {rank}")


@pytest.mark.parametrize("exchange", [*EXCHANGES, ScanExchange("two_level", hosts=hosts(2, 2))], ids=name_of)
def test_the_future_does_not_reach_back(exchange: ScanExchange) -> None:
    """NaN in a later rank's state leaves the states before it bitwise as they were."""

    def body(comm: Communicator, spoiled: bool) -> torch.Tensor:
        elements, initial = states(comm.size)
        element = elements[comm.rank].detach()
        if spoiled and comm.rank == 2:
            element = LinearState(*(t * float("nan") if t.is_floating_point() else t for t in element.tensors()))
        return exclusive_scan(comm, element, initial.detach(), exchange)[0].s_BHMV

    clean, spoiled = (run_simulated(partial(body, spoiled=spoiled), 4) for spoiled in (False, True))
    for rank in range(3):
        assert_close(spoiled[rank], clean[rank], kind="exact")
    assert spoiled[3].isnan().all()


@pytest.mark.parametrize("exchange", EXCHANGES, ids=name_of)
def test_a_state_that_forgets_goes_on_forgetting(exchange: ScanExchange) -> None:
    """The flag of a state behind a document's start, which drops what came earlier, is there after the ranks too."""
    elements, initial = states(3)
    initial = replace(initial.detach(), reset_BH=torch.ones_like(initial.reset_BH))
    for _, after in run_simulated(lambda comm: exclusive_scan(comm, elements[comm.rank], initial, exchange), 3):
        assert after.reset_BH.all()


def test_what_is_refused() -> None:
    """Unknown exchanges, a pair of three, no pieces and hosts that do not fit are errors that name what was given."""
    for bad in ({"algorithm": "telepathy"}, {"pieces": 0}):
        with pytest.raises(ConfigError, match=r"telepathy|0 pieces"):
            ScanExchange(**bad)
    for exchange in (ScanExchange("pair"), ScanExchange("two_level", hosts=((0, 2), (1,)))):
        with pytest.raises(ConfigError, match=r"there are 3|consecutive ranks"):
            run_simulated(partial(on_a_rank, exchange=exchange, depends="both"), 3)


def test_the_choice_is_what_was_measured() -> None:
    """`auto` takes the exchange that was fastest for such a message, on all ranks."""
    times = tuple(ScanTime("simulated", 4, name, 1_000, s) for name, s in (("gather", 2.0), ("log_step", 1.0)))
    steps = {}
    for known in (Calibration(), Calibration(times)):

        def body(comm: Communicator, known: Calibration = known) -> list[str]:
            exclusive_scan(comm, LinearState.identity(1, 1, 2, 2), None, ScanExchange(calibration=known))
            return [event.name for event in comm.traffic.events if event.phase != "wait"]

        (steps[len(known.times)],) = {tuple(names) for names in run_simulated(body, 4)}
    assert steps == {0: ("all_gather",), 2: ("send_receive", "send_receive")}


def test_two_levels_find_their_hosts() -> None:
    """Without hosts being named, those of the launcher are taken: threads of one process are on one."""
    check("simulated", ScanExchange("two_level"), 3)


# Monoids of other packages that hold a number of tokens, and those whose last numbers are constants.
COUNTING: tuple[type, ...] = ()
CONSTANT: tuple[type, ...] = ()

MONOIDS = {
    "a decay for each row": LogDecay(3),
    "numbers that only add up": LogDecay(2, added=3),
    "a matrix": Matrix(3),
}


def messages(monoid: Monoid, size: int) -> list[torch.Tensor]:
    """What lies before all ranks, and the message of each rank, four columns of sums."""
    generator = torch.Generator().manual_seed(size)
    drawn = 0.4 * torch.randn((size + 1, 2, 4 * monoid.rows + monoid.weights), generator=generator, dtype=torch.float64)
    if isinstance(monoid, COUNTING):  # a row with the number of tokens behind it
        tokens = torch.stack([torch.tensor([3.0 * (rank % 2), 0.0]) for rank in range(size + 1)])
        drawn = torch.cat([drawn[:, 0, :-2], tokens.double()], dim=1)
    return [message.requires_grad_() for message in drawn]


def weighed(monoid: Monoid, results: tuple[torch.Tensor, ...], seed: int) -> torch.Tensor:
    """A loss of the results, without the numbers that are constants."""
    last = -monoid.weights if isinstance(monoid, CONSTANT) else None
    return weighted_sum(*(t[..., :last].sin() for t in results), seed=seed)


def scanned(comm: Communicator, monoid: Monoid, exchange: ScanExchange):
    """One rank's results, its gradients, and those of a function of its gradients."""
    initial, *own = messages(monoid, comm.size)
    leaves = [own[comm.rank], initial, *monoid.known]
    results = scan_over_ranks(comm, monoid, own[comm.rank], initial, exchange)
    loss = weighed(monoid, results, comm.rank)
    grads = torch.autograd.grad(loss, leaves, create_graph=True)
    second = torch.autograd.grad(weighted_sum(*(g.cos() for g in grads[:1]), seed=comm.rank), leaves)
    return [[t.detach() for t in part] for part in (results, grads, second)]


def folded(monoid: Monoid, size: int):
    """The same of all ranks by plain folds."""
    initial, *own = messages(monoid, size)
    prefixes = [initial]
    for message in own:
        prefixes.append(monoid.combine(prefixes[-1], message))
    results = [(prefixes[rank], prefixes[-1]) for rank in range(size)]
    losses = [weighed(monoid, both, rank) for rank, both in enumerate(results)]
    grads = torch.autograd.grad(torch.stack(losses).sum(), [*own, initial, *monoid.known], create_graph=True)
    sums = [weighted_sum(grads[rank].cos(), seed=rank) for rank in range(size)]
    return results, grads, torch.autograd.grad(torch.stack(sums).sum(), [*own, initial, *monoid.known])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "size", "name"),
    each_pair([*EXCHANGES, ScanExchange("two_level")], (1, 2, 3, 4, 7), MONOIDS),
    ids=lambda value: name_of(value) if isinstance(value, ScanExchange) else str(value),
)
def test_every_monoid_over_every_exchange_is_the_fold(name: str, exchange: ScanExchange, size: int) -> None:
    """Whatever a stretch does to a state, results, gradients and second gradients are those of a left fold."""
    monoid = MONOIDS[name]
    if exchange.algorithm == "two_level":
        exchange = replace(exchange, hosts=hosts(size) if size < 3 else hosts(2, size - 2))
    results, *grads = folded(monoid, size)
    ranks = run_simulated(partial(scanned, monoid=monoid, exchange=exchange), size)
    for rank, (got, *got_grads) in enumerate(ranks):
        for one, want in zip(got, results[rank], strict=True):
            assert_close(one, want, kind="state", what=f"rank {rank}")
        for one, want in zip(got_grads, grads, strict=True):
            assert_close(one[0], want[rank], kind="gradient", what=f"rank {rank}")
    for order, want in enumerate(grads, 1):
        for number in range(1 + len(monoid.known)):
            shares = torch.stack([rank[order][1 + number] for rank in ranks])
            assert_close(shares.sum(0), want[size + number], kind="gradient", what="initial" if not number else "known")


@pytest.mark.parametrize("monoid", MONOIDS.values(), ids=MONOIDS.keys())
def test_monoids_are_associative(monoid: Monoid) -> None:
    """It does not matter which of three messages are combined first, and zeros on either side change no bit."""
    a, b, c = messages(monoid, 2)
    assert_close(monoid.combine(monoid.combine(a, b), c), monoid.combine(a, monoid.combine(b, c)), kind="state")
    nothing = torch.zeros_like(a)
    assert torch.equal(monoid.combine(nothing, a), a) and torch.equal(monoid.combine(a, nothing), a)

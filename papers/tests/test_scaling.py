"""The simulation of clusters, against cases counted by hand and the plans of the exchanges themselves."""

from collections import Counter

import numpy as np
import pytest

from benchmarks.rank_passes import Passed
from dist_attn.costs import Link, ScanMessage, scan_cost, scan_seconds
from dist_attn.layout import SequenceLayout
from dist_attn.sharded.head_reshuffle import head_reshuffle_plans
from dist_attn_papers.studies.cluster import Cluster, Round, all_to_all_rounds, play, ring_round, scan_rounds
from dist_attn_papers.studies.scaling import HERE, points_of
from dist_attn_papers.studies.simulated_attention import FORMS, Shape, break_even, simulate

CARRY, RESHUFFLE, RING = FORMS
SLOW = Link(latency_s=2.0, bytes_per_s=10.0)
FAST = Link(latency_s=1.0, bytes_per_s=100.0)
MESSAGE = ScanMessage(groups=4, sums=99)
TINY = Shape(heads=2, head_size=4, num_random=4, element_bytes=4)


def _cluster(ranks: int, per_host: int | None = None, flops_per_s: float = 1e3) -> Cluster:
    return Cluster(ranks, per_host or ranks, FAST, SLOW, flops_per_s, flops_per_s)


def test_messages_by_hand() -> None:
    """A message takes latency and bytes over bandwidth of its link; who waits for it goes on then."""
    done = play([Round.of([(0, 1, 50.0)]), Round.of([(1, 2, 50.0)])], _cluster(4, 2))
    # 1 + 50 / 100 inside the host of 0 and 1; then 2 + 50 / 10 to the other host.
    assert done.tolist() == [1.5, 8.5, 8.5, 0.0]
    late = play([Round.of([(0, 1, 100.0)])], _cluster(2), np.array([5.0, 20.0]))
    assert late.tolist() == [7.0, 20.0]


def test_a_ring_and_an_all_to_all_by_hand() -> None:
    """Three rounds of the same size among four ranks take three messages' time."""
    assert play([ring_round(4, 100.0)] * 3, _cluster(4)).tolist() == [6.0] * 4
    assert play(all_to_all_rounds(4, 100.0), _cluster(4)).tolist() == [6.0] * 4


@pytest.mark.parametrize(
    ("algorithm", "ranks", "per_host"),
    [
        ("pair", 2, 2),
        ("gather", 5, 5),
        ("log_step", 8, 8),
        ("two_level", 8, 4),
        ("two_level", 12, 4),
    ],
)
def test_scans_send_what_the_formulas_say(algorithm: str, ranks: int, per_host: int) -> None:
    """Bytes and messages of every rank, and the time where all links are alike, are those of the cost formulas."""
    cluster = _cluster(ranks, per_host)
    rounds = scan_rounds(algorithm, MESSAGE, cluster)
    sent, messages = np.zeros(ranks), Counter(int(r) for one in rounds for r in one.senders)
    for one in rounds:
        np.add.at(sent, one.senders, one.sizes)
    costs = [scan_cost(algorithm, MESSAGE, ranks, rank, hosts=cluster.hosts) for rank in range(ranks)]
    assert sent.tolist() == [cost.bytes_sent for cost in costs]
    assert [messages[rank] for rank in range(ranks)] == [cost.messages for cost in costs]
    alike = Cluster(ranks, per_host, FAST, FAST, 1.0, 1.0)
    told = scan_seconds(algorithm, MESSAGE, ranks, FAST, hosts=cluster.hosts, between_hosts=FAST)
    spread = 1.0 if algorithm == "two_level" else 0.0  # its formula takes two messages to one neighbour as one
    assert play(rounds, alike).max() == pytest.approx(told, abs=spread * per_host * FAST.latency_s)


def test_log_steps_of_seven_reach_everybody() -> None:
    """Where P is no power of two the last rank's total goes down a tree: every other rank is told once."""
    rounds = scan_rounds("log_step", MESSAGE, _cluster(7))
    tree = [int(r) for one in rounds[3:] for r in one.receivers]
    assert sorted(tree) == [0, 1, 2, 3, 4, 5]
    had = {6}
    for one in rounds[3:]:
        assert {int(s) for s in one.senders} <= had
        had |= {int(r) for r in one.receivers}


def test_states_by_hand() -> None:
    """Two ranks: the last tokens hide what they can of the one message; its bytes do not depend on the length."""
    cluster = _cluster(2, flops_per_s=TINY.kernel_flops(2))  # a token a second
    bytes_sent = TINY.costs.traffic().carry_bytes
    message_s = 1.0 + bytes_sent / 100.0
    short, long = simulate(CARRY, 4, cluster, TINY), simulate(CARRY, 4000, cluster, TINY)
    assert (short.compute_s, long.compute_s) == (2.0, 2000.0)
    assert short.seconds == pytest.approx(max(2.0, message_s))
    assert long.seconds == pytest.approx(2000.0)
    assert short.bytes_sent == long.bytes_sent == bytes_sent
    alone = simulate(CARRY, 4, _cluster(1, flops_per_s=TINY.kernel_flops(1)), TINY)
    assert (alone.seconds, alone.bytes_sent) == (4.0, 0.0)


def test_a_ring_of_attention_by_hand() -> None:
    """Two ranks, ten tokens each: half a tile hides the one slice or does not, then the last rank attends to it."""
    tile = 4.0 * 8 * 10 * 10 / 1e3
    slice_s = 1.0 + 2 * 10 * 8 * 4 / 100
    found = simulate(RING, 20, _cluster(2), TINY)
    assert found.seconds == pytest.approx(max(tile / 2, slice_s) + tile)
    assert found.compute_s == pytest.approx(1.5 * tile)
    assert found.bytes_sent == 2 * 10 * 8 * 4


@pytest.mark.parametrize(("heads", "ranks"), [(4, 2), (4, 4), (2, 4), (2, 8)])
def test_a_reshuffle_sends_what_its_plan_says(heads: int, ranks: int) -> None:
    """Bytes are those of the plans that ranks exchange by, whether ranks have whole heads or share them."""
    shape, tokens = Shape(heads=heads, head_size=4, num_random=4, element_bytes=4), 32 * ranks
    layout = SequenceLayout.even(tokens, ranks)
    there, back = head_reshuffle_plans(layout, layout, heads, (4, 4, 4), 4, causal=True)
    numbers = [
        sum(
            piece.elements * plan.changes[piece.change].numbers
            for plan in (there, back)
            for receiver, pieces in enumerate(plan.pieces[rank])
            if receiver != rank
            for piece in pieces
        )
        for rank in range(ranks)
    ]
    found = simulate(RESHUFFLE, tokens, _cluster(ranks), shape)
    assert found.bytes_sent == pytest.approx(4 * sum(numbers) / ranks)


def test_break_even_is_where_states_stay_ahead() -> None:
    """From the length on, and at every longer one, states are faster; just before they are not."""
    cluster, lengths = _cluster(8, 4, 1e6), [1 << power for power in range(4, 16)]
    found = break_even(RING, cluster, TINY, lengths)
    assert found is not None

    def ahead(tokens: int) -> bool:
        return simulate(CARRY, tokens, cluster, TINY).seconds < simulate(RING, tokens, cluster, TINY).seconds

    assert all(ahead(n) for n in lengths if n >= found)
    assert found == lengths[0] or not ahead(found // 2)
    assert break_even(RING, cluster, TINY, []) is None


def test_measured_points_are_held_against_the_simulation() -> None:
    """A machine that behaves as simulated is told to: the one rate comes from one rank, the link from outside."""
    message = HERE.costs.traffic().carry_bytes
    one_s = 1000.0
    rate = 32_768 * HERE.kernel_flops(1) / one_s
    two_s = 16_384 * HERE.kernel_flops(2) / rate
    passed = {
        1: [Passed((), (one_s,), (one_s,), (0.0,), 0)],
        2: [Passed((), (two_s,), (two_s,), (0.0,), message)] * 2,
    }
    one, two = points_of(passed, 32_768, FAST, cores=2)
    assert one.time_ratio == pytest.approx(1.0)
    assert two.simulated.bytes_sent == two.bytes_sent == message
    # A message of 266 kB takes 2,661 s on this link, of which the sums of 1,024 tokens hide their own time.
    hidden = two_s * 1024 / 16_384
    assert two.simulated.seconds == pytest.approx(two_s - hidden + 1.0 + message / 100.0)
    shared = points_of(passed, 32_768, FAST, cores=1)[1]
    assert shared.simulated.compute_s == pytest.approx(2 * two_s)

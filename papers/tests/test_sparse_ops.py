"""Sharded = unsharded for selection, routing and up-sampling: who is kept, where they go, and every gradient."""

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn.ops.softmax_attention import KeyValueCache
from dist_attn.sharded import ShardedSequenceOps
from dist_attn_papers.ops import Interpolation, fourier_mix, route_tokens, select_tokens
from tests.support.closeness import assert_close
from tests.support.ranks import Kind, run_ranks
from tests.support.sharded_call import random_tensor

LAYOUTS = [(13,), (5, 8), (9, 0, 4), (0, 1, 12), (13, 0, 0, 0)]
HOW = (Interpolation(), Interpolation("knn", 1), Interpolation("knn", 4))
TOTAL, SIZE, EXPERTS = 13, 3, 4


def _scores(kind: str) -> torch.Tensor:
    """Scores of all tokens: many equal ones, or only those of the first tokens, or of none, high."""
    if kind == "first":
        return (torch.arange(TOTAL) < 4).double()
    if kind == "none":
        return torch.full((TOTAL,), 0.1, dtype=torch.float64)
    return torch.randint(0, 5, (TOTAL,), generator=torch.Generator().manual_seed(3)).double() / 5


def _expert_of(position_N: torch.Tensor, choices: int) -> torch.Tensor:
    """Choices that depend on the position alone, oftener for the first expert."""
    first = (position_N % 5).clamp(max=EXPERTS - 1)
    return torch.stack([first, (first + 1 + position_N % 2) % EXPERTS][:choices], dim=1)


def _call(ops: SequenceOps, x_LC: torch.Tensor, score_L: torch.Tensor, at_most: int | None, choices: int) -> dict:
    """All of it: select, route, give every expert a matrix of its own, restore the order, mix, fill all positions."""
    kept = select_tokens(x_LC, score_L, threshold=0.5, at_most=at_most, ops=ops)
    expert_NK = _expert_of(kept.position_N, choices)
    routed = route_tokens(kept.x_NC, expert_NK, num_experts=EXPERTS, capacity=3, ops=kept.ops)
    matrices = random_tensor(EXPERTS, SIZE, SIZE, seed=5)
    made = [rows.cumsum(0) @ matrix for rows, matrix in zip(routed.by_expert(), matrices, strict=True)]
    z_ND = kept.x_NC + routed.restore_order(torch.cat(made)).sum(0)
    z_ND = z_ND + fourier_mix(z_ND[None], norm="ortho", ops=kept.ops)[0]
    outs = [kept.upsample(z_ND, how) for how in HOW]
    return {
        "positions": kept.position_N,
        "z": z_ND,
        "counts": (kept.total, routed.dropped),
        "outs": outs,
        "loss": sum((out * random_tensor(TOTAL, SIZE, seed=7)[ops.positions(len(x_LC))]).sum() for out in outs),
    }


def _run(comm: Communicator, lengths: tuple[int, ...], scores: str, at_most: int | None, choices: int) -> dict:
    layout = SequenceLayout.from_lengths(lengths)
    own = slice(*layout.range(comm.rank))
    x = random_tensor(TOTAL, SIZE, seed=0)[own].requires_grad_()
    done = _call(ShardedSequenceOps(comm, layout), x, _scores(scores)[own], at_most, choices)
    done["loss"].backward()
    return {key: value for key, value in done.items() if key != "loss"} | {"gradient": x.grad}


def _check(kind: Kind, lengths: tuple[int, ...], scores: str, at_most: int | None, choices: int) -> list[dict]:
    x = random_tensor(TOTAL, SIZE, seed=0).requires_grad_()
    want = _call(LocalSequenceOps(), x, _scores(scores), at_most, choices)
    want["loss"].backward()
    ranks = run_ranks(kind, lambda comm: _run(comm, lengths, scores, at_most, choices), len(lengths))
    assert_close(torch.cat([rank["positions"] for rank in ranks]), want["positions"], kind="exact")
    assert_close(torch.cat([rank["z"] for rank in ranks]), want["z"])
    for number, out in enumerate(want["outs"]):
        assert_close(torch.cat([rank["outs"][number] for rank in ranks]), out)
    assert_close(torch.cat([rank["gradient"] for rank in ranks]), x.grad, kind="gradient")
    assert {rank["counts"] for rank in ranks} == {want["counts"]}
    return ranks


@pytest.mark.parametrize("choices", [1, 2])
@pytest.mark.parametrize(("scores", "at_most"), [("any", None), ("any", 4), ("first", None), ("first", 2), ("none", 5)])
@pytest.mark.parametrize("lengths", LAYOUTS)
def test_over_ranks_as_on_one(lengths, scores, at_most, choices):
    """Kept tokens, dropped ones, values at every position and gradients are those of one rank, and shares are even."""
    ranks = _check("simulated", lengths, scores, at_most, choices)
    shares = [len(rank["positions"]) for rank in ranks]
    assert max(shares) - min(shares) <= 1


def test_fewer_experts_than_ranks_and_second_choices_behind_first_ones():
    """Ranks without experts take part, and an expert that is full drops the same assignments as on one rank."""
    x, expert = random_tensor(6, 2, seed=0), torch.tensor([[0, 1], [0, 1], [1, 0], [1, 0], [0, 1], [1, 0]])
    want = route_tokens(x, expert, num_experts=2, capacity=4)

    def run(comm: Communicator) -> tuple:
        layout = SequenceLayout.from_lengths((2, 1, 3))
        own = slice(*layout.range(comm.rank))
        ops = ShardedSequenceOps(comm, layout)
        routed = route_tokens(x[own], expert[own], num_experts=2, capacity=4, ops=ops)
        return routed.by_expert(), routed.restore_order(routed.x_RC), routed.dropped

    ranks = run_simulated(run, 3)
    for number in range(2):
        assert_close(torch.cat([rows[number] for rows, _, _ in ranks]), want.by_expert()[number], kind="exact")
    assert_close(torch.cat([back for _, back, _ in ranks], dim=1), want.restore_order(want.x_RC), kind="exact")
    assert [dropped for *_, dropped in ranks] == [want.dropped] * 3 == [4] * 3


def test_a_score_that_is_no_number_is_never_the_best():
    """A NaN among scores below the threshold is passed over, on one rank and over three."""
    x, score = random_tensor(4, 2, seed=0), torch.tensor([torch.nan, 0.1, 0.3, 0.2])

    def run(comm: Communicator) -> list[int]:
        layout = SequenceLayout.from_lengths((1, 2, 1))
        own = slice(*layout.range(comm.rank))
        kept = select_tokens(x[own], score[own], threshold=0.5, ops=ShardedSequenceOps(comm, layout))
        return kept.position_N.tolist()

    assert select_tokens(x, score, threshold=0.5).position_N.tolist() == [2]
    assert [position for own in run_simulated(run, 3) for position in own] == [2]


@pytest.mark.parametrize(("cache", "keys"), [("spread", [3, 3]), ("whole", [6, 6])])
def test_kept_tokens_are_cached_as_all_tokens_are(cache, keys):
    """Every rank has all keys of the kept tokens where its caches are whole, else those of its own."""

    def run(comm: Communicator) -> int:
        ops = ShardedSequenceOps(comm, SequenceLayout.even(8, 2), cache=cache)
        kept = select_tokens(torch.ones(4, 2), torch.ones(4), threshold=0.5, at_most=6, ops=ops)
        q_BHLK = torch.ones(1, 1, len(kept.position_N), 2)
        before = KeyValueCache(q_BHLK[:, :, :0], q_BHLK[:, :, :0])
        return kept.ops.softmax_attention_streaming(q_BHLK, q_BHLK, q_BHLK, before)[1].k_BGSK.shape[2]

    assert run_simulated(run, 2) == keys


@pytest.mark.parametrize("lengths", [(1, 7), (5, 3), (0, 2, 6)])
@pytest.mark.parametrize("at_most", [2, 4])
@pytest.mark.parametrize("numbers", [0, 1, 3])
def test_more_scores_than_numbers_are_asked_for(numbers, at_most, lengths):
    """Where no limit but their count decides, scores of NaN and -inf fill up as on one rank, the earlier ones first."""
    x, score = random_tensor(8, 2, seed=0), torch.full((8,), torch.nan)
    score[1], score[:numbers] = -torch.inf, torch.arange(1.0, 1.0 + numbers)

    def run(comm: Communicator) -> list[int]:
        layout = SequenceLayout.from_lengths(lengths)
        own = slice(*layout.range(comm.rank))
        ops = ShardedSequenceOps(comm, layout)
        kept = select_tokens(x[own], score[own], threshold=-torch.inf, at_most=at_most, ops=ops)
        return kept.position_N.tolist()

    want = select_tokens(x, score, threshold=-torch.inf, at_most=at_most).position_N.tolist()
    assert len(want) == at_most
    assert [position for own in run_simulated(run, len(lengths)) for position in own] == want


def test_what_travels():
    """Selection sends two numbers a rank, kept rows and positions once; only rows whose rank changes are sent."""

    def run(comm: Communicator) -> dict[str, int]:
        layout = SequenceLayout.from_lengths((9, 0, 4))
        own = slice(*layout.range(comm.rank))
        ops = ShardedSequenceOps(comm, layout)
        comm.traffic.clear()
        select_tokens(random_tensor(TOTAL, SIZE, seed=0)[own], _scores("first")[own], threshold=0.5, ops=ops)
        sent: dict[str, int] = {}
        for event in comm.traffic.events:
            sent[event.label] = sent.get(event.label, 0) + event.bytes_sent
        return sent

    first, *_ = run_simulated(run, 3)
    # Rank 0 has all 4 kept tokens and keeps 2.
    assert first["candidates"] == 2 * 2 * 8
    assert first["kept tokens"] == 2 * SIZE * 8
    assert first["kept positions"] == 2 * 8

"""The million-scale model as ranks grow: with an expert more for every rank its cost is linear in the length.

A Unified View of Long-Sequence Models, Sec. 10.2, calls its cost asymptotically linear and does not measure it; that
needs a constant number of tokens for each expert. Beside it stands the same model with one expert, which attends to all
that is kept.
"""

import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.measured import Axes, Table
from dist_attn.comm.torch_dist import TorchDistCommunicator
from dist_attn.layout import SequenceLayout
from dist_attn.sharded import ShardedSequenceOps
from dist_attn_papers.million.config import MillionConfig
from dist_attn_papers.million.model import MillionModel
from dist_attn_papers.tables.arms import of_arm
from dist_attn_papers.tables.experiment import Budget, Done, Experiment, Job, Scores, Watch
from dist_attn_papers.tables.finding import Report

__all__ = ["MILLION_SCALING"]

TIMEOUT_S = 600.0
RANKS = (1, 2, 4)
TOKENS, KEPT, ROUNDS = 65_536, 4096, 3  # of a rank, of a rank, and steps of which the fastest counts
SMOKE_TOKENS, SMOKE_KEPT = 256, 32
SIZE, HEADS, MLP, VOCABULARY, CLASSES = 64, 4, 128, 256, 7
ARMS = {
    "an expert for every rank": "paper",
    "one expert for all": "single",
}


@dataclass(frozen=True)
class Plan:
    """So many ranks, tokens and kept tokens for each of them, experts in all, and steps."""

    ranks: int
    tokens: int
    kept: int
    experts: int
    rounds: int

    def model(self) -> MillionConfig:
        """At first everything would be kept, so the limit is what is."""
        return MillionConfig.model_validate(
            {
                "vocab_size": VOCABULARY,
                "num_classes": CLASSES,
                "hidden_size": SIZE,
                "num_heads": HEADS,
                "mlp_size": MLP,
                "selector": {"initial_logit": 4.0, "most_tokens": self.kept * self.ranks},
                "router": {"num_experts": self.experts},
                "max_tokens": self.tokens * self.ranks,
            }
        )


def _jobs(budget: Budget, seeds: Sequence[int]) -> list[Job]:
    tokens, kept, rounds = (SMOKE_TOKENS, SMOKE_KEPT, 1) if budget.smoke else (TOKENS, KEPT, ROUNDS)
    return [
        _job(f"{arm}-{ranks}", Plan(ranks, tokens, kept, ranks if arm == "paper" else 1, rounds), seed)
        for seed in seeds[:1]
        for arm in ARMS.values()
        for ranks in RANKS
    ]


def _job(arm: str, plan: Plan, seed: int) -> Job:
    settings = {**vars(plan), "model": plan.model().model_dump(mode="json")}

    def work(folder: Path, watch: Watch) -> Scores:
        # Ranks are forked from a process that has imported all of this once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        with tempfile.TemporaryDirectory() as place, context.Pool(plan.ranks) as pool:
            store = (Path(place) / "store").as_uri()
            of_ranks = pool.starmap(_rank_main, [(rank, store, plan, seed) for rank in range(plan.ranks)], chunksize=1)
        names = of_ranks[0]
        scores = {f"{name}_most": max(one[name] for one in of_ranks) for name in names}
        scores["cpu_seconds_all"] = sum(one["cpu_seconds"] for one in of_ranks)
        watch.tell(f"{plan.ranks * plan.tokens:,} tokens: {scores['cpu_seconds_most']:.2f} s of the busiest rank")
        return scores

    return Job(arm, seed, settings, work)


def _rank_main(rank: int, store: str, plan: Plan, seed: int) -> dict[str, float]:
    """The least processor time of a training step of this rank, its bytes, and what became of the tokens."""
    torch.set_num_threads(1)
    with TorchDistCommunicator.connect(
        "gloo", timeout_s=TIMEOUT_S, device=torch.device("cpu"), meeting=store, rank=rank, size=plan.ranks
    ) as comm:
        torch.manual_seed(seed)
        model = MillionModel(plan.model()).train()
        total = plan.tokens * plan.ranks
        layout = SequenceLayout.even(total, plan.ranks)
        tokens_L = torch.randint(VOCABULARY, (total,), generator=torch.Generator().manual_seed(seed))
        own_L, ops = tokens_L[slice(*layout.range(rank))], ShardedSequenceOps(comm, layout)
        times: list[float] = []
        for _ in range(plan.rounds + 1):
            comm.barrier()
            comm.traffic.clear()
            began = time.process_time()
            model.zero_grad()
            reading = model.read(own_L, ops)
            loss = model.classify(reading, ops).logsumexp(0) + model.side_loss(reading)
            (loss / plan.ranks).backward()
            times.append(time.process_time() - began)
        if rank == 0:
            print(f"{plan.ranks} ranks, {plan.experts} experts: {times}", file=sys.stderr, flush=True)
        sent, tally = comm.traffic.bytes_sent, reading.tally
    # The first step makes what the later ones find.
    return {"cpu_seconds": min(times[1:]), "sent": sent, "kept": tally.kept, "dropped": tally.dropped / tally.assigned}


def _report(done: Sequence[Done]) -> Report:
    rows = []
    for words, arm in ARMS.items():
        base = next(iter(of_arm(done, f"{arm}-1", "cpu_seconds_all")), None)
        for one in (one for one in done if one.arm.startswith(f"{arm}-")):
            plan, scores = one.settings, one.scores
            tokens = plan["ranks"] * plan["tokens"]
            grown = "" if base is None else f"{scores['cpu_seconds_all'] / base / plan['ranks']:.2f}"
            rows.append(
                (
                    words,
                    str(plan["ranks"]),
                    f"{tokens:,}",
                    f"{scores['kept_most']:,.0f}",
                    f"{scores['cpu_seconds_most']:.2f}",
                    f"{1e6 * scores['cpu_seconds_all'] / tokens:.1f}",
                    grown,
                    f"{scores['sent_most']:,.0f}",
                    f"{100 * scores['dropped_most']:.1f} %",
                )
            )
    columns = (
        "experts",
        "ranks",
        "tokens",
        "kept",
        "processor seconds of the busiest rank",
        "microseconds per token, all ranks",
        "over 1 rank",
        "bytes that a rank sends at most",
        "found no room",
    )
    title = "A training step (forward and backward) of one sequence"
    return Report((Table(title, columns, tuple(rows)),), NOTES, (("seconds of the busiest rank", _draw(done)),))


def _draw(done: Sequence[Done]) -> Callable[[Axes], None]:
    def draw(axes: Axes) -> None:
        for words, arm in ARMS.items():
            found = {
                one.settings["ranks"] * one.settings["tokens"]: one.scores["cpu_seconds_most"]
                for one in done
                if one.arm.startswith(f"{arm}-")
            }
            axes.plot(list(found), list(found.values()), marker="o", label=words)
        axes.set(xscale="log", yscale="log", xlabel="tokens; a rank more for every 65,536")
        axes.legend(fontsize=8)

    return draw


NOTES = (
    f"{TOKENS:,} tokens and {KEPT:,} kept ones for every rank, width {SIZE}, {HEADS} heads, one layer, Fourier mixing; "
    "one thread per rank, ranks are processes over gloo. Processor time, not elapsed time, so that ranks may share "
    "cores; the fastest of three steps. Random tokens and a model without training: what is kept is the limit.",
    "Time of the busiest rank that does not grow while ranks and tokens do is cost linear in the length.",
)

MILLION_SCALING = Experiment(
    "uv-million-scaling",
    "Unified View, Sec. 10: is the million-scale model's cost linear when every rank brings an expert?",
    ("papers/tests/test_million.py", "papers/tests/test_million_tokens.py"),
    _jobs,
    _report,
)

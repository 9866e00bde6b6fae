"""A job that trains a small language model on shuffled books and reads the held-out one in windows of some lengths."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from dist_attn.checkpoints import load_model_and_tokeniser, save_model
from dist_attn.models import LanguageModel, LanguageModelConfig
from dist_attn.text import load_tokeniser
from dist_attn.training.run_log import Metrics
from dist_attn_papers.studies.perplexity_by_position import token_nats
from dist_attn_papers.tables.experiment import Job, Scores, Watch
from dist_attn_papers.tables.made_once import make_once
from dist_attn_papers.tables.shuffled_text import BookText, prepare_books
from dist_attn_papers.tables.training_job import count_parameters, training_job, with_warmup

__all__ = [
    "TRAINED",
    "VOCAB_SIZE",
    "ShuffledBooksModel",
    "ShuffledBooksRun",
    "shuffled_books_job",
    "late",
    "perplexity",
]

VOCAB_SIZE = 1024
EMBEDDING_DEVIATION = 2**-0.5  # of a sinusoid's numbers
TRAINED = "train_perplexity"
OPTIMISER = {
    "kind": "muon",
    "learning_rate": 1e-2,
    "matrix_learning_rate": 1e-2,
    "final_ratio": 0.05,
    "weight_decay": 0.05,
}


@dataclass(frozen=True)
class ShuffledBooksModel:
    """The mixer without its sizes, and the positions of its tokens; the rest is the same for all arms."""

    mixer: Mapping[str, Any]
    positions: str = "none"
    hidden_size: int = 128
    num_layers: int = 3
    num_heads: int = 2
    mlp_size: int = 512

    def section(self) -> dict[str, Any]:
        """The section [model] of a training file."""
        values = asdict(self)
        heads = values.pop("num_heads")
        values["mixer"] = {"hidden_size": self.hidden_size, "num_heads": heads, **self.mixer}
        # Weights of its own: with embeddings as long as sinusoids the logits would begin far too large.
        return {"kind": "language_model", "vocab_size": VOCAB_SIZE, "readout": "own", **values}


@dataclass(frozen=True)
class ShuffledBooksRun:
    """How long is trained on what, and in windows of which lengths the held-out book is read.

    `scored` tokens are read, a multiple of every length, each window from the empty state.
    """

    segment: int
    batch: int
    steps: int
    parts: int
    lengths: tuple[int, ...]
    scored: int


def perplexity(length: int) -> str:
    """The name of the score: perplexity of all tokens in windows of so many."""
    return f"perplexity_at_{length}"


def late(length: int) -> str:
    """The name of the score: perplexity of the tokens in the second half of each window of so many."""
    return f"late_perplexity_at_{length}"


def shuffled_books_job(arm: str, seed: int, model: ShuffledBooksModel, run: ShuffledBooksRun) -> Job:
    """One model at one seed; texts and vocabulary lie beside the arms, made by the job that comes first."""
    settings = {
        "model": model.section(),
        "embedding_deviation": EMBEDDING_DEVIATION,
        "run": asdict(run),
        "optimiser": OPTIMISER,
        "seed": seed,
    }

    def work(folder: Path, watch: Watch) -> Scores:
        text = prepare_books(folder.parents[1] / "text", run.parts, VOCAB_SIZE)
        sections = _sections(model, run, text)
        sections["run"]["begin_from"] = str(_first_model(folder / "first", model, seed, text))
        return training_job(arm, seed, sections, lambda *found: _measure(run, text, *found)).work(folder, watch)

    return Job(arm, seed, settings, work)


def _sections(model: ShuffledBooksModel, run: ShuffledBooksRun, text: BookText) -> dict[str, Any]:
    return {
        "model": model.section(),
        "data": {
            "train": [str(text.train)],
            "tokeniser": str(text.tokeniser),
            "batch": run.batch,
            "segment": run.segment,
            "stateful": False,
        },
        "optimiser": with_warmup(OPTIMISER, run.steps),
        "run": {
            "steps": run.steps,
            "log_every": max(1, run.steps // 10),
            "evaluate_every": run.steps,
            "checkpoint_every": max(1, run.steps // 4),
        },
    }


def _first_model(folder: Path, model: ShuffledBooksModel, seed: int, text: BookText) -> Path:
    """Weights to begin with in which a token is as long as its sinusoids, as in Vaswani et al. 2017.

    There embeddings are multiplied by the root of their size. Short beside unit sinusoids, tokens would be learnt late.
    """

    def make(beside: Path) -> None:
        torch.manual_seed(seed)
        first = LanguageModel(LanguageModelConfig.model_validate(model.section()))
        torch.nn.init.normal_(first.embedding.weight, std=EMBEDDING_DEVIATION)
        save_model(first, beside, tokeniser=load_tokeniser(text.tokeniser))

    return make_once(folder, make)


def _measure(run: ShuffledBooksRun, text: BookText, folder: Path, last: Metrics, watch: Watch) -> Scores:
    model, _ = load_model_and_tokeniser(folder)
    tokens = text.held_out(run.scored + 1)
    scores = {
        "parameters": float(count_parameters(model)),
        TRAINED: math.exp(last["loss"]),
    }
    for length in run.lengths:
        nats_NL = token_nats(model, tokens, length).reshape(-1, length)
        scores[perplexity(length)] = math.exp(nats_NL.mean())
        scores[late(length)] = math.exp(nats_NL[:, length // 2 :].mean())
        watch.tell(f"windows of {length}: perplexity {scores[perplexity(length)]:.2f}")
    return scores

"""Small language models that read one novel after the other in blocks, and what the held-out novels cost them."""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from dist_attn.checkpoints import load_model_and_tokeniser
from dist_attn.text.bpe import train_bpe
from dist_attn.training.run_log import Metrics
from dist_attn_papers.studies.perplexity_by_position import token_nats
from dist_attn_papers.tables.experiment import Budget, Job, Scores, Watch
from dist_attn_papers.tables.made_once import make_once
from dist_attn_papers.tables.novels import DEVELOPMENT, FOLDER, NOVELS, TEST, find_novel
from dist_attn_papers.tables.training_job import count_parameters, share_tokens, training_job, with_warmup

__all__ = [
    "BATCH",
    "BLOCK",
    "DEVELOPMENT",
    "FOLDER",
    "HEADS",
    "LAYERS",
    "MLP",
    "TEST",
    "TRAIN",
    "VOCABULARY",
    "WIDTH",
    "BookModel",
    "book_scores",
    "books_in_order",
    "count_parameters",
    "tokeniser_of",
]

TRAIN = tuple(name for name in NOVELS if name not in (DEVELOPMENT, TEST))
# The paper's block, in training and evaluation: "without access to the context from previous mini-batches".
BLOCK = 512
VOCABULARY, SMOKE_VOCABULARY = 2048, 320
DEVELOPMENT_BYTES, TEST_BYTES, SMOKE_BYTES = 300_000, 600_000, 4_000
WIDTH, LAYERS, HEADS, MLP = 128, 3, 2, 512
BATCH, STEPS = 4, 900
OPTIMISER = {
    "kind": "muon",
    "learning_rate": 4e-3,
    "matrix_learning_rate": 3e-3,
    "final_ratio": 0.02,
    "weight_decay": 0.1,
}


@dataclass(frozen=True)
class BookModel:
    """A language model on the books: everything but its mixer is the same for all. `steps` are for scale 1."""

    # The section [model.mixer], sizes left out.
    mixer: Mapping[str, Any]
    # The state goes on into the next block, in training and in the scores.
    stateful: bool = False
    steps: int = STEPS
    mlp_size: int = MLP
    # The mixer is given whole, sizes included.
    whole: bool = False
    positions: Literal["learned", "sinusoidal", "none"] = "learned"

    def job(self, arm: str, seed: int, budget: Budget) -> Job:
        """Train with this seed (of weights, random features and the order of books), and score the held-out books."""
        settings = self._settings(seed, budget)

        def work(folder: Path, watch: Watch) -> Scores:
            made = folder.parents[1]
            share_tokens(made, folder)
            sections = _sections(
                settings, tokeniser_of(made, settings["data"]["train"], settings["model"]["vocab_size"])
            )

            def measure(model: Path, last: Metrics, watch: Watch) -> Scores:
                return book_scores(model, settings["scored_bytes"], stateful=self.stateful, watch=watch)

            return training_job(arm, seed, sections, measure).work(folder, watch)

        return Job(arm, seed, settings, work)

    def model(self, seed: int, budget: Budget) -> dict[str, Any]:
        """The section [model]."""
        # Positions begin anew with every block, whether or not a state goes on, as the paper's segments do.
        learned = {"kind": "learned", "length": BLOCK, "beyond": "repeat"}
        sized = {} if self.whole else {"hidden_size": WIDTH, "num_heads": HEADS, "short_convolution": 0}
        mixer = {**sized, **self.mixer}
        if mixer["kind"].startswith("rfa"):
            mixer.setdefault("seed", 1000 * seed)  # one more for every layer
        sizes = {"hidden_size": WIDTH, "num_layers": LAYERS, "mlp_size": self.mlp_size}
        vocabulary = SMOKE_VOCABULARY if budget.smoke else VOCABULARY
        positions = learned if self.positions == "learned" else self.positions
        return {"kind": "language_model", "vocab_size": vocabulary, **sizes, "mixer": mixer, "positions": positions}

    def _settings(self, seed: int, budget: Budget) -> dict[str, Any]:
        steps = budget.steps(self.steps)
        scored = {DEVELOPMENT: DEVELOPMENT_BYTES, TEST: TEST_BYTES}
        return {
            "model": self.model(seed, budget),
            "data": {
                "folder": str(FOLDER),
                "train": list(books_in_order(TRAIN[-3:-2] if budget.smoke else TRAIN, seed)),
                "batch": BATCH,
                "segment": BLOCK,
                "stateful": self.stateful,
            },
            "optimiser": with_warmup(OPTIMISER, steps),
            "run": {
                "steps": steps,
                "log_every": 50,
                "evaluate_every": steps,
                "checkpoint_every": 300,
                "keep_checkpoints": 1,
            },
            "scored_bytes": dict.fromkeys(scored, SMOKE_BYTES) if budget.smoke else scored,
        }


def books_in_order(books: Sequence[str], seed: int) -> tuple[str, ...]:
    """The books beginning with another one for each seed: a run that sees a part of them sees another part."""
    start = 5 * seed % len(books)
    return (*books[start:], *books[:start])


def tokeniser_of(made: Path, books: Sequence[str], vocabulary: int) -> Path:
    """The folder below `made` with a BPE vocabulary of these books, made once. The books' order does not matter.

    Raises: ConfigError naming a book that is missing.
    """
    names = sorted(books)
    digest = hashlib.sha256(json.dumps([names, vocabulary]).encode()).hexdigest()[:8]
    return make_once(
        made / f"tokeniser-{digest}",
        lambda folder: train_bpe([find_novel(name) for name in names], vocabulary).save(folder),
    )


def book_scores(
    model_folder: Path, scored_bytes: Mapping[str, int], *, stateful: bool, watch: Watch
) -> dict[str, float]:
    """What the beginnings of the held-out books cost a model, in blocks that stand alone or with the state carried on.

    `development_` and `test_`: `perplexity` per token, `bits_per_byte`; with `stateful` also what the same model costs
    where the state is reset (`…_reset`).
    """
    model, tokeniser = load_model_and_tokeniser(model_folder)
    scores: dict[str, float] = {"parameters": count_parameters(model)}
    readings = {"": None, "_reset": BLOCK} if stateful else {"": BLOCK}
    for split, name in (("development", DEVELOPMENT), ("test", TEST)):
        tokens = tokeniser.encode(find_novel(name).read_bytes()[: scored_bytes[name]])
        num_bytes = int(tokeniser.byte_lengths(tokens[1:]).sum())
        for suffix, reset in readings.items():
            nats = token_nats(model, tokens, reset)
            scores[f"{split}_perplexity{suffix}"] = math.exp(float(nats.mean()))
            scores[f"{split}_bits_per_byte{suffix}"] = float(nats.sum()) / math.log(2) / num_bytes
        watch.tell(f"{name}: perplexity {scores[f'{split}_perplexity']:.2f}")
    return scores


def _sections(settings: Mapping[str, Any], tokeniser: Path) -> dict[str, Any]:
    """The sections of a training file, with the tokeniser that was made for them."""
    sections = {name: settings[name] for name in ("model", "data", "optimiser", "run")}
    for name in sections["data"]["train"]:
        find_novel(name)
    return {**sections, "data": {**sections["data"], "tokeniser": str(tokeniser)}}

"""Small translators on Multi30k, German to English: one vocabulary and training for all arms, BLEU on the test set."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dist_attn.checkpoints import load_any_model
from dist_attn.text import Tokeniser, load_tokeniser
from dist_attn.training.averaging import average_folders
from dist_attn.training.run_log import Metrics
from dist_attn_papers.tables.experiment import Budget, Job, Scores, Watch
from dist_attn_papers.tables.made_once import make_once
from dist_attn_papers.tables.multi30k import (
    FOLDER,
    SIDES,
    SOURCE,
    TARGET,
    TEST,
    TRAIN,
    VALIDATION,
    bleu_of,
    encoded_sources,
    read_lines,
    tokeniser_of,
    translated,
)
from dist_attn_papers.tables.training_job import count_parameters, training_job, with_warmup
from dist_attn_papers.translation.beam_search import BeamSpec
from dist_attn_papers.translation.model import EncoderDecoder

__all__ = ["BEAM", "PENALTY", "STEPS", "Translator", "averaged_model"]

VOCABULARY, SMOKE_VOCABULARY = 4000, 300
WIDTH, LAYERS, HEADS, MLP = 128, 2, 4, 512
BATCH, STEPS, LONGEST = 128, 600, 80
SMOKE_BATCH, SMOKE_PAIRS = 8, 4
# The paper's: the last checkpoints averaged, and how the search goes. Checkpoints are a fiftieth of the training apart.
AVERAGED, APART = 10, 50
BEAM, PENALTY = 4, 0.6
OPTIMISER = {
    "kind": "muon",
    "learning_rate": 4e-3,
    "matrix_learning_rate": 3e-3,
    "final_ratio": 0.05,
    "weight_decay": 0.05,
    "betas": [0.9, 0.98],
}


@dataclass(frozen=True)
class Translator:
    """What the arms differ in: attention of the encoder, of the decoder's tokens to each other, and to the source.

    Each holds the options of its section without sizes; `positions` are those of encoder and decoder.
    """

    mixer: Mapping[str, Any]
    cross: Mapping[str, Any]
    encoder: Mapping[str, Any] | None = None  # None: softmax
    positions: str = "learned"

    def job(self, arm: str, seed: int, budget: Budget) -> Job:
        """Train with this seed (of weights, random features and the order of pairs), and translate the test set."""
        settings = self._settings(seed, budget)

        def work(folder: Path, watch: Watch) -> Scores:
            sections = {name: settings[name] for name in ("model", "data", "objective", "optimiser", "run")}
            tokeniser = tokeniser_of(
                folder.parents[1], settings["data"]["train_source"], settings["model"]["vocab_size"]
            )
            sections["data"] = {**sections["data"], "tokeniser": str(tokeniser)}
            pairs = settings["test_pairs"]

            def measure(model: Path, last: Metrics, watch: Watch) -> Scores:
                return _scores(model, last, pairs, watch)

            return training_job(arm, seed, sections, measure).work(folder, watch)

        return Job(arm, seed, settings, work)

    def model(self, seed: int, budget: Budget) -> dict[str, Any]:
        """The section [model]."""
        sizes = {"hidden_size": WIDTH, "num_heads": HEADS}
        mixer, cross = ({**sizes, **options} for options in (self.mixer, self.cross))
        if mixer["kind"].startswith("rfa"):
            mixer["seed"] = 1000 * seed  # one more for every layer
        if cross["attention"] == "rfa":
            cross["seed"] = 1000 * seed + 500
        encoder = {"kind": "bidirectional", **sizes, **(self.encoder or {"attention": "softmax"})}
        learned = self.positions == "learned"
        return {
            "kind": "encoder_decoder",
            "vocab_size": SMOKE_VOCABULARY if budget.smoke else VOCABULARY,
            "encoder": {
                "hidden_size": WIDTH,
                "num_layers": LAYERS,
                "mlp_size": MLP,
                "mixer": encoder,
                "positions": self.positions,
                **({"max_length": LONGEST + 1} if learned else {}),
            },
            "decoder": {
                "num_layers": LAYERS,
                "mlp_size": MLP,
                "mixer": mixer,
                "cross": cross,
                "positions": {"kind": "learned", "length": LONGEST + 1} if learned else self.positions,
            },
        }

    def _settings(self, seed: int, budget: Budget) -> dict[str, Any]:
        steps = budget.steps(STEPS, smoke=4)
        train = VALIDATION if budget.smoke else TRAIN
        return {
            "model": self.model(seed, budget),
            "data": {
                "kind": "parallel_text",
                "folder": FOLDER,
                **{f"train_{side}": f"{train}.{language}.gz" for side, language in SIDES},
                **{f"validation_{side}": f"{VALIDATION}.{language}.gz" for side, language in SIDES},
                "batch": SMOKE_BATCH if budget.smoke else BATCH,
                "max_length": LONGEST,
            },
            "objective": {"label_smoothing": 0.1},
            "optimiser": with_warmup(OPTIMISER, steps),
            "run": {
                "steps": steps,
                "log_every": 50,
                "evaluate_every": steps,
                "checkpoint_every": max(1, steps // APART),
                "keep_checkpoints": AVERAGED,
            },
            "test_pairs": SMOKE_PAIRS if budget.smoke else 1000,
        }


def averaged_model(run: Path) -> tuple[EncoderDecoder, Tokeniser]:
    """The average of a run's last checkpoints, made once; checkpoints that are in it are then deleted, but the last."""
    folder = run / "averaged"
    if not folder.exists():
        checkpoints = sorted((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))
        make_once(folder, lambda beside: average_folders(checkpoints[-AVERAGED:], beside))
        for checkpoint in checkpoints[:-1]:
            shutil.rmtree(checkpoint)
    model = load_any_model(folder)
    assert isinstance(model, EncoderDecoder)  # what the run trained
    return model.eval(), load_tokeniser(folder)


def _scores(model_folder: Path, last: Metrics, pairs: int, watch: Watch) -> Scores:
    model, tokeniser = averaged_model(model_folder.parent)
    sources = encoded_sources(read_lines(TEST, SOURCE)[:pairs], tokeniser)
    references = [line.decode() for line in read_lines(TEST, TARGET)[:pairs]]
    texts = translated(model, tokeniser, sources, BeamSpec(BEAM, LONGEST, PENALTY))
    bleu = bleu_of(texts, references)
    watch.tell(f"BLEU {bleu:.2f}; {texts[0]!r} for {references[0]!r}")
    return {
        "parameters": count_parameters(model),
        "bleu": bleu,
        "validation_perplexity": last["perplexity"],
    }

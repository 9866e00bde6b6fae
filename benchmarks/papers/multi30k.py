"""Small translators on Multi30k, German to English: one vocabulary and training for all arms, BLEU on the test set."""

import gzip
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.papers.experiment import Budget, Job, Scores, Watch
from benchmarks.papers.training_job import training_job
from dist_attn.checkpoints import load_any_model
from dist_attn.errors import ConfigError
from dist_attn.generation import BeamSpec
from dist_attn.generation.translation import translate
from dist_attn.models import EncoderDecoder
from dist_attn.text import Tokeniser, load_tokeniser
from dist_attn.text.train import train_bpe
from dist_attn.training.averaging import average_folders
from dist_attn.training.run_log import Metrics

__all__ = ["BEAM", "PENALTY", "TEST", "Translator", "averaged_model", "bleu_of", "encoded_sources", "read_lines"]

FOLDER = "data/multi30k"
SOURCE, TARGET = "de", "en"
TRAIN, VALIDATION, TEST = "train", "val", "test_2016_flickr"
VOCABULARY, SMOKE_VOCABULARY = 4000, 300
WIDTH, LAYERS, HEADS, MLP = 128, 2, 4, 512
BATCH, STEPS, LONGEST = 128, 1400, 80
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
            tokeniser = _tokeniser(folder.parents[1], settings["data"]["train_source"], settings["model"]["vocab_size"])
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
                **{f"train_{side}": f"{train}.{language}.gz" for side, language in _SIDES},
                **{f"validation_{side}": f"{VALIDATION}.{language}.gz" for side, language in _SIDES},
                "batch": SMOKE_BATCH if budget.smoke else BATCH,
                "max_length": LONGEST,
            },
            "objective": {"label_smoothing": 0.1},
            "optimiser": {**OPTIMISER, "warmup_steps": max(1, steps // 10)},
            "run": {
                "steps": steps,
                "log_every": 50,
                "evaluate_every": steps,
                "checkpoint_every": max(1, steps // APART),
                "keep_checkpoints": AVERAGED,
            },
            "test_pairs": SMOKE_PAIRS if budget.smoke else 1000,
        }


_SIDES = (("source", SOURCE), ("target", TARGET))


def read_lines(name: str, language: str) -> list[bytes]:
    """The sentences of one side of a part of Multi30k.

    Raises: ConfigError naming a file that is missing.
    """
    path = Path(FOLDER) / f"{name}.{language}.gz"
    if not path.is_file():
        raise ConfigError(f"{path} is not there; put Multi30k into {FOLDER}, as examples/train-translation.toml has it")
    return gzip.decompress(path.read_bytes()).splitlines()


def encoded_sources(lines: Sequence[bytes], tokeniser: Tokeniser) -> list[list[int]]:
    """Sources as the encoder takes them, with their end token."""
    end = tokeniser.end_token
    assert end is not None  # the vocabulary is made with one
    return [[*map(int, tokeniser.encode(line)), end] for line in lines]


def averaged_model(run: Path) -> tuple[EncoderDecoder, Tokeniser]:
    """The average of a run's last checkpoints, made once; checkpoints that are in it are then deleted, but the last."""
    folder = run / "averaged"
    if not folder.exists():
        checkpoints = sorted((run / "checkpoints").glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))
        beside = folder.with_name(f"averaged.{os.getpid()}")
        average_folders(checkpoints[-AVERAGED:], beside)
        beside.rename(folder)
        for checkpoint in checkpoints[:-1]:
            shutil.rmtree(checkpoint)
    model = load_any_model(folder)
    assert isinstance(model, EncoderDecoder)  # what the run trained
    return model.eval(), load_tokeniser(folder)


def bleu_of(hypotheses: Sequence[str], references: Sequence[str]) -> float:
    """BLEU of whole translations, by sacreBLEU with its own tokenisation (13a), cased.

    Raises: ConfigError where sacrebleu is not installed.
    """
    try:
        import sacrebleu
    except ImportError:
        raise ConfigError(
            "BLEU is counted by sacrebleu, which is not installed: pip install 'dist-attn[dev]'"
        ) from None
    return float(sacrebleu.corpus_bleu(list(hypotheses), [list(references)]).score)


def _scores(model_folder: Path, last: Metrics, pairs: int, watch: Watch) -> Scores:
    model, tokeniser = averaged_model(model_folder.parent)
    sources = encoded_sources(read_lines(TEST, SOURCE)[:pairs], tokeniser)
    references = [line.decode() for line in read_lines(TEST, TARGET)[:pairs]]
    end = tokeniser.end_token
    assert end is not None  # as above
    found = translate(model, sources, BeamSpec(BEAM, LONGEST, PENALTY), end_token=end)
    texts = [tokeniser.decode(list(best.tokens)).decode(errors="replace") for best, *_ in found]
    bleu = bleu_of(texts, references)
    watch.tell(f"BLEU {bleu:.2f}; {texts[0]!r} for {references[0]!r}")
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "bleu": bleu,
        "validation_perplexity": last["perplexity"],
    }


def _tokeniser(made: Path, source: str, vocabulary: int) -> Path:
    """A BPE vocabulary of both sides of the training text, made once below `made`."""
    name = source.partition(".")[0]
    folder = made / f"tokeniser-{name}-{vocabulary}"
    if not folder.exists():
        beside = made / f"{folder.name}.{os.getpid()}"
        beside.mkdir(parents=True)
        texts = [beside / f"{name}.{language}" for language in (SOURCE, TARGET)]
        for path, language in zip(texts, (SOURCE, TARGET), strict=True):
            path.write_bytes(b"\n".join(read_lines(name, language)))
        train_bpe(texts, vocabulary).save(beside / "tokeniser")
        (beside / "tokeniser").rename(folder)
        shutil.rmtree(beside)
    return folder

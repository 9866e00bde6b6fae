"""Translators of Random Feature Attention's Appendix C: trained, begun from one another, or read as they are."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from dist_attn.checkpoints import load_any_model, save_model
from dist_attn.errors import ConfigError, EngineError
from dist_attn.models import build_model
from dist_attn.text import Tokeniser, load_tokeniser
from dist_attn.training.run_log import Metrics
from dist_attn_papers.tables.experiment import Budget, Job, Scores, Watch
from dist_attn_papers.tables.made_once import make_once
from dist_attn_papers.tables.multi30k import (
    FOLDER,
    SIDES,
    SOURCE,
    TARGET,
    TRAIN,
    VALIDATION,
    bleu_of,
    encoded_sources,
    end_of,
    read_lines,
    tokeniser_of,
    translated,
)
from dist_attn_papers.tables.training_job import model_folder, share_tokens, training_job, with_warmup
from dist_attn_papers.translation.beam_search import BeamSpec
from dist_attn_papers.translation.config import EncoderDecoderConfig
from dist_attn_papers.translation.model import EncoderDecoder

__all__ = [
    "ATTENTION",
    "SmallTranslator",
    "held_out",
    "losses",
    "read_job",
    "train_job",
    "with_attention_reset",
    "with_attention_swapped",
]


ATTENTION = (".mixer.qkv.weight", ".mixer.out.weight", ".cross.q.weight", ".cross.kv.weight", ".cross.out.weight")
"""How the names of a decoder's maps to queries, keys, values and outputs end."""
# What belongs to a kernel and not to the projections: learned scales, and the fixed random vectors.
_OF_KERNELS = ("sigma_H1K", "w_HDK")


def with_attention_swapped(model: EncoderDecoder, config: EncoderDecoderConfig) -> EncoderDecoder:
    """A model of `config`, which has other attention functions, with every weight of `model` that both have.

    Scales of a kernel that `model` does not have begin as in a fresh model.

    Raises: ConfigError where the two differ in more than their kernels.
    Reference: Random Feature Attention, Appendix C.3.
    """
    swapped = build_model(config)
    assert isinstance(swapped, EncoderDecoder)  # by its configuration
    given, needed = model.state_dict(), swapped.state_dict()
    for name in sorted(given.keys() ^ needed.keys()):
        if not name.endswith(_OF_KERNELS):
            raise ConfigError(
                f"only one of the two models has {name}; they must differ in their attention functions alone"
            )
    swapped.load_state_dict({**needed, **{name: given[name] for name in given.keys() & needed.keys()}})
    return swapped.eval()


@torch.no_grad()
def with_attention_reset(model: EncoderDecoder, seed: int) -> EncoderDecoder:
    """A copy whose decoder has fresh projections of queries, keys, values and outputs, as a new model's are drawn.

    Reference: Random Feature Attention, Appendix C.4.
    """
    torch.manual_seed(seed)
    reset = build_model(model.config)
    assert isinstance(reset, EncoderDecoder)  # by its configuration
    fresh = reset.state_dict()
    kept = {name: tensor for name, tensor in model.state_dict().items() if not _is_attention(name)}
    reset.load_state_dict({**fresh, **kept})
    return reset.eval()


def _is_attention(name: str) -> bool:
    return name.startswith("blocks.") and name.endswith(ATTENTION)


VOCABULARY, SMOKE_VOCABULARY = 2048, 300
WIDTH, LAYERS, HEADS, MLP, LONGEST = 128, 2, 4, 512, 80
OPTIMISER = {
    "kind": "muon",
    "learning_rate": 4e-3,
    "matrix_learning_rate": 3e-3,
    "final_ratio": 0.05,
    "weight_decay": 0.05,
    "betas": [0.9, 0.98],
}
BATCH, PAIRS = 64, 1014
SMOKE_BATCH, SMOKE_PAIRS = 8, 3
# So many points of the curve of the training loss.
POINTS = 20


@dataclass(frozen=True)
class SmallTranslator:
    """What the models differ in: attention of the decoder's tokens to each other, and to the source, sizes left out."""

    mixer: Mapping[str, Any]
    cross: Mapping[str, Any]

    def model(self, seed: int, budget: Budget) -> dict[str, Any]:
        """The section [model]: a softmax encoder, learned positions, and random vectors of this seed."""
        heads = {"hidden_size": WIDTH, "num_heads": HEADS}
        sizes = {"num_layers": LAYERS, "mlp_size": MLP}
        mixer, cross = ({**heads, **options} for options in (self.mixer, self.cross))
        if mixer["kind"] == "rfa":
            mixer["seed"], cross["seed"] = 1000 * seed, 1000 * seed + 500  # one more for every layer
        positions = {"kind": "learned", "length": LONGEST + 1}
        return {
            "kind": "encoder_decoder",
            "vocab_size": SMOKE_VOCABULARY if budget.smoke else VOCABULARY,
            "encoder": {
                "hidden_size": WIDTH,
                **sizes,
                "mixer": {"kind": "bidirectional", "attention": "softmax", **heads},
                "positions": "learned",
                "max_length": LONGEST + 1,
            },
            "decoder": {**sizes, "mixer": mixer, "cross": cross, "positions": positions},
        }


def train_job(
    arm: str, seed: int, translator: SmallTranslator, steps: int, budget: Budget, begins: tuple[str, str] | None = None
) -> Job:
    """Train, and score on the validation pairs, greedily; a loss that is not finite is the score `diverged`.

    `begins` is an arm of the same experiment and seed, from whose model the weights are, and whether they are `kept` or
    those of the decoder's attention `reset`.
    """
    settings = _settings(translator, seed, steps, budget, begins)

    def work(folder: Path, watch: Watch) -> Scores:
        made = folder.parents[1]
        sections = {name: settings[name] for name in ("model", "data", "optimiser", "run")}
        tokeniser = _tokeniser(made, settings)
        sections["data"] = {**sections["data"], "tokeniser": str(tokeniser)}
        if begins is not None:
            start = _start(folder / "start", made, f"{begins[0]}/seed-{seed}", begins[1], settings)
            sections["run"] = {**sections["run"], "begin_from": str(start)}
        share_tokens(made, folder)

        def measure(trained: Path, last: Metrics, watch: Watch) -> Scores:
            model = _loaded(trained)
            return {**held_out(model, load_tokeniser(trained), settings["pairs"], watch), **losses(trained.parent)}

        try:
            return training_job(arm, seed, sections, measure).work(folder, watch)
        except EngineError as error:
            watch.tell(str(error))
            return {"diverged": 1.0}

    return Job(arm, seed, settings, work, () if begins is None else (f"{begins[0]}/seed-{seed}",))


def read_job(
    arm: str, seed: int, translator: SmallTranslator, budget: Budget, begins: tuple[str, str] | None = None
) -> Job:
    """Score a model without training: fresh, or another arm's under the attention functions of `translator`."""
    settings = _settings(translator, seed, 0, budget, begins)

    def work(folder: Path, watch: Watch) -> Scores:
        made = folder.parents[1]
        tokeniser = load_tokeniser(_tokeniser(made, settings))
        if begins is None:
            torch.manual_seed(seed)
            model = build_model(EncoderDecoderConfig.model_validate(settings["model"])).eval()
            assert isinstance(model, EncoderDecoder)  # by its configuration
        else:
            model = _begun(made, f"{begins[0]}/seed-{seed}", begins[1], settings)
        return held_out(model, tokeniser, settings["pairs"], watch)

    return Job(arm, seed, settings, work, () if begins is None else (f"{begins[0]}/seed-{seed}",))


@torch.inference_mode()
def held_out(model: EncoderDecoder, tokeniser: Tokeniser, pairs: int, watch: Watch) -> dict[str, float]:
    """`perplexity` per target token and `bleu` of greedy translations of the first validation pairs."""
    sources = encoded_sources(read_lines(VALIDATION, SOURCE)[:pairs], tokeniser)
    references = read_lines(VALIDATION, TARGET)[:pairs]
    end = end_of(tokeniser)
    nats, num_tokens = 0.0, 0
    for source, reference in zip(sources, references, strict=True):
        target = [end, *map(int, tokeniser.encode(reference)), end]
        logits_1LV = model(torch.tensor([source]), torch.tensor([target[:-1]]))
        nats += float(F.cross_entropy(logits_1LV[0], torch.tensor(target[1:]), reduction="sum"))
        num_tokens += len(target) - 1
    texts = translated(model, tokeniser, sources, BeamSpec(1, LONGEST, 0.0))
    bleu = bleu_of(texts, [reference.decode() for reference in references])
    watch.tell(f"perplexity {math.exp(nats / num_tokens):.2f}, BLEU {bleu:.2f}; {texts[0]!r}")
    return {"perplexity": math.exp(nats / num_tokens), "bleu": bleu}


def losses(run: Path) -> dict[str, float]:
    """The training loss of each stretch of a run, `loss_` and the step at which it ends, in nats per target token."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {f"loss_{row['step']:05d}": float(row["loss"]) for row in rows if "loss" in row}


def _settings(
    translator: SmallTranslator, seed: int, steps: int, budget: Budget, begins: tuple[str, str] | None
) -> dict[str, Any]:
    steps = budget.steps(steps) if steps else 0
    train = VALIDATION if budget.smoke else TRAIN
    return {
        "model": translator.model(seed, budget),
        "data": {
            "kind": "parallel_text",
            "folder": FOLDER,
            **{f"train_{side}": f"{train}.{language}.gz" for side, language in SIDES},
            "batch": SMOKE_BATCH if budget.smoke else BATCH,
            "max_length": LONGEST,
        },
        "optimiser": with_warmup(OPTIMISER, steps),
        "run": {
            "steps": steps,
            "log_every": max(1, steps // POINTS),
            "checkpoint_every": 200,
            "keep_checkpoints": 1,
            "dtype": "float32",
        },
        "begins": begins,
        "pairs": SMOKE_PAIRS if budget.smoke else PAIRS,
    }


def _begun(made: Path, key: str, how: str, settings: Mapping[str, Any]) -> EncoderDecoder:
    config = EncoderDecoderConfig.model_validate(settings["model"])
    model = with_attention_swapped(_loaded(model_folder(made, key)), config)
    return with_attention_reset(model, 1) if how == "reset" else model


def _start(folder: Path, made: Path, key: str, how: str, settings: Mapping[str, Any]) -> Path:
    """The model folder that a training begins with, made once."""

    def make(beside: Path) -> None:
        tokeniser = load_tokeniser(_tokeniser(made, settings))
        save_model(_begun(made, key, how, settings), beside, tokeniser=tokeniser)

    return make_once(folder, make)


def _tokeniser(made: Path, settings: Mapping[str, Any]) -> Path:
    return tokeniser_of(made, settings["data"]["train_source"], settings["model"]["vocab_size"])


def _loaded(folder: Path) -> EncoderDecoder:
    model = load_any_model(folder)
    assert isinstance(model, EncoderDecoder)  # what these jobs train
    return model

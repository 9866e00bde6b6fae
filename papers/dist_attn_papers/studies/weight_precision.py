"""Weights in fewer bits: what a model that ships pays for them in bits per byte of a new book, and how it decodes."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from benchmarks.measured import Found, Panel, Table
from benchmarks.setting import ROOT
from benchmarks.timing import RATES, interleaved, rate_works
from dist_attn.checkpoints import load_model_and_tokeniser
from dist_attn.errors import ConfigError
from dist_attn.model_config.figures import SLOTS
from dist_attn.models import CausalModel, hold_weights_as, weight_bytes
from dist_attn.text import Tokeniser
from dist_attn.training.evaluation import score_tokens
from dist_attn_papers.studies.decoding_forms import StateForm
from dist_attn_papers.tables.novels import FOLDER, TEST

__all__ = ["FORMS", "NAME", "QUESTION", "TESTS", "bits_of_steps", "form", "measure", "scores"]

NAME = "weight-precision"
QUESTION = (
    "What do weights held as bfloat16 or int8 cost in bits per byte, and save in bytes and time of decoding? books-6m, "
    "the first 300,000 bytes of War and Peace, which it was not trained on."
)
TESTS = (
    "tests/ops/test_narrow_weights.py",
    "tests/models/test_weight_precision.py",
    "papers/tests/test_weight_precision.py",
)
MODEL = "books-6m"
BYTES, STEP_TOKENS = 300_000, 1_024
BATCHES, READ, STEPS, ROUNDS = (1, 16), 256, 16, 7
SMOKE_BYTES, SMOKE_STEP_TOKENS = 4_000, 8

FLOAT32, WHOLLY = "float32", "all of it in bfloat16"
FORMS = (FLOAT32, "bfloat16", "int8", WHOLLY)
"""The last one is the model with activations, features and gates in bfloat16 too, which no option of ours makes."""


def form(name: str) -> tuple[CausalModel, Tokeniser]:
    """The model with its weights held so."""
    model, tokeniser = load_model_and_tokeniser(MODEL)
    if name == WHOLLY:
        return model.to(torch.bfloat16), tokeniser
    hold_weights_as(model, name)  # type: ignore[arg-type]  # one of FORMS
    return model, tokeniser


def measure(smoke: bool) -> Found:
    """Score the text with every form, in blocks and by steps; then steps of all forms in turns for each batch."""
    models = {name: form(name)[0] for name in FORMS}
    found = scores(SMOKE_BYTES if smoke else BYTES, SMOKE_STEP_TOKENS if smoke else STEP_TOKENS)
    held = {name: weight_bytes(model) for name, model in models.items()}
    seconds: dict[str, dict[int, float]] = {name: {} for name in FORMS}
    spread = dict.fromkeys(FORMS, 0.0)
    for batch in BATCHES:
        forms = {name: StateForm(model, batch, 8 if smoke else READ) for name, model in models.items()}
        works: dict[str, Callable[[], object]] = {name: one.steps(STEPS) for name, one in forms.items()}
        times = interleaved({**works, **rate_works()}, 1 if smoke else ROUNDS)
        for name in (name for name in times if name not in RATES):
            seconds[name][batch] = times[name].median / STEPS
            spread[name] = max(spread[name], times[name].spread)
    ratios: dict[str, float] = {}
    numbers: dict[str, float] = {}
    for name in FORMS:
        numbers |= {f"{name}, {way}, bits per byte": value for way, value in found[name].items()}
        numbers |= {f"{name}, batch {batch}, seconds a step": value for batch, value in seconds[name].items()}
        numbers[f"{name}, bytes of weights"] = held[name]
        if name != FLOAT32:
            ratios[f"{name} / float32, bytes of weights"] = round(held[name] / held[FLOAT32], 4)
            for batch in BATCHES:
                ratios[f"batch {batch}, float32 / {name}"] = round(seconds[FLOAT32][batch] / seconds[name][batch], 3)
    curves = {name: {float(batch): batch / value for batch, value in seconds[name].items()} for name in FORMS}
    panel = Panel("tokens a second by batch", "batch", "tokens/s", curves)
    rows = tuple(_row(name, found, held, seconds, spread) for name in FORMS)
    table = Table(_title(smoke), _COLUMNS, rows)
    return Found((table,), ratios, numbers, (panel,), _NOTES)


def scores(num_bytes: int, step_tokens: int) -> dict[str, dict[str, float]]:
    """Bits per byte of every form: of the text read in blocks with the state carried, and of pieces of it by steps.

    Raises: ConfigError where the book is not there.
    """
    path = ROOT / FOLDER / TEST
    if not path.is_file():
        raise ConfigError(f"{FOLDER / TEST} is not there; put the book where examples/train-books.toml expects it")
    text = path.read_bytes()[:num_bytes]
    found = {}
    for name in FORMS:
        model, tokeniser = form(name)
        tokens = tokeniser.encode(text)
        found[name] = {
            "blocks": score_tokens(model, tokens, len(text)).bits_per_byte,
            "steps": bits_of_steps(model, tokeniser, tokens, step_tokens),
        }
    return found


@torch.inference_mode()
def bits_of_steps(model: CausalModel, tokeniser: Tokeniser, tokens: NDArray[np.int32], count: int) -> float:
    """Bits per byte of SLOTS pieces of `count` tokens, each from the empty state, fed side by side as decoding does.

    The first token of a piece is fed and not scored. Pieces are spread evenly over the text.
    """
    starts = np.linspace(0, len(tokens) - count, SLOTS).astype(int)
    pieces_BL = np.stack([tokens[start : start + count] for start in starts])
    state, nats = model.initial_state(SLOTS), 0.0
    tokens_BL = torch.from_numpy(pieces_BL.astype(np.int64))
    for t in range(count - 1):
        logits_BV, state = model.step(tokens_BL[:, t], state)
        nats += float(F.cross_entropy(logits_BV.float(), tokens_BL[:, t + 1], reduction="sum"))
    return nats / math.log(2) / int(tokeniser.byte_lengths(pieces_BL[:, 1:].reshape(-1)).sum())


def _title(smoke: bool) -> str:
    return f"{MODEL}, {SMOKE_BYTES if smoke else BYTES:,} bytes of {Path(TEST).stem}"


def _row(
    name: str,
    found: dict[str, dict[str, float]],
    held: dict[str, int],
    seconds: dict[str, dict[int, float]],
    spread: dict[str, float],
) -> tuple[str, ...]:
    lost = found[name]["blocks"] - found[FLOAT32]["blocks"]
    bits = (f"{found[name]['blocks']:.5f}", f"{lost:+.5f}", f"{found[name]['steps']:.5f}")
    steps = (f"{1e3 * seconds[name][batch]:.2f} ms" for batch in BATCHES)
    return (name, f"{held[name] / 2**20:.1f} MiB", *bits, *steps, f"{spread[name]:.0%}")


_COLUMNS = (
    "weights",
    "in memory",
    "bits per byte",
    "against float32",
    "by steps",
    *(f"a step of {batch}" for batch in BATCHES),
    "spread",
)
_NOTES = (
    f"Bits per byte: the text as one stream, read in blocks; by steps: {SLOTS} pieces of it side by side, each from "
    "the empty state, so that every product is the one that decoding takes. Times: medians of rounds taken in turns.",
    f"{WHOLLY}: activations, random features and gates too, as `model.to(torch.bfloat16)` makes it; no option of "
    "ours does, and it stands here for what that would cost.",
)

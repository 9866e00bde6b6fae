"""What a token of a book costs by its position, when the state is carried from the first one and when it is reset.

Later pages are not as hard as earlier ones, so a curve over the position alone says little. The same tokens are
therefore scored again with the state reset every so often: what the carried state gains over that is its own doing.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from benchmarks.setting import ROOT, Setting, look_around
from dist_attn.checkpoints import load_model_and_tokeniser, resolve_model_folder
from dist_attn.errors import ConfigError
from dist_attn.models import CausalModel

__all__ = ["TESTS", "Bin", "PerplexityByPosition", "Trend", "measure", "token_nats"]

NAME = "perplexity-by-position"
QUESTION = "Does a model predict better the more it has read?"
TESTS = ("tests/training/test_evaluation.py", "tests/models/test_language_model.py")
BOOK = Path("data/books/war_and_peace.txt")
MODEL = "books-6m"
CARRIED, RESETS = "carried", (512, 4096, 32_768)
BLOCK_TOKENS = 4096
# Neighbouring tokens are hard together: deviations are taken over stretches of so many.
STRETCH_TOKENS = 512
FIRST_BIN, TREND_TOKENS = 512, 8192
SMOKE_BYTES = 8_000

Nats = Mapping[str, NDArray[np.float64]]


@dataclass(frozen=True)
class Bin:
    """The tokens at positions `start` to `stop` (exclusive). Units: bits per byte; perplexity per token.

    `gain` is what the carried state saves against a reading with resets, in bits per byte, `error` its standard error.
    """

    start: int
    stop: int
    num_bytes: int
    bits_per_byte: dict[str, float]
    perplexity: dict[str, float]
    gain: dict[str, float]
    error: dict[str, float]


@dataclass(frozen=True)
class Trend:
    """The straight line through the gain by stretches, after the first `TREND_TOKENS`, per 100,000 tokens."""

    slope: float
    error: float
    first_half: float
    second_half: float


@dataclass(frozen=True)
class PerplexityByPosition:
    """One book, read in every way."""

    setting: Setting
    model: str
    book: str
    tokens: int
    num_bytes: int
    whole: dict[str, float]
    bins: tuple[Bin, ...]
    trends: dict[str, Trend]
    case: str = NAME

    def as_json(self) -> str:
        """The result for machines."""
        values = {"object": "benchmark", **asdict(self)}
        return json.dumps(values, indent=2) + "\n"

    def as_markdown(self) -> str:
        """The result for people."""
        resets = [name for name in self.whole if name != CARRIED]
        header = ["positions", *(f"{name}, bits per byte" for name in self.whole), "carried, perplexity"]
        header += [f"gain over {name}" for name in resets]
        lines = [
            "# perplexity-by-position",
            "",
            f"What the tokens of {self.book} ({self.tokens:,} tokens, {self.num_bytes:,} bytes) cost {self.model}, "
            "which was not trained on it, by their position: with the state carried from the first token, and with it "
            "reset every 512, 4,096 or 32,768 tokens. Gains are the same tokens' bits per byte with resets less those "
            "with the carried state, with their standard errors (stretches of 512 tokens as samples).",
            "",
            self.setting.sentence(),
            "",
            f"| {' | '.join(header)} |",
            f"|{'---|' * len(header)}",
        ]
        for part in self.bins:
            cells = [
                f"{part.start:,} to {part.stop - 1:,}",
                *(f"{part.bits_per_byte[name]:.4f}" for name in self.whole),
            ]
            cells.append(f"{part.perplexity[CARRIED]:.2f}")
            cells += [f"{part.gain[name]:.4f} ± {part.error[name]:.4f}" for name in resets]
            lines.append(f"| {' | '.join(cells)} |")
        whole = [f"{self.whole[name]:.4f}" for name in self.whole]
        gains = [f"{self.whole[name] - self.whole[CARRIED]:.4f}" for name in resets]
        lines += [f"| {' | '.join(['all', *whole, '', *gains])} |", ""]
        for name, trend in self.trends.items():
            lines.append(
                f"* Gain over {name}: {trend.first_half:.4f} in the first half of the book, {trend.second_half:.4f} in "
                f"the second; {trend.slope:+.5f} ± {trend.error:.5f} per 100,000 tokens."
            )
        return "\n".join(lines) + "\n"

    def draw(self, path: Path) -> None:
        """Above: bits per byte by position, every reading; below: what the carried state gains."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.0, 8.0), layout="constrained")
        above, below = figure.subplots(2, 1, sharex=True)
        middles = [math.sqrt(max(1, part.start) * part.stop) for part in self.bins]
        for name in self.whole:
            wide = {"linewidth": 2.2, "color": "black"} if name == CARRIED else {}
            above.plot(
                middles, [p.bits_per_byte[name] for p in self.bins], marker="o", markersize=4, label=name, **wide
            )
        above.set(ylabel="bits per byte", title=f"{self.model} on {self.book}, {self.tokens:,} tokens as one stream")
        for number, name in enumerate(self.trends):
            below.errorbar(
                [m * (1 + 0.03 * (number - 1)) for m in middles],
                [p.gain[name] for p in self.bins],
                yerr=[2 * p.error[name] for p in self.bins],
                marker="o",
                markersize=4,
                capsize=3,
                color=f"C{number}",
                label=f"over {name}",
            )
        below.axhline(0.0, color="black", linewidth=0.8)
        below.set(xlabel="position in the book, tokens", xscale="log")
        below.set_ylabel("gain of the carried state, bits per byte\n(bars: two standard errors)")
        for axes in (above, below):
            axes.grid(True, alpha=0.3)
            axes.legend()
        figure.savefig(path, dpi=110)


@torch.inference_mode()
def token_nats(model: CausalModel, tokens: NDArray[np.int32], reset: int | None) -> NDArray[np.float64]:
    """What each token but the first costs, given all before it, or those since the last multiple of `reset`.

    Shapes: tokens [T] -> [T - 1], nats.
    """
    stream = torch.from_numpy(tokens.astype(np.int64))
    total, parts, state = len(stream) - 1, [], model.initial_state(1)
    for start in range(0, total, BLOCK_TOKENS):
        stop = min(start + BLOCK_TOKENS, total)
        targets = stream[start + 1 : stop + 1]
        if reset is not None and reset <= BLOCK_TOKENS:
            h_LD = torch.cat([model.encode(x).flatten(0, 1) for x in _rows(stream[start:stop], reset)])
        else:
            if reset is not None and start % reset == 0:
                state = model.initial_state(1)
            h_BLD, state = model.hidden(stream[None, start:stop], state=state)
            h_LD = h_BLD[0]
        parts.append(F.cross_entropy(model.readout(h_LD).float(), targets, reduction="none").double().numpy())
    return np.concatenate(parts)


def _rows(inputs_L: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Whole rows of `size` tokens side by side, and the rest as a shorter one."""
    whole = len(inputs_L) // size * size
    pieces = [inputs_L[:whole].reshape(-1, size), inputs_L[None, whole:]]
    return [piece for piece in pieces if piece.numel()]


def measure(smoke: bool) -> PerplexityByPosition:
    """Read the book once for every reading; `smoke` takes a few thousand bytes of whatever text there is."""
    setting = look_around()
    folder = resolve_model_folder(MODEL)
    model, tokeniser = load_model_and_tokeniser(folder)
    path = ROOT / BOOK
    if smoke and not path.is_file():
        path = ROOT / "README.md"
    if not path.is_file():
        raise ConfigError(f"{BOOK} is not there; put the book where examples/train-books.toml expects it")
    data = path.read_bytes()[: SMOKE_BYTES if smoke else None]
    tokens = tokeniser.encode(data)
    nats = {CARRIED: token_nats(model, tokens, None)}
    nats |= {f"reset every {reset:,}": token_nats(model, tokens, reset) for reset in RESETS}
    lengths = tokeniser.byte_lengths(tokens[1:])
    edges = _edges(len(lengths))
    return PerplexityByPosition(
        setting=setting,
        model=folder.name,
        book=path.name,
        tokens=len(tokens),
        num_bytes=len(data),
        whole={name: _bits_per_byte(costs, lengths) for name, costs in nats.items()},
        bins=tuple(_bin(start, stop, nats, lengths) for start, stop in pairwise(edges)),
        trends={name: _trend(costs - nats[CARRIED], lengths) for name, costs in nats.items() if name != CARRIED},
    )


def _edges(total: int) -> list[int]:
    """0, 512, 1,024, 2,048 and so on to the end; a last bin of less than half an octave joins the one before."""
    edges = [0]
    while (following := max(FIRST_BIN, 2 * edges[-1])) < total / math.sqrt(2):
        edges.append(following)
    return [*edges, total]


def _bin(start: int, stop: int, nats: Nats, lengths: NDArray[np.int64]) -> Bin:
    here = {name: costs[start:stop] for name, costs in nats.items()}
    within = lengths[start:stop]
    gains = {name: costs - here[CARRIED] for name, costs in here.items() if name != CARRIED}
    return Bin(
        start=start,
        stop=stop,
        num_bytes=int(within.sum()),
        bits_per_byte={name: _bits_per_byte(costs, within) for name, costs in here.items()},
        perplexity={name: math.exp(float(costs.mean())) for name, costs in here.items()},
        gain={name: _bits_per_byte(gain, within) for name, gain in gains.items()},
        error={name: _error(gain, within) for name, gain in gains.items()},
    )


def _bits_per_byte(nats: NDArray[np.float64], lengths: NDArray[np.int64]) -> float:
    return float(nats.sum()) / math.log(2) / int(lengths.sum())


def _stretches(values: NDArray[np.float64], lengths: NDArray[np.int64], size: int) -> NDArray[np.float64]:
    """Bits per byte of every stretch of `size` tokens; the rest is left out, unless there is nothing else."""
    count = max(1, len(values) // size)
    size = min(size, len(values))
    sums = values[: count * size].reshape(count, size).sum(1)
    bits: NDArray[np.float64] = sums / math.log(2) / lengths[: count * size].reshape(count, size).sum(1)
    return bits


def _error(gain: NDArray[np.float64], lengths: NDArray[np.int64]) -> float:
    """The standard error of the mean over stretches; quarters of one where there is only one."""
    size = min(STRETCH_TOKENS, max(1, len(gain) // 4))
    samples = _stretches(gain, lengths, size)
    return float(samples.std(ddof=1)) / math.sqrt(len(samples)) if len(samples) > 1 else 0.0


def _trend(gain: NDArray[np.float64], lengths: NDArray[np.int64]) -> Trend:
    """Least squares over stretches of the text after its beginning, where every reading has seen little."""
    skip = min(TREND_TOKENS, len(gain) // 4)
    samples = _stretches(gain[skip:], lengths[skip:], min(STRETCH_TOKENS, max(1, (len(gain) - skip) // 8)))
    size = len(gain[skip:]) // len(samples)
    positions = (skip + size * (np.arange(len(samples)) + 0.5)) / 1e5
    centred = positions - positions.mean()
    slope = float(centred @ samples / (centred @ centred))
    residuals = samples - samples.mean() - slope * centred
    error = math.sqrt(float(residuals @ residuals) / max(1, len(samples) - 2) / float(centred @ centred))
    half = len(gain) // 2
    halves = (_bits_per_byte(gain[part], lengths[part]) for part in (slice(skip, half), slice(half, None)))
    return Trend(slope, error, *halves)

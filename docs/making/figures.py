"""`python -m docs.making.figures`: the figures of docs/explanation, computed by the engine itself in some seconds."""

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.costs import read_model_costs
from dist_attn.feature_maps import Gaussian, gaussian
from dist_attn.ops import Denominator, LinearState, linear_attention, softmax_attention
from dist_attn.sharded import exclusive_scan
from dist_attn.shipped import default_model_folder

__all__ = ["FIGURES", "carried_example", "recall", "write"]

FOLDER = Path("docs/figures")
COLOURS = ("#2d7f86", "#d1742b", "#7a5ea8", "#4a4a4a")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "svg.hashsalt": "dist-attn",
    "svg.fonttype": "path",
}
HEAD, SEED = 32, 0


def kernel_estimate(figure: Any) -> None:
    """phi(x).phi(y) over |x - y| for growing numbers of random vectors, beside the kernel itself."""
    generator = torch.Generator().manual_seed(SEED)
    distances = torch.linspace(0, 3, 61)
    direction = torch.nn.functional.normalize(torch.randn(HEAD, generator=generator), dim=0)
    x_BHLK = torch.zeros(1, 1, 61, HEAD)
    y_BHLK = (distances[:, None] * direction)[None, None]
    for panel, number in zip(figure.subplots(1, 3, sharey=True), (8, 64, 512), strict=True):
        for draw in range(12):
            w_HDK = torch.randn(1, number, HEAD, generator=torch.Generator().manual_seed(draw))
            estimate = (gaussian(x_BHLK, w_HDK) * gaussian(y_BHLK, w_HDK)).sum(-1)[0, 0]
            panel.plot(distances, estimate, color=COLOURS[0], alpha=0.35, linewidth=0.9)
        panel.plot(distances, torch.exp(-distances.square() / 2), color=COLOURS[1], linewidth=2)
        panel.set_title(f"{number} random vectors")
        panel.set_xlabel("|x − y|")
        panel.grid(True, alpha=0.3)
    figure.axes[0].set_ylabel("φ(x)·φ(y), twelve draws")


def attention_weights(figure: Any) -> None:
    """Who looks at whom among 48 tokens: softmax, and the same by random features, read off with one-hot values."""
    generator = torch.Generator().manual_seed(3)
    walk_LK = torch.nn.functional.normalize(torch.randn(48, HEAD, generator=generator).cumsum(0), dim=-1)
    x_BHLK = walk_LK[None, None]
    ones_BHLV = torch.eye(48)[None, None]
    pictures = [("softmax", softmax_attention(x_BHLK, x_BHLK, ones_BHLV, causal=True, scale=4.0))]
    for number in (32, 256):
        w_HDK = 2.0 * torch.randn(1, number, HEAD, generator=generator)
        weights, _ = linear_attention(x_BHLK, x_BHLK, ones_BHLV, feature_map=Gaussian(w_HDK))
        pictures.append((f"{number} random vectors", weights))
    for panel, (title, weights_BHLL) in zip(figure.subplots(1, 3), pictures, strict=True):
        image = panel.imshow(
            weights_BHLL[0, 0].clamp_min(0).sqrt(), cmap="magma_r", vmin=0, vmax=1, interpolation="nearest"
        )
        panel.set_title(title)
        panel.set_xlabel("key")
    figure.axes[0].set_ylabel("query")
    figure.colorbar(image, ax=figure.axes, shrink=0.75, label="√weight")


def gates(figure: Any) -> None:
    """How much of a key is left after so many tokens, by the gate: read off the state itself."""
    panel = figure.subplots()
    tokens = 2048
    for colour, gate in zip(COLOURS, (0.9, 0.99, 0.999, 1.0), strict=True):
        key_BHSK, value_BHSV = torch.zeros(1, 1, tokens, 1), torch.ones(1, 1, tokens, 1)
        key_BHSK[0, 0, 0] = 1.0  # one key at the beginning, nothing after it
        log_gate_BHS = torch.full((1, 1, tokens), math.log(gate))
        one = Denominator(kind="one")
        left, _ = linear_attention(
            torch.ones(1, 1, tokens, 1), key_BHSK, value_BHSV, log_gate_BHS=log_gate_BHS, denominator=one
        )
        panel.plot(
            range(1, tokens + 1), left[0, 0, :, 0], color=colour, label="no gate" if gate == 1 else f"gate {gate}"
        )
    panel.set_xscale("log")
    panel.set_xlabel("tokens since the key")
    panel.set_ylabel("what is left of it")
    panel.grid(True, alpha=0.3)
    panel.legend()


def state_size(figure: Any) -> None:
    """Bytes of the state of the shipped model, and of the keys and values of a softmax model of its size."""
    costs = read_model_costs(default_model_folder())
    layers, width = costs.config.num_layers, 256
    lengths = [2**power for power in range(6, 25)]
    panel = figure.subplots()
    panel.plot(lengths, [costs.state_bytes(length) / 2**20 for length in lengths], color=COLOURS[0], label="books-6m")
    caches = [2 * layers * width * 4 * length / 2**20 for length in lengths]
    panel.plot(lengths, caches, color=COLOURS[1], label="keys and values of softmax")
    panel.set_xscale("log", base=10)
    panel.set_yscale("log", base=10)
    panel.set_xlabel("tokens read")
    panel.set_ylabel("MiB kept for the next token")
    panel.grid(True, alpha=0.3)
    panel.legend()


def recall(pairs: int, number: int | None, trials: int = 8) -> float:
    """The share of `pairs` random unit keys, each with its own value, that are read back right; None is softmax.

    A value is right where it is the nearest of all values to what attention gives for its key, at the same sharpness
    (the kernel exp(-4 |q - k|^2 / 2), softmax at scale 4) for both.
    """
    right = 0.0
    for trial in range(trials):
        generator = torch.Generator().manual_seed(trial)
        keys_BHLK = torch.nn.functional.normalize(torch.randn(1, 1, pairs, HEAD, generator=generator), dim=-1)
        values_BHLV = torch.nn.functional.normalize(torch.randn(1, 1, pairs, HEAD, generator=generator), dim=-1)
        if number is None:
            out_BHLV = softmax_attention(keys_BHLK, keys_BHLK, values_BHLV, causal=False, scale=4.0)
        else:
            w_HDK = 2.0 * torch.randn(1, number, HEAD, generator=generator)
            out_BHLV, _ = linear_attention(keys_BHLK, keys_BHLK, values_BHLV, feature_map=Gaussian(w_HDK), causal=False)
        nearest = (out_BHLV[0, 0] @ values_BHLV[0, 0].T).argmax(1)
        right += float((nearest == torch.arange(pairs)).float().mean())
    return right / trials


def recall_by_features(figure: Any) -> None:
    """Keys read back exactly, by how many there are and how many random vectors hold them."""
    panel = figure.subplots()
    counts = [4, 8, 16, 32, 64, 128, 256, 512, 1024]
    for colour, number in zip(COLOURS, (16, 64, 256, None), strict=True):
        label = "softmax" if number is None else f"{number} random vectors"
        panel.plot(
            counts,
            [100 * recall(pairs, number) for pairs in counts],
            color=colour,
            marker="o",
            markersize=3,
            label=label,
        )
    panel.set_xscale("log", base=2)
    panel.set_xticks(counts, [str(count) for count in counts])
    panel.set_xlabel("keys that were read, each with a value of its own")
    panel.set_ylabel("values read back right, %")
    panel.set_ylim(0, 103)
    panel.grid(True, alpha=0.3)
    panel.legend()


def carried_example(values: tuple[float, ...] = (1, 2, 0, 1, 3, 1, 2, 2), ranks: int = 4) -> dict[str, list[Any]]:
    """Sums of eight numbers over ranks by the real scan: each rank's own, what came before it, and the running sums.

    Every feature is 1, so that S is the plain sum of the values.
    """
    share = len(values) // ranks

    def work(comm: Communicator) -> tuple[float, float, list[float]]:
        own = values[comm.rank * share : (comm.rank + 1) * share]
        state = LinearState.identity(1, 1, 1, 1)
        for value in own:
            state = state.combine(_one(value))
        before, _ = exclusive_scan(comm, state)
        running, sums = before, []
        for value in own:
            running = running.combine(_one(value))
            sums.append(running.s_BHMV.item())
        return state.s_BHMV.item(), before.s_BHMV.item(), sums

    results = run_simulated(work, ranks)
    own, before, sums = (list(part) for part in zip(*results, strict=True))
    return {
        "values": [values[r * share : (r + 1) * share] for r in range(ranks)],
        "own": own,
        "before": before,
        "sums": sums,
    }


def _one(value: float) -> LinearState:
    """The state of one token whose feature is 1."""
    return LinearState.identity(1, 1, 1, 1).advance(torch.ones(1, 1, 1), torch.full((1, 1, 1), float(value)))


def carry_steps(figure: Any) -> None:
    """The three steps of attention over four ranks, with the numbers that the real scan gives."""
    found = carried_example()
    titles = (
        "1. each rank sums its own tokens",
        "2. the sums travel: what came before?",
        "3. each rank adds it to its own running sums",
    )
    for step, (panel, title) in enumerate(zip(figure.subplots(3, 1), titles, strict=True)):
        panel.set_axis_off()
        panel.set_xlim(-0.1, 16)
        panel.set_ylim(-0.2, 2.6)
        panel.text(0, 2.3, title, fontsize=10, fontweight="bold")
        for rank in range(4):
            left = 4 * rank + 0.2
            panel.add_patch(_box(left, 0.0, 3.4, 1.95, COLOURS[3], 0.04))
            panel.text(left + 0.1, 1.6, f"rank {rank}", fontsize=8, color=COLOURS[3])
            for place in range(2):
                shown = found["values"][rank][place] if step < 2 else found["sums"][rank][place]
                colour = COLOURS[0] if step < 2 else COLOURS[2]
                panel.add_patch(_box(left + 0.2 + 0.8 * place, 0.25, 0.65, 0.9, colour, 0.2))
                panel.text(left + 0.52 + 0.8 * place, 0.7, f"{shown:g}", ha="center", va="center")
            shown, name = (found["own"], "S") if step == 0 else (found["before"], "before")
            panel.add_patch(_box(left + 2.05, 0.25, 1.15, 0.9, COLOURS[1], 0.2))
            panel.text(left + 2.62, 0.7, f"{name} {shown[rank]:g}", ha="center", va="center", fontsize=8)
            if step == 1 and rank < 3:
                arrow = {"arrowstyle": "->", "color": COLOURS[1], "connectionstyle": "arc3,rad=-0.35"}
                panel.annotate("", (left + 6.4, 1.2), (left + 2.6, 1.2), arrowprops=arrow)


def _box(left: float, low: float, width: float, height: float, colour: str, alpha: float) -> Any:
    from matplotlib.patches import FancyBboxPatch

    rounded = "round,pad=0.02,rounding_size=0.1"
    return FancyBboxPatch(
        (left, low), width, height, boxstyle=rounded, facecolor=(*_rgb(colour), alpha), edgecolor=colour
    )


def _rgb(colour: str) -> tuple[float, ...]:
    return tuple(int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))


FIGURES: dict[str, tuple[Callable[[Any], None], tuple[float, float]]] = {
    "kernel-estimate.svg": (kernel_estimate, (8.5, 2.7)),
    "attention-weights.png": (attention_weights, (8.5, 2.8)),
    "gates.svg": (gates, (5.5, 3.0)),
    "state-size.svg": (state_size, (5.5, 3.0)),
    "recall.svg": (recall_by_features, (5.5, 3.2)),
    "carry-steps.svg": (carry_steps, (8.5, 5.4)),
}
"""By file: what draws it, and its size in inches."""


def write(folder: Path) -> None:
    """Draw all figures into the folder."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE), torch.no_grad():
        for name, (draw, size) in FIGURES.items():
            figure = Figure(figsize=size, layout="constrained")
            draw(figure)
            # Without a date the same code gives the same bytes.
            figure.savefig(
                folder / name, dpi=110, facecolor="white", metadata={"Date": None} if name.endswith("svg") else None
            )


if __name__ == "__main__":
    write(Path(__file__).resolve().parents[2] / FOLDER)
    sys.exit(0)

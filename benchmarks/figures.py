"""`python -m benchmarks.figures RESULT.json … --out FIGURE.png`: filed results as curves of time and memory."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.roofline import RATES

__all__ = ["draw", "main"]

MEBIBYTE = 1 << 20
QUANTITIES = (("seconds", 1e3, "ms"), ("peak_bytes", 1 / MEBIBYTE, "MiB above the inputs"))


def draw(results: Sequence[dict[str, Any]], out: Path) -> None:
    """One column per result: time above, peak of tensors below where any was measured, both axes logarithmic."""
    from matplotlib.figure import Figure

    measured = [one for one in QUANTITIES if any(entry[one[0]] for result in results for entry in result["rows"])]
    figure = Figure(figsize=(4.2 * len(results), 3.5 * len(measured)), layout="constrained")
    axes = figure.subplots(len(measured), len(results), squeeze=False, sharex=True, sharey="row")
    for column, result in enumerate(results):
        for row, (quantity, factor, unit) in enumerate(measured):
            panel = axes[row][column]
            for name in sorted({name for entry in result["rows"] for name in entry[quantity]} - set(RATES)):
                points = [(e["size"], e[quantity][name] * factor) for e in result["rows"] if name in e[quantity]]
                panel.plot(*zip(*points, strict=True), marker="o", markersize=3, label=name)
            panel.set_xscale("log", base=2)
            panel.set_yscale("log", base=2 if quantity == "seconds" else 10)
            panel.grid(True, alpha=0.3)
            panel.set_ylabel(unit if column == 0 else "")
        axes[0][column].set_title(result["case"])
        axes[0][column].legend(loc="upper left")
        axes[-1][column].set_xlabel("sequence length")
    setting = results[0]["setting"]
    figure.suptitle(
        f"{setting['date'][:10]}, commit {setting['commit']}, {setting['machine']}, threads: {setting['threads']}, "
        f"torch {setting['versions']['torch']}",
        fontsize=9,
    )
    figure.savefig(out, dpi=110)


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 drawn, 2 a file that cannot be read or written."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.figures", description="Draw filed results.")
    parser.add_argument("results", nargs="+", type=Path, metavar="RESULT.json")
    parser.add_argument("--out", type=Path, required=True, metavar="FIGURE.png")
    given = parser.parse_args(arguments)
    try:
        draw([json.loads(path.read_text()) for path in given.results], given.out)
    except (OSError, ValueError, KeyError) as error:
        print(f"benchmarks: no figure of {', '.join(map(str, given.results))}: {error!r}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

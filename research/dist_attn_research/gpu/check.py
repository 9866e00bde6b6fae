"""Everything about the GPU kernels in one call on a machine with a GPU: are they right, which tiles, how fast.

    dist-attn bench gpu-check --json F [--tune] [--only PART ...]      on a GPU, about ten minutes
    TRITON_INTERPRET=1 dist-attn bench gpu-check --tiny                without one: that all of it runs

Parts: correctness (against the streaming form in float64), tiles (measured and kept, with --tune), attention (forward,
and forward with backward, beside torch's exact attention, the streaming form, and flash-linear-attention where it is
installed), decode (one step, also as a CUDA graph), relative_correctness and relative (relative attention likewise,
against torch's windowed form), graph_correctness and graph (a model's decode step, captured, against plain ones),
longest (the longest exact attention that four ranks on the GPU hold, each with 24 GB). A part that fails is filed with
its error and the next one begins. On a GPU each part is brought into the record of devices of its name as soon as it is
done (`dist_attn.ops.gpu_record`), by which "auto" goes.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.setting import look_around
from dist_attn.ops.gpu_record import GpuRecord, keep_record
from dist_attn_research.gpu.cases import Shape, check_correctness, decode_rows, length_row, tune
from dist_attn_research.gpu.graph import check_graph, graph_rows
from dist_attn_research.gpu.longest import longest_rows
from dist_attn_research.gpu.relative import check_relative, relative_rows

__all__ = ["main"]

Result = dict[str, Any]

REFERENCE = Shape(batch=1, heads=16, head_size=128, projections=128, values=128)
# Scaleformer's own sizes, of features that are given.
RELATIVE = Shape(batch=1, heads=16, head_size=64, projections=64, values=64)
TINY = Shape(batch=1, heads=1, head_size=8, projections=8, values=8)
PARTS = (
    "correctness",
    "relative_correctness",
    "graph_correctness",
    "tiles",
    "attention",
    "decode",
    "relative",
    "graph",
    "longest",
)
LENGTHS = (2_048, 8_192, 32_768, 131_072)


def main(arguments: list[str] | None = None) -> int:
    """Exit status 1 where a part failed or something is not right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tiny", action="store_true", help="the smallest sizes; says nothing about speed")
    parser.add_argument("--tune", action="store_true", help="measure tiles first and keep the best")
    parser.add_argument("--only", nargs="*", choices=PARTS, default=PARTS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not given.tiny:
        print("there is no GPU here: use TRITON_INTERPRET=1 and --tiny to see that everything runs", file=sys.stderr)
        return 2
    shape = TINY if given.tiny else REFERENCE
    lengths = (32,) if given.tiny else LENGTHS
    parts: dict[str, Callable[[], Any]] = {
        "correctness": lambda: check_correctness(tiny=given.tiny),
        "tiles": lambda: tune(shape, 32 if given.tiny else 32_768, few=given.tiny) if given.tune else "not asked for",
        "attention": lambda: [length_row(shape, length, tiny=given.tiny) for length in lengths],
        "relative_correctness": lambda: check_relative(tiny=given.tiny),
        "graph_correctness": lambda: check_graph(tiny=given.tiny),
        "graph": lambda: graph_rows(tiny=given.tiny),
        "longest": lambda: longest_rows(tiny=given.tiny),
        "relative": lambda: relative_rows(shape if given.tiny else RELATIVE, lengths, tiny=given.tiny),
        "decode": lambda: decode_rows(shape, (2,) if given.tiny else (1, 16, 64, 256), tiny=given.tiny),
    }
    result: Result = {"case": "gpu_check", "setting": _setting(), "shape": shape._asdict(), "tiny": given.tiny}
    failed = []
    for name in given.only:
        began = time.perf_counter()
        try:
            result[name] = parts[name]()
        except Exception as error:
            # Time on a GPU is short: what can still be measured is.
            result[name] = {
                "error": f"{type(error).__name__}: {error}"[:2_000],
                "trace": traceback.format_exc()[-4_000:],
            }
            failed.append(name)
        result[f"{name}_seconds"] = round(time.perf_counter() - began, 1)
        print(json.dumps({name: result[name]}), flush=True)
        if given.json is not None:
            given.json.write_text(json.dumps(result, indent=1))
        if torch.cuda.is_available() and not given.tiny:
            keep_record(torch.cuda.get_device_name(), record_from(result))
    checked = [row for name in PARTS if name.endswith("correctness") for row in _rows(result.get(name))]
    wrong = [row["case"] for row in checked if not row["right"]]
    print(f"failed: {', '.join(failed) or 'none'}; wrong: {', '.join(wrong) or 'none'}")
    return 1 if failed or wrong else 0


def record_from(result: Result) -> GpuRecord:
    """What a result says of the device it was taken on."""
    parts = ("correctness", "relative_correctness")
    kernels = {row["case"]: _outcome(row) for name in parts for row in _rows(result.get(name))}
    for name in parts:
        if name in result and not _rows(result[name]):
            kernels[f"{'relative' if name.startswith('relative') else 'linear'} cases"] = result[name]["error"]
    captured, tiles = _rows(result.get("graph_correctness")), result.get("tiles")
    setting = result["setting"]
    return GpuRecord(
        driver=setting["driver"],
        torch=setting["versions"]["torch"],
        triton=setting["versions"]["triton"],
        commit=setting["commit"],
        kernels=kernels,
        captured_steps=all(row["right"] for row in captured) if captured else None,
        tiles={tiles["key"]: tiles["best"]["tiles"]} if isinstance(tiles, dict) and "best" in tiles else {},
    )


def _outcome(row: Result) -> float | str:
    worst = max(row["errors"].values())
    return float(worst) if row["right"] else f"errors of {worst:.2g}"


def _rows(found: object) -> list[Result]:
    return found if isinstance(found, list) else []


def _setting() -> Result:
    import triton

    on_gpu = torch.cuda.is_available()
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": torch.cuda.get_device_name() if on_gpu else f"interpreter on {platform.processor()}",
        "driver": _driver() if on_gpu else None,
        "commit": look_around().commit,
        "capability": torch.cuda.get_device_capability() if on_gpu else None,
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "python": platform.python_version()},
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.split("\n")[0]


if __name__ == "__main__":
    raise SystemExit(main())

"""Registers, spills and shared memory of every GPU kernel as compiled for an H100 or H200; needs triton and no GPU.

    dist-attn bench kernel-registers [--head-size N] [--projections N] [--values N] [--dtype T] [--json F]

A spilled register goes through memory each time it is used: tiles are chosen so that none is (`triton_tiles`).
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from dist_attn.ops.linear_attention.triton_tiles import Tiles, default_tiles

__all__ = ["compiled", "kernels_of", "relative_kernels"]

ARCHITECTURE = 90
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "tf32", torch.float32: "ieee"}
# Arguments that are of the inputs' type, and those that are states as they enter products.
INPUTS = {"q", "k", "v", "x", "y", "out", "own", "other", "own_y", "other_y", "grad", "grad_out", "a", "b"}
STATES = {"state", "before", "projected"}


def kernels_of(tiles: Tiles, dtype: torch.dtype, head_size: int) -> dict[str, tuple[Any, dict[str, object], Tiles]]:
    """Each kernel with the constants it is compiled for and its tiles: a Gaussian map, gates, no documents."""
    from dist_attn.ops.linear_attention import (
        triton_decode,
        triton_gradients,
        triton_outputs,
        triton_states,
    )

    blocks = {"T": tiles.chunk, "BLOCK_D": tiles.block_d, "BLOCK_K": tiles.block_k, "BLOCK_V": tiles.block_v}
    made: dict[str, object] = {"MAP": "gaussian", "UNIT": True, "PRECISION": PRECISIONS[dtype], **blocks}
    optional = {"HAS_GATE": True, "HAS_SCALE": True, "HAS_DOCUMENTS": False}
    small, step, four = tiles.of_features_gradient(), triton_decode.STEP_TILES, replace(tiles, warps=4)
    features = {
        "PAIRS": True,
        "WITH_ROWS": True,
        "WITH_PROJECTED": True,
        "BLOCK_X": tiles.fitted_inputs(head_size),
        **optional,
        **made,
    }
    features |= {"BLOCK_D": small.block_d, "BLOCK_K": small.block_k, "BLOCK_V": small.block_v}
    return {
        "sums": (triton_states.sums_kernel, made, tiles),
        "scan": (triton_states.scan_kernel, {"REVERSE": False, "WITH_DOT": False, "BLOCK": 1024}, four),
        "scan back": (triton_states.scan_kernel, {"REVERSE": True, "WITH_DOT": True, "BLOCK": 1024}, four),
        "outputs": (triton_outputs.outputs_kernel, {"KIND": "floor", **optional, **made}, tiles),
        "gradient of values": (triton_gradients.values_gradient_kernel, {**optional, **made}, tiles),
        "gradient of queries": (triton_gradients.features_gradient_kernel, {"KEYS": False, **features}, small),
        "gradient of keys": (triton_gradients.features_gradient_kernel, {"KEYS": True, **features}, small),
        "gradient of w": (
            triton_gradients.map_gradient_kernel,
            {name: made[name] for name in ("PRECISION", "T", "BLOCK_D", "BLOCK_K")},
            four,
        ),
        "full read": (triton_outputs.read_kernel, {"KIND": "floor", "HAS_WEIGHT": False, **made}, tiles),
        "full gradient of queries": (
            triton_gradients.features_gradient_kernel,
            {"KEYS": False, **features, "PAIRS": False, "WITH_ROWS": False, "HAS_GATE": False, "HAS_SCALE": False},
            small,
        ),
        "full gradient of keys": (
            triton_gradients.features_gradient_kernel,
            {"KEYS": True, **features, "PAIRS": False, "HAS_GATE": False},
            small,
        ),
        "step": (
            triton_decode.step_kernel,
            {
                "KIND": "floor",
                "HAS_GATE": True,
                "HAS_SCALE": True,
                "MAP": "gaussian",
                "UNIT": True,
                "BLOCK_X": tiles.fitted_inputs(head_size),
                "BLOCK_D": step.block_d,
                "BLOCK_V": step.block_v,
            },
            step,
        ),
    }


def relative_kernels(tiles: Tiles, dtype: torch.dtype) -> dict[str, tuple[Any, dict[str, object], Tiles]]:
    """As `kernels_of`, those of causal relative attention."""
    from dist_attn.ops.relative_attention import triton_gradients, triton_outputs

    window: dict[str, object] = {
        "CAUSAL": True,
        "PRECISION": PRECISIONS[dtype],
        "T": tiles.chunk,
        "BLOCK_V": tiles.block_v,
    }
    whole = {**window, "BLOCK_D": tiles.block_d}
    rows = {"PRECISION": PRECISIONS[dtype], "T": tiles.chunk, "BLOCK_D": tiles.block_d, "BLOCK_R": 32}
    return {
        "relative positions": (triton_outputs.positions_kernel, rows, replace(tiles, warps=4)),
        "relative sums": (
            triton_outputs.row_sums_kernel,
            {"T": tiles.chunk, "BLOCK_V": tiles.block_v},
            replace(tiles, warps=4),
        ),
        "relative outputs": (triton_outputs.relative_outputs_kernel, whole, tiles),
        "relative gradient of positions": (triton_gradients.positions_gradient_kernel, window, tiles),
        "relative gradient of queries": (
            triton_gradients.relative_features_gradient_kernel,
            {"KEYS": False, "BLOCK_R": 32, **whole},
            tiles,
        ),
        "relative gradient of keys": (
            triton_gradients.relative_features_gradient_kernel,
            {"KEYS": True, "BLOCK_R": 32, **whole},
            tiles,
        ),
        "relative gradient of values": (triton_gradients.relative_values_gradient_kernel, whole, tiles),
    }


def compiled(
    kernel: Any, constants: Mapping[str, object], dtype: torch.dtype, *, warps: int, stages: int
) -> dict[str, int]:
    """Registers a thread, bytes of stack and of spilled registers, bytes of shared memory."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else _type(name, dtype) for name in kernel.arg_names}
    # As at a launch: pointers and row lengths of whole 16 bytes may be read as such.
    aligned = [name.endswith("_ptr") or "_stride_" in name for name in kernel.arg_names]
    attributes = {(i,): [["tt.divisibility", 16]] for i, whole in enumerate(aligned) if whole}
    made = triton.compile(
        ASTSource(kernel, signature, dict(constants), attributes),
        target=GPUTarget("cuda", ARCHITECTURE, 32),
        options={"num_warps": warps, "num_stages": stages},
    )
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(made.asm["ptx"])
        command = [_assembler(), "-v", f"--gpu-name=sm_{ARCHITECTURE}a", str(source), "-o", str(Path(folder) / "cubin")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", done.stderr)
    registers = re.search(r"Used (\d+) registers", done.stderr)
    assert stack is not None and registers is not None, done.stderr
    return {
        "registers": int(registers[1]),
        "stack": int(stack[1]),
        "spilled": int(stack[2]),
        "shared": int(made.metadata.shared),
    }


def _type(name: str, dtype: torch.dtype) -> str:
    base = name.removesuffix("_ptr")
    if base == name:
        return "fp32" if name in ("scale", "eps") else "i32"
    if base in STATES:
        return "*bf16" if dtype == torch.bfloat16 else "*fp32"
    if base == "documents":
        return "*i32"
    return POINTERS[dtype] if base in INPUTS else "*fp32"


def _assembler() -> str:
    import triton

    own = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    found = str(own) if own.exists() else shutil.which("ptxas")
    if found is None:
        raise SystemExit("ptxas is neither in triton's wheel nor on the PATH; install the CUDA toolkit")
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print the table, a row as soon as it is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    for name in ("head-size", "projections", "values"):
        parser.add_argument(f"--{name}", type=int, default=128)
    parser.add_argument("--dtype", choices=[str(t).removeprefix("torch.") for t in POINTERS], default="bfloat16")
    parser.add_argument("--tiles", default="{}", help='JSON, as {"chunk": 128, "warps": 8}')
    parser.add_argument("--only", nargs="*", default=[""], help="kernels whose name contains one of these")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    dtype = getattr(torch, given.dtype)
    sizes = (given.head_size, given.projections, given.values)
    tiles = Tiles(**{**asdict(default_tiles(*sizes, dtype)), **json.loads(given.tiles)}).fitted(*sizes)
    print(tiles)
    rows = {}
    kernels = kernels_of(tiles, dtype, given.head_size) | relative_kernels(tiles, dtype)
    for name, (kernel, constants, own) in kernels.items():
        if any(part in name for part in given.only):
            rows[name] = compiled(kernel, constants, dtype, warps=own.warps, stages=own.stages)
            print(f"{name:30} {rows[name]}", flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps({"tiles": asdict(tiles), "dtype": given.dtype, "kernels": rows}, indent=1))


if __name__ == "__main__":
    main(sys.argv[1:])

"""What every GPU kernel is compiled to on three generations of GPUs, and what it computes; needs triton and no GPU.

    dist-attn bench kernel-registers [--size N] [--dtype T ...] [--capability N ...] [--only WORD ...] [--tiles JSON]
                                     [--file]

A spilled register goes through memory each time it is used: tiles are chosen so that none is (`triton_tiles`). Matrix
products are counted by their instruction as it stands in the PTX, loops once. Values are those of Triton's interpreter
against torch's forms in float64, at sizes of 8. All kernels at the default tiles are filed, under another Triton than
that of constraints.txt by a name of their own; part of them, or others, are only printed without --file.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.measured import Measured, Table
from benchmarks.report import file_finding
from benchmarks.setting import ROOT, look_around
from dist_attn.ops.linear_attention.triton_tiles import Tiles, default_tiles, power_tile

__all__ = ["SPILLING", "Compiled", "Kernel", "compiled", "kernels_of", "main", "relative_kernels"]

NAME = "kernel-registers"
QUESTION = (
    "How many registers, how much shared memory and which matrix instructions do the GPU's kernels take? Compiled "
    "without a GPU for sizes of 128, a Gaussian map and gates, at the default tiles."
)
SIZE = 128
# Which result of which case of tests/gpu/kernel_cases.py a kernel has a part in, by the first words of its name.
VALUES = {
    "sums": ("causal", "state"),
    "scan": ("causal", "state"),
    "states": ("causal", "out"),
    "states back": ("causal", "grad v"),
    "outputs": ("causal", "out"),
    "gradient of values": ("causal", "grad v"),
    "gradient of queries' features": ("causal", "grad q"),
    "gradient of keys' features": ("causal", "grad k"),
    "gradient of queries, of keys": ("causal", "grad k"),
    "gradient of w": ("causal", "grad map 0"),
    "full read": ("full", "out"),
    "full gradient of queries' features": ("full", "grad q"),
    "full gradient of keys' features": ("full", "grad k"),
    "step": ("step", "out"),
    "relative positions": ("relative", "out"),
    "relative sums": ("relative", "out"),
    "relative outputs": ("relative", "out"),
    "relative gradient of positions": ("relative", "grad phi_rp_HRK"),
    "relative gradient of queries": ("relative", "grad phi_q_BHLK"),
    "relative gradient of keys": ("relative", "grad phi_k_BHSK"),
    "relative gradient of values": ("relative", "grad v_BHSV"),
}
# They hold a state of 128 x 32 twice while they store it turned round. Tiles of half the values fit, and make all
# features twice; which is faster no GPU has said yet.
SPILLING = ("sums", "states", "states back")
INTERPRETED_TOKENS = 130  # several chunks
# Compute capabilities of A100, H100 and H200, B200.
CAPABILITIES = (80, 90, 100)
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}
PRECISIONS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "ieee"}
# Arguments that are of the inputs' type, and those that are states as they enter products.
INPUTS = {"q", "k", "v", "x", "y", "out", "own", "other", "own_y", "other_y", "grad_out", "a", "b", "w"}
STATES = {"state", "before", "projected"}
# What Triton knows to be a multiple of 16 at a launch of such sizes, besides addresses and strides.
SIZES = ("K", "D", "M", "V", "L")


class Kernel(NamedTuple):
    """A kernel, the constants and the tiles it is compiled for, and the types that its arguments' names do not say."""

    source: Any
    constants: Mapping[str, object]
    tiles: Tiles
    types: Mapping[str, str] = {}


class Compiled(NamedTuple):
    """Registers and bytes of spilled ones, of a thread; bytes of shared memory; matrix instructions by their shape."""

    registers: int
    spilled: int
    shared: int
    products: dict[str, int]


def kernels_of(tiles: Tiles, dtype: torch.dtype, size: int) -> dict[str, Kernel]:
    """Those of linear attention of so many columns, projections and values: a Gaussian map, gates, no documents."""
    from dist_attn.ops.linear_attention import triton_decode, triton_gradients, triton_outputs, triton_states

    precision, columns = {"PRECISION": PRECISIONS[dtype]}, {"BLOCK_X": power_tile(size)}
    blocks = {"T": tiles.chunk, "BLOCK_D": tiles.block_d, "BLOCK_V": tiles.block_v, **columns}
    map_form: dict[str, object] = {"MAP": "gaussian", "UNIT": True}
    sizes = {"K": size, "D": size, "M": 2 * size, "V": size}
    made = {**map_form, **precision, **blocks, **sizes}
    optional = {"HAS_GATE": True, "HAS_SCALE": True, "HAS_DOCUMENTS": False}
    walk: dict[str, object] = {"HAS_START": False, "REVERSE": False, "WITH_DOT": False, "ALIKE": True}
    walk = {**made, **walk, "BLOCK_D": tiles.sum_d, "BLOCK_V": tiles.sum_v}
    of_values, step = tiles.of_features_gradient(size, projects=True), triton_decode.STEP_TILES
    four = replace(tiles, warps=4)
    causal = {**made, **optional, "BLOCK_V": of_values.block_v, "PAIRS": True, "WITH_ROWS": True}
    full = {**causal, "PAIRS": False, "HAS_GATE": False}
    # Gradients of projections are states' type where they enter products later.
    projections = {"grad_ptr": "*bf16" if dtype == torch.bfloat16 else "*fp32"}
    inputs = {"grad_ptr": POINTERS[dtype]}
    square = min(64, power_tile(size))
    gradient = triton_gradients.features_gradient_kernel
    return {
        "sums": Kernel(triton_states.sums_kernel, walk, tiles),
        "scan": Kernel(triton_states.scan_kernel, {"REVERSE": False, "BLOCK": 1024}, four),
        "states": Kernel(triton_states.sums_kernel, {**walk, "HAS_START": True}, tiles),
        "states back": Kernel(
            triton_states.sums_kernel,
            {**walk, "HAS_START": True, "REVERSE": True, "WITH_DOT": True, "ALIKE": False},
            tiles,
            {"other_ptr": _type("state_ptr", dtype)},
        ),
        "outputs": Kernel(triton_outputs.outputs_kernel, {"KIND": "floor", **optional, **made}, tiles),
        "gradient of values": Kernel(triton_gradients.values_gradient_kernel, {**optional, **made}, tiles, inputs),
        "gradient of queries' features": Kernel(gradient, {"KEYS": False, **causal}, of_values, projections),
        "gradient of keys' features": Kernel(gradient, {"KEYS": True, **causal}, of_values, projections),
        "gradient of queries, of keys": Kernel(
            triton_gradients.inputs_gradient_kernel,
            {"UNIT": True, **precision, **columns, "T": tiles.chunk, "BLOCK_D": tiles.block_d},
            tiles,
            inputs,
        ),
        "gradient of w": Kernel(
            triton_gradients.map_gradient_kernel,
            {**precision, "T": tiles.chunk, "BLOCK_D": square, "BLOCK_K": square},
            four,
        ),
        "full read": Kernel(triton_outputs.read_kernel, {"KIND": "floor", "HAS_WEIGHT": False, **made}, tiles),
        "full gradient of queries' features": Kernel(
            gradient, {"KEYS": False, **full, "WITH_ROWS": False, "HAS_SCALE": False}, of_values, projections
        ),
        "full gradient of keys' features": Kernel(gradient, {"KEYS": True, **full}, of_values, projections),
        "step": Kernel(
            triton_decode.step_kernel,
            {"KIND": "floor", "HAS_GATE": True, "HAS_SCALE": True, **map_form, **columns, **sizes}
            | {"BLOCK_D": step.block_d, "BLOCK_V": step.block_v, "STAGES": step.stages},
            step,
            {"w_ptr": "*fp32", "guarded_ptr": "*i1"},
        ),
    }


def relative_kernels(tiles: Tiles, dtype: torch.dtype) -> dict[str, Kernel]:
    """As `kernels_of`, those of causal relative attention."""
    from dist_attn_papers.ops.relative_attention import triton_gradients, triton_outputs
    from dist_attn_papers.ops.relative_attention.triton_launches import window_tiles

    tiles, precision = window_tiles(tiles), {"PRECISION": PRECISIONS[dtype]}
    window: dict[str, object] = {"CAUSAL": True, **precision, "T": tiles.chunk, "BLOCK_V": tiles.block_v}
    whole = {**window, "BLOCK_D": tiles.block_d}
    rows = {**precision, "T": tiles.chunk, "BLOCK_D": tiles.block_d, "BLOCK_R": 32}
    sums = {"T": tiles.chunk, "BLOCK_V": tiles.block_v}
    four, inputs = replace(tiles, warps=4), {"grad_ptr": POINTERS[dtype]}
    features = triton_gradients.relative_features_gradient_kernel
    return {
        "relative positions": Kernel(triton_outputs.positions_kernel, rows, four),
        "relative sums": Kernel(triton_outputs.row_sums_kernel, sums, four),
        "relative outputs": Kernel(triton_outputs.relative_outputs_kernel, whole, tiles),
        "relative gradient of positions": Kernel(triton_gradients.positions_gradient_kernel, window, tiles),
        "relative gradient of queries": Kernel(features, {"KEYS": False, "BLOCK_R": 32, **whole}, tiles, inputs),
        "relative gradient of keys": Kernel(features, {"KEYS": True, "BLOCK_R": 32, **whole}, tiles, inputs),
        "relative gradient of values": Kernel(triton_gradients.relative_values_gradient_kernel, whole, tiles, inputs),
    }


def compiled(kernel: Kernel, dtype: torch.dtype, capability: int) -> Compiled:
    """What Triton and its ptxas make of a kernel for GPUs of this compute capability."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.source.arg_names
    constants = {p.name: kernel.constants[p.name] for p in kernel.source.params if p.is_constexpr}
    signature = {n: "constexpr" if n in constants else kernel.types.get(n) or _type(n, dtype) for n in names}
    # As at a launch: addresses and row lengths of whole 16 bytes may be read as such.
    aligned = [n not in constants and (n.endswith("_ptr") or "_stride_" in n or n in SIZES) for n in names]
    attributes = {(i,): [["tt.divisibility", 16]] for i, whole in enumerate(aligned) if whole}
    made = triton.compile(
        ASTSource(kernel.source, signature, constants, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": kernel.tiles.warps, "num_stages": kernel.tiles.stages},
    )
    said = _assembled(made.asm["ptx"], capability)
    spilled = re.search(r"(\d+) bytes spill stores", said)
    registers = re.search(r"Used (\d+) registers", said)
    assert spilled is not None and registers is not None, said
    return Compiled(int(registers[1]), int(spilled[1]), int(made.metadata.shared), _products(made.asm["ptx"]))


def _assembled(ptx: str, capability: int) -> str:
    """What ptxas says of registers; Triton has run it too, and kept that to itself."""
    import triton

    program = "ptxas-blackwell" if capability >= 100 else "ptxas"
    architecture = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / program
        command = [str(assembler), "-v", f"--gpu-name={architecture}", str(source), "-o", str(Path(folder) / "cubin")]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stderr


def values_of(dtype: str) -> dict[str, float]:
    """By kernel, the largest error of its result over the largest number of the exact one, in Triton's interpreter."""
    command = [sys.executable, "-c", f"from {__spec__.name} import print_values; print_values({dtype!r})"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=True)
    errors: dict[str, dict[str, float]] = json.loads(done.stdout)
    return {kernel: errors[case][result] for kernel, (case, result) in VALUES.items()}


def print_values(dtype: str) -> None:
    """The errors of each case as JSON, in a process that has TRITON_INTERPRET set before Triton is loaded."""
    from benchmarks.gpu.cases import Shape, have_interpreter_count
    from dist_attn_papers.gpu.relative_check import relative_case
    from tests.gpu import kernel_cases

    have_interpreter_count()
    shape, kind = Shape(1, 1, 8, 8, 8), getattr(torch, dtype)
    tokens, reach = INTERPRETED_TOKENS, 20
    rows = {
        way: kernel_cases.linear_case("triton", way, "gaussian", kind, shape, gated, (), tokens)
        for way, gated in (("causal", True), ("full", False), ("step", True))
    }
    rows["relative"] = relative_case("causal", kind, shape, tokens, tokens, reach)
    print(json.dumps({way: row["errors"] for way, row in rows.items()}))


def _products(ptx: str) -> dict[str, int]:
    """ "wgmma m64n128k16 bf16" and the like, and how often each stands there."""
    found: Counter[str] = Counter()
    for name, rest in re.findall(r"\b(wgmma\.mma_async|mma\.sync|tcgen05\.mma)\.([\w.:]+)", ptx):
        shape = re.search(r"m\d+n\d+k\d+", rest)
        kind = re.findall(r"bf16|tf32|f16", rest)[-1]
        found[" ".join([name.partition(".")[0], *([shape[0]] if shape else []), kind])] += 1
    return dict(sorted(found.items()))


def _type(name: str, dtype: torch.dtype) -> str:
    base = name.removesuffix("_ptr")
    if base == name:
        return "fp32" if name in ("scale", "eps") else "i32"
    if base in STATES:
        return "*bf16" if dtype == torch.bfloat16 else "*fp32"
    if base == "documents":
        return "*i32"
    return POINTERS[dtype] if base in INPUTS else "*fp32"


def _finding(
    rows: Mapping[tuple[str, int], Mapping[str, Compiled]],
    tiles: Mapping[tuple[str, int], Tiles],
    values: Mapping[str, Mapping[str, float]],
) -> Measured:
    import triton

    tables = [
        Table(
            f"{dtype}, compute capability {capability / 10:.1f}: {_words(tiles[dtype, capability])}",
            ("kernel", "largest error", "registers", "bytes spilled", "shared memory, KiB", "matrix instructions"),
            tuple(
                (
                    name,
                    f"{values[dtype][name]:.1e}",
                    str(row.registers),
                    str(row.spilled),
                    f"{row.shared / 1024:g}",
                    ", ".join(f"{count} {product}" for product, count in row.products.items()) or "–",
                )
                for name, row in found.items()
            ),
        )
        for (dtype, capability), found in rows.items()
    ]
    numbers = {
        f"{dtype}, {capability / 10:.1f}, {name}, {what}": float(getattr(row, what))
        for (dtype, capability), found in rows.items()
        for name, row in found.items()
        for what in ("registers", "spilled", "shared")
    }
    numbers |= {f"{dtype}, {name}, error": error for dtype, of in values.items() for name, error in of.items()}
    pinned = f"triton=={triton.__version__}\n" in (ROOT / "constraints.txt").read_text()
    case = NAME if pinned else f"{NAME}-triton-{triton.__version__}"
    setting = look_around()
    setting = replace(setting, versions={**setting.versions, "triton": triton.__version__})
    return Measured(tuple(tables), {}, numbers, (), _NOTES, case=case, question=QUESTION, setting=setting)


def _words(tiles: Tiles) -> str:
    return ", ".join(f"{name} {value}" for name, value in asdict(tiles).items())


_NOTES = (
    "Registers are those of one thread, 255 at most; instructions are counted as they stand in the PTX, loops once.",
    "The step has no matrix products: one token of one sequence is a vector.",
    "Errors are those of a result that the kernel has a part in, in Triton's interpreter, over its largest number.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print each kernel as soon as it is compiled, then all tables; 1 where one spills registers that is not to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--size", type=int, default=SIZE, help="of a head, its values and its projections")
    types = {str(t).removeprefix("torch."): t for t in POINTERS}
    parser.add_argument("--dtype", nargs="*", choices=types, default=list(types))
    parser.add_argument("--capability", type=int, nargs="*", choices=CAPABILITIES, default=list(CAPABILITIES))
    parser.add_argument("--tiles", default="{}", help='JSON, as {"chunk": 128, "warps": 8}')
    parser.add_argument("--only", nargs="*", default=[""], help="kernels whose name contains one of these")
    parser.add_argument("--file", action="store_true", help="file what is asked for, though it is a part")
    given = parser.parse_args(arguments)
    values = {name: values_of(name) for name in given.dtype}
    rows: dict[tuple[str, int], dict[str, Compiled]] = {}
    tiles: dict[tuple[str, int], Tiles] = {}
    for name in given.dtype:
        for capability in given.capability:
            dtype, own = types[name], default_tiles(given.size, given.size, given.size, types[name], capability // 10)
            cut = tiles[name, capability] = Tiles(**{**asdict(own), **json.loads(given.tiles)})
            kernels = kernels_of(cut, dtype, given.size) | relative_kernels(cut, dtype)
            found = rows[name, capability] = {}
            for kernel in (k for k in kernels if any(part in k for part in given.only)):
                found[kernel] = compiled(kernels[kernel], dtype, capability)
                print(f"{name} {capability} {kernel}: {found[kernel]._asdict()}", file=sys.stderr, flush=True)
    finding = _finding(rows, tiles, values)
    print(finding.as_markdown())
    if given.file or all(getattr(given, option) == parser.get_default(option) for option in vars(given)):
        print(f"filed as {file_finding(finding)}", file=sys.stderr)
    measured = (item for found in rows.values() for item in found.items())
    return int(any(row.spilled and name not in SPILLING for name, row in measured))


if __name__ == "__main__":
    sys.exit(main())

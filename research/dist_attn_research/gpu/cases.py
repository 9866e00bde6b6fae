"""What `gpu_check` runs: correctness over kinds of inputs, times by length, decode steps, and the choice of tiles."""

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dist_attn import feature_maps
from dist_attn.ops import (
    FeatureMap,
    LinearState,
    linear_attention,
    linear_attention_step,
)
from dist_attn.ops.linear_attention import Implementation, LinearCall, absorb, complete_sums, local_sums
from dist_attn.ops.linear_attention.triton_tiles import candidates, tiles_key

__all__ = [
    "ACCEPTED",
    "DEVICE",
    "Row",
    "Shape",
    "check_correctness",
    "decode_rows",
    "largest_errors",
    "length_row",
    "seconds",
    "tune",
]

Row = dict[str, Any]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Largest accepted error over the largest number of the exact result: a few roundings of the inputs' type.
ACCEPTED = {torch.float32: 2e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}


class Shape(NamedTuple):
    """One size of everything but the length."""

    batch: int
    heads: int
    head_size: int
    projections: int
    values: int

    def map(self, kind: str = "gaussian") -> FeatureMap | None:
        """The feature map of these sizes, sigma = 1."""
        w = torch.randn(self.heads, self.projections, self.head_size, device=DEVICE)
        if kind == "gaussian":
            return feature_maps.Gaussian(w, unit_norm=True)
        return feature_maps.ArcCosine(w, unit_norm=True) if kind == "arc_cosine" else feature_maps.EluPlusOne()

    def inputs(self, length: int, dtype: torch.dtype, *, gated: bool) -> dict[str, torch.Tensor]:
        """q, k and v, and with gates those of RFA-Gate."""
        sizes = {"q": self.head_size, "k": self.head_size, "v": self.values}
        found = {
            name: torch.randn(self.batch, self.heads, length, size, device=DEVICE, dtype=dtype)
            for name, size in sizes.items()
        }
        if gated:
            logit = 2.0 + torch.randn(self.batch, self.heads, length, device=DEVICE)
            found |= {"log_gate_BHS": F.logsigmoid(logit), "key_scale_BHS": torch.sigmoid(-logit)}
        return found


def check_correctness(*, tiny: bool) -> list[Row]:
    """Output, state and every gradient against the streaming form in float64: the largest errors, and whether right."""
    torch.manual_seed(0)
    sizes = [Shape(1, 1, 8, 8, 8)] if tiny else [Shape(2, 2, *s) for s in ((64, 64, 64), (128, 128, 128), (80, 96, 72))]
    length, cuts = (21, (3, 17)) if tiny else (1_003, (5, 6, 64, 700))
    cases = [
        (shape, kind, dtype, gated, documents)
        for shape in sizes
        for kind in ("gaussian", "arc_cosine", "elu")
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
        for gated, documents in ((False, ()), (True, ()), (True, cuts))
        # All maps in one type, all types of one map.
        if kind == "gaussian" or (dtype == torch.bfloat16 and gated and not documents)
    ]
    if not tiny:
        cases.append((Shape(1, 1, 256, 256, 256), "gaussian", torch.bfloat16, True, ()))
    full = [(sizes[0], "gaussian", dtype, gated, ()) for dtype in ACCEPTED for gated in (False, True)]
    rows = [_correct(*case, length, "causal") for case in (cases[:3] if tiny else cases)]
    return rows + [_correct(*case, length, way) for case in full[: 2 if tiny else None] for way in ("full", "parts")]


def _correct(
    shape: Shape, kind: str, dtype: torch.dtype, gated: bool, documents: tuple[int, ...], length: int, way: str
) -> Row:
    given = shape.inputs(length, dtype, gated=gated)
    feature_map = shape.map(kind)
    assert feature_map is not None
    weight = torch.randn(shape.batch, shape.heads, length, shape.values, device=DEVICE)
    found = []
    for implementation in ("streaming", "triton"):
        wide = implementation == "streaming"
        leaves = {n: (t.double() if wide else t).detach().clone().requires_grad_() for n, t in given.items()}
        tensors = [(t.double() if wide else t).detach().clone().requires_grad_() for t in feature_map.tensors()]
        q, k, v = (leaves[name] for name in "qkv")
        gates: dict[str, Any] = {name: t for name, t in leaves.items() if name not in "qkv"}
        attend = _by_parts if way == "parts" else partial(linear_attention, causal=way == "causal", documents=documents)
        out, after = attend(
            q,
            k,
            v,
            feature_map=feature_map.with_tensors(*tensors),
            implementation="streaming" if wide else "triton",
            **gates,
        )
        ((out.double() * weight).sum() + after.s_BHMV.double().square().mean()).backward()
        grads = {f"grad {name}": t.grad for name, t in leaves.items()}
        grads |= {f"grad map {number}": t.grad for number, t in enumerate(tensors)}
        found.append({"out": out, "state": after.s_BHMV, **grads})
    errors = largest_errors(*found)
    options = f"gated={gated} documents={len(documents)}"
    case = f"linear {way} {kind} {str(dtype).removeprefix('torch.')} {tuple(shape)} {options}"
    return {"case": case, "errors": errors, "right": all(error < ACCEPTED[dtype] for error in errors.values())}


def _by_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    feature_map: FeatureMap | None,
    implementation: Implementation,
    log_gate_BHS: torch.Tensor | None = None,
    key_scale_BHS: torch.Tensor | None = None,
) -> tuple[torch.Tensor, LinearState]:
    """What a rank computes of a causal pass, here after what another one like it left behind."""
    call = LinearCall(q, k, v, log_gate_BHS, key_scale_BHS, feature_map=feature_map, implementation=implementation)
    before = absorb(call)
    sums, after = local_sums(call)
    return complete_sums(replace(call, state=before), sums), before.combine(after)


def largest_errors(want: dict[str, torch.Tensor | None], got: dict[str, torch.Tensor | None]) -> dict[str, float]:
    """The largest difference over the largest number, of each."""
    errors = {}
    for name, exact in want.items():
        ours = got[name]
        assert exact is not None and ours is not None, name
        difference = ours.detach().double() - exact.detach().double()
        errors[name] = float(difference.abs().max() / exact.detach().abs().max())
    return errors


def tune(shape: Shape, length: int, *, few: bool) -> Row:
    """Forward and backward with each set of tiles: the fastest, and what calls it is for."""
    from dist_attn.ops.linear_attention.triton import triton_linear_attention

    given = shape.inputs(length, torch.bfloat16, gated=False)
    q, k, v = (given[name].requires_grad_() for name in "qkv")
    feature_map = shape.map()
    rows: list[Row] = []
    sizes = (shape.head_size, shape.projections, shape.values)
    for tiles in candidates(*sizes, torch.bfloat16)[: 2 if few else None]:

        def work(tiles: Any = tiles) -> None:
            out, _ = triton_linear_attention(LinearCall(q, k, v, feature_map=feature_map), tiles=tiles)
            out.backward(torch.ones_like(out))

        try:
            rows.append({"tiles": asdict(tiles), "seconds": seconds(work, rounds=1 if few else 3)})
        except Exception as error:  # too much shared memory, for one
            rows.append({"tiles": asdict(tiles), "error": f"{type(error).__name__}: {error}"[:200]})
    timed = [row for row in rows if "seconds" in row]
    best = min(timed, key=lambda row: float(row["seconds"]))
    return {"key": tiles_key(q, v, feature_map), "best": best, "rows": rows}


def length_row(shape: Shape, length: int, *, tiny: bool) -> Row:
    """Seconds forward, and forward and backward, in bf16, of every implementation that can."""
    rounds = 1 if tiny else 10
    row: Row = {"length": length}
    given = shape.inputs(length, torch.bfloat16, gated=True)
    q, k, v = (given[name].requires_grad_() for name in "qkv")
    gates: dict[str, Any] = {name: t.requires_grad_() for name, t in given.items() if name not in "qkv"}
    feature_map = shape.map()
    name: Implementation = "triton"  # by its name, so that an obstacle is an error
    works: dict[str, Callable[[], torch.Tensor]] = {
        "kernels": lambda: linear_attention(q, k, v, feature_map=feature_map, implementation=name)[0],
        "kernels gated": lambda: linear_attention(q, k, v, feature_map=feature_map, implementation=name, **gates)[0],
        "kernels full": lambda: linear_attention(q, k, v, feature_map=feature_map, causal=False, implementation=name)[
            0
        ],
        "kernels by parts": lambda: _by_parts(q, k, v, feature_map=feature_map, implementation=name)[0],
        "streaming": lambda: linear_attention(q, k, v, feature_map=feature_map, implementation="streaming")[0],
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        **_peer(shape, length),
    }
    for title, work in works.items():
        if title == "streaming" and length > 8_192:
            continue  # its blocks are of a CPU's cache: on a GPU it is all launches
        try:
            with torch.no_grad():
                row[title] = seconds(work, rounds)

            def both(work: Callable[[], torch.Tensor] = work) -> None:
                out = work()
                out.backward(torch.ones_like(out))

            row[f"{title} with backward"] = seconds(both, max(1, rounds // 2))
        except Exception as error:  # out of memory, or a peer that does not fit this torch
            row[title] = f"{type(error).__name__}: {error}"[:300]
    for peer in ("sdpa", "chunk_simple_gla"):
        for suffix in ("", " with backward"):
            ours, theirs = row.get(f"kernels{suffix}"), row.get(f"{peer}{suffix}")
            if isinstance(ours, float) and isinstance(theirs, float):
                row[f"{peer} / kernels{suffix}"] = theirs / ours
    return row


def _peer(shape: Shape, length: int) -> dict[str, Callable[[], torch.Tensor]]:
    """flash-linear-attention's kernel on features that are there already, with as large a state; nothing without it."""
    try:
        from fla.ops.simple_gla import chunk_simple_gla
    except Exception:  # not installed, or not for this triton
        return {}
    sizes = (2 * shape.projections, 2 * shape.projections, shape.values)
    q, k, v = (
        torch.randn(shape.batch, length, shape.heads, n, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
        for n in sizes
    )
    gate = F.logsigmoid(torch.randn(shape.batch, length, shape.heads, device=DEVICE))
    return {"chunk_simple_gla": lambda: chunk_simple_gla(q, k, v, g=gate)[0]}


def decode_rows(shape: Shape, batches: tuple[int, ...], *, tiny: bool) -> list[Row]:
    """Seconds of one step by the kernel and by eager torch, and bytes of state moved a second."""
    rows: list[Row] = []
    for batch in batches:
        sized = shape._replace(batch=batch)
        given = sized.inputs(1, torch.bfloat16, gated=True)
        tokens = [given[name][:, :, 0].contiguous() for name in "qkv"]
        gates: dict[str, Any] = {
            "log_gate_BH": given["log_gate_BHS"][:, :, 0],
            "key_scale_BH": given["key_scale_BHS"][:, :, 0],
        }
        state = LinearState.identity(batch, shape.heads, 2 * shape.projections, shape.values, device=DEVICE)
        feature_map = sized.map()
        step: Callable[..., object] = partial(
            linear_attention_step, tokens[0], tokens[1], tokens[2], state, feature_map=feature_map, **gates
        )
        row: Row = {"batch": batch}
        with torch.no_grad():
            row["eager"] = seconds(partial(step, implementation="streaming"), rounds=1 if tiny else 20)
            row["kernel"] = seconds(partial(step, implementation="triton"), rounds=1 if tiny else 20)
            if DEVICE == "cuda":
                row["kernel in a graph"] = seconds(_graph(partial(step, implementation="triton")), rounds=20)
        moved = 2 * 4 * state.s_BHMV.numel()
        fastest = min(value for name, value in row.items() if name.startswith("kernel"))
        rows.append({**row, "state_bytes_moved": moved, "bytes_per_second": moved / fastest})
    return rows


def _graph(step: Callable[[], object]) -> Callable[[], object]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def seconds(work: Callable[[], object], rounds: int) -> float:
    """The median of `rounds`, after one that is not counted (it compiles)."""
    taken = []
    for _ in range(rounds + 1):
        if DEVICE == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            taken.append(float(begin.elapsed_time(end)) / 1e3)
        else:
            began = time.perf_counter()
            work()
            taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])

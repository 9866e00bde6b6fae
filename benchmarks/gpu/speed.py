"""How fast the kernels are: the ratios of docs/measurements/performance.md, and which tiles suit this GPU.

Beside them torch's exact attention and, where it is installed, flash-linear-attention, as `implementation="fla"` and on
features that are there already ("gla"), all in one run.
"""

import fcntl
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.gpu.cases import DEVICE, Cases, Row, Shape, seconds
from dist_attn.ops import LinearState, affine_recurrence, gated_delta_rule, linear_attention, linear_attention_step
from dist_attn.ops.linear_attention import Implementation, LinearCall
from dist_attn.ops.linear_attention.triton_tiles import Tiles, candidates, tiles_key

__all__ = ["ratio_cases", "tile_cases"]

REFERENCE = Shape(batch=1, heads=16, head_size=128, projections=128, values=128)
SHIPPED = Shape(batch=8, heads=4, head_size=64, projections=64, values=64)
TINY = Shape(batch=1, heads=1, head_size=8, projections=8, values=8)
COPIED = 1 << 30  # numbers that a copy moves once in and once out
AFFINE, WAYS = ("gated_delta", "kda", "gla", "dplr"), ("forward", "forward and backward")
LENGTHS, BATCHES = (131_072, 8_192), (64, 1, 256)  # the first of each is the one with targets


def ratio_cases(*, tiny: bool) -> Cases:
    """The rows that have targets first."""
    shape = TINY if tiny else REFERENCE
    lengths, batches, rounds = ((32,), (2,), 0) if tiny else (LENGTHS, BATCHES, 10)
    return {
        **{f"linear, {one} tokens": partial(_attention, shape, one, rounds, one == lengths[0]) for one in lengths},
        **{f"step, batch {n}": partial(_step, shape._replace(batch=n), rounds, n == batches[0]) for n in batches},
        **{f"affine, {one}": partial(_affine, one, 32 if tiny else 8_192, shape, rounds) for one in AFFINE},
        "affine, long gated delta": partial(_long_delta, *((32, 1, 8) if tiny else (32_768, 64, 128)), rounds),
    }


def _affine(name: str, length: int, shape: Shape, rounds: int) -> Row:
    """Our streaming form against flash-linear-attention's kernels, forward, and forward and backward, in bfloat16."""
    row: Row = {"shape": shape.words, "length": length}
    for which, implementation in _kernels("streaming").items():
        row |= _both_ways(which, _affine_work(name, length, shape.heads, shape.head_size, implementation), rounds)
    pairs = (_pair(f"fla_{name} bfloat16 {way}", row, f"ours {way}", f"fla {way}") for way in WAYS)
    return {**row, "record": {case: times for pair in pairs for case, times in pair.items()}}


def _long_delta(length: int, heads: int, size: int, rounds: int) -> Row:
    """The milliseconds that others publish: 1 x 32,768 tokens, 64 heads of 128, the gated delta rule forward."""
    row: Row = {"shape": f"1x{heads}x{size}", "length": length, "ratios": {}}
    with torch.no_grad():
        for which, implementation in _kernels("auto").items():
            work = _affine_work("gated_delta", length, heads, size, implementation)
            row["ratios"][f"gated delta forward ms, {which}"] = 1e3 * seconds(work, rounds)
    return row


def _affine_work(
    name: str, length: int, heads: int, size: int, implementation: Implementation
) -> Callable[[], torch.Tensor]:
    half, shape = torch.bfloat16, (1, heads, length, size)
    q, k, v, a, b = (F.normalize(torch.randn(shape, device=DEVICE), dim=-1).to(half).requires_grad_() for _ in range(5))
    decays = 1 if name == "gated_delta" else size
    decay = F.logsigmoid(3 + torch.randn(1, heads, length, decays, device=DEVICE)).requires_grad_()
    if name in ("gla", "dplr"):
        erase = (a, b) if name == "dplr" else None
        recur = partial(affine_recurrence, q, k, v, log_decay_BHLK=decay, erase=erase, implementation=implementation)
        return lambda: recur()[0]
    beta = torch.rand(1, heads, length, device=DEVICE).requires_grad_()
    rule = partial(gated_delta_rule, q, k, v, beta_BHL=beta, log_decay_BHLK=decay, implementation=implementation)
    return lambda: rule()[0]


def _attention(shape: Shape, length: int, rounds: int, has_targets: bool) -> Row:
    """Seconds forward, and forward and backward, in bfloat16; ratios by the names that targets have."""
    given, feature_map = shape.inputs(length, torch.bfloat16, gated=True), shape.map()
    q, k, v, gate, scale = (t.requires_grad_() for t in given.values())
    works: dict[str, Callable[[], torch.Tensor]] = {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        **_features_given(feature_map(q.detach()), feature_map(k.detach()), v, gate),
    }
    for name, implementation in _kernels().items():
        attend = partial(linear_attention, q, k, v, feature_map=feature_map, implementation=implementation)
        works[name] = lambda attend=attend: attend()[0]  # type: ignore[misc]
        gated = partial(attend, log_gate_BHS=gate, key_scale_BHS=scale)
        works[f"{name} gated"] = lambda gated=gated: gated()[0]  # type: ignore[misc]
    row: Row = {"shape": shape.words, "length": length, "ratios": {}, "record": {}}
    for name, work in works.items():
        row |= _both_ways(name, work, rounds)
    for way in WAYS if has_targets else ():
        for peer in ("gla", "sdpa"):
            row["ratios"] |= _ratio(f"{peer} / ours {way}", row, f"{peer} {way}", f"ours {way}")
        for kind in ("", " gated"):
            row["record"] |= _pair(f"bfloat16 {way}{kind}", row, f"ours{kind} {way}", f"fla{kind} {way}")
    return row


def _kernels(ours: Implementation = "triton") -> dict[str, Implementation]:
    """By name, so that an obstacle is an error."""
    return {"ours": ours, **({"fla": "fla"} if find_spec("fla") is not None and DEVICE == "cuda" else {})}


def _ratio(name: str, row: Row, above: str, below: str) -> dict[str, float]:
    """Where both are there."""
    return {name: row[above] / row[below]} if {above, below} <= row.keys() else {}


def _pair(name: str, row: Row, ours: str, fla: str) -> dict[str, dict[str, float]]:
    """Milliseconds of both, where they are there, as the record has them."""
    return {name: {"ours_ms": 1e3 * row[ours], "fla_ms": 1e3 * row[fla]}} if {ours, fla} <= row.keys() else {}


def _both_ways(name: str, forward: Callable[[], torch.Tensor], rounds: int) -> Row:
    """The seconds of each, or why there are none: no memory for one, or a peer that does not fit this torch."""

    def both() -> None:
        out = forward()
        out.backward(torch.ones_like(out))

    row: Row = {}
    works: dict[str, Callable[[], object]] = {"forward": forward, "forward and backward": both}
    for way, work in works.items():
        try:
            with torch.set_grad_enabled(work is both):
                row[f"{name} {way}"] = seconds(work, rounds)
        except Exception as error:
            row[f"{name} {way}, why not"] = f"{type(error).__name__}: {error}"[:300]
    return row


def _features_given(
    phi_q_BHLM: torch.Tensor, phi_k_BHLM: torch.Tensor, v_BHLV: torch.Tensor, log_gate_BHL: torch.Tensor
) -> dict[str, Callable[[], torch.Tensor]]:
    """flash-linear-attention's kernel by itself, without a denominator; nothing where it is not installed."""
    try:
        from fla.ops.simple_gla import chunk_simple_gla
    except Exception:  # not there, or not for this triton
        return {}
    q, k, v = (
        t.detach().to(torch.bfloat16).transpose(1, 2).contiguous().requires_grad_()
        for t in (phi_q_BHLM, phi_k_BHLM, v_BHLV)
    )
    gate = log_gate_BHL.detach().transpose(1, 2).contiguous().requires_grad_()
    return {"gla": lambda: chunk_simple_gla(q, k, v, g=gate)[0]}


def _step(shape: Shape, rounds: int, has_targets: bool) -> Row:
    """Seconds of one step, and what share of the rate of a copy its states come to."""
    given, feature_map = shape.inputs(1, torch.bfloat16, gated=True), shape.map()
    q, k, v, gate, scale = (t[:, :, 0].contiguous() for t in given.values())
    state = LinearState.identity(shape.batch, shape.heads, 2 * shape.projections, shape.values, device=DEVICE)
    step = partial(linear_attention_step, q, k, v, state, feature_map=feature_map, log_gate_BH=gate, key_scale_BH=scale)
    numbers = torch.empty(COPIED if rounds else 64, dtype=torch.bfloat16, device=DEVICE)
    row: Row = {}
    with torch.inference_mode():
        for name, implementation in {"eager": "streaming", **_kernels()}.items():
            row[name] = seconds(partial(step, implementation=implementation), rounds)
        if DEVICE == "cuda":
            row["ours in a graph"] = seconds(_graph(partial(step, implementation="triton")), rounds)
        rate = 2 * numbers.nbytes / seconds(numbers.clone, rounds)
    share = 2 * state.s_BHMV.nbytes / min(row["ours"], row.get("ours in a graph", row["ours"])) / rate
    row |= {"shape": shape.words, "copied_bytes_per_second": rate, "share of bandwidth": share}
    if not has_targets:
        return row
    record = _pair("bfloat16 step gated", row, "ours", "fla")
    return {**row, "ratios": {"decode share of bandwidth": share}, "record": record}


def _graph(step: Callable[[], object]) -> Callable[[], object]:
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def tile_cases(*, tiny: bool) -> Cases:
    """Every set of tiles at the sizes of the reference, and of the models that ship."""
    shapes = {"tiny": TINY} if tiny else {"reference": REFERENCE, "shipped": SHIPPED}
    return {
        f"{name} {tiles}": partial(_tiles, shape, tiles, *((32, 0) if tiny else (32_768, 5)))
        for name, shape in shapes.items()
        for tiles in candidates(shape.projections, shape.values)[: 2 if tiny else None]
    }


def _tiles(shape: Shape, tiles: Tiles, length: int, rounds: int) -> Row:
    """Forward and backward with these, and what calls they are for."""
    from dist_attn.ops.linear_attention.triton import triton_linear_attention

    given, feature_map = shape.inputs(length, torch.bfloat16, gated=False), shape.map()
    q, k, v = (t.requires_grad_() for t in given.values())

    def work() -> None:
        out, _ = triton_linear_attention(LinearCall(q, k, v, feature_map=feature_map), tiles=tiles)
        out.backward(torch.ones_like(out))

    try:
        work()  # it compiles, while another process measures
    except Exception as error:  # too much shared memory, for one
        return {"cannot": f"{type(error).__name__}: {error}"[:200]}
    with (Path(tempfile.gettempdir()) / "dist-attn-gpu-check").open("w") as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        taken = seconds(work, rounds)
    return {"key": tiles_key(q, v, feature_map), "tiles": asdict(tiles), "seconds": taken}

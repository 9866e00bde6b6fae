"""How fast the kernels are: the ratios of docs/measurements/performance.md, and which tiles suit this GPU.

Beside them torch's exact attention and, in pieces of its own, flash-linear-attention: as `implementation="fla"`, and on
features that are there already ("gla"). A case is one time, so that none waits for another: its name is the operation,
its size, who computes it, and which way.
"""

import fcntl
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F

from benchmarks.gpu.cases import DEVICE, Cases, Row, Shape, device_seconds
from dist_attn.ops import LinearState, affine_recurrence, gated_delta_rule, linear_attention, linear_attention_step
from dist_attn.ops.linear_attention import Implementation, LinearCall
from dist_attn.ops.linear_attention.triton_tiles import Tiles, candidates, tiles_key

__all__ = [
    "REFERENCE",
    "TINY",
    "fla_time_cases",
    "linear_work",
    "peer_cases",
    "ratio_cases",
    "ratios_from",
    "record_from_times",
    "tile_cases",
    "with_gradients",
]

REFERENCE = Shape(batch=1, heads=16, head_size=128, projections=128, values=128)
SHIPPED = Shape(batch=8, heads=4, head_size=64, projections=64, values=64)
TINY = Shape(batch=1, heads=1, head_size=8, projections=8, values=8)
COPIED = 1 << 30  # numbers that a copy moves once in and once out
AFFINE, WAYS = ("gated_delta", "kda", "gla", "dplr"), ("forward", "forward and backward")
LENGTHS, BATCHES = (131_072, 8_192, 32_768), (64, 1, 256)  # the first of each is the one with targets
# Sizes of the milliseconds that others publish: tokens, heads and their size; of linear attention batch, heads, tokens.
LONG_DELTA = (32_768, 64, 128)
PUBLISHED = ((1, 96, 8_192), (2, 16, 16_384))
Work = Callable[[], torch.Tensor]


def ratio_cases(*, tiny: bool) -> Cases:
    """Ours and what torch has, with what has targets first."""
    shape, lengths, batches, rounds = _sizes(tiny)
    first, *others = lengths
    return {
        **_linear_cases(shape, [first], ("ours", "sdpa", "ours gated"), rounds),
        **{f"step {n}": partial(_step, shape._replace(batch=n), rounds) for n in batches[:1]},
        **_linear_cases(shape, others, ("ours", "sdpa", "ours gated", "streaming gated"), rounds),
        **{f"step {n}": partial(_step, shape._replace(batch=n), rounds) for n in batches[1:]},
        **_linear_cases(shape, [first], ("streaming gated",), rounds),
        **_published_cases(tiny, rounds),
        **_delta_cases("streaming", tiny, rounds),
        **_affine_cases("ours", tiny, rounds),
    }


def peer_cases(*, tiny: bool) -> Cases:
    """What others' kernels take by themselves; none where flash-linear-attention is not installed."""
    shape, lengths, _, rounds = _sizes(tiny)
    return _of_fla({**_delta_cases("fla", tiny, rounds), **_linear_cases(shape, lengths, ("gla",), rounds)})


def fla_time_cases(*, tiny: bool) -> Cases:
    """flash-linear-attention's kernels behind our operations, and what `auto` then takes of the long delta rule."""
    shape, lengths, batches, rounds = _sizes(tiny)
    cases: Cases = {
        **_delta_cases("auto", tiny, rounds),
        **_affine_cases("fla", tiny, rounds),
        **_linear_cases(shape, lengths[:1], ("fla", "fla gated"), rounds),
        **{f"step {n} fla": partial(_step_time, shape._replace(batch=n), "fla", rounds) for n in batches[:1]},
    }
    return _of_fla(cases)


def fla_is_there() -> bool:
    """Whether it is installed for a GPU: its tests have it in the interpreter."""
    return DEVICE == "cuda" and find_spec("fla") is not None


def _of_fla(cases: Cases) -> Cases:
    """Those, where it is there; what it refuses is no error."""

    def time_or_reason(work: Callable[[], Row]) -> Row:
        try:
            return work()
        except Exception as error:
            return {"why not": f"{type(error).__name__}: {error}"[:500]}

    return {case: partial(time_or_reason, work) for case, work in cases.items()} if fla_is_there() else {}


def ratios_from(rows: Mapping[str, Row]) -> dict[str, float]:
    """By the names that targets have, of the cases that are there."""
    linear = f"linear {LENGTHS[0]}"
    found = {
        f"{peer} / ours {way}": _quotient(rows, f"{linear} {peer} {way}", f"{linear} ours {way}")
        for way in WAYS
        for peer in ("gla", "sdpa")
    }
    for which, name in (("ours", "auto"), ("fla", "fla"), ("streaming", "streaming")):
        taken = rows.get(_delta_name(name, LONG_DELTA), {}).get("seconds")
        found[f"gated delta forward ms, {which}"] = None if taken is None else 1e3 * taken
    found["decode share of bandwidth"] = rows.get(f"step {BATCHES[0]}", {}).get("share of bandwidth")
    return {name: value for name, value in found.items() if value is not None}


def record_from_times(rows: Mapping[str, Row]) -> dict[str, dict[str, float]]:
    """Milliseconds of ours and of flash-linear-attention's, where both are there, as the record has them."""
    linear, affine = f"linear {LENGTHS[0]}", "affine {} {} {}"
    pairs = {
        f"bfloat16 {way}{kind}": (f"{linear} ours{kind} {way}", f"{linear} fla{kind} {way}")
        for way in WAYS
        for kind in ("", " gated")
    }
    pairs |= {
        f"fla_{one} bfloat16 {way}": (affine.format(one, "ours", way), affine.format(one, "fla", way))
        for one in AFFINE
        for way in WAYS
    }
    pairs["bfloat16 step gated"] = (f"step {BATCHES[0]}", f"step {BATCHES[0]} fla")
    times = {case: 1e3 * row["seconds"] for case, row in rows.items() if "seconds" in row}
    return {
        name: {"ours_ms": times[ours], "fla_ms": times[fla]}
        for name, (ours, fla) in pairs.items()
        if {ours, fla} <= times.keys()
    }


def _quotient(rows: Mapping[str, Row], above: str, below: str) -> float | None:
    times = [row["seconds"] for row in (rows.get(above, {}), rows.get(below, {})) if "seconds" in row]
    return float(times[0] / times[1]) if len(times) == 2 else None


def _sizes(tiny: bool) -> tuple[Shape, tuple[int, ...], tuple[int, ...], int]:
    """Sizes of everything else, lengths, batches and rounds."""
    return (TINY, (32,), (2,), 0) if tiny else (REFERENCE, LENGTHS, BATCHES, 10)


def _linear_cases(shape: Shape, lengths: Sequence[int], names: Sequence[str], rounds: int) -> Cases:
    return {
        f"linear {length} {name} {way}": partial(_linear, shape, length, name, way, rounds)
        for length in lengths
        for name in names
        for way in WAYS
    }


def _published_cases(tiny: bool, rounds: int) -> Cases:
    """Linear attention of the features elu + 1, as many as a head has dimensions."""
    sizes = ((1, 1, 32),) if tiny else PUBLISHED
    return {
        f"linear elu {batch}x{heads}x{length} ours {way}": partial(
            _linear,
            (TINY if tiny else REFERENCE)._replace(batch=batch, heads=heads),
            length,
            "ours",
            way,
            rounds,
            "elu",
        )
        for batch, heads, length in sizes
        for way in WAYS
    }


def _linear(shape: Shape, length: int, name: str, way: str, rounds: int, kind: str = "gaussian") -> Row:
    """Linear attention in bfloat16 by its implementation, SDPA, or flash-linear-attention's kernel by itself."""
    if name == "gla":
        return _features_given(shape, length, way, rounds)
    forward, leaves = linear_work(shape, length, name, kind)
    return _timed(forward, leaves, way, rounds)


def linear_work(shape: Shape, length: int, name: str, kind: str = "gaussian") -> tuple[Work, Sequence[torch.Tensor]]:
    """The forward pass of an implementation or of SDPA, and what it has gradients of."""
    given, feature_map = shape.inputs(length, torch.bfloat16, gated=True), shape.map(kind)
    q, k, v, gate, scale = (t.requires_grad_() for t in given.values())
    if name == "sdpa":
        return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True), (q, k, v)
    which, _, gated = name.partition(" ")
    implementations: dict[str, Implementation] = {"ours": "triton", "streaming": "streaming", "fla": "fla"}
    attend = partial(linear_attention, q, k, v, feature_map=feature_map, implementation=implementations[which])
    if gated:
        attend = partial(attend, log_gate_BHS=gate, key_scale_BHS=scale)
    return lambda: attend()[0], (q, k, v, gate, scale) if gated else (q, k, v)


def _features_given(shape: Shape, length: int, way: str, rounds: int) -> Row:
    """flash-linear-attention's kernel by itself, gated, without a denominator."""
    from fla.ops.simple_gla import chunk_simple_gla

    given, feature_map = shape.inputs(length, torch.bfloat16, gated=True), shape.map()
    q, k, v = (
        t.detach().to(torch.bfloat16).transpose(1, 2).contiguous().requires_grad_()
        for t in (feature_map(given["q"]), feature_map(given["k"]), given["v"])
    )
    gate = given["log_gate_BHS"].transpose(1, 2).contiguous().requires_grad_()
    with _times_alone():
        return _timed(lambda: chunk_simple_gla(q, k, v, g=gate)[0], (q, k, v, gate), way, rounds)


@contextmanager
def _times_alone() -> Iterator[None]:
    """Gated gradients that flash-linear-attention refuses, as Triton compiles them wrong, still take their time."""
    kernels = import_module("fla.ops.common.chunk_o")
    refuses = getattr(kernels, "IS_NVIDIA_HOPPER", False)
    kernels.IS_NVIDIA_HOPPER = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        kernels.IS_NVIDIA_HOPPER = refuses  # type: ignore[attr-defined]


def _timed(forward: Work, leaves: Sequence[torch.Tensor], way: str, rounds: int) -> Row:
    """Seconds of one way."""
    backward = way != "forward"
    with torch.set_grad_enabled(backward):
        return {"seconds": device_seconds(with_gradients(forward, leaves) if backward else forward, rounds)}


def with_gradients(forward: Work, leaves: Sequence[torch.Tensor]) -> Callable[[], object]:
    """Both passes; gradients are handed out and not added up, which would be a pass of its own."""

    def both() -> object:
        out = forward()
        return torch.autograd.grad(out, leaves, torch.ones_like(out))

    return both


def _affine_cases(who: str, tiny: bool, rounds: int) -> Cases:
    """Our streaming form or flash-linear-attention's kernels, in bfloat16."""
    length, heads, size = (32, 1, 8) if tiny else (8_192, REFERENCE.heads, REFERENCE.head_size)
    implementation: Implementation = "fla" if who == "fla" else "streaming"
    return {
        f"affine {name} {who} {way}": partial(_affine, name, length, heads, size, implementation, way, rounds)
        for name in AFFINE
        for way in WAYS
    }


def _delta_cases(implementation: Implementation, tiny: bool, rounds: int) -> Cases:
    """The gated delta rule forward at the size of published milliseconds."""
    sizes = (32, 1, 8) if tiny else LONG_DELTA
    work = partial(_affine, "gated_delta", *sizes, implementation, "forward", rounds)
    return {_delta_name(implementation, sizes): work}


def _delta_name(who: str, sizes: tuple[int, int, int]) -> str:
    return f"delta {'x'.join(map(str, sizes))} {who} forward"


def _affine(
    name: str, length: int, heads: int, size: int, implementation: Implementation, way: str, rounds: int
) -> Row:
    half, shape = torch.bfloat16, (1, heads, length, size)
    q, k, v, a, b = (F.normalize(torch.randn(shape, device=DEVICE), dim=-1).to(half).requires_grad_() for _ in range(5))
    decays = 1 if name == "gated_delta" else size
    decay = F.logsigmoid(3 + torch.randn(1, heads, length, decays, device=DEVICE)).requires_grad_()
    if name in ("gla", "dplr"):
        erase = (a, b) if name == "dplr" else None
        recur = partial(affine_recurrence, q, k, v, log_decay_BHLK=decay, erase=erase, implementation=implementation)
        return _timed(lambda: recur()[0], (q, k, v, decay, *(erase or ())), way, rounds)
    beta = torch.rand(1, heads, length, device=DEVICE).requires_grad_()
    rule = partial(gated_delta_rule, q, k, v, beta_BHL=beta, log_decay_BHLK=decay, implementation=implementation)
    return _timed(lambda: rule()[0], (q, k, v, beta, decay), way, rounds)


def _step_work(shape: Shape, implementation: Implementation) -> tuple[Callable[[], object], LinearState]:
    """A decode step in bfloat16 with gates, and the state that it is taken from."""
    given, feature_map = shape.inputs(1, torch.bfloat16, gated=True), shape.map()
    q, k, v, gate, scale = (t[:, :, 0].contiguous() for t in given.values())
    state = LinearState.identity(shape.batch, shape.heads, 2 * shape.projections, shape.values, device=DEVICE)
    step = partial(linear_attention_step, q, k, v, state, feature_map=feature_map, log_gate_BH=gate, key_scale_BH=scale)
    return partial(step, implementation=implementation), state


def _step_time(shape: Shape, implementation: Implementation, rounds: int) -> Row:
    with torch.inference_mode():
        return {"seconds": device_seconds(_step_work(shape, implementation)[0], rounds)}


def _step(shape: Shape, rounds: int) -> Row:
    """Seconds of one step, and what share of the rate of a copy its states come to."""
    ours, state = _step_work(shape, "triton")
    numbers = torch.empty(COPIED if rounds else 64, dtype=torch.bfloat16, device=DEVICE)
    with torch.inference_mode():
        row: Row = {"shape": shape.words, "seconds": device_seconds(ours, rounds)}
        row["eager"] = device_seconds(_step_work(shape, "streaming")[0], rounds)
        if DEVICE == "cuda":
            row["in a graph"] = device_seconds(_graph(ours), rounds)
        rate = 2 * numbers.nbytes / device_seconds(numbers.clone, rounds)
    share = 2 * state.s_BHMV.nbytes / min(row["seconds"], row.get("in a graph", row["seconds"])) / rate
    return {**row, "copied_bytes_per_second": rate, "share of bandwidth": share}


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
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    try:
        work()  # it compiles, while another process measures
    except Exception as error:  # too much shared memory, for one
        return {"cannot": f"{type(error).__name__}: {error}"[:200]}
    with (Path(tempfile.gettempdir()) / "dist-attn-gpu-check").open("w") as one_at_a_time:
        fcntl.flock(one_at_a_time, fcntl.LOCK_EX)
        taken = device_seconds(work, rounds)
    return {"key": tiles_key(q, v, feature_map), "tiles": asdict(tiles), "seconds": taken}

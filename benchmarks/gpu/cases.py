"""What every piece of the GPU check is made of: cases by name, their sizes, and times on the device."""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from dist_attn import feature_maps
from dist_attn.ops import FeatureMap

__all__ = ["DEVICE", "Cases", "Row", "Shape", "device_seconds", "have_interpreter_count", "seconds"]

Row = dict[str, Any]
"""What a case found, as JSON; `right` where something was compared."""
Cases = dict[str, Callable[[], Row]]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUEUED_BYTES, QUEUED_CYCLES = 1 << 28, 100_000_000  # more than any cache holds; some 50 ms, in which the host launches


class Shape(NamedTuple):
    """One size of everything but the length."""

    batch: int
    heads: int
    head_size: int
    projections: int
    values: int

    @property
    def words(self) -> str:
        """As it is written in the name of a case."""
        return "x".join(map(str, self))

    def map(self, kind: str = "gaussian") -> FeatureMap:
        """The feature map of these sizes, sigma = 1.

        ReLU's derivative jumps at 0, so what goes into it is not rounded on the way: w is bfloat16, x is not divided.
        """
        w = torch.randn(self.heads, self.projections, self.head_size, device=DEVICE)
        if kind == "gaussian":
            return feature_maps.Gaussian(w, unit_norm=True)
        return feature_maps.ArcCosine(w.bfloat16().float()) if kind == "arc_cosine" else feature_maps.EluPlusOne()

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


def seconds(work: Callable[[], object], rounds: int, budget_s: float = 4.0) -> float:
    """The median of `rounds`, after one that is not counted (it compiles) unless it is all there is.

    Of what is slow there are fewer, at least one: none begins once all together have taken `budget_s`.
    """
    taken: list[float] = []
    for _ in range(rounds + 1):
        if sum(taken[1:]) > budget_s:
            break
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
    return statistics.median(taken[1:] or taken)


def device_seconds(work: Callable[[], object], rounds: int, budget_s: float = 4.0) -> float:
    """The median of `rounds` on the device alone; on a CPU as `seconds`.

    All are queued while the GPU is kept busy, so what the host takes to launch them is not counted, and each finds the
    GPU's cache written over. Of what is slow there are fewer, as in `seconds`.
    """
    if DEVICE != "cuda" or not rounds:
        return seconds(work, rounds, budget_s)
    alone = seconds(work, 1)
    rounds = max(1, min(rounds, int(budget_s / alone)))
    cache, events = torch.empty(QUEUED_BYTES, dtype=torch.int8, device=DEVICE), []
    torch.cuda._sleep(QUEUED_CYCLES)
    for _ in range(rounds):
        cache.zero_()
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        work()
        pair[1].record()
        events.append(pair)
    torch.cuda.synchronize()
    return statistics.median(float(begin.elapsed_time(end)) for begin, end in events) / 1e3


def have_interpreter_count() -> None:
    """Triton 3.6's interpreter reads the bounds of a kernel's loops in a way that numpy 2.5 no longer allows."""
    from triton import __version__
    from triton.runtime import interpreter

    if not __version__.startswith("3.6."):
        return
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched

"""Memory that ranks need against what this host gives, in words: before they start, and when one of them was killed."""

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from dist_attn.control.settings import ControlSettings
from dist_attn.costs import estimate, read_any_costs
from dist_attn.errors import DistAttnError
from dist_attn.host_limits import available_memory, oom_kills
from dist_attn.wire.choices import WeightPrecision

__all__ = ["rank_bytes", "too_little", "why_killed"]

USUAL_TOKENS = 1 << 20


def rank_bytes(folder: Path, ranks: int, weights: WeightPrecision) -> int:
    """The most bytes that each of these ranks holds at once; 0 for a model without formulas."""
    try:
        return estimate(read_any_costs(folder, weights), USUAL_TOKENS, ranks=ranks).memory.peak
    except (DistAttnError, OSError):
        return 0


def too_little(engines: Sequence[ControlSettings]) -> str:
    """Say that the ranks on this host need more memory than is free; empty where they do not or it is not known.

    Pages of the libraries that they share are counted for each of them: it may still be enough.
    """
    each = [(e.ranks // e.agents, rank_bytes(Path(e.model), e.ranks, e.weights)) for e in engines]
    needed = sum(ranks * size for ranks, size in each)
    total, available = available_memory()
    if available is None or needed <= available:
        return ""
    of_all = f" of {_mib(total)}" if total is not None else ""
    ranks = " and ".join(f"{ranks} x {_mib(size)}" for ranks, size in each)
    return f"the ranks need about {_mib(needed)} of memory ({ranks}), and {_mib(available)}{of_all} are free"


def why_killed(exit_code: int | None, kills_before: int | None, need_bytes: Callable[[], int]) -> str:
    """Say whether memory may have ended a process; empty where nothing shows it.

    `kills_before` is what `oom_kills` said when it started: where more are counted now, there is no doubt. `need_bytes`
    tells what it needs, 0 where that is not known.
    """
    kills = oom_kills()
    if kills is not None and kills_before is not None and kills > kills_before:
        cause = "out of memory: the kernel killed a process here"
    elif exit_code == -signal.SIGKILL:
        cause = "often out of memory"
    else:
        return ""
    total, _ = available_memory()
    figures = [f"a rank needs about {_mib(need)}"] if (need := need_bytes()) else []
    figures += [f"the limit is {_mib(total)}"] if total is not None else []
    return f"{cause}; {', '.join(figures)}" if figures else cause


def _mib(size: int) -> str:
    return f"{size / (1 << 20):,.0f} MiB"

"""What was filed: results in the folder of results, their ratios by name, and which of them is the one to look at."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.setting import Setting

__all__ = ["RESULTS", "filed_results", "latest", "ratios_of"]

RESULTS = Path("benchmarks/results")


def filed_results(folder: Path) -> list[dict[str, Any]]:
    """Every filed result that has ratios, each with the name of its `file`; files that are no results are left out."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            values = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(values, dict) and ratios_of(values) and "setting" in values:
            found.append({**values, "file": path.name})
    return found


def ratios_of(filed: Mapping[str, Any]) -> dict[str, float]:
    """By name; none of what has no targets."""
    return dict(filed.get("ratios") or {})


def latest(filed: Sequence[Mapping[str, Any]], case: str, setting: Setting | None = None) -> Mapping[str, Any] | None:
    """The newest result of a case; with a `setting` only of the same machine and number of threads."""
    fitting = [
        one
        for one in filed
        if one["case"] == case
        and (
            setting is None
            or (one["setting"]["machine"], one["setting"]["threads"]) == (setting.machine, setting.threads)
        )
    ]
    return max(fitting, key=lambda one: str(one["setting"]["date"]), default=None)

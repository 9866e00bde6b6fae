"""Where and when a measurement is taken: machine, versions, threads, load, date and commit."""

import datetime
import os
import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.verify import ROOT
from dist_attn import __version__

__all__ = ["Setting", "look_around"]


@dataclass(frozen=True)
class Setting:
    """Where and when a measurement was taken."""

    date: str
    commit: str
    machine: str
    cores: int
    threads: int
    load_average: float
    versions: dict[str, str]

    def sentence(self) -> str:
        """All of it in one line."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return (
            f"{self.date}, commit {self.commit}, {self.machine}, cores: {self.cores}, threads: {self.threads}, "
            f"load: {self.load_average:g}, {versions}."
        )


def look_around() -> Setting:
    """The setting of a measurement that begins now."""
    return Setting(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=_commit(),
        machine=f"{_processor()}, {platform.system()} {platform.machine()}",
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        load_average=round(os.getloadavg()[0], 2),
        versions={"dist-attn": __version__, "torch": torch.__version__, "python": platform.python_version()},
    )


def _commit() -> str:
    """The commit, with "-changed" when tracked files differ from it."""
    commit = _git("rev-parse", "--short=9", "HEAD")
    if not commit:
        return "unknown"
    return f"{commit}-changed" if _git("status", "--porcelain", "--untracked-files=no") else commit


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"

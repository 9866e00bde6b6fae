"""What comes before a number: green tests, and where and when it is measured.

Machine, versions, threads, cores, load, date and commit; a number about something that does not work is worth nothing.
"""

import contextlib
import datetime
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch

from dist_attn import __version__

__all__ = ["ROOT", "Setting", "look_around", "own_cores", "pin_to", "why_red"]

ROOT = Path(__file__).resolve().parent.parent
PEERS = ("transformers", "performer-pytorch", "flash-linear-attention", "xllamacpp", "sentence-transformers")
# What a run writes by itself must not make the next one's commit look changed.
WRITTEN = ("benchmarks/results", "docs/measurements/performance.md", "dist_attn/ops/gpu_record.json")
# Where Python finds what tests import: of this folder, and of papers/ where that is there.
SOURCES = (str(ROOT), str(ROOT / "papers"))
DEADLINE_S = 600.0
LINES_SHOWN = 15


@dataclass(frozen=True)
class Setting:
    """Where and when a measurement was taken; `pinned` are the cores it was kept to, if not all."""

    date: str
    commit: str
    machine: str
    cores: int
    threads: int
    load_average: float
    versions: dict[str, str]
    pinned: tuple[int, ...] = ()

    def sentence(self) -> str:
        """All of it in one line."""
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        pinned = f" (pinned to {', '.join(map(str, self.pinned))})" if self.pinned else ""
        return (
            f"{self.date}, commit {self.commit}, {self.machine}, cores: {self.cores}{pinned}, threads: {self.threads}, "
            f"load: {self.load_average:g}, {versions}."
        )


def look_around() -> Setting:
    """The setting of a measurement that begins now."""
    return Setting(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        commit=_commit(),
        machine=f"{_processor()}, {platform.system()} {platform.machine()}",
        cores=len(own_cores()),
        threads=torch.get_num_threads(),
        load_average=round(os.getloadavg()[0], 2),
        versions={
            "dist-attn": __version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            **_versions_of(PEERS),
        },
        pinned=own_cores() if len(own_cores()) < (os.cpu_count() or 1) else (),
    )


def _versions_of(names: Sequence[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def own_cores() -> tuple[int, ...]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def pin_to(cores: Sequence[int]) -> None:
    """Keep this process to these cores, with a thread for each; where cores cannot be chosen, only the threads."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))


def _commit() -> str:
    """The commit, with "-changed" when tracked files differ from it; of a packed tree that of which it was packed."""
    packed = ROOT / ".gpu/commit"
    if packed.is_file() and not _git("cat-file", "-t", of := packed.read_text().strip()):
        return of  # another place: a machine may make a repository of its own around what it was given
    commit = _git("rev-parse", "--short=9", "HEAD")
    if not commit:
        return "unknown"
    others = (f":(exclude){path}" for path in WRITTEN)
    return f"{commit}-changed" if _git("status", "--porcelain", "--untracked-files=no", "--", ".", *others) else commit


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=20.0, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    """Its name, and family and model where the name alone (of a virtual machine) does not tell generations apart."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    said = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    name = said.get("model name") or platform.processor() or "unknown processor"
    return f"{name} (family {said['cpu family']}, model {said['model']})" if "cpu family" in said else name


def why_red(tests: Sequence[str], *, deadline_s: float = DEADLINE_S) -> str:
    """Run these tests; empty when they pass, else how the run ended."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*SOURCES, os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"the tests did not end within {deadline_s:g} s"
    if done.returncode == 0:
        return ""
    said = (done.stdout + done.stderr).strip().splitlines()
    return "\n".join([f"pytest ended with code {done.returncode}:", *said[-LINES_SHOWN:]])

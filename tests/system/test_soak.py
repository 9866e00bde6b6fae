"""A served engine under mixed work for as long as `--soak-seconds` says: nothing fails, grows or stays open."""

import time
from pathlib import Path
from statistics import median

import psutil
import pytest

from tests.support.served import Served, served
from tests.support.waiting import eventually
from tests.system.workload import Workload

MIB = 1 << 20
CLIENTS = 4
SAMPLE_SECONDS = 0.25
GROWTH_MIB = 12.0
DESCRIPTORS = 8


def resident_mib(parts: dict[str, psutil.Process]) -> dict[str, float]:
    """Memory in use by each process now."""
    return {name: process.memory_info().rss / MIB for name, process in parts.items()}


def growth_mib(samples: list[dict[str, float]]) -> dict[str, float]:
    """How much more each process holds in the last third of the time than in the one before it."""
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[2 * third :]
    return {name: median(s[name] for s in last) - median(s[name] for s in middle) for name in samples[0]}


def soak(whole: Served, parts: dict[str, psutil.Process], seconds: float) -> tuple[Workload, list[dict[str, float]]]:
    """Work for so long; what was done, and the memory meanwhile."""
    work, samples = Workload(whole.url, CLIENTS), []
    work.start()
    try:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            assert whole.program.process.poll() is None, whole.program.output
            samples.append(resident_mib(parts))
            time.sleep(SAMPLE_SECONDS)  # nothing to wait for: this is the clock of the measurement
    finally:
        work.finish()
    return work, samples


def test_a_long_time_of_mixed_work(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """No request fails, no process grows or is replaced, and at the end nothing is open and nothing is left on disk."""
    seconds = float(pytestconfig.getoption("soak_seconds"))
    with served(tmp_path, ranks=2) as whole:
        parts = whole.parts()
        assert sorted(parts) == ["agent", "api", "controller", "rank 1", "rank 2"]
        pids = {name: process.pid for name, process in parts.items()}
        descriptors = {name: process.num_fds() for name, process in parts.items()}
        work, samples = soak(whole, parts, seconds)
        growth = growth_mib(samples)
        print(f"\n{seconds:g} s: {dict(sorted(work.counts.items()))}, {work.tokens / seconds:.0f} tokens/s")
        print(f"MiB at the start {samples[0]}\nMiB at the end   {samples[-1]}\ngrowth of the last third {growth}")

        assert work.errors == []
        assert len(work.counts) == 7, work.counts
        eventually(lambda: {"active": 0, "queued": 0}.items() <= whole.status().items(), "open requests to end")
        assert {name: process.pid for name, process in whole.parts().items()} == pids
        assert {name: mib for name, mib in growth.items() if mib > GROWTH_MIB} == {}
        opened = {name: process.num_fds() - descriptors[name] for name, process in parts.items()}
        assert {name: count for name, count in opened.items() if count > DESCRIPTORS} == {}
        assert list((whole.data / "spool").iterdir()) == []
        assert whole.program.stop() == 0
    assert "Traceback" not in whole.program.output
    assert '"level": "error"' not in whole.program.output

"""Cores and memory that a process may use, by the kernel's files of either version of control groups; time slices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dist_attn import host_limits
from dist_attn.host_limits import (
    MemoryLimit,
    available_memory,
    compute_environment,
    core_quota,
    given_threads,
    memory_limit,
    oom_kills,
    usable_cores,
)
from tests.support.slices import needs_slices

ROOT = Path(__file__).parents[1]
MIB = 1 << 20
V2 = {"memory.current": f"{40 * MIB}", "memory.stat": f"anon 1\ninactive_file {8 * MIB}"}
V1 = {"memory.usage_in_bytes": f"{40 * MIB}", "memory.stat": f"inactive_file 1\ntotal_inactive_file {8 * MIB}"}
NONE_V1 = "9223372036854771712"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of a system with eight cores, without control groups yet."""
    monkeypatch.setattr(host_limits, "ROOT", tmp_path)
    monkeypatch.setattr(host_limits, "affine_cores", lambda: 8)
    return tmp_path


def lay(root: Path, own: str, groups: dict[str, dict[str, str]]) -> None:
    """The kernel's files: which groups this process is in, and what each group's folder holds."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(own)
    for folder, files in groups.items():
        (root / "sys/fs/cgroup" / folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (root / "sys/fs/cgroup" / folder / name).write_text(text)


def test_without_groups_nothing_limits(root: Path) -> None:
    """A system without control groups, or whose files cannot be read, gives all cores and no limit."""
    assert (usable_cores(), core_quota(), memory_limit(), oom_kills()) == (8, None, None, None)
    lay(root, "no groups at all\n", {})
    assert (usable_cores(), core_quota(), memory_limit(), oom_kills()) == (8, None, None, None)


def test_version_2_of_a_group_and_those_above_it(root: Path) -> None:
    """The quota that is least and the memory that is used up first count, wherever on the way up they are set."""
    above = {"memory.max": f"{50 * MIB}", "cpu.max": "350000 100000", "memory.events": "oom_kill 9", **V2}
    own = {"memory.max": f"{90 * MIB}", "cpu.max": "max 100000", "memory.events": "oom 3\noom_kill 2", **V2}
    lay(root, "0::/pod/engine\n", {"": {}, "pod": above, "pod/engine": own})
    assert (usable_cores(), core_quota()) == (4, 3.5)
    assert memory_limit() == MemoryLimit(50 * MIB, 18 * MIB)
    assert oom_kills() == 2


def test_version_1_of_a_group_and_those_above_it(root: Path) -> None:
    """So in the trees of version 1, whose "no limit" is a number, also beside an empty tree of version 2."""
    above = {"memory.limit_in_bytes": f"{70 * MIB}", **V1}
    own = {"memory.limit_in_bytes": NONE_V1, "memory.oom_control": "oom_kill_disable 0\noom_kill 5", **V1}
    groups = {
        "unified": {},
        "memory/a": above,
        "memory/a/b": own,
        "cpu/c": {"cpu.cfs_quota_us": "-1", "cpu.cfs_period_us": "100000"},
        "cpu": {"cpu.cfs_quota_us": "50000", "cpu.cfs_period_us": "100000"},
    }
    lay(root, "5:memory:/a/b\n3:cpu,cpuacct:/c\n1:name=systemd:/\n0::/\n", groups)
    assert (usable_cores(), core_quota()) == (1, 0.5)
    assert memory_limit() == MemoryLimit(70 * MIB, 38 * MIB)
    assert oom_kills() == 5


@pytest.mark.parametrize("own", ["0::/docker/abc\n", "0::/../abc\n", "0::/\n"])
def test_a_container_that_sees_its_own_group_alone(root: Path, own: str) -> None:
    """A container's group stands at the root of what it sees, however the host calls it."""
    lay(root, own, {"": {"memory.max": f"{64 * MIB}", "cpu.max": "200000 100000", **V2}})
    assert (usable_cores(), memory_limit()) == (2, MemoryLimit(64 * MIB, 32 * MIB))


def test_the_less_of_machine_and_group_is_available(root: Path) -> None:
    """Without limits the machine's memory counts, with one the lesser of either, in all and of what is free."""
    lay(root, "0::/\n", {"": {}})
    (root / "proc/meminfo").write_text(f"odd line\nMemTotal: {100 << 10} kB\nMemAvailable: {20 << 10} kB\n")
    assert available_memory() == (100 * MIB, 20 * MIB)
    for name, text in {"memory.max": f"{60 * MIB}", **V2}.items():
        (root / "sys/fs/cgroup" / name).write_text(text)
    assert available_memory() == (60 * MIB, 20 * MIB)


def test_used_beyond_the_limit(root: Path) -> None:
    """A limit that was set below what is used already leaves nothing."""
    lay(root, "0::/\n", {"": {"memory.max": f"{16 * MIB}", **V2}})
    assert memory_limit() == MemoryLimit(16 * MIB, 0)


def test_threads_are_shared_and_waiting_ones_sleep(root: Path) -> None:
    """Ranks share the cores of the quota, at least one thread each, and wait passively; a user's words stay."""
    lay(root, "0::/\n", {"": {"cpu.max": "400000 100000"}})
    passive = {"OMP_WAIT_POLICY": "passive"}
    assert [compute_environment(ranks, {}) for ranks in (1, 3, 9)] == [
        {"OMP_NUM_THREADS": threads, **passive} for threads in ("4", "1", "1")
    ]
    said = {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "active", "HOME": "/"}
    assert compute_environment(2, said) == {"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "active"}


@pytest.mark.parametrize(
    ("said", "threads"), [("3", 3), ("4,2", 4), (" 2 ", 2), ("", None), ("0", None), ("-1", None), ("many", None)]
)
def test_threads_that_openmp_is_told(said: str, threads: int | None) -> None:
    """A number, or the first of a list for nested levels; what OpenMP would not take counts as nothing."""
    assert given_threads({"OMP_NUM_THREADS": said}) == threads
    assert given_threads({}) is None


SLICES = """
import os, threading
from dist_attn.host_limits import ask_for_short_slices
from tests.support.slices import slice_of
os.nice(3)
ask_for_short_slices()
thread = threading.Thread(target=lambda: print(slice_of(0), os.getpriority(os.PRIO_PROCESS, 0)))
thread.start()
thread.join()
os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
ask_for_short_slices()
print(os.sched_getscheduler(0) == os.SCHED_BATCH)
"""


@needs_slices
def test_threads_have_short_slices() -> None:
    """A thread that is started later has slices of 0.1 ms and the niceness of before; another policy stays."""
    done = subprocess.run([sys.executable, "-c", SLICES], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["100000", str(min(19, os.getpriority(os.PRIO_PROCESS, 0) + 3)), "True"], done.stderr

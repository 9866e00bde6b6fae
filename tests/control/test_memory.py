"""Memory in words: what ranks need against the limit of the control group, and what a killed rank died of."""

import signal
from pathlib import Path

import pytest

from dist_attn import host_limits
from dist_attn.control.memory import rank_bytes, too_little, why_killed
from dist_attn.control.settings import ControlSettings
from dist_attn.shipped import resolve_model_folder

MIB = 1 << 20
MODEL = resolve_model_folder("books-6m")


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this process's control group, with a limit of 600 MiB of which 500 are free."""
    monkeypatch.setattr(host_limits, "ROOT", tmp_path)
    files = {
        "proc/self/cgroup": "0::/\n",
        "proc/meminfo": "MemTotal: 8388608 kB\nMemAvailable: 4194304 kB\n",
        "sys/fs/cgroup/memory.max": f"{600 * MIB}",
        "sys/fs/cgroup/memory.current": f"{100 * MIB}",
        "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
        "sys/fs/cgroup/memory.events": "oom_kill 3\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path / "sys/fs/cgroup"


@pytest.mark.usefixtures("group")
def test_what_ranks_need_is_compared_with_the_limit() -> None:
    """Nothing is said of ranks that fit what is free below the limit; of more, of either model, need and limit are."""
    one, two = (ControlSettings(model=str(MODEL), ranks=ranks) for ranks in (1, 2))
    need = rank_bytes(MODEL, 1, "float32") // MIB
    assert 320 < need < 500
    assert too_little([one]) == ""
    for engines in ([two], [one, one]):
        assert "500 MiB of 600 MiB are free" in too_little(engines)
    assert f"(1 x {need} MiB and 1 x {need} MiB)" in too_little([one, one])
    assert too_little([ControlSettings(model="/no model here", ranks=64)]) == ""


def test_a_counted_kill_is_certain_and_another_likely(group: Path) -> None:
    """Where the kernel has counted a kill since, memory is the cause; SIGKILL alone often is; another end is not."""

    def needs() -> int:
        return 700 * MIB

    figures = "; a rank needs about 700 MiB, the limit is 600 MiB"
    assert why_killed(-signal.SIGKILL, 3, needs) == f"often out of memory{figures}"
    assert why_killed(-signal.SIGKILL, None, lambda: 0) == "often out of memory; the limit is 600 MiB"
    assert why_killed(-signal.SIGTERM, 3, needs) == why_killed(1, 3, needs) == why_killed(None, 3, needs) == ""
    (group / "memory.events").write_text("oom_kill 4\n")
    certain = f"out of memory: the kernel killed a process here{figures}"
    assert why_killed(-signal.SIGKILL, 3, needs) == why_killed(None, 3, needs) == certain

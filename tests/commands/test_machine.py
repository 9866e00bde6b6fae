"""What doctor asks of the system: ports, disk, memory, libraries and extras."""

import re
import socket
import tomllib
from pathlib import Path

import pytest

from dist_attn import host_limits
from dist_attn.commands import machine
from dist_attn.commands.machine import MachineFinding, broken, missing, ok

PROJECT = tomllib.loads((Path(machine.__file__).parents[2] / "pyproject.toml").read_text())["project"]


def _name(requirement: str) -> str:
    return re.split(r"[;>\[]", requirement)[0].strip()


def test_libraries_are_those_of_the_project() -> None:
    """The libraries that are looked for are the dependencies that every platform needs."""
    wanted = [_name(line) for line in PROJECT["dependencies"] if ";" not in line]
    assert sorted(machine.LIBRARIES) == sorted(wanted)


def test_extras_are_those_of_the_project() -> None:
    """Every extra but [dev] is looked for, with all its packages; [mpi] among the back ends."""
    extras = PROJECT["optional-dependencies"]
    assert machine.EXTRAS.keys() == extras.keys() - {"dev", "mpi"}
    for name, (packages, _) in machine.EXTRAS.items():
        assert sorted(packages) == sorted(_name(line) for line in extras[name])


def test_a_missing_library_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that is not installed is named, with the command that installs it, and blocks the service."""
    monkeypatch.setattr(machine, "LIBRARIES", ("msgspec", "no-such-library"))
    finding = machine.check_libraries()
    assert (finding.status, finding.blocks) == ("missing", True)
    assert "pip install no-such-library" in finding.advice


def test_a_missing_extra_does_not_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """An extra that is not installed says what it is for and how to get it, and blocks nothing."""
    monkeypatch.setattr(machine, "EXTRAS", {"wings": (("no-such-library",), "flying")})
    (finding,) = machine.check_extras()
    assert (finding.status, finding.blocks) == ("missing", False)
    assert "flying" in finding.detail
    assert "pip install -e '.[wings]'" in finding.advice


def test_kernels_for_a_gpu_are_not_ok_without_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where triton is installed and no GPU is there, the finding says "no GPU"; with a GPU it is ok."""
    monkeypatch.setattr(machine, "EXTRAS", {"gpu": (("numpy",), "kernels")})
    monkeypatch.setattr(machine, "GPU_DRIVERS", (tmp_path / "nvidiactl",))
    (finding,) = machine.check_extras()
    assert (finding.status, finding.blocks) == ("missing", False)
    assert finding.detail.startswith("optional, numpy ")
    assert finding.detail.endswith("; no GPU")
    (tmp_path / "nvidiactl").touch()
    assert machine.check_extras()[0].status == "ok"


def test_ports() -> None:
    """A free port is ok, a taken one is broken and says how to choose another."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        taken = machine.check_port("127.0.0.1", port)
    assert (taken.status, taken.blocks) == ("broken", True)
    assert f"127.0.0.1:{port}" in taken.detail
    assert "--port" in taken.advice
    assert machine.check_port("127.0.0.1", port).status == "ok"
    for host in ("not an address", "h" * 64):
        assert machine.check_port(host, port).status == "broken"


def test_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that is still to be made is ok where it can be; a file in its place or too little room is broken."""
    monkeypatch.setattr(machine, "FREE_DISK_BYTES", 1)
    assert machine.check_disk(tmp_path / "a" / "b").status == "ok"
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").touch()
    assert machine.check_disk(tmp_path / "file").blocks
    assert machine.check_disk(tmp_path / "file" / "below").blocks
    monkeypatch.setattr(machine, "FREE_DISK_BYTES", 1 << 70)
    full = machine.check_disk(tmp_path)
    assert full.blocks
    assert "--data-dir" in full.advice


def test_memory() -> None:
    """Memory is ok for a small model and broken for one that no machine could hold."""
    assert machine.check_memory(1).status == "ok"
    assert machine.check_memory(1 << 60).blocks
    assert machine.check_memory(1 << 50, ranks=1 << 10).blocks
    assert "each of 4 ranks" in machine.check_memory(1, ranks=4).detail
    assert machine.check_memory(1, encoder_bytes=1 << 60).blocks
    assert "the encoder need about 2.0 KiB together" in machine.check_memory(1, encoder_bytes=2048).detail


@pytest.fixture
def cgroup_v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this process's control group, in which the kernel's files may be laid."""
    monkeypatch.setattr(host_limits, "ROOT", tmp_path)
    for folder in ("proc/self", "sys/fs/cgroup"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    return tmp_path / "sys/fs/cgroup"


def test_the_containers_limits_count(cgroup_v2: Path) -> None:
    """A container's limits of memory and processor time are what is reported."""
    files = {"memory.max": 64 << 20, "memory.current": 40 << 20, "memory.stat": f"anon 1\ninactive_file {8 << 20}"}
    for name, text in {**files, "cpu.max": "50000 100000"}.items():
        (cgroup_v2 / name).write_text(str(text))
    memory, cores = machine.check_memory(0), machine.check_cores()
    assert memory.measured == {"available_bytes": 32 << 20}
    assert "of 64.0 MiB" in memory.detail
    assert cores.measured == {"cores": 0.5}


def test_limits_that_are_none(cgroup_v2: Path) -> None:
    """A container without limits is the machine."""
    for name, text in {"memory.max": "max", "memory.current": "1", "cpu.max": "max 100000"}.items():
        (cgroup_v2 / name).write_text(text)
    assert machine.check_cores().measured["cores"] >= 1
    assert machine.check_memory(0).status == "ok"


@pytest.mark.parametrize(
    ("given", "ranks", "fits", "said"),
    [
        ("", 2, True, "2 ranks with 2 threads each"),
        ("2", 2, True, "(OMP_NUM_THREADS=2)"),
        ("3", 2, False, "set it to 2"),
        ("2", 1, True, "1 rank with 2 threads"),
        ("1", 9, True, "9 ranks with 1 thread each"),
        ("2,1", 9, False, "set it to 1"),
    ],
)
def test_threads_that_do_not_fit_the_cores_are_told(
    given: str, ranks: int, fits: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OMP_NUM_THREADS for each rank is at most what the cores allow, or doctor says what to set; it does not block."""
    monkeypatch.setattr(host_limits, "usable_cores", lambda: 4)
    monkeypatch.setenv("OMP_NUM_THREADS", given)
    found = machine.check_cores(ranks)
    assert (found.status, found.blocks) == ("ok" if fits else "broken", False)
    assert said in found.line()


def test_mpi_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without mpi4py or mpiexec the finding names what is missing and the extra; it never blocks."""
    monkeypatch.setattr(machine, "_version", lambda _: None)
    finding = machine.check_mpi()
    assert (finding.status, finding.blocks) == ("missing", False)
    assert "mpi4py" in finding.detail
    assert "pip install -e '.[mpi]'" in finding.advice


def test_python() -> None:
    """The interpreter that runs the tests is new enough."""
    assert machine.check_python().status == "ok"


def test_a_finding_is_one_line() -> None:
    """A finding is one line whatever text it carries; only what is needed and not ok blocks."""
    found = [ok("a", "fine"), missing("b", "not here", "get it"), broken("c", "two\n  lines", "do this")]
    assert [finding.line() for finding in found] == [
        "ok       a          fine",
        "missing  b          not here; get it",
        "broken   c          two lines; do this",
    ]
    assert [finding.blocks for finding in found] == [False, False, True]
    assert not MachineFinding(name="d", status="broken", detail="", needed=False).blocks

"""Which exchange is chosen, from measured times and without any."""

import os
from pathlib import Path

import pytest

from dist_attn.costs import Calibration, ScanTime, calibration_file, default_exchange, read_calibration

TIMES = (
    ScanTime("gloo", 4, "gather", 1_000, 1e-3),
    ScanTime("gloo", 4, "log_step", 1_000, 2e-3),
    ScanTime("gloo", 4, "gather", 1_000_000, 9e-3),
    ScanTime("gloo", 4, "log_step", 1_000_000, 4e-3),
)


def test_the_fastest_at_the_nearest_size() -> None:
    """The exchange is the one that was fastest for the nearest message, as a ratio, of this back end and size."""
    known = Calibration(TIMES)
    assert [known.choose("gloo", 4, size) for size in (1, 31_000, 33_000, 10**9)] == [
        "gather",
        "gather",
        "log_step",
        "log_step",
    ]
    assert known.choose("mpi", 4, 10**6) == known.choose("gloo", 3, 10**6) == "gather"
    assert known.choose("gloo", 4, 10**6, [(0, 1), (2, 3)]) == "gather"


def test_the_scan_of_mpi_is_for_mpi() -> None:
    """A measured exclusive scan counts between ranks of MPI, and nowhere else."""
    times = tuple(ScanTime(backend, 4, "exscan", 1_000, 1e-6) for backend in ("mpi", "gloo"))
    known = Calibration((*times, *TIMES))
    assert known.choose("mpi", 4, 1_000) == "exscan"
    assert known.choose("gloo", 4, 1_000) == "gather"


@pytest.mark.parametrize(
    ("ranks", "hosts", "name"),
    [
        (2, [], "pair"),
        (8, [(0, 1, 2, 3), (4, 5, 6, 7)], "gather"),
        (9, [], "log_step"),
        (12, [tuple(range(6)), tuple(range(6, 12))], "two_level"),
        (12, [tuple(range(0, 12, 2)), tuple(range(1, 12, 2))], "log_step"),
        (12, [(rank,) for rank in range(12)], "log_step"),
    ],
)
def test_the_rule_of_thumb(ranks: int, hosts: list[tuple[int, ...]], name: str) -> None:
    """Without times: a pair swaps, few ranks gather, many scan in log steps, or over hosts of consecutive ranks."""
    assert default_exchange(ranks, hosts) == name
    assert Calibration().choose("gloo", ranks, 1000, hosts) == name


def test_many_ranks_of_mpi() -> None:
    """Above 8 ranks MPI scans states of up to 1 MiB itself; larger ones take log steps, several hosts levels."""
    assert Calibration().choose("mpi", 16, 1 << 20) == "exscan"
    assert Calibration().choose("mpi", 16, (1 << 20) + 1) == "log_step"
    assert Calibration().choose("mpi", 8, 1000) == "gather"
    assert Calibration().choose("mpi", 12, 1000, [tuple(range(6)), tuple(range(6, 12))]) == "two_level"


def test_a_file_comes_back(tmp_path: Path) -> None:
    """What is written is read; newer times replace those of as many ranks, and only those."""
    file = calibration_file({"XDG_CACHE_HOME": str(tmp_path)})
    assert read_calibration(file) == Calibration()
    newer = (ScanTime("gloo", 2, "pair", 1_000, 1e-3),)
    Calibration(TIMES).with_times(newer).write(file)
    assert read_calibration(file) == Calibration((*TIMES, *newer))
    slower = (ScanTime("gloo", 4, "gather", 1_000, 9.0),)
    assert read_calibration(file).with_times(slower).times == (*newer, *slower)
    assert sorted(path.name for path in file.parent.iterdir()) == ["exchanges.json"]


def test_entries_that_nobody_measured_count_for_nothing() -> None:
    """Unknown names, a pair of four, sizes of 0 and messages of nothing leave the rule or the entries that remain."""
    odd = (
        ScanTime("gloo", 4, "carrier_pigeon", 1_000, 1e-9),
        ScanTime("gloo", 4, "pair", 1_000, 1e-9),
        ScanTime("gloo", 4, "log_step", 0, 1e-9),
    )
    assert Calibration(odd).choose("gloo", 4, 1_000) == "gather"
    assert Calibration((*odd, *TIMES)).choose("gloo", 4, 10**6) == "log_step"
    assert Calibration(TIMES).choose("gloo", 4, 0) == "gather"


def test_a_user_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose user has no home, as in containers, has a place for the file too, and nothing in it."""
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    file = calibration_file({})
    assert file.is_absolute() and file.parent.name == f"dist-attn-{os.getuid()}"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"times": [{"backend": 1}]}'])
def test_what_is_no_calibration_is_none(tmp_path: Path, text: str) -> None:
    """A damaged file is as good as none."""
    file = tmp_path / "exchanges.json"
    file.write_text(text)
    assert read_calibration(file) == Calibration()

"""Timing the exchanges: real processes, every exchange, the times kept where ranks find them."""

from pathlib import Path

import pytest

from dist_attn.commands import calibrate as module
from dist_attn.commands.calibrate import calibrate
from dist_attn.costs import calibration_file, read_calibration
from dist_attn.errors import EngineError
from dist_attn.launchers import lacks_for_mpi

pytestmark = pytest.mark.slow


def test_times_are_measured_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two processes time every exchange, the times are in the user's cache, and the fastest is named."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "HEADS", (1,))
    measure = module.measure_exchanges
    monkeypatch.setattr(
        module, "measure_exchanges", lambda ranks, backend: measure(ranks, backend, heads=(1,), rounds=2)
    )
    monkeypatch.setattr(module, "lacks_for_mpi", lambda: ["mpi4py"])
    (finding,) = calibrate((2,))
    times = read_calibration(calibration_file({"XDG_CACHE_HOME": str(tmp_path)})).times
    assert {t.algorithm for t in times} == {"pair", "gather", "log_step", "pipelined_ring"}
    assert all(t.ranks == 2 and t.backend == "gloo" and 0 < t.seconds < 5 for t in times)
    assert {t.message_bytes for t in times} == {4 * (128 * 65 + 2)}
    fastest = min(times, key=lambda t: t.seconds).algorithm
    assert finding.status == "ok"
    assert f"fastest between 2 ranks: {fastest} for" in finding.detail


@pytest.mark.skipif(bool(lacks_for_mpi()), reason="needs mpi4py and mpiexec: pip install -e '.[mpi]'")
def test_mpi_is_measured_too() -> None:
    """Three ranks of mpiexec time every exchange that they could choose, MPI's own scan among them."""
    times = module.measure_exchanges(3, "mpi", heads=(1,), rounds=2)
    assert {t.algorithm for t in times} == {"gather", "log_step", "pipelined_ring", "exscan"}
    assert all(t.ranks == 3 and t.backend == "mpi" and 0 < t.seconds < 5 for t in times)


def test_what_cannot_be_measured_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where ranks cannot be timed the finding says why, and nothing is kept."""

    def fails(ranks: int, backend: str) -> None:
        raise EngineError("no room")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(module, "measure_exchanges", fails)
    monkeypatch.setattr(module, "lacks_for_mpi", lambda: ["mpi4py"])
    (finding,) = calibrate((4,))
    assert (finding.status, finding.blocks) == ("missing", False)
    assert "no room" in finding.detail
    assert not calibration_file({"XDG_CACHE_HOME": str(tmp_path)}).exists()

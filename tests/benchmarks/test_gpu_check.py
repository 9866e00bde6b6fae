"""`make gpu`: all of it runs without a GPU, survives the end of its time, and its record says what was found."""

import json
import multiprocessing
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu import results as filing
from benchmarks.gpu import speed
from benchmarks.gpu.results import Results, record_from, take_over
from benchmarks.gpu_check import PIECES, main
from benchmarks.report import file_finding
from benchmarks.setting import look_around
from dist_attn.commands import cli
from dist_attn.ops.gpu_record import keep_record
from tests.gpu import adapted_cases, model_cases, rank_cases, service_cases
from tests.gpu.model_cases import dist_attn
from tests.support.fla import fla_adapter
from tests.support.ranks import forkserver

pytest.importorskip("triton", reason="needs triton: pip install -e '.[gpu]'")

__all__ = ["fla_adapter"]

SETTING = {"device": "a GPU", "driver": "5", "torch": "2", "triton": "3", "commit": "c", "tiny": False}


def found_in(file: Path, *rows: dict[str, object]) -> Results:
    """A file with these lines below one of a start."""
    found = Results(file, SETTING)
    for row in ({"setting": SETTING, "around": {}}, *rows):
        found.write(row)
    return found


def kernel(case: str, error: float, *, right: bool = True) -> dict[str, object]:
    """A line of a case."""
    return {"piece": "kernels", "case": case, "errors": {"out": error}, "right": right}


def test_without_a_gpu_it_says_what_to_do(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One line that names `--tiny`, status 2, and no file."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main([f"--json={tmp_path / 'f'}"]) == 2
    said = capsys.readouterr().err
    assert "--tiny" in said and said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_piece_is_done_when_all_of_it_was_tried_and_is_right(tmp_path: Path) -> None:
    """The newest line of a case counts; what did not end, and what another setting found, is still to be done."""
    end = {"piece": "kernels", "case": "", "ended": True}
    found = found_in(tmp_path / "f", kernel("linear a", 1.0, right=False), end)
    assert found.ended("kernels") and not found.is_right("kernels")
    found.write(kernel("linear a", 1e-6))
    assert found.is_right("kernels")
    found.write({"piece": "kernels", "case": "linear b", "error": "it did not end"})
    assert not found.is_right("kernels")
    assert not Results(found.file, {**SETTING, "commit": "d"}).of("kernels")


def test_the_record_says_what_was_found(tmp_path: Path) -> None:
    """Outcomes with the words of what is wrong; captured steps, tiles and times."""
    found = found_in(tmp_path / "f", kernel("linear a", 1e-6), kernel("linear b", 0.5, right=False))
    assert record_from(found).captured_steps is None
    for row in (
        {"piece": "kernels", "case": "relative", "error": "RuntimeError: CUDA\nmore"},
        {"piece": "kernels", "case": "", "ended": True},
        {"piece": "captured", "case": "values", "right": True},
        {"piece": "captured", "case": "", "ended": True},
        {"piece": "ratios", "case": "linear 131072 ours forward", "seconds": 0.002},
        {"piece": "fla-times", "case": "linear 131072 fla forward", "seconds": 0.001},
        *(
            {"piece": "tiles", "case": f"{n}", "key": "8x8x8", "tiles": {"chunk": n}, "seconds": n / 10}
            for n in (3, 1, 2)
        ),
    ):
        found.write(row)
    record = record_from(found)
    assert record.kernels == {"linear a": 1e-6, "linear b": "errors of 0.5", "relative": "RuntimeError: CUDA"}
    assert record.captured_steps is True
    assert record.tiles == {"8x8x8": {"chunk": 1}}
    assert record.ratios == {"bfloat16 forward": {"ours_ms": 2.0, "fla_ms": 1.0}}


def test_an_operation_enters_the_record_without_waiting_for_others(tmp_path: Path) -> None:
    """Where a piece was cut off, operations whose cases all ended are known; one with a case to come is not."""
    unfinished = {"piece": "kernels", "case": "relative b", "error": filing.DID_NOT_END}
    found = found_in(
        tmp_path / "f",
        {"piece": "kernels", "case": "", "cases": ["linear a", "relative a", "relative b", "step a", "step b"]},
        *(kernel(case, 0.0) for case in ("linear a", "relative a", "step a")),
        unfinished,
        {"piece": "fla", "case": "", "cases": ["fla a"]},
        {"piece": "fla", "case": "fla a", "error": filing.DID_NOT_END},
    )
    assert set(record_from(found).kernels) == {"linear a"}
    # A process that a kernel took along leaves a case without an end, too: that is known once all were tried.
    found.write({"piece": "kernels", "case": "", "ended": True})
    assert record_from(found).kernels["relative b"] == filing.DID_NOT_END


def test_ratios_of_any_gpu_are_filed_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What targets are about is a result of its own for each device, made of the times of cases."""
    monkeypatch.setattr(filing, "keep_record", partial(keep_record, file=tmp_path / "record.json"))
    monkeypatch.setattr(filing, "file_finding", partial(file_finding, folder=tmp_path / "results"))
    around = vars(look_around())
    for device, sdpa_s in (("NVIDIA H100 80GB HBM3", 0.03), ("NVIDIA A100", 0.05)):
        found = Results(tmp_path / device, {**SETTING, "device": device})
        rows = [("linear 131072 ours forward", 0.001), ("linear 131072 sdpa forward", sdpa_s)]
        rows += [("delta 32768x64x128 auto forward", 0.004)]
        found.write({"setting": found.setting, "around": around})
        for case, taken in rows:
            found.write({"piece": "ratios", "case": case, "seconds": taken})
        take_over(found.file)
    filed = {path.name: json.loads(path.read_text()) for path in (tmp_path / "results").iterdir()}
    assert set(filed) == {"gpu-on-NVIDIA-H100-80GB-HBM3.json", "gpu-on-NVIDIA-A100.json"}
    ratios = {"sdpa / ours forward": pytest.approx(30.0), "gated delta forward ms, ours": pytest.approx(4.0)}
    first = filed["gpu-on-NVIDIA-H100-80GB-HBM3.json"]
    assert first["ratios"] == ratios and first["setting"]["machine"] == "NVIDIA H100 80GB HBM3"
    assert {one["ratio"] for one in first["targets"] if one["met"]} == {"sdpa / ours forward"}
    assert set(json.loads((tmp_path / "record.json").read_text())) == {"NVIDIA H100 80GB HBM3", "NVIDIA A100"}


def test_what_cannot_be_filed_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that is full, or a damaged record, is said, and the pieces that follow are carried out."""

    def full(*_: object) -> None:
        raise OSError("no space left")

    began = []
    monkeypatch.setattr(gpu_check, "keep", full)
    monkeypatch.setattr(gpu_check, "_setting", lambda *, tiny: SETTING)
    monkeypatch.setattr(gpu_check, "_run", lambda results, name, **_: began.append(name))
    assert main([f"--json={tmp_path / 'f'}", "--tiny", "--only", "kernels", "captured"]) == 1
    assert began == ["kernels", "captured"]
    assert "no space left" in capsys.readouterr().out


def test_a_piece_that_comes_too_late_ends_nothing(tmp_path: Path) -> None:
    """Without a second left it is written down as not done."""
    found = found_in(tmp_path / "f")
    gpu_check._run(found, "captured", -1.0)

    assert json.loads(found.file.read_text().splitlines()[-1])["ended"] is False


def test_each_call_fits_its_minutes() -> None:
    """Six minutes for the first part and five for the second, pieces side by side counted once, FLA's last."""
    for part, most in ((1, 360), (2, 300)):
        pieces = [piece for piece in PIECES.values() if piece.part == part]
        alone = sum(piece.seconds for piece in pieces if not piece.beside)
        assert alone + max([piece.seconds for piece in pieces if piece.beside], default=0) < most
    assert list(PIECES)[:4] == ["kernels", "captured", "ratios", "training"]
    assert [name for name, piece in PIECES.items() if "fla" in piece.function][-2:] == ["fla", "fla-times"]


def test_timed_gradients_are_not_added_up() -> None:
    """A backward pass that is timed leaves no `.grad`, which the next one would have to add to."""
    x = torch.ones(3, requires_grad=True)
    row = speed._timed(lambda: 2 * x, (x,), "forward and backward", 2)
    assert row["seconds"] > 0 and x.grad is None


@pytest.mark.slow
@pytest.mark.usefixtures("fla_adapter")
@pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered")
def test_times_of_flash_linear_attention_can_be_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its cases run, here in the interpreter, forward; what they cannot is a reason and no error."""
    assert speed.peer_cases(tiny=True) == {} or torch.cuda.is_available()
    monkeypatch.setattr(speed, "fla_is_there", lambda: True)
    cases = {**speed.peer_cases(tiny=True), **speed.fla_time_cases(tiny=True)}
    taken = {case: cases[case]() for case in cases if case.startswith(("linear", "step", "delta 32x1x8 fla"))}
    assert {case for case, row in taken.items() if "seconds" in row} >= {
        "linear 32 gla forward",
        "linear 32 fla forward",
        "linear 32 fla gated forward",
        "step 2 fla",
        "delta 32x1x8 fla forward",
    }
    assert all("seconds" in row or "why not" in row for row in taken.values())


def _forked(function: Callable[..., None], *arguments: Any) -> bool:
    """Whether a process succeeds that need not load anew what it imports."""
    process = forkserver().Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode == 0


def _adapted(results: Results) -> None:
    """Carry out a piece in a process to itself, of which its rank is a copy."""
    adapted_cases.multiprocessing = SimpleNamespace(get_context=lambda _: multiprocessing.get_context("fork"))
    sys.exit(gpu_check._work(results, "adapted", 0, ()))


def _command(*words: str) -> None:
    cli.app(list(words), standalone_mode=False)


def _dist_attn(*words: str, ranks: int = 0) -> None:
    """`model_cases.dist_attn`, but that only ranks load all that they import."""
    if ranks:
        dist_attn(*words, ranks=ranks)
    else:
        assert _forked(_command, *words), words


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_all_of_it_runs_without_a_gpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A start that is out of time at once leaves everything to the next, which does it; a third has nothing to do."""
    # Some pieces are in processes of their own; the others in this one, which has imported what they need.
    one_at_a_time, in_processes = Lock(), gpu_check._one_round

    def here(results: Results, name: str, *rest: Any) -> bool:
        if name in ("kernels", "captured"):
            return in_processes(results, name, *rest)
        if name == "adapted":  # transformers may not meet a FLA that other tests load
            return _forked(_adapted, results)
        with one_at_a_time:
            return gpu_check._work(results, name, 0, ()) == 0

    monkeypatch.setattr(gpu_check, "_one_round", here)
    monkeypatch.setattr(gpu_check, "die_with_parent", lambda: None)
    for module in (adapted_cases, rank_cases):
        monkeypatch.setattr(module, "multiprocessing", SimpleNamespace(get_context=lambda _: forkserver()))
    for module in (model_cases, rank_cases, service_cases):
        monkeypatch.setattr(module, "dist_attn", _dist_attn)
    file = tmp_path / "f.jsonl"
    arguments = ["--tiny", "--only", *PIECES, "--seconds=3000", f"--json={file}"]
    assert main([*arguments, "--seconds=0.1", "--only", "captured"]) == 1  # the last of an option counts
    assert "not all of it" in capsys.readouterr().out
    assert main(arguments) == 0, capsys.readouterr().out
    rows = [row for row in map(json.loads, file.read_text().splitlines()) if "piece" in row]
    assert {row["piece"] for row in rows if row.get("ended")} == set(PIECES)
    before = len(rows)
    assert main(arguments) == 0
    assert len(file.read_text().splitlines()) == before + 3  # of the three starts

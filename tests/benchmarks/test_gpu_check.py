"""`make gpu`: all of it runs without a GPU, survives the end of its time, and its record says what was found."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu_check import PIECES, Results, main, record_from

pytest.importorskip("triton", reason="needs triton: pip install -e '.[gpu]'")

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
    """Kernels once all of them were tried, with the words of what is wrong; captured steps, tiles and times."""
    found = found_in(tmp_path / "f", kernel("linear a", 1e-6), kernel("linear b", 0.5, right=False))
    assert record_from(found).kernels == {}
    assert record_from(found).captured_steps is None
    times = {"bfloat16 forward": {"ours_ms": 2.0, "fla_ms": 1.0}}
    for row in (
        {"piece": "kernels", "case": "relative", "error": "RuntimeError: CUDA\nmore"},
        {"piece": "kernels", "case": "", "ended": True},
        {"piece": "captured", "case": "values", "right": True},
        {"piece": "captured", "case": "", "ended": True},
        {"piece": "ratios", "case": "linear, 8 tokens", "record": times},
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
    assert record.ratios == times


@pytest.mark.slow
def test_all_of_it_runs_without_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A start that is out of time at once leaves everything to the next, which does it; a third has nothing to do."""
    file = tmp_path / "f.jsonl"
    arguments = ["--tiny", "--tune", "--seconds=3000", f"--json={file}"]
    assert main([*arguments, "--seconds=2", "--only", "captured"]) == 1  # the last of an option counts
    assert "not all of it" in capsys.readouterr().out
    assert main(arguments) == 0, capsys.readouterr().out
    rows = [row for row in map(json.loads, file.read_text().splitlines()) if "piece" in row]
    assert {row["piece"] for row in rows if row.get("ended")} == set(PIECES)
    before = len(rows)
    assert main(arguments) == 0
    assert len(file.read_text().splitlines()) == before + 3  # of the three starts

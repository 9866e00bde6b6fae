"""The benchmarks' own promises: turns, no number on red, and results that say where they come from."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import report, run, timing
from benchmarks.cases import ALONE, CASES, OURS, Case, Works
from benchmarks.filed import RESULTS
from benchmarks.memory import peak_bytes
from benchmarks.report import file_finding, finding_of, measure, read_finding
from benchmarks.run import STUDIES, main
from benchmarks.setting import ROOT, look_around, own_cores, why_red
from benchmarks.timing import COPY, MATMUL, RATES, Roofline, Times, interleaved, matmul_flops

GREEN = "def test_a():\n    pass\n"
RED = "def test_a():\n    assert 1 == 2\n"


def _tests(folder: Path, text: str) -> tuple[str, ...]:
    path = folder / "test_tiny.py"
    path.write_text(text)
    return (str(path),)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The forward case at a tiny size as the only case, as if its tests were green; results go into the folder."""
    case = replace(CASES["forward"], sizes=(8, 16), rounds=3)
    monkeypatch.setattr(run, "why_red", lambda _: "")
    monkeypatch.setattr(run, "CASES", {"forward": case})
    monkeypatch.setattr(run, "STUDIES", {})
    monkeypatch.setattr(report, "ROOT", tmp_path)
    return tmp_path


def test_works_take_turns() -> None:
    """Every work runs once uncounted and then in turns, as many rounds as asked."""
    order: list[str] = []
    times = interleaved({name: lambda name=name: order.append(name) for name in "abc"}, 3)
    assert "".join(order) == "abc" * 4
    assert all(len(taken.seconds) == 3 and taken.median > 0 for taken in times.values())


def test_medians_and_spread() -> None:
    """The median is the middle of the rounds, and the spread is relative to it."""
    times = Times((1.0, 4.0, 2.0))
    assert (times.median, times.fastest, times.spread) == (2.0, 1.0, 1.5)


@pytest.mark.parametrize("name", CASES)
def test_cases_compare_like_with_like(name: str) -> None:
    """Ours and every peer return results of the same shapes, and a case's tests exist."""
    works = CASES[name].works(24)
    shapes = {peer: _shapes(work()) for peer, work in works.items() if peer not in (ALONE, *RATES)}
    assert len(shapes) >= 2
    assert all(found == shapes[OURS] for found in shapes.values())
    assert all((ROOT / test).is_file() for test in CASES[name].tests)
    assert CASES[name].flops(48) == pytest.approx(2 * CASES[name].flops(24))


def _shapes(result: object) -> list[tuple[int, ...]]:
    tensors = result if isinstance(result, tuple) else (result,)
    return [tuple(t.shape) for t in tensors if isinstance(t, torch.Tensor)]


@pytest.mark.slow
def test_green_and_red(tmp_path: Path) -> None:
    """Passing tests are green; failing ones, none, or too slow ones are red with the reason."""
    assert why_red(_tests(tmp_path, GREEN)) == ""
    assert "assert 1 == 2" in why_red(_tests(tmp_path, RED))
    assert "code 5" in why_red(_tests(tmp_path, "nothing = 0\n"))
    slow = _tests(tmp_path, "import threading\n\ndef test_a():\n    threading.Event().wait(60)\n")
    assert "did not end within 1 s" in why_red(slow, deadline_s=1.0)


def test_numbers_are_printed_and_filed(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run prints a table and files its JSON by case; the JSON also where asked."""
    assert main(["forward", f"--json={tiny / 'own.json'}"]) == 0
    (path,) = (tiny / "benchmarks" / "results").iterdir()
    assert path.name == "forward.json"
    (own,) = json.loads((tiny / "own.json").read_text())
    filed = json.loads(path.read_text())
    assert own == filed
    assert [row[0] for row in own["tables"][0]["rows"]] == ["8", "16"]
    assert own["tables"][0]["title"].startswith("Medians of 3 rounds")
    works = ("ours", "sdpa", "matmul", "copy")
    assert {f"{name}, seconds at {size}" for name in works for size in (8, 16)} <= own["numbers"].keys()
    times = [own["numbers"][f"{name}, seconds at 16"] for name in ("sdpa", "ours")]
    assert own["ratios"]["sdpa / ours at 16"] == pytest.approx(times[0] / times[1], abs=1e-3)
    assert own["setting"]["threads"] == torch.get_num_threads()
    said = capsys.readouterr().out
    assert "| size | ours | sdpa | sdpa / ours |" in said
    assert "* Roofline, 16: " in said
    assert "| forward against SDPA, 8,192 tokens | at least 10.00x | not measured |  |" in said


def test_a_smoke_run_files_nothing(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A smoke run measures the smallest size once and leaves no file."""
    assert main(["--smoke"]) == 0
    assert not (tiny / "benchmarks").exists()
    out = capsys.readouterr().out
    assert "| 8 |" in out
    assert "| 16 |" not in out


def test_no_number_on_red(tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With red tests nothing is measured, printed or filed, and the code is 1."""
    monkeypatch.setattr(run, "CASES", {"forward": replace(run.CASES["forward"], works=_never)})
    monkeypatch.setattr(run, "why_red", lambda _: "pytest ended with code 1")
    assert main([]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "no number without green tests" in said.err
    assert not (tiny / "benchmarks").exists()


def _never(size: int) -> dict[str, object]:
    raise AssertionError(f"measured size {size} although the tests are red")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sideways"], "there are forward, backward"),
        (["--json=/no/such/folder/f"], "make it first"),
        (["forward", "--cores=100000"], "no cores '100000'"),
        (["forward", "--cores=first"], "no cores 'first'"),
    ],
)
def test_bad_arguments_are_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown case or folder ends with code 2 and one line, before anything is run."""
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert says in err
    assert err.count("\n") == 1


def test_a_run_keeps_to_its_cores(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--cores` pins the process before anything is measured; without it nothing is pinned."""
    pinned: list[tuple[int, ...]] = []
    monkeypatch.setattr(run, "pin_to", pinned.append)
    core = own_cores()[-1]
    assert main(["--smoke", f"--cores={core}"]) == main(["--smoke"]) == 0
    assert pinned == [(core,)]


def test_the_list_says_what_each_asks(capsys: pytest.CaptureFixture[str]) -> None:
    """`--list` names every case and study with its question, and what else it is told of, and runs none."""
    assert main(["--list"], others={"mixers": "Which?"}) == 0
    listed = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert listed.keys() == CASES.keys() | STUDIES.keys() | {"mixers"}
    assert all(listed.values())


def test_ratios(tmp_path: Path) -> None:
    """Ratios are peers over ours and ours over the arithmetic limit, at the rate of the product in the same run."""
    flops, moved = matmul_flops() / 2, 4.0 * timing.COPY_BYTES
    case = Case("c", "Why?", (), (1,), lambda _: {}, lambda _: flops, lambda _: moved, absent=lambda: {"x": "why"})
    times = {OURS: Times((2.0,)), "peer": Times((6.0,)), MATMUL: Times((1.0,)), COPY: Times((0.25,))}
    result = finding_of(case, look_around(), 1, {1: times})
    assert result.ratios == {"peer / ours at 1": 3.0, "ours / limit at 1": 4.0}
    # Half of a product's second, and twice of a copy's quarter: as long for arithmetic as for memory.
    assert Roofline.of(times) == Roofline(matmul_flops(), 8.0 * timing.COPY_BYTES)
    assert Roofline.of(times).least_seconds(flops, moved) == 0.5
    text = result.as_markdown()
    assert "it took 4.00 times that." in text
    assert "* x was not measured: why." in text
    assert "| 1 | 2,000.00 ms | 6,000.00 ms | 3.00 | 4.00 | 0% |" in text
    path = file_finding(result, tmp_path)
    again = read_finding(json.loads(path.read_text()))
    assert (path.name, again) == ("c.json", result)
    again.draw(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_the_newest_result_of_each_case_is_filed() -> None:
    """At most 80 files are filed, a JSON for each case that is called as the case."""
    filed = sorted(path for path in (ROOT / RESULTS).iterdir() if path.name != "README.md")
    assert 40 < len(filed) < 80
    cases = [json.loads(path.read_text())["case"].replace(" ", "-") for path in filed]
    assert [f"{case}.json" for case in cases] == [path.name for path in filed]


def test_the_peak_of_memory():
    """What is held at the same time counts, what was freed before does not."""
    size = 1 << 20

    def work() -> torch.Tensor:
        first = torch.ones(size)
        second = first + 1
        del first
        return second + 1

    assert 0 <= peak_bytes(work) - 2 * 4 * size < 1024


def test_a_spent_budget_ends_the_rounds():
    """When the time of a size is up there are three rounds, not all that were asked for."""
    taken = interleaved({"a": lambda: None}, 50, budget_s=0.0)
    assert len(taken["a"].seconds) == 3


def test_missing_peers_are_dashes_and_results_are_drawn(tmp_path: Path):
    """A table has a dash where a form was too large, and the figure has what is there."""
    whole = replace(CASES["forward"], statistic="fastest")

    def works(size: int) -> Works:
        return {name: work for name, work in whole.works(size).items() if size == 16 or name != "sdpa"}

    cut = measure(replace(whole, works=works), (16, 32), 2)
    table = cut.as_markdown()
    assert "The fastest of 2 rounds" in table
    assert "| – |" in table
    cut.draw(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000

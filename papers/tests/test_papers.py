"""Experiments of the papers: jobs are done once, go on after an interruption, and are reported when all are there."""

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.filed import RESULTS
from benchmarks.measured import Table
from benchmarks.setting import ROOT, look_around
from dist_attn.errors import ConfigError
from dist_attn.training.run_log import Metrics
from dist_attn_papers.filed import read
from dist_attn_papers.tables import __main__ as command
from dist_attn_papers.tables.arms import first_scores, mark_seeds, minutes_of, of_arm, parameters_of
from dist_attn_papers.tables.experiment import Budget, Done, Experiment, Interrupted, Job, Scores, Watch, read_done
from dist_attn_papers.tables.finding import Report, TableFinding, mean_and_spread
from dist_attn_papers.tables.runner import carry_out
from dist_attn_papers.tables.training_job import model_folder, training_job


class _Counting:
    """Work that notes each call and may be interrupted at its first."""

    def __init__(self, *, interrupted: bool = False) -> None:
        self.calls, self.interrupted = 0, interrupted

    def __call__(self, folder: Path, watch: Watch) -> Scores:
        self.calls += 1
        if self.interrupted and self.calls == 1:
            (folder / "half.txt").write_text("kept")
            raise Interrupted
        return {"score": float(self.calls)}


def _never() -> bool:
    return False


def test_a_job_is_done_once(tmp_path: Path) -> None:
    """What a job has found is read the next time, not measured again."""
    work = _Counting()
    jobs = [Job("arm", 0, {"size": 3}, work)]
    first, left = carry_out(tmp_path, jobs, _never)
    again, _ = carry_out(tmp_path, jobs, _never)
    assert work.calls == 1 and not left
    assert first == again and first[0].scores == {"score": 1.0}


def test_other_settings_are_another_job(tmp_path: Path) -> None:
    """A job whose settings have changed is done again, and what it left before is put away, not mixed in."""
    work = _Counting()
    carry_out(tmp_path, [Job("arm", 0, {"size": 3}, work)], _never)
    (tmp_path / "arm/seed-0/left.txt").write_text("of the first")
    done, _ = carry_out(tmp_path, [Job("arm", 0, {"size": 4}, work)], _never)
    assert done[0].settings == {"size": 4} and work.calls == 2
    assert [path.name for path in (tmp_path / "arm/seed-0").glob("before-*/left.txt")] == ["left.txt"]


def test_an_interrupted_job_goes_on(tmp_path: Path) -> None:
    """A job that was stopped finds its folder as it left it, and nothing after it is begun in that run."""
    work, other = _Counting(interrupted=True), _Counting()
    jobs = [Job("first", 0, {}, work), Job("second", 0, {}, other)]
    done, left = carry_out(tmp_path, jobs, _never)
    assert not done and left == jobs and other.calls == 0
    assert (tmp_path / "first/seed-0/half.txt").read_text() == "kept"
    done, left = carry_out(tmp_path, jobs, _never)
    assert len(done) == 2 and not left


def test_a_job_waits_for_what_it_needs(tmp_path: Path) -> None:
    """A job that needs another one is left until that one is done."""
    early, late = _Counting(), _Counting()
    needing = Job("swapped", 0, {}, late, needs=("trained/seed-0",))
    _, left = carry_out(tmp_path, [needing], _never)
    assert left == [needing] and late.calls == 0
    done, left = carry_out(tmp_path, [Job("trained", 0, {}, early), needing], _never)
    assert len(done) == 2 and not left


def test_a_failing_job_does_not_keep_others_from_their_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job that fails is not done, says why and where the traceback is; those behind it are done."""

    def fail(folder: Path, watch: Watch) -> Scores:
        raise ArithmeticError("the loss is nan")

    failing, other = Job("arm", 0, {}, fail), Job("other", 0, {}, lambda folder, watch: {"loss": 1.0})
    done, left = carry_out(tmp_path, [failing, other], _never)
    assert [one.arm for one in done] == ["other"] and left == [failing] and read_done(tmp_path, failing) is None
    assert "ArithmeticError: the loss is nan" in capsys.readouterr().err
    assert "in fail" in (tmp_path / "arm/seed-0/failed.txt").read_text()


def test_what_all_jobs_lack_ends_the_experiment(tmp_path: Path) -> None:
    """An error that tells the user what to do, such as texts that are not there, is raised at once."""

    def fail(folder: Path, watch: Watch) -> Scores:
        raise ConfigError("there are no books")

    with pytest.raises(ConfigError, match="no books"):
        carry_out(tmp_path, [Job("arm", 0, {}, fail)], _never)


def _tiny_training(tmp_path: Path, measured: list[Path]) -> Job:
    from dist_attn.text.bpe import ByteTokeniser

    (tmp_path / "text.txt").write_text("a small text about nothing much " * 60)
    ByteTokeniser().save(tmp_path / "tokeniser")

    def measure(model: Path, last: Metrics, watch: Watch) -> Scores:
        measured.append(model)
        return {"bits_per_byte": last["bits_per_byte"]}

    mixer = {"kind": "rfa", "hidden_size": 16, "num_heads": 2, "num_random": 4}
    sections = {
        "model": {"vocab_size": 257, "hidden_size": 16, "num_layers": 1, "mlp_size": 32, "mixer": mixer},
        "data": {
            "folder": str(tmp_path),
            "train": ["text.txt"],
            "validation": "text.txt",
            "tokeniser": str(tmp_path / "tokeniser"),
            "batch": 2,
            "segment": 16,
            "validation_bytes": 200,
        },
        "run": {"steps": 4, "log_every": 1, "evaluate_every": 4, "checkpoint_every": 2},
    }
    return training_job("rfa", 1, sections, measure)


def test_a_training_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """A training that is told to stop saves itself; the next run ends it, and its model is measured once."""
    measured: list[Path] = []
    job = _tiny_training(tmp_path, measured)
    asked = iter([False, False, True])  # before the job, after its first step, after its second
    _, left = carry_out(tmp_path / "out", [job], lambda: next(asked, True))
    assert left == [job] and not measured
    done, left = carry_out(tmp_path / "out", [job], _never)
    assert not left and measured == [model_folder(tmp_path / "out", job.key)]
    lines = (tmp_path / "out/rfa/seed-1/run/metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["step"] for line in lines]
    assert steps == [1, 2, 3, 4, 4] and 0 < done[0].scores["bits_per_byte"] < 8.1


def _toy(work: _Counting) -> Experiment:
    def jobs(budget: Budget, seeds: Sequence[int]) -> list[Job]:
        return [Job(arm, seed, {"steps": budget.steps(10)}, work) for seed in seeds for arm in ("one", "two")]

    def report(done: Sequence[Done]) -> Report:
        rows = tuple((one.arm, mean_and_spread([one.scores["score"]])) for one in done)
        return Report((Table("Toy", ("arm", "score"), rows),), ("a note",), (("scores", lambda axes: None),))

    return Experiment("toy", "Does it count?", (), jobs, report, seeds=(0, 1))


def test_the_command_files_when_all_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unfinished experiment is printed and ends with 3; a finished one is filed as JSON."""
    monkeypatch.setattr(command, "EXPERIMENTS", {"toy": _toy(_Counting())})
    monkeypatch.setattr("benchmarks.report.ROOT", tmp_path)
    base = ["toy", "--untested", "--out", str(tmp_path / "out"), "--seeds", "0"]
    assert command.main([*base, "--only", "one"]) == 3
    assert "two/seed-0 is still to be done" in capsys.readouterr().err
    assert command.main(base) == 0
    (path,) = (tmp_path / "benchmarks/results").iterdir()
    values = json.loads(path.read_text())
    assert values["command"] == "python -m dist_attn_papers.tables toy --seeds 0"
    assert [number["arm"] for number in values["numbers"]] == ["one", "two"]
    assert path.name == "paper-toy.json" and values["notes"] == ["a note"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "there is no experiment 'nothing'; there are toy"),
        (["toy", "--only", "three"], "there is no arm 'three' in toy; there are one, two"),
        (["toy", "--only", "one", "three"], "there is no arm 'three' in toy; there are one, two"),
    ],
)
def test_unknown_names_say_which_there_are(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An experiment or arm that does not exist ends with 2 and the names of those that do."""
    monkeypatch.setattr(command, "EXPERIMENTS", {"toy": _toy(_Counting())})
    assert command.main([*arguments, "--untested", "--out", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--scale", "much"], "'much' is no positive number"),
        (["--minutes", "-3"], "'-3' is no positive number"),
        (["--seeds", "0,0"], "'0,0' is no list of seeds; give each once"),
        (["--seeds", "a"], "'a' is no list of seeds"),
        (["--sideways"], "unrecognized arguments: --sideways"),
    ],
)
def test_bad_options_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An option that cannot be read ends with 2 and one line that says what it should be."""
    with pytest.raises(SystemExit) as left:
        command.main(arguments)
    said = capsys.readouterr().err
    assert left.value.code == 2 and words in said and said.count("\n") == 1


def test_missing_texts_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the texts of an experiment are not there the command ends with 2 and the file that it looked for."""
    monkeypatch.chdir(tmp_path)
    assert command.main(["rfa-table1", "--smoke", "--untested", "--only", "softmax"]) == 2
    said = capsys.readouterr().err
    assert "data/books/pride_and_prejudice.txt is not there; put the novels into data/books" in said
    assert said.count("\n") == 1


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Results are to go below a file: the command ends with 2 before any test or job runs."""
    (tmp_path / "file").write_text("")
    assert command.main(["rfa-table1", "--smoke", "--out", str(tmp_path / "file/out")]) == 2
    said = capsys.readouterr().err
    assert "cannot be made: Not a directory" in said and said.count("\n") == 1


def test_help_says_what_each_experiment_asks(capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` has every experiment with its question, and what the exit codes mean."""
    with pytest.raises(SystemExit) as left:
        command.main(["--help"])
    said = capsys.readouterr().out
    assert left.value.code == 0 and "exit codes" in said
    assert all(name in said and one.question in said for name, one in command.EXPERIMENTS.items())


def test_a_result_names_the_commit_and_machine_of_every_job() -> None:
    """The heading says what all jobs share, and a table where each was measured, whoever put the result together."""
    here = look_around()
    settings = [
        replace(here, commit=commit, machine=f"{machine}, Linux x86_64", pinned=(0, 1)).sentence()
        for commit, machine in (("aaa", "Old"), ("bbb", "Old"), ("bbb", "New"), ("bbb", "New"))
    ]
    jobs = [("first", 0), ("first", 1), ("second", 0), ("second", 1)]
    numbers = [
        {"arm": arm, "seed": seed, "scores": {}, "seconds": 1.0, "settings": {}, "setting": setting}
        for (arm, seed), setting in zip(jobs, settings, strict=True)
    ]
    text = TableFinding("try", "Is it?", "do it", replace(here, commit="ccc"), Report(()), numbers).as_markdown()
    heading = text.split("\n\n")[2]
    assert "put together" in heading and "at commit ccc. All jobs: Linux x86_64, cores: " in heading
    assert not any(part in heading for part in ("aaa", "bbb", "Old", "New"))
    rows = [line for line in text.splitlines() if line.startswith(("| first", "| second"))]
    assert rows == ["| first | 0 | aaa | Old |", "| first | 1 | bbb | Old |", "| second | 0, 1 | bbb | New |"]


def test_filed_results_name_the_commit_of_every_job() -> None:
    """Every filed result of the papers names the commits of all its jobs."""
    for path in (ROOT / RESULTS).glob("paper-*.json"):
        text = read(path).as_markdown()
        for number in json.loads(path.read_text())["numbers"]:
            commit = number["setting"].split("commit ")[1].split(",")[0]
            assert any(row.startswith(f"| {number['arm']} |") and f"| {commit} |" in row for row in text.splitlines())


def test_a_mean_says_of_how_many() -> None:
    """A mean stands with its spread and the number of seeds; without values it says that nothing was measured."""
    assert mean_and_spread([1.0, 2.0, 3.0]) == "2.00 ± 1.00 (3)"
    assert mean_and_spread([1.5], digits=1) == "1.5 (1)"
    assert mean_and_spread([]) == "not measured"
    assert mean_and_spread([1.0, math.nan, math.inf]) == "no number in 2 of 3"


def test_cells_of_an_arm() -> None:
    """Scores come in the order of seeds; what no job has found yet is nothing, or said not to be measured."""
    done = [Done("arm", seed, {"score": 10.0 + seed, "parameters": 1234.0}, 90.0, {}, "") for seed in (1, 0)]
    assert of_arm(done, "arm", "score") == [10.0, 11.0] and of_arm(done, "arm", "other") == []
    assert first_scores(done, "arm")["score"] == 10.0 and not first_scores(done, "none")
    assert (parameters_of(done, "arm"), parameters_of(done, "none")) == ("1,234", "not measured")
    assert (minutes_of(done, "arm"), minutes_of(done, "none")) == ("1.5 ± 0.0 (2)", "not measured")


def test_marks_stand_on_the_lines_of_their_arms() -> None:
    """The first arm is on top; an arm without values has its line and no mark."""
    axes = pytest.importorskip("matplotlib.figure").Figure().add_subplot()
    mark_seeds(axes, {"first": [1.0, 3.0], "second": []})
    assert [label.get_text() for label in axes.get_yticklabels()] == ["second", "first"]
    dots, mean = [line for line in axes.lines if len(line.get_xdata())]
    assert list(dots.get_ydata()) == [1, 1] and list(mean.get_xdata()) == [2.0]

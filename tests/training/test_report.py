"""What a run leaves to look at: event files and a picture, which no run fails for."""

import builtins
import json
import sys

import pytest

from dist_attn.errors import extra_hint
from dist_attn.training import run_log, train
from dist_attn.training.run_log import Spare, draw
from dist_attn.training.task import Criterion
from tests.support.training import small_run


class Broken:
    """A sink that fails at every turn."""

    def __init__(self):
        self.writes = 0

    def write(self, metrics):
        self.writes += 1
        raise OSError(28, "No space left on device")

    def close(self):
        raise AssertionError("a sink that has failed is left alone")


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours catches it."""


def _without(monkeypatch, *modules):
    """As if these were not installed."""
    whole = builtins.__import__

    def find(name, *rest):
        if name in modules:
            raise ImportError(name)
        return whole(name, *rest)

    for name in modules:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(builtins, "__import__", find)


def _events(folder):
    """Every scalar that TensorBoard shows, by name: step -> value."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="its own reader reads what was written"
    )
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {name: {e.step: e.value for e in events.Scalars(name)} for name in events.Tags()["scalars"]}


def test_tensorboard_reads_what_the_run_reported(tmp_path):
    """Loss, learning rate, speed and validation are in the event files at the steps of metrics.jsonl."""
    pytest.importorskip("tensorboard", reason="needs pip install -e '.[tensorboard]'")
    config = small_run(tmp_path, tensorboard=True)
    train(config)
    events = _events(tmp_path / "run" / "tensorboard")
    reports = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name in ("training/loss", "training/learning_rate", "speed/tokens_per_second", "validation/bits_per_byte"):
        key = name.partition("/")[2]
        want = {r["step"]: pytest.approx(r[key], rel=1e-6) for r in reports if key in r}
        assert events[name] == want


def test_a_resumed_run_takes_back_later_events(tmp_path, monkeypatch):
    """Events of steps behind the checkpoint, which come again, are in TensorBoard once, from the resumed run."""
    pytest.importorskip("tensorboard", reason="needs pip install -e '.[tensorboard]'")
    config, reports = small_run(tmp_path, tensorboard=True, log_every=1), []

    def until_5(metrics):
        if metrics["step"] == 5:
            raise Killed
        reports.append(metrics)

    with pytest.raises(Killed):
        train(config, report=until_5)
    train(config, resume=True, report=reports.append)
    events = _events(tmp_path / "run" / "tensorboard")
    assert list(events["training/loss"]) == [1, 2, 3, 4, 5, 6]
    assert events["speed/tokens_per_second"][6] == pytest.approx(reports[-2]["tokens_per_second"])


def test_a_run_leaves_a_picture(tmp_path, monkeypatch):
    """loss.png is drawn at every validation and at the end, from the whole run, and put in place whole."""
    pytest.importorskip("matplotlib", reason="needs pip install -e '.[plot]'")
    drawn, whole = [], run_log.draw

    def counted(reports, out, *rest):
        drawn.append([r["step"] for r in reports])
        whole(reports, out, *rest)

    monkeypatch.setattr(run_log, "draw", counted)
    train(small_run(tmp_path, plot=True))
    assert drawn == [[2, 4, 4], [2, 4, 4, 6, 6], [2, 4, 4, 6, 6]]
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in (tmp_path / "run").glob(".*")] == []


@pytest.mark.parametrize("criterion", [None, Criterion("bits_per_byte", "lower"), Criterion("accuracy", "higher")])
def test_a_picture_of_a_long_run_with_numbers_that_are_none(tmp_path, criterion):
    """Runs with and without validation, of either direction, with NaN in between, have a picture."""
    pytest.importorskip("matplotlib", reason="needs pip install -e '.[plot]'")
    reports = [
        {"step": n, "tokens": 100 * n, "loss": float("nan") if n == 7 else 5 / n, "learning_rate": 1e-3}
        for n in range(1, 100)
    ]
    reports += [{"step": n, "tokens": 100 * n, "bits_per_byte": 3.0, "accuracy": 0.5} for n in range(10, 100, 10)]
    draw(reports, tmp_path / "loss.png", "tokens", "nats per token", criterion)
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_missing_libraries_are_told_once(tmp_path, monkeypatch):
    """Without tensorboard and matplotlib a run says in a line each how to get them, or to do without, and is whole."""
    _without(monkeypatch, "torch.utils.tensorboard", "matplotlib")
    told = []
    last = train(small_run(tmp_path, tensorboard=True, plot=True), tell=told.append)
    assert last["step"] == 6
    assert told[0].startswith("device cpu, bfloat16, 1 rank, ") and told[1:] == [
        f"no events for TensorBoard: they need tensorboard: {extra_hint('tensorboard')}, "
        "or set run.tensorboard = false",
        f"no loss.png: it needs matplotlib: {extra_hint('plot')}, or set run.plot = false",
    ]
    assert not (tmp_path / "run" / "tensorboard").exists()


def test_a_sink_that_fails_is_left_alone():
    """What goes wrong with a picture or events is told once and ends nothing."""
    told, broken = [], Broken()
    spare = Spare("loss.png", lambda: broken, told.append)
    for _ in range(3):
        spare.write({"step": 1})
    spare.close()
    assert broken.writes == 1
    assert told == ["no loss.png: [Errno 28] No space left on device"]


def test_other_ranks_have_no_sinks(tmp_path, monkeypatch):
    """Only the rank that writes opens files."""
    from dist_attn.comm import run_simulated

    opened, whole = [], run_log.open_log
    config = small_run(tmp_path, data_ranks=2)
    monkeypatch.setattr("dist_attn.training.loop.open_log", lambda *args: opened.append(1) or whole(*args))
    run_simulated(lambda comm: train(config, comm=comm), 2)
    assert opened == [1]

"""The best checkpoint is kept, the run ends when it gets no better, and both go on alike after a kill."""

import json
import shutil

import pytest
from safetensors.torch import load_file

from dist_attn.checkpoints import load_model
from dist_attn.errors import ConfigError
from dist_attn.training import TrainingConfig, loop, run_folder, train
from dist_attn.training.loop import Standing
from dist_attn.training.run_folder import keep_best
from dist_attn.training.task import Criterion
from tests.support.training import small_run


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours catches it."""


def _standing(better="lower", **run) -> Standing:
    config = {"folder": "run", "steps": 1, **run}
    return Standing(Criterion("score", better), TrainingConfig.model_fields["run"].annotation.model_validate(config))


def _scores(monkeypatch, scores):
    """Let validations give these scores in order, whatever the model."""

    def validate(run):
        return {"bits_per_byte": scores[run.step // run.config.run.evaluate_every - 1]}

    monkeypatch.setattr(loop._Run, "_validate", validate)


def _checkpoints(config):
    return sorted(path.name for path in (config.run.folder / "checkpoints").iterdir())


def test_the_best_is_the_least_or_the_greatest():
    """A report is the best where its score beats every one before; NaN and reports without a score never are."""
    lower, higher = _standing(), _standing("higher")
    scores = [3.0, 2.0, 2.0, float("nan"), 2.5, 1.0]
    assert [lower.see({"step": n, "score": score}) for n, score in enumerate(scores)] == [
        True,
        True,
        False,
        False,
        False,
        True,
    ]
    assert lower.best == {"step": 5, "score": 1.0}
    assert [higher.see({"step": n, "score": -score}) for n, score in enumerate(scores)] == [
        True,
        True,
        False,
        False,
        False,
        True,
    ]
    assert not lower.see({"step": 9, "loss": 0.1})


def test_patience_counts_validations_without_progress():
    """Improvements of no more than min_delta are kept as the best but do not end the wait."""
    standing = _standing(patience=2, min_delta=0.1)
    kept, over = [], []
    for step, score in enumerate([3.0, 2.95, 2.8, 2.75, 2.71, 2.0]):
        kept.append(standing.see({"step": step, "score": score}))
        over.append(standing.is_over)
    assert kept == [True] * 6
    assert over == [False, False, False, False, True, False]
    assert standing.waited == 0


def test_the_best_checkpoint_stays(tmp_path, monkeypatch):
    """With one checkpoint kept, the best one is there beside it, under its name and as `best`; an older best is not."""
    _scores(monkeypatch, [3.0, 2.0, 2.5, 2.6])
    config = small_run(tmp_path, steps=8, evaluate_every=2, checkpoint_every=3, keep_checkpoints=1)
    train(config)
    assert _checkpoints(config) == ["best", "best-000004", "step-000008"]
    folder = config.run.folder / "checkpoints"
    assert (folder / "best").resolve() == (folder / "best-000004").resolve()
    assert json.loads((folder / "best" / "progress.json").read_text())["step"] == 4


@pytest.mark.parametrize("export", ["last", "best"])
def test_the_model_is_the_last_or_the_best(tmp_path, monkeypatch, export):
    """run.export says which weights the model folder has, and its manifest says of which step they are."""
    _scores(monkeypatch, [3.0, 2.0, 2.5])
    config = small_run(tmp_path, steps=6, evaluate_every=2, export=export)
    train(config)
    name, step = {"last": ("step-000006", 6), "best": ("best", 4)}[export]
    want = load_file(config.run.folder / "checkpoints" / name / "model.safetensors")
    got = load_model(config.run.folder / "model").state_dict()
    assert all((got[key] - tensor).abs().max() < 1e-3 * (1 + tensor.abs().max()) for key, tensor in want.items())
    assert (got["norm.bias"] == want["norm.bias"]).all()  # vectors are not rounded
    manifest = json.loads((config.run.folder / "model" / "manifest.json").read_text())
    assert (manifest["steps"], manifest["tokens_seen"]) == (step, step * 48)
    assert manifest["last"]["bits_per_byte"] == (2.5 if export == "last" else 2.0)


@pytest.mark.parametrize("killed_at", [3, 5, 7])
def test_a_killed_run_stops_early_where_the_whole_one_does(tmp_path, monkeypatch, killed_at):
    """Killed anywhere and resumed, a run with patience ends at the same step with the same best and last weights."""
    _scores(monkeypatch, [3.0, 2.0, 2.5, 2.6, 1.0, 0.9])
    runs = []
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        runs.append(small_run(tmp_path / name, steps=12, evaluate_every=2, patience=2, export="best"))
    whole, killed = runs
    assert train(whole)["step"] == 8
    step = loop._Run._train_step

    def dies(run, stop):
        if run.step == killed_at:
            raise Killed
        return step(run, stop)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(loop._Run, "_train_step", dies)
        train(killed)
    assert train(killed, resume=True)["step"] == 8
    assert _checkpoints(killed) == _checkpoints(whole)
    for name in ("checkpoints/step-000008/model", "checkpoints/best/optimiser", "model/model"):
        files = [run.run.folder / f"{name}.safetensors" for run in runs]
        assert files[0].read_bytes() == files[1].read_bytes()
    # A run that is over stays so.
    assert train(killed, resume=True)["step"] == 8


@pytest.mark.parametrize("at", ["copytree", "rename", "symlink_to", "replace"])
def test_whoever_is_killed_leaves_a_whole_best_checkpoint(tmp_path, monkeypatch, at):
    """Killed at any moment of a change, `best` is a whole checkpoint, and the resumed run makes the change again."""
    _scores(monkeypatch, [3.0, 2.0, 2.5])
    config = small_run(tmp_path, steps=6, evaluate_every=2, checkpoint_every=2)
    whole, folder = keep_best, config.run.folder / "checkpoints"

    def dies(checkpoints, step):
        if step != 4:
            return whole(checkpoints, step)
        with monkeypatch.context() as patched:

            def killed(*_, **__):
                raise Killed

            patched.setattr(run_folder.shutil if at == "copytree" else run_folder.Path, at, killed)
            whole(checkpoints, step)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(loop, "keep_best", dies)
        train(config)
    assert json.loads((folder / "best" / "progress.json").read_text())["step"] == 2
    assert load_file(folder / "best" / "model.safetensors")
    train(config, resume=True)
    assert json.loads((folder / "best" / "progress.json").read_text())["step"] == 4
    assert _checkpoints(config) == ["best", "best-000004", "step-000004", "step-000006"]


def test_without_hard_links_files_are_copied(tmp_path, monkeypatch):
    """On a file system that has no hard links the best checkpoint is a copy."""

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(run_folder.os, "link", refuse)
    (tmp_path / "step-000003").mkdir()
    (tmp_path / "step-000003" / "progress.json").write_text("{}")
    assert keep_best(tmp_path, 3)
    shutil.rmtree(tmp_path / "step-000003")
    assert (tmp_path / "best" / "progress.json").read_text() == "{}"
    assert not keep_best(tmp_path, 4)


def test_what_needs_a_validation_says_so(tmp_path):
    """Patience and the export of the best are refused in a run without validation, and a best that is gone is named."""
    for options in ({"patience": 1}, {"export": "best"}):
        config = small_run(tmp_path, **options)
        config = config.model_copy(update={"data": config.data.model_copy(update={"validation": None})})
        with pytest.raises(ConfigError, match=rf"run\.{next(iter(options))} asks for .*: give data\.validation"):
            train(config)
    config = small_run(tmp_path, export="best")
    train(config)
    for path in (config.run.folder / "checkpoints").iterdir():
        if path.name != "step-000006":
            path.unlink() if path.is_symlink() else shutil.rmtree(path)
    train(config, resume=True)
    assert _checkpoints(config) == ["best", "best-000006", "step-000006"]

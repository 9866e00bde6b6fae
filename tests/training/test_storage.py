"""A full disk: the checkpoint before stays sound, and one line says what was not written and what to do."""

import contextlib
import json
import resource
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from dist_attn.checkpoints import load_model
from dist_attn.comm import run_simulated
from dist_attn.errors import DistAttnError, StorageError
from dist_attn.training import checkpointing, language_task, run_log, train
from dist_attn.training.checkpointing import latest_checkpoint
from tests.support.training import small_run, write_toml


@contextlib.contextmanager
def _full(limit):
    """No file can become larger than `limit` bytes: writing fails in the system, half-way, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _full_within(monkeypatch, module, name, limit, when=lambda *_: True):
    """The disk is full while this function runs."""
    whole = getattr(module, name)

    def run(*args, **kwargs):
        with _full(limit) if when(*args) else contextlib.nullcontext():
            return whole(*args, **kwargs)

    monkeypatch.setattr(module, name, run)


def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(tmp_path, monkeypatch):
    """Nothing of the new checkpoint stays, the one before is whole, and the run goes on from it as if undisturbed."""
    config = small_run(tmp_path)
    with monkeypatch.context() as patched:
        _full_within(patched, checkpointing, "save_file", 4096, lambda _, path: "step-000006" in str(path))
        with pytest.raises(StorageError, match=r"^the checkpoint of step 6 could not be written: File too large; "
                           r".*/step-000004 is sound: make room and go on with --resume$"):  # fmt: skip
            train(config)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert [path.name for path in checkpoints.glob(".*")] == []
    train(config, resume=True)
    (tmp_path / "whole").mkdir()
    whole = small_run(tmp_path / "whole")
    train(whole)
    for name in ("model", "optimiser", "carried_state"):
        got, want = (
            load_file(c.run.folder / "checkpoints" / "step-000006" / f"{name}.safetensors") for c in (config, whole)
        )
        assert all(torch.equal(got[key], want[key]) for key in want)


def test_metrics_that_do_not_fit_end_the_run(tmp_path, monkeypatch):
    """Half a line at the end of metrics.jsonl is not read again; the resumed run has every report once."""
    config = small_run(tmp_path, log_every=1)
    with monkeypatch.context() as patched:
        _full_within(patched, run_log.JsonLines, "write", 700)
        with pytest.raises(StorageError, match=r"^metrics\.jsonl could not be written: File too large; .* is sound"):
            train(config)
    path = tmp_path / "run" / "metrics.jsonl"
    assert path.stat().st_size == 700
    train(config, resume=True)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 4, 5, 6, 6]


def test_a_model_that_does_not_fit_leaves_the_checkpoint(tmp_path, monkeypatch):
    """The export fails with a line, no half folder is there, and --resume makes the model without a further step."""
    config = small_run(tmp_path)
    with monkeypatch.context() as patched:
        _full_within(patched, language_task, "save_model", 4096)
        with pytest.raises(StorageError, match=r"^the model could not be written: .*; .*/step-000006 is sound"):
            train(config)
    assert not [path for path in (tmp_path / "run").iterdir() if "model" in path.name]
    train(config, resume=True)
    assert load_model(tmp_path / "run" / "model").config == config.model


def test_a_disk_that_is_full_from_the_start_leaves_no_checkpoint(tmp_path):
    """Where there is nothing to go on from, the line says so: neither tokens nor a checkpoint."""
    config = small_run(tmp_path, checkpoint_every=1)
    with _full(8192), pytest.raises(StorageError, match=r"^the tokens .* could not be .* make room and start again$"):
        train(config)
    assert latest_checkpoint(tmp_path / "run" / "checkpoints") is None
    with (
        _full(30_000),
        pytest.raises(StorageError, match=r"of step 1 could not .* no checkpoint yet: .* with --resume$"),
    ):
        train(config)
    assert train(config, resume=True)["step"] == 6


def test_all_ranks_end_when_one_cannot_write(tmp_path, monkeypatch):
    """The rank that writes says what it could not, and the others end with it."""
    _full_within(monkeypatch, checkpointing, "save_file", 4096)
    config = small_run(tmp_path, data_ranks=2)

    def on_rank(comm):
        try:
            train(config, comm=comm)
        except DistAttnError as error:
            return str(error)
        return "nothing"

    said = run_simulated(on_rank, 2)
    assert said[0].startswith("the checkpoint of step 3 could not be written: File too large")
    assert said[1].startswith("rank 0 of 2: ")
    assert "File too large" in said[1]


@pytest.mark.slow
def test_the_command_says_it_in_one_line(tmp_path):
    """`dist-attn train` on a full disk prints one line and ends with code 2."""
    toml = write_toml(small_run(tmp_path, dtype="float32"), tmp_path / "run.toml")
    run = "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)); "
    run += f"sys.argv = ['dist-attn', 'train', {str(toml)!r}]; runpy.run_module('dist_attn', run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("dist-attn: the checkpoint of step 3 could not be written: ")

"""A run that is told to stop finishes its step, saves, and goes on as if it had never stopped."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from dist_attn.comm import run_simulated
from dist_attn.launchers import stop_on_signals
from dist_attn.training import train
from tests.support.training import small_run, write_toml


def _weights(config):
    return load_file(config.run.folder / "checkpoints" / f"step-{config.run.steps:06d}" / "model.safetensors")


def test_a_stopped_run_goes_on_as_if_it_had_not(tmp_path):
    """Stopped between checkpoints, the step is saved, no model is there, and the resumed run ends bitwise alike."""
    asked = iter([False, False, False, True])
    runs = []
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
        runs.append(small_run(tmp_path / name, evaluate_every=6))
    whole, stopped = runs
    last = train(stopped, stop=lambda: next(asked))
    assert (last["step"], last["stopped"]) == (4, True)
    assert (stopped.run.folder / "checkpoints" / "step-000004").is_dir()
    assert not (stopped.run.folder / "model").exists()
    assert "stopped" not in train(stopped, resume=True)
    train(whole)
    want, got = _weights(whole), _weights(stopped)
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())


def test_all_ranks_stop_after_the_same_step(tmp_path):
    """A signal that reaches one rank of two stops both after that step."""
    config = small_run(tmp_path, data_ranks=2)

    def on_rank(comm):
        asked = iter([False, comm.rank == 1])
        return train(config, comm=comm, stop=lambda: next(asked))["step"]

    assert run_simulated(on_rank, 2) == [2, 2]
    assert (tmp_path / "run" / "checkpoints" / "step-000002").is_dir()


def test_a_run_asked_in_its_last_step_is_done(tmp_path):
    """Asked to stop when nothing is left to do, a run ends as it would have."""
    config = small_run(tmp_path, steps=2)
    asked = iter([False, True])
    assert "stopped" not in train(config, stop=lambda: next(asked))
    assert (tmp_path / "run" / "model").is_dir()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_does_what_it_did(number):
    """The first signal is a request; then, and outside, the handlers from before hold."""
    seen = []
    before = signal.signal(number, lambda *_: seen.append(number))
    try:
        with stop_on_signals() as stop:
            assert not stop()
            os.kill(os.getpid(), number)
            assert stop()
            assert stop.signal is number
            assert seen == []
            os.kill(os.getpid(), number)
        assert seen == [number]
        with stop_on_signals():
            pass
        os.kill(os.getpid(), number)
        assert seen == [number, number]
    finally:
        signal.signal(number, before)


@pytest.mark.slow
def test_the_command_saves_and_says_how_to_go_on(tmp_path):
    """On SIGTERM `dist-attn train` saves the step that it is in, says --resume in one line, and ends with code 143."""
    toml = write_toml(small_run(tmp_path, steps=100_000, log_every=1, evaluate_every=100_000), tmp_path / "run.toml")
    command = [sys.executable, "-m", "dist_attn", "train", str(toml)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("device cpu, ")
        assert process.stdout.readline().startswith("step 1 ")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 143
    (line,) = errors.splitlines()
    assert line.startswith("dist-attn: stopped by SIGTERM after step ")
    step = int(line.split("after step ")[1].split()[0])
    assert line.endswith(f"{step} of 100000, which is saved: go on with --resume")
    assert (tmp_path / "run" / "checkpoints" / f"step-{step:06d}" / "model.safetensors").is_file()

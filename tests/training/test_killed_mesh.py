"""Ranks that are killed: a mesh of processes goes on from its last checkpoint and ends like one left alone."""

import hashlib
import os
import signal
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file

from dist_attn.comm import Communicator
from dist_attn.errors import CommError
from dist_attn.training import TrainingConfig, checkpointing, sharded_files, train
from dist_attn.training.checkpointing import latest_checkpoint
from dist_attn.training.config import FolderConfig
from dist_attn.training.language_task import LanguageTask
from tests.support.downloaded import qwen3_next, save
from tests.support.programs import running_program
from tests.support.ranks import run_processes, run_ranks
from tests.support.source_path import SOURCE_PATH
from tests.support.training import small_run, write_toml

Moment = Literal["", "step", "save"]
DEADLINE_S = 120.0


def _config(place: Path, *, sharded: bool, rows: int = 2, folder: Path | None = None) -> TrainingConfig:
    """A mesh of `rows` x 2, in bfloat16, with a checkpoint every two steps; of a folder of transformers if given."""
    place.mkdir(exist_ok=True)
    config = small_run(place, steps=8, checkpoint_every=2, evaluate_every=8)
    run = config.run.model_copy(update={"data_ranks": rows, "sequence_ranks": 2, "shard_parameters": sharded})
    kind = "adamw" if sharded or folder is not None else "muon"
    data = config.data.model_copy(update={"batch": 3})
    optimiser = config.optimiser.model_copy(update={"kind": kind})
    model = config.model if folder is None else FolderConfig(folder=folder)
    return config.model_copy(update={"run": run, "data": data, "optimiser": optimiser, "model": model})


def _trained(config: TrainingConfig, resume: bool, killed: Moment, comm: Communicator) -> int:
    """Train on one rank; SIGKILL ends rank 2 in its sixth step, or rank 0 in the middle of its third checkpoint."""
    if killed == "step" and comm.rank == 2:
        loss = LanguageTask.loss

        def fatal_loss(self: LanguageTask, step: int, rows: slice) -> object:
            if step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return loss(self, step, rows)

        LanguageTask.loss = fatal_loss
    if killed == "save" and comm.rank == 0:
        for module, name in ((checkpointing, "save_file"), (sharded_files, "write_shards")):
            setattr(module, name, partial(_fatal_write, getattr(module, name)))
    return train(config, resume=resume, comm=comm)["step"]


def _fatal_write(write, *arguments):
    """Write a file of a checkpoint, but end in the middle of the third one."""
    if any("step-000006" in str(argument) and "optimiser" in str(argument) for argument in arguments):
        os.kill(os.getpid(), signal.SIGKILL)
    write(*arguments)


def _digests(config: TrainingConfig) -> dict[str, str]:
    """The sha256 of every tensor of the last checkpoint, and of the weights' file of the model folder."""
    newest = latest_checkpoint(config.run.folder / "checkpoints")
    assert newest is not None
    digests = {"model": hashlib.sha256((config.run.folder / "model" / "model.safetensors").read_bytes()).hexdigest()}
    for path in newest.glob("*.safetensors"):  # torch writes a rank's shards in an order that changes
        for name, tensor in load_file(path).items():
            digests[f"{path.name} {name}"] = hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy()).hexdigest()
    return digests


def _assert_killed(config: TrainingConfig, moment: Moment) -> None:
    """Train until one rank is killed, of which all others hear; the last checkpoint is the second."""
    outcomes = run_processes(partial(_trained, config, False, moment), config.run.data_ranks * 2)
    dead = 2 if moment == "step" else 0
    assert isinstance(outcomes[dead], EOFError)
    assert all(isinstance(outcome, CommError) for rank, outcome in enumerate(outcomes) if rank != dead), outcomes
    newest = latest_checkpoint(config.run.folder / "checkpoints")
    assert newest is not None
    assert newest.name == "step-000004"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, bool], tuple[Path | None, dict[str, str]]]:
    """The folder of a downloaded model, if the kind is one, and the digests of a mesh that nobody kills."""

    @cache
    def end(kind: str, sharded: bool) -> tuple[Path | None, dict[str, str]]:
        place = tmp_path_factory.mktemp(kind)
        folder = save(qwen3_next(257), place / "downloaded") if kind == "folder" else None
        whole = _config(place / "whole", sharded=sharded, folder=folder)
        assert run_ranks("gloo", partial(_trained, whole, False, ""), 4) == [8] * 4
        return folder, _digests(whole)

    return end


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sharded", "moment"),
    [
        ("own", True, "step"),
        ("own", True, "save"),
        ("folder", False, "step"),
    ],
)
def test_a_killed_mesh_ends_like_an_undisturbed_one(
    tmp_path: Path,
    undisturbed: Callable[[str, bool], tuple[Path | None, dict[str, str]]],
    kind: str,
    sharded: bool,
    moment: Moment,
) -> None:
    """2 x 2 processes of which one is killed in a step, or while it saves, end with the same sha256, sharded or not."""
    folder, whole = undisturbed(kind, sharded)
    killed = _config(tmp_path / "killed", sharded=sharded, folder=folder)
    _assert_killed(killed, moment)
    assert run_ranks("gloo", partial(_trained, killed, True, ""), 4) == [8] * 4
    assert _digests(killed) == whole


@pytest.mark.slow
def test_the_command_resumes_a_killed_mesh(tmp_path: Path) -> None:
    """`dist-attn train --ranks 2 --resume` ends a mesh of which a rank was killed as if none had been."""
    whole, killed = (_config(tmp_path / name, sharded=False, rows=1) for name in ("whole", "killed"))
    run_ranks("gloo", partial(_trained, whole, False, ""), 2)
    _assert_killed(killed, "save")
    assert not (killed.run.folder / "model").exists()
    file = write_toml(killed, tmp_path / "train.toml")
    command = [sys.executable, "-m", "dist_attn", "train", "--ranks", "2", str(file), "--resume"]
    environment = {"PYTHONPATH": SOURCE_PATH, "OMP_NUM_THREADS": "1"}
    with running_program(command, tmp_path / "train.log", env=environment) as program:
        assert program.process.wait(DEADLINE_S) == 0, program.output
        assert program.output.count("step 8  steps 8") == 1  # ranks have one report
    assert _digests(killed) == _digests(whole)

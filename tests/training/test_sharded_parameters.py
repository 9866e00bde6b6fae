"""Parameters sharded over ranks by FSDP: the same losses and weights, and checkpoints for any number of ranks."""

import math
from functools import partial
from pathlib import Path

import pytest
import torch

from dist_attn.checkpoints import load_model
from dist_attn.comm import Communicator, run_simulated
from dist_attn.comm.local import LocalCommunicator
from dist_attn.errors import ConfigError
from dist_attn.models import build_model
from dist_attn.models.blocks import recompute_layers
from dist_attn.training import TrainingConfig, train
from dist_attn.training import task as tasks
from dist_attn.training.averaging import average_folders
from dist_attn.training.checkpointing import latest_checkpoint, load_checkpoint_weights, restore, save
from dist_attn.training.config import read_config
from dist_attn.training.language_task import LanguageTask
from dist_attn.training.loop import build_task
from dist_attn.training.mesh import Mesh
from dist_attn.training.optim import build_optimisers
from dist_attn.training.parallel import place
from tests.support.chapters import chapters_run
from tests.support.closeness import assert_close
from tests.support.models import small_model
from tests.support.over_ranks import randomised
from tests.support.ranks import run_ranks
from tests.support.tasks import small_task
from tests.support.training import small_run, write_toml

pytestmark = pytest.mark.slow

Seen = list[tuple[float, float, float]]


def _config(place: Path, name: str, *, sharded: bool = False) -> TrainingConfig:
    config = small_run(place, dtype="float32", folder=place / name)
    adamw = config.optimiser.model_copy(update={"kind": "adamw"})
    data = config.data.model_copy(update={"batch": 4, "segment": 7, "validation_bytes": 50})
    run = config.run.model_copy(update={"shard_parameters": sharded})
    return config.model_copy(update={"optimiser": adamw, "data": data, "run": run})


def _steps(
    config: TrainingConfig, shape: tuple[int, int], first: int, last: int, comm: Communicator
) -> tuple[Seen, dict[str, torch.Tensor]]:
    """Losses, norms of gradients and scores of some steps in float64, from a checkpoint if any; the weights."""
    tasks.first_model = lambda config, _: randomised(build_model(config)).train()
    with Mesh(comm, *shape) as mesh:
        task = LanguageTask(config, mesh.share())
        recompute_layers(task.model, shape == (1, 2))
        parameters = place(task.model, mesh, sharded=config.run.shard_parameters)
        optimisers = build_optimisers(task.model, config.optimiser)
        folder = config.run.folder / "checkpoints"
        if (newest := latest_checkpoint(folder)) is not None:
            step, carried = restore(newest, task.model, optimisers)
            assert step == first
            task.carry({name: tensor[mesh.share().rows(4)] for name, tensor in carried.items()})
        seen = []
        for step in range(first, last):
            for optimiser in optimisers:
                optimiser.zero_grad()
            task.prepare(step)
            total = torch.zeros((), dtype=torch.float64)
            for rows in mesh.micro_batches(4, 2):
                loss = parameters.with_values(partial(task.loss, step, rows))
                parameters.backward(loss)
                total += loss.detach()
            parameters.reduce_gradients()
            norm = parameters.clip_gradients(0.1).item()
            for optimiser in optimisers:
                optimiser.step()
            with torch.no_grad():
                score = parameters.with_values(task.validate)["bits_per_byte"]
            seen.append((mesh.share().sum(total).item(), norm, score))
        save(folder, last, task.model, optimisers, mesh.gather_rows(task.carried(), 4), 1, mesh)
        return seen, {name: tensor.clone() for name, tensor in parameters.whole_weights().items()}


@pytest.fixture
def first_model():
    """`tasks.first_model` as it was, after a test of this process has replaced it."""
    before = tasks.first_model
    yield before
    tasks.first_model = before


def test_sharded_parameters_change_nothing(tmp_path, first_model):
    """Over 2 x 2, 1 x 2, 2 x 1 ranks and one, each going on where the last stood, all is as on one rank to 1e-6."""
    want, weights = _steps(_config(tmp_path, "one"), (1, 1), 0, 4, LocalCommunicator())
    sharded, seen = _config(tmp_path, "sharded", sharded=True), []
    for shape in ((2, 2), (1, 2), (2, 1)):
        at, ranks = len(seen), math.prod(shape)
        results = run_ranks("gloo", partial(_steps, sharded, shape, at, at + 1), ranks)
        assert all(own == results[0][0] for own, _ in results)
        seen += results[0][0]
        checkpoint = sharded.run.folder / "checkpoints" / f"step-{at + 1:06d}"
        assert len(list(checkpoint.glob(f"model-*-of-{ranks:05d}.safetensors"))) == ranks
    own, got = _steps(_config(tmp_path, "sharded"), (1, 1), 3, 4, LocalCommunicator())
    for numbers, numbers_of_one in zip(seen + own, want, strict=True):
        assert numbers == pytest.approx(numbers_of_one, rel=1e-6)
    for name, tensor in weights.items():
        assert_close(got[name], tensor, kind="gradient", what=name)


def _every_task(configs: list[TrainingConfig], sharded: bool, comm: Communicator) -> list[tuple[float, ...]]:
    """Of each run the loss and the norm of gradients of a step, and what its validation says."""
    seen = []
    with Mesh(comm, comm.size, 1) as mesh:
        for config in configs:
            torch.manual_seed(0)
            task = build_task(config, mesh.share())
            parameters = place(randomised(task.model).train(), mesh, sharded=sharded)
            task.prepare(2)
            (rows,) = mesh.micro_batches(task.batch, 1)
            loss = parameters.with_values(partial(task.loss, 2, rows))
            parameters.backward(loss)
            parameters.reduce_gradients()
            norm = parameters.clip_gradients(1.0).item()
            task.model.eval()
            with torch.no_grad():
                scores = parameters.with_values(task.validate)
            seen.append((mesh.share().sum(loss.detach()).item(), norm, *scores.values()))
    return seen


def test_ranks_with_fewer_rows_use_the_model_as_often(tmp_path):
    """Of every task, where neither the batch nor the examples held out divide by the ranks, all is as on one rank."""
    chapters = chapters_run(tmp_path)
    assert_ranks_use_models_as_often(
        [
            small_task("labelled_text", tmp_path / "texts", data={"batch": 5}),
            chapters.model_copy(update={"data": chapters.data.model_copy(update={"batch": 3})}),
        ]
    )


def assert_ranks_use_models_as_often(configs):
    """All numbers of these tasks are on two ranks as on one."""
    want = _every_task(configs, False, LocalCommunicator())
    for got in run_ranks("gloo", partial(_every_task, configs, True), 2):
        for config, numbers, numbers_of_one in zip(configs, got, want, strict=True):
            assert numbers == pytest.approx(numbers_of_one, rel=1e-6), config.model.kind


def test_what_cannot_be_sharded_is_refused(tmp_path):
    """Muon is refused when the file is read, ranks that are not torch's own before the folder is claimed."""
    file = write_toml(small_run(tmp_path), tmp_path / "train.toml")
    with pytest.raises(ConfigError, match=r"run\.shard_parameters does not go with optimiser\.kind = muon"):
        read_config(file, ["run.shard_parameters=true"])
    config = _config(tmp_path, "run", sharded=True)
    with pytest.raises(ConfigError, match="needs torch's own ranks; these talk over simulated"):
        run_simulated(lambda comm: train(config, comm=comm), 2)
    assert not (tmp_path / "run" / "config.json").exists()


def test_shards_that_are_missing_or_cut_off_are_named(tmp_path):
    """A checkpoint of shards is averaged like any other; with a file missing, or half of one, it is refused."""
    config = _config(tmp_path, "run", sharded=True)
    run_ranks("gloo", partial(_two_steps, config), 2)
    newest = latest_checkpoint(config.run.folder / "checkpoints")
    assert newest is not None
    average_folders([newest], tmp_path / "averaged")
    exported = load_model(config.run.folder / "model").state_dict()
    for name, tensor in load_model(tmp_path / "averaged").state_dict().items():
        assert torch.equal(tensor, exported[name]), name
    shard = newest / "model-00002-of-00002.safetensors"
    sound = shard.read_bytes()
    shard.write_bytes(sound[: len(sound) // 2])
    with pytest.raises(ConfigError, match=r"is damaged: .*; delete it to resume from an older one"):
        train(config.model_copy(update={"run": config.run.model_copy(update={"steps": 2})}), resume=True)
    shard.unlink()
    with pytest.raises(ConfigError, match="is damaged: 1 of 2 files of its model are there"):
        load_checkpoint_weights(small_model(), newest)


def _two_steps(config: TrainingConfig, comm: Communicator) -> None:
    train(config.model_copy(update={"run": config.run.model_copy(update={"steps": 2})}), comm=comm)

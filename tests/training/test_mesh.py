"""A mesh of data and sequence ranks trains like one rank: loss, every gradient, carried state, files and failures."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dist_attn.comm import Communicator, run_simulated
from dist_attn.comm.local import LocalCommunicator
from dist_attn.errors import CommError, ConfigError, EngineError
from dist_attn.models import build_model
from dist_attn.models.dropout import use_dropout
from dist_attn.sharded.gradients import drop_missing, sum_gradients
from dist_attn.training import TrainingConfig, task, train
from dist_attn.training.language_task import LanguageTask
from dist_attn.training.mesh import Mesh, mesh_shape
from tests.support.closeness import assert_close
from tests.support.models import small_config, write_small_folder
from tests.support.over_ranks import randomised
from tests.support.training import small_run

MESHES = {(1, 2): 1, (2, 1): 1, (2, 2): 2, (1, 3): 1}  # and in how many micro-batches


def _config(place: Path, kind: str, segment: int = 7, **data: object) -> TrainingConfig:
    config = small_run(place, dtype="float32")
    changes = {"batch": 5, "segment": segment, "validation_bytes": 90, **data}
    return config.model_copy(update={"model": small_config(kind), "data": config.data.model_copy(update=changes)})


def _steps(config: TrainingConfig, comm: Communicator, shape: tuple[int, int], parts: int) -> list[dict]:
    """Loss, gradients and carried state of two steps under dropout, and a validation, as every rank sees them."""
    with Mesh(comm, *shape) as mesh:
        share, seen = mesh.share(), []
        task = LanguageTask(config, share)
        draw = use_dropout(task.model, 0.2, seed=0)
        for step in range(2):
            task.model.zero_grad()
            task.prepare(step)
            draw.step = step
            total = torch.zeros((), dtype=torch.float64)
            for rows in mesh.micro_batches(5, parts):
                draw.first_row = rows.start
                loss = task.loss(step, rows)
                loss.backward()
                total += loss.detach()
            learned = list(task.model.parameters())
            drop_missing(learned, sum_gradients(comm, learned, bucket_bytes=4096).tolist())
            gradients = {name: p.grad.clone() for name, p in task.model.named_parameters()}
            carried = mesh.gather_rows(task.carried(), 5)
            seen.append({"loss": share.sum(total), "gradients": gradients, "carried": carried})
        task.model.eval()
        with torch.no_grad():
            seen[-1]["score"] = task.validate()["bits_per_byte"]
        return seen


@pytest.fixture
def doubles(monkeypatch):
    """Models of language tasks are random ones in float64."""
    monkeypatch.setattr(task, "first_model", lambda config, _: randomised(build_model(config)).train())


@pytest.mark.parametrize("kind", ["rfa_gate", "softmax"])
def test_every_mesh_has_the_gradients_of_one_rank(tmp_path, doubles, kind):
    """Loss, gradients, carried state and validation over uneven shares are one rank's to 1e-6, in micro-batches too."""
    config = _config(tmp_path, kind)
    want = _steps(config, LocalCommunicator(), (1, 1), 1)
    assert all(bool(gradient.any()) for gradient in want[-1]["gradients"].values())
    for shape, parts in MESHES.items():
        for seen in run_simulated(lambda comm, s=shape, n=parts: _steps(config, comm, s, n), shape[0] * shape[1]):
            for step, (got, one) in enumerate(zip(seen, want, strict=True)):
                where = f"{shape} step {step} "
                assert_close(got["loss"], one["loss"], what=f"{where} loss")
                for name, gradient in one["gradients"].items():
                    error = (got["gradients"][name] - gradient).norm() / gradient.norm()
                    assert error < 1e-6, f"{where} {name} differs by {error}"
                for name, tensor in one["carried"].items():
                    assert_close(got["carried"][name], tensor, kind="state", what=f"{where} {name}")
            assert seen[-1]["score"] == pytest.approx(want[-1]["score"], rel=1e-6)


@pytest.mark.parametrize("kind", ["rfa_gate", "softmax"])
def test_ranks_without_tokens_take_part(tmp_path, doubles, kind):
    """Segments shorter than the sequence axis leave ranks empty, which changes nothing."""
    config = _config(tmp_path, kind, segment=2, stateful=False, validation_bytes=7)
    want = _steps(config, LocalCommunicator(), (1, 1), 1)[-1]
    for seen in run_simulated(lambda comm: _steps(config, comm, (1, 3), 1), 3):
        for name, gradient in want["gradients"].items():
            assert_close(seen[-1]["gradients"][name], gradient, kind="gradient", what=name)
        assert seen[-1]["score"] == pytest.approx(want["score"], rel=1e-6)


def test_the_shape_of_a_mesh_follows_from_what_is_given():
    """What is not given follows from the number of processes; by default all divide rows; a misfit is refused."""
    assert mesh_shape(4, None, None) == (4, 1)
    assert mesh_shape(6, 2, None) == (2, 3)
    assert mesh_shape(6, None, 2) == (3, 2)
    assert mesh_shape(1, None, None) == (1, 1)
    for given in ((4, 2, 3), (1, 2, None), (4, 3, None), (4, None, 8)):
        with pytest.raises(ConfigError, match="do not make a mesh of the"):
            mesh_shape(*given)
    with Mesh(LocalCommunicator()) as mesh, pytest.raises(ConfigError, match=r"data\.batch is 2; 1 data ranks with 3"):
        mesh.micro_batches(2, 3)


def _ranked(place: Path, **run: object) -> TrainingConfig:
    """A run that begins with given weights: simulated ranks are threads, which share one source of random numbers."""
    if not (place / "first").exists():
        write_small_folder(place / "first", seed=3)
    config = small_run(place, begin_from=place / "first", dtype="float32", **run)
    # Muon orthogonalises in bfloat16, which makes much of a last bit.
    return config.model_copy(update={"optimiser": config.optimiser.model_copy(update={"kind": "adamw"})})


def test_a_mesh_trains_what_one_process_trains(tmp_path):
    """Two by two ranks log one process's losses and leave its weights; so does a pair that goes on where they were."""
    one = _ranked(tmp_path, folder=tmp_path / "one")
    train(one)
    mesh = _ranked(tmp_path, folder=tmp_path / "mesh", data_ranks=2, sequence_ranks=2)
    lasts = run_simulated(lambda comm: train(mesh, comm=comm), 4)
    assert {last["step"] for last in lasts} == {6}
    lines = [
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("one", "mesh")
    ]
    assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]]
    for line, other in zip(*lines, strict=True):
        for key in ("loss", "bits_per_byte"):
            assert line.get(key, 0.0) == pytest.approx(other.get(key, 0.0), rel=1e-4)
        # Weights that differ in their last bits may put a denominator on the other side of its floor.
        assert ("guarded_share" in line) == ("bits_per_byte" in line)
        assert line.get("guarded_share", 0.0) == pytest.approx(other.get("guarded_share", 0.0), abs=5e-3)
    want = load_file(tmp_path / "one" / "checkpoints" / "step-000006" / "model.safetensors")
    (tmp_path / "mesh" / "checkpoints" / "step-000006").rename(tmp_path / "aside")
    pair = _ranked(tmp_path, folder=tmp_path / "mesh", data_ranks=1, sequence_ranks=2)
    run_simulated(lambda comm: train(pair, resume=True, comm=comm), 2)
    for place in (tmp_path / "aside", tmp_path / "mesh" / "checkpoints" / "step-000006"):
        for name, tensor in load_file(place / "model.safetensors").items():
            assert (tensor - want[name]).norm() <= 1e-4 * want[name].norm(), f"{place.name} {name}"


def test_all_ranks_end_when_one_fails(tmp_path, monkeypatch):
    """Bad input ends every rank before anything is written; what fails on one rank alone is told with its number."""
    config = _ranked(tmp_path, data_ranks=3)
    with pytest.raises(ConfigError, match="do not make a mesh"):
        run_simulated(lambda comm: train(config, comm=comm), 2)
    with pytest.raises(ConfigError, match=r"data\.batch is 2; 3 data ranks"):
        run_simulated(lambda comm: train(config, comm=comm), 3)
    assert not (tmp_path / "run" / "config.json").exists()
    config, whole = _ranked(tmp_path, data_ranks=2), LanguageTask.__init__

    def broken(self: LanguageTask, config: TrainingConfig, share: object, *rest: object) -> None:
        if share.rows(2).start:
            raise OSError("its disk is gone")
        whole(self, config, share, *rest)

    def outcome(comm: Communicator) -> BaseException | None:
        try:
            train(config, comm=comm)
        except Exception as error:
            return error
        return None

    monkeypatch.setattr(LanguageTask, "__init__", broken)
    for error in run_simulated(outcome, 2):
        assert isinstance(error, EngineError)
        assert str(error).startswith(
            "rank 1 of 2: what the run has made ready of its data could not be written: its disk"
        )
    monkeypatch.setattr(LanguageTask, "__init__", whole)
    loss = LanguageTask.loss

    def late(self: LanguageTask, step: int, rows: slice) -> torch.Tensor:
        if step == 2 and rows.start:
            raise OSError("its disk is gone")
        return loss(self, step, rows)

    monkeypatch.setattr(LanguageTask, "loss", late)
    with pytest.raises(CommError, match="rank 1 of 2 failed: its disk is gone"):
        run_simulated(lambda comm: train(config, comm=comm), 2)

"""Every kind of model is trained by a file: it learns, goes on where it was killed, and is the same over ranks."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dist_attn.checkpoints import load_any_model
from dist_attn.comm import Communicator, run_simulated
from dist_attn.training import train
from dist_attn.training.build_task import build_task
from dist_attn.training.mesh import Mesh
from dist_attn.training.task import Task, Whole
from tests.support.closeness import assert_close
from tests.support.tasks import RUNS, small_task

# Changes to the small run, and a metric at its end that is good only once the task is learnt.
LEARNT: dict[str, tuple[dict[str, Any], str, float]] = {
    "labelled_text": ({"run": {"steps": 60}}, "accuracy", 0.9),
    # The value of nested lists takes hours to learn: six of them are learnt by heart.
    "listops": ({"run": {"steps": 60}, "optimiser": {"learning_rate": 2e-2}, "data": {"examples": 6}}, "loss", 0.2),
    "vision": ({"run": {"steps": 40}, "optimiser": {"learning_rate": 2e-2}}, "accuracy", 0.9),
    "autoencoder": ({"run": {"steps": 80}}, "validation_loss", 0.8),
    "translation": ({"run": {"steps": 60}, "optimiser": {"learning_rate": 2e-2}}, "token_accuracy", 0.75),
}


@pytest.mark.parametrize("kind", RUNS)
def test_a_run_learns_and_leaves_a_model(tmp_path: Path, kind: str) -> None:
    """The loss falls, the metric gets good, and the folder at the end loads with the model that was asked for."""
    changes, metric, good = LEARNT[kind]
    steps = changes["run"]["steps"]
    rhythm = {"log_every": 10, "evaluate_every": steps, "checkpoint_every": steps}
    config = small_task(kind, tmp_path, **changes | {"run": changes["run"] | rhythm})
    reports: list[dict[str, Any]] = []
    train(config, report=reports.append)
    losses = [report["loss"] for report in reports if "loss" in report]
    assert losses[-1] < 0.9 * losses[0]
    last = next(report[metric] for report in reversed(reports) if metric in report)
    assert last <= good if "loss" in metric else last >= good, reports
    model = load_any_model(tmp_path / "run" / "model")
    assert model.config == config.model


def _killed_at(task: Task, step: int) -> None:
    whole = task.loss

    def loss(at: int, rows: slice) -> Tensor:
        if at == step:
            raise KeyboardInterrupt
        return whole(at, rows)

    task.loss = loss  # type: ignore[method-assign]


@pytest.mark.parametrize("kind", RUNS)
def test_a_killed_run_ends_like_an_undisturbed_one(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in its fifth step and resumed, a run has the weights and the metrics of one that was not, bit for bit."""
    runs = {name: small_task(kind, tmp_path / name) for name in ("whole", "killed")}
    want = train(runs["whole"])
    with monkeypatch.context() as patched:

        def build(*arguments: object) -> Task:
            task = build_task(*arguments)  # type: ignore[arg-type]
            _killed_at(task, 4)
            return task

        patched.setattr("dist_attn.training.loop.build_task", build)
        with pytest.raises(KeyboardInterrupt):
            train(runs["killed"])
    assert train(runs["killed"], resume=True) == want
    whole, killed = (
        load_file(config.run.folder / "checkpoints" / "step-000006" / "model.safetensors") for config in runs.values()
    )
    assert all(torch.equal(killed[name], tensor) for name, tensor in whole.items())


def _doubled(task: Task) -> Task:
    task.model.double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return task


@pytest.mark.parametrize("mesh", [(1, 3), (2, 1), (2, 2)], ids=["1x3", "2x1", "2x2"])
@pytest.mark.parametrize("kind", RUNS)
def test_ranks_change_nothing(tmp_path: Path, kind: str, mesh: tuple[int, int]) -> None:
    """Shares of loss, gradients and validation on a mesh of data x sequence ranks add up to those of one process."""
    config = small_task(kind, tmp_path, data={"batch": 5})
    whole = _doubled(build_task(config, Whole()))
    loss = whole.loss(3, slice(0, 5))
    loss.backward()
    whole.model.eval()
    with torch.no_grad():
        want = whole.validate()

    def body(comm: Communicator) -> tuple[Tensor, dict[str, Tensor], dict[str, float | int]]:
        with Mesh(comm, *mesh) as place:
            task = _doubled(build_task(config, place.share()))
            shares = []
            for rows in place.micro_batches(5, 2):
                shares.append(task.loss(3, rows))
                shares[-1].backward()
            gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in task.model.named_parameters()}
            task.model.eval()
            with torch.no_grad():
                return torch.stack([share.detach() for share in shares]).sum(), gradients, task.validate()

    ranks = run_simulated(body, mesh[0] * mesh[1])
    assert_close(torch.stack([own for own, _, _ in ranks]).sum(), loss.detach(), what="loss")
    for name, parameter in whole.model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name
        summed = torch.stack([own[name] for _, own, _ in ranks]).sum(0)
        assert_close(summed, parameter.grad, kind="gradient", what=name)
    for _, _, scores in ranks:
        assert scores == pytest.approx(want, rel=1e-9)


def test_validation_is_of_every_held_out_example(tmp_path: Path) -> None:
    """Accuracy and loss count each validation text once, whatever batches they come in."""
    scores = []
    for batch in (4, 60):
        task = _doubled(build_task(small_task("labelled_text", tmp_path, data={"batch": batch}), Whole()))
        with torch.no_grad():
            scores.append(task.validate())
    assert scores[0]["examples"] == 21
    assert scores[0] == pytest.approx(scores[1])


def test_the_folder_says_what_its_classes_mean(tmp_path: Path) -> None:
    """Names of labels and how pixels are scaled stand in the manifest of the model folder."""
    train(small_task("labelled_text", tmp_path / "text", run={"steps": 1, "bf16": True}))
    manifest = json.loads((tmp_path / "text" / "run" / "model" / "manifest.json").read_text())
    assert manifest["labels"] == ["much a", "much b"]
    assert manifest["texts_seen"] == 6
    train(small_task("vision", tmp_path / "images", run={"steps": 1}))
    manifest = json.loads((tmp_path / "images" / "run" / "model" / "manifest.json").read_text())
    assert manifest["labels"] == ["down", "up"]
    assert 90 < manifest["pixel_mean"][0] < 110
    assert manifest["pixel_deviation"][0] > 50

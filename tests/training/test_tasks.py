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
from dist_attn.errors import ConfigError
from dist_attn.models.dropout import use_dropout
from dist_attn.training import train
from dist_attn.training.loop import build_task
from dist_attn.training.mesh import Mesh, Share
from dist_attn.training.task import Task
from tests.support.closeness import assert_close
from tests.support.tasks import small_task

# Changes to the small run, and a metric at its end that is good only once the task is learnt.
LEARNT: dict[str, tuple[dict[str, Any], str, float]] = {
    "labelled_text": ({"run": {"steps": 60}}, "accuracy", 0.9),
    "pairs": ({"run": {"steps": 80}}, "accuracy", 0.9),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEARNT)
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", LEARNT)
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


@pytest.mark.parametrize("kind", LEARNT)
def test_ranks_change_nothing(tmp_path: Path, kind: str) -> None:
    """Shares of loss (under dropout), gradients and validation on a mesh of ranks add up to those of one process."""
    config = small_task(kind, tmp_path, data={"batch": 5})
    whole = _doubled(build_task(config, Share()))
    use_dropout(whole.model, 0.2, seed=1)
    loss = whole.loss(3, slice(0, 5))
    loss.backward()
    whole.model.eval()
    with torch.no_grad():
        want = whole.validate()

    def body(comm: Communicator) -> tuple[Tensor, dict[str, Tensor], dict[str, float | int]]:
        with Mesh(comm, 2, 2) as place:
            task = _doubled(build_task(config, place.share()))
            draw, shares = use_dropout(task.model, 0.2, seed=1), []
            for rows in place.micro_batches(5, 2):
                draw.first_row = rows.start * task.sequences_per_row
                shares.append(task.loss(3, rows))
                shares[-1].backward()
            gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in task.model.named_parameters()}
            task.model.eval()
            with torch.no_grad():
                return torch.stack([share.detach() for share in shares]).sum(), gradients, task.validate()

    ranks = run_simulated(body, 4)
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
        task = _doubled(build_task(small_task("labelled_text", tmp_path, data={"batch": batch}), Share()))
        with torch.no_grad():
            scores.append(task.validate())
    assert scores[0]["examples"] == 21
    assert scores[0] == pytest.approx(scores[1])


@pytest.mark.parametrize(("kind", "texts"), [("pairs", 1), ("labelled_text", 2)])
def test_pairs_and_single_texts_are_not_mixed_up(tmp_path: Path, kind: str, texts: int) -> None:
    """A model of pairs over single texts, and the reverse, is refused with what either needs."""
    config = small_task(kind, tmp_path, model={"texts": texts})
    with pytest.raises(ConfigError, match=rf"model\.texts is {texts} and the examples of \[data\] have {3 - texts}"):
        build_task(config, Share())


def test_the_folder_says_what_its_classes_mean(tmp_path: Path) -> None:
    """Names of labels stand in the manifest of the model folder."""
    train(small_task("labelled_text", tmp_path / "text", run={"steps": 1, "dtype": "bfloat16"}))
    manifest = json.loads((tmp_path / "text" / "run" / "model" / "manifest.json").read_text())
    assert manifest["labels"] == ["much a", "much b"]
    assert manifest["texts_seen"] == 6


@pytest.mark.parametrize(
    ("kind", "sections", "words"),
    [
        ("labelled_text", {"model": {"num_classes": 3}}, r"have 2 labels, 'much a', 'much b'; model\.num_classes is 3"),
        ("labelled_text", {"model": {"vocab_size": 300}}, r"has 257 tokens, model\.vocab_size is 300"),
        ("labelled_text", {"data": {"batch": 61}}, "there are 60 labelled texts; a batch needs 61"),
    ],
)
def test_data_that_does_not_fit_is_named(tmp_path: Path, kind: str, sections: dict[str, Any], words: str) -> None:
    """What does not fit the model, or is too little for a batch, is refused in one line before anything is written."""
    config = small_task(kind, tmp_path, **sections)
    with pytest.raises(ConfigError, match=words) as caught:
        train(config)
    assert "\n" not in str(caught.value)
    assert not (config.run.folder / "config.json").exists()


def test_mixers_that_packing_would_change_are_refused(tmp_path: Path, running_sum: str) -> None:
    """A mixer that would tell packed texts from single ones is refused with what to take instead, also in a pattern."""
    alone = {"kind": running_sum, "hidden_size": 16}
    hybrid = {"kind": "hybrid", "pattern": [{"kind": "convolution", "hidden_size": 16}, alone]}
    for mixer in (alone, hybrid):
        encoder = {"hidden_size": 16, "num_layers": 2, "mlp_size": 32, "mixer": mixer}
        with pytest.raises(ConfigError, match="running_sum takes no packed texts; take kind bidirectional"):
            build_task(small_task("labelled_text", tmp_path, model={"encoder": encoder}), Share())


def test_pools_are_drawn_from_at_every_step(tmp_path: Path) -> None:
    """A classifier whose mixer has a pool of random matrices takes others at every step, and the same when resumed."""
    mixer = {"kind": "rfa", "hidden_size": 16, "num_heads": 2, "num_random": 4, "pool": 20}
    encoder = {"hidden_size": 16, "num_layers": 1, "mlp_size": 32, "mixer": mixer}
    task = build_task(small_task("labelled_text", tmp_path, model={"encoder": encoder}), Share())
    losses = []
    for step in (0, 1, 0):
        task.prepare(step)
        losses.append(task.loss(4, slice(0, 6)).item())
    assert losses[0] == losses[2]
    assert losses[0] != losses[1]

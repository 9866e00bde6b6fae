"""The seam between the loop and what is trained: the shares of a batch, and a task that is not a language model."""

import json

import torch
from torch import nn

from dist_attn.ops import LocalSequenceOps
from dist_attn.training import loop, train
from dist_attn.training.language_task import LanguageTask
from dist_attn.training.mesh import Share
from dist_attn.training.task import Criterion, Task
from tests.support.closeness import assert_close
from tests.support.training import small_run


class Line(Task):
    """A line through points: rows are points, and what is carried is how often each was seen."""

    unit = "points"

    def __init__(self) -> None:
        super().__init__(nn.Linear(1, 1), batch=8)
        self.criterion = Criterion("error", "lower")
        self.steps = torch.zeros(8, dtype=torch.int64)

    def loss(self, step, rows):
        x = torch.linspace(step % 3, step % 3 + 1, self.batch)[rows, None]
        self.steps = self.steps + 1
        return (self.model(x) - 3 * x - 1).square().sum() / self.batch

    def carried(self):
        return {"steps": self.steps}

    def carry(self, tensors):
        self.steps = tensors["steps"]

    def validate(self):
        return {"error": float((self.model(torch.ones(1, 1)) - 4).abs())}

    def seen(self, steps):
        return 8 * steps

    def export(self, folder, weights, facts):
        folder.mkdir(exist_ok=True)
        (folder / "facts.json").write_text(json.dumps({**facts, "weights": list(weights)}))


def test_the_share_of_one_process_is_everything():
    """Alone, a process has all rows and tokens, plain operations, and sums that are its own values."""
    share = Share()
    assert (share.rows(5), share.tokens(7), share.replica_weight) == (slice(0, 5), slice(0, 7), 1.0)
    assert isinstance(share.ops(7), LocalSequenceOps)
    assert (share.lengthwise().rows(5), share.lengthwise().tokens(7)) == (slice(0, 5), slice(0, 7))
    assert share.sum(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]


def test_the_loop_trains_whatever_a_task_is(tmp_path, monkeypatch):
    """The loop logs, validates, saves, resumes and exports a task that it knows nothing about, in the task's unit."""
    monkeypatch.setattr(loop, "build_task", lambda *_: Line())
    config, reports = small_run(tmp_path, steps=30, dtype="float32"), []
    adamw = {"optimiser": config.optimiser.model_copy(update={"kind": "adamw", "learning_rate": 0.3})}
    config = config.model_copy(update=adamw)
    train(config, report=reports.append)
    assert reports[-1]["error"] < 0.5
    assert reports[-2]["points"] == 240
    assert "points_per_second" in reports[-2]
    assert train(config, resume=True)["step"] == 30
    facts = json.loads((tmp_path / "run" / "model" / "facts.json").read_text())
    assert facts["weights"] == ["weight", "bias"]
    assert facts["points_seen"] == 240


def test_micro_batches_of_a_language_task_add_up(tmp_path):
    """The losses and gradients of two parts of the rows add up to those of all, and so does the state they leave."""
    config = small_run(tmp_path, dtype="float32")
    whole, parts = (loop.build_task(config, Share()) for _ in range(2))
    assert isinstance(whole, LanguageTask)
    parts.model.load_state_dict(whole.model.state_dict())
    for step in range(2):
        for task in (whole, parts):
            task.model.zero_grad()
            task.prepare(step)
        loss = whole.loss(step, slice(0, 2))
        loss.backward()
        shares = [parts.loss(step, slice(row, row + 1)) for row in range(2)]
        for share in shares:
            share.backward()
        assert_close(sum(share.detach() for share in shares), loss.detach(), what="loss")
        for (name, p), q in zip(whole.model.named_parameters(), parts.model.parameters(), strict=True):
            assert_close(q.grad, p.grad, kind="gradient", what=name)
        for name, tensor in whole.carried().items():
            assert_close(parts.carried()[name], tensor, kind="state", what=name)

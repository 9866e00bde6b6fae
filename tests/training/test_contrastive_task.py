"""Contrastive training: its loss by definition, pairs of one chapter, rows that add up, and a run that learns."""

import json
import math

import numpy as np
import pytest
import torch

from dist_attn.checkpoints import load_model
from dist_attn.comm import Communicator, run_simulated
from dist_attn.comm.local import LocalCommunicator
from dist_attn.errors import ConfigError
from dist_attn.models import build_model
from dist_attn.models.dropout import use_dropout
from dist_attn.sharded.gradients import drop_missing, sum_gradients
from dist_attn.text import ByteTokeniser
from dist_attn.training import TrainingConfig, task, train
from dist_attn.training.chapters import Chapter, ChapterPairs, ContrastiveTask, contrast_loss, find_chapters
from dist_attn.training.config import ContrastConfig
from dist_attn.training.mesh import Mesh, Share
from tests.support.chapters import CONTRAST, book, chapters_run
from tests.support.closeness import assert_close
from tests.support.over_ranks import randomised


def test_the_loss_is_that_of_the_definition():
    """Each window's twin stands against all other windows, and windows of one direction cost nothing more."""
    rows = torch.randn(6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    want = 0.0
    for i in range(6):
        cosine = [float(torch.cosine_similarity(rows[i], rows[j], dim=0)) / 0.2 for j in range(6)]
        twin = i + 1 if i % 2 == 0 else i - 1
        want -= cosine[twin] - math.log(sum(math.exp(c) for j, c in enumerate(cosine) if j != i))
    assert float(contrast_loss(rows, 0.2)) == pytest.approx(want / 6)
    apart = torch.eye(3, dtype=torch.float64).repeat_interleave(2, 0)
    assert float(contrast_loss(apart, 0.01)) == pytest.approx(0.0, abs=1e-9)


def test_pairs_lie_in_one_chapter_and_do_not_overlap():
    """Both windows of a pair are of the same chapter, pairs of a row are of different ones, and draws repeat."""
    tokens = np.arange(1000, dtype=np.int32)
    chapters = tuple(Chapter(start, start + 40 + start // 10) for start in range(0, 600, 100))
    pairs = ChapterPairs([(tokens, chapters), (1000 + tokens, chapters)], CONTRAST, 20, seed=3)
    seen = set()
    for step in range(50):
        row = pairs.row(step, 0)
        assert row.shape == (8, 20)
        assert torch.equal(row, pairs.row(step, 0))
        drawn = row[:, 0].reshape(4, 2)
        assert (drawn[:, 0] - drawn[:, 1]).abs().min() >= 20
        numbers = [int(first) // 100 for first in drawn.flatten()]
        assert numbers[::2] == numbers[1::2]
        assert len(set(numbers)) == 4
        assert all(int(w[-1]) % 1000 < chapters[int(w[0]) % 1000 // 100].stop for w in row)
        seen |= {int(start) for start in drawn.flatten()}
    assert not torch.equal(pairs.row(0, 0), pairs.row(0, 1))
    assert {0, 20} <= seen  # a chapter of exactly two windows has these two
    with pytest.raises(ConfigError, match="1 of the texts have 2 chapters of two windows of 20 tokens"):
        ChapterPairs([(tokens, chapters), (tokens, chapters[:1])], CONTRAST, 20, seed=3)


def test_rows_add_up_to_the_batch(tmp_path):
    """The loss of all rows and its gradients are the sums over micro-batches, an empty one adding nothing."""
    config = chapters_run(tmp_path, folder=tmp_path / "run")
    config = config.model_copy(update={"data": config.data.model_copy(update={"batch": 3})})
    task = ContrastiveTask(config, Share())
    whole = task.loss(5, slice(0, 3))
    whole.backward()
    want = {name: p.grad.clone() for name, p in task.model.named_parameters() if p.grad is not None}
    task.model.zero_grad()
    parts = [task.loss(5, rows) for rows in (slice(0, 1), slice(1, 1), slice(1, 3))]
    assert parts[1].item() == 0.0
    assert sum(part.item() for part in parts) == pytest.approx(whole.item(), rel=1e-6)
    torch.stack(parts).sum().backward()
    got = {name: p.grad for name, p in task.model.named_parameters() if p.grad is not None}
    assert got.keys() == want.keys()
    assert all(torch.allclose(got[name], tensor, atol=1e-6, rtol=1e-4) for name, tensor in want.items())


def _gradients(config: TrainingConfig, comm: Communicator, shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    """One step's loss under dropout and its gradients, summed over the ranks."""
    with Mesh(comm, *shape) as mesh:
        share = mesh.share()
        task = ContrastiveTask(config, share)
        use_dropout(task.model, 0.2, seed=1).first_row = share.rows(3).start * task.sequences_per_row
        loss = task.loss(1, share.rows(3))
        loss.backward()
        learned = list(task.model.parameters())
        drop_missing(learned, sum_gradients(comm, learned, bucket_bytes=4096).tolist())
        found = {name: p.grad.clone() for name, p in task.model.named_parameters() if p.grad is not None}
        return found | {"loss": share.sum(loss.detach())}


@pytest.mark.parametrize("segment", [17, 2])
def test_ranks_divide_rows_and_windows(tmp_path, monkeypatch, segment):
    """Over data and sequence ranks, with uneven and empty shares, loss and every gradient are those of one rank."""
    monkeypatch.setattr(task, "first_model", lambda config, _: randomised(build_model(config)).train())
    config = chapters_run(tmp_path)
    config = config.model_copy(update={"data": config.data.model_copy(update={"batch": 3, "segment": segment})})
    want = _gradients(config, LocalCommunicator(), (1, 1))
    for shape in ((1, 3), (2, 2), (4, 1)):
        for got in run_simulated(lambda comm, s=shape: _gradients(config, comm, s), shape[0] * shape[1]):
            assert got.keys() == want.keys()
            for name, tensor in want.items():
                assert_close(got[name], tensor, kind="gradient", what=f"{shape} {name}")


def test_a_run_draws_chapters_together(tmp_path):
    """Where every chapter has a letter of its own, a run finds the chapter of held-out windows, and ships."""
    config = chapters_run(tmp_path, steps=60, evaluate_every=60, log_every=10, checkpoint_every=60)
    torch.manual_seed(0)
    before = ContrastiveTask(config, Share())
    before.model.eval()
    first = before.validate()
    reports = []
    last = train(config, report=reports.append)
    losses = [report["loss"] for report in reports if "loss" in report]
    assert losses[-1] < losses[0]
    assert last["same_chapter"] > first["same_chapter"] + 0.2
    assert last["windows"] == first["windows"] > 20
    manifest = json.loads((tmp_path / "run" / "model" / "manifest.json").read_text())
    assert manifest["contrast"]["chapters"] == 4
    assert manifest["tokens_seen"] == 60 * 2 * 2 * 4 * 16
    assert load_model(tmp_path / "run" / "model").config == config.model


def test_validation_needs_chapters_only_where_there_are_any(tmp_path):
    """A held-out text without headings has no windows to find, and still its bits per byte."""
    config = chapters_run(tmp_path)
    (tmp_path / "held_out.txt").write_bytes(b"nothing here is a chapter")
    task = ContrastiveTask(config, Share())
    task.model.eval()
    scores = task.validate()
    assert (scores["same_chapter"], scores["windows"]) == (0.0, 0)
    assert scores["bits_per_byte"] > 0
    data = book(b"abcdef")
    assert len(find_chapters(data, ByteTokeniser().encode(data), ByteTokeniser(), 32)) == 6


def test_what_is_no_plain_text_is_refused(tmp_path):
    """A folder or records have no chapters, and the line says so."""
    config = chapters_run(tmp_path)
    config = config.model_copy(update={"data": config.data.model_copy(update={"train": (tmp_path,)})})
    with pytest.raises(ConfigError, match="chapters are looked for in plain text files"):
        ContrastiveTask(config, Share())


def test_chapters_that_do_not_divide_are_refused():
    """Equally many chapters of each book, or a line that says so."""
    with pytest.raises(ValueError, match="chapters 5 must be a multiple of books 2"):
        ContrastConfig(chapters=5, books=2)

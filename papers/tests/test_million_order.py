"""The order of sums in the million-scale model: the same in every run."""

from pathlib import Path

import torch

from dist_attn.training.loop import build_task
from dist_attn.training.mesh import Share
from papers.tests.support.tasks import small_task
from tests.support.fixed_order import ALLOWED, FixedOrder

ROUTING = "dist_attn_papers/ops/token_routing.py"
ALLOWED.update(
    {
        ("index_put", ROUTING): "each assignment has one place",
        ("index_copy", ROUTING): "each assignment has one row",
    }
)


def test_a_million_scale_model(tmp_path: Path) -> None:
    """Selection, routing and up-sampling too, whose gradients meet where a token is taken more than once."""
    task = build_task(small_task("million", tmp_path), Share(torch.device("cpu")))
    with FixedOrder() as order:
        task.prepare(0)
        task.loss(0, slice(0, task.batch)).backward()
    assert ("index_copy", "dist_attn_papers/ops/token_routing.py") in order.allowed

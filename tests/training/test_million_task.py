"""Training of the million-scale model: what begins a run, what validation counts, how the objective of Eq. 28 ends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from dist_attn.checkpoints import save_model
from dist_attn.errors import ConfigError
from dist_attn.models import MillionModel
from dist_attn.training.first_model import first_model
from dist_attn.training.million_task import MillionTask
from dist_attn.training.task import Whole
from tests.support.tasks import small_task


def _model(place: Path, **changes: Any) -> MillionModel:
    config = small_task("million", place, model=changes).model
    model = first_model(config, None)
    assert isinstance(model, MillionModel)
    return model


def test_a_run_begins_under_a_selector_that_stays(tmp_path: Path) -> None:
    """A model may begin with the weights of one whose Selector learnt, and keep that; other sizes are refused."""
    save_model(_model(tmp_path), tmp_path / "first")
    frozen = _model(tmp_path, selector={"gate": "gumbel", "frozen": True}).config
    second = first_model(frozen, tmp_path / "first")
    assert second.config == frozen and not any(p.requires_grad for p in second.selector.parameters())
    wider = _model(tmp_path, mlp_size=40).config
    with pytest.raises(ConfigError, match="differs from \\[model\\] in more than how its Selector learns"):
        first_model(wider, tmp_path / "first")


def test_validation_says_what_becomes_of_tokens(tmp_path: Path) -> None:
    """The shares of kept tokens and of dropped assignments are counted over all held-out sequences."""
    changes = {"selector": {"gate": "top_k", "rate": 0.5}, "router": {"num_experts": 2, "most_tokens": 1}}
    config = small_task("million", tmp_path, model=changes)
    task = MillionTask(config, Whole())
    task.model.eval()
    with torch.no_grad():
        scores = task.validate()
    assert scores["kept_share"] == pytest.approx(7 / 13)
    # Of seven tokens a sequence two at most find room, and those of one expert alone where all go to one.
    assert 5 / 7 <= scores["dropped_share"] <= 6 / 7
    assert scores["examples"] == 11


def test_what_is_not_trained_is_refused(tmp_path: Path) -> None:
    """A model without classes and sharded parameters are refused in a line."""
    config = small_task("million", tmp_path, model={"num_classes": None})
    with pytest.raises(ConfigError, match="num_classes is missing"):
        MillionTask(config, Whole())
    with pytest.raises(ValidationError, match="reads its sequences one by one"):
        small_task("million", tmp_path, run={"shard_parameters": True})

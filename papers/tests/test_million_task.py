"""Training of the million-scale model: what begins a run, what validation counts, how the objective of Eq. 28 ends."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from dist_attn.checkpoints import save_model
from dist_attn.errors import ConfigError
from dist_attn.training import train
from dist_attn.training.mesh import Share
from dist_attn.training.task import first_model
from dist_attn_papers.million.model import MillionModel
from dist_attn_papers.million.task import MillionTask
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
    task = MillionTask(config, Share())
    task.model.eval()
    with torch.no_grad():
        scores = task.validate()
    assert (scores["kept_share"], scores["kept_per_text"]) == (pytest.approx(7 / 13), pytest.approx(7))
    # Of seven tokens a sequence two at most find room, and those of one expert alone where all go to one.
    assert 5 / 7 <= scores["dropped_share"] <= 6 / 7
    assert scores["examples"] == 11


def test_the_selector_of_eq_28_makes_the_likelihood_worse(tmp_path: Path) -> None:
    """Learning alone, it raises the cross entropy of its texts step by step and ends above where one of Eq. 27 ends."""
    losses = {}
    for objective in ("likelihood", "adversarial"):
        selector = {"gate": "soft", "rate_weight": 0.0, "temperature": 0.3}
        model = {"objective": objective, "selector": selector, "router": {"num_experts": 2, "balance_weight": 0.0}}
        torch.manual_seed(0)
        task = MillionTask(small_task("million", tmp_path, model=model), Share())
        # What a predictor gives that has learnt nothing would not depend on what it is shown.
        for parameter in task.model.layers.parameters():
            torch.nn.init.normal_(parameter, std=0.4)
        optimiser = torch.optim.SGD(task.model.selector.parameters(), lr=1.0)
        losses[objective] = []
        for _ in range(12):
            optimiser.zero_grad()
            loss = task.loss(0, slice(0, 6))
            loss.backward()
            optimiser.step()
            losses[objective].append(float(loss.detach()))
    assert losses["likelihood"] == sorted(losses["likelihood"], reverse=True)
    assert losses["adversarial"] == sorted(losses["adversarial"])
    assert losses["likelihood"][-1] < losses["likelihood"][0] == losses["adversarial"][0] < losses["adversarial"][-1]


@pytest.mark.parametrize(
    ("selector", "kept", "words"),
    [
        (
            {"initial_logit": -9.0},
            1.0,
            "step 3: the Selector keeps 1.00 tokens of a text, of which one is never dropped",
        ),
        ({"initial_logit": 9.0}, 13.0, "step 3: the Selector keeps 100% of the tokens where selector.rate is 10%"),
        ({"initial_logit": 9.0, "frozen": True}, 13.0, None),
        ({"gate": "top_k", "rate": 0.01}, 1.0, None),
    ],
)
def test_a_selector_that_has_gone_too_far_is_told(
    tmp_path: Path, selector: dict[str, Any], kept: float, words: str | None
) -> None:
    """A run says in a line, and says once, that nearly nothing or everything is kept, where that was not asked for."""
    told: list[str] = []
    model = {"objective": "adversarial", "selector": {"rate_weight": 0.0, **selector}}
    last = train(small_task("million", tmp_path, model=model), tell=told.append)
    assert last["kept_per_text"] == kept
    remarks = told[1:]  # the first line says what it computes on
    assert len(remarks) == (words is not None)
    assert all(line.startswith(words or "") for line in remarks)


def test_a_selector_is_told_again_when_it_goes_too_far_again(tmp_path: Path) -> None:
    """In between it kept enough; what keeps everything is told from the middle of a run on."""
    task = MillionTask(small_task("million", tmp_path), Share())
    few, enough, all_of_them = ({"kept_share": kept / 13, "kept_per_text": float(kept)} for kept in (1, 4, 13))
    told = [len(task.remarks(step, scores)) for step, scores in enumerate((few, few, enough, few, all_of_them))]
    assert told == [1, 0, 0, 1, 1]
    assert not MillionTask(small_task("million", tmp_path), Share()).remarks(2, all_of_them)
    assert not task.remarks(6, {})


def test_what_is_not_trained_is_refused(tmp_path: Path) -> None:
    """A model without classes and sharded parameters are refused in a line."""
    config = small_task("million", tmp_path, model={"num_classes": None})
    with pytest.raises(ConfigError, match="num_classes is missing"):
        MillionTask(config, Share())
    with pytest.raises(ValidationError, match="reads its sequences one by one"):
        small_task("million", tmp_path, run={"shard_parameters": True})

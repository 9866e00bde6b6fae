"""The package's metadata: each kind that dist_attn knows as one of the papers is offered, and no other."""

import tomllib
from pathlib import Path

from dist_attn.model_config.registry import PAPERS_KINDS
from dist_attn.shipped import PAPERS_CONVERSIONS

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


def test_the_kinds_that_are_offered_are_those_that_are_known_as_the_papers() -> None:
    """Entry points of mixers, models and data have the names that errors of dist_attn know."""
    offers = PROJECT["entry-points"]
    groups = ("attentions", "data", "mixers", "models", "tasks")
    assert set(offers) == {f"dist_attn.{group}" for group in (*groups, "conversions")}
    assert {kind for group in groups[:-1] for kind in offers[f"dist_attn.{group}"]} == PAPERS_KINDS
    assert tuple(offers["dist_attn.conversions"]) == PAPERS_CONVERSIONS
    assert offers["dist_attn.tasks"].keys() == offers["dist_attn.models"].keys()

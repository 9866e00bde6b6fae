"""Kinds that are looked for: the error says what there is, and where the papers' kinds come from."""

from importlib.metadata import EntryPoints

import pytest

from dist_attn.errors import ConfigError
from dist_attn.model_config import registry
from dist_attn.model_config.registry import PAPERS_KINDS, Registry


@pytest.fixture
def models(monkeypatch: pytest.MonkeyPatch) -> Registry[str]:
    """A registry with one kind, where no package offers any."""
    monkeypatch.setattr(registry, "entry_points", lambda group: EntryPoints(()))
    models: Registry[str] = Registry("dist_attn.models", "model")
    models.register(["language_model"], "built in", "here")
    return models


def test_a_kind_that_nobody_offers_is_named_with_those_that_there_are(models: Registry[str]) -> None:
    """The error lists the registered kinds, and speaks of no package that would not help."""
    assert models.find("language_model") == "built in"
    with pytest.raises(ConfigError, match=r"no model of kind 'abacus'; there are language_model$"):
        models.find("abacus")


@pytest.mark.parametrize("kind", sorted(PAPERS_KINDS))
def test_a_kind_of_the_papers_says_what_brings_it(models: Registry[str], kind: str) -> None:
    """Without dist-attn-papers each of its kinds is refused with the command that installs it."""
    with pytest.raises(ConfigError, match=f"no model of kind '{kind}'.*`pip install -e papers`.*dist-attn-papers"):
        models.find(kind)


def test_a_kind_is_registered_once(models: Registry[str]) -> None:
    """Two packages with one kind are refused by name."""
    with pytest.raises(ConfigError, match="there is a model of kind 'language_model', which here is already"):
        models.register(["language_model"], "another", "there")

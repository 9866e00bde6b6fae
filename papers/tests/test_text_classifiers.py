"""Classifiers of texts over the papers' mixers: the same over ranks; presets and packing."""

from typing import Any

import pytest

from dist_attn.errors import ConfigError
from dist_attn.model_config.language_model import LanguageModelConfig, expand_preset
from dist_attn.training.loop import build_task
from dist_attn.training.mesh import Share
from papers.tests.support.tasks import small_task
from tests.models import test_classifiers as core
from tests.models import test_packed_texts as packed_texts

MIXERS: dict[str, dict[str, Any]] = {
    "performer": {"kind": "bidirectional", "attention": "performer", "num_random": 6},
    "scaleformer": {"kind": "bidirectional", "attention": "scaleformer", "reach": 3},
    "scaleformer, rank 3": {"kind": "bidirectional", "attention": "scaleformer", "reach": 3, "value_rank": 3},
    "causal scaleformer": {"kind": "scaleformer", "reach": 3},
    "fnet": {"kind": "fnet"},
    "s4d both ways": {"kind": "s4d", "state_size": 4, "form": "convolution", "bidirectional": True},
}
core.MIXERS.update(MIXERS)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_text_over_ranks_is_classified_as_on_one(mixer: str) -> None:
    """Loss and gradients of every parameter are those of one process, for a mean and for a class token."""
    core.test_a_text_over_ranks_is_classified_as_on_one(mixer, core.CUTS[1])


@pytest.mark.parametrize(
    ("kind", "heads"),
    [("lssl", None), ("s4", None), ("s4d", None), ("scaleformer", 4), ("performer", 4), ("efficient", 4)],
)
def test_a_preset_takes_any_causal_mixer(kind: str, heads: int | None) -> None:
    """Only the kind of a mixer has to be said; those without heads are given none."""
    values = {"preset": "tiny", "vocab_size": 300, "mixer": {"kind": kind}}
    mixer = LanguageModelConfig.model_validate(expand_preset(values)).mixer
    assert (mixer.kind, mixer.hidden_size, getattr(mixer, "num_heads", None)) == (kind, 128, heads)


def test_relative_positions_see_the_order() -> None:
    """Scaleformer without other positions tells an order from another."""
    core.check_the_order_is_seen("scaleformer")


@pytest.mark.parametrize(
    "mixer",
    [
        {"kind": "lssl", "hidden_size": 16},
        {"kind": "hippo", "hidden_size": 16},
        {"kind": "s4", "hidden_size": 16, "form": "scan"},
        {"kind": "scaleformer", "hidden_size": 16, "num_heads": 2},
        {"kind": "mlp_mixer", "hidden_size": 16, "length": 9, "token_mlp_size": 4},
    ],
)
def test_mixers_that_packing_would_change_are_refused(tmp_path, mixer: dict[str, Any]) -> None:
    """A mixer that would tell packed texts from single ones is refused, also in a pattern."""
    for one in (mixer, {"kind": "hybrid", "pattern": [{"kind": "fnet", "hidden_size": 16}, mixer]}):
        encoder = {"hidden_size": 16, "num_layers": 2, "mlp_size": 32, "mixer": one}
        with pytest.raises(ConfigError, match=f"{mixer['kind']} takes no packed texts"):
            build_task(small_task("labelled_text", tmp_path, model={"encoder": encoder}), Share())


PACKED = {
    **{name: {"kind": name, "num_heads": 2} for name in ("performer", "efficient")},
    **{f"{name} rotary": {"kind": name, "num_heads": 2, "rotary": {"size": 4}} for name in ("performer", "efficient")},
    "bidirectional performer": {"kind": "bidirectional", "attention": "performer", "num_heads": 2},
    "bidirectional efficient": {"kind": "bidirectional", "attention": "efficient", "num_heads": 2},
    "scaleformer": {"kind": "scaleformer", "num_heads": 2},
    "bidirectional scaleformer": {"kind": "bidirectional", "attention": "scaleformer", "num_heads": 2},
    "s4d": {"kind": "s4d"},
    "s4d as a convolution": {"kind": "s4d", "form": "convolution"},
    "s4 as a convolution": {"kind": "s4", "form": "convolution"},
    "fnet": {"kind": "fnet"},
    "sgconv": {"kind": "sgconv", "length": 9},
    "hippo": {"kind": "hippo"},
    "lssl": {"kind": "lssl"},
    "s4": {"kind": "s4"},
    "mlp_mixer": {"kind": "mlp_mixer", "length": 9, "token_mlp_size": 5},
}


@pytest.mark.parametrize("mixer", PACKED)
def test_each_text_is_read_as_if_alone(mixer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts that are read together have the hidden states that each has by itself, or are refused together."""
    values = {"hidden_size": packed_texts.SIZE, **PACKED[mixer]}
    monkeypatch.setattr(packed_texts, "_every_mixer", lambda: {mixer: values})
    monkeypatch.setattr(packed_texts, "ALONE", ("hippo", "lssl", "mlp_mixer", "s4", "scaleformer"))
    packed_texts.test_each_text_is_read_as_if_alone(mixer, "sinusoidal")


CLASSIFIED: dict[str, dict[str, Any]] = {
    "scaleformer": {"kind": "bidirectional", "attention": "scaleformer", "reach": 3},
    "performer": {"kind": "bidirectional", "attention": "performer", "num_random": 6},
    "efficient": {"kind": "bidirectional", "attention": "efficient"},
    "causal efficient": {"kind": "efficient"},
    "causal performer": {"kind": "performer", "num_random": 6},
}
packed_texts.MIXERS.update(CLASSIFIED)


@pytest.mark.parametrize("pooling", ["mean", "class_token"])
@pytest.mark.parametrize("mixer", CLASSIFIED)
def test_each_text_is_classified_as_if_alone(mixer: str, pooling: str) -> None:
    """Logits of packed texts are those of each text by itself, for positions of every kind."""
    packed_texts.test_each_text_is_classified_as_if_alone(mixer, pooling)


@pytest.mark.parametrize("mixer", CLASSIFIED)
def test_ranks_change_nothing_of_packed_texts(mixer: str) -> None:
    """Loss and gradients of every parameter are those of one process, wherever texts are cut, empty slices too."""
    packed_texts.test_ranks_change_nothing(mixer)

"""Named sizes: as many parameters as they promise, and anything can be said otherwise."""

import json
from pathlib import Path

import pytest

from dist_attn.costs import read_model_costs
from dist_attn.errors import ConfigError
from dist_attn.model_config.language_model import PRESETS, expand_preset
from dist_attn.models import LanguageModelConfig, build_model
from dist_attn.training.config import read_config
from tests.support.training import small_run, write_toml

VOCAB = 38_500


@pytest.mark.parametrize(("name", "millions"), [("tiny", 5.7), ("small", 38.7), ("big", 241)])
@pytest.mark.parametrize("kind", ["rfa_gate", "softmax"])
def test_presets_have_the_promised_size(name: str, millions: float, kind: str, tmp_path: Path) -> None:
    """With a vocabulary of 38,500 the number of parameters is within 1 % of the documented one, for either mixer."""
    config = LanguageModelConfig.model_validate(
        expand_preset({"preset": name, "vocab_size": VOCAB, "mixer": {"kind": kind}})
    )
    (tmp_path / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    assert read_model_costs(tmp_path).parameters / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize(
    "kind",
    [
        *("rfa", "softmax", "elu", "convolution"),
        *("gla", "lightning", "mamba2", "gated_delta", "kda", "rwkv7"),
    ],
)
def test_a_preset_takes_any_causal_mixer(kind: str) -> None:
    """Only the kind of a mixer has to be said; those without heads are given none."""
    config = LanguageModelConfig.model_validate(
        expand_preset({"preset": "tiny", "vocab_size": 300, "mixer": {"kind": kind}})
    )
    assert (config.mixer.kind, config.mixer.hidden_size) == (kind, 128)
    without_heads = ("convolution",)
    assert getattr(config.mixer, "num_heads", None) == (None if kind in without_heads else 4)


def test_the_count_is_that_of_the_model(tmp_path: Path) -> None:
    """The parameters of the tiny preset as it is built are those that the formula counts."""
    config = LanguageModelConfig.model_validate(expand_preset({"preset": "tiny", "vocab_size": 300}))
    (tmp_path / "config.json").write_text(json.dumps(config.model_dump(mode="json")))
    built = sum(parameter.numel() for parameter in build_model(config).parameters())
    assert read_model_costs(tmp_path).parameters == built


def test_a_training_file_names_a_preset_and_what_differs(tmp_path: Path) -> None:
    """A preset gives the sizes, what the file or an override says goes before it, and a wrong name is refused."""
    path = write_toml(small_run(tmp_path), tmp_path / "train.toml")
    text = path.read_text()
    start, end = text.index("[model]"), text.index("[data]")
    path.write_text(text[:start] + '[model]\npreset = "small"\nvocab_size = 257\nnum_layers = 3\n' + text[end:])
    model = read_config(path, ["model.mixer.num_random=32"]).model
    assert (model.hidden_size, model.num_layers, model.mlp_size) == (512, 3, 2048)
    assert (model.mixer.kind, model.mixer.num_heads, model.mixer.num_random) == ("rfa_gate", 8, 32)
    with pytest.raises(ConfigError, match="no preset 'huge' of a model; there are tiny, small, big"):
        read_config(path, ["model.preset=huge"])


def test_without_a_preset_nothing_changes() -> None:
    """Values that name no preset are left as they are."""
    assert expand_preset({"vocab_size": 5}) == {"vocab_size": 5}
    assert set(PRESETS) == {"tiny", "small", "big"}

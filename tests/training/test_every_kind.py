"""Every kind of mixer from a training file to rows and drawn tokens: trained, saved, loaded, encoding, generating."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dist_attn.checkpoints import load_any_model, load_model, save_model
from dist_attn.comm import Communicator, run_simulated
from dist_attn.commands.encode_file import Encoding, encode_file
from dist_attn.errors import ConfigError, InputError
from dist_attn.generation import generate
from dist_attn.model_config.encoders import TextEncoderConfig
from dist_attn.models import LanguageModel, TextEncoder, build_model
from dist_attn.text import ByteTokeniser
from dist_attn.training import TrainingConfig, train
from dist_attn.wire.messages import RowSpec, SamplingSpec
from tests.support.closeness import assert_close
from tests.support.model_cases import needed_options, streaming_kinds
from tests.support.models import SIZE, small_config
from tests.support.tasks import small_task
from tests.support.tokenisers import PROSE
from tests.support.training import small_run

pytestmark = pytest.mark.slow

PATCHES, WINDOW = 16, 17  # an image has so many patches, with its class token a window's tokens
HEADS = {"num_heads": 2}
SMALL: Mapping[str, dict[str, Any]] = {
    "rfa": {"num_random": 8},
    "rfa_gate": {"num_random": 8},
    "convolution": {"taps": 5},
    "mamba2": {"key_size": 8},
}
CAUSAL: Mapping[str, dict[str, Any]] = {
    kind: {**needed_options(kind, 2), **SMALL.get(kind, {})} for kind in streaming_kinds()
}
WHOLE: Mapping[str, dict[str, Any]] = {
    **{
        f"bidirectional-{attention}": {"kind": "bidirectional", "attention": attention, **HEADS}
        for attention in ("rfa", "elu", "softmax")
    },
    "convolution-centred": {"kind": "convolution", "taps": 5, "centred": True},
}
TEXT = (3 * PROSE.encode())[:1003]


def _mixer(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": name, "hidden_size": SIZE, **options}


def _encode(model: LanguageModel | TextEncoder, place: Path, spec: RowSpec, ranks: int, text: bytes) -> torch.Tensor:
    source, target = place / "text.txt", place / "rows.npy"
    source.write_bytes(text)

    def body(comm: Communicator) -> None:
        encode_file(comm, model, ByteTokeniser(), Encoding(source, target, spec))

    run_simulated(body, ranks)
    return torch.from_numpy(np.load(target, allow_pickle=False))


def _language_run(place: Path, name: str) -> TrainingConfig:
    place.mkdir()
    config = small_run(place, steps=12, log_every=1, evaluate_every=12, checkpoint_every=12)
    return config.model_copy(update={"model": small_config(mixer=_mixer(name, CAUSAL[name]))})


def _encoder(name: str) -> dict[str, Any]:
    sizes = {"hidden_size": SIZE, "num_layers": 1, "mlp_size": 32}
    return {**sizes, "mixer": _mixer(name, WHOLE[name]), "positions": "learned", "max_length": WINDOW}


def _text_encoder(name: str, encoder: object = None) -> TextEncoder:
    encoder = _encoder(name) if encoder is None else encoder
    values = {"vocab_size": ByteTokeniser().vocab_size, "encoder": encoder, "max_tokens": WINDOW}
    return build_model(TextEncoderConfig.model_validate(values)).eval()


RUN = {"steps": 30, "log_every": 1, "evaluate_every": 30, "checkpoint_every": 30}


def _assert_learns(config: TrainingConfig) -> None:
    """The last third of the steps has a lower mean loss than the first third."""
    losses: list[float] = []
    train(config, report=lambda line: losses.append(line["loss"]) if "loss" in line else None)
    third = len(losses) // 3
    assert third >= 3
    assert sum(losses[-third:]) < sum(losses[:third])


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_kind_trains_encodes_and_generates(tmp_path: Path, name: str) -> None:
    """The loss of a run with bf16 autocast falls; the model it leaves gives one pass's rows on one and on three ranks,
    and draws the tokens that have the largest logits in one pass over prompt and tokens.
    """
    config = _language_run(tmp_path / "run", name)
    _assert_learns(config)
    model = load_model(config.run.folder / "model")
    tokens = torch.from_numpy(ByteTokeniser().encode(TEXT).astype(np.int64))
    with torch.inference_mode():
        want = torch.stack([part.mean(0) for part in model.encode(tokens[None])[0].double().split(100)]).float()
    for ranks in (1, 3):
        assert_close(_encode(model, tmp_path, RowSpec("window", 100), ranks, TEXT), want)
    drawn = generate(model, tokens[:60].tolist(), SamplingSpec(max_tokens=6, temperature=0.0))
    with torch.inference_mode():
        logits, _ = model(torch.cat([tokens[:60], torch.tensor(drawn)])[None])
    assert drawn == logits[0, 59:65].argmax(-1).tolist()


@pytest.mark.parametrize("name", WHOLE)
def test_a_kind_that_sees_both_sides_trains_and_encodes(tmp_path: Path, name: str) -> None:
    """A classifier of texts learns with it, and a text encoder gives the same rows on one and on three ranks."""
    sections = {"model": {"encoder": {**_encoder(name), "positions": "none", "max_length": None}}, "run": RUN}
    config = small_task("labelled_text", tmp_path / "run", data={"batch": 20}, **sections)
    assert_trains_and_encodes(tmp_path, config, name)


def assert_trains_and_encodes(tmp_path: Path, config: TrainingConfig, name: str) -> None:
    """A classifier learns, and a text encoder of its weights gives the same rows on one and on three ranks."""
    _assert_learns(config)
    trained = load_any_model(config.run.folder / "model")
    model = _text_encoder(name, config.model.encoder)
    taken = {key: tensor for key, tensor in trained.state_dict().items() if key.startswith("encoder.")}
    missing, unexpected = model.load_state_dict(taken, strict=False)
    assert not unexpected
    assert all(not key.startswith("encoder.") for key in missing)
    save_model(model, tmp_path / "encoder", tokeniser=ByteTokeniser())
    loaded = load_any_model(tmp_path / "encoder")
    assert isinstance(loaded, TextEncoder)
    text = TEXT[: 20 * WINDOW]
    tokens = torch.from_numpy(ByteTokeniser().encode(text).astype(np.int64)).reshape(-1, WINDOW)
    with torch.inference_mode():
        want = loaded.pool(loaded.hidden(tokens))
    for ranks in (1, 3):
        assert_close(_encode(loaded, tmp_path, RowSpec("window", WINDOW, "model"), ranks, text), want)


@pytest.mark.parametrize("name", WHOLE)
def test_a_kind_that_sees_both_sides_does_not_generate(name: str) -> None:
    """A language model over it is refused before anything is built, and the words name the kind."""
    with pytest.raises((ConfigError, ValueError), match=WHOLE[name].get("kind", name)):
        build_model(small_config(mixer=_mixer(name, WHOLE[name])))


def test_rows_that_a_text_encoder_would_pool_otherwise_are_refused(tmp_path: Path) -> None:
    """A mean over a window is not what this model gives, and the words say what it takes."""
    with pytest.raises(InputError, match="pooling 'mean' must be 'model'"):
        _encode(_text_encoder("convolution-centred"), tmp_path, RowSpec("window", WINDOW), 1, TEXT)

"""Texts of different lengths, packed into one sequence: each is classified as if alone, on one rank and over ranks."""

from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dist_attn.comm import Communicator
from dist_attn.errors import InputError, ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.models import TextClassifier, TextClassifierConfig, TextEncoder, TextEncoderConfig
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from tests.support.closeness import assert_close
from tests.support.model_cases import built_in_mixers
from tests.support.over_ranks import assert_ranks_change_nothing, randomised

SIZE, VOCAB, CLASSES = 8, 11, 3
LENGTHS = (4, 1, 7, 2)
MIXERS: dict[str, dict[str, Any]] = {
    "rfa": {"kind": "bidirectional", "attention": "rfa", "num_random": 6},
    "elu": {"kind": "bidirectional", "attention": "elu"},
    "softmax": {"kind": "bidirectional", "attention": "softmax"},
    "causal rfa": {"kind": "rfa_gate", "num_random": 6},
    "causal softmax": {"kind": "softmax"},
}
# Of each kind all forms, and positions that turn queries and keys or are relative, where it has them.
OPTIONS: dict[str, dict[str, Any]] = {"rotary": {"size": 4}, "relative": {"reach": 2}, "weighting": "norm"}
ALONE: tuple[str, ...] = ()
"""Kinds that take one unbroken sequence, as they are by default."""


def _every_mixer() -> dict[str, dict[str, Any]]:
    sizes = {"hidden_size": SIZE, "num_heads": 2, "length": 9, "token_mlp_size": 5, "num_random": 6}
    found = {}
    for kind, config in built_in_mixers().items():
        known = {"kind": kind} | {name: size for name, size in sizes.items() if name in config.model_fields}
        for form, options in config.forms.items():
            found[f"{kind} {form}".strip()] = known | options
        found |= {
            f"{kind} {name}": known | {name: value}
            for name, value in OPTIONS.items()
            if name in config.model_fields and kind != "bidirectional"
        }
    found["rfa_gate, rotary, weighting"] = found["rfa_gate rotary"] | {"weighting": "norm", "short_convolution": 0}
    found["bidirectional relative"] = found["bidirectional softmax"] | {"relative": {"reach": 2}}
    return found


def _model(mixer: str, pooling: str, positions: str = "sinusoidal") -> TextClassifier:
    encoder = {
        "hidden_size": SIZE,
        "num_layers": 2,
        "mlp_size": 12,
        "mixer": {"hidden_size": SIZE, "num_heads": 2, **MIXERS[mixer]},
        "positions": positions,
        "max_length": 8 if positions == "learned" else None,
    }
    values = {"vocab_size": VOCAB, "num_classes": CLASSES, "pooling": pooling, "encoder": encoder}
    return randomised(TextClassifier(TextClassifierConfig.model_validate(values)))


def _pairs(mixer: str, pooling: str) -> TextClassifier:
    config = _model(mixer, pooling).config.model_dump()
    return randomised(TextClassifier(TextClassifierConfig.model_validate({**config, "texts": 2})))


def _texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]


# Positions are added before the first mixer, and with some of these each kind meets each other below.
@pytest.mark.parametrize(
    ("mixer", "positions"), [*zip(_every_mixer(), cycle(("none", "sinusoidal", "learned", "concatenated")))]
)
def test_each_text_is_read_as_if_alone(mixer: str, positions: str) -> None:
    """Texts that are read together have the hidden states that each has by itself, or are refused together."""
    encoder = {"hidden_size": SIZE, "num_layers": 2, "mlp_size": 12, "mixer": _every_mixer()[mixer]}
    encoder |= {"positions": positions, "max_length": 9 if positions == "learned" else None}
    values = {"vocab_size": VOCAB, "max_tokens": 9, "prefix": [1], "suffix": [2], "encoder": encoder}
    model = randomised(TextEncoder(TextEncoderConfig.model_validate(values)))
    if mixer in ALONE:
        with pytest.raises(InputError):
            model.hidden_together(_texts())
        return
    for got, text in zip(model.hidden_together(_texts()), _texts(), strict=True):
        assert_close(got, model.hidden(model.frame(text[None])))


@pytest.mark.parametrize("pooling", ["mean", "class_token"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_each_text_is_classified_as_if_alone(mixer: str, pooling: str) -> None:
    """Logits of packed texts are those of each text by itself, for positions of every kind."""
    for positions in ("none", "sinusoidal", "learned", "concatenated"):
        model = _model(mixer, pooling, positions)
        tokens, starts = model.pack(_texts())
        want = torch.cat([model.classify(text[None]) for text in _texts()])
        assert_close(model.classify_packed(tokens, LocalSequenceOps(starts)), want)


@pytest.mark.parametrize("mixer", MIXERS)
def test_ranks_change_nothing(mixer: str) -> None:
    """Loss and gradients of every parameter are those of one process, wherever texts are cut, empty slices too."""
    for pooling, lengths in (("mean", (6, 0, 5, 3)), ("class_token", (0, 3, 13, 2))):

        def share(model: TextClassifier, comm: Communicator | None, lengths: tuple[int, ...] = lengths) -> Tensor:
            tokens, starts = model.pack(_texts())
            classes = torch.tensor([0, 2, 1, 1])
            if comm is None:
                return F.cross_entropy(model.classify_packed(tokens, LocalSequenceOps(starts)), classes)
            layout = SequenceLayout.from_lengths(lengths, starts)
            own = tokens[:, slice(*layout.range(comm.rank))]
            return F.cross_entropy(model.classify_packed(own, ShardedSequenceOps(comm, layout)), classes) / comm.size

        assert_ranks_change_nothing(lambda pooling=pooling: _model(mixer, pooling), share, len(lengths))


@pytest.mark.parametrize("pooling", ["mean", "class_token"])
def test_a_pair_is_what_its_two_texts_are(pooling: str) -> None:
    """Packed pairs have the logits of each pair alone, by the MLP over [h1, h2, h1 * h2, h1 - h2] of vectors alone."""
    model, texts = _pairs("rfa", pooling), _texts()
    got = model.classify_packed(*_packed(model, texts))
    assert got.shape == (2, CLASSES)
    for pair in range(2):
        two = texts[2 * pair : 2 * pair + 2]
        assert_close(model.classify_packed(*_packed(model, two)), got[pair : pair + 1])
        first, second = (_vector(model, text) for text in two)
        hidden = F.gelu(model.head.projection(torch.cat([first, second, first * second, first - second])))
        assert_close(model.head.head(hidden), got[pair])
    assert not torch.allclose(model.classify_packed(*_packed(model, texts[1::-1]))[0], got[0])
    same_length = torch.stack([texts[0], texts[0].flip(0)])
    assert_close(model.classify(same_length), model.classify_packed(*_packed(model, list(same_length))))
    with pytest.raises(ShapeError, match="3 texts were given to a classifier of pairs"):
        model.classify_packed(*_packed(model, texts[:3]))


def _packed(model: TextClassifier, texts: list[Tensor]) -> tuple[Tensor, LocalSequenceOps]:
    tokens, starts = model.pack(texts)
    return tokens, LocalSequenceOps(starts)


def _vector(model: TextClassifier, text: Tensor) -> Tensor:
    ops = LocalSequenceOps()
    hidden = model.encoder(model.pooling.fill(model.embedding(model.prepare(text[None])), ops), ops)
    return model.pooling(hidden, ops)[0]


@pytest.mark.parametrize("mixer", ["rfa", "softmax"])
def test_pairs_over_ranks_are_classified_as_on_one(mixer: str) -> None:
    """Loss and gradients of every parameter, wherever the texts of the pairs are cut, empty slices too."""

    def share(model: TextClassifier, comm: Communicator | None) -> Tensor:
        tokens, starts = model.pack(_texts())
        classes = torch.tensor([2, 1])
        if comm is None:
            return F.cross_entropy(model.classify_packed(tokens, LocalSequenceOps(starts)), classes)
        layout = SequenceLayout.from_lengths((0, 3, 13, 2), starts)
        own = tokens[:, slice(*layout.range(comm.rank))]
        return F.cross_entropy(model.classify_packed(own, ShardedSequenceOps(comm, layout)), classes) / comm.size

    assert_ranks_change_nothing(lambda: _pairs(mixer, "class_token"), share, 4)


def test_unusable_texts_are_refused() -> None:
    """More rows than one, texts that are longer than learned positions, and packed texts as one are named in words."""
    model = _model("rfa", "mean", "learned")
    tokens, starts = model.pack([*_texts(), torch.zeros(9, dtype=torch.int64)])
    with pytest.raises(InputError, match="9 tokens; this model has learned positions for 8"):
        model.classify_packed(tokens, LocalSequenceOps(starts))
    with pytest.raises(ShapeError, match="2 rows of packed texts"):
        model.classify_packed(tokens.expand(2, -1), LocalSequenceOps(starts))
    tokens, starts = model.pack(_texts())
    with pytest.raises(InputError, match="4 packed documents were given to be one vector"):
        model(tokens, LocalSequenceOps(starts))

"""Classifiers of texts: the same over ranks, blind to what they must not see, saved and loaded."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from dist_attn.checkpoints import load_any_model, load_model, save_model
from dist_attn.comm import Communicator
from dist_attn.errors import InputError, ModelFolderError, TokenError
from dist_attn.layout import SequenceLayout
from dist_attn.models import EncoderConfig, Model, TextClassifier, TextClassifierConfig, build_model
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn.sharded import ShardedSequenceOps
from tests.support.closeness import assert_close
from tests.support.over_ranks import assert_ranks_change_nothing, randomised

SIZE, VOCAB, CLASSES = 8, 11, 3
MIXERS: dict[str, dict[str, Any]] = {
    "rfa": {"kind": "bidirectional", "attention": "rfa", "num_random": 6},
    "arc-cosine": {"kind": "bidirectional", "attention": "rfa", "num_random": 6, "feature": "arc_cosine"},
    "elu": {"kind": "bidirectional", "attention": "elu"},
    "softmax": {"kind": "bidirectional", "attention": "softmax"},
    "softmax, relative": {"kind": "bidirectional", "attention": "softmax", "value_rank": 3, "relative": {"reach": 2}},
    "full rank": {"kind": "bidirectional", "attention": "rfa", "num_random": 6, "value_rank": SIZE},
    "softmax, rank 1": {"kind": "bidirectional", "attention": "softmax", "value_rank": 1},
    "causal": {"kind": "rfa_gate", "num_random": 6},
    "hybrid": {
        "kind": "hybrid",
        "pattern": [
            {"kind": "bidirectional", "attention": "softmax", "num_heads": 2, "hidden_size": SIZE},
            {"kind": "convolution", "hidden_size": SIZE, "taps": 3, "centred": True},
        ],
    },
}
CUTS = [(7, 6), (0, 5, 1, 7), (13, 0)]


def _encoder(mixer: str, **changes: Any) -> dict[str, Any]:
    heads = {} if MIXERS[mixer]["kind"] in ("fnet", "s4d", "hybrid") else {"num_heads": 2}
    size = {} if MIXERS[mixer]["kind"] == "hybrid" else {"hidden_size": SIZE}
    own = {**size, **heads, **MIXERS[mixer]}
    return {"hidden_size": SIZE, "num_layers": 2, "mlp_size": 12, "mixer": own, **changes}


def _text(mixer: str, pooling: str, **changes: Any) -> TextClassifier:
    values = {"vocab_size": VOCAB, "num_classes": CLASSES, "pooling": pooling, "encoder": _encoder(mixer, **changes)}
    return randomised(TextClassifier(TextClassifierConfig.model_validate(values)))


def _tokens(length: int, batch: int = 2) -> Tensor:
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(3))


def _slice(comm: Communicator | None, layout: SequenceLayout) -> tuple[slice, SequenceOps, int]:
    if comm is None:
        return slice(None), LocalSequenceOps(), 1
    return slice(*layout.range(comm.rank)), ShardedSequenceOps(comm, layout), comm.size


@pytest.mark.parametrize(
    ("mixer", "lengths"), [*((mixer, CUTS[1]) for mixer in MIXERS), ("rfa", CUTS[0]), ("causal", CUTS[2])]
)
def test_a_text_over_ranks_is_classified_as_on_one(mixer: str, lengths: tuple[int, ...]) -> None:
    """Loss and gradients of every parameter are those of one process, for a mean and for a class token."""
    for pooling, tokens in (("mean", _tokens(13)), ("class_token", _tokens(12))):

        def share(model: TextClassifier, comm: Communicator | None, tokens: Tensor = tokens) -> Tensor:
            own, ops, ranks = _slice(comm, SequenceLayout.from_lengths(lengths))
            logits = model(model.prepare(tokens)[:, own], ops)
            return F.cross_entropy(logits, torch.tensor([0, 2])) / ranks

        assert_ranks_change_nothing(lambda pooling=pooling: _text(mixer, pooling), share, len(lengths))


@pytest.mark.parametrize("mixer", ["rfa", "elu", "softmax"])
def test_without_positions_the_order_does_not_matter(mixer: str) -> None:
    """Permuting the tokens permutes hidden states and leaves the class as it was; with positions it does not."""
    order = torch.randperm(13, generator=torch.Generator().manual_seed(1))
    tokens, model = _tokens(13), _text(mixer, "mean", positions="none")
    x = model.embedding(tokens)
    ops = LocalSequenceOps()
    assert_close(model.encoder(x[:, order], ops), model.encoder(x, ops)[:, order])
    assert_close(model.classify(tokens[:, order]), model.classify(tokens))
    for positions in (
        {"positions": "sinusoidal"},
        {"positions": "concatenated"},
        {"positions": "learned", "max_length": 20},
    ):
        model = _text(mixer, "mean", **positions)
        assert not torch.allclose(model.classify(tokens[:, order]), model.classify(tokens), atol=1e-4)


def test_value_maps_have_the_rank_that_was_asked_for() -> None:
    """A head's map from a token to its contribution, out_h v_h, has rank D / H, or 1, or the full D."""
    for mixer, rank in (("softmax", SIZE // 2), ("softmax, rank 1", 1), ("full rank", SIZE)):
        attention = _text(mixer, "mean").encoder.blocks[0].mixer
        values = attention.qkv.weight[2 * SIZE :].unflatten(0, (2, -1))
        for out_DV, value_VD in zip(attention.out.weight.unflatten(1, (2, -1)).unbind(1), values, strict=True):
            assert torch.linalg.matrix_rank((out_DV @ value_VD).detach()) == rank


def test_relative_positions_see_the_order() -> None:
    """Softmax with relative positions and no others tells an order from another."""
    check_the_order_is_seen("softmax, relative")


def check_the_order_is_seen(mixer: str) -> None:
    """This mixer, without positions of tokens, gives another class for another order of the tokens."""
    order = torch.arange(13).flip(0)
    tokens, model = _tokens(13), _text(mixer, "mean", positions="none")
    assert not torch.allclose(model.classify(tokens[:, order]), model.classify(tokens), atol=1e-4)


@pytest.mark.parametrize("mixer", ["rfa", "causal"])
def test_the_class_token_sees_every_token(mixer: str) -> None:
    """It is the first of a bidirectional model and the last of a causal one, and any token changes the class."""
    model, tokens = _text(mixer, "class_token"), _tokens(9)
    prepared = model.prepare(tokens)
    assert torch.equal(prepared[:, :-1] if mixer == "causal" else prepared[:, 1:], tokens)
    before = model.classify(tokens)
    for at in range(9):
        changed = tokens.clone()
        changed[:, at] = (changed[:, at] + 1) % VOCAB
        assert not torch.allclose(model.classify(changed), before, atol=1e-9), at


@pytest.mark.parametrize("model", [_text("rfa", "class_token")])
def test_every_kind_is_saved_and_loaded(tmp_path, model: Model) -> None:
    """A folder gives back configuration and weights exactly, and is refused where a language model is needed."""
    model = model.float()
    save_model(model, tmp_path / "m")
    loaded = load_any_model(tmp_path / "m")
    assert type(loaded) is type(model)
    assert loaded.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    with pytest.raises(ModelFolderError, match=f"holds a {model.config.kind}; needed here is a language model"):
        load_model(tmp_path / "m")


def test_fresh_models_are_sane() -> None:
    """A model as it is built gives finite logits near 0, and a step of gradient descent lowers its loss."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build_model(_text("rfa", "mean").config)
    tokens, classes = _tokens(9), torch.tensor([0, 2])
    loss = F.cross_entropy(model.classify(tokens), classes)
    assert abs(loss.item() - 1.0986) < 0.1
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    assert F.cross_entropy(model.classify(tokens), classes).item() < loss.item()


def test_unusable_inputs_are_refused() -> None:
    """Empty and too long texts and unknown ids are named in words."""
    text = _text("rfa", "mean", positions="learned", max_length=5)
    with pytest.raises(InputError, match="no tokens"):
        text.classify(_tokens(0))
    with pytest.raises(InputError, match="no tokens"):
        _text("rfa", "class_token").classify(_tokens(0))
    with pytest.raises(InputError, match="6 tokens; this model has learned positions for 5"):
        text.classify(_tokens(6))
    with pytest.raises(TokenError, match="knows 0 to 10"):
        text.classify(torch.tensor([[VOCAB]]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"positions": "learned"}, "need max_length"),
        ({"max_length": 5}, "need max_length"),
        ({"hidden_size": 16}, "must equal 16"),
        ({"colour": 1}, "Extra inputs"),
    ],
)
def test_bad_configurations_are_refused(changes: dict[str, Any], words: str) -> None:
    """Learned positions without a number, widths that differ and unknown keys are refused."""
    with pytest.raises(ValidationError, match=words):
        EncoderConfig.model_validate(_encoder("rfa", **changes))

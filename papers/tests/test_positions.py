"""Every choice of positions in the papers' kinds of models: without them order is not seen, with them it is."""

from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import Tensor

from dist_attn.comm import Communicator
from dist_attn.errors import InputError
from dist_attn.models import Model, ModelConfig, build_model
from dist_attn.sharded import ShardedSequenceOps
from dist_attn_papers.translation.model import EncoderDecoder
from tests.models import test_positions as core
from tests.models.test_positions import HEADS, LAYOUT, LENGTH, ORDER, VOCAB, WIDTHS, _share
from tests.support.over_ranks import assert_ranks_change_nothing, randomised

IMAGE = {"height": 3, "width": 4, "channels": 1, "patch": 1}
KINDS = ("vision_classifier", "masked_autoencoder", "encoder_decoder")
SCALEFORMER = "relative in Scaleformer"
POSITIONS = (*core.POSITIONS, SCALEFORMER)


def _causal(positions: str) -> dict[str, Any]:
    if positions == SCALEFORMER:
        return {"mixer": {"kind": "scaleformer", **HEADS, "reach": 3}, "positions": "none"}
    return core._causal(positions)


def _encoder(positions: str) -> dict[str, Any]:
    if positions == SCALEFORMER:
        mixer = {"kind": "bidirectional", **HEADS, "attention": "scaleformer", "reach": 3}
        return {**WIDTHS, "mixer": mixer, "positions": "none"}
    return core._encoder(positions)


def _model(kind: str, positions: str) -> Model:
    values: dict[str, Any] = {"kind": kind}
    match kind:
        case "vision_classifier":
            values |= {"num_classes": 3, "image": IMAGE, "encoder": _encoder(positions), "pooling": "mean"}
        case "masked_autoencoder":
            values |= {"image": IMAGE, "encoder": _encoder(positions)}
        case _:
            decoder = {"num_layers": 1, "mlp_size": 12, **_causal(positions)}
            decoder["cross"] = {**HEADS, "attention": "rfa", "num_random": 6}
            values |= {"vocab_size": VOCAB, "encoder": _encoder(positions), "decoder": decoder}
    return randomised(build_model(TypeAdapter(ModelConfig).validate_python(values)))


def _outputs(model: Model, kind: str, order: list[int], comm: Communicator | None = None) -> Tensor:
    """The class, the last target's logits, or the last patch, which is hidden: what the order of the others may change.

    This process's share of it, which adds up over ranks.
    """
    own, ops, share, last = _share(comm)
    tokens = torch.arange(LENGTH)[order][None] % VOCAB
    anything = cast(Any, model)
    match kind:
        case "encoder_decoder":
            target = tokens.flip(0)
            cross = ops if comm is None else ShardedSequenceOps(comm, LAYOUT, memory_layout=LAYOUT)
            logits, _ = anything.decode(target[:, own], anything.encode(tokens[:, own], ops), ops, cross)
        case _:
            patches = anything.prepare(tokens.double().view(1, 1, 3, 4))[:, own]
            if kind == "vision_classifier":
                return share * anything(patches, ops)
            logits = anything(patches, (torch.arange(LENGTH) == LENGTH - 1)[None, own], ops)
    # Masked, not skipped: a rank without the last token takes part in the backward pass.
    return logits[:, -1] if last else logits.sum() * 0 + torch.zeros(1, logits.shape[-1], dtype=torch.float64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_the_order_is_seen_by_positions_alone(kind: str, positions: str) -> None:
    """Another order of the other tokens changes what a model gives where it has positions, and only there."""
    model = _model(kind, positions)
    with torch.no_grad():
        before, after = (_outputs(model, kind, order) for order in (list(range(LENGTH)), ORDER))
    assert torch.allclose(before, after, rtol=1e-9, atol=1e-11) == (positions == "none")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", POSITIONS)
def test_positions_are_global(kind: str, positions: str) -> None:
    """Over ranks, one of them empty, the loss and the gradients of every parameter are those of one process."""

    def share(model: torch.nn.Module, comm: Communicator | None) -> Tensor:
        outputs = _outputs(cast(Model, model), kind, ORDER, comm)
        weights = torch.linspace(-1, 2, outputs.shape[-1], dtype=torch.float64)
        return (outputs * weights).sum()

    assert_ranks_change_nothing(lambda: _model(kind, positions), share, LAYOUT.size)


def test_a_decoder_s_positions_end_where_they_end() -> None:
    """A target longer than the decoder's learned positions is refused in a sequence and in a step."""
    model = cast(EncoderDecoder, _model("encoder_decoder", "learned"))
    tokens = torch.arange(LENGTH)[None] % VOCAB
    logits, state = model.decode(tokens, model.encode(tokens))
    assert F.softmax(logits, dim=-1).isfinite().all()
    with pytest.raises(InputError, match="reaches 13 tokens; this model has learned positions for 12"):
        model.step(tokens[:, 0], state)


@pytest.fixture
def scaleformer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The core's models with these positions too."""
    causal, encoder = _causal(SCALEFORMER), _encoder(SCALEFORMER)
    monkeypatch.setattr(core, "_causal", lambda positions: causal)
    monkeypatch.setattr(core, "_encoder", lambda positions: encoder)


@pytest.mark.usefixtures("scaleformer")
@pytest.mark.parametrize("kind", core.KINDS)
def test_texts_with_relative_positions(kind: str) -> None:
    """A language model and a classifier see the order by them alone, over ranks as on one."""
    core.test_the_order_is_seen_by_positions_alone(kind, SCALEFORMER)
    core.test_positions_are_global(kind, SCALEFORMER)

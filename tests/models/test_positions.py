"""Every choice of positions in every kind of model: without them order is not seen, with them it is, over ranks too."""

from typing import Any, cast

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.models import Model, ModelConfig, build_model
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn.sharded import ShardedSequenceOps
from tests.support.over_ranks import assert_ranks_change_nothing, randomised

SIZE, VOCAB, LENGTH = 8, 11, 12
WIDTHS = {"hidden_size": SIZE, "num_layers": 2, "mlp_size": 12}
HEADS = {"hidden_size": SIZE, "num_heads": 2}
KINDS = ("language_model", "text_classifier")
POSITIONS = ("none", "sinusoidal", "learned", "concatenated", "relative in softmax")
ORDER = [4, 0, 9, 2, 10, 1, 7, 3, 8, 5, 6, 11]  # the last one stays the last


def _causal(positions: str) -> dict[str, Any]:
    """A causal mixer and positions of tokens that a state goes on from.

    For one layer: a second one sees the order in how many tokens the first has shown to each.
    """
    if positions == "relative in softmax":
        mixer = {"kind": "softmax", **HEADS, "short_convolution": 0, "relative": {"reach": 3}}
        return {"mixer": mixer, "positions": "none"}
    chosen = {"kind": "learned", "length": LENGTH} if positions == "learned" else positions
    return {"mixer": {"kind": "rfa", **HEADS, "num_random": 6, "short_convolution": 0}, "positions": chosen}


def _encoder(positions: str) -> dict[str, Any]:
    mixer: dict[str, Any] = {"kind": "bidirectional", **HEADS}
    if positions == "relative in softmax":
        mixer |= {"attention": "softmax", "relative": {"reach": 3}}
        return {**WIDTHS, "mixer": mixer, "positions": "none"}
    mixer |= {"attention": "rfa", "num_random": 6}
    length = {"max_length": LENGTH} if positions == "learned" else {}
    return {**WIDTHS, "mixer": mixer, "positions": positions, **length}


def _model(kind: str, positions: str) -> Model:
    values: dict[str, Any] = {"kind": kind}
    match kind:
        case "language_model":
            values |= {"vocab_size": VOCAB, **WIDTHS, "num_layers": 1, **_causal(positions)}
        case "text_classifier":
            values |= {"vocab_size": VOCAB, "num_classes": 3, "encoder": _encoder(positions)}
    return randomised(build_model(TypeAdapter(ModelConfig).validate_python(values)))


LAYOUT = SequenceLayout.from_lengths([5, 0, 1, 6])


def _share(comm: Communicator | None) -> tuple[slice, SequenceOps, float, bool]:
    """This process's slice, its operations, its share of what all ranks have, and whether the last token is here."""
    if comm is None:
        return slice(None), LocalSequenceOps(), 1.0, True
    own = slice(*LAYOUT.range(comm.rank))
    return own, ShardedSequenceOps(comm, LAYOUT), 1 / comm.size, own.stop == LENGTH and own.start < LENGTH


def _outputs(model: Model, kind: str, order: list[int], comm: Communicator | None = None) -> Tensor:
    """The class, or the last token's logits: what the order of the others may change.

    This process's share of it, which adds up over ranks.
    """
    own, ops, share, last = _share(comm)
    tokens = torch.arange(LENGTH)[order][None] % VOCAB
    anything = cast(Any, model)
    match kind:
        case "text_classifier":
            return share * anything(anything.prepare(tokens)[:, own], ops)
        case "language_model":
            logits, _ = anything(tokens[:, own], ops)
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

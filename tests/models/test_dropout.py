"""Dropout: a function of seed, step, place, row and token, so that no cut of a batch changes it; none at evaluation."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.models import build_model
from dist_attn.models.dropout import Draw, Dropout, use_dropout
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from tests.support.models import small_config


def _dropout(rate: float = 0.25, place: int = 0, **draw: int) -> Dropout:
    dropout = Dropout()
    dropout.draw, dropout.place = Draw(rate, **{"seed": 7, **draw}), place
    return dropout


def test_a_share_is_dropped_and_the_rest_scaled_up() -> None:
    """Each number is dropped with the rate's probability, by itself, and the others are so much larger."""
    kept_BLD = _dropout()(torch.ones(8, 200, 40), LocalSequenceOps()) > 0
    assert float(kept_BLD.double().mean()) == pytest.approx(0.75, abs=0.01)
    for dim in range(3):
        both_BLD = kept_BLD & kept_BLD.roll(1, dim)
        assert float(both_BLD.double().mean()) == pytest.approx(0.75**2, abs=0.01)
    x_BLD = torch.randn(1, 9, 4)
    out_BLD = _dropout()(x_BLD, LocalSequenceOps())
    assert torch.equal(out_BLD[out_BLD != 0], (x_BLD / 0.75)[out_BLD != 0])


@pytest.mark.parametrize("other", [{"seed": 8}, {"step": 1}, {"first_row": 3}, {"place": 1}])
def test_another_place_or_step_has_another_mask(other: dict[str, int]) -> None:
    """Masks of other seeds, steps, rows and places are as if drawn anew; the same ones come again."""
    x_BLD, ops = torch.ones(2, 100, 30), LocalSequenceOps()
    mask, again, changed = (_dropout(**given)(x_BLD, ops) > 0 for given in ({}, {}, other))
    assert torch.equal(mask, again)
    assert float((mask == changed).double().mean()) == pytest.approx(0.75**2 + 0.25**2, abs=0.03)


@pytest.mark.parametrize("documents", [None, (0, 3, 11)])
def test_slices_are_dropped_from_as_the_whole(documents: tuple[int, ...] | None) -> None:
    """Ranks with uneven and empty slices drop what one rank drops, and gradients likewise; documents are rows."""
    layout = SequenceLayout.from_lengths([5, 0, 1, 9], documents=documents)
    x_BLD = torch.randn(1 if documents else 3, 15, 6)
    whole_BLD = x_BLD.clone().requires_grad_()
    want_BLD = _dropout()(whole_BLD, LocalSequenceOps(documents))
    want_BLD.square().sum().backward()

    def body(comm: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
        own_BLD = x_BLD[:, slice(*layout.range(comm.rank))].clone().requires_grad_()
        out_BLD = _dropout()(own_BLD, ShardedSequenceOps(comm, layout))
        out_BLD.square().sum().backward()
        return out_BLD.detach(), own_BLD.grad

    outs, gradients = zip(*run_simulated(body, 4), strict=True)
    assert torch.equal(torch.cat(outs, 1), want_BLD)
    assert torch.equal(torch.cat(gradients, 1), whole_BLD.grad)


def test_the_mask_is_drawn_on_the_device() -> None:
    """Where the model lies elsewhere the CPU says which tokens these are, and draws nothing."""
    ran: set[str] = set()

    class OnCpu(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **kwargs or {})
            if isinstance(result, torch.Tensor) and result.device.type == "cpu":
                ran.add(str(function))
            return result

    with OnCpu():
        _dropout()(torch.ones(2, 9, 4, device="meta"), LocalSequenceOps())
    assert ran and not {name for name in ran if "xor" in name or "mul" in name}


def test_a_document_is_dropped_from_wherever_it_is_packed() -> None:
    """Of packed documents each has the mask of its number and its own positions, as a row by itself has."""
    x_BLD = torch.ones(3, 5, 6)
    rows_BLD = _dropout(first_row=4)(x_BLD, LocalSequenceOps())
    packed_1LD = _dropout(first_row=4)(x_BLD.reshape(1, 15, 6), LocalSequenceOps((0, 5, 10)))
    assert torch.equal(packed_1LD.reshape(3, 5, 6), rows_BLD)


def test_nothing_is_dropped_at_evaluation_or_at_rate_0() -> None:
    """A model under dropout gives in evaluation and in steps what it gives without, and its folder is the same."""
    model, tokens = build_model(small_config()), torch.arange(12)[None] % 7
    names = list(model.state_dict())
    with torch.no_grad():
        want, _ = model.eval().hidden(tokens)
        use_dropout(model, 0.5, 0)
        got, _ = model.hidden(tokens)
        dropped, _ = model.train().hidden(tokens)
        use_dropout(model, 0.0, 0)
        off, _ = model.hidden(tokens)
    assert torch.equal(got, want) and torch.equal(off, want)
    assert not torch.allclose(dropped, want)
    assert list(model.state_dict()) == names

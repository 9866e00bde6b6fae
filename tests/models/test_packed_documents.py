"""Whole models over packed documents: each document as if it were alone, on one rank and over ranks."""

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from tests.support.closeness import assert_close
from tests.support.models import small_config, small_model

LAYOUT = SequenceLayout.from_lengths([70, 0, 100, 30], [0, 60, 61, 140, 170])


ROTARY = {"kind": "rfa_gate", "hidden_size": 16, "num_heads": 2, "num_random": 8, "rotary": {"size": 6}}


@pytest.mark.parametrize("kind", ["rfa", "rfa_gate", "softmax", "gla", "mamba2", "gated_delta", "rwkv7", "rotary"])
def test_every_document_is_encoded_as_if_alone(kind):
    """Hidden states of packed documents are those of each document alone, wherever documents and ranks are cut."""
    model = small_model(small_config(mixer=ROTARY) if kind == "rotary" else small_config(kind)).double()
    tokens = torch.randint(0, 250, (2, LAYOUT.total), generator=torch.Generator().manual_seed(0))

    def body(comm: Communicator) -> torch.Tensor:
        with torch.no_grad():
            part = tokens[:, slice(*LAYOUT.range(comm.rank))]
            return model.hidden(part, ShardedSequenceOps(comm, LAYOUT))[0]

    with torch.no_grad():
        want = torch.cat([model.encode(tokens[:, a:b]) for a, b in LAYOUT.document_ranges()], 1)
        assert_close(model.hidden(tokens, LocalSequenceOps(LAYOUT.documents))[0], want)
    assert_close(torch.cat(run_simulated(body, LAYOUT.size), 1), want)


def test_a_document_goes_on_where_a_state_stands():
    """Tokens before the first start continue a state's document and positions; the state behind is the last one's."""
    model = small_model(small_config(mixer=ROTARY)).double()
    tokens = torch.randint(0, 250, (2, 90), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        before = model.hidden(tokens[:, :20])[1]
        got, after = model.hidden(tokens[:, 20:], LocalSequenceOps((30, 45)), before)
        parts = [model.encode(tokens[:, :50])[:, 20:], model.encode(tokens[:, 50:65])]
        last, want = model.hidden(tokens[:, 65:])
        assert_close(got, torch.cat([*parts, last], 1))
        more = [model.hidden(tokens[:, :10], None, state)[0] for state in (after, want)]
    assert_close(*more)

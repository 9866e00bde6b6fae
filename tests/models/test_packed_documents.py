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


@pytest.mark.parametrize("kind", ["rfa", "rfa_gate", "softmax", "gla", "mamba2", "gated_delta", "rwkv7"])
def test_every_document_is_encoded_as_if_alone(kind):
    """Hidden states of packed documents are those of each document alone, wherever documents and ranks are cut."""
    model = small_model(small_config(kind)).double()
    tokens = torch.randint(0, 250, (2, LAYOUT.total), generator=torch.Generator().manual_seed(0))

    def body(comm: Communicator) -> torch.Tensor:
        with torch.no_grad():
            part = tokens[:, slice(*LAYOUT.range(comm.rank))]
            return model.hidden(part, ShardedSequenceOps(comm, LAYOUT))[0]

    with torch.no_grad():
        want = torch.cat([model.encode(tokens[:, a:b]) for a, b in LAYOUT.document_ranges()], 1)
        assert_close(model.hidden(tokens, LocalSequenceOps(LAYOUT.documents))[0], want)
    assert_close(torch.cat(run_simulated(body, LAYOUT.size), 1), want)

"""Stacks of several kinds of mixers with one of the papers."""

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError
from dist_attn.layout import SequenceLayout
from dist_attn.models import EncoderConfig, TextClassifierConfig, build_model
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from tests.models.test_hybrid import SIZE, _hybrid


def test_a_mixer_of_one_length_refuses_another_length_in_a_stack() -> None:
    """An encoder with a token MLP in one layer names both lengths when it gets another one, on every rank."""
    mixer = _hybrid(
        {"kind": "bidirectional", "num_heads": 2, "attention": "elu"},
        {"kind": "mlp_mixer", "length": 6, "token_mlp_size": 4},
    )
    encoder = EncoderConfig.model_validate({"hidden_size": SIZE, "num_layers": 2, "mlp_size": 8, "mixer": mixer})
    model = build_model(TextClassifierConfig(vocab_size=9, num_classes=2, encoder=encoder))
    assert not encoder.causal
    assert model(torch.zeros(1, 6, dtype=torch.int64), LocalSequenceOps()).shape == (1, 2)
    layout = SequenceLayout.from_lengths((4, 3))

    def body(comm: Communicator) -> str:
        with pytest.raises(InputError) as caught:
            model(torch.zeros(1, layout.lengths[comm.rank], dtype=torch.int64), ShardedSequenceOps(comm, layout))
        return str(caught.value)

    assert all("7 tokens; token mixing has weights for exactly 6" in said for said in run_simulated(body, 2))

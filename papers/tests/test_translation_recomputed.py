"""Activation checkpointing of an encoder-decoder: bitwise the same training."""

import torch.nn.functional as F
from torch import Tensor, nn

from dist_attn.comm import Communicator
from dist_attn.sharded import ShardedSequenceOps
from dist_attn_papers.translation.config import EncoderDecoderConfig
from dist_attn_papers.translation.model import EncoderDecoder
from tests.models.test_recomputation import BOTH_SIDES, HEADS, LAYOUT, MIXERS, SIZE, VOCAB, _own, _same, _tokens
from tests.support.over_ranks import randomised


def test_an_encoder_decoder_trains_as_without_it() -> None:
    """The gradient that a decoder sends into the memory comes back bitwise the same, source and target cut alike."""
    mixer = {"kind": "bidirectional", **HEADS, **BOTH_SIDES["rfa"]}
    config = EncoderDecoderConfig.model_validate(
        {
            "vocab_size": VOCAB,
            "encoder": {"hidden_size": SIZE, "num_layers": 2, "mlp_size": 12, "mixer": mixer},
            "decoder": {
                "num_layers": 2,
                "mlp_size": 12,
                "mixer": {**HEADS, **MIXERS["rfa_gate"]},
                "cross": {**HEADS, **BOTH_SIDES["rfa"]},
            },
        }
    )
    source, target = _tokens(LAYOUT.total, 1), _tokens(LAYOUT.total, 2)

    def share(model: nn.Module, comm: Communicator | None) -> Tensor:
        assert isinstance(model, EncoderDecoder)
        own, ops = _own(comm)
        cross = ops if comm is None else ShardedSequenceOps(comm, LAYOUT, memory_layout=LAYOUT)
        logits, _ = model.decode(target[:, own], model.encode(source[:, own], ops), ops, cross)
        return F.cross_entropy(logits.flatten(0, 1), target[:, own].flatten(), reduction="sum")

    assert _same(lambda: randomised(EncoderDecoder(config)), share)

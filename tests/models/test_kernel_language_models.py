"""Language models over the fixed kernel: whole, streamed, over ranks and generating, one function."""

from typing import Any

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.generation import generate
from dist_attn.layout import SequenceLayout
from dist_attn.models import LanguageModel, LanguageModelConfig, build_model
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.wire.messages import SamplingSpec
from tests.support.closeness import assert_close

VOCAB = 50
MIXERS: dict[str, dict[str, Any]] = {
    "elu": {"kind": "elu"},
    "elu, gated": {"kind": "elu", "gated": True},
}


def _model(name: str) -> LanguageModel:
    values = {"vocab_size": VOCAB, "hidden_size": 16, "num_layers": 2, "mlp_size": 32}
    mixer = {"hidden_size": 16, "num_heads": 2, **MIXERS[name]}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = build_model(LanguageModelConfig.model_validate({**values, "mixer": mixer})).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def _tokens(length: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (2, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("name", MIXERS)
def test_blocks_on_ranks_equal_the_whole_on_one(name: str) -> None:
    """A sequence in blocks, each cut over ranks, some of them empty, gives the logits of one call on one rank."""
    model, tokens = _model(name).double(), _tokens(150)
    layout = SequenceLayout.from_lengths((0, 31, 2, 42))

    def body(comm: Communicator) -> list[torch.Tensor]:
        (start, stop), state, parts = layout.range(comm.rank), None, []
        for block in tokens.split(75, dim=1):
            logits, state = model(block[:, start:stop], ShardedSequenceOps(comm, layout), state)
            parts.append(logits.detach())
        return parts

    want, _ = model(tokens)
    ranks = run_simulated(body, len(layout.lengths))
    assert_close(torch.cat([part for block in zip(*ranks, strict=True) for part in block], dim=1), want)


@pytest.mark.parametrize("name", MIXERS)
def test_generated_tokens_are_the_likeliest(name: str) -> None:
    """Each greedy token is the likeliest one after all tokens before it, fed at once without a state."""
    model, prompt = _model(name), _tokens(9)[0].tolist()
    drawn = generate(model, prompt, SamplingSpec(max_tokens=6, temperature=0.0))
    with torch.no_grad():
        logits_LV = model.logits(torch.tensor([prompt + drawn]))[0, len(prompt) - 1 : -1]
    # The other order of sums may swap two tokens that are equally likely but for rounding, so logits are compared.
    chosen = logits_LV.gather(1, torch.tensor(drawn)[:, None])[:, 0]
    assert len(drawn) == 6
    assert float((logits_LV.amax(dim=1) - chosen).max()) < 1e-3

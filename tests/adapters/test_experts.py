"""Our products of experts are those that transformers writes down expert by expert."""

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextExperts

from dist_attn.adapters.experts import experts
from tests.support.closeness import assert_close


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_experts_are_those_of_transformers(tokens: int) -> None:
    """One token, a few and more than there are experts get the sums of transformers' loop over all experts."""
    config = Qwen3NextConfig(
        hidden_size=16, num_experts=12, num_experts_per_tok=3, moe_intermediate_size=8, experts_implementation="eager"
    )
    module = Qwen3NextExperts(config)
    config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(tokens)
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
        x_ND = torch.randn((tokens, 16), generator=generator)
        weights_NC, choices_NC = torch.randn((tokens, 12), generator=generator).softmax(-1).topk(3)
        assert_close(experts(module, x_ND, choices_NC, weights_NC), module(x_ND, choices_NC, weights_NC))

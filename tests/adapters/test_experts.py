"""Our products of experts are those that transformers writes down expert by expert."""

import pytest
import torch
from transformers import Qwen3NextConfig
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextExperts

from dist_attn.adapters.experts import experts, step_experts, takes_step_experts
from tests.support.closeness import assert_close


def random_experts(generator: torch.Generator) -> Qwen3NextExperts:
    config = Qwen3NextConfig(
        hidden_size=16, num_experts=12, num_experts_per_tok=3, moe_intermediate_size=8, experts_implementation="eager"
    )
    module = Qwen3NextExperts(config)
    config._experts_implementation = "eager"
    for weight in module.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator))
    return module


@pytest.mark.parametrize("tokens", [1, 3, 40])
@torch.no_grad()
def test_experts_are_those_of_transformers(tokens: int) -> None:
    """One token, a few and more than there are experts get the sums of transformers' loop over all experts."""
    generator = torch.Generator().manual_seed(tokens)
    module = random_experts(generator)
    x_ND = torch.randn((tokens, 16), generator=generator)
    weights_NC, choices_NC = torch.randn((tokens, 12), generator=generator).softmax(-1).topk(3)
    expected_ND = module(x_ND, choices_NC, weights_NC)
    assert_close(experts(module, x_ND, choices_NC, weights_NC), expected_ND)
    if takes_step_experts(module, x_ND):
        found_ND = step_experts(module, x_ND, choices_NC, weights_NC)
        assert_close(found_ND, expected_ND)
        assert torch.equal(step_experts(module, x_ND[:1], choices_NC[:1], weights_NC[:1]), found_ND[:1])

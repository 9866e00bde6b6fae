"""Products of the experts that tokens were sent to, and of no others.

transformers' own form multiplies with every expert of a layer, which takes longest where a step sends few tokens to a
few of hundreds.

Shape letters: N tokens, D model width, C choices of a token, R = N C rows, E experts, M numbers inside an expert.
"""

from typing import Any

import torch
import torch.nn.functional as F
from transformers.integrations.moe import grouped_mm_experts_forward

from dist_attn.ops.onednn import onednn_linear, takes_onednn_linear
from dist_attn.ops.step_products import step_products, takes_step_products

Tensor = torch.Tensor


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted sum of what its experts make of each token, [N, D]; choices and their weights are [N, C].

    Experts with biases, transposed weights or norms, and tokens that are not on a processor, go transformers' way.
    """
    if not _plain(module) or hidden_states.device.type != "cpu" or torch.compiler.is_compiling():
        theirs: Tensor = grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
        return theirs
    choices = top_k_index.shape[1]
    chosen_R, order_R = top_k_index.flatten().sort(stable=True)
    numbers_E, counts_E = chosen_R.unique_consecutive(return_counts=True)
    numbers, counts = numbers_E.tolist(), counts_E.tolist()
    x_RD = hidden_states[order_R // choices]
    inner_RM = module._apply_gate(_products(x_RD, module.gate_up_proj, numbers, counts))
    y_RD = _products(inner_RM, module.down_proj, numbers, counts) * top_k_weights.flatten()[order_R, None]
    by_token_RD = torch.empty_like(y_RD)
    by_token_RD[order_R] = y_RD
    y_ND: Tensor = by_token_RD.unflatten(0, (-1, choices)).sum(1).to(hidden_states.dtype)
    return y_ND


def takes_step_experts(module: Any, hidden_states: Tensor) -> bool:
    """Return whether `step_experts` takes this module and these hidden states."""
    return _plain(module) and all(
        takes_step_products(hidden_states, w) for w in (module.gate_up_proj, module.down_proj)
    )


def step_experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """`experts` of a decode step: a token's sums have the same bits whatever other tokens there are."""
    inner_RM = module._apply_gate(step_products(hidden_states, module.gate_up_proj, top_k_index).flatten(0, 1))
    y_RD = step_products(inner_RM, module.down_proj, top_k_index.reshape(-1, 1))[:, 0]
    weighed_NCD = y_RD.unflatten(0, top_k_index.shape) * top_k_weights[..., None]
    y_ND: Tensor = weighed_NCD.sum(1).to(hidden_states.dtype)
    return y_ND


def _plain(module: Any) -> bool:
    """Return whether experts have gates but no biases, transposed weights, norms or places on other processes."""
    others = ("has_bias", "is_transposed", "has_post_expert_norm", "_is_expert_parallel")  # older versions lack some
    return getattr(module, "has_gate", True) and not any(getattr(module, name, False) for name in others)


def _products(x_RI: Tensor, weights_EOI: Tensor, numbers: list[int], counts: list[int]) -> Tensor:
    """Rows that lie one expert after the other, each times the weights of its own."""
    parts = zip(x_RI.split(counts), (weights_EOI[number] for number in numbers), strict=True)
    return torch.cat([(onednn_linear if takes_onednn_linear(*part) else F.linear)(*part) for part in parts])

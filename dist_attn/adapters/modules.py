"""Modules of transformers that compute along the sequence in a method of their own: bound object by object.

Outside of a pass of ours a bound object does what it did before. Names of parameters are those of transformers.

Shape letters: B batch, L tokens, H heads, W numbers of a head's query, key and value, K of a key, V of a value, C
channels, T taps.
"""

import sys
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.adapters import operations
from dist_attn.adapters.passes import Pass, current_pass, either
from dist_attn.ops.onednn import onednn_linear, takes_onednn_linear
from dist_attn.ops.step_products import step_products, takes_step_products

Tensor = torch.Tensor


def linear(module: nn.Module) -> None:
    """A linear layer, whose products of decode steps are those for few rows, and of a pass those for many."""
    if type(module) is not nn.Linear:  # peft's layers are called Linear too, and add to the one inside
        return
    own: Any = module
    compute = module.forward

    def forward(input: Tensor) -> Tensor:
        one = current_pass()
        if one is None or not one.step or not takes_step_products(input, own.weight):
            if takes_onednn_linear(input, own.weight):
                return onednn_linear(input, own.weight, own.bias)
            theirs: Tensor = compute(input)
            return theirs
        y = step_products(input.reshape(-1, input.shape[-1]), own.weight).view(*input.shape[:-1], -1)
        return y if own.bias is None else y + own.bias

    own.forward = forward


def minimax_lightning_attention(module: nn.Module) -> None:
    """MiniMax's linear attention, with one constant decay for each head."""
    own: Any = module

    def forward(one: Pass, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        qkv_BLHW = own.act_fn(own.qkv_proj(hidden_states)).unflatten(-1, (own.num_attention_heads, -1))
        q, k, v = one.own(qkv_BLHW, 1).transpose(1, 2).float().chunk(3, dim=-1)
        log_decay_BHL1 = -own.slope_rate.float().expand(*q.shape[:3], 1)
        out_BHLV = operations.recur(one, q, k, v, log_decay_BHL1, dtype=hidden_states.dtype)
        out_BLHV = one.filled(out_BHLV.transpose(1, 2), 1)
        normed = own.norm(out_BLHV.flatten(2).to(hidden_states.dtype))
        return own.out_proj(torch.sigmoid(own.output_gate(hidden_states)) * normed), None

    module.forward = either(forward, module.forward)


def recurrent_gemma_block(module: nn.Module) -> None:
    """RecurrentGemma's recurrent block: its convolution, and the scan of its linear recurrent unit.

    The reset at the first position needs nothing: no state is before it.
    """
    convolution: Any = module.get_submodule("conv_1d")
    unit: Any = module.get_submodule("rg_lru")

    def convolve(one: Pass, x_BCL: Tensor) -> Tensor:
        return operations.causal_conv1d(one, x_BCL, convolution.weight[:, 0], convolution.bias)

    def scan(
        one: Pass, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, recurrent_states: Tensor | None
    ) -> tuple[Tensor, None]:
        x_BLC, gate_BLC = one.own(hidden_states, 1), one.own(recurrent_gate, 1).float()
        log_decay_BLC = gate_BLC.clamp_min(torch.finfo(gate_BLC.dtype).tiny).log()
        out_BLC, after = one.ops.gated_scan(x_BLC, log_decay_BLC, state=one.tensor_before())
        one.keep(after)
        return one.filled(out_BLC, 1), None

    convolution.forward = either(convolve, convolution.forward)
    unit._rnn_scan = either(scan, unit._rnn_scan)


def xlstm_model(module: nn.Module) -> None:
    """xLSTM's stack of blocks, which would take long sequences in parts, with a state in bfloat16 between them."""
    own: Any = module
    own.config = copy(own.config)
    own.config.max_inference_chunksize = sys.maxsize


def xlstm_backend(module: nn.Module) -> None:
    """xLSTM's matrix memory; see `dist_attn.mixers.mlstm`. Its running maximum begins at 0, as in transformers."""
    eps: float = module.config.eps  # type: ignore[union-attr, assignment]

    def forward(
        one: Pass, query: Tensor, key: Tensor, value: Tensor, igate: Tensor, fgate: Tensor, **_: Any
    ) -> tuple[Tensor, None]:
        q, k, v, log_weight, forget = (one.own(t, 2).float() for t in (query, key, value, igate, fgate))
        log_gate_BHL = F.logsigmoid(forget)
        unit_BH = one.tensor_before()
        unit_BH = q.new_zeros(q.shape[:2], dtype=torch.float64) if unit_BH is None else unit_BH
        level_BHL, rise_BHL, after_BH = one.ops.running_maximum(log_weight, unit_BH, log_gate_BHS=log_gate_BHL)
        one.keep(after_BH)
        # Differences are taken in float64: far from 0 levels have no digits left in float32.
        weight_BHL1 = (log_weight.double() - level_BHL).exp().float()[..., None]
        decay_BHL1 = (log_gate_BHL.double() - rise_BHL).float()[..., None]
        with_ones = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
        unit_q, weighed_k = q * q.shape[-1] ** -0.5, k * weight_BHL1
        sums_BHLW = operations.recur(one, unit_q, weighed_k, with_ones, decay_BHL1, dtype=query.dtype)
        least_BHL = (-level_BHL).exp().clamp_max(torch.finfo(torch.float32).max).float()
        divisor_BHL = torch.maximum(sums_BHLW[..., -1].abs(), least_BHL) + eps
        return one.filled(sums_BHLW[..., :-1] / divisor_BHL[..., None], 2).to(query.dtype), None

    module.forward = either(forward, module.forward)


def falcon_h1_model(module: nn.Module) -> None:
    """Falcon-H1's stack of layers, which scales the vectors of tokens but none that it is given: its embedding does."""
    own: Any = module
    embed, factor = own.embed_tokens.forward, own.embedding_multiplier
    own.embed_tokens.forward = lambda tokens: embed(tokens) * factor
    own.embedding_multiplier = 1.0

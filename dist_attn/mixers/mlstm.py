"""xLSTM's matrix memory: linear attention whose keys weigh exp(i) and whose past fades by sigmoid(f), normalised.

Per head C_t = f_t C_{t-1} + e^{i_t} k_t v_t^T, n_t likewise of k_t, and h_t = C_t^T q_t / max(|n_t q_t|, 1). Both are
held relative to the largest weight so far, e^{m_t}: n q is then what one more column of the values gives, of ones, and
the 1 is e^{-m_t}.

Letters: B batch, H heads, L tokens on this rank, K numbers of a head's key, V of its value, D model width.
"""

from dataclasses import replace
from typing import final

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.mixers.base import MixerState, Paradigm
from dist_attn.mixers.heads import HeadInputs, in_units, linear_float32, merge_heads, split_heads, step_key_weights
from dist_attn.mixers.kernel_attention import KernelMixer, KernelState
from dist_attn.mixers.linear_layers import Linear
from dist_attn.mixers.narrow_layers import empty_output
from dist_attn.model_config.mixers.scans import MLstmConfig
from dist_attn.ops import Denominator, LinearState, SequenceOps
from dist_attn.ops.device import without_autocast

FORGET_BIASES = (3.0, 6.0)  # of the first and the last head: memories of 20 to 400 tokens at first
NORM_EPS = 1e-6


def matrix_memory(
    heads: HeadInputs, ops: SequenceOps, state: LinearState, unit_BH: torch.Tensor
) -> tuple[torch.Tensor, LinearState, torch.Tensor]:
    """h of every token, the state after the last global one, and the log of the unit in which it is held.

    `log_gate` is logsigmoid(f), `key_scale` stands for its logarithm here, i.

    Shapes: q, k [B, H, L, K], v [B, H, L, V], log gate and i [B, H, L] -> [B, H, L, V] in float32 or wider; the state
        has V + 1 values.
    Cost: O(L K V); across ranks the exchange of a state of K (V + 2) + 2 numbers per head, and of its unit.
    Reference: Beck et al. 2024, xLSTM, Eq. 19 to 27.
    """
    q, k, v, log_gate, log_weight = heads
    assert log_gate is not None and log_weight is not None
    level_BHL, rise_BHL, after_BH = ops.running_maximum(log_weight, unit_BH, log_gate_BHS=log_gate)
    gate_BHL, scale_BHL, after_BH = in_units(log_weight, level_BHL, rise_BHL, after_BH, log_gate, None)
    sums_BHLW, after = ops.linear_attention(
        q.to(scale_BHL.dtype),
        k.to(scale_BHL.dtype),
        _with_ones(v.to(scale_BHL.dtype)),
        log_gate_BHS=gate_BHL,
        key_scale_BHS=scale_BHL,
        state=state,
        denominator=Denominator("one"),
    )
    return _normalised(sums_BHLW, level_BHL), after, after_BH


def _with_ones(v: torch.Tensor) -> torch.Tensor:
    return torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)


def _normalised(sums: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """The sums over max(|n q|, 1), all in units of exp(level); where that has no digits left, over a tiny number."""
    one = (-level).exp().to(sums.dtype).clamp_min(torch.finfo(sums.dtype).tiny)
    return sums[..., :-1] / torch.maximum(sums[..., -1].abs(), one)[..., None]


@final
class MatrixMemory(KernelMixer):
    """out(sigmoid(o) * norm(h)), h of every head normalised by itself; o, queries, keys and values linear in tokens.

    Gates, their logits within a soft cap, and queries and keys are computed in float32 outside any autocast: weights
    q k have both signs and cancel, and the norm makes a small rest large.

    Reference: Beck et al. 2024, xLSTM, Sec. 2.3; Beck et al. 2025, xLSTM 7B, Sec. 3.
    """

    config: MLstmConfig
    paradigm = Paradigm.LEARNED_DEPENDENT

    def __init__(self, config: MLstmConfig) -> None:
        super().__init__()
        self.config = config
        size, heads, values, bias = config.hidden_size, config.num_heads, config.outputs_size, config.projection_bias
        self.qk = Linear(size, 2 * config.keys_size, bias=bias)
        self.vo = Linear(size, 2 * values, bias=bias)
        self.gate = nn.Linear(size, config.gates)
        with torch.no_grad():
            self.gate.weight.normal_(std=0.02)
            self.gate.bias.copy_(torch.cat([torch.zeros(heads), torch.linspace(*FORGET_BIASES, heads)]))
        self.norm_E = nn.Parameter(torch.ones(values))
        self.norm_bias_E = nn.Parameter(torch.zeros(values)) if bias else None
        self.out = Linear(values, size, bias=bias)

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, KernelState]:
        before = self.own(state, x_BLD.shape[0])
        assert before.unit_BH is not None
        q, k, v, o_BLE = self._projected(x_BLD)
        log_weight, log_gate = (t.transpose(1, 2) for t in self._gates(x_BLD))
        q, k, v = (split_heads(t, self.config.num_heads) for t in (q, k, v))
        h_BHLV, attention, unit_BH = matrix_memory(
            HeadInputs(q, k, v, log_gate, log_weight), ops, before.attention, before.unit_BH
        )
        return self._output(merge_heads(h_BHLV), o_BLE), replace(before, attention=attention, unit_BH=unit_BH)

    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, KernelState]:
        before = self.own(state, x_BD.shape[0])
        assert before.unit_BH is not None
        q, k, v, o_BE = self._projected(x_BD)
        log_weight_BH, log_gate_BH = self._gates(x_BD)
        gate_BH, scale_BH, unit_BH = step_key_weights(log_weight_BH, before.unit_BH, log_gate_BH=log_gate_BH)
        q, k, v = (t.unflatten(-1, (self.config.num_heads, -1)).to(scale_BH.dtype) for t in (q, k, v))
        attention = before.attention.advance(k, _with_ones(v), log_gate_BH=gate_BH, key_scale_BH=scale_BH)
        sums_BH1W, _ = attention.read(q[:, :, None])
        h_BHV = _normalised(sums_BH1W.squeeze(2), unit_BH)
        return self._output(h_BHV.flatten(1), o_BE), replace(before, attention=attention, unit_BH=unit_BH)

    def initial_tail(self, batch: int) -> torch.Tensor:
        """There is no short convolution."""
        return empty_output(self.qk).new_zeros((batch, 0, self.config.hidden_size))

    def _projected(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys, values and what the output gate is made of."""
        with without_autocast(x.device):
            wide = x if x.dtype == torch.float64 else x.to(empty_output(self.qk).dtype)
            q, k = self.qk(wide).chunk(2, dim=-1)
        v, o = self.vo(x).chunk(2, dim=-1)
        return q * self.config.num_features**-0.5, k, v, o

    def _gates(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """i and the logarithm of sigmoid(f), [..., H]."""
        logits = linear_float32(self.gate, x)
        cap = self.config.gate_soft_cap
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        log_weight, forget = logits.chunk(2, dim=-1)
        return log_weight, F.logsigmoid(forget)

    def _output(self, h: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        heads, per_head = self.config.num_heads, self.config.outputs_size // self.config.num_heads
        normed = F.layer_norm(h.unflatten(-1, (heads, -1)), (per_head,), eps=NORM_EPS).flatten(-2) * self.norm_E
        normed = normed if self.norm_bias_E is None else normed + self.norm_bias_E
        mixed: torch.Tensor = self.out(torch.sigmoid(o) * normed)
        return mixed

"""Recurrent mixers against modules of transformers with the same weights, and against their definitions by token."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor, nn

from dist_attn.mixers import (
    GatedDeltaConfig,
    GlaConfig,
    KimiDeltaConfig,
    LightningConfig,
    Mamba2Config,
    Rwkv7Config,
    TokenMixer,
    build_mixer,
)
from dist_attn.model_config.mixer import MixerConfig
from dist_attn.ops import LocalSequenceOps
from tests.support.sharded_call import random_tensor

SIZE, TOKENS, CLOSE = 24, 70, 1e-4
X = random_tensor(2, TOKENS, SIZE, seed=1).float()


def _random(module: nn.Module) -> Any:
    """The module with parameters of ordinary size."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module.eval()


def _holding(config: MixerConfig, weights: dict[str, Tensor]) -> TokenMixer:
    mixer = build_mixer(config)
    own = {name: parameter.shape for name, parameter in mixer.named_parameters()}
    mixer.load_state_dict({name: tensor.detach().reshape(own[name]) for name, tensor in weights.items()})
    return mixer


def _mixed(mixer: TokenMixer) -> Tensor:
    with torch.no_grad():
        y, _ = mixer(X, LocalSequenceOps())
    return y


def _taps(convolution: nn.Conv1d) -> Tensor:
    """[T, C] of a convolution whose last tap is on the token itself."""
    return convolution.weight[:, 0].T.flip(0)


def test_gated_delta_is_that_of_qwen3_next() -> None:
    """With shared keys and copied weights the outputs are those of Qwen3NextGatedDeltaNet."""
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextConfig, Qwen3NextGatedDeltaNet

    groups, each, key, value = 2, 2, 8, 5
    theirs = _random(
        Qwen3NextGatedDeltaNet(
            Qwen3NextConfig(
                hidden_size=SIZE,
                linear_num_key_heads=groups,
                linear_num_value_heads=groups * each,
                linear_key_head_dim=key,
                linear_value_head_dim=value,
                num_hidden_layers=4,
            ),
            0,
        )
    )
    # Their rows are those of each group, ours those of q, k, v and the gate.
    rows = theirs.in_proj_qkvz.weight.unflatten(0, (groups, -1)).split((key, key, each * value, each * value), dim=1)
    gates = theirs.in_proj_ba.weight.unflatten(0, (groups, -1)).split((each, each), dim=1)
    config = GatedDeltaConfig(
        kind="gated_delta", hidden_size=SIZE, num_heads=4, key_heads=groups, key_size=key, value_size=value
    )
    ours = _holding(
        config,
        {
            "inputs.weight": torch.cat([part.flatten(0, 1) for part in rows]),
            "gate.weight": torch.cat([part.flatten(0, 1) for part in gates]),
            "convolution.weight_KD": _taps(theirs.conv1d),
            "step_bias_H": theirs.dt_bias,
            "log_rate_H": theirs.A_log,
            "norm.weight": theirs.norm.weight,
            "out.weight": theirs.out_proj.weight,
        },
    )
    with torch.no_grad():
        torch.testing.assert_close(_mixed(ours), theirs(X), rtol=CLOSE, atol=CLOSE)


def test_kda_is_that_of_kimi_linear() -> None:
    """With copied weights the outputs are those of KimiLinearDeltaAttention."""
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearConfig, KimiLinearDeltaAttention

    theirs = _random(
        KimiLinearDeltaAttention(
            KimiLinearConfig(hidden_size=SIZE, linear_num_heads=3, linear_head_dim=8, num_hidden_layers=2), 0
        )
    )
    gate = theirs.forget_gate
    ours = _holding(
        KimiDeltaConfig(kind="kda", hidden_size=SIZE, num_heads=3),
        {
            "inputs.weight": torch.cat([theirs.q_proj.weight, theirs.k_proj.weight, theirs.v_proj.weight]),
            "convolution.weight_KD": _taps(theirs.conv1d),
            "gate.weight": theirs.b_proj.weight,
            "steps.down_RD": gate.f_a_proj.weight,
            "steps.up_OR": gate.f_b_proj.weight,
            "steps.bias_O": gate.dt_bias,
            "log_rate_H": gate.A_log,
            "out_gate.down_RD": theirs.g_a_proj.weight,
            "out_gate.up_OR": theirs.g_b_proj.weight,
            "norm.weight": theirs.o_norm.weight,
            "out.weight": theirs.o_proj.weight,
        },
    )
    with torch.no_grad():
        torch.testing.assert_close(_mixed(ours), theirs(X), rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("groups", [1, 2])
def test_mamba2_is_that_of_transformers(groups: int) -> None:
    """With copied weights the outputs are those of Mamba2Mixer, where heads share B and C and where groups do."""
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Config as TheirConfig
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    theirs = _random(
        Mamba2Mixer(
            TheirConfig(
                hidden_size=SIZE,
                num_heads=6,
                head_dim=8,
                state_size=10,
                n_groups=groups,
                chunk_size=16,
                num_hidden_layers=1,
            ),
            0,
        )
    )
    inner, convolved = 48, 48 + 2 * groups * 10
    gate, to_convolve, steps = theirs.in_proj.weight.split((inner, convolved, 6))
    ours = _holding(
        Mamba2Config(kind="mamba2", hidden_size=SIZE, num_heads=6, key_size=10, groups=groups),
        {
            "inputs.weight": torch.cat([to_convolve, gate]),
            "gate.weight": steps,
            "gate.bias": theirs.dt_bias,
            "convolution.weight_KD": _taps(theirs.conv1d),
            "convolution_bias_C": theirs.conv1d.bias,
            "log_rate_H": theirs.A_log,
            "skip_H": theirs.D,
            "norm.weight": theirs.norm.weight,
            "out.weight": theirs.out_proj.weight,
        },
    )
    with torch.no_grad():
        torch.testing.assert_close(_mixed(ours), theirs(X), rtol=CLOSE, atol=CLOSE)


def test_lightning_is_that_of_minimax() -> None:
    """With copied weights the outputs are those of MiniMaxLightningAttention in a layer whose slopes are smaller."""
    from transformers.models.minimax.modeling_minimax import MiniMaxConfig, MiniMaxLightningAttention

    heads, layer, layers = 3, 2, 5
    theirs = _random(
        MiniMaxLightningAttention(
            MiniMaxConfig(
                hidden_size=SIZE,
                num_attention_heads=heads,
                num_key_value_heads=heads,
                head_dim=8,
                num_hidden_layers=layers,
            ),
            layer,
        )
    )
    qkv = theirs.qkv_proj.weight.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
    scale = 1 - layer / (layers - 1 + 1e-5) + 1e-5
    ours = _holding(
        LightningConfig(kind="lightning", hidden_size=SIZE, num_heads=heads, slope_scale=scale),
        {
            "inputs.weight": torch.cat([qkv, theirs.output_gate.weight]),
            "norm.weight": theirs.norm.weight,
            "out.weight": theirs.out_proj.weight,
        },
    )
    with torch.no_grad():
        theirs_BLD, _ = theirs(X, None, None)
    torch.testing.assert_close(_mixed(ours), theirs_BLD, rtol=CLOSE, atol=CLOSE)


def test_gla_is_its_definition() -> None:
    """Token by token, S = diag(sigmoid(gate)^(1/16)) S + k v^T, and the norm of q^T S / sqrt(K) past silu of a gate."""
    heads, key, value = 3, 4, 8
    mixer = _random(build_mixer(GlaConfig(kind="gla", hidden_size=SIZE, num_heads=heads, key_size=key))).double()
    x = X.double()
    sizes = (heads * key, heads * key, heads * value, heads * value)
    *qkv, gate = mixer.inputs(x).split(sizes, dim=-1)
    decay = torch.sigmoid(x @ mixer.decay.down_RD.T @ mixer.decay.up_OR.T + mixer.decay.bias_O) ** (1 / 16)
    q, k, v, decay = (t.unflatten(-1, (heads, -1)) for t in (*qkv, decay))
    state, outputs = torch.zeros(2, heads, key, value, dtype=torch.float64), []
    for t in range(TOKENS):
        state = decay[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
        outputs.append((q[:, t, :, None] @ state)[:, :, 0] / key**0.5)
    normed = F.rms_norm(torch.stack(outputs, 1), (value,), mixer.norm.weight, mixer.config.norm_eps)
    want = mixer.out(normed.flatten(2) * F.silu(gate))
    torch.testing.assert_close(mixer(x, LocalSequenceOps())[0], want, rtol=1e-10, atol=1e-12)


def test_rwkv7_is_its_definition() -> None:
    """Token by token the state is S (diag(w) - kappa^T (a kappa)) + v^T k, V by K, with the names of the paper."""
    heads, size = 3, 8
    config = Rwkv7Config(kind="rwkv7", hidden_size=SIZE, num_heads=heads, decay_rank=3, rate_rank=4, gate_rank=5)
    mixer = _random(build_mixer(config)).double()
    x = X.double()
    before = F.pad(x, (0, 0, 1, -1))
    r_in, w_in, k_in, v_in, a_in, g_in = (x + (before - x) * share for share in mixer.share_6D)
    r, k, v = mixer.receptance(r_in), mixer.key(k_in), mixer.value(v_in)
    w = torch.exp(-math.exp(-0.5) * torch.sigmoid(_low_rank(mixer.decay, w_in, torch.tanh)))
    a = torch.sigmoid(_low_rank(mixer.rate, a_in, lambda t: t))
    gate = torch.sigmoid(g_in @ mixer.out_gate.down_RD.T) @ mixer.out_gate.up_OR.T
    r, k, v, w, a = (t.unflatten(-1, (heads, -1)) for t in (r, k, v, w, a))
    kappa = F.normalize(k * mixer.kappa_HK, dim=-1)
    k = k * (1 + (a - 1) * mixer.replaced_HK)
    state, outputs = torch.zeros(2, heads, size, size, dtype=torch.float64), []
    for t in range(TOKENS):
        kept = torch.diag_embed(w[:, t]) - kappa[:, t, :, :, None] * (a * kappa)[:, t, :, None]
        state = state @ kept + v[:, t, :, :, None] * k[:, t, :, None]
        outputs.append((state @ r[:, t, :, :, None])[..., 0])
    out = torch.stack(outputs, 1)
    normed = F.group_norm(out.flatten(0, 1).flatten(1), heads, eps=config.norm_eps).view_as(out)
    bonus = (r * k * mixer.bonus_HK).sum(-1, keepdim=True) * v
    y = (normed * mixer.norm_weight_HV + mixer.norm_bias_HV + bonus).flatten(2) * gate
    torch.testing.assert_close(mixer(x, LocalSequenceOps())[0], mixer.out(y), rtol=1e-10, atol=1e-12)


def test_retention_decays_by_the_powers_of_its_paper() -> None:
    """With the slopes of retention a token's weight falls by 1 - 2^-5, 1 - 2^-6 and so on, a rate for each head."""
    from dist_attn.mixers.decaying import slopes

    config = LightningConfig(kind="lightning", hidden_size=SIZE, num_heads=3, slopes="retention")
    want = 1 - 2.0 ** -torch.arange(5, 8, dtype=torch.float64)
    torch.testing.assert_close((-slopes(config, torch.device("cpu"))).exp(), want)


def test_a_walk_more_is_counted_where_ranks_do_not_take_turns() -> None:
    """A few ranks at many heads walk their tokens once, as one does; many ranks walk twice."""
    for config in (
        GlaConfig(kind="gla", hidden_size=64, num_heads=8),
        GatedDeltaConfig(kind="gated_delta", hidden_size=64, num_heads=8),
        Rwkv7Config(kind="rwkv7", hidden_size=64, num_heads=8),
    ):
        one, few, many = (config.prefill_flops(1, ranks) for ranks in (1, 4, 64))
        assert few == one
        assert (many.projections, many.state > one.state) == (one.projections, True)
        assert (many.scores > one.scores) == (config.erasure != "none")


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "gla", "hidden_size": 10, "num_heads": 3},
        {"kind": "gla", "hidden_size": 2, "num_heads": 3},
        {"kind": "mamba2", "hidden_size": 12, "num_heads": 3, "groups": 2},
        {"kind": "gated_delta", "hidden_size": 12, "num_heads": 3, "key_heads": 2},
        {"kind": "kda", "hidden_size": 12, "num_heads": 3, "short_convolution": 0},
    ],
)
def test_bad_sizes_are_refused(values: dict[str, Any]) -> None:
    """Heads that do not divide the width or the groups, empty heads, and delta rules without their convolution."""
    with pytest.raises(ValidationError):
        MixerConfig.model_validate(values)
    MixerConfig.model_validate({"kind": "gla", "hidden_size": 10, "num_heads": 3, "key_size": 4, "value_size": 2})


def _low_rank(gate: Any, x: Tensor, between: Any) -> Tensor:
    inner: Tensor = between(x @ gate.down_RD.T)
    return inner @ gate.up_OR.T + gate.bias_O

"""Mamba, RG-LRU and mLSTM against the golden vectors and the models that people have."""

import pytest
import torch
from torch import Tensor, nn

from dist_attn.mixers import MambaConfig, MLstmConfig, RgLruConfig, TokenMixer, build_mixer
from dist_attn.mixers.heads import HeadInputs
from dist_attn.mixers.mlstm import matrix_memory
from dist_attn.ops import LinearState, LocalSequenceOps
from dist_attn.ops.running_maximum import NO_TOKENS
from tests.support.closeness import assert_close
from tests.support.golden import golden
from tests.support.sharded_call import random_tensor

pytest.importorskip("transformers", reason="transformers is not installed; `pip install -e .[dev]` adds it")
from transformers.models.mamba import modeling_mamba
from transformers.models.recurrent_gemma import modeling_recurrent_gemma
from transformers.models.xlstm import modeling_xlstm

TOKENS, SIZE = 37, 24


def drawn(module: nn.Module) -> nn.Module:
    """The module in float64 with parameters that matter."""
    module = module.double().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return module


def loaded(mixer: TokenMixer, tensors: dict[str, Tensor]) -> TokenMixer:
    """The mixer with these parameters, and none left out."""
    mixer = mixer.double()
    mixer.load_state_dict({name: tensor.detach().clone() for name, tensor in tensors.items()})
    return mixer


def taps(layer: nn.Conv1d) -> dict[str, Tensor]:
    """The taps of a causal depthwise convolution, that of the token itself first."""
    return {"convolution.weight_KD": layer.weight[:, 0].flip(1).T, "convolution.bias_D": layer.bias}


def in_pieces(mixer: TokenMixer, x_BLD: Tensor) -> Tensor:
    """Outputs of two blocks and some steps."""
    first, state = mixer(x_BLD[:, :1], LocalSequenceOps())
    second, state = mixer(x_BLD[:, 1:30], LocalSequenceOps(), state)
    outs = [first, second]
    for x_BD in x_BLD[:, 30:].unbind(1):
        y_BD, state = mixer.step(x_BD, state)
        outs.append(y_BD[:, None])
    return torch.cat(outs, dim=1)


def test_mamba_is_that_of_transformers():
    """With the weights of `MambaMixer` outputs are its own, at once and in pieces."""
    config = modeling_mamba.MambaConfig(hidden_size=SIZE, state_size=5, num_hidden_layers=1, use_bias=True)
    theirs = drawn(modeling_mamba.MambaMixer(config, layer_idx=0))
    tensors = {
        **{f"in_proj.{n}": getattr(theirs.in_proj, n) for n in ("weight", "bias")},
        **{f"out.{n}": getattr(theirs.out_proj, n) for n in ("weight", "bias")},
        **taps(theirs.conv1d),
        "x_proj.weight": theirs.x_proj.weight,
        "dt_ER": theirs.dt_proj.weight,
        "dt_bias_E": theirs.dt_proj.bias,
        "log_a_EN": theirs.A_log,
        "skip_E": theirs.D,
    }
    mixer = loaded(
        build_mixer(MambaConfig(kind="mamba", hidden_size=SIZE, state_size=5, projection_bias=True)), tensors
    )
    x = random_tensor(2, TOKENS, SIZE, seed=0)
    with torch.no_grad():
        want = theirs(x)
        for got in (mixer(x, LocalSequenceOps())[0], in_pieces(mixer, x)):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)  # theirs are float32 inside


def test_rg_lru_is_that_of_transformers():
    """With the weights of `RecurrentGemmaRecurrentBlock` outputs are its own, of packed documents too."""
    config = modeling_recurrent_gemma.RecurrentGemmaConfig(
        hidden_size=SIZE, lru_width=32, num_attention_heads=4, num_hidden_layers=1
    )
    theirs = drawn(modeling_recurrent_gemma.RecurrentGemmaRecurrentBlock(config, layer_idx=0))
    x_and_y = [getattr(theirs, name) for name in ("linear_x", "linear_y")]
    lru = theirs.rg_lru
    tensors = {
        **{f"in_proj.{n}": torch.cat([getattr(layer, n) for layer in x_and_y]) for n in ("weight", "bias")},
        **{f"out.{n}": getattr(theirs.linear_out, n) for n in ("weight", "bias")},
        **taps(theirs.conv_1d),
        "gates_2HWW": torch.stack([lru.input_gate_weight, lru.recurrent_gate_weight]),
        "gate_biases_2E": torch.stack([lru.input_gate_bias.flatten(), lru.recurrent_gate_bias.flatten()]),
        "decay_E": lru.recurrent_param,
    }
    mixer = loaded(build_mixer(RgLruConfig(kind="rg_lru", hidden_size=SIZE, num_heads=4, width=32)), tensors)
    x = random_tensor(2, TOKENS, SIZE, seed=0)
    with torch.no_grad():

        def of_theirs(x_BLD: Tensor) -> Tensor:
            places = torch.arange(x_BLD.shape[1])[None].expand(x_BLD.shape[0], -1)
            return theirs(x_BLD, places, None, use_cache=False)[0]

        for got in (mixer(x, LocalSequenceOps())[0], in_pieces(mixer, x)):
            torch.testing.assert_close(got, of_theirs(x), rtol=1e-5, atol=1e-5)  # theirs are float32 inside
        packed, _ = mixer(x, LocalSequenceOps((0, 20)))
        want = torch.cat([of_theirs(part) for part in x.split([20, TOKENS - 20], dim=1)], dim=1)
        torch.testing.assert_close(packed, want, rtol=1e-5, atol=1e-5)


def test_mlstm_is_that_of_transformers():
    """With the weights of transformers' `xLSTMLayer` outputs are its own, at once and in pieces."""
    config = modeling_xlstm.xLSTMConfig(
        hidden_size=SIZE,
        num_heads=2,
        num_hidden_layers=1,
        use_bias=True,
        mode="inference",
        eps=0.0,
        chunkwise_kernel="chunkwise--native_autograd",
        sequence_kernel="native_sequence__native",
        step_kernel="native",
    )
    theirs = drawn(modeling_xlstm.xLSTMLayer(config))
    qk, vo, gates = [theirs.q, theirs.k], [theirs.v, theirs.ogate_preact], [theirs.igate_preact, theirs.fgate_preact]
    tensors = {
        f"{name}.{n}": torch.cat([getattr(layer, n) for layer in layers])
        for name, layers in (("qk", qk), ("vo", vo), ("gate", gates), ("out", [theirs.out_proj]))
        for n in ("weight", "bias")
    }
    tensors |= {"norm_E": theirs.multihead_norm.weight, "norm_bias_E": theirs.multihead_norm.bias}
    mixer = loaded(build_mixer(MLstmConfig(kind="mlstm", hidden_size=SIZE, num_heads=2, projection_bias=True)), tensors)
    x = random_tensor(2, TOKENS, SIZE, seed=0)
    with torch.no_grad():
        want, _ = theirs(x)
        for got in (mixer(x, LocalSequenceOps())[0], in_pieces(mixer, x)):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def _memory(g: dict[str, Tensor], dtype: torch.dtype, shift: float) -> tuple[Tensor, LinearState, Tensor]:
    """The matrix memory of the golden inputs, their logarithms of weights shifted."""
    q, k, v, log_gate, log_weight = (g[name].to(dtype) for name in "qkvfi")
    state = LinearState.identity(2, 2, 4, 4, dtype=dtype)
    units = torch.full((2, 2), NO_TOKENS, dtype=torch.float64)
    heads = HeadInputs(q, k, v, log_gate, log_weight + shift)
    return matrix_memory(heads, LocalSequenceOps(), state, units)


def test_golden_mlstm():
    """The matrix memory and its state in true units are the golden ones."""
    g = golden("mlstm")
    h, after, unit_BH = _memory(g, torch.float64, 0.0)
    assert_close(h, g["out"], kind="golden")
    true_BHKW = after.s_BHMV * unit_BH.exp()[..., None, None]
    assert_close(true_BHKW[..., :-1], g["C"], kind="golden")
    assert_close(true_BHKW[..., -1], g["n"], kind="golden")


@pytest.mark.parametrize("shift", [-200.0, 200.0])
def test_weights_of_the_matrix_memory_that_float32_does_not_hold(shift):
    """Weights of e^200 and e^-200 give in float32 what they give in float64."""
    g = golden("mlstm")
    h, *_ = _memory(g, torch.float32, shift)
    assert_close(h, _memory(g, torch.float64, shift)[0].float())


def test_a_document_of_rg_lru_begins_anew_behind_a_state():
    """Where a document starts at the first token, what the state was left by counts for nothing."""
    mixer = drawn(build_mixer(RgLruConfig(kind="rg_lru", hidden_size=8, num_heads=2)))
    ops, x = LocalSequenceOps((0, 4)), random_tensor(2, 6, 8, seed=1)
    _, used = mixer(random_tensor(2, 5, 8, seed=2), LocalSequenceOps())
    assert_close(mixer(x, ops, used)[0], mixer(x, ops)[0], kind="exact")

"""Steps and layers over prompts in one call are those of the modules, whatever of Llama's kind the model is."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.nn.utils.parametrize import register_parametrization
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.glm.modeling_glm import GlmAttention
from transformers.models.llama.modeling_llama import LlamaAttention

from dist_attn.adapters.fused_step import _known
from dist_attn.adapters.model import AdaptedModel, load_adapted_model
from dist_attn.mixers.softmax import SoftmaxRows
from dist_attn.models import ModelState
from dist_attn.ops import LocalSequenceOps, Watch, watching
from dist_attn.ops.decode_step import has_decode_step
from tests.support.closeness import assert_close
from tests.support.downloaded import llama, mamba2, save

SIZES = {
    "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "pad_token_id": None,
}  # fmt: skip
ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied, heads of their own size": ("llama", {"head_dim": 96, "tie_word_embeddings": True}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu_pytorch_tanh"}),
    "a window": ("mistral", {"sliding_window": 6}),
    "normed queries and keys": ("qwen3", {}),
    "a window on some layers": (
        "qwen3",
        {"layer_types": ["sliding_attention", "full_attention"], "use_sliding_window": True, "sliding_window": 6},
    ),
    "llama3": ("llama", {"rope_parameters": {
        "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **ROPE,
    }}),
    "yarn": ("llama", {"rope_parameters": {"rope_type": "yarn", **ROPE}}),
}  # fmt: skip
RECURRENT: dict[str, tuple[str, dict[str, Any]]] = {
    "a state space": ("mamba2", {"num_heads": 8, "head_dim": 16, "state_size": 24, "n_groups": 2, "use_bias": True}),
    "one group, steps between limits": (
        "mamba2",
        {"num_heads": 4, "head_dim": 32, "state_size": 8, "n_groups": 1, "use_conv_bias": False,
         "time_step_limit": (0.6, 0.8)},
    ),
    "delta rule and gated attention": (
        "qwen3_next",
        {"layer_types": ["linear_attention", "full_attention"], "num_experts": 0, "linear_num_value_heads": 4,
         "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 32},
    ),
}  # fmt: skip
SPARSE = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
}  # fmt: skip
RECURRENT["experts, and a layer without"] = (
    "qwen3_next",
    RECURRENT["delta rule and gated attention"][1] | SPARSE | {"mlp_only_layers": [1]},
)
RECURRENT["parts of a delta rule in turn"] = "qwen3_5_text", RECURRENT["delta rule and gated attention"][1]
RECURRENT["the same with experts in all layers"] = (
    "qwen3_5_moe_text",
    RECURRENT["parts of a delta rule in turn"][1] | SPARSE,
)


def made(kind: str, more: dict[str, Any], dtype: torch.dtype = torch.float32) -> AdaptedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES | more))
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5) if weight.dim() > 1 else weight.data.add_(
            0.1 * torch.randn_like(weight)
        )
    return AdaptedModel(model.to(dtype))


def widened(model: AdaptedModel, kind: str, more: dict[str, Any]) -> AdaptedModel:
    """The modules of this model with its weights in float32."""
    exact = made(kind, more)
    for weight, given in zip(exact.parameters(), model.parameters(), strict=True):
        weight.data.copy_(given)
    exact._fused = None
    return exact


def side_by_side(model: AdaptedModel) -> ModelState:
    """Three texts of different lengths, and a row without one."""
    states = [model.hidden(torch.arange(3, 3 + n)[None])[1] for n in (1, 5, 11)]
    return ModelState.beside(states, 4)


@pytest.mark.skipif(not has_decode_step(), reason="no C compiler, or a processor without vectors")
@pytest.mark.parametrize("case", [*CASES, *RECURRENT])
@torch.inference_mode()
def test_a_step_in_one_call_is_that_of_the_modules(case: str) -> None:
    """By logits and states after each token; alone, a text has the bits that it has beside others."""
    model = made(*(CASES | RECURRENT)[case])
    fused, state, plain = model._fused, side_by_side(model), side_by_side(model)
    alone = state.select(2)
    assert fused is not None
    for t in range(8):
        token_B = torch.tensor([t, t + 20, t + 40, 0])
        model._fused = fused
        got_BV, state = model.step(token_B, state)
        one_1V, alone = model.step(token_B[2:3], alone)
        model._fused = None
        want_BV, plain = model.step(token_B, plain)
        assert_close(got_BV[:3], want_BV[:3])
        assert torch.equal(one_1V[0], got_BV[2])
    for own, want in zip(state.select(2).tensors(), plain.select(2).tensors(), strict=True):
        assert_close(own, want)
    assert all(torch.equal(a, b) for a, b in zip(alone.tensors(), state.select(2).tensors(), strict=True))
    watch, model._fused = Watch(), fused
    watch.rows, token_B = 1, torch.arange(4)
    with watching(watch):  # the first row is asked for, others fill up
        first_BV, after = model.step(token_B, state)
    assert torch.equal(first_BV[0], model.step(token_B, state)[0][0]) and not first_BV[1:].any()
    for kept, had in zip(after.layers, state.layers, strict=True):
        assert isinstance(had, SoftmaxRows) or torch.equal(kept.tensors()[0][1:], had.tensors()[0][1:])


@pytest.mark.skipif(not has_decode_step(), reason="no C compiler, or a processor without vectors")
@pytest.mark.parametrize("weights", ["bfloat16", "int8"])
@pytest.mark.parametrize("theirs", [partial(llama, 128), mamba2])
@torch.inference_mode()
def test_rounded_weights_take_one_call(theirs: Any, weights: Any, tmp_path: Any) -> None:
    """No further from the modules' steps than these round."""
    model = load_adapted_model(save(theirs(), tmp_path / "model"), weights=weights)
    fused, state = model._fused, model.initial_state(2)
    assert fused is not None
    got_BV, _ = model.step(torch.tensor([3, 4]), state)
    model._fused = None
    want_BV, _ = model.step(torch.tensor([3, 4]), model.initial_state(2))
    assert (got_BV - want_BV).norm() < 0.02 * want_BV.float().norm()


@pytest.mark.skipif(not has_decode_step(), reason="no C compiler, or a processor without vectors")
@pytest.mark.parametrize("rows", [1, 8])
@torch.inference_mode()
def test_a_step_of_experts_in_bfloat16_chooses_as_float32_does(rows: int) -> None:
    """Nearer to it than modules, whose choices flip where they round the router's logits."""
    case = RECURRENT["experts, and a layer without"]
    model = made(*case, torch.bfloat16)
    fused, exact, far = model._fused, widened(model, *case), torch.zeros(2)
    assert fused is not None
    states = [each.initial_state(rows) for each in (model, model, exact)]
    for t in range(8):
        token_B, found = 7 * torch.arange(rows) + 3 * t, list[torch.Tensor]()
        for i, (each, how) in enumerate(((model, fused), (model, None), (exact, None))):
            each._fused = how
            logits_BV, states[i] = each.step(token_B, states[i])
            found.append(logits_BV.float())
        far += torch.stack([(each - found[2]).norm() / found[2].norm() / 8 for each in found[:2]])
    assert far[0] < far[1] and far[0] < 0.05


def read(model: AdaptedModel, tokens_L: torch.Tensor, *lengths: int) -> tuple[torch.Tensor, ModelState]:
    """Hidden states [L, D] of tokens that are read in such pieces, and the state behind them."""
    hidden, state = list[torch.Tensor](), model.initial_state(1)
    for piece_L in tokens_L.split(lengths):
        h_1LD, state = model.hidden(piece_L[None], LocalSequenceOps(), state)
        hidden.append(h_1LD[0])
    return torch.cat(hidden), state


@pytest.mark.parametrize("case", [case for case in CASES if "window" not in case])
@torch.inference_mode()
def test_prompts_in_one_call_a_layer_are_those_of_the_modules(case: str) -> None:
    """No further from float32 than modules in bfloat16; the same bits in any pieces, by any number of threads."""
    length, model = 700, made(*CASES[case], torch.bfloat16)
    if model._fused is None or model._fused._prompts is None:
        pytest.skip("no C compiler, or no products of bfloat16 numbers")
    tokens_L = torch.randint(0, 97, (length,), generator=torch.Generator().manual_seed(1))
    whole_LD, after = read(model, tokens_L, length)
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    pieces_LD, same = read(model, tokens_L, 40, 1, 31, 300, length - 372)
    torch.set_num_threads(threads)
    assert torch.equal(pieces_LD, whole_LD)
    assert all(torch.equal(a, b) for a, b in zip(after.tensors(), same.tensors(), strict=True))
    model._fused._prompts = None
    modules_LD, rounded = read(model, tokens_L, length)
    exact = widened(model, *CASES[case])
    exact_LD, wanted = read(exact, tokens_L, length)
    assert (whole_LD - exact_LD).norm() < (modules_LD - exact_LD).norm() < 0.05 * exact_LD.norm()
    for own, theirs, want in zip(after.tensors(), rounded.tensors(), wanted.tensors(), strict=True):
        assert (own - want).float().norm() <= 1.05 * (theirs - want).float().norm()


@torch.inference_mode()
def test_what_is_not_finite_stays_so() -> None:
    """In the hidden states of its token and of all later ones, which see its keys."""
    model, tokens_L = made("llama", {}, torch.bfloat16), torch.arange(90) % 50
    tokens_L[37] = 96
    model.inner.model.embed_tokens.weight[96] = torch.nan
    assert bool(read(model, tokens_L, 90)[0][37:].isnan().all())


def test_a_forward_is_known_by_what_it_calls_too() -> None:
    """GLM's attention reads as Llama's does, and turns neighbouring numbers of a head where that turns halves."""
    assert _known("attention", GlmAttention(CONFIG_MAPPING["glm"](**SIZES), 0)) is False
    assert _known("attention", LlamaAttention(CONFIG_MAPPING["llama"](**SIZES), 0))


def test_other_models_keep_their_modules_and_trained_norms_count() -> None:
    """A width that is no whole vectors; a model that computes something else; weights that change."""
    assert made("llama", {"hidden_size": 40})._fused is None
    sparse = made(*RECURRENT["experts, and a layer without"])
    register_parametrization(sparse.inner.model.layers[0].mlp.experts, "gate_up_proj", torch.nn.Identity())
    assert sparse._fused_step() is None
    assert made("granitemoehybrid", {"layer_types": ["attention"] * 2, "num_local_experts": 0})._fused is None
    if not has_decode_step():
        return
    model = made("llama", {}, torch.bfloat16)
    norm, token_B = model.inner.model.norm, torch.tensor([3])
    with torch.no_grad():
        before_BV, _ = model.step(token_B, model.initial_state(1))
        norm.weight.mul_(2)
        after_BV, _ = model.step(token_B, model.initial_state(1))
    assert_close(after_BV, 2 * before_BV)


class _Doubled(torch.nn.Module):
    """A linear layer with something beside it, by the names that adapters of peft have."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer, self.weight, self.bias = layer, layer.weight, layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.base_layer(x)


def _wrap(model: AdaptedModel) -> None:
    layer = model.inner.model.layers[0].mlp
    layer.down_proj = _Doubled(layer.down_proj)


def _hook(model: AdaptedModel) -> None:
    model.inner.model.layers[0].self_attn.register_forward_hook(lambda _module, _given, out: (2 * out[0], *out[1:]))


def _exchange(model: AdaptedModel) -> None:
    model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()}, assign=True)


def _move(model: AdaptedModel) -> None:
    weight = model.inner.model.layers[0].mlp.up_proj.weight
    weight.data = 2 * weight


def _train_the_last(model: AdaptedModel) -> None:
    model.inner.lm_head.weight.mul_(2)


@pytest.mark.skipif(not has_decode_step(), reason="no C compiler, or a processor without vectors")
@pytest.mark.parametrize("change", [_wrap, _hook, _exchange, _move, _train_the_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_changed_model_is_computed_as_it_is_now(change: Any, dtype: torch.dtype) -> None:
    """Whether it was changed before it was first asked for a step or behind one."""
    model, plain, token_B = made("llama", {}, dtype), made("llama", {}, dtype), torch.tensor([3])
    assert model._fused is not None
    before_BV, _ = model.step(token_B, model.initial_state(1))
    change(model), change(plain)
    got_BV, _ = model.step(token_B, model.initial_state(1))
    plain._fused = None
    want_BV, _ = plain.step(token_B, plain.initial_state(1))
    near = (0.03 if dtype == torch.bfloat16 else 1e-5) * want_BV.float().norm()
    assert (got_BV - want_BV).norm() < near < (before_BV - want_BV).norm()
    model._fused = model._fused_step()
    assert torch.equal(model.step(token_B, model.initial_state(1))[0], got_BV)

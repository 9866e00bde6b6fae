"""Decode steps of downloaded models as one call, of layers of Llama's, Mamba-2's, Qwen3-Next's and Qwen3.5's kinds.

Layers of Llama's kind read prompts so too.

A model is taken where the `forward` of each of its parts compiles to the instructions of one that is known here, so a
new model type needs nothing, and one that differs in anything keeps its own modules.

Shape letters: B sequences, L tokens, D model width.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from dist_attn.adapters.passes import OperationState, Pass
from dist_attn.adapters.weights import NarrowLinear, current_blocks
from dist_attn.mixers import MixerState
from dist_attn.mixers.narrow_layers import Int8Linear
from dist_attn.mixers.softmax import SoftmaxRows, SoftmaxState
from dist_attn.models.fused_step import Columns, MadeOf
from dist_attn.ops import LocalSequenceOps, current_watch
from dist_attn.ops.decode_step import (
    ACTIVATIONS,
    ADD,
    GROUP,
    Attention,
    Before,
    Convolution,
    DecodeStep,
    Experts,
    HeadRecurrence,
    Operation,
    Product,
    WeightMatrix,
    takes,
)
from dist_attn.ops.prompt import ALIGNED, Memory, PromptLayers, takes_prompts

KNOWN = {
    "whole": "llama.LlamaForCausalLM mamba2.Mamba2ForCausalLM qwen3_next.Qwen3NextForCausalLM",
    "base": "llama.LlamaModel mistral.MistralModel qwen3.Qwen3Model mamba2.Mamba2Model qwen3_next.Qwen3NextModel "
            "qwen3_5.Qwen3_5TextModel qwen3_5_moe.Qwen3_5MoeTextModel",
    "layer": "llama.LlamaDecoderLayer mamba2.Mamba2Block qwen3_next.Qwen3NextDecoderLayer qwen3_5.Qwen3_5DecoderLayer",
    "attention": "llama.LlamaAttention mistral.MistralAttention qwen3.Qwen3Attention",
    "gated attention": "qwen3_next.Qwen3NextAttention",
    "delta rule": "qwen3_next.Qwen3NextGatedDeltaNet qwen3_5.Qwen3_5GatedDeltaNet",
    "state space": "mamba2.Mamba2Mixer",
    "mlp": "llama.LlamaMLP",
    "sparse mlp": "qwen3_next.Qwen3NextSparseMoeBlock",
    "router": "qwen3_next.Qwen3NextTopKRouter qwen3_5_moe.Qwen3_5MoeTopKRouter",
    "experts": "qwen3_next.Qwen3NextExperts",
    "norm": "llama.LlamaRMSNorm",
    "norm around one": "qwen3_next.Qwen3NextRMSNorm",
    "gated norm": "mamba2.MambaRMSNormGated qwen3_next.Qwen3NextRMSNormGated",
    "rotary": "llama.LlamaRotaryEmbedding qwen3_5.Qwen3_5TextRotaryEmbedding",
}  # fmt: skip
"""The parts that are known, as classes of transformers' models; those that the installed version lacks are skipped."""
ROLES = {
    "self_attn": ("attention", "gated attention"), "linear_attn": ("delta rule",), "mixer": ("state space",),
    "mlp": ("mlp", "sparse mlp"), "gate": ("router",), "experts": ("experts",), "shared_expert": ("mlp",),
    "norm": ("gated norm",),
}  # fmt: skip
"""The names of modules in layers, and what they may be; other modules are linear, or norms by the end of their name."""
_Norm = tuple[torch.Tensor, float]


class FusedStep:
    """The step, and layers over prompts, of a model of which `fused_step` knows all parts."""

    def __init__(
        self,
        model: PreTrainedModel,
        operations: list[Operation],
        of_prompts: list[Operation],
        width: int,
        vocabulary: int,
    ) -> None:
        base: Any = model.get_decoder()
        self._rotary = getattr(base, "rotary_emb", _no_turns)
        dtype: torch.dtype = model.get_input_embeddings().weight.dtype
        probe_11 = torch.zeros((1, 1), dtype=torch.float32, device="cpu")
        rotated = self._rotary(probe_11, position_ids=probe_11.long())[0].shape[-1]
        self._step = DecodeStep(operations, width, rotated, dtype)
        narrow = dtype == torch.bfloat16  # and so are caches
        self._prompts = PromptLayers(of_prompts, rotated, dtype) if narrow and takes_prompts(of_prompts) else None
        self._vocabulary = vocabulary
        self.made_of = MadeOf(model, _parts(base))

    def step(
        self, x_BD: torch.Tensor, layers: Sequence[MixerState], position_B: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[MixerState, ...]] | None:
        """Logits [B, V] in float32 and the states behind a token of each sequence; None for states of another kind."""
        watch = current_watch()
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return None
        if watch is not None and watch.finite is not None:  # modules' operations say which made a NaN
            return None
        before = [_before(state) for state in layers]
        known = [each for each in before if each is not None]
        if len(known) < len(layers) or not self._step.fits(known, len(x_BD)):
            return None
        turns = self._rotary(x_BD.float(), position_ids=position_B[:, None])
        rows = None if watch is None else watch.rows  # others only fill a batch up
        memory_BW, after = self._step.run(x_BD, known, tuple(t[:, 0] for t in turns), rows)
        states = tuple(map(_behind, layers, after))
        return memory_BW[:, -self._vocabulary :], states

    def reader(self, one: Pass, position_BL: torch.Tensor) -> Callable[[int, torch.Tensor], torch.Tensor] | None:
        """A function that reads the tokens of a pass as a layer does; None where it is not one text in this process."""
        if self._prompts is None or len(position_BL) > 1:
            return None
        if not isinstance(one.ops, LocalSequenceOps) or one.ops.documents or not one.length or not one.before:
            return None
        for state in one.before:
            if not isinstance(state, SoftmaxState) or state.window is not None or not state.cache.whole:
                return None
        return _Reader(self._prompts, one, self._rotary, position_BL).read


class _Reader:
    """The layers of one pass over tokens of one text; between them it is float32."""

    def __init__(self, layers: PromptLayers, one: Pass, rotary: Callable[..., Any], position_1L: torch.Tensor) -> None:
        self._layers, self._pass = layers, one
        turns = rotary(torch.empty(1, dtype=torch.float32, device="cpu"), position_ids=position_1L)
        self._turns = tuple(t[0].contiguous() for t in turns)
        self._work: Memory | None = None

    def read(self, layer: int, x_1LD: torch.Tensor) -> torch.Tensor:
        """[1, L, D] behind this layer, of any type -> float32, but behind the last one."""
        assert self._pass.before is not None
        state = self._pass.before[layer]
        assert isinstance(state, SoftmaxState)
        x_LD = x_1LD[0].to(torch.float32, copy=not layer).contiguous()
        if x_LD.data_ptr() % ALIGNED:  # a hook on the layer before may have given a view back
            x_LD = x_LD.clone()
        if self._work is None:
            self._work = self._layers.memory(x_LD, state.cache, self._turns)
        after = self._layers.read(layer, x_LD, state.cache, self._turns, self._work)
        self._pass.keep_cache(after, state.window)
        is_last = layer + 1 == len(self._pass.before)
        return x_LD.to(after.k_BGSK.dtype if is_last else torch.float32)[None]


def fused_step(model: PreTrainedModel) -> FusedStep | None:
    """The step of this model, or None where it does not compute as `KNOWN` ones do or its sizes are no kernel's."""
    base: Any = model.get_decoder()
    head: Any = model.get_output_embeddings()
    if not _known("whole", model) or not _known("base", base) or not all(map(_is_known_layer, base.layers)):
        return None
    last_norm, rotary = getattr(base, "norm", None) or base.norm_f, getattr(base, "rotary_emb", None)
    if not _is_norm(last_norm) or not (rotary is None or _known("rotary", rotary)):
        return None
    parts = _parts(base)
    if model.config.hidden_act not in ACTIVATIONS or any(p._forward_pre_hooks or p._forward_hooks for p in parts):
        return None
    if any("forward" in vars(part) for part in parts if type(part) is not nn.Linear):
        return None  # linear layers have one of ours
    columns = Columns()
    x = columns.take(model.config.hidden_size)
    operations = [operation for layer in base.layers for operation in _layer(layer, model.config, x, columns)]
    of_prompts: list[Operation] = []
    if all(hasattr(layer, "self_attn") and _known("attention", layer.self_attn) for layer in base.layers):
        of_prompts = [one for layer in base.layers for one in _layer(layer, model.config, x, columns, blocks=False)]
    last = _matrices((head, columns.width))
    vocabulary = len(last[0].weight)
    columns.take(vocabulary)
    operations.append(Product(x, model.config.hidden_size, last, *_norm(last_norm)))
    return FusedStep(model, operations, of_prompts, columns.width, vocabulary) if takes(operations) else None


def _layer(layer: Any, config: Any, x: int, columns: Columns, *, blocks: bool = True) -> list[Operation]:
    width = config.hidden_size
    if hasattr(layer, "mixer"):
        return _state_space(layer.mixer, width, _norm(layer.norm), x, columns)
    norm = _norm(layer.input_layernorm)
    if hasattr(layer, "linear_attn"):
        mixing = _delta_rule(layer.linear_attn, width, norm, x, columns)
    else:
        mixing = _attention(layer.self_attn, width, norm, x, columns, blocks=blocks)
    mlp, norm, then = layer.mlp, _norm(layer.post_attention_layernorm), ACTIVATIONS[config.hidden_act]
    if not _known("sparse mlp", mlp):
        return [*mixing, *_mlp(mlp, norm, then, x, columns, blocks=blocks)]
    return [*mixing, *_experts(mlp, norm, then, x, columns)]


def _mlp(
    own: Any, norm: _Norm, then: int, x: int, columns: Columns, *, blocks: bool = True, gated_by: int = 0
) -> list[Operation]:
    inner = own.intermediate_size
    gate, up = columns.take(inner, "gate"), columns.take(inner, "up")
    gates = _matrices((own.gate_proj, gate), (own.up_proj, up), blocks=blocks)
    return [
        Product(x, own.hidden_size, gates, *norm, then=then),
        Product(gate, inner, _matrices((own.down_proj, x), blocks=blocks), then=ADD, gate=gated_by),
    ]


def _experts(own: Any, norm: _Norm, then: int, x: int, columns: Columns) -> list[Operation]:
    experts, router = own.experts, own.gate
    width, inner, chosen, count = experts.hidden_dim, experts.intermediate_dim, router.top_k, router.num_experts
    routed, share = columns.take(count, "router"), columns.take(GROUP, "gate of the shared expert")
    inside, ordered = columns.take(chosen * inner, "inside experts"), columns.take(width, "inputs of experts")
    weights = *_weight(experts, "gate_up_proj").chunk(2, 1), _weight(experts, "down_proj")
    matrices = tuple(WeightMatrix(weight, out) for weight, out in zip(weights, (inside, inside, x), strict=True))
    renormed = getattr(router, "norm_topk_prob", True)
    asked = Experts(x, width, matrices, *norm, then, routed, count, chosen, renormed, ordered)
    gates, down = _mlp(own.shared_expert, norm, then, x, columns, gated_by=share)
    routes = WeightMatrix(_weight(router, "weight"), routed), _matrix(own.shared_expert_gate, share, blocks=False)
    return [Product(x, width, routes, *norm), gates, asked, down]


def _weight(own: nn.Module, name: str) -> torch.Tensor:
    """A weight itself; where something is computed in its place, one that the kernel does not take."""
    weight = own._parameters.get(name)
    return weight.detach() if type(weight) is nn.Parameter else torch.empty((0, 2, 0), dtype=torch.bool, device="cpu")


def _attention(own: Any, width: int, norm: _Norm, x: int, columns: Columns, *, blocks: bool) -> list[Operation]:
    heads, groups, size = own.config.num_attention_heads, own.config.num_key_value_heads, own.head_dim
    gate = size if _known("gated attention", own) else 0  # behind each query
    query, key, value = (
        columns.take(n, name) for n, name in ((heads * (size + gate), "q"), (groups * size, "k"), (groups * size, "v"))
    )
    seen = columns.take(heads * size, "seen")
    qkv = _matrices((own.q_proj, query), (own.k_proj, key), (own.v_proj, value), blocks=blocks)
    norms, eps = None, 0.0
    if hasattr(own, "q_norm"):
        (q_norm, eps), (k_norm, _) = _norm(own.q_norm), _norm(own.k_norm)
        norms = q_norm, k_norm
    return [
        Product(x, width, qkv, *norm),
        Attention(query, key, value, seen, heads, groups, size, size, own.scaling, norms, eps, size + gate, gate),
        Product(seen, heads * size, _matrices((own.o_proj, x), blocks=blocks), then=ADD),
    ]


def _state_space(own: Any, width: int, norm: _Norm, x: int, columns: Columns) -> list[Operation]:
    heads, size, values, inner = own.num_heads, own.ssm_state_size, own.head_dim, own.intermediate_size
    gate = columns.take(inner + own.conv_dim + heads, "gate, values, keys, queries, steps")
    mixed, seen = columns.take(own.conv_dim, "convolved"), columns.take(inner, "seen")
    head_H, none_H = _count(heads), torch.full((heads,), -1, device="cpu")
    key_H = mixed + inner + head_H // (heads // own.n_groups) * size
    step_H = gate + inner + own.conv_dim + head_H
    value_H, query_H = mixed + head_H * values, key_H + own.n_groups * size
    places = torch.stack([query_H, key_H, value_H, gate + head_H * values, step_H, none_H], 1)
    least, most = own.time_step_limit
    return [
        Product(x, width, _matrices((own.in_proj, gate)), *norm),
        _convolution(own.conv1d, gate + inner + _count(own.conv_dim), mixed),
        HeadRecurrence(places, seen, size, values, *_rates(own), least=least, most=most, skip=own.D.detach().float()),
        Product(seen, inner, _matrices((own.out_proj, x)), *_norm(own.norm), ADD, own.norm.group_size),
    ]


def _delta_rule(own: Any, width: int, norm: _Norm, x: int, columns: Columns) -> list[Operation]:
    heads, size, values, keys = own.num_v_heads, own.head_k_dim, own.head_v_dim, own.key_dim
    head_H = _count(heads)
    entering = _heads_in_groups if hasattr(own, "in_proj_qkvz") else _parts_in_turn
    parts, columns_C, gate_H, step_H, write_H = entering(own, head_H, columns)
    mixed, seen = columns.take(own.conv_dim, "convolved"), columns.take(own.value_dim, "seen")
    query_H = mixed + head_H // (heads // own.num_k_heads) * size
    places = torch.stack([query_H, query_H + keys, mixed + 2 * keys + head_H * values, gate_H, step_H, write_H], 1)
    root_K = torch.full((size,), size**-0.5, device="cpu")  # unit queries and keys, and queries by it once more
    by_head, eps = _norm(own.norm)
    return [
        *(Product(x, width, matrices, *norm) for matrices in parts),
        _convolution(own.conv1d, columns_C, mixed),
        HeadRecurrence(places, seen, size, values, *_rates(own), norms=(root_K.square(), root_K), eps=1e-6 / size,
                       out_norm=by_head, out_eps=eps),
        Product(seen, own.value_dim, _matrices((own.out_proj, x)), then=ADD),
    ]  # fmt: skip


_Entering = tuple[list[tuple[WeightMatrix, ...]], torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""What enters a delta rule: matrices, and columns of channels, and of each head's gates, steps and writes."""


def _parts_in_turn(own: Any, head_H: torch.Tensor, columns: Columns) -> _Entering:
    sizes = (own.conv_dim, own.value_dim, len(head_H), len(head_H))
    qkv, gate, write, step = (columns.take(n, name) for n, name in zip(sizes, ("qkv", "z", "b", "a"), strict=True))
    wide = _matrices((own.in_proj_qkv, qkv), (own.in_proj_z, gate))
    few = _matrices((own.in_proj_b, write), (own.in_proj_a, step))
    return [wide, few], qkv + _count(own.conv_dim), gate + head_H * own.head_v_dim, step + head_H, write + head_H


def _heads_in_groups(own: Any, head_H: torch.Tensor, columns: Columns) -> _Entering:
    groups, size, values = own.num_k_heads, own.head_k_dim, own.head_v_dim
    readers = len(head_H) // groups
    each = 2 * (size + readers * values)  # of a group: its query, key, and its heads' values, gates
    qkvz, ba = columns.take(groups * each, "qkvz"), columns.take(2 * len(head_H), "ba")
    begin_G1, group_H, place_H = (qkvz + _count(groups) * each)[:, None], head_H // readers, head_H % readers
    channels = (_count(size), size + _count(size), 2 * size + _count(readers * values))
    write_H = ba + group_H * 2 * readers + place_H
    gate_H = qkvz + group_H * each + 2 * size + (readers + place_H) * values
    parts = [_matrices((own.in_proj_qkvz, qkvz)), _matrices((own.in_proj_ba, ba))]
    return parts, torch.cat([(begin_G1 + part).flatten() for part in channels]), gate_H, write_H + readers, write_H


def _convolution(own: nn.Conv1d, columns_C: torch.Tensor, out: int) -> Convolution:
    bias_C = None if own.bias is None else own.bias.detach().float()
    return Convolution(columns_C, out, own.weight.detach()[:, 0].t().float().contiguous(), bias_C)


def _rates(own: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return own.A_log.detach().float(), own.dt_bias.detach().float()


def _count(number: int) -> torch.Tensor:
    return torch.arange(number, device="cpu")


def _is_known_layer(layer: Any) -> bool:
    if not _known("layer", layer):
        return False
    for path, module in layer.named_modules():
        name = path.rpartition(".")[2]
        if name == "conv1d" and type(module) is not nn.Conv1d:
            return False
        if name in ROLES and path != "norm":
            silu = getattr(module, "activation", "silu") in ("silu", "swish")
            if not silu or not any(_known(part, module) for part in ROLES[name]):
                return False
        elif name.endswith("norm") and not _is_norm(module):
            return False
    return True


def _is_norm(module: nn.Module) -> bool:
    return _known("norm", module) or _known("norm around one", module)


def _parts(base: Any) -> list[nn.Module]:
    """The modules inside of the layers, and those behind them; a rank has hooks of its own on whole layers."""
    others = {base, base.layers, base.get_input_embeddings(), *base.layers}
    return [module for module in base.modules() if module not in others]


def _known(part: str, module: nn.Module) -> bool:
    own = _instructions(cast(Any, type(module)))
    return any(own == _instructions(known) for known in map(_class, KNOWN[part].split()) if known is not None)


@lru_cache(maxsize=256)
def _class(name: str) -> Any:
    """A class of transformers, which is imported where it is asked for, or None."""
    model, _, own = name.partition(".")
    try:
        return getattr(import_module(f"transformers.models.{model}.modeling_{model}"), own, None)
    except ModuleNotFoundError:
        return None


@lru_cache(maxsize=256)
def _instructions(of: Any) -> tuple[Any, ...]:
    """The instructions of a function, and of those that it calls in its module and its class, without their names.

    Of a module they are those of its `forward`.
    """
    function: Any = inspect.unwrap(getattr(of, "forward", of))
    code: CodeType = function.__code__
    constants = tuple(each for each in code.co_consts if not isinstance(each, str | CodeType))
    named = (
        function.__globals__.get(name) or inspect.getattr_static(of, name, None)
        for name in code.co_names
        if name != "forward"
    )
    called = tuple(
        _instructions(each)
        for each in named
        if isinstance(each, FunctionType) and each.__module__ == function.__module__
    )
    return code.co_code, code.co_names, code.co_varnames, constants, called


def _matrices(*linears: tuple[Any, int], blocks: bool = True) -> tuple[WeightMatrix, ...]:
    """The weights of these layers, of which each puts its outputs into columns; `blocks` where all have them."""
    blocks = blocks and all(current_blocks(linear) is not None for linear, _ in linears)
    return tuple(_matrix(linear, out, blocks) for linear, out in linears)


def _matrix(linear: Any, out: int, blocks: bool) -> WeightMatrix:
    layer = linear.layer if isinstance(linear, NarrowLinear) else linear
    if type(layer) not in (nn.Linear, Int8Linear) or type(layer.weight) not in (nn.Parameter, torch.Tensor):
        # Such as one with an adapter beside it: its name is no form that the kernel takes.
        return WeightMatrix(torch.empty((0, 0), device="cpu"), out, form=type(layer).__name__)
    bias = None if layer.bias is None else layer.bias.detach().float()
    stored = current_blocks(linear) if blocks else None
    if stored is not None:
        return WeightMatrix(stored.rows, out, bias, form=stored.form)
    return WeightMatrix(layer.weight.detach(), out, bias, getattr(layer, "scale", None))


def _norm(norm: Any) -> _Norm:
    weight = norm.weight.detach().float()
    return (1 + weight, norm.eps) if _known("norm around one", norm) else (weight, norm.variance_epsilon)


def _no_turns(x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    nothing = torch.empty((*position_ids.shape, 0), dtype=torch.float32, device="cpu")
    return nothing, nothing


def _before(state: MixerState) -> Before | None:
    """A tensor, or the cache of each sequence, or of all, without what its window dropped; None for other states."""
    if isinstance(state, OperationState):
        return state.x
    if not isinstance(state, SoftmaxRows | SoftmaxState):
        return None
    caches = state.caches if isinstance(state, SoftmaxRows) else (state.cache,)
    if not all(cache is None or cache.whole for cache in caches):
        return None
    return [None if cache is None else cache.within(state.window) for cache in caches]


def _behind(state: MixerState, after: Any) -> MixerState:
    if isinstance(state, OperationState):
        return OperationState(after)
    assert isinstance(state, SoftmaxRows | SoftmaxState)
    kept = tuple(None if cache is None else cache.within(state.window) for cache in after)
    if isinstance(state, SoftmaxRows):
        return SoftmaxRows(kept, state.tail_BKD, state.window)
    assert kept[0] is not None
    return SoftmaxState(kept[0], state.tail_BKD, state.window)

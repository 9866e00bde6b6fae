"""Decode steps of language models of ours as one call, of layers with random features or a gated delta rule.

A model is taken where every part of its layers is one that is known here and no hook looks at it; others keep their
modules.

Letters: B sequences, D model width, H heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from operator import is_not
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dist_attn.mixers import MixerState
from dist_attn.mixers.delta_rules import GatedDeltaNet
from dist_attn.mixers.feature_map_attention import RandomFeatureAttention
from dist_attn.mixers.heads import ShortConvolution
from dist_attn.mixers.kernel_attention import KernelState
from dist_attn.mixers.linear_layers import Linear
from dist_attn.mixers.narrow_layers import Bfloat16Embedding, Bfloat16Linear, Int8Embedding, Int8Linear
from dist_attn.mixers.recurrent import KEY_EPS, GatedNorm, RecurrentState
from dist_attn.models.blocks import Block
from dist_attn.models.dropout import Dropout
from dist_attn.ops import LinearState, current_watch
from dist_attn.ops.c_call import is_plain
from dist_attn.ops.decode_step import (
    ACTIVATIONS,
    ADD,
    STORE,
    Convolution,
    DecodeStep,
    FourierAttention,
    HeadRecurrence,
    Operation,
    Product,
    WeightMatrix,
    takes,
)

_STEPPED = (Block, RandomFeatureAttention, GatedDeltaNet, ShortConvolution)  # by `step`, of which no hook is told
_NORMS = (nn.LayerNorm, nn.RMSNorm)
_MATRICES = (Linear, nn.Linear, Bfloat16Linear, Int8Linear, nn.Embedding, Bfloat16Embedding, Int8Embedding)
_KNOWN = (*_STEPPED, *_NORMS, *_MATRICES, GatedNorm, Dropout)
_ACTIVATIONS = {"silu": ACTIVATIONS["silu"], "gelu_tanh": ACTIVATIONS["gelu_pytorch_tanh"]}


class Columns:
    """Columns of working memory, given out by name once and used by all layers."""

    def __init__(self) -> None:
        self.width, self._named = 0, dict[tuple[str, int], int]()

    def take(self, count: int, name: str = "") -> int:
        """The first of so many columns, which are new ones without a name."""
        if (name, count) in self._named:
            return self._named[name, count]
        begin = self.width
        self.width += count
        if name:
            self._named[name, count] = begin
        return begin


class MadeOf:
    """The modules, weights and hooks of a model of which a step has addresses and copies."""

    def __init__(self, model: nn.Module, hooked: Sequence[nn.Module], *, buffers: bool = False) -> None:
        """Hooks are those of the modules `hooked`."""
        kinds = ("_modules", "_parameters", "_buffers")[: 3 if buffers else 2]
        weights = (*model.parameters(), *(model.buffers() if buffers else ()))
        self._weights = [weight for weight in weights if not weight.is_inference()]
        self._tables = [table for module in model.modules() for kind in kinds if (table := getattr(module, kind))]
        self.hooks = [hooks for module in hooked for hooks in (module._forward_pre_hooks, module._forward_hooks)]
        self._held = [held for table in self._tables for held in table.values()]  # whose `id` is thus no other's
        self._made_of = self._present()

    @property
    def current(self) -> bool:
        """Return whether no weight has been trained or moved since, no module or weight exchanged, no hook added."""
        return self._made_of == self._present()

    def _present(self) -> tuple[list[int], list[int], list[int]]:
        held = [id(held) for table in self._tables for held in table.values()]
        held.append(sum(map(len, self.hooks)))
        return held, [p._version for p in self._weights], [p.data_ptr() for p in self._weights]


def fused_layers(
    model: nn.Module, x_BD: torch.Tensor, layers: Sequence[MixerState]
) -> tuple[torch.Tensor, tuple[MixerState, ...]] | None:
    """Logits [B, V] and states behind a token of each sequence; None where the modules of a `LanguageModel` are asked.

    These say which operation made a number that is not finite, have gradients, follow autocast, and draw from pools.
    """
    watch = current_watch()
    if model.training or x_BD.dtype != torch.float32 or not x_BD.is_cpu or not is_plain(x_BD):
        return None
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return None
    if watch is not None and watch.finite is not None:
        return None
    step = _steps.get(model)
    if step is None or not step.made_of.current:
        step = _steps[model] = _Step(model)
    return step.run(x_BD, layers)


class _Step:
    """The step of a model, where the kernel takes it."""

    def __init__(self, model: Any) -> None:
        self._mixers: list[Any] = [block.mixer for block in model.blocks]
        parts = [part for part in model.modules() if not isinstance(part, (type(model), nn.ModuleList, *_STEPPED))]
        self.made_of = MadeOf(model, parts, buffers=True)
        self._columns, self._guarded = Columns(), dict[int, slice]()  # layers' columns of guarded denominators
        self._vocabulary: int = model.vocab_size
        known = not any(self.made_of.hooks) and type(model.norm) in _NORMS and all(map(_is_known, model.blocks))
        operations = self._operations(model) if known else []
        taken = bool(operations) and takes(operations)
        self._step = DecodeStep(operations, self._columns.width, 0, torch.float32) if taken else None

    def _operations(self, model: Any) -> list[Operation]:
        columns, size, table = self._columns, model.hidden_size, model.unembedding or model.embedding
        x = columns.take(size)
        operations: list[Operation] = []
        for layer, block in enumerate(model.blocks):
            if isinstance(block.mixer, GatedDeltaNet):
                operations += _delta_rule(block.mixer, block.mixer_norm, columns)
            else:
                heads = block.mixer.config.num_heads
                guarded = columns.take(heads)
                self._guarded[layer] = slice(guarded, guarded + heads)
                operations += _random_features(block.mixer, block.mixer_norm, columns, guarded)
            operations += _mlp(block, columns)
        out = columns.take(self._vocabulary)
        return [*operations, *_products(x, size, model.norm, _matrix(table, out))]

    def run(
        self, x_BD: torch.Tensor, layers: Sequence[MixerState]
    ) -> tuple[torch.Tensor, tuple[MixerState, ...]] | None:
        """Return what `fused_layers` does."""
        if self._step is None:
            return None
        each = [_tensors(*pair) for pair in zip(self._mixers, layers, strict=True)]
        before = [tensor for tensors in each for tensor in tensors]
        if not all(each) or not self._step.fits(before, len(x_BD)):
            return None
        watch = current_watch()
        no_turns = (torch.empty((0, 0), device="cpu"),) * 2
        memory_BW, after = self._step.run(x_BD, before, no_turns, None if watch is None else watch.rows)
        if watch is not None:
            for layer, guarded in self._guarded.items():
                watch.layer = layer
                watch.count(memory_BW[:, guarded] > 0)
        if any(map(is_not, before, after)):
            written = iter(after)
            layers = [_behind(*pair, written) for pair in zip(self._mixers, layers, strict=True)]
        return memory_BW[:, -self._vocabulary :], tuple(layers)


_steps: WeakKeyDictionary[nn.Module, _Step] = WeakKeyDictionary()


def _is_known(block: Any) -> bool:
    """Return whether a block computes what operations of decode steps do."""
    parts = list(block.modules())
    if not all(type(part) in _KNOWN and not {"forward", "step"} & {*vars(part)} for part in parts):
        return False
    own, mixer, config = block.config, block.mixer, block.mixer.config
    if (own.norm_placement, own.residual) != ("pre", "sequential") or own.mlp.activation not in _ACTIVATIONS:
        return False
    if isinstance(mixer, GatedDeltaNet):
        return not config.allow_negative
    features = (config.feature, config.weighting, config.denominator.kind)
    return features == ("gaussian", "unit_norm", "floor") and config.rotary is None and not config.shared_gate


def _mlp(block: Any, columns: Columns) -> list[Operation]:
    mlp, inner, size = block.config.mlp, block.mlp_out.weight.shape[1], block.mlp_out.weight.shape[0]
    gate, up = columns.take(inner, "gate"), columns.take(inner, "up")
    into = [_matrix(block.mlp_in, gate, slice(inner)), _matrix(block.mlp_in, up, slice(inner, None))]
    if mlp.kind != "gated":
        into.pop()
    return [
        *_products(0, size, block.mlp_norm, *into, then=_ACTIVATIONS[mlp.activation]),
        Product(gate, inner, (_matrix(block.mlp_out, 0),), then=ADD),
    ]


def _random_features(own: RandomFeatureAttention, norm: nn.Module, columns: Columns, guarded: int) -> list[Operation]:
    config = own.config
    width, heads, size, values = config.hidden_size, config.num_heads, config.head_size, config.value_size
    query, seen = columns.take(sum(config.qkv_sizes), "queries, keys, values"), columns.take(heads * values, "seen")
    gate = 0 if own.gate is None else columns.take(heads, "gates")
    entering: list[Operation] = []
    if own.convolution is not None:
        mixed = columns.take(width, "convolved inputs")
        entering = [_convolution(own.convolution, 0, mixed, norm, then=STORE)]
    matrices = [_matrix(own.qkv, query), *([] if own.gate is None else [_matrix(own.gate, gate)])]
    entering += _products(mixed, width, None, *matrices) if entering else _products(0, width, norm, *matrices)
    w_HKD = own.feature_map().tensors()[0].detach().float().transpose(1, 2).contiguous()
    least, key = config.denominator.eps, query + heads * size
    attends = FourierAttention(query, key, key + heads * size, seen, size, values, w_HKD, least, guarded, gate)
    return [*entering, attends, *_products(seen, heads * values, None, _matrix(own.out, 0), then=ADD)]


def _delta_rule(own: GatedDeltaNet, norm: nn.Module, columns: Columns) -> list[Operation]:
    config = own.config
    width, heads, size, values = config.hidden_size, config.num_heads, config.key_size, config.value_size
    convolved, keys = config.convolved_size, config.num_key_heads * size
    entering = columns.take(convolved + heads * values, "convolved, gates")
    written, mixed = columns.take(2 * heads, "written, steps"), columns.take(convolved, "convolved")
    seen, head_H = columns.take(heads * values, "seen"), torch.arange(heads, device="cpu")
    query_H = mixed + head_H // (heads // config.num_key_heads) * size
    value_H, gate_H = mixed + 2 * keys + head_H * values, entering + convolved + head_H * values
    places_H6 = torch.stack([query_H, query_H + keys, value_H, gate_H, written + heads + head_H, written + head_H], 1)
    rates_H, root_K = -own.log_rate_H.detach().exp(), torch.full((size,), size**-0.5, device="cpu")
    assert isinstance(own.norm, GatedNorm) and isinstance(own.convolution, ShortConvolution)
    return [
        *_products(0, width, norm, _matrix(own.inputs, entering), _matrix(own.gate, written)),
        _convolution(own.convolution, entering, mixed),
        HeadRecurrence(
            places_H6, seen, size, values, rates_H, own.step_bias_H.detach(), norms=(root_K.square(), root_K),
            eps=KEY_EPS / size, out_norm=own.norm.weight.detach(), out_eps=own.norm.eps,
        ),
        *_products(seen, heads * values, None, _matrix(own.out, 0), then=ADD),
    ]  # fmt: skip


def _convolution(
    own: ShortConvolution, begin: int, out: int, norm: Any = None, then: int = ACTIVATIONS["silu"]
) -> Convolution:
    columns_C = begin + torch.arange(own.weight_KD.shape[1], device="cpu")
    bias_C = None if own.bias_D is None else own.bias_D.detach()
    return Convolution(columns_C, out, own.weight_KD.detach().flip(0), bias_C, *_norm(norm), then=then)


def _products(begin: int, inputs: int, norm: Any, *matrices: WeightMatrix, then: int = STORE) -> Iterator[Product]:
    """Products of the same inputs: bfloat16 weights and others take them in another order."""
    weight, eps, bias = _norm(norm)
    for narrow in (True, False):
        some = tuple(matrix for matrix in matrices if (matrix.stored_as == "bfloat16") is narrow)
        if some:
            yield Product(begin, inputs, some, weight, eps, then, norm_bias=bias)


def _norm(norm: Any) -> tuple[torch.Tensor | None, float, torch.Tensor | None]:
    if norm is None:
        return None, 0.0, None
    bias = norm.bias.detach() if isinstance(norm, nn.LayerNorm) else None
    return norm.weight.detach(), norm.eps, bias


def _matrix(layer: Any, out: int, rows: slice = slice(None)) -> WeightMatrix:
    weight, bias, scale = layer.weight, getattr(layer, "bias", None), getattr(layer, "scale", None)
    plain = type(layer) in _MATRICES and is_plain(weight)
    return WeightMatrix(
        weight.detach()[rows], out, None if bias is None else bias.detach()[rows],
        None if scale is None else scale[rows], form="" if plain else type(layer).__name__,
    )  # fmt: skip


def _tensors(mixer: Any, state: MixerState) -> tuple[torch.Tensor, ...]:
    """The tensors of a state in the order of a layer's operations; none of a state of another kind."""
    kind = RecurrentState if isinstance(mixer, GatedDeltaNet) else KernelState
    if type(state) is not kind or state.kind != mixer.config.kind:
        return ()
    if isinstance(state, RecurrentState):
        return state.tail_BTC, state.s_BHKV
    if state.position_B is not None or state.unit_BH is not None:
        return ()
    return *([] if mixer.convolution is None else [state.tail_BKD]), *state.attention.tensors()[:4]


def _behind(mixer: Any, state: MixerState, written: Iterator[torch.Tensor]) -> MixerState:
    if isinstance(state, RecurrentState):
        return replace(state, tail_BTC=next(written), s_BHKV=next(written))
    assert isinstance(state, KernelState)
    tail_BKD = state.tail_BKD if mixer.convolution is None else next(written)
    s_BHMV, z_BHM, mass_BH, log_decay_BH = islice(written, 4)
    attention = LinearState(s_BHMV, z_BHM, mass_BH, log_decay_BH, state.attention.reset_BH)
    return replace(state, tail_BKD=tail_BKD, attention=attention)

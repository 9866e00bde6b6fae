"""Decode steps of language models of ours as one call, of layers with random features or a gated delta rule.

A model is taken where every part of its layers is one that is known here and no hook looks at it; others keep their
modules.

Letters: B sequences, D model width, H heads.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice
from operator import is_, is_not
from typing import Any, cast

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

# They run by `step`, of which their hooks are not told.
_STEPPED = (Block, RandomFeatureAttention, GatedDeltaNet, ShortConvolution)
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
    """A model as it was when a step took addresses of its weights, and perhaps copies."""

    def __init__(self, model: nn.Module, called: Sequence[nn.Module], *, buffers: bool = False) -> None:
        """Hooks on the modules `called` count, and as weights perhaps `buffers`."""
        modules, kinds = list(model.modules()), ("_modules", "_parameters", "_buffers")[: 3 if buffers else 2]
        self._weights = [*model.parameters(), *(model.buffers() if buffers else ())]
        self._versions = [weight for weight in self._weights if not weight.is_inference()]
        self._tables = [table for module in modules for kind in kinds if (table := getattr(module, kind))]
        self.hooks = [hooks for module in called for hooks in (module._forward_pre_hooks, module._forward_hooks)]
        self._dicts = [*self._tables, *self.hooks, *map(vars, modules)]  # a patched function is one entry more
        self._held = list(chain.from_iterable(map(dict.values, self._tables)))
        self._made_of = self._present()

    @property
    def current(self) -> bool:
        """Return whether no weight was trained or moved since, no module or weight exchanged, nothing hooked.

        Of what is written through `.data`, and of inference tensors, it is only seen where they lie.
        """
        held = chain.from_iterable(map(dict.values, self._tables))
        return self._made_of == self._present() and all(map(is_, held, self._held))

    def _present(self) -> tuple[list[int], ...]:
        versions = [weight._version for weight in self._versions]
        return versions, list(map(torch.Tensor.data_ptr, self._weights)), list(map(len, self._dicts))


class FusedLayers:
    """The step of a model, where the kernel takes it; it reads all weights where they lie. A copy of it is None."""

    def __init__(self, model: Any) -> None:
        self._mixers: list[Any] = [block.mixer for block in model.blocks]
        called = [part for part in model.modules() if not isinstance(part, (type(model), nn.ModuleList, *_STEPPED))]
        self._made_of = MadeOf(model, called, buffers=True)
        self._columns, self._guarded = Columns(), dict[int, slice]()  # layers' columns of guarded denominators
        self._vocabulary: int = model.vocab_size
        around = [model, model.norm, model.unembedding or model.embedding]
        patched = any(self._made_of.hooks) or any(map(_is_patched, around))
        known = not patched and _is_norm(model.norm) and all(map(_is_known, model.blocks))
        operations = self._operations(model) if known else []
        taken = bool(operations) and takes(operations)
        self._step = DecodeStep(operations, self._columns.width, 0, torch.float32) if taken else None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()

    @staticmethod
    def of(model: Any, x_BD: torch.Tensor, made: "FusedLayers | None") -> "FusedLayers | None":
        """The step of a `LanguageModel` from x on, `made` if it is still its own; None where its modules are needed.

        They say which operation made a number that is not finite, have gradients, follow autocast, and draw from pools.
        """
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return None
        if model.training or x_BD.dtype != torch.float32 or not x_BD.is_cpu or not is_plain(x_BD):
            return None
        watch = current_watch()
        if nn.modules.module._has_any_global_hook() or (watch is not None and watch.finite is not None):
            return None
        return made if made is not None and made._made_of.current else FusedLayers(model)

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
        read = replace(_matrix(table, out, self._vocabulary), bias=None)
        return [*operations, *_products(x, size, model.norm, read)]

    def run(
        self, x_BD: torch.Tensor, layers: Sequence[MixerState]
    ) -> tuple[torch.Tensor, tuple[MixerState, ...]] | None:
        """Logits [B, V] and states behind a token of each sequence; None where the kernel does not take them."""
        if self._step is None:
            return None
        tensors = [_tensors(*pair) for pair in zip(self._mixers, layers, strict=True)]
        before = list(chain.from_iterable(tensors))
        if not all(tensors) or not self._step.fits(before, len(x_BD)):
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
        return memory_BW[:, -self._vocabulary :].contiguous(), tuple(layers)


def _is_patched(part: nn.Module) -> bool:
    return bool({"forward", "step", "readout"} & {*vars(part)})


def _is_norm(norm: nn.Module) -> bool:
    """Return whether it has all that kernels read."""
    learned = ("weight", "bias", "eps") if type(norm) is nn.LayerNorm else ("weight", "eps")
    return type(norm) in _NORMS and all(getattr(norm, name) is not None for name in learned)


def _is_known(block: Any) -> bool:
    """Return whether a block computes what operations of decode steps do."""
    if any(type(part) not in _KNOWN or _is_patched(part) for part in block.modules()):
        return False
    own, mixer, config = block.config, block.mixer, block.mixer.config
    if not (_is_norm(block.mixer_norm) and _is_norm(block.mlp_norm)):
        return False
    if (own.norm_placement, own.residual) != ("pre", "sequential") or own.mlp.activation not in _ACTIVATIONS:
        return False
    if isinstance(mixer, GatedDeltaNet):
        return not config.allow_negative
    features = (config.feature, config.weighting, config.denominator.kind)
    return features == ("gaussian", "unit_norm", "floor") and config.rotary is None and not config.shared_gate


def _mlp(block: Any, columns: Columns) -> list[Operation]:
    mlp, (size, inner) = block.config.mlp, block.mlp_out.weight.shape
    gate, up = columns.take(inner, "gate"), columns.take(inner, "up")
    into = [_matrix(block.mlp_in, gate, inner)]
    if mlp.kind == "gated":
        into = [
            _matrix(block.mlp_in, gate, 2 * inner, slice(inner)),
            _matrix(block.mlp_in, up, 2 * inner, slice(inner, None)),
        ]
    return [
        *_products(0, size, block.mlp_norm, *into, then=_ACTIVATIONS[mlp.activation]),
        Product(gate, inner, (_matrix(block.mlp_out, 0, block.mixer.config.hidden_size),), then=ADD),
    ]


def _random_features(own: RandomFeatureAttention, norm: nn.Module, columns: Columns, guarded: int) -> list[Operation]:
    config = own.config
    width, heads, size, values = config.hidden_size, config.num_heads, config.head_size, config.value_size
    query, seen = columns.take(sum(config.qkv_sizes), "queries, keys, values"), columns.take(heads * values, "seen")
    gate, key = columns.take(heads, "gates") if own.gate is not None else 0, query + heads * size
    entering, begin, before = list[Operation](), 0, cast(Any, norm)
    if own.convolution is not None:
        begin, before = columns.take(width, "convolved inputs"), None
        entering.append(_convolution(own.convolution, 0, begin, norm, then=STORE))
    matrices = [_matrix(own.qkv, query, sum(config.qkv_sizes))]
    matrices += [] if own.gate is None else [_matrix(own.gate, gate, heads)]
    attends = FourierAttention(
        query, key, key + heads * size, seen, size, values, own.w_HDK, own.sigma_H1K.detach(), config.denominator.eps,
        guarded, gate,
    )  # fmt: skip
    out = _products(seen, heads * values, None, _matrix(own.out, 0, width), then=ADD)
    return [*entering, *_products(begin, width, before, *matrices), attends, *out]


def _delta_rule(own: GatedDeltaNet, norm: nn.Module, columns: Columns) -> list[Operation]:
    config = own.config
    width, heads, size, values = config.hidden_size, config.num_heads, config.key_size, config.value_size
    convolved, keys, wide = config.convolved_size, config.num_key_heads * size, heads * values
    entering, written = columns.take(convolved + wide, "convolved, gates"), columns.take(2 * heads, "written, steps")
    mixed, seen = columns.take(convolved, "convolved"), columns.take(wide, "seen")
    head_H = torch.arange(heads, device="cpu")
    query_H = mixed + head_H // (heads // config.num_key_heads) * size
    value_H, gate_H = mixed + 2 * keys + head_H * values, entering + convolved + head_H * values
    places_H6 = torch.stack([query_H, query_H + keys, value_H, gate_H, written + heads + head_H, written + head_H], 1)
    root_K = torch.full((size,), size**-0.5, device="cpu")
    assert isinstance(own.norm, GatedNorm) and isinstance(own.convolution, ShortConvolution)
    matrices = _matrix(own.inputs, entering, convolved + wide), _matrix(own.gate, written, 2 * heads)
    return [
        *_products(0, width, norm, *matrices),
        _convolution(own.convolution, entering, mixed),
        HeadRecurrence(
            places_H6, seen, size, values, own.log_rate_H.detach(), own.step_bias_H.detach(),
            norms=(root_K.square(), root_K), eps=KEY_EPS / size, out_norm=own.norm.weight.detach(),
            out_eps=own.norm.eps,
        ),
        *_products(seen, wide, None, _matrix(own.out, 0, width), then=ADD),
    ]  # fmt: skip


def _convolution(
    own: ShortConvolution, begin: int, out: int, norm: Any = None, then: int = ACTIVATIONS["silu"]
) -> Convolution:
    columns_C = begin + torch.arange(own.weight_KD.shape[1], device="cpu")
    bias_C = None if own.bias_D is None else own.bias_D.detach()
    return Convolution(columns_C, out, own.weight_KD.detach(), bias_C, *_norm(norm), then=then, newest_first=True)


def _products(begin: int, inputs: int, norm: Any, *matrices: WeightMatrix, then: int = STORE) -> Iterator[Product]:
    """A product by bfloat16 weights and one by others: these read their inputs in different orders."""
    weight, eps, bias = _norm(norm)
    for narrow in (True, False):
        some = tuple(matrix for matrix in matrices if (matrix.stored_as == "bfloat16") is narrow)
        if some:
            yield Product(begin, inputs, some, weight, eps, then, norm_bias=bias)


def _norm(norm: Any) -> tuple[torch.Tensor | None, float, torch.Tensor | None]:
    if norm is None:
        return None, 0.0, None
    return norm.weight.detach(), norm.eps, norm.bias.detach() if isinstance(norm, nn.LayerNorm) else None


def _matrix(layer: Any, out: int, outputs: int, rows: slice = slice(None)) -> WeightMatrix:
    """These rows of a layer's weights, of a form that the kernel takes if there are `outputs` in all."""
    weight, bias, scale = layer.weight, getattr(layer, "bias", None), getattr(layer, "scale", None)
    known = type(layer) in _MATRICES and is_plain(weight) and len(weight) == outputs
    return WeightMatrix(
        weight.detach()[rows], out, None if bias is None else bias.detach()[rows],
        None if scale is None else scale[rows], form="" if known else type(layer).__name__,
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

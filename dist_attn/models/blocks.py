"""The block: x + mixer(norm(x)), x + MLP(norm(x)), or norm(x + mixer(x)), norm(x + MLP(x)); norms of each token.

Turner's printed normalisation runs over the sequence instead, which would leak the future into a causal model. A block
can do without its activations (activation checkpointing): `recompute_layers`.

Letters: B batch, L tokens on this rank, D model width.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, TypeVarTuple, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dist_attn.mixers import MixerConfig, MixerState, build_mixer
from dist_attn.mixers.linear_layers import Linear
from dist_attn.mixers.softmax import SoftmaxRows, SoftmaxSlots, SoftmaxState
from dist_attn.model_config.language_model import BlockConfig, NormConfig
from dist_attn.models.dropout import Dropout
from dist_attn.ops import SequenceOps, current_watch, watching

Given = TypeVarTuple("Given")
Result = TypeVar("Result")


class Recomputable(nn.Module):
    """A layer that can do without its activations; `recompute_layers` makes it so."""

    recomputes = False

    def _run(self, compute: Callable[[*Given], Result], *args: *Given) -> Result:
        """Run `compute`; where this layer recomputes, its backward pass runs it once more."""
        if not (self.recomputes and torch.is_grad_enabled()):
            return compute(*args)
        again = False

        def run(*args: *Given) -> Result:
            nonlocal again
            if not again:
                again = True
                return compute(*args)
            with watching(None):  # it was watched the first time
                return compute(*args)

        # No layer draws from a generator (dropout is a function), so there is none to wind back. `checkpoint` stops
        # once it has the last tensor that it needs: one of the MLP's, which lies behind every exchange of the layer, on
        # every rank.
        result: Result = checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False)
        return result


def recompute_layers(model: nn.Module, recomputes: bool = True) -> int:
    """Let every layer of the model recompute its activations in the backward pass, or none; how many layers it has.

    Losses and gradients are bitwise those without. Across ranks the recomputation exchanges what the forward pass did,
    under the same labels: every rank enters it at the same place of its backward pass, empty ranks included.

    Cost: one more forward pass of each layer, and its exchanges once more; of a layer's activations only its input
    stays until the backward pass.
    Reference: Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost.
    """
    layers = [module for module in model.modules() if isinstance(module, Recomputable)]
    for layer in layers:
        layer.recomputes = recomputes
    return len(layers)


def build_norm(config: NormConfig, size: int) -> nn.LayerNorm | nn.RMSNorm:
    """The norm that `config.kind` names, over `size` features."""
    return nn.LayerNorm(size, config.eps) if config.kind == "layer" else nn.RMSNorm(size, config.eps)


class Block(Recomputable):
    """One layer of a model over any mixer.

    Reference: Introduction to Transformers, Sec. 3 (with per-token LayerNorm); Vaswani et al. 2017 (norms after).
    """

    def __init__(self, mixer: MixerConfig, mlp_size: int, config: BlockConfig | None = None) -> None:
        super().__init__()
        self.config = BlockConfig() if config is None else config
        size, mlp = mixer.hidden_size, self.config.mlp
        self.mixer_norm = build_norm(self.config.norm, size)
        self.mixer = build_mixer(mixer)
        self.mlp_norm = build_norm(self.config.norm, size)
        self.mlp_in = Linear(size, mlp_size * (2 if mlp.kind == "gated" else 1), bias=mlp.bias)
        self.mlp_out = Linear(mlp_size, size, bias=mlp.bias)
        self.mixer_dropout, self.mlp_dropout = Dropout(), Dropout()

    def forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None = None
    ) -> tuple[torch.Tensor, MixerState]:
        """The tokens after this layer and the mixer's state after the last global one."""
        return self._run(self._forward, x_BLD, ops, state)

    def _forward(
        self, x_BLD: torch.Tensor, ops: SequenceOps, state: MixerState | None
    ) -> tuple[torch.Tensor, MixerState]:
        mixed_BLD, after = self.mixer(self._before(self.mixer_norm, x_BLD), ops, state)
        return self._after_mixing(x_BLD, mixed_BLD, ops), after

    def step(self, x_BD: torch.Tensor, state: MixerState) -> tuple[torch.Tensor, MixerState]:
        """`forward` for one token."""
        mixed_BD, after = self.mixer.step(self._before(self.mixer_norm, x_BD), state)
        return self._after_mixing(x_BD, mixed_BD), after

    def _after_mixing(self, x: torch.Tensor, mixed: torch.Tensor, ops: SequenceOps | None = None) -> torch.Tensor:
        mixed = self.mixer_dropout(mixed, ops)
        if self.config.residual == "parallel":
            made: torch.Tensor = self.mlp_dropout(self._mlp(self.mlp_norm(x)), ops)
            return x + mixed + made
        return self.feed_forward(self._after(self.mixer_norm, x + mixed), ops)

    def feed_forward(self, x: torch.Tensor, ops: SequenceOps | None = None) -> torch.Tensor:
        """x + MLP(norm(x)), or norm(x + MLP(x)); `ops` are those of whole sequences, which alone are dropped from."""
        return self._after(self.mlp_norm, x + self.mlp_dropout(self._mlp(self._before(self.mlp_norm, x)), ops))

    def _before(self, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = norm(x) if self.config.norm_placement == "pre" else x
        return normed

    def _after(self, norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
        normed: torch.Tensor = norm(x) if self.config.norm_placement == "post" else x
        return normed

    def _mlp(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.mlp_in(x)
        if self.config.mlp.kind == "gated":
            gate, inner = inner.chunk(2, dim=-1)
            inner = self._activate(gate) * inner
        else:
            inner = self._activate(inner)
        out: torch.Tensor = self.mlp_out(inner)
        return out

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        match self.config.mlp.activation:
            case "gelu_tanh":
                return F.gelu(x, approximate="tanh")
            case "gelu":
                return F.gelu(x)
            case "silu":
                return F.silu(x)
            case "relu":
                return F.relu(x)


def watched(blocks: nn.ModuleList, before: int = 0) -> Iterator[Block]:
    """The blocks in order; the current watch, if any, has the number of the one that runs, behind `before` others."""
    watch = current_watch()
    for layer, block in enumerate(cast(list[Block], list(blocks))):
        if watch is not None:
            watch.layer = before + layer
        yield block


def stream_through(
    blocks: nn.ModuleList, x_BLD: torch.Tensor, ops: SequenceOps, states: Sequence[MixerState], before: int = 0
) -> tuple[torch.Tensor, tuple[MixerState, ...]]:
    """The tokens after all blocks, and each mixer's state after the last global one; `before` as in `watched`."""
    layers = []
    with ops.deferred_states():
        for block, state in zip(watched(blocks, before), states, strict=True):
            x_BLD, after = block(x_BLD, ops, state)
            layers.append(contiguous_state(after))
    return x_BLD, tuple(layers)


def contiguous_state(state: MixerState) -> MixerState:
    """Return a state of the same values, each tensor in order in memory.

    How a product is summed up may depend on how its factors lie, and a restored state must go on with the same bits.
    Keys and values with room behind them lie as their number says, wherever they come from.
    """
    has_room = isinstance(state, SoftmaxState) and state.cache.room is not None
    if has_room or isinstance(state, SoftmaxRows | SoftmaxSlots):
        return state
    return state.replace(tuple(t.contiguous() for t in state.tensors()))

"""Transformers' modules over our operations: which functions are replaced, where, and by what.

Each function is bound once in the module file that calls it, for the whole process; outside of a pass of ours it does
what it did before. Where a class computes along the sequence in its own `forward`, objects of it are bound one by one.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.moe import ExpertsInterface

from dist_attn.adapters import modules, operations
from dist_attn.adapters.experts import experts, step_experts, takes_step_experts
from dist_attn.adapters.passes import current_pass, either
from dist_attn.errors import ConfigError, ModelFolderError
from dist_attn.shipped.downloaded import SUPPORTED, check_supported

ATTENTION = "dist_attn"
"""The name by which transformers finds attention over the pass that runs."""
EXPERTS, GROUPED = "dist_attn", "grouped_mm"
"""The names of ours and of transformers' own way to compute experts."""

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": operations.causal_conv1d,
    "torch_chunk_gated_delta_rule": operations.delta_rule,
    "chunk_kimi_delta_attention": operations.delta_rule,
    "mamba2_chunk_scan": operations.mamba2_scan,
    "mamba_selective_scan": operations.mamba_scan,
    "load_balancing_loss_func": operations.load_balance,
    # Convolution and scan in one, which training asks first: without an answer both are called by themselves.
    "mamba2_split_conv1d_scan_combined": operations.no_answer,
    "mamba_inner_fn": operations.no_answer,
}

_OBJECTS: dict[str, Callable[[nn.Module], None]] = {
    "Linear": modules.linear,
    "MiniMaxLightningAttention": modules.minimax_lightning_attention,
    "RecurrentGemmaRecurrentBlock": modules.recurrent_gemma_block,
    "FalconH1Model": modules.falcon_h1_model,
    "xLSTMModel": modules.xlstm_model,
    "xLSTMBackend": modules.xlstm_backend,
}


_REPLACED = ("forward", "_rnn_scan", "embedding_multiplier", "config")
"""The attributes of modules that binding sets."""


class Binding:
    """A model as it was before it was bound, and how to get back there."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._attention: Any = model.config._attn_implementation
        self._experts = model.get_experts_implementation()[""]
        self._own = [(m, {name: vars(m)[name] for name in _REPLACED if name in vars(m)}) for m in model.modules()]

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let the model compute by itself meanwhile, as it did before."""
        self._model.set_attn_implementation(self._attention)
        try:
            yield
        finally:
            self._model.set_attn_implementation(ATTENTION)

    def release(self) -> None:
        """Give every module its own functions back."""
        self._model.set_attn_implementation(self._attention)
        self._model.set_experts_implementation(self._experts)
        for module, own in self._own:
            for name in _REPLACED:
                vars(module).pop(name, None)
            vars(module).update(own)


def bind(model: PreTrainedModel) -> Binding:
    """Let what mixes along the sequence in this model take a pass of ours, whatever attention it was loaded with.

    Raises: ConfigError for a model of a type that is not supported, or part of which keeps another attention.
    """
    kind = model.config.model_type
    if kind not in SUPPORTED:
        raise ConfigError(f"a model of type {kind!r} was given; supported are {', '.join(SUPPORTED)}")
    try:
        check_supported(type(model.config).__name__, kind, model.config.to_dict())
    except ModelFolderError as error:
        raise ConfigError(str(error)) from None
    binding = Binding(model)
    model.set_attn_implementation(ATTENTION)
    for part in model.modules():
        kept = part.config._attn_implementation if isinstance(part, PreTrainedModel) else ATTENTION
        if kept != ATTENTION:
            binding.release()
            raise ConfigError(
                f"{type(part).__name__} keeps its attention {kept!r}, which sees the tokens of one rank alone"
            )
    for file in {sys.modules[type(module).__module__] for module in model.modules()}:
        if file.__name__.startswith("transformers.models."):
            _bind_functions(file)
    if model.get_experts_implementation()[""] == GROUPED:
        model.set_experts_implementation(EXPERTS)
    for module in model.modules():
        bind_object = _OBJECTS.get(type(module).__name__)
        if bind_object is not None:
            bind_object(module)
    return binding


def _bind_functions(file: ModuleType) -> None:
    for name, ours in _FUNCTIONS.items():
        theirs = getattr(file, name, None)
        if theirs is not None and not hasattr(theirs, "bound_by_dist_attn"):
            setattr(file, name, either(ours, theirs))


def _no_attention(*_: Any, **__: Any) -> tuple[torch.Tensor, None]:
    raise RuntimeError(
        f"attention {ATTENTION!r} was called outside of a pass: call the whole model, and let its own "
        "activation_checkpointing_enable compute layers again"
    )


def _experts(
    module: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Experts [L, D], in a decode step by products whose bits do not depend on other rows, or else row by row.

    A product's last bits depend on how many rows it has, and here these are the tokens of all sequences that chose an
    expert: what a sequence draws would depend on those beside it.
    """
    one, parts = current_pass(), (hidden_states, top_k_index, top_k_weights)
    if one is None or not one.step:
        return experts(module, *parts)
    if takes_step_experts(module, hidden_states):
        return step_experts(module, *parts)
    return torch.cat([experts(module, *row) for row in zip(*(part.split(1) for part in parts), strict=True)])


# No mask is registered: operations know by themselves who sees whom, and before it calls for one transformers looks at
# the positions of the pass, for which the host would wait.
AttentionInterface.register(ATTENTION, either(operations.attention, _no_attention))
ExpertsInterface.register(EXPERTS, _experts)

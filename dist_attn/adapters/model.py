"""A model of transformers with the interface of `LanguageModel`: its own modules, our operations along the sequence.

Shape letters: B batch, L tokens on this rank, D model width, V vocabulary.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import logging

from dist_attn.adapters.binding import ATTENTION, bind
from dist_attn.adapters.fused_step import FusedStep, fused_step
from dist_attn.adapters.passes import Pass, current_pass, running
from dist_attn.adapters.spread import SpreadLayers, owners_of, rank_of
from dist_attn.adapters.weights import (
    LeftOut,
    MappedFiles,
    ReadWhenAsked,
    forget_left_out,
    hold_as_int8,
    keep_blocks,
    make_model,
)
from dist_attn.comm import Communicator
from dist_attn.mixers import MixerState
from dist_attn.mixers.softmax import SoftmaxState
from dist_attn.models.causal_model import CausalModel, ModelState
from dist_attn.ops import KeyValueCache, LocalSequenceOps, SequenceOps
from dist_attn.shipped.downloaded import read_downloaded
from dist_attn.shipped.stored_tensors import read_stored_blocks
from dist_attn.wire.choices import WeightPrecision


class AdaptedModel(CausalModel):
    """Reads tokens and scores the next one; parameters and pointwise work are transformers'.

    The model given is bound: its attention is of passes from then on, and calling it by itself raises RuntimeError.
    Gradients flow through `hidden` and `readout`, over any number of ranks. With `owners`, the rank of each layer,
    every rank of `comm` makes the same passes, and steps from the states of its own layers alone, without gradients.

    Raises: ConfigError as `bind`.
    """

    _base: nn.Module

    def __init__(
        self, model: PreTrainedModel, owners: list[int] | None = None, comm: Communicator | None = None
    ) -> None:
        super().__init__()
        bind(model)
        self.inner = model.eval()
        base = cast(nn.Module, model.get_decoder())
        vars(self)["_base"] = base  # no module of its own: a weight of `inner` has one name
        _let_through(base)
        for number, layer in enumerate(self.parts):
            _let_read(layer, number)
        text = model.config.get_text_config()
        self.hidden_size, self.vocab_size = int(text.hidden_size), int(text.vocab_size)
        self._first: tuple[MixerState, ...] | None = None
        self._spread: SpreadLayers | None = None
        if owners is not None and comm is not None:
            self._spread = SpreadLayers(model, self.parts, owners, comm)
        self._fused = self._fused_step()

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        # Weights of other ranks are on `meta` here, and stay there.
        super()._apply(lambda t: t if t.is_meta else fn(t), recurse)  # type: ignore[no-untyped-call]
        self._fused = self._fused_step()
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:  # type: ignore[override]
        """The weights that are learned and the buffers, each by one name; frozen weights are in the folder."""
        kept = {name for name, weight in self.named_parameters() if weight.requires_grad}
        kept |= {name for name, _ in self.named_buffers()}
        return {name: tensor for name, tensor in super().state_dict(*args, **kwargs).items() if name in kept}

    @property
    def parts(self) -> list[nn.Module]:
        return [layer for child in self._base.children() if isinstance(child, nn.ModuleList) for layer in child]

    @property
    def layers_of_ranks(self) -> tuple[slice, ...] | None:
        if self._spread is None:
            return None
        self.initial_state(1)
        return self._spread.operations_of_ranks

    @property
    def kinds(self) -> list[str]:
        # Of operations it is known only whose they are.
        return [self.inner.config.get_text_config().model_type] * len(self.initial_state(1).layers)

    @property
    def device(self) -> torch.device:
        return cast(torch.device, self.inner.get_input_embeddings().weight.device)

    def hidden(
        self, tokens_BL: torch.Tensor, ops: SequenceOps | None = None, state: ModelState | None = None
    ) -> tuple[torch.Tensor, ModelState]:
        ops = LocalSequenceOps() if ops is None else ops
        tokens_BL = self.check(tokens_BL, ("batch", "length"), state)
        batch, length = tokens_BL.shape
        state = self.initial_state(batch) if state is None else state
        if not length:
            tokens_BL = tokens_BL.new_zeros(batch, 1)
        positions_L = (
            ops.positions(length, self.device) if length else torch.zeros(1, dtype=torch.int64, device=self.device)
        )
        one, positions_BL = Pass(ops, length, state.layers), state.position_B[:, None] + positions_L
        plain = torch.is_grad_enabled() or torch.compiler.is_compiling()  # while weights change it is not made anew
        fused = None if plain else self._current_step()
        one.reader = None if fused is None else fused.reader(one, positions_BL)
        with ops.deferred_states():
            h_BLD = self._run(one, positions_BL, input_ids=tokens_BL)
        after = ModelState(one.states_after(), state.position_B + ops.total_length(length))
        return h_BLD[:, :length], after

    def readout(self, h: torch.Tensor) -> torch.Tensor:
        rows = h.reshape(1, -1, h.shape[-1])
        if not rows.shape[1]:
            return h[..., :1].expand(*h.shape[:-1], self.vocab_size)  # of the graph of the pass, which has a way back
        with running(Pass(LocalSequenceOps(), rows.shape[1], read=rows, step=h.dim() == 2)):
            logits = self.inner(inputs_embeds=rows, use_cache=False).logits
        return cast(torch.Tensor, logits).reshape(*h.shape[:-1], -1)

    def embed_step(self, token_B: torch.Tensor, state: ModelState) -> torch.Tensor:
        token_B = self.check(token_B, ("batch",), state)
        x_BD: torch.Tensor = self.inner.get_input_embeddings()(token_B)
        return x_BD

    def step_layers(self, x_BD: torch.Tensor, state: ModelState) -> tuple[torch.Tensor, tuple[MixerState, ...]]:
        fused = self._current_step()
        found = None if fused is None else fused.step(x_BD, state.layers, state.position_B)
        if found is not None:
            return found
        one = Pass(LocalSequenceOps(), 1, state.layers, step=True)
        h_B1D = self._run(one, state.position_B[:, None], inputs_embeds=x_BD[:, None])
        if self._spread is not None and not self._spread.reads_out:
            return h_B1D[:, 0, :0], one.states_after()
        return self.readout(h_B1D[:, 0]), one.states_after()

    def initial_state(self, batch: int) -> ModelState:
        # The state after one token, with no keys and sums of zero.
        if self._first is None:
            one = Pass(LocalSequenceOps(), 1)
            token_11 = torch.zeros((1, 1), dtype=torch.int64, device=self.device)
            with torch.inference_mode(False), torch.no_grad():
                self._run(one, torch.zeros_like(token_11), input_ids=token_11)
            self._first = tuple(map(_emptied, one.after))
        layers = tuple(
            s.replace(tuple(t.expand(batch, *t.shape[1:]).contiguous() for t in s.tensors())) for s in self._first
        )
        return ModelState(layers, torch.zeros(batch, dtype=torch.int64, device=self.device))

    def _fused_step(self) -> FusedStep | None:
        return fused_step(self.inner) if self._spread is None else None

    def _current_step(self) -> FusedStep | None:
        if self._fused is not None and not self._fused.made_of.current:
            self._fused = fused_step(self.inner)
        return self._fused

    def _run(self, one: Pass, positions_BL: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
        with running(one):
            h_BLD: torch.Tensor = self._base(**inputs, position_ids=positions_BL, use_cache=False)[0]
        return h_BLD


def load_adapted_model(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    weights: WeightPrecision = "float32",
    over: Communicator | None = None,
) -> AdaptedModel:
    """The model of a folder of transformers, as it was downloaded, with its weights in `dtype`.

    With `weights` "bfloat16" they are in bfloat16 whatever `dtype` says; with "int8" so is everything but the linear
    layers, see `adapters.weights`. Nothing is fetched and no code of the folder is run. With `over` this rank of the
    group reads and holds the weights of its own run of layers alone, see `adapters.spread`.

    Raises: ModelFolderError as `read_downloaded` and `make_model`; InputError for weights that are not finite and were
        to be held in 8 bits; ConfigError as `owners_of` and `SpreadLayers`.
    """
    logging.disable_progress_bar()
    dtype = dtype if weights == "float32" else torch.bfloat16
    described, files = read_downloaded(folder), MappedFiles(folder)
    owners = None if over is None else owners_of(described, over.size)
    stored: dict[str, ReadWhenAsked | torch.Tensor] = {}
    for name, tensor in described.tensors.items():
        away = owners is not None and over is not None and rank_of(name, tensor.shape, owners) not in (None, over.rank)
        stored[name] = LeftOut.of(tensor) if away else ReadWhenAsked(files, tensor)
    model = make_model(folder, stored, dtype, attention=ATTENTION)
    forget_left_out(model)
    if weights == "int8":
        hold_as_int8(model, files)
    elif over is None:
        keep_blocks(model, files, read_stored_blocks(folder))
    files.drop_pages()
    return AdaptedModel(model, owners, over)


def _let_through(base: nn.Module) -> None:
    """Give back the hidden states of the pass where it has some, so that what follows makes logits of them alone."""
    compute = base.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        one = current_pass()
        return compute(*args, **kwargs) if one is None or one.read is None else _Output(last_hidden_state=one.read)

    base.forward = forward


def _let_read(layer: nn.Module, number: int) -> None:
    """Let the pass read its tokens in the place of a layer, where it has something that does."""
    compute = layer.forward

    def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        one = current_pass()
        if one is None or one.reader is None:
            return compute(hidden_states, *args, **kwargs)
        return one.reader(number, hidden_states)

    layer.forward = forward


class _Output(BaseModelOutput):  # type: ignore[misc]
    """The output of a base model, with the hidden states alone; what else a model looks for is None."""

    def __getattr__(self, name: str) -> None:
        return None


def _emptied(state: MixerState) -> MixerState:
    if isinstance(state, SoftmaxState):
        k_BGSK, v_BGSV, tail = state.tensors()
        return SoftmaxState(KeyValueCache(k_BGSK[:, :, :0], v_BGSV[:, :, :0]), tail, state.window)
    return state.replace(tuple(map(torch.zeros_like, state.tensors())))

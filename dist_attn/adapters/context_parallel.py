"""Transformers' own models trained over ranks: each holds a slice of the sequence, gradients are those of one process.

The model stays transformers': its class, parameters and `state_dict`. What mixes along the sequence in it runs over the
ranks while it is called with what `ContextParallel.shard` made of a batch; see `adapters.binding`.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from transformers import PreTrainedModel

from dist_attn.adapters.binding import Binding, bind
from dist_attn.adapters.passes import Pass, current_pass, running
from dist_attn.comm import Communicator
from dist_attn.comm.torch_dist import communicator_of
from dist_attn.errors import ConfigError, InputError
from dist_attn.layout import SequenceLayout
from dist_attn.mixers import MixerState
from dist_attn.ops.processor import give_back_freed
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.sharded.gradients import drop_missing, sum_gradients

__all__ = ["ContextParallel", "Recomputation", "SequenceSlice", "context_parallel"]

IGNORED = -100  # the label that counts for nothing
KNOWN = {
    "input_ids", "inputs_embeds", "labels", "attention_mask", "position_ids", "cu_seq_lens_q", "cu_seq_lens_k",
    "max_length_q", "max_length_k", "seq_idx", "num_items_in_batch",
}  # fmt: skip
SLICE = "sequence_slice"
PASSED_ON = {"labels", "input_ids", "inputs_embeds", "position_ids", "output_router_logits", "use_cache", "return_dict"}

Function = TypeVar("Function", bound=Callable[..., Any])
# torch.compile takes the parts of the model that is called inside, between operations along the sequence.
_around_compiled: Callable[[Function], Function] = torch.compiler.disable(recursive=False, reason="a pass begins")
_never_compiled: Callable[[Function], Function] = torch.compiler.disable(reason="ranks exchange")


class SequenceSlice:
    """The part of a batch that this rank has: how the sequence is cut, and how many labels all ranks have."""

    # No dataclass: FSDP2 makes those that a model is called with anew, with their tensors in another precision.
    def __init__(self, layout: SequenceLayout, labels: torch.Tensor | float | None) -> None:
        self.layout, self.labels = layout, labels


def context_parallel(
    model: PreTrainedModel, group: Any, *, reduction: Literal["sum", "mean"] = "sum"
) -> "ContextParallel":
    """Let this model train on sequences that are cut across the ranks of `group`.

    `group` is a process group of torch.distributed, a mesh of one dimension or a `Communicator`. `reduction` says how
    gradients of the group's ranks come together: "sum" where you add them up, "mean" where a wrapper averages them, as
    FSDP2 and DistributedDataParallel do over all ranks that they span.

    Raises: ConfigError for a model of a type that is not supported, or with dropout in its attention.
    """
    comm = group if isinstance(group, Communicator) else communicator_of(group)
    return ContextParallel(model, comm, reduction)


class ContextParallel:
    """A model whose calls with `shard(batch)` run over the ranks of a communicator; made by `context_parallel`."""

    def __init__(self, model: PreTrainedModel, comm: Communicator, reduction: Literal["sum", "mean"] = "sum") -> None:
        if reduction not in ("sum", "mean"):
            raise ConfigError(f"reduction {reduction!r} was given; use 'sum' or 'mean'")
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        _check_dropout(base)
        if isinstance(vars(base).get("forward"), partial):
            raise ConfigError("the model is trained over ranks already; release() that first")
        self._model, self._comm, self._scale = base, comm, comm.size if reduction == "mean" else 1
        self._binding: Binding | None = bind(base)
        self._compute, self._carried, self._begun = base.forward, _Carried(), False
        forward: Any = partial(_forward, self)
        forward.__signature__ = inspect.signature(base.forward)  # by which trainers choose what to hand over
        base.forward = forward
        if hasattr(base, "prepare_inputs_for_generation"):  # it makes masks for the attention that there is
            base.prepare_inputs_for_generation = partial(_suspended, self, base.prepare_inputs_for_generation)
        self._recompute = Recomputation(base)

    def shard(self, batch: Mapping[str, Any], lengths: Sequence[int] | None = None) -> dict[str, Any]:
        """This rank's part of a batch of whole sequences, as arguments for the model.

        `labels` are shifted before they are cut, and counted over all ranks. `attention_mask` may hide what lies behind
        the end of a sequence. Documents packed into one row are told by `position_ids` that begin anew,
        `cu_seq_lens_q` or `seq_idx`. `lengths` are the tokens of each rank; equal to one by default. All ranks give
        the same batch, which is compared in the first call.

        Raises: InputError for what cannot be cut, by its name; MismatchError on every rank for other batches.
        """
        unknown = sorted(name for name, value in batch.items() if value is not None and name not in KNOWN)
        if unknown:
            raise InputError(f"the batch has {', '.join(unknown)}; what is cut is {', '.join(sorted(KNOWN))}")
        given = {name: value for name, value in batch.items() if value is not None}
        tokens = given.get("input_ids", given.get("inputs_embeds"))
        if tokens is None or tokens.dim() < 2:
            raise InputError("the batch has neither input_ids [B, L] nor inputs_embeds [B, L, D]")
        rows, total = tokens.shape[:2]
        if not self._begun:
            self._comm.agree_on("batch of the first call", f"{list(tokens.shape)} {tokens.double().sum().item()!r}")
            self._begun = True
        hides = _hides(given.get("attention_mask"))
        if hides and self._model.config.get_text_config().to_dict().get("output_router_logits"):
            raise InputError("attention_mask hides tokens, which the balance of experts would count; pack the texts")
        if self._carried.on and given.keys() & {"position_ids", "seq_idx", "cu_seq_lens_q"}:
            raise InputError("documents were given inside carry(), which goes on with one text; leave position_ids out")
        documents = _documents(given, rows, total)
        cuts = SequenceLayout.even(total, self._comm.size).lengths if lengths is None else lengths
        layout = SequenceLayout.from_lengths(cuts, documents)
        if layout.total != total:
            raise InputError(f"lengths {list(cuts)} were given for {total} tokens; they must add up to that")
        start, stop = layout.range(self._comm.rank)
        part: dict[str, Any] = {
            name: _cut(given[name], start, stop) for name in ("input_ids", "inputs_embeds") if name in given
        }
        positions_L = _positions(layout, tokens.device) + (0 if layout.documents else self._carried.position)
        part["position_ids"] = _cut(positions_L.expand(rows, -1), start, stop)
        count = None
        if "labels" in given:
            labels_BL = torch.nn.functional.pad(given["labels"], (0, 1), value=IGNORED)[:, 1:]
            part["labels"] = _cut(labels_BL, start, stop, filling=IGNORED)
            count = given.get("num_items_in_batch", (labels_BL != IGNORED).sum())
        part[SLICE] = SequenceSlice(layout, count)
        return part

    @contextmanager
    def carry(self, *, detach: bool = True) -> Iterator[None]:
        """Let each call inside go on from the states that the call before it left, with gradients unless `detach`."""
        before, self._carried = self._carried, _Carried(on=True, detach=detach)
        try:
            yield
        finally:
            self._carried = before

    def sum_gradients(self) -> None:
        """Give every parameter the sum of the ranks' gradients, where no wrapper such as FSDP2 brings them together.

        Cost: each rank sends and receives 2 (P-1)/P of the gradients' bytes.
        """
        parameters = list(self._model.parameters())
        drop_missing(parameters, sum_gradients(self._comm, parameters).tolist())

    def release(self) -> None:
        """Give the model back as it was before."""
        if self._binding is not None:
            self._recompute.release()
            for name in ("forward", "prepare_inputs_for_generation"):
                vars(self._model).pop(name, None)
            self._binding.release()
            self._binding = None

    @_around_compiled
    def _run(self, part: SequenceSlice, arguments: dict[str, Any]) -> Any:
        if unknown := sorted(arguments.keys() - PASSED_ON):
            raise InputError(f"the model was called with {', '.join(unknown)} beside what shard gave; leave it out")
        if torch.is_grad_enabled():
            self._recompute.check(keeps_graph=self._carried.on and not self._carried.detach)
        labels_BL = arguments.pop("labels", None)
        one = self._pass(part.layout)
        with running(one):
            out = self._compute(**arguments | {"use_cache": False, "return_dict": True})
        self._carried.take(one, part.layout.total)
        if not one.length:
            out.logits = out.logits[:, :0].clone()  # FSDP2 warns of views, which lose its hooks when changed in place
        if labels_BL is not None:
            out.loss = self._loss(out, labels_BL[:, : one.length], part.labels)
        return out

    @_never_compiled
    def _pass(self, layout: SequenceLayout) -> Pass:
        ops = ShardedSequenceOps(self._comm, layout, softmax="reshuffle")
        return Pass(ops, layout.lengths[self._comm.rank], self._carried.states)

    @_never_compiled
    def _loss(self, out: Any, labels_BL: torch.Tensor, count: torch.Tensor | float | None) -> torch.Tensor:
        """The loss of the whole batch, whose gradient is this rank's share.

        Cost: one all-reduce of a number.
        """
        config = self._model.config.get_text_config()
        give_back_freed(out.logits)  # here a step takes most
        share: torch.Tensor = self._model.loss_function(
            logits=out.logits,
            labels=labels_BL,
            shift_labels=labels_BL,
            vocab_size=config.vocab_size,
            num_items_in_batch=count,
        )
        balance = getattr(out, "aux_loss", None)
        if balance is not None:
            share = share + config.router_aux_loss_coef * balance / self._comm.size
        whole = self._comm.all_reduce_sum(share.detach(), label="loss")
        return self._scale * (share - share.detach()) + whole


@_around_compiled
def _forward(parallel: ContextParallel, *args: Any, **kwargs: Any) -> Any:
    """The model's `forward`: over ranks with a part that `shard` made, else as it was before."""
    part = kwargs.pop(SLICE, None)
    if part is not None:
        if args:
            raise InputError("call the model with what shard gives by name: model(**parallel.shard(batch))")
        return parallel._run(part, kwargs)
    if current_pass() is not None:
        return parallel._compute(*args, **kwargs)
    if parallel._model.training and torch.is_grad_enabled():
        raise InputError("the model was called with a whole batch; call it as model(**parallel.shard(batch))")
    assert parallel._binding is not None
    with parallel._binding.suspended():
        return parallel._compute(*args, **kwargs)


def _suspended(parallel: ContextParallel, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a method of the model with the attention that it had before."""
    assert parallel._binding is not None
    with parallel._binding.suspended():
        return function(*args, **kwargs)


@dataclass
class _Carried:
    """The states from which the next call goes on, and the tokens before it."""

    on: bool = False
    detach: bool = True
    states: tuple[MixerState, ...] | None = None
    position: int = 0

    def take(self, one: Pass, tokens: int) -> None:
        """Keep what a call has left behind."""
        if self.on:
            states = one.states_after()
            if self.detach:
                states = tuple(state.replace(tuple(t.detach() for t in state.tensors())) for state in states)
            self.states, self.position = states, self.position + tokens
        else:
            one.after.clear()  # layers that are computed again hold the pass, and would hold these


class Recomputation:
    """Activation checkpointing of the model's layers, which finds the pass again that a layer was computed in."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                self._wrap(module)
        self._set = model._set_gradient_checkpointing
        model._set_gradient_checkpointing = self._set_wrapped

    def check(self, keeps_graph: bool) -> None:
        """Refuse layers whose second computation would not find its pass, or whose first one has no graph.

        Raises: ConfigError, with what to do.
        """
        for module in self._model.modules():
            if type(module).__name__ == "CheckpointWrapper":
                raise ConfigError(
                    "layers are wrapped to be computed again in a way that loses the ranks; call "
                    "activation_checkpointing_enable() of the model instead"
                )
            function: Any = getattr(module, "_gradient_checkpointing_func", None)
            again = module.training and getattr(module, "gradient_checkpointing", False) and function is not None
            if again and any(part._compiled_call_impl is not None for part in module.modules()):
                raise ConfigError(
                    f"{type(module).__name__} is compiled and computed again, which leaves other tensors to the "
                    "backward pass; compile the whole model with torch.compile(model), or do one of the two alone"
                )
            if keeps_graph and again and function.args[0].keywords.get("use_reentrant", True):
                raise ConfigError(
                    "carry(detach=False) wants the graph of states, which layers that are computed again with "
                    "use_reentrant=True do not have; enable them with use_reentrant=False"
                )

    def release(self) -> None:
        """Let layers be computed again without a pass."""
        del self._model._set_gradient_checkpointing
        for module in self._model.modules():
            function: Any = getattr(module, "_gradient_checkpointing_func", None)
            if isinstance(function, partial) and function.func is _checkpointed:
                module._gradient_checkpointing_func = function.args[0]

    def _set_wrapped(self, *args: Any, **kwargs: Any) -> None:
        self._set(*args, **kwargs)
        for module in self._model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                self._wrap(module)

    def _wrap(self, module: Any) -> None:
        theirs = module._gradient_checkpointing_func
        if not (isinstance(theirs, partial) and theirs.func is _checkpointed):
            module._gradient_checkpointing_func = partial(_checkpointed, theirs)


@_never_compiled  # as in the backward pass, which computes a layer again
def _checkpointed(theirs: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call transformers' checkpointing of a layer so that the layer is computed again in the pass that runs now."""
    one = current_pass()
    if one is None:
        return theirs(function, *args, **kwargs)
    begun = len(one.after)

    def within(*args: Any, **kwargs: Any) -> Any:
        if args:
            give_back_freed(args[0])
        if current_pass() is one:
            return function(*args, **kwargs)
        # Computed again, behind the pass: with the states before the layer, and what it leaves is known already.
        with running(replace(one, after=one.after[:begun])):
            return function(*args, **kwargs)

    return theirs(within, *args, **kwargs)


def _cut(x: torch.Tensor, start: int, stop: int, *, filling: int = 0) -> torch.Tensor:
    """The tokens [start, stop) of [B, L, ...]; where there are none, one that counts for nothing: modules need one."""
    if stop > start:
        return x[:, start:stop].contiguous()
    # Part of the batch's graph, as on other ranks: the backward pass takes part in all exchanges.
    return torch.cat([x[:, start:stop], x.new_full((x.shape[0], 1, *x.shape[2:]), filling)], dim=1)


def _positions(layout: SequenceLayout, device: torch.device) -> torch.Tensor:
    """The position of each token in its document, [L]."""
    parts = [torch.arange(stop - start, device=device) for start, stop in layout.document_ranges()]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)


def _documents(given: Mapping[str, Any], rows: int, total: int) -> tuple[int, ...] | None:
    """The starts of packed documents, or None where each row is one sequence.

    Raises: InputError for rows whose documents start at other tokens, or positions that are not of documents.
    """
    if "cu_seq_lens_q" in given:
        if rows != 1:
            raise InputError(f"cu_seq_lens_q was given with {rows} rows; packed documents lie in one row")
        return SequenceLayout.from_cu_seqlens(given["cu_seq_lens_q"].tolist(), [total]).documents
    if "seq_idx" in given:
        numbers_BL = given["seq_idx"]
        starts_BL = torch.nn.functional.pad(numbers_BL[:, 1:] != numbers_BL[:, :-1], (1, 0), value=True)
    elif "position_ids" in given:
        positions_BL = given["position_ids"]
        if positions_BL.dim() != 2:
            raise InputError(
                f"position_ids has shape {list(positions_BL.shape)}; needed is [B, L], as of text without images"
            )
        starts_BL = positions_BL == 0
        steps_BL = positions_BL[:, 1:] - positions_BL[:, :-1]
        if not bool((starts_BL[:, 1:] | (steps_BL == 1)).all()) or not bool(starts_BL[:, :1].all()):
            raise InputError("position_ids must count up from 0 in every document")
    else:
        return None
    if not bool((starts_BL == starts_BL[:1]).all()):
        raise InputError("documents start at other tokens in other rows; pack them into one row")
    starts = tuple(starts_BL[0].nonzero()[:, 0].tolist())
    return None if starts in ((), (0,)) else starts


def _hides(mask_BL: torch.Tensor | None) -> bool:
    """Return whether a mask hides what lies behind the end of a sequence.

    Raises: InputError for one that hides anything else.
    """
    if mask_BL is None:
        return False
    if mask_BL.dim() != 2:
        raise InputError(f"attention_mask has shape {list(mask_BL.shape)}; needed is [B, L]")
    if bool((mask_BL[:, 1:].bool() & ~mask_BL[:, :-1].bool()).any()):
        raise InputError("attention_mask hides tokens before others that it shows; pad on the right")
    return not bool(mask_BL.all())


def _check_dropout(model: PreTrainedModel) -> None:
    """Raise ConfigError for dropout of attention weights, which attention over ranks does not have."""
    given = getattr(model.config.get_text_config(), "attention_dropout", 0.0) or 0.0
    if given:
        raise ConfigError(f"attention_dropout is {given}; over ranks attention has none, set it to 0")

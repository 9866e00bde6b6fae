"""Layers of an adapted model that lie on one rank each: for a text their weights go round, for a token the text does.

A pass over tokens is run by every rank on its own tokens, with the weights of one layer at a time sent by the rank that
has them and dropped after use. A decode step is of the same sequences on every rank: each runs its own layers, keeps
only the states of these, and hands the hidden states on to the rank of the next ones. What is not in a layer, such as
embeddings and the read-out, every rank has.

Shape letters: B batch, L tokens on this rank, D model width.
"""

import re
from collections.abc import Callable, Iterator
from itertools import accumulate
from math import prod
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from dist_attn.adapters.passes import Pass, current_pass
from dist_attn.comm import Communicator
from dist_attn.errors import ConfigError
from dist_attn.shipped.downloaded import DownloadedModel

__all__ = ["SpreadLayers", "owners_of", "rank_of"]

LAYER: Final = re.compile(r"^(?!.*(?:vision|visual|mtp)).*?\b(?:layers|blocks)\.(\d+)\.")
"""Of the names of stored tensors: the number of a layer, except of those that see and that guess further ahead."""
ALIGNED: Final = 64  # bytes; as torch's own memory is


def owners_of(model: DownloadedModel, ranks: int) -> list[int]:
    """The rank of each layer: one run of layers for each rank, in order, of about as many bytes.

    Raises: ConfigError for fewer layers than ranks.
    """
    numbered = [(_layer_of(name), tensor.nbytes) for name, tensor in model.tensors.items()]
    layers = model.num_layers or 1 + max((number for number, _ in numbered if number is not None), default=-1)
    if layers < ranks:
        raise ConfigError(f"engine.weights_over_ranks: {layers} layers are too few for {ranks} ranks; take fewer ranks")
    sizes = [sum(size for number, size in numbered if number == layer) for layer in range(layers)]
    before, first = [0, *accumulate(sizes)], [0]
    for rank in range(1, ranks):
        possible = range(first[-1] + 1, layers - (ranks - rank) + 1)
        first.append(min(possible, key=lambda n: abs(before[n] * ranks - rank * before[-1])))
    return [sum(number >= begin for begin in first) - 1 for number in range(layers)]


def rank_of(name: str, shape: tuple[int, ...], owners: list[int]) -> int | None:
    """The rank that has a stored tensor; None: all have it, as they have vectors."""
    number = _layer_of(name)
    if number is None or number >= len(owners) or prod(shape) == max(shape, default=1):
        return None
    return owners[number]


def _layer_of(name: str) -> int | None:
    found = LAYER.search(name)
    return None if found is None else int(found[1])


class SpreadLayers:
    """The layers of a model over the ranks of a group; a layer's rank is `owners[number]`, and they never decrease.

    Every rank makes the same passes in the same order. `layers` of other ranks have weights without bytes, on `meta`.

    Raises: ConfigError for a model whose layers share weights with each other or with what is in none, or are stored
        with tables that are no weights.
    """

    def __init__(self, model: PreTrainedModel, layers: list[nn.Module], owners: list[int], comm: Communicator) -> None:
        self._comm, self._owners, self._layers = comm, owners, layers
        self._weights: list[list[tuple[nn.Module, str, nn.Parameter, int]]] = []  # once a pass has been made
        self._outputs = [0] * len(layers)  # how many values a layer gives; 0: its hidden states alone
        self._operations = [slice(0, 0)] * len(layers)  # those along the sequence that are in a layer
        by_layer = [{id(weight) for _, _, weight in _weights_in(layer)} for layer in layers]
        in_layers = set[int]().union(*by_layer)
        apart = len(layers) == len(owners) and len(in_layers) == sum(map(len, by_layer))
        left_out = [weight for weight in model.parameters() if weight.is_meta and id(weight) not in in_layers]
        if not apart or left_out or any(buffer.is_meta for buffer in model.buffers()):
            raise ConfigError(
                "engine.weights_over_ranks: layers of this type of model share weights, or are stored with tables, so "
                "that none can be left to one rank; leave it out"
            )
        for number, layer in enumerate(layers):
            layer.forward = self._around(number, layer.forward)

    def _all_weights(self) -> list[list[tuple[nn.Module, str, nn.Parameter, int]]]:
        """The weights of each layer that some rank lacks, where they lie, and address remainders on the layer's rank.

        A product's last bits may depend on where its numbers begin, so copies of weights begin as these do.
        """
        found = []
        for layer, owner in zip(self._layers, self._owners, strict=True):
            own = list(_weights_in(layer))
            lacking = torch.tensor([int(weight.is_meta) for _, _, weight in own], dtype=torch.int64, device="cpu")
            lacking = self._comm.all_reduce_sum(lacking, label="weights")
            own = [each for each, ranks in zip(own, lacking.tolist(), strict=True) if ranks]
            begins = [0 if weight.is_meta else weight.data_ptr() % ALIGNED for _, _, weight in own]
            told = self._comm.broadcast(torch.tensor(begins, dtype=torch.int64, device="cpu"), owner, label="weights")
            found.append([(*each, begin) for each, begin in zip(own, told.tolist(), strict=True)])
        return found

    @property
    def operations_of_ranks(self) -> tuple[slice, ...]:
        """The operations along the sequence in the layers of each rank; known after the first pass."""
        slices: list[slice] = []
        for rank in range(self._comm.size):
            own = [each for each, owner in zip(self._operations, self._owners, strict=True) if owner == rank]
            slices.append(slice(own[0].start, own[-1].stop))
        return tuple(slices)

    @property
    def reads_out(self) -> bool:
        """Return whether this rank has the last layer."""
        return self._owners[-1] == self._comm.rank

    def _around(self, number: int, compute: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            one = current_pass()
            assert one is not None
            if one.step:
                return self._step(number, compute, args, kwargs)
            self._weights = self._weights or self._all_weights()
            self._fetch(number, _hidden(args, kwargs).device)
            try:
                return self._noted(number, one, compute, args, kwargs)
            finally:
                self._drop(number)

        return forward

    def _noted(
        self, number: int, one: Pass, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        before = len(one.after)
        output = compute(*args, **kwargs)
        self._operations[number] = slice(before, len(one.after))
        self._outputs[number] = len(output) if isinstance(output, tuple) else 0
        return output

    def _step(self, number: int, compute: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A decode step's part: the hidden states come from the rank before, and go on as they came past others."""
        x_B1D = _hidden(args, kwargs)
        owner, before = self._owners[number], self._owners[max(0, number - 1)]
        if owner != before:
            sends = {owner: len(x_B1D)} if before == self._comm.rank else {}
            receives = {before: len(x_B1D)} if owner == self._comm.rank else {}
            received = self._comm.send_receive(x_B1D if sends else x_B1D[:0], sends, receives, label="hand_on")
            x_B1D = received if receives else x_B1D
        if owner == self._comm.rank:
            if args:
                return compute(x_B1D, *args[1:], **kwargs)
            return compute(**{**kwargs, "hidden_states": x_B1D})
        return (x_B1D, *[None] * (self._outputs[number] - 1)) if self._outputs[number] else x_B1D

    def _fetch(self, number: int, device: torch.device) -> None:
        """Have the layer's weights here, from their rank."""
        for module, name, weight, begin in self._weights[number]:
            expected = torch.empty_like(weight, device=device) if weight.is_meta else weight.detach()
            sent = self._comm.broadcast(expected, self._owners[number], label="weights")
            if weight.is_meta:
                module.register_parameter(name, nn.Parameter(_beginning_at(sent, begin), requires_grad=False))

    def _drop(self, number: int) -> None:
        """Forget weights that are another rank's."""
        for module, name, weight, _ in self._weights[number]:
            module.register_parameter(name, weight)


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states that a layer is called with."""
    hidden: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return hidden


def _weights_in(layer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in layer.modules():
        for name, weight in module.named_parameters(recurse=False):
            yield module, name, weight


def _beginning_at(x: torch.Tensor, offset: int) -> torch.Tensor:
    """Return x at an address whose remainder by `ALIGNED` is `offset`; copy it there if it lies elsewhere."""
    if x.data_ptr() % ALIGNED == offset:
        return x
    room = torch.empty(x.nbytes + ALIGNED, dtype=torch.uint8, device=x.device)
    begin = (offset - room.data_ptr()) % ALIGNED
    return room[begin : begin + x.nbytes].view(x.dtype).view(x.shape).copy_(x)

"""The placement of a model's parameters: whole on every rank, or sharded over all of them by `fully_shard`.

Either way gradients are sums over all ranks, since losses are shares of the whole batch's.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast, final

import torch
from torch import Tensor, nn

from dist_attn.comm.call import first_line
from dist_attn.errors import CommError, ConfigError
from dist_attn.models.blocks import Recomputable
from dist_attn.sharded.gradients import drop_missing, sum_gradients
from dist_attn.training.mesh import Mesh

Result = TypeVar("Result")

BACK_ENDS_WORDS = ("gloo", "NCCL", "Connection closed", "Connection reset")


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this is a rank's shard of a tensor (a DTensor, a type whose module is slow to load)."""
    return hasattr(tensor, "full_tensor")


def place(model: nn.Module, mesh: Mesh, *, sharded: bool) -> "Parameters":
    """Give every rank rank 0's weights, whole or, if `sharded` and there are several, as its shard of them.

    Raises: ConfigError where the ranks cannot shard.
    """
    mesh.broadcast_weights(model)
    return _Sharded(model, mesh) if sharded and mesh.world.size > 1 else Parameters(model, mesh)


class Parameters:
    """The parameters of a model on a mesh, and what the loop does with them; every call is one of all ranks.

    Here every rank has all of them.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model, self._world = model, mesh.world

    def with_values(self, work: Callable[[], Result]) -> Result:
        """Run `work` and return its result; it may use the model, and its result may be differentiated."""
        return work()

    def backward(self, loss: Tensor) -> None:
        """Add the gradients of one share of the loss."""
        loss.backward()

    def reduce_gradients(self) -> Tensor:
        """Make every gradient the sum over all ranks, once all micro-batches are done.

        What comes back is for `drop_missing`, once the host has read it.
        """
        return sum_gradients(self._world, list(self._model.parameters()))

    def clip_gradients(self, norm: float) -> Tensor:
        """Scale all gradients down to a global norm of at most `norm`; returns the norm that they had, as a scalar."""
        return nn.utils.clip_grad_norm_(self._model.parameters(), norm)

    def drop_missing(self, ranks_with_one: Sequence[float]) -> None:
        """Take away the gradients that no rank had, which `reduce_gradients` has made zeros."""
        drop_missing(list(self._model.parameters()), ranks_with_one)

    def whole_weights(self) -> Mapping[str, Tensor]:
        """The model's weights and buffers, not sharded, at least on rank 0."""
        return cast(dict[str, Tensor], self._model.state_dict())


class _Root(nn.Module):
    """The parameters beside the layers, sharded as one: its forward pass holds the whole use of a model.

    FSDP gathers parameters around a module's `forward`, and a model here has several ways in: `hidden`, `readout`, ….
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        """Run `work` and return its result."""
        return work()


def _layers(model: nn.Module) -> list[nn.Module]:
    """List the layers of a model, but for those inside another, which gathers their parameters with its own."""
    layers: dict[str, nn.Module] = {}
    for name, module in model.named_modules():  # outer ones first
        if isinstance(module, Recomputable) and not any(name.startswith(f"{outer}.") for outer in layers):
            layers[name] = module
    return list(layers.values()) or list(getattr(model, "parts", ()))


@final
class _Sharded(Parameters):
    """The parameters of which every rank has a share, and of their gradients and optimiser's state.

    Reference: Zhao et al. 2023, PyTorch FSDP.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        if mesh.world.backend not in ("gloo", "nccl"):
            raise ConfigError(
                f"run.shard_parameters needs torch's own ranks; these talk over {mesh.world.backend}: start them with "
                "torchrun, or leave it out"
            )
        super().__init__(model, mesh)
        self._root = _Root(model)
        ranks = init_device_mesh(mesh.device.type, (mesh.world.size,))
        parts = [fully_shard(layer, mesh=ranks) for layer in _layers(model)]
        # The backward pass begins where the forward pass has ended: what is not of a layer stays gathered in between.
        self._whole = fully_shard(self._root, mesh=ranks, reshard_after_forward=False)
        for part in (*parts, self._whole):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)

    def with_values(self, work: Callable[[], Result]) -> Result:
        """Run `work` with parameters that are gathered as they are needed."""
        with self._losses_named(), warnings.catch_warnings():
            # Layers return states that share memory with their outputs; nothing changes them in place.
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view", category=UserWarning)
            result = cast(Result, self._root(work))
        if not torch.is_grad_enabled():
            self._whole.reshard()  # no backward pass will
        return result

    def backward(self, loss: Tensor) -> None:
        """Add the gradients; each layer's are summed and sharded as soon as they are there."""
        with self._losses_named():
            loss.backward()

    def reduce_gradients(self) -> Tensor:
        """Do nothing: the backward pass has summed the gradients."""
        return torch.empty(0, device="cpu")

    def clip_gradients(self, norm: float) -> Tensor:
        """Clip by the norm over all shards."""
        with self._losses_named():
            return whole(nn.utils.clip_grad_norm_(self._model.parameters(), norm))

    def drop_missing(self, ranks_with_one: Sequence[float]) -> None:
        """Do nothing: no zeros were made for missing gradients."""

    def whole_weights(self) -> Mapping[str, Tensor]:
        """Gather the weights and buffers on every rank."""
        with self._losses_named():
            return {name: whole(tensor) for name, tensor in self._model.state_dict().items()}

    @contextmanager
    def _losses_named(self) -> Iterator[None]:
        """Name lost ranks: torch's own exchanges fail with a RuntimeError in the back end's words then."""
        try:
            yield
        except RuntimeError as error:
            if not any(word in str(error) for word in BACK_ENDS_WORDS):
                raise
            rank, size = self._world.rank, self._world.size
            raise CommError(
                f"rank {rank} of {size} could not exchange parameters or gradients: {first_line(error)}. A rank died "
                "or is late: look at the output of the other ranks"
            ) from error


def whole(tensor: Tensor) -> Tensor:
    """Gather the whole of a tensor that may be sharded; then it is a call of all ranks."""
    return cast(Any, tensor).full_tensor() if is_sharded(tensor) else tensor

"""A state of a model that streams and the snapshot of it: into a file, and back where the model is the same one."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import dist_attn
from dist_attn.devices import present_compute
from dist_attn.errors import InputError, ShapeError, StateMismatchError
from dist_attn.generation.state_shapes import StateShapes
from dist_attn.mixers import GrowingState
from dist_attn.models import ModelState, StreamingModel, weight_precision_of
from dist_attn.ops.processor import flushes_denormals
from dist_attn.shipped import sha256
from dist_attn.text import load_tokeniser
from dist_attn.wire.manifest import (
    Computation,
    Manifest,
    ModelIdentity,
    RestoreReport,
    report_restore,
    require_same_model,
)
from dist_attn.wire.snapshot import Snapshot, SnapshotFile, Storage, pack_snapshot

__all__ = ["Restored", "computation_of", "identity_of", "pack_state", "restore_state"]


@dataclass(frozen=True)
class Restored:
    """A state that goes on, the logits after its last token where they were stored, and what the restore came to."""

    state: ModelState
    logits_V: torch.Tensor | None
    report: RestoreReport


def identity_of(model: StreamingModel, folder: Path) -> ModelIdentity:
    """What decides the meaning of this model's states: its files, its tokens, its random matrices, its sizes.

    Cost: reads the weights' file once. Raises: ModelFolderError for a tokeniser that cannot be read.
    """
    tokeniser = load_tokeniser(folder).digest if (folder / "tokenizer.json").is_file() else None
    return ModelIdentity(
        weights=_digest_of_weights(folder),
        config=sha256(folder / "config.json"),
        tokeniser=tokeniser,
        features=_digest_of_buffers(model),
        feature_seed=model.feature_seed,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        mixers=model.kinds,
        weight_precision=weight_precision_of(model),
    )


def computation_of(model: StreamingModel, *, chunk_tokens: int, decode_slots: int, ranks: int) -> Computation:
    """How this process computes, as far as it decides the last bits."""
    device = model.device
    if device.type == "cuda":
        kind = f"cuda_{torch.cuda.get_device_name(device)}"
    else:
        kind = f"{device.type}_{torch.backends.cpu.get_cpu_capability()}"
    return Computation(
        chunk_tokens=chunk_tokens,
        decode_slots=decode_slots,
        ranks=ranks,
        threads=torch.get_num_threads(),
        device=re.sub("[^a-z0-9]+", "_", kind.lower())[:40],
        denormals_flushed=flushes_denormals(),
        library_version=dist_attn.__version__,
        torch_version=str(torch.__version__),
        dtype=present_compute(device).precision,
    )


def pack_state(
    state: ModelState, manifest: Manifest, *, logits_V: torch.Tensor | None = None, storage: Storage = "exact"
) -> SnapshotFile:
    """The snapshot of a state of one sequence, with the logits after its last token where they are given.

    Shapes: logits [vocabulary]. Tensors on the CPU that lie in order are not copied; the file reads them when written.

    Raises: ShapeError for several sequences; InputError for a state of which other ranks hold a part; WireError for
        numbers that compact storage cannot hold.
    """
    if state.batch != 1:
        raise ShapeError(f"a state of {state.batch} sequences was given; a snapshot is that of one: use select")
    arrays: list[tuple[str, NDArray[Any]]] = []
    if logits_V is not None:
        arrays.append(("logits", _array(logits_V.float())))
    for number, layer in enumerate(state.layers):
        if isinstance(layer, GrowingState):
            layer = layer.standing_at(state.position)
        arrays += [(f"layers.{number}.{index}", _array(t[0])) for index, t in enumerate(layer.tensors())]
    return pack_snapshot(manifest, state.position, arrays, storage=storage)


def restore_state(
    snapshot: Snapshot,
    model: StreamingModel,
    manifest: Manifest,
    *,
    position: int | None = None,
    shapes: StateShapes | None = None,
) -> Restored:
    """The state of a snapshot, in the model that `manifest` describes, where the model lies.

    `position` is where the caller wants to be; the tokens from the snapshot to there are for it to feed. Without it,
    that is where the snapshot stands. `shapes` are those of the model's states; without them a pass of it tells.

    Raises: StateMismatchError naming both values where the model is another one, or an array has not the shape and
        type of its states; InputError for a position before the snapshot's: a state cannot be rewound.
    """
    stored, header = snapshot.header.manifest, snapshot.header
    require_same_model(stored.model, manifest.model)
    target = header.position if position is None else position
    if target < header.position:
        raise InputError(
            f"the state stands at token {header.position} and cannot go back to {target}; take an earlier checkpoint"
        )
    state = _state(snapshot, StateShapes.of(model) if shapes is None else shapes)
    logits = snapshot.arrays.get("logits")
    logits_V = None if logits is None else _tensor(logits, torch.float32).to(model.device)
    report = report_restore(stored.computed, manifest.computed, header.position, wanted=target, storage=header.storage)
    return Restored(state, logits_V, report)


def _state(snapshot: Snapshot, shapes: StateShapes) -> ModelState:
    """The tensors of a snapshot as a state; each is held against those of the model's states."""
    position = snapshot.header.position

    def tensor(layer: int, index: int) -> torch.Tensor:
        array, like = _stored(snapshot, layer, index), shapes.like(layer, index)
        shapes.check(
            f"array layers.{layer}.{index} of the snapshot", layer, index, array.shape, _type_of(array), position
        )
        return _tensor(array, like.dtype)[None].to(like.device)

    state = shapes.state(position, tensor)
    stored = sum(name != "logits" for name in snapshot.arrays)
    used = sum(len(layer.tensors()) for layer in state.layers)
    if stored != used:
        raise StateMismatchError(f"the snapshot holds {stored} arrays, the states of the model here {used}")
    return state


def _stored(snapshot: Snapshot, layer: int, index: int) -> NDArray[Any]:
    name = f"layers.{layer}.{index}"
    if name not in snapshot.arrays:
        raise StateMismatchError(f"the snapshot has no array {name}, which the states of the model here have")
    return snapshot.arrays[name]


def _type_of(array: NDArray[Any]) -> torch.dtype:
    return torch.bfloat16 if array.dtype == np.uint16 else torch.from_numpy(np.empty(0, array.dtype)).dtype


def _array(tensor: torch.Tensor) -> NDArray[Any]:
    tensor = tensor.detach().cpu().contiguous()
    if tensor.dtype == torch.bfloat16:
        bits: NDArray[Any] = tensor.view(torch.int16).numpy().view(np.uint16)
        return bits
    array: NDArray[Any] = tensor.numpy()
    return array


def _tensor(array: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """In memory of its own."""
    if dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _digest_of_weights(folder: Path) -> str:
    """SHA-256 of the one file of weights, or of the digests of all."""
    if (folder / "model.safetensors").is_file():
        return sha256(folder / "model.safetensors")
    digests = "".join(sha256(path) for path in sorted(folder.glob("*.safetensors")))
    return hashlib.sha256(digests.encode()).hexdigest()


def _digest_of_buffers(model: StreamingModel) -> str | None:
    """SHA-256 of all fixed arrays by name, such as random matrices; None where there are none."""
    digest, any_read = hashlib.sha256(), False
    for name, buffer in sorted(model.named_buffers()):
        any_read = True
        digest.update(f"{name} {buffer.dtype} {tuple(buffer.shape)}\n".encode())
        digest.update(_array(buffer).reshape(-1).view(np.uint8).data)
    return digest.hexdigest() if any_read else None

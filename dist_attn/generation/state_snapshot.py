"""A state of a model that streams and the snapshot of it: into a file, and back where the model is the same one.

Some tensors of states keep their shapes whatever was read, caches get longer.
"""

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import dist_attn
from dist_attn.devices import present_compute
from dist_attn.errors import InputError, ShapeError, StateMismatchError
from dist_attn.mixers import GrowingState, MixerState
from dist_attn.models import ModelState, StreamingModel, weight_precision_of
from dist_attn.ops.device import send
from dist_attn.ops.onednn import mkl_lacks_avx512
from dist_attn.ops.processor import flushes_denormals
from dist_attn.shipped import sha256, without_classes
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

__all__ = ["RestoredState", "StateShapes", "computation_of", "identity_of", "pack_state", "restore_state"]


TRIED_TOKENS = 2


@dataclass(frozen=True)
class StateShapes:
    """The states of one sequence before any token and after two; a dimension in which they differ grows with the text.

    A state that two tokens leave as large as the empty one stays so.
    """

    empty: ModelState
    grown: ModelState

    @staticmethod
    @torch.inference_mode()
    def of(model: StreamingModel) -> "StateShapes":
        """The states of a model, on its device. Cost: two tokens."""
        empty = model.initial_state(1)
        tokens_BL = torch.zeros(1, TRIED_TOKENS, dtype=torch.int64, device=empty.position_B.device)
        return StateShapes(empty, model.hidden(tokens_BL, None, empty)[1])

    @property
    def num_bytes(self) -> int:
        """Bytes of a state, what grows left out."""
        pairs = zip(self.empty.tensors(), self.grown.tensors(), strict=True)
        return sum(before.numel() * after.element_size() for before, after in pairs)

    @property
    def token_bytes(self) -> int:
        """Bytes that a token adds at most; 0 where the state has one size."""
        grown = sum(tensor.numel() * tensor.element_size() for tensor in self.grown.tensors())
        return max(0, -(-(grown - self.num_bytes) // TRIED_TOKENS))

    def like(self, layer: int, index: int) -> torch.Tensor:
        """A tensor of the type of tensor `index` of a layer, where it lies."""
        return self.grown.layers[layer].tensors()[index]

    def check(self, name: str, layer: int, index: int, shape: Sequence[int], dtype: object, position: int) -> None:
        """See whether a tensor without the batch may be tensor `index` of a layer, after `position` tokens.

        Raises: StateMismatchError with its name, both shapes and both types.
        """
        before, after = self.empty.layers[layer].tensors()[index], self.like(layer, index)
        needed = [
            short if short == long else position for short, long in zip(before.shape[1:], after.shape[1:], strict=True)
        ]
        # What says itself how long it may be is asked once it is whole.
        grows = isinstance(self.grown.layers[layer], GrowingState)
        fits = len(shape) == len(needed) and all(
            has == need or (grows and short != long and has < need)
            for has, need, short, long in zip(shape, needed, before.shape[1:], after.shape[1:], strict=True)
        )
        if not fits or dtype != after.dtype:
            raise StateMismatchError(
                f"{name} is {dtype} {list(shape)}; a state of the model here has {after.dtype} {needed}"
            )

    def state(self, position: int, tensor: Callable[[int, int], torch.Tensor]) -> ModelState:
        """The state after `position` tokens; `tensor(layer, index)` gives its tensors, with the batch.

        Raises: StateMismatchError where the lengths of a layer's tensors do not go together.
        """
        layers: list[MixerState] = []
        for number, layer in enumerate(self.empty.layers):
            restored = layer.replace(tuple(tensor(number, index) for index in range(len(layer.tensors()))))
            try:
                layers.append(restored.standing_at(position) if isinstance(restored, GrowingState) else restored)
            except InputError as error:
                raise StateMismatchError(f"layer {number}: {error}") from None
        device = self.empty.position_B.device
        return ModelState(tuple(layers), torch.full((1,), position, dtype=torch.int64, device=device))


@dataclass(frozen=True)
class RestoredState:
    """A state that goes on, the logits after its last token where they were stored, and what the restore came to."""

    state: ModelState
    logits_V: torch.Tensor | None
    report: RestoreReport


def identity_of(model: StreamingModel, folder: Path) -> ModelIdentity:
    """The facts that give this model's states their meaning: its files, its tokens, its random matrices, its sizes.

    Cost: reads the weights' file once. Raises: ModelFolderError for a tokeniser that cannot be read.
    """
    tokeniser = load_tokeniser(folder).digest if (folder / "tokenizer.json").is_file() else None
    return ModelIdentity(
        weights=_digest_of_weights(folder),
        config=hashlib.sha256(without_classes((folder / "config.json").read_bytes())).hexdigest(),
        tokeniser=tokeniser,
        features=_digest_of_buffers(model),
        feature_seed=model.feature_seed,
        hidden_size=model.hidden_size,
        vocab_size=model.vocab_size,
        mixers=model.kinds,
        weight_precision=weight_precision_of(model),
    )


def computation_of(model: StreamingModel, *, chunk_tokens: int, decode_slots: int, ranks: int) -> Computation:
    """The settings and versions of this process that decide the last bits of what it computes."""
    device = model.device
    if device.type == "cuda":
        kind = f"cuda_{torch.cuda.get_device_name(device)}"
    else:
        kind = f"{device.type}_{torch.backends.cpu.get_cpu_capability()}" + "_onednn" * mkl_lacks_avx512()
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
) -> RestoredState:
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
    logits_V = None if logits is None else send(_tensor(logits, torch.float32), model.device)
    report = report_restore(stored.computed, manifest.computed, header.position, wanted=target, storage=header.storage)
    return RestoredState(state, logits_V, report)


def _state(snapshot: Snapshot, shapes: StateShapes) -> ModelState:
    """The tensors of a snapshot as a state; each is held against those of the model's states."""
    position = snapshot.header.position

    def tensor(layer: int, index: int) -> torch.Tensor:
        array, like = _stored(snapshot, layer, index), shapes.like(layer, index)
        shapes.check(
            f"array layers.{layer}.{index} of the snapshot", layer, index, array.shape, _type_of(array), position
        )
        return send(_tensor(array, like.dtype)[None], like.device)

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

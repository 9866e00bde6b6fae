"""A request's state in bytes: as it goes from rank to rank after a loss, and as a snapshot that is stored.

For a rank: all tensors in a fixed order, little-endian. Whoever reads it has the same model, so shapes and types are
those of its empty state, and nothing else is stored. A snapshot has a manifest and the logits after its last token.
"""

import io

import numpy as np
import torch

from dist_attn.errors import EngineError, WireError
from dist_attn.generation import pack_state, restore_state
from dist_attn.models import LanguageModel, ModelState
from dist_attn.wire.manifest import Manifest
from dist_attn.wire.snapshot import read_snapshot


def state_size(model: LanguageModel) -> int | None:
    """Bytes of a request's state; None where it grows with the text.

    A state that two tokens leave as large as the empty one stays so.
    """
    empty = model.initial_state(1)
    _, after = model.hidden(torch.zeros(1, 2, dtype=torch.int64, device=empty.position_B.device), None, empty)
    if _layout(empty) != _layout(after):
        return None
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(empty))


def write_state(state: ModelState) -> bytes:
    """The bytes of a state of one sequence."""
    return b"".join(_bytes(tensor) for tensor in _tensors(state))


def read_state(data: bytes, empty: ModelState) -> ModelState:
    """The state that `write_state` wrote, where `empty` lies.

    Raises: WireError for a number of bytes that is not that of a state.
    """
    needed = sum(tensor.numel() * tensor.element_size() for tensor in _tensors(empty))
    if len(data) != needed:
        raise WireError(f"{len(data)} bytes came for a state of {needed}")
    # One copy: the tensors share it, and bytes cannot be written to.
    whole = torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))
    at = 0

    def take(like: torch.Tensor) -> torch.Tensor:
        nonlocal at
        size = like.numel() * like.element_size()
        # A tensor of its own: what precedes it may have left the place of another type's numbers unaligned.
        part = whole[at : at + size].clone()
        at += size
        return part.view(like.dtype).reshape(like.shape).to(like.device)

    layers = tuple(layer.replace(tuple(take(t) for t in layer.tensors())) for layer in empty.layers)
    return ModelState(layers, take(empty.position_B))


def snapshot_bytes(state: ModelState, logits_V: torch.Tensor | None, manifest: Manifest | None) -> bytes:
    """The bytes of the snapshot.

    Raises: EngineError where the model's states cannot be stored.
    """
    if manifest is None:
        raise EngineError("states of this model cannot be stored: it was loaded without a manifest")
    return b"".join(pack_state(state, manifest, logits_V=logits_V).pieces())


def state_of_snapshot(
    data: bytes, model: LanguageModel, manifest: Manifest | None
) -> tuple[ModelState, torch.Tensor | None]:
    """The state of a snapshot and the logits after its last token, where they were stored.

    Raises: WireError or StateMismatchError for bytes that are not a snapshot of this model's states; EngineError where
        the model has none.
    """
    if manifest is None:
        raise EngineError("stored states cannot be gone on from: the model was loaded without a manifest")
    restored = restore_state(read_snapshot(io.BytesIO(data)), model, manifest)
    return restored.state, restored.logits_V


def _tensors(state: ModelState) -> list[torch.Tensor]:
    return [*(tensor for layer in state.layers for tensor in layer.tensors()), state.position_B]


def _layout(state: ModelState) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in _tensors(state)]


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return b""
    return flat.view(torch.uint8).numpy().tobytes()

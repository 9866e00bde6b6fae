"""A request's state in bytes: as it goes from rank to rank after a loss, and as a snapshot that is stored.

For a rank: where it stands and the shapes of all tensors, then the tensors in a fixed order, little-endian. Whoever
reads it has the same model, which says of what types they are, and which lengths grow with the text. A snapshot has a
manifest and the logits after its last token. Nothing is unpickled.

    4 bytes    bytes of the header, little-endian
    header     msgpack of StateHeader
    tensors    one after the other, without gaps
"""

import io
import math
import struct
from typing import Annotated

import msgspec
import numpy as np
import torch
from msgspec import Meta

from dist_attn.errors import EngineError, InputError, StateMismatchError, WireError
from dist_attn.generation import StateShapes, pack_state, restore_state
from dist_attn.mixers import GrowingState
from dist_attn.models import ModelState, StreamingModel
from dist_attn.ops.device import send
from dist_attn.wire.manifest import Manifest
from dist_attn.wire.snapshot import read_snapshot
from dist_attn.wire.specs import Count

PRELUDE = struct.Struct("<I")
Length = Annotated[int, Meta(ge=0, le=1 << 40)]
Shape = Annotated[list[Length], Meta(max_length=8)]


class StateHeader(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The position of a state, and the shapes of each layer's tensors without the batch."""

    position: Count
    layers: list[list[Shape]]


def write_state(state: ModelState) -> bytes:
    """The bytes of a state of one sequence.

    Raises: EngineError for a state of which other ranks hold a part.
    """
    position = state.position
    try:
        layers = [s.standing_at(position) if isinstance(s, GrowingState) else s for s in state.layers]
    except InputError as error:
        raise EngineError(f"the state of a request cannot be saved: {error}") from None
    header = _encoder.encode(StateHeader(position, [[list(t.shape[1:]) for t in s.tensors()] for s in layers]))
    return b"".join([PRELUDE.pack(len(header)), header, *(_bytes(t) for s in layers for t in s.tensors())])


def read_state(data: bytes, shapes: StateShapes) -> ModelState:
    """The state that `write_state` wrote, on the device of the model, whose states have these shapes.

    Raises: WireError for bytes that are not those of a state of this model.
    """
    header, at = _header_of(data)
    own = [len(layer.tensors()) for layer in shapes.grown.layers]
    if [len(layer) for layer in header.layers] != own:
        raise WireError(f"a state of {sum(map(len, header.layers))} tensors came; one of this model has {sum(own)}")
    try:
        starts, end = _places(header, at, shapes)
        if len(data) != end:
            raise WireError(f"{len(data)} bytes came for a state of {end}")
        # A copy, as bytes cannot be written to; and one of each tensor, which may not be aligned to its type.
        whole = torch.from_numpy(np.frombuffer(bytearray(data), dtype=np.uint8))

        def tensor(layer: int, index: int) -> torch.Tensor:
            like, shape = shapes.like(layer, index), header.layers[layer][index]
            start = starts[layer, index]
            part = whole[start : start + math.prod(shape) * like.element_size()].clone()
            return send(part.view(like.dtype).reshape(1, *shape), like.device)

        return shapes.state(header.position, tensor)
    except StateMismatchError as error:
        raise WireError(f"the bytes of a state do not fit this model: {error}") from None


def _header_of(data: bytes) -> tuple[StateHeader, int]:
    """The header, and where the tensors begin."""
    length = PRELUDE.unpack_from(data)[0] if len(data) >= PRELUDE.size else 0
    end = PRELUDE.size + length
    if not 0 < length <= len(data) - PRELUDE.size:
        raise WireError(f"{len(data)} bytes came for a state whose header ends at {end}")
    try:
        return _decoder.decode(data[PRELUDE.size : end]), end
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"the header of a state is unreadable: {error}") from None


def _places(header: StateHeader, at: int, shapes: StateShapes) -> tuple[dict[tuple[int, int], int], int]:
    """The byte at which each tensor begins, and the one at which the last one ends; nothing is allocated."""
    starts: dict[tuple[int, int], int] = {}
    for layer, tensors in enumerate(header.layers):
        for index, shape in enumerate(tensors):
            like = shapes.like(layer, index)
            shapes.check(f"tensor layers.{layer}.{index}", layer, index, shape, like.dtype, header.position)
            starts[layer, index] = at
            at += math.prod(shape) * like.element_size()
    return starts, at


def snapshot_bytes(state: ModelState, logits_V: torch.Tensor | None, manifest: Manifest | None) -> bytes:
    """The bytes of the snapshot.

    Raises: EngineError where the model's states cannot be stored.
    """
    if manifest is None:
        raise EngineError("states of this model cannot be stored: it was loaded without a manifest")
    return b"".join(pack_state(state, manifest, logits_V=logits_V).pieces())


def state_of_snapshot(
    data: bytes, model: StreamingModel, manifest: Manifest | None, shapes: StateShapes
) -> tuple[ModelState, torch.Tensor | None]:
    """The state of a snapshot, as `shapes` has it, and the logits after its last token, where they were stored.

    Raises: WireError or StateMismatchError for bytes that are not a snapshot of this model's states; EngineError where
        the model has none.
    """
    if manifest is None:
        raise EngineError("stored states cannot be gone on from: the model was loaded without a manifest")
    # Stored compactly a number takes a byte at least, and four in memory.
    snapshot = read_snapshot(io.BytesIO(data), max_bytes=4 * len(data))
    restored = restore_state(snapshot, model, manifest, shapes=shapes)
    return restored.state, restored.logits_V


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StateHeader)


def _bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    if not flat.numel():
        return b""
    return flat.view(torch.uint8).numpy().tobytes()

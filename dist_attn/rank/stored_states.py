"""A session's state between a rank and the snapshots that are stored: packed with its logits, and gone on from."""

import io

import torch

from dist_attn.errors import EngineError
from dist_attn.generation import pack_state, restore_state
from dist_attn.models import LanguageModel, ModelState
from dist_attn.wire.manifest import Manifest
from dist_attn.wire.snapshot import read_snapshot

__all__ = ["pack_session", "unpack_session"]


def pack_session(state: ModelState, logits_V: torch.Tensor | None, manifest: Manifest | None) -> bytes:
    """The bytes of the snapshot.

    Raises: EngineError where the model's states cannot be stored.
    """
    if manifest is None:
        raise EngineError("states of this model cannot be stored: it was loaded without a manifest")
    return b"".join(pack_state(state, manifest, logits_V=logits_V).pieces())


def unpack_session(
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

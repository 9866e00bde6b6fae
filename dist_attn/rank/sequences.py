"""Rows of a text encoder: the text is cut into sequences that stand alone, and each is framed and read by itself.

Sequences begin at multiples of their length, wherever blocks and ranks are cut, so rows do not depend on either; ranks
exchange nothing.
"""

import torch

from dist_attn.models import TextEncoder
from dist_attn.ops import LocalSequenceOps, current_watch
from dist_attn.ops.finite import checked
from dist_attn.rank_link.rows import sequence_length
from dist_attn.wire.messages import RowSpec
from dist_attn.wire.rank_messages import RowPieces

__all__ = ["read_sequences"]

BATCH_TOKENS = 1 << 14


def read_sequences(model: TextEncoder, tokens_L: torch.Tensor, start: int, request: int, spec: RowSpec) -> RowPieces:
    """The rows in tokens [start, start + L): one per sequence, or one per token of the text.

    `start` is a multiple of the sequence's length; only the end of the text makes a shorter one.
    """
    length = len(tokens_L)
    size = sequence_length(spec, model.config.text_tokens)
    whole = length - length % size
    batches = [*tokens_L[:whole].reshape(-1, size).split(max(1, BATCH_TOKENS // size)), tokens_L[whole:][None]]
    read, at = [], start
    for batch_BT in batches:
        if batch_BT.numel():
            read.append(_rows(model, batch_BT, at, spec))
            at += batch_BT.numel()
    vectors_ND = torch.cat(read)
    step = 1 if spec.granularity == "token" else size
    starts = range(start, start + length, step)
    stops = [*starts[1:], start + length]
    data = vectors_ND.to(device="cpu", dtype=torch.float32).contiguous().numpy().astype("<f4", copy=False).tobytes()
    return RowPieces(request, list(starts), stops, data)


def _rows(model: TextEncoder, text_BT: torch.Tensor, start: int, spec: RowSpec) -> torch.Tensor:
    watch, ops = current_watch(), LocalSequenceOps()
    finite = None if watch is None else watch.finite
    if finite is not None:
        ahead = len(model.config.prefix)
        finite.first_tokens = tuple(range(start - ahead, start - ahead + text_BT.numel(), text_BT.shape[1]))
    h_BLD = model.hidden(model.frame(text_BT), ops if finite is None else checked(ops))
    if spec.granularity != "token":
        return model.pool(h_BLD)
    before = len(model.config.prefix)
    return h_BLD[:, before : before + text_BT.shape[1]].flatten(0, 1)

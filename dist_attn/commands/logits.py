"""`dist-attn logits`: the logits after every token of a text, over all ranks, block by block.

Shape letters: L tokens of this rank's slice, N of a piece, V vocabulary, D model width.
"""

import sys
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dist_attn.checkpoints import load_causal_model
from dist_attn.comm import Communicator, open_communicator
from dist_attn.commands.encode_output import RowFile, row_file
from dist_attn.commands.options import LogitsOptions
from dist_attn.devices import choose_compute
from dist_attn.errors import InputError
from dist_attn.layout import SequenceLayout
from dist_attn.models import CausalModel, LanguageModel
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.shipped import resolve_model_folder

BLOCK_TOKENS = 8_192
EXCHANGE_S, LOADING_S = 30.0, 300.0  # to wait for another rank, which may still load its weights
READ_OUT = 64  # tokens whose logits a rank holds at a time


def logits_here(options: LogitsOptions) -> dict[str, Any] | None:
    """Write the logits; returns on rank 0 the model's name, tokens, ranks and seconds, and None elsewhere.

    Raises: InputError for tokens that are none, ModelFolderError, TokenError, CommError.
    """
    tokens_T = _read_tokens(options.tokens)
    folder = resolve_model_folder(options.model)
    compute = choose_compute(options.device, options.dtype)
    waits_s = LOADING_S if options.weights_over_ranks else EXCHANGE_S
    with open_communicator(device=compute.device, timeout_s=waits_s) as comm, ExitStack() as stack:
        over = comm if options.weights_over_ranks else None
        model = load_causal_model(folder, weights=options.weights, dtype=compute.dtype, over=over).to(compute.device)
        if isinstance(model, LanguageModel):
            # Whoever brings a model of their own in bfloat16 wants its own operations, not a selection of them.
            stack.enter_context(compute.autocast())
        stack.enter_context(torch.inference_mode())
        if comm.rank == 0:
            print(compute.sentence(comm, options.weights), file=sys.stderr)
        began = time.perf_counter()
        with row_file(options.out, options.tokens) if comm.rank == 0 else nullcontext() as rows:
            write_logits(comm, model, tokens_T, rows, options.block or BLOCK_TOKENS)
    if comm.rank:
        return None
    seconds = time.perf_counter() - began
    return {"model": folder.name, "tokens": len(tokens_T), "ranks": comm.size, "seconds": round(seconds, 3)}


def write_logits(
    comm: Communicator, model: CausalModel, tokens_T: torch.Tensor, rows: RowFile | None, block: int
) -> None:
    """Read a text in blocks of which every rank takes a slice; rank 0 has the file of the rows.

    Shapes: tokens [T] int64, equal on all ranks; rows float32 [T, V].
    Memory: the hidden states of a block, and READ_OUT logits of every rank.
    """
    state = model.initial_state(1)
    for first in range(0, len(tokens_T), block):
        tokens_B = tokens_T[first : first + block]
        layout = SequenceLayout.even(len(tokens_B), comm.size)
        start, stop = layout.range(comm.rank)
        h_BLD, state = model.hidden(tokens_B[None, start:stop], ShardedSequenceOps(comm, layout), state)
        for at in range(0, max(layout.lengths), READ_OUT):
            counts = {r: min(READ_OUT, n - at) for r, n in enumerate(layout.lengths) if n > at}
            # [1, N, D]: rows alone would be steps of as many sequences.
            logits_NV = model.readout(h_BLD[:, at : at + READ_OUT])[0].float().cpu()
            other = {r: n for r, n in counts.items() if r} if comm.rank == 0 else {}
            sends = {0: len(logits_NV)} if comm.rank and len(logits_NV) else {}
            sent = logits_NV if comm.rank else logits_NV[:0]
            received = comm.send_receive(sent, sends, other)
            if rows is not None:
                pieces = {0: logits_NV} | dict(zip(other, received.split(list(other.values())), strict=True))
                for rank, piece_NV in pieces.items():
                    if len(piece_NV):
                        rows.write(piece_NV.numpy(), first + layout.range(rank)[0] + at)
    if rows is not None:
        rows.finish()


def _read_tokens(path: Path) -> torch.Tensor:
    try:
        ids = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InputError(f"{path} cannot be read as a NumPy file: {error}") from None
    if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        what = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else "several arrays"
        raise InputError(f"{path} holds {what}; needed are the ids of one text, at least one: integers [tokens]")
    return torch.from_numpy(ids.astype(np.int64))

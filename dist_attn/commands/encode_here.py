"""`dist-attn encode` in this process, or split over the ranks that a launcher started: model, ranks, progress, file."""

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dist_attn.checkpoints import load_reader_and_tokeniser
from dist_attn.comm import open_communicator
from dist_attn.commands import encode_file
from dist_attn.commands.progress import byte_progress
from dist_attn.models import TextEncoder
from dist_attn.sharded import Algorithm
from dist_attn.shipped import resolve_model_folder
from dist_attn.wire.row_choice import RowsAsked, SequenceReading, choose_rows

__all__ = ["encode_here"]


def encode_here(
    source: Path, target: Path, asked: RowsAsked, *, deterministic: bool, exchange: Algorithm
) -> dict[str, Any] | None:
    """Write the rows of a file; the report in plain values on rank 0, None elsewhere.

    Raises: InputError, ModelFolderError, CommError; as `encode_file`.
    """
    folder = resolve_model_folder(asked.model)
    loaded, tokeniser = load_reader_and_tokeniser(folder)
    reading = None
    if isinstance(loaded, TextEncoder):
        reading = SequenceReading(loaded.config.text_tokens, loaded.config.pooling)
    spec = choose_rows(asked.granularity, asked.window, asked.pooling, reading)
    with open_communicator() as comm:
        # Not Path.is_file, which raises for some names: the encoder refuses them with its own words.
        size = source.stat().st_size if os.path.isfile(source) else 0
        with byte_progress("encoding", size, wanted=comm.rank == 0) as on_progress:
            report = encode_file.encode_file(
                comm, loaded, tokeniser, source, target, spec,
                deterministic=deterministic, exchange=exchange, on_progress=on_progress,
            )  # fmt: skip
    return None if report is None else {**asdict(report), "model": folder.name}

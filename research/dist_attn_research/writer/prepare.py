"""Make the texts, the vocabulary and the first weights of the writer: `dist-attn bench writer FOLDER --books NOVELS`.

`dist-attn train research/dist_attn_research/writer/train.toml` goes on from there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from dist_attn.checkpoints import load_model, resolve_model_folder, save_model
from dist_attn.text import load_tokeniser
from dist_attn.text.bpe import train_bpe
from dist_attn_research.writer.grow import grow
from dist_attn_research.writer.texts import write_texts

__all__ = ["main"]

BEGINS_WITH = "books-6m"
VOCABULARY = 8192
ADDED = {"kind": "gated_delta", "num_heads": 4}


def main(arguments: Sequence[str]) -> int:
    """Write `train.jsonl`, two validation texts and the model folder `begin` into the folder."""
    parser = argparse.ArgumentParser(prog="writer", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--books", type=Path, default=Path("data/books"), help="a folder of novels")
    chosen = parser.parse_args(arguments)
    write_texts(chosen.books, chosen.folder)
    tokeniser = train_bpe([chosen.folder / "plain.txt"], VOCABULARY)
    own = load_tokeniser(resolve_model_folder(BEGINS_WITH))
    model = grow(load_model(BEGINS_WITH), own, tokeniser, ADDED)
    save_model(model, chosen.folder / "begin", tokeniser=tokeniser, facts={"begun_from": BEGINS_WITH})
    return 0

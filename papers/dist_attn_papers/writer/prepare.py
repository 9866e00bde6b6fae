"""Make the texts, the vocabulary and the first weights of the writer: `dist-attn bench writer FOLDER --books NOVELS`.

`dist-attn train papers/dist_attn_papers/writer/train.toml` goes on from there.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import nn

from dist_attn.checkpoints import load_model, resolve_model_folder, save_model
from dist_attn.errors import ConfigError
from dist_attn.models import LanguageModel, LanguageModelConfig, build_model
from dist_attn.models.blocks import Block
from dist_attn.text import Tokeniser, load_tokeniser
from dist_attn.text.bpe import train_bpe
from dist_attn_papers.writer.texts import write_texts

__all__ = ["grow", "main"]

BEGINS_WITH = "books-6m"
VOCABULARY = 8192
ADDED = {"kind": "gated_delta", "num_heads": 4}


def grow(small: LanguageModel, own: Tokeniser, tokeniser: Tokeniser, added: dict[str, object]) -> LanguageModel:
    """A model with a layer of mixer `added` behind each of `small`, over the tokens of `tokeniser`.

    New layers put out zeros, so that training begins where the smaller model ended. A new token begins as the mean of
    the old tokens that its bytes were.

    Raises: ConfigError for a model whose layers have different mixers already, and for one with weights of its own for
        positions or the read-out.
    """
    config = small.config.model_dump()
    if config["mixer"]["kind"] == "hybrid":
        raise ConfigError("the model has a pattern of mixers; needed is one whose layers are alike")
    if small.config.readout == "own" or small.config.positions not in ("none", "sinusoidal"):
        kind = getattr(small.config.positions, "kind", small.config.positions)
        raise ConfigError(
            f"the model has readout = {small.config.readout} and positions = {kind}, and weights of these are not "
            "taken over; needed are readout = tied, and positions = none or sinusoidal"
        )
    config |= {
        "vocab_size": tokeniser.vocab_size,
        "num_layers": 2 * small.config.num_layers,
        "mixer": {"kind": "hybrid", "pattern": [config["mixer"], {"hidden_size": config["hidden_size"], **added}]},
    }
    large = build_model(LanguageModelConfig.model_validate(config))
    with torch.no_grad():
        pairs = zip(cast(list[Block], list(large.blocks))[::2], small.blocks, strict=True)
        for mine, theirs in pairs:
            mine.load_state_dict(theirs.state_dict())
        for block in cast(list[Block], list(large.blocks))[1::2]:
            for layer in (cast(nn.Linear, block.mixer.out), block.mlp_out):
                nn.init.zeros_(layer.weight)
                if layer.bias is not None:
                    nn.init.zeros_(layer.bias)
        large.norm.load_state_dict(small.norm.state_dict())
        for token in range(tokeniser.vocab_size):
            text = tokeniser.decode([token])
            ids = own.encode(text) if text else [own.end_token]
            large.embedding.weight[token] = small.embedding.weight[torch.as_tensor(ids, dtype=torch.long)].mean(0)
    return large


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

"""A larger model that computes what a smaller one does: more layers that add nothing yet, and a larger vocabulary.

New layers stand behind every old one with outputs of zero, so that training begins where the smaller model ended. A new
token begins as the mean of the old tokens that its bytes were.
"""

from typing import cast

import torch
from torch import nn

from dist_attn.errors import ConfigError
from dist_attn.models import LanguageModel, LanguageModelConfig, build_model
from dist_attn.models.blocks import Block
from dist_attn.text import Tokeniser

__all__ = ["grow"]


def grow(small: LanguageModel, own: Tokeniser, tokeniser: Tokeniser, added: dict[str, object]) -> LanguageModel:
    """A model with a layer of mixer `added` behind each of `small`, over the tokens of `tokeniser`.

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

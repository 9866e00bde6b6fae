"""Classifiers of pairs that begin with the encoder of one that tells authors apart."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dist_attn.checkpoints import load_any_model, save_model
from dist_attn.models import TextClassifier, TextClassifierConfig
from dist_attn.text import load_tokeniser
from dist_attn_research.papers.made_once import make_once

__all__ = ["towers_of"]


def towers_of(authors: Path, model: Mapping[str, Any], seed: int, folder: Path) -> Path:
    """The model folder, made once, of the classifier `model`: embedding and encoder of `authors`, and a fresh head."""

    def make(beside: Path) -> None:
        trained = load_any_model(authors)
        assert isinstance(trained, TextClassifier)  # what the job of the authors trains
        torch.manual_seed(seed)
        pairs = TextClassifier(TextClassifierConfig.model_validate(model))
        pairs.embedding.load_state_dict(trained.embedding.state_dict())
        pairs.encoder.load_state_dict(trained.encoder.state_dict())
        save_model(pairs, beside, tokeniser=load_tokeniser(authors))

    return make_once(folder, make)

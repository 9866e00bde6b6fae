"""Tiny random folders of sentence encoders, in the form that sentence-transformers writes: MiniLM's shape."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.tokenisers import PROSE

VOCABULARY = 400
MAX_TOKENS = 24
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]

TEXTS = (
    "It was the best of times, it was the worst of times.",
    "I don't know",
    "The café’s NAÏVE owner smiled — “isn’t that friendship?”",
    "日本語 and emoji 🙂 and кириллица",
    "wisdom " * 50,
    " \t the age of foolishness\n",
    "x",
)


@cache
def word_piece_contents(*, lowercase: bool = True) -> str:
    """The tokenizer.json of a small WordPiece with BERT's steps, trained on a few lines of prose."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=VOCABULARY - 20, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator([PROSE], trainer)
    ends = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=ends
    )
    return str(tokenizer.to_str())


def write_sentence_encoder(
    folder: Path, *, pooling: str = "mean", normalise: bool = True, heads: bool = False, **changes: Any
) -> Any:
    """The BertModel that was written, every parameter random; around it the files that say how it pools.

    `heads`: as BertForPreTraining writes it, with a prefix before every name and heads behind.
    """
    transformers = pytest.importorskip("transformers", reason="the folders are written by transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 3, "intermediate_size": 48}
    values = {"vocab_size": VOCABULARY, "max_position_embeddings": 40, **sizes, **changes}
    config = transformers.BertConfig(**values)
    model = (transformers.BertForPreTraining if heads else transformers.BertModel)(config).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Small biases, and norms near 1: otherwise every text would have nearly the same vector.
            scale = 1.0 if "word_embeddings" in name else 0.3 if parameter.dim() == 2 else 0.1
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
            if name.endswith("LayerNorm.weight"):
                parameter.add_(1.0)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(word_piece_contents())
    marks = {name.strip("[]").lower() + "_token": name for name in SPECIAL}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512, **marks})
    )
    modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling")] + [
        ("2", "2_Normalize", "Normalize")
    ] * normalise
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": int(name), "name": name, "path": path, "type": f"sentence_transformers.models.{kind}"}
                for name, path, kind in modules
            ]
        )
    )
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{mode}": mode.startswith(pooling) for mode in ("cls_token", "mean_tokens", "max_tokens")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 32, **modes}))
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": MAX_TOKENS, "do_lower_case": False})
    )
    return model.bert if heads else model


def sentence_transformer(folder: Path) -> Any:
    """The folder as sentence-transformers loads it."""
    library = pytest.importorskip("sentence_transformers", reason="the vectors are compared with its own")
    return library.SentenceTransformer(str(folder), device="cpu", local_files_only=True)

"""A small BPE tokeniser learnt from a few lines of prose, for tests that need one quickly."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dist_attn.text import BpeTokeniser, ByteLevelTokeniser, SentencePieceTokeniser, train_bpe

PROSE = (
    "It was the best of times, it was the worst of times; it was the age of wisdom, it was the age of foolishness.\n"
    '"I don\'t know," said the count\'s friend, "whether they\'ll come at 10 or at 12:30 -- perhaps never."\n\n'
    "“Isn’t that friendship?” the visitor remarked, — in an inquiring tone…  The café’s naïve owner   smiled.\n"
    "for index in range(1024):\n\tprint(index)  # 日本語 and emoji 🙂🙂 and кириллица\r\n"
) * 4


@cache
def small_bpe() -> BpeTokeniser:
    """A tokeniser of about 400 ids."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "prose.txt"
        path.write_bytes(PROSE.encode())
        return train_bpe([path], 400)


LLAMA_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@cache
def foreign_contents(pattern: str | None = None) -> str:
    """The tokenizer.json of a small byte-level BPE, cut as GPT-2's or by a pattern; `<|endoftext|>` has id 0."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None)
    split = None if pattern is None else pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = level if split is None else pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=350, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator([PROSE], trainer)
    return str(tokenizer.to_str())


@cache
def foreign_bpe(pattern: str | None = None) -> ByteLevelTokeniser:
    """The tokeniser of `foreign_contents`."""
    contents: dict[str, Any] = json.loads(foreign_contents(pattern))
    return ByteLevelTokeniser(contents, "<|endoftext|>")


def llama_bpe() -> ByteLevelTokeniser:
    """`foreign_bpe` with the cut of Llama 3."""
    return foreign_bpe(LLAMA_PATTERN)


FAILS_AT = "a" * 40 + "b"
"""A text at which the tokeniser of `failing_contents` panics."""


def failing_contents() -> dict[str, Any]:
    """A tokenizer.json whose pattern takes a run of `a` in exponentially many ways, until the library gives up."""
    contents: dict[str, Any] = json.loads(foreign_contents(r"(a+)+$|[^a]+"))
    return contents


@cache
def sentence_piece_contents(kind: str, metaspace: bool) -> str:
    """A small tokenizer.json of SentencePiece (`BPE` or `Unigram`) with byte fallback; `</s>` has id 2.

    Blanks become their character by a Metaspace, as newer files have it, or by normalisers, as Llama 2's has.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    special = ["<unk>", "<s>", "</s>"]
    first = [*special, *(f"<0x{value:02X}>" for value in range(256))]
    if kind == "BPE":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
        trainer: Any = trainers.BpeTrainer(vocab_size=345, special_tokens=first, show_progress=False)
    else:
        tokenizer = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(vocab_size=345, special_tokens=first, unk_token="<unk>", show_progress=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.train_from_iterator([PROSE], trainer)
    if not metaspace:
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    contents = json.loads(tokenizer.to_str())
    contents["added_tokens"] = [token for token in contents["added_tokens"] if token["content"] in special]
    contents["model"]["byte_fallback"] = True
    return json.dumps(contents | ({} if metaspace else {"pre_tokenizer": None}))


@cache
def sentence_piece(kind: str, metaspace: bool) -> SentencePieceTokeniser:
    """The tokeniser of `sentence_piece_contents`."""
    return SentencePieceTokeniser(json.loads(sentence_piece_contents(kind, metaspace)), "</s>")


def _split_by(text: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"String": text}, "behavior": "MergedWithPrevious", "invert": False}


@cache
def downloaded_contents(kind: str) -> str:
    """The tokenizer.json of a folder as it is downloaded, of `llama3`, `llama2`, `gemma`, `deepseek` or `t5` in small.

    All but the last have a token that is added and not special, `<tool>`; `<|bos|>` or `<s>` frames texts.
    """
    if kind in ("llama3", "deepseek"):
        contents = json.loads(foreign_contents(LLAMA_PATTERN))
        if kind == "deepseek":
            steps = contents["pre_tokenizer"]["pretokenizers"]
            digits = {"type": "Digits", "individual_digits": True}
            contents["pre_tokenizer"]["pretokenizers"] = [digits, *steps]
        begin = {"content": "<|bos|>", "special": True}
    else:
        contents = json.loads(sentence_piece_contents("Unigram" if kind == "t5" else "BPE", kind == "t5"))
        begin = {"content": "<s>", "special": True}
    if kind == "llama2":
        contents["decoder"]["decoders"].append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    if kind == "gemma":
        contents |= {"normalizer": contents["normalizer"]["normalizers"][1], "pre_tokenizer": _split_by(" ")}
    if kind == "t5":
        contents["normalizer"] = {"type": "NFKC"}
        contents["decoder"] = contents["pre_tokenizer"]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    for token in (begin, {"content": "<tool>", "special": False}):
        if token["content"] not in [one["content"] for one in contents["added_tokens"]]:
            number = len(contents["model"]["vocab"]) + (token["content"] == "<tool>" and begin["content"] == "<|bos|>")
            contents["added_tokens"].append(flags | token | {"id": number})
    number = next(one["id"] for one in contents["added_tokens"] if one["content"] == begin["content"])
    text, first = begin["content"], {"SpecialToken": {"id": begin["content"], "type_id": 0}}
    parts = [first, {"Sequence": {"id": "A", "type_id": 0}}]
    contents["post_processor"] = {
        "type": "TemplateProcessing",
        "single": parts,
        "pair": [*parts, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {text: {"id": text, "ids": [number], "tokens": [text]}},
    }
    return json.dumps(contents)


def sentence_piece_bpe() -> SentencePieceTokeniser:
    """BPE in the manner of Llama 2."""
    return sentence_piece("BPE", False)


def unigram() -> SentencePieceTokeniser:
    """Unigram behind a Metaspace."""
    return sentence_piece("Unigram", True)

"""The reading of whole texts as by transformers' AutoTokenizer: normalised, with added tokens and framing ones."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from dist_attn.text.base import TokenArray

__all__ = ["DECIDING", "WholeText", "content_of", "decoder_steps"]

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
CUT = -1
"""The place of a cut among token ids: it stands for nothing, but both sides of it are read apart."""
DECIDING = (*_NAMED, "added_tokens_decoder")
"""The entries of tokenizer_config.json that decide which tokens a text gives."""

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")


class WholeText:
    """A tokenizer.json with its tokenizer_config.json, read by the `tokenizers` library. Memory: whole texts.

    Texts are framed by the template of tokenizer.json alone: transformers passes over `add_bos_token` beside it.

    One value may serve any number of threads.
    """

    def __init__(self, contents: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        self._tokenizer = Tokenizer.from_str(json.dumps({**contents, "truncation": None, "padding": None}))
        _add_named(self._tokenizer, about)
        self._added: dict[int, AddedToken] = self._tokenizer.get_added_tokens_decoder()
        steps = decoder_steps(contents)
        falls_back = any(step["type"] == "ByteFallback" for step in steps)
        vocab = self._tokenizer.get_vocab() if falls_back else {}
        self.byte_tokens = frozenset(number for text, number in vocab.items() if _BYTE_TOKEN.fullmatch(text))
        """Tokens of single bytes whose runs are text only where all of a run is UTF-8."""
        self.dropped_blanks = max((_dropped(step) for step in steps), default=0)
        """The number of blanks at the beginning of a whole text that are no part of it."""

    @property
    def library(self) -> Tokenizer:
        """The library's own value."""
        return self._tokenizer

    @cached_property
    def special_tokens(self) -> dict[str, int]:
        """The id of each special token, by its text."""
        return {token.content: number for number, token in self._added.items() if token.special and token.content}

    def encode(self, text: str, *, framed: bool) -> TokenArray:
        """Encode a text, `framed` by the tokens that its file puts around every text."""
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=framed)  # leaves other threads free
        return np.array(encoding.ids, dtype=np.int32)

    def encode_parts(self, parts: Sequence[str | int]) -> TokenArray:
        """Encode texts, which never become special tokens, and the special tokens between them; not framed.

        These are the tokens of the whole text wherever no text holds the name of a special token.
        """
        found, told = self._encode_guarded(parts)
        special = frozenset(self.special_tokens.values())
        if not any(number in special for number, named in zip(found, told, strict=True) if not named):
            return np.array(found, dtype=np.int32)
        # Models such as Unigram have special tokens among their words: such a name is cut behind its first character.
        name = re.compile(
            "|".join(f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})" for text in self.special_tokens)
        )
        cut: list[str | int] = []
        for part in parts:
            pieces = [part] if isinstance(part, int) else [piece for text in name.split(part) for piece in (text, CUT)]
            cut += pieces[:-1] if isinstance(part, str) else pieces
        found, _ = self._encode_guarded(cut)
        return np.array([number for number in found if number != CUT], dtype=np.int32)

    def _encode_guarded(self, parts: Sequence[str | int]) -> tuple[list[int], list[bool]]:
        """Encode the parts, with CUT at each cut; tells of each token whether it is a special one between texts."""
        guarded, names, ids = self._guarded
        text = "".join(part if isinstance(part, str) else names[part] for part in parts)
        (encoding,) = guarded.encode_batch_fast([text], add_special_tokens=False)
        numbers = encoding.ids
        return [ids.get(number, number) for number in numbers], [ids.get(number) in names for number in numbers]

    @cached_property
    def _guarded(self) -> tuple[Tokenizer, dict[int, str], dict[int, int]]:
        """The tokenizer with names for its special tokens, drawn by chance, that no text can hold.

        Its added tokens have numbers of their own; the last value has the true one of each.
        """
        secret = secrets.token_hex(16)
        names = {number: f"\ufdd0{secret}-{number}\ufdd0" for number, token in self._added.items() if token.special}
        names[CUT] = f"\ufdd0{secret}\ufdd0"
        guarded = Tokenizer(self._tokenizer.model)
        for part in ("normalizer", "pre_tokenizer"):
            if getattr(self._tokenizer, part) is not None:
                setattr(guarded, part, getattr(self._tokenizer, part))
        guarded.add_special_tokens([AddedToken(names[CUT], special=True, normalized=False)])
        texts = {names[CUT]: CUT}
        for number, token in sorted(self._added.items()):
            name = names.get(number, token.content)
            texts[name] = number
            flags = {"lstrip": token.lstrip, "rstrip": token.rstrip}
            if token.special:
                guarded.add_special_tokens([AddedToken(name, special=True, normalized=False, **flags)])
            else:
                flags |= {"normalized": token.normalized, "single_word": token.single_word}
                guarded.add_tokens([AddedToken(name, **flags)])
        found = {guarded.token_to_id(text): number for text, number in texts.items()}
        return guarded, names, {given: number for given, number in found.items() if given is not None}


def content_of(value: Any) -> str | None:
    """The text of a token as tokenizer_config.json names it: as a text, or as an object with its `content`."""
    value = value.get("content") if isinstance(value, dict) else value
    return value if isinstance(value, str) else None


def decoder_steps(contents: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The steps of the decoder of a tokenizer.json, one after the other."""
    decoder = contents.get("decoder")
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]


def _dropped(step: Mapping[str, Any]) -> int:
    match step:
        case {"type": "Strip", "content": " ", "start": int() as count}:
            return count
        case {"type": "Metaspace"}:
            return int(step.get("prepend_scheme", "always") != "never")
        case {"type": "WordPiece"}:
            return 1
    return 0


def _add_named(tokenizer: Tokenizer, about: Mapping[str, Any]) -> None:
    """Make special tokens of those that tokenizer_config.json names and tokenizer.json does not have as added ones."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed, named = about.get("added_tokens_decoder"), [about.get(name) for name in _NAMED]
    in_order = sorted((listed if isinstance(listed, dict) else {}).items(), key=lambda item: int(item[0]))
    special_texts = {content_of(value) for value in named}
    for value in (*(token for _, token in in_order), *named):
        text = content_of(value)
        if not text or text in known:
            continue
        known.add(text)
        flags = value if isinstance(value, dict) else {}
        about_it = {
            name: bool(flags[name]) for name in ("lstrip", "rstrip", "normalized", "single_word") if name in flags
        }
        special = text in special_texts or bool(flags.get("special", True))
        add = tokenizer.add_special_tokens if special else tokenizer.add_tokens
        add([AddedToken(text, special=special, **about_it)])

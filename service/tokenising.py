"""Tokenising beside the event loop: the port the service uses, and its form with threads."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from dist_attn.text import IncrementalDecoder, Tokeniser
from service.engine_stream import TokenArray

__all__ = ["Piece", "ThreadTokeniser", "TokeniserPort", "tokens_of"]

T = TypeVar("T")


@dataclass(frozen=True)
class Piece:
    """Some tokens of a stream and the length of each in bytes."""

    tokens: TokenArray
    byte_lengths: npt.NDArray[np.integer[Any]]


class TokeniserPort(Protocol):
    """What the service needs of a tokeniser; no call blocks the event loop."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def end_token(self) -> int | None:
        """The token that ends a text, if the model has one."""

    def pieces(self, blocks: AsyncIterator[bytes]) -> AsyncGenerator[Piece]:
        """The tokens of a stream of bytes; they do not depend on where the stream is cut."""

    def decoder(self) -> IncrementalDecoder:
        """A fresh decoder from tokens to text."""

    def token_text(self, token: int) -> str:
        """One token by itself; the bytes of one that is no whole character, as `bytes:\\xe2\\x82`."""

    async def texts(self, tokens: TokenArray) -> list[str]:
        """`token_text` of each of these."""

    async def text(self, tokens: TokenArray) -> str:
        """The text that the tokens make together; U+FFFD in place of what is not UTF-8.

        Raises: TokenError for an id outside the vocabulary.
        """


async def tokens_of(tokeniser: TokeniserPort, text: bytes, piece_bytes: int, limit: int | None = None) -> TokenArray:
    """The tokens of a whole text that is in memory, the first `limit` of them where there is one."""
    pieces, count = [np.empty(0, dtype=np.int32)], 0
    async with contextlib.aclosing(tokeniser.pieces(_cut(text, piece_bytes))) as stream:
        async for piece in stream:
            pieces.append(piece.tokens)
            count += len(piece.tokens)
            if limit is not None and count >= limit:
                break
    return np.concatenate(pieces)[:limit]


async def _cut(text: bytes, size: int) -> AsyncIterator[bytes]:
    for start in range(0, len(text), size):
        yield text[start : start + size]


class ThreadTokeniser:
    """Tokenises in a thread pool, in blocks so short that other threads are not kept waiting."""

    def __init__(self, tokeniser: Tokeniser, threads: Executor) -> None:
        self._tokeniser = tokeniser
        self._threads = threads

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._tokeniser.vocab_size

    @property
    def end_token(self) -> int | None:
        """The token that ends a text, if the model has one."""
        return self._tokeniser.end_token

    async def pieces(self, blocks: AsyncIterator[bytes]) -> AsyncGenerator[Piece]:
        """The tokens of a stream of bytes; what a block leaves over (a few bytes, or a word) joins the next.

        Bytes that no token stands for count for the token behind them.
        """
        rest, gap = b"", 0  # what has been left over, and the bytes since the last token's end
        async for block in blocks:
            piece, rest, gap = await self._run(partial(self._encode, rest + block, gap, final=False))
            if len(piece.tokens):
                yield piece
        piece, _, _ = await self._run(partial(self._encode, rest, gap, final=True))
        if len(piece.tokens):
            yield piece

    def decoder(self) -> IncrementalDecoder:
        """A fresh decoder from tokens to text."""
        return IncrementalDecoder(self._tokeniser)

    def token_text(self, token: int) -> str:
        """One token by itself; the bytes of one that is no whole character."""
        data = self._tokeniser.decode([token])
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    async def texts(self, tokens: TokenArray) -> list[str]:
        """`token_text` of each of these."""
        return await self._run(lambda: [self.token_text(token) for token in tokens.tolist()])

    async def text(self, tokens: TokenArray) -> str:
        """The text that the tokens make together."""
        return await self._run(lambda: self._tokeniser.decode(tokens).decode("utf-8", errors="replace"))

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _encode(self, data: bytes, gap: int, *, final: bool) -> tuple[Piece, bytes, int]:
        tokens, ends, consumed = self._tokeniser.encode_with_ends(data, final=final)
        after = consumed - int(ends[-1]) if len(ends) else gap + consumed
        return Piece(tokens, np.diff(ends, prepend=-gap)), data[consumed:], after

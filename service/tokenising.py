"""Tokenising beside the event loop: the port the service uses, and its form with threads."""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Executor
from dataclasses import dataclass
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

    def pieces(self, blocks: AsyncIterator[bytes]) -> AsyncIterator[Piece]:
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


async def tokens_of(tokeniser: TokeniserPort, text: bytes, piece_bytes: int) -> TokenArray:
    """The tokens of a whole text that is in memory."""
    pieces = [piece.tokens async for piece in tokeniser.pieces(_cut(text, piece_bytes))]
    return np.concatenate(pieces) if pieces else np.empty(0, dtype=np.int32)


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

    async def pieces(self, blocks: AsyncIterator[bytes]) -> AsyncIterator[Piece]:
        """The tokens of a stream of bytes; what a block leaves over (at most 64 bytes) joins the next."""
        loop = asyncio.get_running_loop()
        rest = b""
        async for block in blocks:
            piece, rest = await loop.run_in_executor(self._threads, self._encode, rest + block, False)
            if len(piece.tokens):
                yield piece
        piece, _ = await loop.run_in_executor(self._threads, self._encode, rest, True)
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

    def _encode(self, data: bytes, final: bool) -> tuple[Piece, bytes]:
        tokens, consumed = self._tokeniser.encode_piece(data, final=final)
        return Piece(tokens, self._tokeniser.byte_lengths(tokens)), data[consumed:]

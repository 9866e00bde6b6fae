"""Tokenising beside the event loop, in threads: texts that still come, texts in memory, and tokens as texts."""

import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dist_attn.errors import TokenError, TokeniserError
from dist_attn.text import ForeignTokeniser, IncrementalDecoder, Tokeniser
from dist_attn.text.base import TokenArray
from dist_attn.text.library import MOST_BYTES
from dist_attn_service.base.errors import BadRequest, TooLarge
from dist_attn_service.base.logs import Log
from dist_attn_service.base.tasks import beside

__all__ = ["Piece", "TextMark", "TextMarks", "ThreadTokeniser", "cut"]


class TextMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A place of a text where tokenising may begin again: the bytes before `byte` make `tokens` tokens.

    The last of these tokens ends `gap` bytes before `byte`.
    """

    tokens: int = 0
    byte: int = 0
    gap: int = 0


BEGINNING = TextMark()


class TextMarks:
    """The marks of a text that is being read. Memory: those after the last position that was asked for."""

    def __init__(self, begin: TextMark = BEGINNING) -> None:
        self._marks = deque([begin])

    def push(self, mark: TextMark) -> None:
        """Add the next mark."""
        self._marks.append(mark)

    def before(self, tokens: int) -> TextMark:
        """The last mark with so many tokens or fewer before it; those before it are forgotten."""
        while len(self._marks) > 1 and self._marks[1].tokens <= tokens:
            self._marks.popleft()
        return self._marks[0]


@dataclass(frozen=True)
class Piece:
    """Some tokens of a stream and the length of each in bytes; `mark` is where the next ones begin."""

    tokens: TokenArray
    byte_lengths: npt.NDArray[np.integer[Any]]
    mark: TextMark = BEGINNING


class ThreadTokeniser:
    """A tokeniser in a thread pool, with blocks so short that neither the event loop nor other threads wait long.

    A text at which the tokeniser fails is logged with the name of the `model`.
    """

    def __init__(
        self,
        tokeniser: Tokeniser,
        threads: Executor,
        piece_bytes: int = 64 << 10,
        *,
        model: str = "",
        log: Log | None = None,
    ) -> None:
        self._tokeniser = tokeniser
        self._threads = threads
        self._piece_bytes = piece_bytes
        self._model = model
        self._log = log

    @property
    def vocab_size(self) -> int:
        """The number of token ids, which are all below it."""
        return self._tokeniser.vocab_size

    async def pieces(self, blocks: AsyncIterator[bytes], begin: TextMark = BEGINNING) -> AsyncGenerator[Piece]:
        """The tokens of a stream of bytes; they do not depend on where the stream is cut.

        The rest of a block (a few bytes, or a word) joins the next. Bytes that no token stands for count for the
        token after them. With `begin`, a mark of an earlier reading, `blocks` are the bytes from there on, and so are
        the tokens.

        Raises: TooLarge for a text that is too long for a tokeniser that cannot read in pieces; BadRequest for
            one at which it fails.
        """
        rest, mark = b"", begin  # the rest of the last block, and where it begins
        async for block in blocks:
            piece, rest = await beside(self._threads, self._encode, rest + block, mark, final=False)
            mark = piece.mark
            if len(piece.tokens):
                yield piece
        piece, _ = await beside(self._threads, self._encode, rest, mark, final=True)
        if len(piece.tokens):
            yield piece

    def decoder(self) -> IncrementalDecoder:
        """A fresh decoder from tokens to text."""
        return IncrementalDecoder(self._tokeniser)

    def token_text(self, token: int) -> str:
        """One token by itself; the bytes of one that is no whole character, as `bytes:\\xe2\\x82`."""
        data = self._tokeniser.decode([token])
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    @property
    def special_tokens(self) -> Mapping[str, int]:
        """The id of each special token, by its text."""
        return self._tokeniser.special_tokens

    async def whole(self, text: bytes, *, framed: bool = True) -> TokenArray:
        """The tokens of a text that is in memory and read as a whole, such as a prompt, as transformers makes them.

        `framed`: with the tokens that the model's files put around every text. A text that is too long for that is read
        in pieces, as a stream is.

        Raises: BadRequest where the model lacks one of the tokens; as `pieces`.
        """
        tokeniser = self._tokeniser
        if not isinstance(tokeniser, ForeignTokeniser):
            return await self.tokens(text)
        if len(text) <= MOST_BYTES:
            return await self._or_refused(lambda: tokeniser.encode_whole(text, framed=framed))
        before, behind = tokeniser.frame() if framed else ([], [])
        middle = await self.tokens(text)
        return np.concatenate([np.array(before, np.int32), middle, np.array(behind, np.int32)])

    async def tokens(self, text: bytes, limit: int | None = None) -> TokenArray:
        """The tokens of a text that is in memory, read in pieces; the first `limit` of them where there is one."""
        pieces, count = [np.empty(0, dtype=np.int32)], 0
        async with contextlib.aclosing(self.pieces(cut(text, self._piece_bytes))) as stream:
            async for piece in stream:
                pieces.append(piece.tokens)
                count += len(piece.tokens)
                if limit is not None and count >= limit:
                    break
        return np.concatenate(pieces)[:limit]

    async def parts(self, parts: Sequence[str | int]) -> TokenArray:
        """The tokens of texts, which never become special tokens, and of special tokens between them."""
        return await self._or_refused(lambda: self._tokeniser.encode_parts(parts))

    async def _or_refused(self, work: Callable[[], TokenArray]) -> TokenArray:
        """Run work that makes tokens.

        Raises: BadRequest where the model lacks one of the tokens, or its tokeniser fails.
        """
        try:
            return await beside(self._threads, work)
        except TokeniserError as error:
            raise self._failed(error) from None
        except TokenError as error:
            raise BadRequest(str(error)) from None

    async def texts(self, tokens: TokenArray) -> list[str]:
        """The `token_text` of each of these tokens."""
        return await beside(self._threads, lambda: [self.token_text(token) for token in tokens.tolist()])

    async def offsets(self, tokens: TokenArray) -> list[int]:
        """The place at which each token begins in the text that they make together, in characters."""

        def work() -> list[int]:
            decoder = IncrementalDecoder(self._tokeniser, begins=True)
            lengths = (len(decoder.push(token)) for token in tokens.tolist())
            return list(accumulate(lengths, initial=0))[:-1]

        return await beside(self._threads, work)

    async def text(self, tokens: TokenArray) -> str:
        """The text that the tokens make together; U+FFFD in place of bytes that are not UTF-8.

        Raises: TokenError for an id outside the vocabulary.
        """

        def work() -> str:
            decoder = IncrementalDecoder(self._tokeniser, begins=True)
            return "".join(map(decoder.push, tokens.tolist())) + decoder.finish()

        return await beside(self._threads, work)

    def _failed(self, error: TokeniserError) -> BadRequest:
        """Log a failure of the tokeniser, and make the refusal without its words, which have a path of this machine."""
        if self._log is not None:
            self._log.error("the tokeniser of a model failed at a text", model=self._model, error=str(error))
        return BadRequest(
            f"the tokeniser of the model {self._model!r} fails at this text, for a reason that the service's log has; "
            "send another text"
        )

    def _encode(self, data: bytes, mark: TextMark, *, final: bool) -> tuple[Piece, bytes]:
        """The tokens of the bytes from a mark on, as far as they are certain, and the bytes after them."""
        try:
            tokens, ends, consumed = self._tokeniser.encode_with_ends(data, final=final)
        except TokeniserError as error:
            raise self._failed(error) from None
        except TokenError as error:  # a kind of tokeniser that reads whole texts alone
            raise TooLarge(str(error)) from None
        gap = consumed - int(ends[-1]) if len(ends) else mark.gap + consumed
        after = TextMark(mark.tokens + len(tokens), mark.byte + consumed, gap)
        return Piece(tokens, np.diff(ends, prepend=-mark.gap), after), data[consumed:]


async def cut(text: bytes, size: int) -> AsyncGenerator[bytes]:
    """Yield a text that is in memory in pieces of so many bytes."""
    for start in range(0, len(text), size):
        yield text[start : start + size]

"""The check that a stream of bytes is plain text in UTF-8, wherever it is cut."""

import codecs
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import final

from dist_attn.text.plain import HEAD_BYTES, extracted_as, may_be_other, only_names_html, refusal_of
from dist_attn_service.base.errors import BadRequest, Code, ServiceError

__all__ = ["TextCheck", "Utf8Check", "refuse_other", "unreadable", "utf8_checked"]

AS_BYTES = {"hint": "to have bytes read as they are, send them as a body with Content-Type: application/octet-stream"}


class Utf8Check:
    """A check of a stream for valid UTF-8, wherever it is cut; `start` is the byte of the text at which it begins."""

    def __init__(self, start: int = 0) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("strict")
        self._checked = start

    def push(self, chunk: bytes, *, final: bool = False) -> None:
        """Check the next bytes.

        Raises: BadRequest naming the offset of the first byte that is wrong.
        """
        pending = len(self._decoder.getstate()[0])
        try:
            self._decoder.decode(chunk, final)
        except UnicodeDecodeError as error:
            raise BadRequest(
                f"byte {self._checked - pending + error.start} of the text is not valid UTF-8 ({error.reason}); "
                "convert the text, as with `iconv -f latin1 -t utf-8 book.txt > book-utf8.txt`, and send that",
                code=Code.INVALID_UTF8,
                param="input",
                facts=dict(AS_BYTES),
            ) from None
        self._checked += len(chunk)


@final
class TextCheck:
    """A check of a document that arrives: that it is plain text, and for a media type `text/…` that it is UTF-8.

    With `others` those pass too whose text can be taken out.
    Holds at most HEAD_BYTES bytes, and those only while they may begin something else.

    Raises: ServiceError (415) for a media type of no plain text.
    """

    def __init__(self, media_type: str, *, others: bool = False) -> None:
        self._others, self._type = others, media_type
        if not (others and extracted_as(b"", media_type)):
            refuse_other(b"", media_type)
        self._utf8 = Utf8Check() if media_type.startswith("text/") else None
        self._head: bytes | None = b""

    def push(self, chunk: bytes, *, final: bool = False) -> bytes:
        """Check the next bytes; return those that are checked by now.

        Raises: ServiceError (415) for another kind of file, BadRequest for bytes that are not UTF-8.
        """
        if self._head is not None:
            chunk = self._head + chunk
            if not final and len(chunk) < HEAD_BYTES and may_be_other(chunk):
                self._head = chunk
                return b""
            head = chunk[:HEAD_BYTES]
            if self._others and extracted_as(head) and not only_names_html(head, self._type):
                self._utf8 = None
            else:
                refuse_other(head, self._type)
            self._head = None
        if self._utf8 is not None:
            self._utf8.push(chunk, final=final)
        return chunk


def refuse_other(head: bytes, media_type: str = "") -> None:
    """Refuse a file that is not plain text by its first bytes or its media type. Raises: ServiceError (415)."""
    words = refusal_of(head, media_type)
    if words is not None:
        raise unreadable(words)


def unreadable(words: str) -> ServiceError:
    """The error for a document of which no text can be had."""
    return ServiceError(words, code=Code.UNSUPPORTED_MEDIA_TYPE, param="input", facts=dict(AS_BYTES))


async def utf8_checked(pieces: AsyncGenerator[bytes]) -> AsyncGenerator[bytes]:
    """Yield the pieces, checked.

    Raises: BadRequest for bytes that are not UTF-8.
    """
    check = Utf8Check()
    async with aclosing(pieces):
        async for piece in pieces:
            check.push(piece)
            yield piece
    check.push(b"", final=True)

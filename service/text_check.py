"""Whether a stream of bytes is valid UTF-8, wherever it is cut."""

import codecs

from service.errors import BadRequest, Code

__all__ = ["Utf8Check"]


class Utf8Check:
    """Checks a stream for valid UTF-8, wherever it is cut; `start` is the byte of a text that it begins with."""

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
                "send UTF-8, or any bytes as Content-Type: application/octet-stream",
                code=Code.INVALID_UTF8,
                param="input",
            ) from None
        self._checked += len(chunk)

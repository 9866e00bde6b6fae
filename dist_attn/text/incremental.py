"""Text from tokens as they are drawn: a character that is split over tokens waits until it is whole."""

import codecs

from dist_attn.text.base import Tokeniser

__all__ = ["IncrementalDecoder"]


class IncrementalDecoder:
    """UTF-8 text, token by token; bytes that are not UTF-8 become U+FFFD."""

    def __init__(self, tokeniser: Tokeniser) -> None:
        self._tokeniser = tokeniser
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that is certain after one more token; empty while a character is incomplete.

        Raises: TokenError for an id outside the vocabulary.
        """
        return self._utf8.decode(self._tokeniser.decode([token]))

    def finish(self) -> str:
        """What is left: U+FFFD if the last character never became whole. The decoder then starts afresh."""
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text

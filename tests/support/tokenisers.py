"""A small BPE tokeniser learnt from a few lines of prose, for tests that need one quickly."""

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from dist_attn.text import BpeTokeniser, train_bpe

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

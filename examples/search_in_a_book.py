"""Search inside a book: the passages whose vectors point the way that a question's vector does.

Needs a running service, which has `minilm-stream` for it beside the model that writes:

    dist-attn serve
    python examples/search_in_a_book.py book.txt "the whale struck the ship"

With --like N the question is passage N of the book itself.
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from dist_attn.client import Client
from dist_attn.errors import DistAttnError


def main() -> None:
    """Encode, compare, print the best passages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("book", type=Path)
    parser.add_argument("question", nargs="?", help="what is looked for; needed unless --like is given")
    parser.add_argument("--like", type=int, metavar="N", help="look for passages like passage N")
    parser.add_argument("--window", type=int, default=256, help="tokens of a passage")
    parser.add_argument("--best", type=int, default=5, help="how many are shown")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    options = parser.parse_args()
    if (options.question is None) == (options.like is None):
        parser.error("give a question or --like N, one of them")

    text = options.book.read_bytes()
    with Client(options.url) as client:
        rows = list(client.encode(text, window=options.window))
        vectors = np.stack([row.embedding for row in rows])
        if options.like is None:
            (row,) = client.encode(options.question, granularity="document")  # as long as the book's rows
            asked = row.embedding
        elif 0 <= options.like < len(rows):
            asked = vectors[options.like]
        else:
            parser.error(f"--like is {options.like}; this book has passages 0 to {len(rows) - 1}")

    # Hidden states share a large direction: only what differs from the book's mean tells passages apart.
    mean = vectors.mean(axis=0)
    directions = unit(vectors - mean)
    closeness = directions @ unit(asked - mean)
    for index in np.argsort(-closeness)[: options.best]:
        row = rows[index]
        passage = " ".join(text[row.byte_start : row.byte_stop].decode(errors="replace").split())
        print(f"{closeness[index]:6.3f}  passage {index}, byte {row.byte_start}: {passage[:100]}…")


def unit(vectors: np.ndarray) -> np.ndarray:
    """The vectors at length 1."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12)


if __name__ == "__main__":
    try:
        main()
    except (DistAttnError, OSError) as error:
        sys.exit(f"search_in_a_book: {error}")

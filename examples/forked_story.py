"""Continue a story in ten ways from one long state: the book is read once, each fork goes on from what was read.

Needs a running service (`dist-attn serve`):

    python examples/forked_story.py book.txt --forks 10 --tokens 60

A fork copies nothing, so it takes the same time behind a page and behind a library.
"""

import argparse
import sys
import time
from pathlib import Path

from dist_attn.client import Client
from dist_attn.errors import DistAttnError


def main() -> None:
    """Read once, fork often."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("book", type=Path)
    parser.add_argument("--bytes", type=int, default=None, help="read only so much of the book (default: all of it)")
    parser.add_argument("--forks", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=60, help="tokens of each continuation")
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    options = parser.parse_args()

    text = options.book.read_bytes()[: options.bytes].decode(errors="ignore")
    with Client(options.url) as client:
        story = client.sessions.create(name=options.book.name)
        started = time.perf_counter()
        read = client.sessions.append(story.id, text).rest()
        print(f"{read.position:,} tokens read in {time.perf_counter() - started:.1f} s")
        for number in range(options.forks):
            started = time.perf_counter()
            fork = client.sessions.fork(story.id, name=f"{options.book.name}, way {number}")
            forked = time.perf_counter() - started
            drawn = client.sessions.generate(
                fork.id, max_tokens=options.tokens, temperature=options.temperature, seed=number
            )
            print(f"\n--- way {number}: forked in {1000 * forked:.0f} ms")
            print(drawn.text.strip())
            client.sessions.delete(fork.id)
        position = client.sessions.get(story.id).position
        print(f"\nThe story itself still stands at token {position:,}; session {story.id}")


if __name__ == "__main__":
    try:
        main()
    except (DistAttnError, OSError) as error:
        sys.exit(f"forked_story: {error}")

"""A million spoilt wire messages, or any other number: each is refused as one that cannot be read, or is a message.

    python -m tests.fuzz.wire_messages --inputs 1000000

Begins with one message of every kind. With --atheris the inputs are chosen by coverage instead (needs the package
atheris).
"""

import random
import re
import tracemalloc
from collections import Counter

from dist_attn.errors import WireError
from dist_attn.wire.messages import decode, encode
from tests.fuzz.running import main, spoil
from tests.wire.test_messages import EXAMPLES

__all__ = ["read_or_refuse", "run"]

MEASURED = 0.01  # of the inputs are read with every allocation counted
BYTES_PER_BYTE, SLACK_BYTES = 60, 1 << 16  # an empty list of a message is one byte of msgpack


def read_or_refuse(data: bytes) -> WireError | None:
    """Read these bytes; the refusal if there is one.

    Raises: AssertionError for a message that is not the same after another trip.
    """
    try:
        message = decode(data)
    except WireError as error:
        return error
    again = decode(encode(message))
    assert encode(again) == encode(message), "two messages of one"
    return None


def run(inputs: int, seed: int) -> Counter[str]:
    """How many inputs were read, and how many refused, by the first words of the refusal.

    Raises: AssertionError for an allocation out of proportion, and whatever the decoder raises that it must not.
    """
    rng, outcomes = random.Random(seed), Counter[str]()
    sound = [encode(message) for message in EXAMPLES]
    for _ in range(inputs):
        data = spoil(rng.choice(sound), rng)
        measured = rng.random() < MEASURED
        if measured:
            tracemalloc.start()
        refusal = read_or_refuse(data)
        if measured:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak <= BYTES_PER_BYTE * len(data) + SLACK_BYTES, f"{peak} bytes for {len(data)}"
        words = "read" if refusal is None else " ".join(re.sub("`.*?`|'.*?'|[0-9]+", "N", str(refusal)).split()[:7])
        outcomes[words] += 1
    return outcomes


def _by_coverage(data: bytes) -> None:
    read_or_refuse(data)


if __name__ == "__main__":
    main(__doc__, run, _by_coverage, ["dist_attn.wire.messages"])

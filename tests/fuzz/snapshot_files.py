"""A million spoilt snapshots, or any other number: none may do anything but be refused in words, or be read as it is.

    python -m tests.fuzz.snapshot_files --inputs 1000000

With --atheris the inputs are chosen by coverage instead (needs the package atheris).
"""

import argparse
import importlib.util
import io
import random
import re
import sys
import time
import tracemalloc
from collections import Counter

from dist_attn.errors import WireError
from dist_attn.wire.snapshot import Snapshot, pack_snapshot, read_snapshot
from tests.support.snapshots import mutate, small_snapshot

__all__ = ["CAP_BYTES", "read_or_refuse", "run", "seeds"]

CAP_BYTES = 1 << 20
SLACK_BYTES = 1 << 20  # the header, and what decoding the largest array takes beside it
MEASURED = 0.01  # of the inputs are read with every allocation counted


def seeds() -> list[bytes]:
    """Sound files to begin with."""
    files = [small_snapshot(storage, seed=seed) for storage in ("exact", "bf16", "int8") for seed in range(2)]
    return [b"".join(file.pieces()) for file in files]


def read_or_refuse(data: bytes) -> Snapshot | WireError:
    """What the parser makes of these bytes.

    Raises: AssertionError for a sound snapshot that is not written back as the same bytes.
    """
    try:
        snapshot = read_snapshot(io.BytesIO(data), max_bytes=CAP_BYTES)
    except WireError as error:
        return error
    if snapshot.header.storage == "exact":
        again = pack_snapshot(snapshot.header.manifest, snapshot.header.position, snapshot.arrays.items())
        assert b"".join(again.pieces()) == data, "two files for one state"
    return snapshot


def run(inputs: int, seed: int) -> Counter[str]:
    """How many inputs were read, and how many refused, by the first words of the refusal.

    Raises: AssertionError when reading takes more memory than the cap, and whatever the parser raises that it must not.
    """
    rng = random.Random(seed)
    files, outcomes = seeds(), Counter[str]()
    for _ in range(inputs):
        data = mutate(rng.choice(files), rng)
        measured = rng.random() < MEASURED
        if measured:
            tracemalloc.start()
        result = read_or_refuse(data)
        if measured:
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak <= CAP_BYTES + SLACK_BYTES, f"{peak} bytes were allocated"
        outcomes["read" if isinstance(result, Snapshot) else _kind(result)] += 1
    return outcomes


def _kind(refusal: WireError) -> str:
    """The first words of a refusal, without its numbers."""
    return " ".join(re.sub("[0-9]+", "N", str(refusal)).split()[:6])


def _by_coverage() -> None:
    import atheris

    with atheris.instrument_imports():
        import dist_attn.wire.snapshot  # noqa: F401
    atheris.Setup(sys.argv[:1], lambda data: read_or_refuse(data) and None)
    atheris.Fuzz()


def main() -> None:
    """Run and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true", help="choose inputs by coverage, until stopped")
    arguments = parser.parse_args()
    if arguments.atheris:
        if importlib.util.find_spec("atheris") is None:
            parser.error("atheris is not installed: pip install atheris, or leave --atheris out")
        _by_coverage()
    began = time.monotonic()
    outcomes = run(arguments.inputs, arguments.seed)
    print(
        f"{arguments.inputs} inputs in {time.monotonic() - began:.0f} s: {outcomes.pop('read', 0)} read, others refused"
    )
    for words, count in outcomes.most_common():
        print(f"{count:9}  {words} ...")


if __name__ == "__main__":
    main()

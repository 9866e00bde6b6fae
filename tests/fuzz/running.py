"""What the programs of this folder share: how inputs are spoilt, and their command line."""

import argparse
import importlib
import importlib.util
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable

__all__ = ["main", "spoil"]

SHOWN = 25  # kinds of refusals
INTERESTING = (
    b"\r\n", b"\r\n\r\n", b"--", b"\x00", b"\xff", b"\xc3\xa9", b'"', b"\\", b";", b",", b"=", b"{", b"[", b"-1",
    b"0", b"1e999", b"9" * 20, b"null", b"true", b"\\ud800", b"\xd9\xa3", b"\x7f\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
)  # fmt: skip


def spoil(data: bytes, rng: random.Random) -> bytes:
    """The bytes with up to eight places changed, lost, doubled or from elsewhere; one in twenty as they are."""
    if rng.random() < 0.05:
        return data
    spoilt = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(spoilt) + 1)
        stop = min(len(spoilt), at + rng.choice((1, 1, 2, 4, 16, 64)))
        match rng.randrange(6):
            case 0 if at < len(spoilt):
                spoilt[at] = rng.randrange(256)
            case 1:
                del spoilt[at:stop]
            case 2:
                spoilt[at:at] = spoilt[at:stop] * rng.choice((1, 1, 2, 50))
            case 3:
                spoilt[at:stop] = rng.choice(INTERESTING)
            case 4:
                spoilt[at:at] = rng.choice(INTERESTING)
            case _:
                del spoilt[at:]
    return bytes(spoilt)


def main(
    description: str | None,
    run: Callable[[int, int], Counter[str]],
    by_coverage: Callable[[bytes], None],
    modules: Iterable[str],
) -> None:
    """Run and print what came of it; with --atheris, `by_coverage` gets inputs that reach new lines of the modules."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atheris", action="store_true", help="choose inputs by coverage, until stopped")
    arguments = parser.parse_args()
    if arguments.atheris:
        if importlib.util.find_spec("atheris") is None:
            parser.error("atheris is not installed: pip install atheris, or leave --atheris out")
        import atheris

        with atheris.instrument_imports():
            for module in modules:
                importlib.import_module(module)
        atheris.Setup(sys.argv[:1], by_coverage)
        atheris.Fuzz()
    began = time.monotonic()
    outcomes = run(arguments.inputs, arguments.seed)
    print(
        f"{arguments.inputs} inputs in {time.monotonic() - began:.0f} s: {outcomes.pop('read', 0)} read, others refused"
    )
    for words, count in outcomes.most_common(SHOWN):
        print(f"{count:9}  {words} ...")

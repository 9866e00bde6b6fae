"""Output that is passed on: all of it to a reader who reads, and no waiting for one who does not."""

import os
from collections.abc import Iterator

import pytest

from dist_attn.control.ranks import PassOn


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe's two ends; the reading one does not block."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    yield read_end, write_end
    for descriptor in (read_end, write_end):
        try:
            os.close(descriptor)
        except OSError:
            continue


def everything(descriptor: int) -> bytes:
    """What can be read now."""
    data = b""
    while True:
        try:
            piece = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return data
        if not piece:
            return data
        data += piece


def test_what_fits_is_written_at_once(pipe: tuple[int, int]) -> None:
    """Pieces of any size come out as they went in."""
    out = PassOn(pipe[1])
    for size in (1, 5000, 20_000):
        out.write(b"x" * size + b"\n")
        assert everything(pipe[0]) == b"x" * size + b"\n"


def test_nobody_is_waited_for(pipe: tuple[int, int]) -> None:
    """A full pipe returns at once; once it is read, the rest follows in order, and what was too much is counted."""
    out = PassOn(pipe[1], kept=10_000)
    sent = b"".join(b"%07d\n" % number for number in range(40_000))
    for start in range(0, len(sent), 1000):
        out.write(sent[start : start + 1000])
    began = everything(pipe[0])
    out.flush()
    note, rest = everything(pipe[0]).lstrip(b"\n").split(b"\n", 1)
    assert sent.startswith(began) and sent.endswith(rest)
    assert len(rest) == 10_000
    assert note == b"(%d bytes of output left out)" % (len(sent) - len(began) - len(rest))


def test_a_reader_that_is_gone_is_no_error(pipe: tuple[int, int]) -> None:
    """With nobody left to read, what is written is dropped, and nothing piles up."""
    out = PassOn(pipe[1])
    os.close(pipe[0])
    out.write(b"x" * 5000)
    assert not out._waiting

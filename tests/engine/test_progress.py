"""Progress: a bar where a terminal is looking, plain lines or silence where none is."""

import fcntl
import os
import pty
import struct
import sys
import termios
from collections.abc import Callable

import pytest

from dist_attn.engine.progress import byte_progress, training_progress

REPORT = {"step": 20, "steps": 40, "loss": 3.25, "learning_rate": 0.01, "tokens": 9000, "tokens_per_second": 1234.5}


@pytest.fixture
def shown(monkeypatch) -> Callable[[Callable[[], None]], str]:
    """What a function draws when stderr is a terminal of 120 columns."""

    def watch(draw: Callable[[], None]) -> str:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
        with os.fdopen(slave, "w") as terminal, monkeypatch.context() as patched:
            patched.setattr(sys, "stderr", terminal)
            patched.setenv("TERM", "xterm-256color")
            draw()
        drawn = b""
        # Linux ends a terminal whose other side is closed with an error in place of an empty read.
        try:
            while data := os.read(master, 1 << 16):
                drawn += data
        except OSError:
            pass
        os.close(master)
        return drawn.decode()

    return watch


def test_training_shows_a_bar_on_a_terminal(shown, capsys):
    """On a terminal the bar has steps, loss, tokens per second and the time left; scores stay as lines above it."""

    def draw() -> None:
        with training_progress(40) as progress:
            progress.reading("tokenising", 3_000_000, 6_000_000)
            progress.report(REPORT)
            progress.report({"step": 20, "tokens": 9000, "bits_per_byte": 2.5, "bytes": 300})
            progress.tell("no pictures [today]")

    drawn = shown(draw)
    for words in (
        "tokenising",
        "3 of 6 MB",
        "step 20 of 40",
        "loss 3.2500  1,234 tokens/s  bits_per_byte 2.5",
        "left",
        ":",
    ):
        assert words in drawn
    assert "no pictures [today]" in drawn
    assert "step 20  tokens 9000  bits_per_byte 2.5  bytes 300" in drawn
    assert capsys.readouterr().out == ""


def test_training_prints_lines_where_there_is_no_terminal(capsys):
    """Without a terminal each report is one plain line on stdout, and stderr stays empty."""
    with training_progress(40) as progress:
        progress.reading("tokenising", 3_000_000, 6_000_000)
        progress.report(REPORT)
        progress.report({"step": 20, "bits_per_byte": 2.5, "bytes": 300})
        progress.tell("no pictures")
    out, err = capsys.readouterr()
    assert err == ""
    assert out.splitlines() == [
        "step 20  steps 40  loss 3.25  learning_rate 0.01  tokens 9000  tokens_per_second 1234",
        "step 20  bits_per_byte 2.5  bytes 300",
        "no pictures",
    ]


def test_other_ranks_show_nothing(capsys):
    """Where progress is not wanted neither numbers nor words are printed."""
    with training_progress(40, wanted=False) as progress:
        progress.report(REPORT)
        progress.tell("no pictures")
    assert capsys.readouterr() == ("", "")


def test_bytes_are_drawn_only_for_somebody(shown, capsys):
    """The byte bar appears on a terminal and only on the rank that is wanted; elsewhere nothing is printed."""

    def draw(wanted: bool) -> None:
        with byte_progress("encoding", 3_000_000, wanted=wanted) as on_progress:
            on_progress(1_500_000)

    assert "1.5/3.0 MB" in shown(lambda: draw(True))
    assert shown(lambda: draw(False)) == ""
    draw(True)
    assert capsys.readouterr() == ("", "")

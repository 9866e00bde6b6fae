"""Progress: a bar where a terminal is looking, plain lines or silence where none is."""

from collections.abc import Callable

import pytest

from dist_attn.commands.encode_output import byte_progress, bytes_progress
from dist_attn.commands.train import training_progress
from tests.support.terminal import terminal_as

REPORT = {"step": 20, "steps": 40, "loss": 3.25, "learning_rate": 0.01, "tokens": 9000, "tokens_per_second": 1234.5}


@pytest.fixture
def shown(monkeypatch) -> Callable[[Callable[[], None]], str]:
    """What a function draws when stderr is a terminal of 120 columns."""

    def watch(draw: Callable[[], None]) -> str:
        with terminal_as("stderr", monkeypatch) as terminal:
            draw()
        return terminal.text()

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
    with training_progress(40, enabled=False) as progress:
        progress.report(REPORT)
        progress.tell("no pictures")
    assert capsys.readouterr() == ("", "")


def test_bytes_are_drawn_only_for_somebody(shown, capsys):
    """The byte bar appears on a terminal and only on the rank that is wanted; elsewhere nothing is printed."""

    def draw(wanted: bool) -> None:
        with byte_progress("encoding", 3_000_000, enabled=wanted) as on_progress:
            on_progress(1_500_000)

    assert "1.5/3.0 MB" in shown(lambda: draw(True))
    assert shown(lambda: draw(False)) == ""
    draw(True)
    assert capsys.readouterr() == ("", "")


def test_sending_and_encoding_have_a_bar_each(shown, capsys):
    """What is done with the same bytes twice is drawn as two bars, and elsewhere not at all."""

    def draw() -> None:
        with bytes_progress(("sending", "encoding"), 3_000_000) as (sent, encoded):
            sent(3_000_000)
            encoded(1_500_000)

    drawn = shown(draw)
    assert "3.0/3.0 MB" in drawn and "1.5/3.0 MB" in drawn
    draw()
    assert capsys.readouterr() == ("", "")

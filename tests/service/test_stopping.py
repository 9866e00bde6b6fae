"""Stop strings over streamed text."""

from itertools import pairwise

from dist_attn_service.text.choice_text import StopScanner
from hypothesis import given
from hypothesis import strategies as st


def run(pieces: list[str], stops: list[str]) -> tuple[str, bool]:
    """All the text that comes out, and whether a stop was met."""
    scanner = StopScanner(stops)
    text = "".join(scanner.push(piece) for piece in pieces)
    return text + ("" if scanner.stopped else scanner.finish()), scanner.stopped


@given(
    text=st.text("ab\n", max_size=40),
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 40), max_size=6),
)
def test_the_cut_does_not_matter(text: str, stops: list[str], cuts: list[int]) -> None:
    """The same text stops at the same place however it is cut into pieces, and no stop string is ever let out."""
    edges = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    whole, stopped = run([text], stops)
    assert run(pieces, stops) == (whole, stopped)
    assert stopped == any(stop in text for stop in stops)
    assert text.startswith(whole)
    assert not any(stop in whole for stop in stops)


def test_text_is_held_back_no_longer_than_needed() -> None:
    """Only an end that may begin a stop string waits; it comes out once it cannot."""
    scanner = StopScanner(["\n\nQ:"])
    assert scanner.push("one\n") == "one"
    assert scanner.push("two\n\nQ") == "\ntwo"
    assert scanner.push("uite") == "\n\nQuite"
    assert scanner.push("\n\nQ: no") == ""
    assert scanner.stopped
    assert scanner.push("more") == ""

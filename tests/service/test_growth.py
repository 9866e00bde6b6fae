"""What reads a client's text takes time linear in its length, whatever stands in it."""

from pathlib import Path

import pytest

from tests.fuzz.growth import PARTS, findings
from tests.fuzz.route_growth import examine
from tests.support.served import served


@pytest.mark.parametrize("name", PARTS)
def test_twice_the_text_takes_twice_the_time(name: str) -> None:
    """At most 2.5 times, of texts that are hard to normalise, to cut, to match and to parse."""
    assert not findings(PARTS[name])


@pytest.mark.slow
def test_routes_take_time_linear_in_their_bodies(tmp_path: Path) -> None:
    """So it is at every route that takes a text, and none answers with a 5xx.

    `python -m tests.fuzz.route_growth` asks with longer texts of more kinds, and tells how long others wait.
    """
    with served(tmp_path) as whole:
        outcomes = list(examine(whole, 1 << 16, texts=("prose", "marks", "blanks")))
    assert len(outcomes) > 60
    assert not [str(outcome) for outcome in outcomes if outcome.wrong]

"""Who holds a state when there are more requests than states: urgency, order, and whose place is given up."""

import pytest

from dist_attn.control.scheduler import Limits, RequestView, SchedulerView, admitted


def reading(request, **fields):
    """A long text that holds a state and has come some way."""
    return RequestView(request, **{"opened": True, "available": 1 << 20, "swappable": True, **fields})


def prompt(request, **fields):
    """A short prompt that waits for a place."""
    return RequestView(request, **{"opened": False, "available": 100, "final": True, **fields})


def document(request, **fields):
    """A long text that waits for a place."""
    return RequestView(request, **{"opened": False, "available": 1 << 20, **fields})


def chosen(*requests, room, state_bytes=0):
    """Numbers of those that are worked on, and of those put aside."""
    limits = Limits(max_active=room, state_bytes=state_bytes)
    working, swaps = admitted(SchedulerView(limits, requests), lambda s: bool(s.ready or s.available))
    return [r.number for r in working], list(swaps)


def test_there_is_no_more_than_room_for():
    """Who came first has the place; who has nothing to do, or a slow reader, takes none."""
    assert chosen(document(1), document(2), document(3), room=2) == ([1, 2], [])
    assert chosen(document(1, available=0), document(2, blocked=True), document(3), room=1) == ([3], [])


def test_a_short_prompt_takes_the_place_of_a_long_text():
    """When all places are held, the text that came last gives up its own; no long text does that to another."""
    assert chosen(reading(1), reading(2), prompt(3), room=2) == ([1, 3], [2])
    assert chosen(reading(1), reading(2), document(3), room=2) == ([1, 2], [])
    assert chosen(reading(1), reading(2), prompt(3), prompt(4), prompt(5), room=2) == ([3, 4], [2, 1])


def test_nobody_gives_up_a_place_that_was_just_taken():
    """A text that has not read its share since it got its place stays, and so does one that decodes."""
    assert chosen(reading(1, swappable=False), prompt(2), room=1) == ([1], [])


def test_who_is_put_aside_waits_like_one_that_has_just_come():
    """Prompts that came before that moment go first, later ones after it: nobody waits for ever."""
    aside = document(1, queued_at=5.0)
    assert chosen(aside, prompt(2, queued_at=4.0), room=1) == ([2], [])
    assert chosen(aside, prompt(2, queued_at=6.0), room=1) == ([1], [])


@pytest.mark.parametrize(("urgent", "other", "taken"), [(0, 1, True), (1, 1, False), (2, 1, False)])
def test_a_more_urgent_class_takes_places(urgent, other, taken):
    """Long work takes the place of less urgent work only; the least urgent gives way first."""
    expected = ([3], [1]) if taken else ([1], [])
    assert chosen(reading(1, priority=other), document(3, priority=urgent), room=1) == expected
    assert chosen(reading(1, priority=2), reading(2, priority=1), prompt(3), room=2) == ([2, 3], [1])
    assert chosen(reading(1, priority=0), prompt(3), room=1) == ([1], [])
    assert chosen(document(1, priority=1), document(2, priority=0), room=1) == ([2], [])


def test_states_that_grow_have_room_in_bytes():
    """What does not fit beside the others waits, and nobody behind it goes first; alone it has room in any case."""
    waiting = (document(1, state_bytes=6), document(2, state_bytes=6), document(3, state_bytes=1))
    assert chosen(*waiting, room=9, state_bytes=10) == ([1], [])
    assert chosen(*waiting, room=9, state_bytes=13) == ([1, 2, 3], [])
    assert chosen(document(1, state_bytes=99), room=9, state_bytes=10) == ([1], [])
    assert chosen(
        reading(1, state_bytes=4), reading(2, state_bytes=5), prompt(3, state_bytes=6), room=9, state_bytes=10
    ) == (
        [1, 3],
        [2],
    )


def test_states_that_turn_out_too_long_rest_until_others_end():
    """Of texts that have grown past the room together the first ones go on, one at least; slow readers hold theirs."""
    grown = [reading(number, state_bytes=6, swappable=False) for number in (1, 2, 3)]
    assert chosen(*grown, room=9, state_bytes=12) == ([1, 2], [])
    assert chosen(*grown, room=9, state_bytes=5) == ([1], [])
    assert chosen(*grown[1:], room=9, state_bytes=12) == ([2, 3], [])
    slow = reading(1, state_bytes=6, swappable=False, blocked=True)
    assert chosen(slow, *grown[1:], room=9, state_bytes=12) == ([2], [])

"""Keepers of states: a state is there whole or not at all, and the last one stays until the next is whole."""

from pathlib import Path

import pytest

from dist_attn.control.state_files import PREFIX, StateFiles
from tests.support.states import MemoryStates


@pytest.fixture(params=["files", "memory"])
def keeper(request, tmp_path):
    """Each kind of keeper, without states."""
    return StateFiles(tmp_path) if request.param == "files" else MemoryStates()


def _commit(keeper, request, ordinal, num_bytes):
    """What has come takes the place of the request's last state, if it is whole."""
    return keeper.finish(request, ordinal, num_bytes) and keeper.commit(request, ordinal)


def test_the_last_whole_state_is_kept(keeper):
    """Parts become the state when all of them are there; a later state takes its place when it is whole."""
    keeper.append(1, 0, 0, b"ab")
    keeper.append(1, 0, 2, b"cd")
    assert _commit(keeper, 1, 0, 4)
    assert b"".join(keeper.parts(1)) == b"abcd"
    keeper.append(1, 0, 0, b"xy")
    assert b"".join(keeper.parts(1)) == b"abcd"
    assert not _commit(keeper, 1, 0, 4)
    assert b"".join(keeper.parts(1)) == b"abcd"
    assert _commit(keeper, 1, 0, 2)
    assert b"".join(keeper.parts(1)) == b"xy"


def test_a_gap_makes_no_state(keeper):
    """A part that does not follow is not taken, so the state is never whole."""
    keeper.append(1, 0, 0, b"ab")
    keeper.append(1, 0, 3, b"d")
    assert not _commit(keeper, 1, 0, 4)


def test_states_do_not_mix(keeper):
    """The parts of two states of one request stay apart."""
    keeper.append(1, 0, 0, b"ab")
    keeper.append(1, 1, 0, b"xy")
    keeper.append(1, 0, 2, b"cd")
    assert _commit(keeper, 1, 0, 4)
    assert b"".join(keeper.parts(1)) == b"abcd"


def test_what_was_not_whole_is_forgotten(keeper):
    """After a loss, parts of states that never came whole count no more; whole ones do."""
    keeper.append(1, 0, 0, b"ab")
    assert _commit(keeper, 1, 0, 2)
    keeper.append(1, 0, 0, b"x")
    keeper.forget_unfinished()
    keeper.append(1, 0, 1, b"y")
    assert not _commit(keeper, 1, 0, 2)
    assert b"".join(keeper.parts(1)) == b"ab"


def test_an_empty_state_is_a_state(keeper):
    """Models without a state between blocks have one of no bytes."""
    assert _commit(keeper, 1, 0, 0)
    assert b"".join(keeper.parts(1)) == b""


def test_finished_states_wait_side_by_side(keeper):
    """Later states come while earlier ones wait for their turn; a loss of ranks forgets those that waited."""
    for ordinal, data in ((4, b"ab"), (8, b"cd"), (9, b"ef")):
        keeper.append(1, ordinal, 0, data)
        assert keeper.finish(1, ordinal, 2)
    assert keeper.commit(1, 4) and b"".join(keeper.parts(1)) == b"ab"
    assert keeper.commit(1, 8) and b"".join(keeper.parts(1)) == b"cd"
    keeper.forget_unfinished()
    assert not keeper.commit(1, 9)
    assert b"".join(keeper.parts(1)) == b"cd"


def test_a_dropped_session_leaves_nothing(keeper, tmp_path):
    """Neither its state nor parts of the next one stay."""
    keeper.append(1, 0, 0, b"ab")
    _commit(keeper, 1, 0, 2)
    keeper.append(1, 1, 0, b"x")
    keeper.append(11, 0, 0, b"x")
    keeper.drop(1)
    assert not _commit(keeper, 1, 1, 1)
    assert _commit(keeper, 11, 0, 1)
    assert len(list(tmp_path.glob("*/*"))) == isinstance(keeper, StateFiles)


def test_what_killed_controllers_left_is_removed(tmp_path):
    """A folder that no process holds is removed; one of a living process is not, whatever ids its container gives."""
    gone, other = tmp_path / f"{PREFIX}abc", tmp_path / "other"
    for folder in (gone, other):
        folder.mkdir()
    living = StateFiles(tmp_path)
    kept = StateFiles(tmp_path)
    assert not gone.exists() and living.folder.exists() and other.exists()
    kept.close()
    assert not kept.folder.exists() and living.folder.exists()


def test_a_folder_that_cannot_be_written_keeps_no_state(tmp_path):
    """Where nothing can be written, no state is kept, and nothing else goes wrong."""
    kept = StateFiles(tmp_path)
    kept.close()
    kept.append(1, 0, 0, b"ab")
    assert not _commit(kept, 1, 0, 2)
    assert not Path(kept.folder).exists()


def test_a_state_that_cannot_be_read_ends_nothing(tmp_path):
    """A file that somebody has removed gives no parts, so its ranks refuse the state; the controller goes on."""
    kept = StateFiles(tmp_path)
    kept.append(1, 0, 0, b"ab")
    assert _commit(kept, 1, 0, 2)
    kept.close()
    assert list(kept.parts(1)) == []


def test_a_state_to_begin_with_comes_in_pieces_and_survives_a_loss(keeper):
    """What an API process sends is no part of what the ranks lose, and becomes the request's state when it is whole."""
    assert keeper.begin(1, 0, b"ab")
    keeper.forget_unfinished()
    assert keeper.begin(1, 2, b"cd") and keeper.begun(1)
    assert b"".join(keeper.parts(1)) == b"abcd"


def test_a_state_that_is_handed_out_stays_while_others_follow(keeper, tmp_path):
    """Its bytes are those that it had when it was offered, until it is not needed any more."""
    for ordinal, data in ((1, b"abc"), (2, b"xyz")):
        keeper.append(1, ordinal, 0, data)
        assert _commit(keeper, 1, ordinal, 3)
        assert keeper.offer(1, ordinal)
    keeper.forget_unfinished()
    assert [keeper.offered(1, 1, start, 2) for start in (0, 2)] == [b"ab", b"c"]
    keeper.end_offer(1, 1)
    assert keeper.offered(1, 2, 0, 3) == b"xyz"
    keeper.drop(1)
    assert not list(tmp_path.glob("*/*"))

"""What an idempotency key promises in every store: an append is read once, however often it is sent."""

import random

import pytest

from dist_attn.errors import (
    ConflictError,
    InputError,
    PositionError,
)
from dist_attn.store import Reached
from tests.support.stores import kept, written

DATA = random.Random(0).randbytes(70_000)


def test_an_append_that_comes_again_is_not_fed_again(place):
    """A key that is done answers with its result, half done it goes on, and for other contents it is refused."""

    async def work(store):
        session, sessions = await store.sessions.create("ann"), store.sessions
        append, token = await sessions.begin_append("ann", session.id, "key", expected_position=0, digest="d1")
        assert (append.start, append.position, append.done) == (0, 0, False)
        await sessions.advance("ann", session.id, token, Reached(512, await kept(store, "ann", b"512")))
        await sessions.stop_writing("ann", session.id, token)
        append, token = await sessions.begin_append("ann", session.id, "key", expected_position=0, digest="d1")
        assert (append.start, append.position) == (0, 512)
        await sessions.advance(
            "ann", session.id, token, Reached(700, await kept(store, "ann", b"700"), done=True, result="usage")
        )
        append, token = await sessions.begin_append("ann", session.id, "key", expected_position=0, digest="d1")
        assert (append.position, append.done, append.result, token) == (700, True, "usage", "")
        for position, digest in ((0, "d2"), (5, "d1")):
            with pytest.raises(ConflictError, match="used for another append, which began at 0"):
                await sessions.begin_append("ann", session.id, "key", expected_position=position, digest=digest)
        with pytest.raises(PositionError, match="stands at 700, not at 512") as refused:
            await sessions.begin_append("ann", session.id, "new", expected_position=512)
        assert (refused.value.expected, refused.value.position) == (512, 700)
        with pytest.raises(InputError, match="up to 256"):
            await sessions.begin_append("ann", session.id, "k" * 257)
        return await sessions.get("ann", session.id)

    session = place.run(work)
    assert [point.position for point in session.checkpoints] == [512, 700]


def test_a_key_of_which_nothing_is_kept_begins_anew(place):
    """After another writer it begins where the session stands, unless its caller expects it elsewhere, as at first."""

    async def work(store):
        session, sessions = await store.sessions.create("ann"), store.sessions
        _, token = await sessions.begin_append("ann", session.id, "key", digest="d1")
        await sessions.stop_writing("ann", session.id, token)
        await written(store, "ann", session, 6)
        with pytest.raises(PositionError, match="stands at 6, not at 0"):
            await sessions.begin_append("ann", session.id, "key", expected_position=0)
        with pytest.raises(ConflictError, match="used for another append"):
            await sessions.begin_append("ann", session.id, "key", digest="d2")
        # As the refusal above tells its caller to do.
        append, token = await sessions.begin_append("ann", session.id, "key", expected_position=6)
        assert (append.start, append.position, append.digest) == (6, 6, "d1")
        state = await kept(store, "ann", b"at 9")
        await sessions.advance("ann", session.id, token, Reached(9, state, done=True, result="done"))
        return (await sessions.begin_append("ann", session.id, "key", expected_position=6))[0]

    append = place.run(work)
    assert (append.start, append.position, append.done, append.result) == (6, 9, True, "done")


def test_half_an_append_says_what_is_kept_of_it(place):
    """Once another writer went on behind a kept part, the key is refused with both ends of the part."""

    async def work(store):
        session, sessions = await store.sessions.create("ann"), store.sessions
        await written(store, "ann", session, 2)
        _, token = await sessions.begin_append("ann", session.id, "key")
        await sessions.advance("ann", session.id, token, Reached(5, await kept(store, "ann", b"at 5")))
        await sessions.stop_writing("ann", session.id, token)
        await written(store, "ann", session, 8)
        with pytest.raises(PositionError, match=r"from 2 to 5 are in .* to 8, .* fork the session at 5") as refused:
            await sessions.begin_append("ann", session.id, "key")
        return refused.value.start, refused.value.expected, refused.value.position

    assert place.run(work) == (2, 5, 8)


def test_an_append_without_a_key_is_always_another_one(place):
    """Two of them both feed; what has been fed, and the digest of the whole, are kept with those that have a key."""

    async def work(store):
        session, sessions = await store.sessions.create("ann"), store.sessions
        for position in (3, 5):
            append, token = await sessions.begin_append("ann", session.id, "")
            assert (append.start, append.done) == (3 if position == 5 else 0, False)
            state = await kept(store, "ann", b"state at %d" % position)
            await sessions.advance("ann", session.id, token, Reached(position, state, done=True))
        _, token = await sessions.begin_append("ann", session.id, "key")
        state = await kept(store, "ann", b"state at 8")
        await sessions.advance("ann", session.id, token, Reached(8, state, fed="f8"))
        await sessions.stop_writing("ann", session.id, token)
        append, token = await sessions.begin_append("ann", session.id, "key")
        assert (append.start, append.position, append.fed, append.digest) == (5, 8, "f8", "")
        await sessions.advance("ann", session.id, token, Reached(9, state, done=True, digest="whole"))
        with pytest.raises(ConflictError, match="used for another append"):
            await sessions.begin_append("ann", session.id, "key", digest="other")
        return (await sessions.begin_append("ann", session.id, "key", digest="whole"))[0]

    assert place.run(work).done


def test_another_state_forgets_the_keys(place):
    """What was appended before a state took the place of the text is not in it: the same key appends again."""

    async def work(store):
        session, sessions = await store.sessions.create("ann"), store.sessions
        session = await written(store, "ann", session, 9)
        _, token = await sessions.begin_append("ann", session.id, "half")
        half = await sessions.advance("ann", session.id, token, Reached(11, await kept(store, "ann", b"at 11")))
        await sessions.stop_writing("ann", session.id, token)
        other = await kept(store, "ann", b"another text")
        await sessions.replace("ann", session.id, 11, other, instead_of=half.checkpoints[-1].snapshot)
        for key in ("to 9", "half"):
            append, token = await sessions.begin_append("ann", session.id, key)
            assert (append.start, append.position, append.done) == (11, 11, False) and token
            await sessions.stop_writing("ann", session.id, token)
        return True

    assert place.run(work)

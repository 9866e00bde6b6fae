"""The scheduler's promises, on plain values: decode first, bounded steps, nobody starves, everything finishes."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.control.requests import Cutting, Request, view_of
from dist_attn.control.scheduler import (
    DRAWS_IN_A_TURN,
    STEP_ROW_BYTES,
    Limits,
    RequestView,
    SchedulerView,
    Turns,
    admitted,
    plan,
    split,
)
from dist_attn.model_config.figures import SLOTS
from dist_attn.rank_link.rows import GRAIN
from dist_attn.wire.messages import OpenWork, RowSpec

NO_TURNS = Turns()
LIMITS = Limits(ranks=2, block_tokens=2048, beside_decode_tokens=512)


def decoder(request, owner=None, **fields):
    """A completion that can draw a token."""
    return RequestView(request, start=100, final=True, ready=True, owner=owner, **fields)


def long_document(request, available=1 << 20, **fields):
    """A document of which much waits."""
    return RequestView(request, **{"available": available, "chunk": 1024, **fields})


def short_prompt(request, tokens=700, **fields):
    """A prompt that has arrived whole."""
    return RequestView(request, **{"opened": False, "available": tokens, "final": True, **fields})


def short_text(number, rows, **fields):
    """A text whose rows have 16 numbers, as the scheduler sees it."""
    request = Request.opened_by(OpenWork(f"e{number}", rows=rows), number, b"api", 0.0, 512)
    request.reading.push(bytes(4 * 9), final=True, now=0.0)
    return view_of(request, Cutting(chunk=1024, hidden_size=16, **fields), blocked=False)


def planned(*requests, limits=LIMITS, turns=NO_TURNS):
    """The plan for these requests."""
    return plan(SchedulerView(limits, requests, turns))


def tokens_of(made):
    """Tokens that a plan prefills, by request."""
    sums = {}
    for block in made.blocks:
        sums[block.request] = sums.get(block.request, 0) + block.tokens
    return sums


def edges_of(made):
    """Where the blocks of a plan end."""
    return [block.start + block.tokens for block in made.blocks]


def test_nothing_to_do_is_an_empty_plan():
    """Without work there is no step."""
    assert planned().empty
    assert planned(RequestView(1)).empty


def test_every_session_that_can_draws_a_token_in_every_step():
    """Decoding never waits for prefill, however much of it there is."""
    made = planned(*(long_document(n) for n in range(5)), *(decoder(n, owner=0) for n in range(5, 12)))
    assert made.decodes[0] == tuple(range(5, 12))
    assert made.blocks


def test_prefill_is_small_while_anything_decodes():
    """A step with decoding carries at most `beside_decode_tokens` per rank of prefill."""
    assert sum(tokens_of(planned(long_document(1), decoder(2))).values()) == 2 * 512
    assert sum(tokens_of(planned(long_document(1))).values()) == 2 * 2048


def test_rounds_of_decoding_leave_half_of_the_time_to_reading():
    """As many rounds go into a step as take no longer than its blocks; one where blocks are quicker, as many blocks."""
    quick = replace(LIMITS, token_s=1e-4, round_s=0.02, pauses=12)
    assert planned(long_document(1), decoder(2), limits=quick).rounds == 2
    assert planned(long_document(1), decoder(2), limits=replace(quick, pauses=1)).rounds == 1
    slow = planned(long_document(1), decoder(2), limits=replace(quick, round_s=0.25))
    assert slow.rounds == 0
    assert sum(tokens_of(slow).values()) == 2048, "one more chunk would take longer than the round"
    assert planned(long_document(1), limits=quick).rounds == 0
    assert planned(decoder(2), limits=quick).rounds == 0
    assert planned(long_document(1), decoder(2)).rounds == 0, "nothing is known of the ranks yet"


def test_a_step_reads_for_a_bounded_time():
    """What comes while a step is under way waits for its end, so slow ranks are given fewer blocks, one at least."""
    assert sum(tokens_of(planned(long_document(1), limits=replace(LIMITS, token_s=1e-4))).values()) == 2048
    assert sum(tokens_of(planned(long_document(1), limits=replace(LIMITS, token_s=1.0))).values()) == 1024
    assert sum(tokens_of(planned(long_document(1), limits=replace(LIMITS, token_s=1e-9))).values()) == 4096


def test_the_rows_of_a_step_fit_into_a_message():
    """However many texts come together: short and long ones have half each, and a block that is larger goes alone."""
    many = replace(LIMITS, block_tokens=1 << 20, max_requests=64)
    rows = {"row_bytes": 4 * 1024, "chunk": 512}
    shorts = [replace(short_prompt(n, 512), **rows) for n in range(40)]
    longs = [long_document(n, **rows) for n in range(40, 80)]
    for requests, numbers in ((shorts, 16), (longs, 1), ([*shorts, *longs], 9)):
        made = planned(*requests, limits=many)
        assert len(tokens_of(made)) == numbers
        assert sum(tokens_of(made).values()) * 4 * 1024 == STEP_ROW_BYTES
    assert len(planned(*(replace(short_prompt(n, 512), row_bytes=3) for n in range(40)), limits=many).blocks) == 40
    wide = [replace(short_prompt(n, 512), row_bytes=1 << 18) for n in range(3)]
    assert tokens_of(planned(*wide, limits=many)) == {0: 512}


def test_a_step_reads_for_so_many_requests_and_no_more():
    """However many could be read for, and one of them is a long document where there is one."""
    few, shorts = replace(LIMITS, block_tokens=1 << 20, max_requests=3), [short_prompt(n, 64) for n in range(9)]
    longs = [replace(long_document(n), available=2048) for n in range(9, 18)]
    for requests in (shorts, longs, [*shorts, *longs]):
        numbers = tokens_of(planned(*requests, limits=few))
        assert len(numbers) == 3
        assert max(numbers) >= 9 or requests is shorts


def test_new_decoders_go_to_the_rank_with_the_fewest():
    """Owners spread over the ranks, counting those that are there."""
    made = planned(decoder(1, owner=0), decoder(2, owner=0), decoder(3), decoder(4), decoder(5))
    assert made.decodes == ((1, 2, 5), (3, 4))


def test_the_last_rank_draws_for_all_where_each_has_some_of_the_weights():
    """Whose logits a rank has kept makes no difference then."""
    made = planned(decoder(1, owner=0), decoder(2), limits=replace(LIMITS, weights_over_ranks=True))
    assert made.decodes == ((), (1, 2))


def test_a_short_prompt_overtakes_long_documents():
    """A prompt that just arrived is in the next step, and the documents go on beside it."""
    made = planned(long_document(1), long_document(2), short_prompt(3), turns=planned(long_document(1)).turns)
    assert tokens_of(made)[3] == 700
    assert set(tokens_of(made)) & {1, 2}
    assert made.opens == (3,)


def test_long_documents_take_turns():
    """Every document gets the same number of tokens over a round."""
    turns, given_tokens = Turns(), dict.fromkeys(range(3), 0)
    for _ in range(9):
        made = planned(*(long_document(n) for n in range(3)), turns=turns)
        turns = made.turns
        for request, tokens in tokens_of(made).items():
            given_tokens[request] += tokens
    assert len(set(given_tokens.values())) == 1


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_caller_draws_in_every_step_beside_many_of_another(ranks):
    """Beside 60 of one caller, another's one draws each time, in a batch with no empty slot; the 60 take turns."""
    drawn, turns, limits = Counter(), NO_TURNS, Limits(ranks=ranks)
    many = [decoder(n, owner=n % ranks, caller="many") for n in range(60)]
    for _ in range(60 * DRAWS_IN_A_TURN):
        made = planned(*many, decoder(60, owner=0, caller="one"), limits=limits, turns=turns)
        turns = made.turns
        assert 60 in made.decodes[0]
        assert [len(numbers) for numbers in made.decodes] == [SLOTS] * ranks
        drawn.update(number for numbers in made.decodes for number in numbers)
    for rank in range(ranks):
        of_rank = [drawn[n] for n in range(60) if n % ranks == rank]
        assert max(of_rank) - min(of_rank) <= DRAWS_IN_A_TURN


def test_a_caller_that_is_alone_pays_nothing():
    """All 60 of its requests draw in every step, also beside a text of its own."""
    made = planned(*(decoder(n, owner=0, caller="a") for n in range(60)), long_document(60, caller="a"))
    assert len(made.decodes[0]) == 60


def test_new_requests_wait_for_those_of_their_caller_that_draw():
    """However many one-token requests a caller begins, those that it has draw on."""
    turns, drawn = NO_TURNS, Counter()
    for step in range(200):
        new = [decoder(100 + 8 * step + n, owner=0, caller="a") for n in range(8)]
        old = [decoder(n, owner=0, caller="a") for n in range(8)]
        made = planned(*old, *new, decoder(99, owner=0, caller="b"), limits=Limits(), turns=turns)
        turns = made.turns
        drawn.update(made.decodes[0])
    assert min(drawn[n] for n in range(8)) > 80


def test_decoding_is_short_while_another_caller_reads():
    """A prompt of one caller is in the next step, beside one batch of another's 60 requests that draw."""
    made = planned(*(decoder(n, caller="many") for n in range(60)), short_prompt(60, caller="one"))
    assert [len(numbers) for numbers in made.decodes] == [SLOTS, SLOTS]
    assert tokens_of(made) == {60: 700}


def test_prompts_and_documents_are_read_by_caller_first():
    """Another caller's prompt is next, however many came before it; its one document has as much as ten others."""
    waiting = [short_prompt(n, caller="many") for n in range(60)]
    assert 60 in tokens_of(planned(*waiting, short_prompt(60, caller="one")))
    given_tokens, turns = Counter(), NO_TURNS
    for _ in range(40):
        many = [long_document(n, caller="many") for n in range(10)]
        made = planned(*many, long_document(10, caller="one"), turns=turns)
        turns = made.turns
        given_tokens.update(tokens_of(made))
    assert given_tokens[10] == sum(given_tokens[n] for n in range(10))
    assert len({given_tokens[n] for n in range(10)}) == 1


def test_places_go_to_callers_that_have_fewest():
    """A place that is free, or that a text of a caller with many can leave, is another caller's first; nobody who is
    beside others' work takes the last batch of slots.
    """
    limits = replace(LIMITS, max_active=5)
    reading = [long_document(n, caller="many", swappable=True) for n in range(4)]
    waiting = [long_document(n, caller="many", opened=False, queued_at=float(n)) for n in range(4, 9)]
    late = long_document(9, caller="one", opened=False, queued_at=9.0)
    chosen, swaps = admitted(SchedulerView(limits, (*reading, *waiting, late)), lambda request: True)
    assert {r.number for r in chosen} == {0, 1, 2, 3, 9} and not swaps
    limits = replace(LIMITS, max_active=4)
    chosen, swaps = admitted(SchedulerView(limits, (*reading, *waiting, late)), lambda request: True)
    assert {r.number for r in chosen} == {0, 1, 2, 9} and swaps == (3,)
    now = (*reading[:3], replace(late, opened=True, swappable=True), replace(reading[3], opened=False))
    assert admitted(SchedulerView(limits, now), lambda request: True)[1] == ()
    drawing = [decoder(n, opened=False, caller="many") for n in range(128)]
    chosen, _ = admitted(SchedulerView(replace(LIMITS, max_active=128), (*drawing, late)), lambda request: True)
    assert len(chosen) == 128 - SLOTS + 1 and chosen[-1] == late
    chosen, _ = admitted(SchedulerView(replace(LIMITS, max_active=128), tuple(drawing)), lambda request: True)
    assert len(chosen) == 128


def test_no_state_is_put_aside_for_a_request_that_then_does_not_fit():
    """What gives way is known before anything does: here a state that stays leaves too little room."""
    stays = long_document(0, caller="many", state_bytes=60)
    reading = [long_document(n, caller="many", swappable=True, state_bytes=10) for n in (1, 2, 3)]
    large = long_document(4, caller="one", opened=False, state_bytes=100)
    view = SchedulerView(replace(LIMITS, state_bytes=100), (stays, *reading, large))
    chosen, swaps = admitted(view, lambda request: True)
    assert [r.number for r in chosen] == [0, 1, 2, 3] and swaps == ()


@pytest.mark.parametrize("come", [512, 513, 5000])
def test_the_rank_of_a_first_block_does_not_depend_on_how_much_has_come(come):
    """Of a text that goes on, whose rows are so wide that a block is no longer than what one rank takes."""
    request = Request.opened_by(OpenWork("e", rows=RowSpec("token")), 3, b"api", 0.0, 512)
    request.reading.push(bytes(4 * come), final=False, now=0.0)
    view = view_of(request, Cutting(chunk=2048, hidden_size=4096), blocked=False)
    assert (view.chunk, view.home) == (512, 0)


@pytest.mark.parametrize("text_tokens", [14, None])
@pytest.mark.parametrize("rows", [RowSpec("document"), RowSpec("window", 12), RowSpec("sentence")])
def test_short_texts_go_around(rows, text_tokens):
    """Each rank reads as many of the texts that are too short to be cut, whatever kind of model makes the rows."""
    views = [short_text(number, rows, text_tokens=text_tokens) for number in range(4)]
    assert [block.lengths for block in planned(*views).blocks] == [(9, 0), (0, 9), (9, 0), (0, 9)]


@pytest.mark.parametrize(
    ("rows", "num_bytes"),
    [(RowSpec("token"), 64), (RowSpec("sentence"), 64), (RowSpec("window", 12), 6), (RowSpec("document"), 1)],
)
def test_what_the_rows_of_a_token_take(rows, num_bytes):
    """Bytes of a row by the fewest tokens that are in one; ranks sum up at the grid whatever the rows are."""
    assert short_text(0, rows).row_bytes == num_bytes


def test_a_part_of_a_block_waits_for_the_rest():
    """However slow a client is; the text's end makes a block of it."""
    few = long_document(1, available=1023)
    assert planned(few).empty
    assert tokens_of(planned(replace(few, final=True))) == {1: 1023}


def test_where_a_text_ends_does_not_depend_on_its_number():
    """The last tokens of a text of several blocks lie on the first rank, also where short texts go around."""
    for number in range(3):
        request = Request.opened_by(OpenWork("e", rows=RowSpec()), number, b"api", 0.0, 1024)
        request.reading.push(bytes(4 * 1100), final=True, now=0.0)
        cutting = Cutting(chunk=1024, hidden_size=16)
        first, last = planned(view_of(request, cutting, blocked=False)).blocks
        assert (first.lengths, last.lengths) == ((512, 512), (76, 0))


def test_a_session_whose_reader_is_slow_rests():
    """Nothing is started whose result could not be sent, be it prefill or decode."""
    assert planned(long_document(1, blocked=True), replace(decoder(2), blocked=True)).empty


def test_no_more_sessions_hold_states_than_allowed():
    """Sessions beyond `max_active` wait unopened; the first to come is the first to be opened."""
    made = planned(
        *(long_document(n) for n in range(3)),
        *(short_prompt(n) for n in range(3, 8)),
        limits=replace(LIMITS, max_active=4),
    )
    assert made.opens == (3,)


def test_blocks_end_at_chunks_whatever_waits_beside_them():
    """The same text is cut at the same places alone, beside other work, while others decode, and however it arrives."""
    alone = planned(long_document(1, available=5000, final=True, chunk=512))
    assert edges_of(alone) == [512, 1024, 1536, 2048, 2560, 3072, 3584, 4096]
    beside = planned(long_document(1, available=5000, final=True, chunk=512), decoder(2), short_prompt(3))
    assert [b.start + b.tokens for b in beside.blocks if b.request == 1] == [512]
    last = planned(long_document(1, start=4096, available=904, final=True, chunk=512))
    assert edges_of(last) == [4608, 5000]
    assert edges_of(planned(long_document(1, start=700, available=500, chunk=512))) == [1024]


@given(
    st.lists(st.integers(0, 4000), min_size=1, max_size=12).filter(any),
    st.lists(st.tuples(st.booleans(), st.integers(0, 3)), min_size=1, max_size=8),
    st.sampled_from([512, 1024, 1536]),
)
def test_a_text_has_the_same_blocks_in_any_company(arrivals, company, chunk):
    """Whatever arrives when, and whatever else is worked on, a text is cut at its chunks and its end."""
    total, sent, done, turns, edges, turn = sum(arrivals), 0, 0, Turns(), [], 0
    while done < total:
        sent += arrivals[turn] if turn < len(arrivals) else 0
        decoding, others = company[turn % len(company)]
        turn += 1
        own = RequestView(1, start=done, available=sent - done, final=sent == total, chunk=chunk)
        beside = [long_document(10 + n, chunk=chunk) for n in range(others)]
        made = planned(own, *beside, *([decoder(2, owner=0)] if decoding else []), turns=turns)
        turns = made.turns
        mine = [block for block in made.blocks if block.request == 1]
        edges += [block.start + block.tokens for block in mine]
        done += sum(block.tokens for block in mine)
        assert turn < 1000
    assert edges == [*range(chunk, total, chunk), total]


@given(st.integers(0, 100_000), st.integers(1, 70_000), st.integers(1, 9))
def test_a_split_is_on_the_grid_and_leaves_no_rank_with_a_crumb(start, count, ranks):
    """All tokens, inner cuts on the absolute grid, each part a grain or more unless one rank has all."""
    lengths = split(start, count, ranks)
    parts = [length for length in lengths if length]
    assert len(lengths) == ranks
    assert sum(lengths) == count
    assert lengths[: len(parts)] == tuple(parts)
    position = start
    for length in parts[:-1]:
        position += length
        assert position % GRAIN == 0
    assert len(parts) == 1 or min(parts) >= GRAIN


@pytest.mark.parametrize(("count", "parts"), [(1, 1), (1023, 1), (1024, 2), (4096, 4), (8192, 4)])
def test_few_tokens_go_to_few_ranks(count, parts):
    """A rank takes part only if it gets a grain."""
    assert sum(length > 0 for length in split(0, count, 4)) == parts


class Simulated:
    """A request whose client sends its tokens over some steps; completions draw tokens after their prompt."""

    def __init__(self, number, total, draws, steps, cancel_at, caller, chunk):
        self.chunk = chunk
        self.number, self.total, self.draws, self.rate = number, total, draws, -(-total // steps)
        self.cancel_at, self.caller = cancel_at, caller
        self.sent = self.done = 0
        self.opened, self.owner, self.idle_steps = False, None, 0

    @property
    def finished(self):
        return self.done == self.total and not self.draws

    def view(self):
        final = self.sent == self.total
        return RequestView(
            self.number,
            self.opened,
            start=self.done,
            available=self.sent - self.done,
            final=final,
            chunk=self.chunk,
            ready=final and self.done == self.total and self.draws > 0,
            owner=self.owner,
            caller=self.caller,
        )


SIMULATED = st.tuples(
    st.integers(1, 40_000),
    st.integers(0, 20),
    st.integers(1, 30),
    st.one_of(st.none(), st.integers(0, 20)),
    st.sampled_from("abc"),
)


@given(
    st.lists(SIMULATED, min_size=1, max_size=20),
    st.integers(1, 4),
    st.sampled_from([512, 2048]),
    st.integers(1, 18),
)
def test_everything_admitted_finishes_and_nobody_starves(clients, ranks, block_tokens, max_active):
    """Whatever the clients do, steps stay bounded, work that could be done waits a bounded time, and all of it ends."""
    limits = Limits(ranks=ranks, block_tokens=block_tokens, max_active=max_active, short_tokens=block_tokens)
    requests = {n: Simulated(n, *client, ranks * GRAIN) for n, client in enumerate(clients)}
    turns, step = Turns(), 0
    while requests:
        step += 1
        assert step < 2000, "work is left over"
        for request in list(requests.values()):
            request.sent = min(request.total, request.sent + request.rate)
            if request.cancel_at is not None and step > request.cancel_at:
                del requests[request.number]
        views = tuple(request.view() for request in requests.values())
        made = plan(SchedulerView(limits, views, turns))
        turns = made.turns
        drawing = {number for numbers in made.decodes for number in numbers}
        ready = {view.number for view in views if view.ready and view.opened}
        assert drawing >= ready or max(map(len, made.decodes)) == SLOTS
        assert {requests[n].caller for n in drawing} >= {requests[n].caller for n in ready}
        worked = drawing | {block.request for block in made.blocks}
        assert worked <= requests.keys(), "cancelled work goes on"
        assert not drawing & {block.request for block in made.blocks}, "a request decodes and reads in one step"
        budget = ranks * (limits.beside_decode_tokens if drawing else block_tokens)
        assert sum(block.tokens for block in made.blocks) <= max(budget, 2 * ranks * GRAIN)
        for number in made.opens:
            requests[number].opened = True
        assert sum(request.opened for request in requests.values()) <= max_active
        for rank, numbers in enumerate(made.decodes):
            for number in numbers:
                assert requests[number].owner in (None, rank), "a request changed its rank"
                requests[number].owner = rank
                requests[number].draws -= 1
        for block in made.blocks:
            assert block.start == requests[block.request].done
            assert requests[block.request].opened
            requests[block.request].done += block.tokens
        for request in list(requests.values()):
            could = request.opened and (request.view().final or request.sent - request.done >= request.chunk)
            request.idle_steps = 0 if request.number in worked or not could else request.idle_steps + 1
            assert request.idle_steps <= 3 * len(clients) + 3, "a request starves"
            if request.finished:
                del requests[request.number]

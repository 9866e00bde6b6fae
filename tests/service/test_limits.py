"""What all requests together may take: places and the memory of JSON bodies are bounded, shared, and given back."""

import asyncio
import hashlib
import socket
import time
from contextlib import ExitStack

import httpx
import pytest
from dist_attn_service.base.errors import MOST_RETRY_SECONDS, ServiceError
from dist_attn_service.http.limits import GUESS_SECONDS, BodyMemory, RequestLimit

from tests.support.fake_engine import FakeEngine
from tests.support.raw_http import CHUNKED, TEXT, Answer, chunk, head
from tests.support.service_server import running_service
from tests.support.waiting import eventually


def refused(requests, caller):
    """What a caller is told for whom there is no place: when to come back, in seconds, and why."""
    with pytest.raises(ServiceError) as error, requests.one(caller):
        raise AssertionError("there was a place")
    assert error.value.status == 429
    return int(error.value.headers["retry-after"]), error.value.message


def test_no_caller_takes_all_places():
    """A caller may hold half of what others leave: each next one finds a place, until there are hardly any."""
    requests = RequestLimit(16)
    with ExitStack() as held:
        for caller, share in (("a", 8), ("b", 4), ("c", 2), ("d", 1), ("e", 1)):
            for _ in range(share):
                held.enter_context(requests.one(caller))
            if caller != "e":
                assert "which a caller may hold half" in refused(requests, caller)[1]
        assert requests.count == 16 and "this service's limit" in refused(requests, "f")[1]
    assert requests.count == 0
    with requests.one("a"), requests.one("b"), requests.one("a"):
        assert requests.count == 3


def test_a_single_place_can_be_taken():
    """The smallest limit refuses nobody for ever."""
    requests = RequestLimit(1)
    with requests.one("a"):
        assert refused(requests, "a")[0] == refused(requests, "b")[0] == GUESS_SECONDS
    with requests.one("b"):
        assert requests.count == 1


def test_when_to_come_back_follows_from_how_long_requests_take():
    """Each that is refused is told a later time, as places come free; another caller does not wait behind them."""
    now = [0.0]
    requests = RequestLimit(8, clock=lambda: now[0])
    for _ in range(3):
        with requests.one("a"):
            now[0] += 40
    with ExitStack() as held:
        for caller in ("a", "a", "a", "a", "b", "b"):
            held.enter_context(requests.one(caller))
        assert [refused(requests, "a")[0] for _ in range(3)] == [10, 20, 30]  # four places, 40 s each
        assert refused(requests, "b")[0] == 20  # two places
        now[0] += 300  # nothing has ended: it takes longer than it did
        assert [refused(requests, "b")[0] for _ in range(3)] == [MOST_RETRY_SECONDS] * 3
    for _ in range(64):
        with requests.one("a"):
            now[0] += 0.1
    with requests.one("a"), requests.one("a"), requests.one("a"), requests.one("a"):
        assert refused(requests, "a")[0] == 1


def test_a_full_service_tells_when_the_next_of_all_places_comes_free():
    """Whoever holds them, places come free one after the other: all who are refused form one line, until it is over."""
    now = [0.0]
    requests = RequestLimit(4, clock=lambda: now[0])
    with requests.one("a"):
        now[0] += 40
    with ExitStack() as held:
        for caller in ("a", "a", "b", "c"):
            held.enter_context(requests.one(caller))
        assert [refused(requests, caller)[0] for caller in ("d", "e", "f")] == [10, 20, 30]  # four places, 40 s each
        now[0] += 20  # as long as two of them wait; what is held is 20 s old, so it is expected to take 40 s still
        assert refused(requests, "d")[0] == 20
        now[0] += 20  # the line is over, and what is held is 40 s old
        assert refused(requests, "d")[0] == 20


def test_a_service_that_closes_waits_for_what_is_under_way():
    """It is drained once nothing is under way, at once where nothing was, and says so when that took too long."""
    requests = RequestLimit(2)
    assert asyncio.run(requests.drained(60.0))
    with requests.one("a"):
        assert not asyncio.run(requests.drained(0.0))
    assert asyncio.run(requests.drained(60.0))


def test_those_who_come_back_when_told_find_a_place():
    """Of many requests at once each is done after few refusals, though no two are served at a time."""
    now, work = [0.0], 5.0
    requests = RequestLimit(2, clock=lambda: now[0])
    waiting, tries, ends = [(0.0, n) for n in range(40)], dict.fromkeys(range(40), 0), []
    while waiting:
        at, number = min(waiting)
        now[0] = at
        for done in [end for end in ends if end[0] <= at]:
            now[0] = done[0]
            done[1].close()
            ends.remove(done)
        now[0] = at
        waiting.remove((at, number))
        tries[number] += 1
        place = ExitStack()
        try:
            place.enter_context(requests.one("a"))
            ends.append((at + work, place))
        except ServiceError as error:
            waiting.append((at + int(error.headers["retry-after"]), number))
    assert sum(tries.values()) <= 4 * len(tries)


def test_slow_bodies_of_one_caller_leave_places_to_others(tmp_path):
    """While one key drips as many bodies as it may, another's requests are answered."""
    keys = {name: {"authorization": f"Bearer {name}"} for name in ("alice", "bob")}
    digests = tuple(hashlib.sha256(name.encode()).hexdigest() for name in keys)
    with running_service(tmp_path, FakeEngine(), api_keys=digests, open_requests=4) as service, ExitStack() as held:
        statuses = []
        for _ in range(5):
            slow = held.enter_context(service.connect())
            slow.sendall(head("/v1/encodings", TEXT, CHUNKED, "Authorization: Bearer alice") + chunk(b"drip"))
            statuses.append(Answer(slow).read_head())
        assert statuses == [200, 200, 429, 429, 429]
        with httpx.Client(base_url=service.url, headers=keys["bob"]) as bob:
            assert bob.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200
            assert bob.post("/v1/encodings", content=b"abc").status_code == 200
            assert bob.post("/v1/embeddings", json={"input": "abc"}).status_code == 200


def test_callers_without_keys_are_told_apart_by_their_addresses(tmp_path):
    """Whoever comes from one address has one share."""
    with running_service(tmp_path, FakeEngine(), open_requests=4) as service, ExitStack() as held:
        for _ in range(2):
            slow = held.enter_context(service.connect())
            slow.sendall(head("/v1/encodings", TEXT, CHUNKED) + chunk(b"drip"))
            assert Answer(slow).read_head() == 200
        assert httpx.post(f"{service.url}/v1/encodings", content=b"abc").status_code == 429
        other = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(transport=other) as client:
            assert client.post(f"{service.url}/v1/encodings", content=b"abc").status_code == 200


def test_bodies_together_stay_under_the_limit():
    """The second holder is refused over the limit, and served once the first has given its bytes back."""
    memory, ends = BodyMemory(100), []
    first, second = memory.hold("a", ends.append), memory.hold("b", ends.append)
    first(60)
    with pytest.raises(ServiceError, match="hold 60 bytes, 0 of them for this caller, and the limit is 100") as error:
        second(50)
    assert error.value.status == 429 and 1 <= int(error.value.headers["retry-after"]) <= MOST_RETRY_SECONDS
    ends[0]()
    second(50)
    ends[1]()
    assert memory.held == 0


def test_bodies_of_one_caller_leave_memory_to_others():
    """Several of them may hold half of what others leave; the first of a caller may hold all of that."""
    memory = BodyMemory(100)
    takes = {name: memory.hold(name[0], lambda _: None) for name in ("a1", "a2", "b1", "b2")}
    takes["a1"](30)
    takes["a2"](20)
    with pytest.raises(ServiceError, match="50 of them for this caller"):
        takes["a2"](1)
    takes["b1"](40)
    with pytest.raises(ServiceError, match="hold 90 bytes"):
        takes["b2"](1)
    assert memory.held == 90


def test_one_body_alone_may_be_larger():
    """A single body is bounded by its own limit only, so that no setting refuses every request for ever."""
    memory = BodyMemory(10)
    take = memory.hold("a", lambda _: None)
    take(8)
    take(8)
    assert memory.held == 16


def test_a_request_that_would_take_too_much_is_told_to_come_back(tmp_path):
    """While one client holds a large half-sent body, another gets 429; afterwards the same request works."""
    body = {"prompt": "x" * 3000, "max_tokens": 1}
    with running_service(tmp_path, FakeEngine(), json_memory_bytes=4096) as service:
        address = httpx.URL(service.url)
        with socket.create_connection((address.host, address.port)) as slow:
            head = (
                "POST /v1/completions HTTP/1.1",
                "host: localhost",
                "content-type: application/json",
                "content-length: 9999",
            )
            slow.sendall("\r\n".join((*head, "", " " * 3000)).encode())
            deadline = time.monotonic() + 10
            while (answer := httpx.post(f"{service.url}/v1/completions", json=body)).status_code == 200:
                assert time.monotonic() < deadline
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "overloaded"
        eventually(
            lambda: httpx.post(f"{service.url}/v1/completions", json=body).status_code == 200, "its bytes to be free"
        )

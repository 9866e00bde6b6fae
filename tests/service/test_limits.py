"""What all requests together may take: the memory of JSON bodies is bounded, and given back."""

import socket
import time

import httpx
import pytest

from service.errors import ServiceError
from service.limits import BodyMemory
from tests.support.fake_engine import FakeEngine
from tests.support.service_server import eventually, running_service


def test_bodies_together_stay_under_the_limit():
    """The second holder is refused over the limit, and served once the first has given its bytes back."""
    memory, ends = BodyMemory(100), []
    first, second = memory.hold(ends.append), memory.hold(ends.append)
    first(60)
    with pytest.raises(ServiceError, match="hold 60 bytes, and the limit is 100") as refused:
        second(50)
    assert (refused.value.status, refused.value.headers["retry-after"]) == (429, "2")
    ends[0]()
    second(50)
    ends[1]()
    assert memory.held == 0


def test_one_body_alone_may_be_larger():
    """A single body is bounded by its own limit only, so that no setting refuses every request for ever."""
    memory = BodyMemory(10)
    take = memory.hold(lambda _: None)
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
                "host: a",
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

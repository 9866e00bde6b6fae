"""Generating from a session: what is drawn becomes a part of the session, whether or not the client stays."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dist_attn.wire.messages import Failed, FinishDrawing
from tests.support.fake_engine import FakeEngine
from tests.support.fake_sessions import after, drawn_from, stored
from tests.support.opening import draw_of, is_session
from tests.support.raw_http import Answer, head
from tests.support.service_server import RunningService, running_service
from tests.support.sessions import SessionClient
from tests.support.waiting import eventually

TEXT = b"It was the best of times"
START = len(TEXT)


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service for tests that leave its engine's knobs as they found them."""
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


def begun(service: RunningService) -> tuple[SessionClient, str]:
    """A session with a text."""
    client = SessionClient(service.url)
    session = client.make()
    client.append(session, TEXT)
    return client, session


def texts_timed(service: RunningService) -> float:
    """The number of texts whose time for each token is among the metrics."""
    lines = httpx.get(f"{service.url}/metrics").text.splitlines()
    name = "dist_attn_time_per_output_token_seconds_count "
    return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def generate(client: SessionClient, session: str, key: str = "", **body: Any) -> httpx.Response:
    """Go on with the text."""
    headers = {"idempotency-key": key} if key else {}
    return client.post(f"/v1/sessions/{session}/generate", json=body, headers=headers)


def text_of(tokens: list[int]) -> str:
    """What the byte tokeniser makes of them."""
    return bytes(tokens).decode("utf-8", "replace")


def test_what_is_drawn_becomes_a_part_of_the_session(service: RunningService) -> None:
    """The answer has the text, the usage and where the session stands: after the text and what was drawn."""
    client, session = begun(service)
    drawn = drawn_from(after(0, TEXT), 12)
    answer = generate(client, session, max_tokens=12, expected_position=START).json()
    assert answer["object"] == "session.completion" and answer["model"] == "tiny"
    assert answer["choices"] == [{"index": 0, "text": text_of(drawn), "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {
        "prompt_tokens": 0,
        "completion_tokens": 12,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert answer["session"] == {
        "restored_position": START, "recomputed_tokens": 0, "bit_exact": True, "reason": "",
        "id": session, "start": START, "position": START + 12, "replayed": False,
    }  # fmt: skip
    assert client.state(session).content == stored(after(0, [*TEXT, *drawn]), START + 12)
    more = client.append(session, "and more", expected_position=START + 12)
    assert more.restored_position == START + 12
    assert client.state(session).content == stored(after(0, [*TEXT, *drawn, *b"and more"]), START + 20)


def test_as_an_event_stream(service: RunningService) -> None:
    """Pieces of text, then the finish reason, then usage and session, then the end; the same text as whole."""
    client, session = begun(service)
    (fork,) = [client.post(f"/v1/sessions/{session}/fork").json()["id"]]
    whole = generate(client, fork, max_tokens=12).json()
    answer = generate(client, session, max_tokens=12, stream=True)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    *pieces, last = [json.loads(event) for event in events]
    assert done == "[DONE]" and all(piece["object"] == "session.completion.chunk" for piece in [*pieces, last])
    assert "".join(piece["choices"][0]["text"] for piece in pieces) == whole["choices"][0]["text"]
    assert [piece["choices"][0]["finish_reason"] for piece in pieces][-1] == "length"
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert last["session"] == {**whole["session"], "id": session}


def test_the_sampling_options_reach_the_engine(service: RunningService) -> None:
    """They are those of completions, with their bounds."""
    client, session = begun(service)
    before = len(service.engine.received)
    generate(client, session, max_tokens=3, temperature=0.5, top_k=4, top_p=0.9, min_p=0.1, seed=7, logit_bias={"5": 2})
    (opened,) = [message for message in service.engine.received[before:] if is_session(message)]
    sampling = draw_of(opened)
    assert sampling is not None
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (3, 0.5, 4, 0.9)
    assert (sampling.min_p, sampling.seed, sampling.logit_bias) == (0.1, 7, {5: 2.0})
    for name, value in (("max_tokens", 0), ("max_tokens", 65_537), ("temperature", -1), ("stop", [""]), ("n", 2)):
        refused = generate(client, session, **{name: value})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == name, refused.text
    assert generate(client, session, model="other").status_code == 404


def test_the_end_of_the_text(tmp_path: Path) -> None:
    """The end token is no part of the session, which can be gone on with."""
    with running_service(tmp_path) as service:
        client, session = begun(service)
        for count in (3, 0):
            service.engine.sessions.end_after = count
            answer = generate(client, session, max_tokens=10).json()
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert answer["session"]["position"] == START + 3
        assert client.append(session, "x").position == START + 4


def test_a_stop_string_ends_the_drawing(service: RunningService) -> None:
    """The engine is told after which token the stop string is whole; the text ends before it."""
    client, session = begun(service)
    drawn = drawn_from(after(0, TEXT), 40)
    at = next(n for n, token in enumerate(drawn) if n > 5 and token < 128 and token not in drawn[:n])
    timed, before = texts_timed(service), len(service.engine.received)
    answer = generate(client, session, max_tokens=40, stop=chr(drawn[at])).json()
    assert texts_timed(service) == timed + 1
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["usage"]["completion_tokens"] == at + 1
    assert answer["choices"][0]["text"] == text_of(drawn[:at])
    (told,) = [message for message in service.engine.received[before:] if isinstance(message, FinishDrawing)]
    assert told.drawn == at + 1


def test_the_same_key_draws_once(service: RunningService) -> None:
    """A generation that was done is only said again, whole or streamed; other options under its key are a 409."""
    client, session = begun(service)
    first = generate(client, session, "k", max_tokens=9, expected_position=START).json()
    before = len(service.engine.received)
    again = generate(client, session, "k", max_tokens=9, expected_position=START, top_p=None).json()
    assert again == {**first, "session": {**first["session"], "replayed": True}}
    streamed = generate(client, session, "k", max_tokens=9, expected_position=START, stream=True).text
    assert json.loads(streamed.split("\n\n")[0][6:])["choices"][0]["text"] == first["choices"][0]["text"]
    other = generate(client, session, "k", max_tokens=10, expected_position=START)
    assert other.status_code == 409 and other.headers["x-should-retry"] == "false"
    assert not [message for message in service.engine.received[before:] if is_session(message)]
    assert client.append(session, "the key of a generation is none of an append", "k").start == START + 9


def test_a_long_answer_is_not_said_again(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that was too long to be kept is not drawn a second time either: the 409 says where the session stands."""
    client, session = begun(service)
    monkeypatch.setattr("dist_attn_service.sessions.generate.KEPT_CHARACTERS", 100)
    assert generate(client, session, "k", max_tokens=90).status_code == 200
    again = generate(client, session, "k", max_tokens=90)
    assert again.status_code == 409 and again.json()["position"] == START + 90


def test_what_cannot_be_gone_on_with(service: RunningService) -> None:
    """A session without a text, and one that is not there."""
    client = SessionClient(service.url)
    empty = generate(client, client.make())
    assert empty.status_code == 400 and empty.json()["error"]["code"] == "empty_input"
    assert generate(client, "sess_none").status_code == 404
    streamed = generate(client, "sess_none", stream=True)
    assert streamed.status_code == 404 and streamed.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_does_not_end_it(tmp_path: Path, stream: bool) -> None:
    """What was asked for is drawn and kept, and with its key the answer can be had."""
    with running_service(tmp_path, FakeEngine(draw_seconds=0.05)) as service:
        client, session = begun(service)
        service.engine.paused = True
        body = json.dumps({"max_tokens": 20, "stream": stream}).encode()
        path = f"/v1/sessions/{session}/generate"
        with service.connect() as connection:
            headers = ("Content-Type: application/json", f"Content-Length: {len(body)}", "Idempotency-Key: k")
            connection.sendall(head(path, *headers, "X-Request-Id: left") + body)
            eventually(lambda: client.get(f"/v1/sessions/{session}").json()["busy"], "it to begin")
        service.engine_port.resume()
        eventually(lambda: not client.get(f"/v1/sessions/{session}").json()["busy"], "it to end")
        assert client.get(f"/v1/sessions/{session}").json()["position"] == START + 20
        assert service.logged("left")["reason"] == "client_gone"
        assert generate(client, session, "k", max_tokens=20).json()["session"]["replayed"]


def test_one_that_nobody_waits_for_has_an_end(tmp_path: Path) -> None:
    """Some time after its client has left, the engine is told to draw no further than what came until then."""
    with running_service(tmp_path, FakeEngine(draw_seconds=0.05), detached_seconds=0.1) as service:
        _, session = begun(service)
        body = b'{"max_tokens": 300, "stream": true}'  # 15 s: a busy machine too sees meanwhile that the client left
        with service.connect() as connection:
            path = f"/v1/sessions/{session}/generate"
            connection.sendall(head(path, "Content-Type: application/json", f"Content-Length: {len(body)}") + body)
            assert Answer(connection).read_head() == 200

        def told() -> list[FinishDrawing]:
            return [message for message in service.engine.received if isinstance(message, FinishDrawing)]

        eventually(lambda: bool(told()), "the engine to be told")
        assert 0 < told()[0].drawn < 300


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_fails(tmp_path: Path, stream: bool) -> None:
    """The session stands where it stood; a stream that had begun ends with an error event."""
    with running_service(tmp_path, FakeEngine(draw_seconds=0.05)) as service:
        client, session = begun(service)

        def drawing() -> set[str]:
            return {m.request_id for m in service.engine.received if is_session(m) and draw_of(m)}

        def fail() -> None:
            (name,) = drawing()
            service.engine_port.inject(Failed(name, "engine_failed", "rank 1 died"))

        body = json.dumps({"max_tokens": 100, "stream": stream}).encode()
        with service.connect() as connection:
            headers = ("Content-Type: application/json", f"Content-Length: {len(body)}")
            connection.sendall(head(f"/v1/sessions/{session}/generate", *headers) + body)
            answer = Answer(connection)
            eventually(lambda: bool(drawing()), "it to be in the engine")  # a session is busy before that
            if stream:
                assert answer.read_head() == 200
            fail()
            assert stream or answer.read_head() == 500
            said = answer.read_body()
        assert b"rank 1 died" in said and (not stream or said.endswith(b"data: [DONE]\n\n"))
        eventually(lambda: not client.get(f"/v1/sessions/{session}").json()["busy"], "the session to be free")
        assert client.get(f"/v1/sessions/{session}").json()["position"] == START

"""How soon a request is wanted: headers and fields, what the engine is told of them, and what comes of deadlines."""

import hashlib
import json

import httpx
import pytest
from dist_attn_service.base.parsing import DeadlineExceeded, RequestTerms

from dist_attn.wire.messages import OpenWork
from dist_attn.wire.specs import Terms
from tests.service.test_chat import templated
from tests.support.fake_engine import FakeEngine
from tests.support.opening import is_completion, is_encoding, is_session
from tests.support.service_server import running_service

PROMPT = {"prompt": "abc", "max_tokens": 2}


def told(engine):
    """The terms of the requests that the engine was given, in order."""
    return [m.terms for m in engine.received if is_encoding(m) or is_completion(m)]


def test_headers_and_fields_reach_the_engine(tmp_path):
    """Every route tells the class, the seconds that are left and the tokens it knows of; fields go over headers."""
    hurry = {"x-request-priority": "High", "x-request-deadline": "30"}
    with (
        running_service(tmp_path, FakeEngine()) as service,
        httpx.Client(base_url=service.url, headers=hurry) as http,
    ):
        http.post("/v1/completions", json=PROMPT).raise_for_status()
        http.post("/v1/completions", json={**PROMPT, "priority": "low", "deadline_seconds": 7}).raise_for_status()
        http.post("/v1/embeddings", json={"input": "abcd"}).raise_for_status()
        http.post("/v1/encodings", content=b"abcde", headers={"content-type": "text/plain"}).raise_for_status()
        httpx.post(f"{service.url}/v1/completions", json=PROMPT).raise_for_status()
    terms = told(service.engine)
    assert [t.priority for t in terms] == [0, 2, 0, 0, 1]
    assert [t.tokens for t in terms] == [3, 3, 4, None, 3]
    assert all(most - 5 < t.deadline_s <= most for t, most in zip(terms, (30, 7, 30, 30), strict=False))
    assert terms[-1] == Terms(tokens=3, progress=True, caller=terms[-1].caller)


def test_sessions_say_how_soon_as_well(tmp_path):
    """Appends and generations tell the engine class and deadline, by headers and by fields, which go over headers."""
    hurry = {"x-request-priority": "low", "x-request-deadline": "30"}
    with (
        running_service(tmp_path, FakeEngine()) as service,
        httpx.Client(base_url=service.url, headers=hurry) as http,
    ):
        session = http.post("/v1/sessions").json()["id"]
        http.post(f"/v1/sessions/{session}/append", content=b"abc", headers={"content-type": "text/plain"})
        http.post(f"/v1/sessions/{session}/append", json={"input": "d", "priority": "high", "deadline_seconds": 7})
        http.post(f"/v1/sessions/{session}/generate", json={"max_tokens": 2, "priority": "high"}).raise_for_status()
        httpx.post(f"{service.url}/v1/sessions/{session}/generate", json={"max_tokens": 2}).raise_for_status()
    terms = [m.terms for m in service.engine.received if is_session(m)]
    assert [t.priority for t in terms] == [2, 0, 0, 1]
    assert all(most - 5 < t.deadline_s <= most for t, most in zip(terms, (30, 7, 30), strict=False))
    assert terms[-1] == Terms(caller=terms[-1].caller)


def test_the_engine_tells_callers_apart_and_knows_none(tmp_path):
    """Each key is another caller on every route, of which neither the key nor its digest is told; so is an address."""
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in ("one", "two")]
    callers = []
    for keys in (digests, ()):
        with running_service(tmp_path, FakeEngine(), api_keys=tuple(keys)) as service:
            for key in ("one", "two"):
                with httpx.Client(base_url=service.url, headers={"x-api-key": key}) as http:
                    http.post("/v1/completions", json=PROMPT).raise_for_status()
                    http.post("/v1/embeddings", json={"input": "abcd"}).raise_for_status()
                    http.post("/v1/encodings", content=b"abc", headers={"content-type": "text/plain"})
                    http.post(f"/v1/sessions/{http.post('/v1/sessions').json()['id']}/append", json={"input": "d"})
        asked = [m.terms.caller for m in service.engine.received if isinstance(m, OpenWork)]
        assert len(asked) == 8 and len(set(asked[:4])) == 1 == len(set(asked[4:]))
        callers.append(asked[::4])
    assert len({*callers[0], *callers[1]}) == 3 and callers[1][0] == callers[1][1]
    assert not any(caller in digest for caller in callers[0] for digest in digests)


@pytest.mark.parametrize("what", ["append", "generate"])
def test_a_sessions_deadline_that_has_passed_leaves_it_as_it_stands(tmp_path, what):
    """The answer is a 504 that says so, and the session can be gone on with."""
    with running_service(tmp_path, FakeEngine()) as service, httpx.Client(base_url=service.url) as http:
        session = http.post("/v1/sessions").json()["id"]
        http.post(f"/v1/sessions/{session}/append", json={"input": "abc"}).raise_for_status()
        service.engine.refuse = "deadline_exceeded"
        body = {"input": "def"} if what == "append" else {"max_tokens": 2}
        answer = http.post(f"/v1/sessions/{session}/{what}", json={**body, "deadline_seconds": 1})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
        service.engine.refuse = None
        assert http.get(f"/v1/sessions/{session}").json()["position"] == 3
        again = http.post(f"/v1/sessions/{session}/{what}", json=body)
        assert again.status_code == 200, again.text


@pytest.mark.parametrize(
    ("name", "value"),
    [("x-request-priority", "urgent"), ("x-request-deadline", "soon"), ("x-request-deadline", "0")]
    + [("x-request-deadline", value) for value in ("-1", "nan", "inf", "1e9")],
)
def test_headers_that_say_nothing_are_refused(tmp_path, name, value):
    """A class or a time that there is not is a 400 that names the header."""
    with running_service(tmp_path, FakeEngine()) as service:
        answer = httpx.post(f"{service.url}/v1/completions", json=PROMPT, headers={name: value})
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"]


def test_a_deadline_that_has_passed_is_a_504_that_is_not_retried(tmp_path):
    """From the engine, and before it is asked at all."""
    with running_service(tmp_path, FakeEngine(refuse="deadline_exceeded")) as service:
        answer = httpx.post(f"{service.url}/v1/completions", json=PROMPT)
    assert answer.status_code == 504
    assert answer.headers["x-should-retry"] == "false"
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    with pytest.raises(DeadlineExceeded) as late:
        RequestTerms(deadline_at=0.0).for_engine()
    assert (late.value.status, late.value.headers) == (504, {"x-should-retry": "false"})


@pytest.mark.parametrize(("given", "sent"), [(37, "37"), (None, "1"), (999, "120")])
def test_retry_after_is_what_the_engine_says(tmp_path, given, sent):
    """An engine that is full knows when there may be room."""
    with running_service(tmp_path, FakeEngine(refuse="overloaded", retry_after_s=given)) as service:
        answer = httpx.post(f"{service.url}/v1/completions", json=PROMPT)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, sent)


@pytest.mark.parametrize("route", ["completions", "chat/completions"])
def test_a_stream_says_how_far_its_prompt_is_read(tmp_path, route):
    """Where it is asked for: events without choices before the first text, ending with all of the prompt."""
    texts = {
        "completions": {"prompt": "abcdef"},
        "chat/completions": {"messages": [{"role": "user", "content": "abc"}]},
    }
    body = {**texts[route], "max_tokens": 2, "stream": True}
    with running_service(tmp_path, FakeEngine(), model=templated(tmp_path)) as service:
        lines = [
            httpx.post(f"{service.url}/v1/{route}", json={**body, **more}).text.splitlines()
            for more in ({"return_progress": True}, {})
        ]
    asked, plain = ([json.loads(line[6:]) for line in part if line.startswith("data: {")] for part in lines)
    progress = [event for event in asked if "prompt_progress" in event]
    assert progress
    assert all(event["choices"] == [] for event in progress)
    last = progress[-1]["prompt_progress"]
    assert last["processed"] == last["total"] > 2
    assert (last["cache"], last["time_ms"] >= 0) == (0, True)
    assert not [event for event in plain if "prompt_progress" in event]

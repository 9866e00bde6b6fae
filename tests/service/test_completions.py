"""POST /v1/completions over real sockets."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.support.fake_engine import FakeEngine, say
from tests.support.opening import draw_of, is_completion
from tests.support.raw_http import head
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service for the tests that leave its engine's knobs as they found them."""
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


def complete(service: RunningService, **body: Any) -> dict[str, Any]:
    """A whole completion."""
    answer = httpx.post(f"{service.url}/v1/completions", json={"prompt": "abc", **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def events(service: RunningService, **body: Any) -> list[Any]:
    """The data of a streamed completion's events, [DONE] included."""
    answer = httpx.post(f"{service.url}/v1/completions", json={"prompt": "abc", "stream": True, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    blocks = answer.text.strip().split("\n\n")
    data = [block.removeprefix("data: ") for block in blocks]
    return [text if text == "[DONE]" else json.loads(text) for text in data]


def streamed_text(data: list[Any]) -> str:
    """The text of all chunks."""
    return "".join(choice["text"] for event in data[:-1] for choice in event.get("choices", []))


def test_a_completion_has_openais_shape(service: RunningService) -> None:
    """The JSON holds id, object, created, model, one choice and usage; the default is 16 tokens."""
    answer = complete(service, model="tiny")
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion" and answer["model"] == "tiny"
    assert answer["choices"] == [{"index": 0, "text": "abcabcabcabcabca", "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 16,
        "total_tokens": 19,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_a_stream_has_openais_chunks(service: RunningService) -> None:
    """Chunks, a finish chunk, usage when asked, [DONE]; together the same text as the whole answer."""
    data = events(service, max_tokens=5, temperature=0, stream_options={"include_usage": True})
    assert data[-1] == "[DONE]"
    assert set(data[0]) == {"id", "object", "created", "model", "choices"}
    assert data[0]["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}]
    assert data[-3]["choices"] == [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}]
    assert data[-2]["choices"] == []
    assert data[-2]["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 5,
        "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert streamed_text(data) == complete(service, max_tokens=5, temperature=0)["choices"][0]["text"] == "abcab"


@pytest.mark.parametrize("prompt", ["abc", [97, 98, 99], ["abc"], [[97, 98, 99]]])
def test_a_prompt_may_be_text_or_tokens(service: RunningService, prompt: Any) -> None:
    """Text, token ids, and lists of one of them mean the same."""
    assert complete(service, prompt=prompt, max_tokens=4)["choices"][0]["text"] == "abca"


def test_a_long_prompt_goes_by_credit(service: RunningService) -> None:
    """A prompt far over the engine's credit arrives whole."""
    answer = complete(service, prompt="0123456789" * 20_000, max_tokens=3)
    assert answer["usage"]["prompt_tokens"] == 200_000
    assert answer["choices"][0]["text"] == "012"


def test_sampling_options_reach_the_engine(service: RunningService) -> None:
    """What the client sets is what the engine is told, null means the default, `user` is taken."""
    complete(
        service, temperature=0.5, top_p=0.9, top_k=7, seed=11, max_tokens=2, user="me",
        n=1, best_of=1, echo=False, logprobs=None, presence_penalty=0, frequency_penalty=0.0, logit_bias={}, suffix=None
    )  # fmt: skip
    complete(service, temperature=None, max_tokens=None, seed=None)
    opened = [draw_of(m) for m in service.engine.received if is_completion(m)][-2:]
    first, second = opened
    assert (first.max_tokens, first.temperature, first.top_k, first.top_p, first.seed) == (2, 0.5, 7, 0.9, 11)
    assert (second.max_tokens, second.temperature, second.top_k, second.top_p) == (16, 1.0, 0, 1.0)
    assert second.seed is not None  # settled here, so that another controller would draw the same


def test_the_end_can_be_ignored_or_put_off(service: RunningService) -> None:
    """`ignore_eos` and `min_tokens` are the engine's to follow; without them it is told of neither."""
    complete(service, ignore_eos=True, min_tokens=3, max_tokens=3)
    complete(service, max_tokens=3)
    first, second = [draw_of(m) for m in service.engine.received if is_completion(m)][-2:]
    assert (first.ignore_eos, first.min_tokens) == (True, 3)
    assert (second.ignore_eos, second.min_tokens) == (False, 0)


def test_stop_strings_wait_for_the_least_number_of_tokens(tmp_path: Path) -> None:
    """A stop string among the first `min_tokens` tokens is text like any other; a later one ends it."""
    with running_service(tmp_path, FakeEngine(reply=say(b"one, two, three"))) as service:
        assert complete(service, stop=",", max_tokens=50)["choices"][0]["text"] == "one"
        assert complete(service, stop=",", max_tokens=50, min_tokens=4)["choices"][0]["text"] == "one, two"
        assert complete(service, stop=",", max_tokens=50, min_tokens=9)["choices"][0]["text"] == "one, two, three"


@pytest.mark.parametrize("include_usage", [True, False])
def test_every_chunk_may_tell_the_usage(service: RunningService, include_usage: bool) -> None:
    """With `continuous_usage_stats` every chunk has the usage so far, which never falls; without it only the last."""
    options = {"include_usage": include_usage, "continuous_usage_stats": True}
    told = [event["usage"] for event in events(service, max_tokens=4, stream_options=options)[:-1]]
    counts = [usage["completion_tokens"] for usage in told]
    assert counts == sorted(counts) and counts[-1] == 4 and all(usage["prompt_tokens"] == 3 for usage in told)
    plain = events(service, max_tokens=4, stream_options={"include_usage": include_usage})[:-1]
    assert sum("usage" in event for event in plain) == include_usage


@pytest.mark.parametrize(
    ("stop", "text", "reason", "tokens"),
    [
        ("\n\n", "one", "stop", 5),
        (["three", "two"], "one\n\n", "stop", 8),
        ("tw", "one\n\n", "stop", 7),
        ("zebra", "one\n\ntwo é", "stop", 12),
        ("é", "one\n\ntwo ", "stop", 11),
    ],
)
def test_stop_strings_end_the_text(tmp_path: Path, stop: Any, text: str, reason: str, tokens: int) -> None:
    """The text ends before the first stop string, streamed or whole, though the string spans several tokens."""
    engine = FakeEngine(reply=say("one\n\ntwo é".encode()))
    with running_service(tmp_path, engine) as service:
        whole = complete(service, stop=stop, max_tokens=50)
        data = events(service, stop=stop, max_tokens=50, stream_options={"include_usage": True})
    assert whole["choices"][0]["text"] == streamed_text(data) == text
    assert whole["choices"][0]["finish_reason"] == data[-3]["choices"][0]["finish_reason"] == reason
    assert whole["usage"]["completion_tokens"] == data[-2]["usage"]["completion_tokens"] == tokens


def test_characters_are_never_torn(tmp_path: Path) -> None:
    """A character of several tokens comes in one chunk, and one that stays incomplete becomes U+FFFD."""
    engine = FakeEngine(reply=say("añ€😀".encode(), b"\xe2\x82"))
    with running_service(tmp_path, engine) as service:
        data = events(service, max_tokens=50)
        assert streamed_text(data) == complete(service, max_tokens=50)["choices"][0]["text"] == "añ€😀\ufffd"


def test_the_official_client_reads_both_forms(service: RunningService) -> None:
    """The openai package completes and streams, and turns an error into its own exception."""
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        whole = client.completions.create(model=model, prompt="abc", max_tokens=6, temperature=0)
        assert whole.choices[0].text == "abcabc" and whole.choices[0].finish_reason == "length"
        chunks = list(
            client.completions.create(
                model=model, prompt="abc", max_tokens=6, temperature=0, stream=True,
                stream_options={"include_usage": True}, extra_body={"top_k": 5},
            )
        )  # fmt: skip
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "abcabc"
        assert chunks[-1].usage is not None and chunks[-1].usage.total_tokens == 9
        with pytest.raises(openai.NotFoundError) as unknown:
            client.completions.create(model="other", prompt="abc")
        assert unknown.value.code == "model_not_found" and unknown.value.param == "model"
        assert unknown.value.request_id


def test_pings_keep_a_quiet_stream_alive(tmp_path: Path) -> None:
    """While nothing is drawn, comments with one newline arrive, and the official client reads over them."""
    engine = FakeEngine(paused=True)
    with running_service(tmp_path, engine, ping_seconds=0.05) as service:
        body = {"prompt": "abc", "stream": True, "max_tokens": 3}
        engine.paused, engine.hold_replies = False, True
        with httpx.stream("POST", f"{service.url}/v1/completions", json=body, timeout=60) as answer:
            chunk = next(answer.iter_raw())
            assert chunk.startswith(b": ping\n") and b"\n\n" not in chunk
        engine.hold_replies = False
        engine.paused = True
        with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
            threading.Timer(0.5, service.engine_port.resume).start()
            chunks = list(client.completions.create(model="tiny", prompt="abc", max_tokens=3, stream=True))
            assert "".join(chunk.choices[0].text for chunk in chunks) == "abc"


def test_an_engine_that_fails_ends_the_stream_with_an_error(tmp_path: Path) -> None:
    """In mid-stream an error event and [DONE]; before the head a 5xx; the service goes on."""
    engine = FakeEngine(fail_at=3)
    with running_service(tmp_path, engine) as service:
        data = events(service)
        assert data[-1] == "[DONE]"
        assert data[-2]["error"]["code"] == "engine_failed" and "rank 1 died" in data[-2]["error"]["message"]
        whole = httpx.post(f"{service.url}/v1/completions", json={"prompt": "abc"})
        assert whole.status_code == 500 and whole.json()["error"]["type"] == "server_error"
        with (
            openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.APIError, match="rank 1 died"),
        ):
            list(client.completions.create(model="tiny", prompt="abc", stream=True))
        engine.fail_at = None
        assert complete(service)["choices"][0]["finish_reason"] == "length"


def test_a_silent_engine_ends_the_stream_with_an_error(tmp_path: Path) -> None:
    """The no-progress deadline turns into engine_timeout, streamed or whole, and the work is cancelled."""
    engine = FakeEngine(hold_replies=True)
    with running_service(tmp_path, engine, engine_silence_seconds=0.2) as service:
        assert events(service)[-2]["error"]["code"] == "engine_timeout"
        whole = httpx.post(f"{service.url}/v1/completions", json={"prompt": "abc"})
        assert whole.status_code == 504 and whole.json()["error"]["code"] == "engine_timeout"
        eventually(lambda: len(engine.cancelled) == 2, "both to be cancelled")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_the_work(tmp_path: Path, stream: bool) -> None:
    """When the connection closes, the controller hears Cancel, streamed or not."""
    engine = FakeEngine(hold_replies=True)
    with running_service(tmp_path, engine) as service:
        body = json.dumps({"prompt": "abc", "stream": stream}).encode()
        with service.connect() as connection:
            headers = ("Content-Type: application/json", "x-request-id: gone-1", f"Content-Length: {len(body)}")
            connection.sendall(head("/v1/completions", *headers) + body)
            eventually(lambda: engine.open_count == 1, "the request to reach the engine")
        eventually(lambda: len(engine.cancelled) == 1 and engine.open_count == 0, "the cancel")
        assert service.logged("gone-1")["reason"] == "client_gone"


def test_too_many_requests_are_told_to_come_back(tmp_path: Path) -> None:
    """Over the limit of open requests the answer is 429 with Retry-After."""
    engine = FakeEngine(hold_replies=True)
    with (
        running_service(tmp_path, engine, open_requests=1) as service,
        httpx.stream("POST", f"{service.url}/v1/completions", json={"prompt": "a", "stream": True}) as held,
    ):
        assert held.status_code == 200
        refused = httpx.post(f"{service.url}/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 429 and "retry-after" in refused.headers
        assert refused.json()["error"]["code"] == "overloaded"


def test_stopping_the_server_ends_streams_with_words(tmp_path: Path) -> None:
    """What is open when the server stops: a stream gets an error event and [DONE], a whole completion 503."""
    engine = FakeEngine(hold_replies=True)
    seen: dict[bool, httpx.Response] = {}
    with running_service(tmp_path, engine, shutdown_seconds=1) as service:

        def ask(stream: bool) -> None:
            body = {"prompt": "a", "stream": stream}
            seen[stream] = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60)

        readers = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
        for reader in readers:
            reader.start()
        eventually(lambda: engine.open_count == 2, "the requests to reach the engine")
    for reader in readers:
        reader.join(60)
    assert '"reached":{"completion_tokens":0}' in seen[True].text
    assert '"code":"stopping"' in seen[True].text and seen[True].text.endswith("data: [DONE]\n\n")
    assert seen[False].status_code == 503 and seen[False].json()["error"]["code"] == "stopping"

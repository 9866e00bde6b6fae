"""/metrics, /v1/status and /version: what they tell, and that labels come from closed sets."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from dist_attn_service.base.errors import Code
from dist_attn_service.engine.metrics import OUTCOMES, UNROUTED

from dist_attn import __version__
from tests.support.fake_engine import FakeEngine
from tests.support.metrics import Samples, samples, value
from tests.support.raw_http import Answer, head
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service for the tests that leave its engine's knobs as they found them."""
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


def test_requests_and_tokens_are_counted(service: RunningService) -> None:
    """Each request counts once under its route and outcome, with its time, its bytes and its tokens."""
    before = samples(service)
    httpx.post(f"{service.url}/v1/completions", json={"prompt": "abc", "max_tokens": 5})
    httpx.post(f"{service.url}/v1/completions", json={"prompt": ""})
    httpx.post(f"{service.url}/v1/encodings", content=b"abcdefg")
    httpx.post(f"{service.url}/v1/embeddings", json={"input": ["ab", "c"]})
    httpx.get(f"{service.url}/v1/models/tiny")
    httpx.get(f"{service.url}/no/such/path")

    def told() -> Samples:
        after = samples(service)
        return {key: after[key] - before.get(key, 0.0) for key in after}

    eventually(lambda: value(told(), "dist_attn_requests_total", route=UNROUTED, outcome="not_found") == 1, "the last")
    found = told()
    for route, outcome in (
        ("/v1/completions", "finished"), ("/v1/completions", "empty_input"), ("/v1/encodings", "finished"),
        ("/v1/embeddings", "finished"), ("/v1/models/{model_id}", "finished"),
    ):  # fmt: skip
        assert value(found, "dist_attn_requests_total", route=route, outcome=outcome) == 1, (route, outcome)
    assert value(found, "dist_attn_request_seconds_count", route="/v1/completions") == 2
    tokens = {kind: value(found, "dist_attn_tokens_total", kind=kind) for kind in ("prompt", "completion", "encoding")}
    assert tokens == {"prompt": 3, "completion": 5, "encoding": 7}
    assert value(found, "dist_attn_tokens_total", kind="embedding") == 3
    assert value(found, "dist_attn_body_bytes_total", direction="in") > 50
    assert value(found, "dist_attn_body_bytes_total", direction="out") > 500


def test_times_of_drawn_texts_are_told(service: RunningService) -> None:
    """Each text's time in the queue, until its first token, and for each after that; a request's tokens once."""
    names = (
        "request_queue_time_seconds", "time_to_first_token_seconds", "time_per_output_token_seconds",
        "request_prompt_tokens", "request_generation_tokens",
    )  # fmt: skip
    before = samples(service)
    httpx.post(f"{service.url}/v1/completions", json={"prompt": "abc", "max_tokens": 5, "n": 2})
    after = samples(service)
    counts = [after[f"dist_attn_{name}_count", ()] - before[f"dist_attn_{name}_count", ()] for name in names]
    assert counts == [2, 2, 2, 1, 1]
    assert (
        after["dist_attn_request_generation_tokens_sum", ()] - before["dist_attn_request_generation_tokens_sum", ()]
        == 10
    )


def test_losses_of_ranks_are_told(service: RunningService) -> None:
    """Losses of ranks, tokens read again for them, and the time of steps: the engine's numbers, in both places."""
    found, status = samples(service), httpx.get(f"{service.url}/v1/status").json()
    assert value(found, "dist_attn_lost_groups_total", model="tiny") == status["lost_groups"] == 2
    assert value(found, "dist_attn_replayed_tokens_total", model="tiny") == status["replayed_tokens"] == 700
    busy = value(found, "dist_attn_rank_busy_seconds_total", model="tiny", rank="0")
    assert busy == status["ranks"][0]["busy_seconds"] == 1.5


def test_gauges_follow_what_happens(tmp_path: Path) -> None:
    """Open requests, the spools' bytes, and the engine's readiness are those of the moment."""
    engine = FakeEngine(hold_replies=True)
    with running_service(tmp_path, engine) as service:
        assert value(samples(service), "dist_attn_info", version=__version__, model="tiny") == 1
        assert value(samples(service), "dist_attn_engine_ready", model="tiny") == 1
        with httpx.stream("POST", f"{service.url}/v1/completions", json={"prompt": "a", "stream": True}):
            found = samples(service)
            assert value(found, "dist_attn_open_requests") == 1
            assert value(found, "dist_attn_engine_active", model="tiny") == 1
            assert value(found, "dist_attn_rank_heartbeat_age_seconds", model="tiny", rank="0") == 0
            assert ("dist_attn_rank_peak_rss_bytes", (("model", "tiny"), ("rank", "0"))) in found
        engine.ready = False
        assert value(samples(service), "dist_attn_engine_ready", model="tiny") == 0
        eventually(lambda: value(samples(service), "dist_attn_open_requests") == 0, "the request to end")


def test_guarded_denominators_are_told_by_layer_and_head(service: RunningService) -> None:
    """Each head of the model has one counter, layers without denominators none, and their number stands beside them."""
    found = samples(service)
    name = "dist_attn_guarded_denominators_total"
    told = {key: count for key, count in found.items() if key[0] == name}
    assert {(dict(labels)["layer"], dict(labels)["head"]): count for (_, labels), count in told.items()} == {
        ("0", "0"): 3, ("0", "1"): 0, ("2", "0"): 1, ("2", "1"): 50,
    }  # fmt: skip
    assert value(found, "dist_attn_attention_denominators_total", model="tiny") == 600


def test_labels_come_from_closed_sets(service: RunningService) -> None:
    """Whatever clients send, no label holds it: routes are the app's, outcomes the errors' codes."""
    for path in ("/v1/models/strange-name", "/x?y", "/v1/completions/strange-name"):
        httpx.get(service.url + path)
    with service.connect() as connection:
        connection.sendall(b"strange-name\r\n\r\n")
        assert Answer(connection).read_head() == 400
    eventually(
        lambda: value(samples(service), "dist_attn_requests_total", route=UNROUTED, outcome="bad_http") == 1,
        "the count",
    )
    found = samples(service)
    assert "strange-name" not in json.dumps([list(key) for key in found])
    outcomes = {dict(labels)["outcome"] for name, labels in found if name == "dist_attn_requests_total"}
    assert outcomes <= OUTCOMES == {"finished", "client_gone", *map(str, Code)}


def test_every_app_has_its_own_counters(tmp_path: Path, service: RunningService) -> None:
    """A second app in the same process begins at nothing."""
    httpx.get(f"{service.url}/livez")
    with running_service(tmp_path) as other:
        assert value(samples(other), "dist_attn_requests_total", route="/livez", outcome="finished") == 0


def test_openmetrics_when_asked_for(service: RunningService) -> None:
    """The Accept header chooses the format."""
    answer = httpx.get(f"{service.url}/metrics", headers={"Accept": "application/openmetrics-text; version=1.0.0"})
    assert answer.headers["content-type"].startswith("application/openmetrics-text")
    assert answer.text.endswith("# EOF\n")


def test_status_tells_what_goes_on(tmp_path: Path) -> None:
    """Ranks with phase, step and age, queue, sessions and speed; also while the engine is not ready."""
    engine = FakeEngine(hold_replies=True)
    with running_service(tmp_path, engine) as service:
        with httpx.stream("POST", f"{service.url}/v1/completions", json={"prompt": "a", "stream": True}):
            status = httpx.get(f"{service.url}/v1/status").json()
        assert (status["ready"], status["model"], status["version"]) == (True, "tiny", __version__)
        assert (status["sessions"], status["queued"], status["open_requests"]) == (1, 0, 1)
        assert (status["epoch"], status["step"], status["backend"]) == (1, 1, "fake")
        rank = status["ranks"][0]
        assert (rank["rank"], rank["phase"], rank["step"]) == (0, "idle", 0)
        assert rank["heartbeat_age_seconds"] >= 0 and status["uptime_seconds"] >= 0
        engine.ready, engine.reason = False, "rank 2 is stuck"
        waiting = httpx.get(f"{service.url}/v1/status")
        assert waiting.status_code == 200
        assert (waiting.json()["ready"], waiting.json()["reason"]) == (False, "rank 2 is stuck")


def test_version(service: RunningService) -> None:
    """The version is the package's."""
    assert httpx.get(f"{service.url}/version").json() == {"version": __version__}


def test_bytes_on_disk_are_told(tmp_path: Path) -> None:
    """While a document waits in its spool, the gauge has its bytes, and afterwards none."""
    engine = FakeEngine()
    with running_service(tmp_path, engine, spool_memory_bytes=1000) as service:
        engine.paused = True
        with service.connect() as connection:
            body = head("/v1/encodings", "Content-Type: text/plain", "Content-Length: 9000000") + b"x" * 3_000_000
            connection.sendall(body)
            eventually(lambda: value(samples(service), "dist_attn_spool_bytes") == 3_000_000, "the spool to fill")
            assert httpx.get(f"{service.url}/v1/status").json()["spool_bytes"] == 3_000_000
        eventually(lambda: value(samples(service), "dist_attn_spool_bytes") == 0, "the spool to be given back")
        service.engine_port.resume()

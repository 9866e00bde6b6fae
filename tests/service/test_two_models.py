"""A writer and an encoder behind one API: which of them a request gets, and what the loss of one means."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from dist_attn_service.app import create_app
from dist_attn_service.base.settings import Settings
from dist_attn_service.jobs.catalogue import JobCatalogue, JobLimits, JobRecord

from dist_attn.errors import ConfigError, ModelFolderError
from dist_attn.settings import EncoderSettings, JobSettings, read_settings
from dist_attn.store.memory import MemoryRecords
from tests.support.fake_engine import HIDDEN, VOCAB, FakeEngine
from tests.support.metrics import samples, value
from tests.support.opening import is_opening, is_session
from tests.support.service_server import RunningService, model_folder, running_service
from tests.support.waiting import eventually

JOBS = JobSettings(look_s=0.05, save_s=0.05)
TEXT = {"content-type": "text/plain"}


def two_models(folder: Path, max_tokens: int = 64) -> dict[str, Any]:
    """The values of a language model `tiny` and a text encoder `vectors`, whose folders are written here."""
    vectors = model_folder(folder / "encoder").rename(folder / "vectors")
    config = {"kind": "text_encoder", "vocab_size": VOCAB, "encoder": {"hidden_size": HIDDEN}, "max_tokens": max_tokens}
    (vectors / "config.json").write_text(json.dumps(config))
    return {
        "model": model_folder(folder),
        "encoder": EncoderSettings(model=str(vectors), api_address="ipc:///nowhere"),
        "jobs": JOBS,
    }


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """Both models, for tests that leave their engines as they found them."""
    folder = tmp_path_factory.mktemp("two")
    with running_service(folder, encoder_engine=FakeEngine(), **two_models(folder)) as running:
        yield running


def opened(service: RunningService) -> dict[str, int]:
    """How often each model's engine was asked for something since the last call."""
    assert service.encoder_port is not None
    counts = {}
    for model, engine in (("tiny", service.engine), ("vectors", service.encoder_port.engine)):
        counts[model] = sum(map(is_opening, engine.received))
        engine.received.clear()
    return {model: count for model, count in counts.items() if count}


def post(service: RunningService, route: str, **body: Any) -> httpx.Response:
    """The answer to a request in JSON."""
    return httpx.post(service.url + route, json=body, timeout=60)


def job(service: RunningService, **body: Any) -> dict[str, Any]:
    """A job, once it has ended."""
    address = service.url + post(service, "/v1/jobs", **body).headers["location"]
    found: dict[str, Any] = {}

    def ended() -> bool:
        found.update(httpx.get(address).json())
        return found["status"] in ("succeeded", "failed")

    eventually(ended, "the job to end")
    return found


@pytest.mark.parametrize(
    ("route", "body", "does"),
    [
        ("/v1/completions", {"prompt": "abc", "max_tokens": 2}, "tiny"),
        ("/v1/encodings", {"input": "abc"}, "vectors"),
        ("/v1/embeddings", {"input": "abc"}, "vectors"),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 2, "model": "tiny"}, "tiny"),
        ("/v1/encodings", {"input": "abc", "model": "tiny"}, "tiny"),
        ("/v1/embeddings", {"input": "abc", "model": "tiny"}, "tiny"),
    ],
)
def test_a_request_gets_the_model_it_names_or_needs(
    service: RunningService, route: str, body: dict[str, Any], does: str
) -> None:
    """Without a name texts are written by the first model and encoded by the other; the answer says which it was."""
    opened(service)
    answer = post(service, route, **body)
    assert answer.status_code == 200
    assert json.loads(answer.text.splitlines()[-1])["model"] == does
    assert opened(service) == {does: 1}


def test_estimates_and_tokens_are_those_of_the_model(service: RunningService) -> None:
    """An estimate is of the encoder unless tokens are to be drawn; texts are cut by the writer or the named model."""
    assert post(service, "/v1/estimate", tokens=9).json()["model"] == "vectors"
    assert post(service, "/v1/estimate", tokens=9, max_tokens=5).json()["model"] == "tiny"
    assert post(service, "/v1/estimate", tokens=9, model="tiny").json()["model"] == "tiny"
    assert post(service, "/tokenize", prompt="a", model="vectors").json()["max_model_len"] == 64
    assert post(service, "/tokenize", prompt="a").json()["max_model_len"] > 64


@pytest.mark.parametrize(
    ("route", "body", "status", "says"),
    [
        ("/v1/completions", {"prompt": "a", "model": "vectors"}, 400, "or name 'tiny', which writes"),
        ("/v1/estimate", {"tokens": 9, "max_tokens": 1, "model": "vectors"}, 400, "or name 'tiny', which writes"),
        ("/v1/sessions", {"model": "vectors"}, 400, "sessions are for 'tiny'"),
        ("/v1/jobs", {"completion": {"prompt": "a"}, "model": "vectors"}, 400, "or name 'tiny', which writes"),
        ("/v1/jobs", {"completion": {"prompt": "a", "model": "vectors"}}, 400, "or name 'tiny', which writes"),
        ("/v1/encodings", {"input": "a", "model": "other"}, 404, "'tiny' or 'vectors' is"),
        ("/v1/completions", {"prompt": "a", "model": "other"}, 404, "'tiny' or 'vectors' is"),
    ],
)
def test_a_model_that_cannot_do_it_is_refused(
    service: RunningService, route: str, body: dict[str, Any], status: int, says: str
) -> None:
    """A named model that does not do this kind of work, and one that is not there, are told with those that are."""
    opened(service)
    error = post(service, route, **body)
    assert (error.status_code, error.json()["error"]["param"]) == (status, "model")
    assert says in error.json()["error"]["message"]
    assert not opened(service)


def test_models_are_listed_with_what_they_do(service: RunningService) -> None:
    """The writer comes first, each with the routes that it answers."""
    cards = httpx.get(f"{service.url}/v1/models").json()["data"]
    assert [(card["id"], card["capabilities"]) for card in cards] == [
        ("tiny", ["completions", "embeddings", "encodings", "search", "rerank"]),
        ("vectors", ["embeddings", "encodings", "search", "rerank"]),
    ]  # fmt: skip
    assert httpx.get(f"{service.url}/v1/models/vectors").json() == cards[1]


def test_one_engine_that_is_lost_takes_nothing_from_the_other(tmp_path: Path) -> None:
    """The service is ready when both engines are; requests of the one that is there are answered meanwhile."""
    encoder = FakeEngine()
    with running_service(tmp_path, encoder_engine=encoder, **two_models(tmp_path), engine_ready_seconds=0.1) as service:
        ready = httpx.get(f"{service.url}/readyz").json()
        assert (ready["model"], ready["encoder"]["model"]) == ("tiny", "vectors")
        encoder.ready, encoder.reason = False, "rank 0 is lost"
        refused = httpx.get(f"{service.url}/readyz")
        assert refused.status_code == 503
        assert refused.json()["detail"] == "the engine of 'vectors' is not ready: rank 0 is lost"
        status = httpx.get(f"{service.url}/v1/status").json()
        assert (status["ready"], status["reason"]) == (False, "vectors: rank 0 is lost")
        assert (status["encoder"]["ready"], status["encoder"]["reason"]) == (False, "rank 0 is lost")
        found = samples(service)
        assert value(found, "dist_attn_engine_ready", model="tiny") == 1
        assert value(found, "dist_attn_engine_ready", model="vectors") == 0
        for model in ("tiny", "vectors"):
            assert ("dist_attn_rank_peak_rss_bytes", (("model", model), ("rank", "0"))) in found
        assert post(service, "/v1/completions", prompt="a", max_tokens=1).status_code == 200
        assert post(service, "/v1/encodings", input="a", model="tiny").status_code == 200
        waited = post(service, "/v1/encodings", input="a")
        assert waited.status_code == 503 and "the engine of 'vectors' is not ready after" in waited.json()["detail"]


def test_jobs_keep_to_their_model(tmp_path: Path) -> None:
    """A job is done by the model that it was handed in for; its rows are there when that is not served any more."""
    models = two_models(tmp_path)
    with running_service(tmp_path, encoder_engine=FakeEngine(), **models) as service:
        made = {name: job(service, input="abc" * 30, **named) for name, named in
                (("vectors", {}), ("tiny", {"model": "tiny"}))}  # fmt: skip
        assert {name: (one["model"], one["status"]) for name, one in made.items()} == {
            name: (name, "succeeded") for name in made
        }
        assert service.encoder_port is not None
        # an engine whose model writes nothing refuses to keep states
        assert not any(map(is_session, service.encoder_port.engine.received))
        assert opened(service) == {"tiny": 1, "vectors": 1}
        assert job(service, completion={"prompt": "a", "max_tokens": 2})["model"] == "tiny"
        rows = httpx.get(f"{service.url}/v1/jobs/{made['vectors']['id']}/result").text
    del models["encoder"]
    with running_service(tmp_path, **models) as service:
        assert httpx.get(f"{service.url}/v1/jobs/{made['vectors']['id']}/result").text == rows


def test_jobs_of_one_model_do_not_wait_for_the_engine_of_the_other(tmp_path: Path) -> None:
    """Those of an engine that is away take none of the others' places."""
    models, encoder = two_models(tmp_path), FakeEngine(ready=False)
    models["jobs"] = JobSettings(look_s=0.05, save_s=0.05, at_once=1)
    with running_service(
        tmp_path, FakeEngine(keep=False), encoder_engine=encoder, **models, engine_ready_seconds=900
    ) as service:
        waiting = [post(service, "/v1/jobs", input="abc" * 30).json()["id"] for _ in range(3)]
        assert job(service, input="abc" * 30, model="tiny")["status"] == "succeeded"
        statuses = [httpx.get(f"{service.url}/v1/jobs/{name}").json()["status"] for name in waiting]
        assert "succeeded" not in statuses and statuses.count("queued") >= 2
        encoder.ready = True
        for name in waiting:
            eventually(
                lambda name=name: httpx.get(f"{service.url}/v1/jobs/{name}").json()["status"] == "succeeded", "the rest"
            )


def test_only_jobs_of_the_same_model_are_before_a_job() -> None:
    """The tokens of the other model's jobs are read by another engine."""

    async def ahead() -> float:
        catalogue = JobCatalogue(MemoryRecords(), JobLimits(1 << 30, 10, 15.0))
        now, names, record = catalogue.clock(), [], None
        for number, model in enumerate(("a@1", "b@2", "a@1", "b@2")):
            record = JobRecord(
                caller="", kind="encoding", model=model, created_at=now + number, expires_at=now + 1000,
                state="queued", expected_tokens=10.0**number,
            )  # fmt: skip
            names.append(await catalogue.add(record))
        assert record is not None
        return await catalogue.ahead(names[-1], record)

    assert asyncio.run(ahead()) == 10.0


def test_models_need_names_and_addresses_of_their_own(tmp_path: Path) -> None:
    """Two models under one name or with one identity, and an encoder without the address of its controller, are refused
    at the start.
    """
    models = two_models(tmp_path)
    models["encoder"] = models["encoder"].model_copy(update={"served_model_name": ("tiny",)})

    async def start() -> None:
        app = create_app(Settings(api_address="ipc:///x", data_dir=tmp_path / "data", **models))
        async with app.router.lifespan_context(app):
            raise AssertionError("it started")

    with pytest.raises(ModelFolderError, match="both models answer to 'tiny'"):
        asyncio.run(start())
    twin = model_folder(tmp_path / "other")
    models["encoder"] = models["encoder"].model_copy(update={"model": str(twin), "served_model_name": ("vectors",)})
    with pytest.raises(ModelFolderError, match="could not tell apart; rename one of the folders"):
        asyncio.run(start())
    flags = {"model": "m", "encoder.model": "e", "engine.api_address": "ipc:///a"}
    with pytest.raises(ConfigError, match="give --encoder-address"):
        Settings.of(read_settings(None, environment={}, flags=flags).settings)
    alone = {**flags, "encoder.model": ""}
    settings = Settings.of(read_settings(None, environment={"DIST_ATTN_ENCODER__MODEL": "e"}, flags=alone).settings)
    assert settings.of_models() == (settings,)

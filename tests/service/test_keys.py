"""Bearer keys: nothing answers without one once keys are set, and what a key opens."""

import hashlib
import json
import re
import socket
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import httpx
import openai
import pytest
from dist_attn_service.app import create_app
from dist_attn_service.base.logs import RequestRecord, make_log
from dist_attn_service.base.settings import Settings
from dist_attn_service.http.auth import ADMIN_ROUTES, OPEN_ROUTES, KeyRing
from dist_attn_service.http.pages import PAGE_FILES
from starlette.routing import Route

from dist_attn.errors import ConfigError
from tests.support.raw_http import Answer, head
from tests.support.service_server import RunningService, model_folder, running_service

USER, ADMIN, OTHER = "user-key-1", "admin-key-1", "user-key-2"


def digest(key: str) -> str:
    """What stands in the settings for a key."""
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(key: str) -> dict[str, str]:
    """The header that a key is sent in."""
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service with user keys, by hash and by file, and an admin key."""
    folder = tmp_path_factory.mktemp("service")
    (folder / "keys").write_text(f"# people\n\n{OTHER}\n")
    keys = {"api_keys": (digest(USER),), "api_keys_file": folder / "keys", "admin_keys": (digest(ADMIN),)}
    with running_service(folder, **keys) as running:
        yield running


def routes(folder: Path) -> list[tuple[str, str]]:
    """Method and path of every route of the app, /docs and /openapi.json included."""
    settings = Settings(api_address="ipc:///x", model=model_folder(folder), data_dir=folder)
    app = create_app(settings)
    found, pending = [], list(app.routes)
    while pending:  # the app keeps an included router as one route
        route = pending.pop()
        pending += getattr(getattr(route, "original_router", None), "routes", [])
        if isinstance(route, Route) or hasattr(route, "methods"):
            path = re.sub(r"{[^}]*}", "tiny", route.path)
            found += [(method, path) for method in route.methods or ()]
    documented = {re.sub(r"{[^}]*}", "tiny", path) for path in app.openapi()["paths"]}
    assert documented < {path for _, path in found}
    return found


def test_no_route_answers_without_a_key(service: RunningService, tmp_path: Path) -> None:
    """Every route of the app is 401 with a challenge, in the error shape, but for health checks and the page."""
    every = [*routes(tmp_path), *(("GET", path) for path in PAGE_FILES)]
    paths = {path for _, path in every}
    assert {"/docs", "/openapi.json", "/metrics", "/v1/status", "/v1/models/tiny", "/tokenize", *OPEN_ROUTES} <= paths
    for method, path in every:
        answer = httpx.request(method, service.url + path)
        if path in OPEN_ROUTES:
            assert answer.status_code == 200, path
            continue
        assert answer.status_code == 401, (method, path)
        assert answer.headers["www-authenticate"].startswith("Bearer")
        assert answer.headers["content-type"] == "application/problem+json" and answer.headers["x-request-id"]
        if method != "HEAD":
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{service.url}/nothing").status_code == 401


@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer ", f"Basic {USER}", USER, f"Bearer {USER}x", f"Bearer {USER} {USER}", "Bearer é"]
)
def test_what_is_no_key_opens_nothing(service: RunningService, header: str) -> None:
    """Another scheme, another key, two keys or none are all refused."""
    with service.connect() as connection:
        connection.sendall(head("/v1/models", f"Authorization: {header}", method="GET"))
        answer = Answer(connection)
        assert answer.read_head() == 401
        answer.read_body()


@pytest.mark.parametrize("path", ["//livez", "/livez/", "/livez/../v1/models", "/livez%2f..%2fv1/models", "/LIVEZ"])
def test_no_spelling_of_a_path_slips_through(service: RunningService, path: str) -> None:
    """Only the open paths themselves are open, whatever else looks like them."""
    with service.connect() as connection:
        connection.sendall(head(path, method="GET"))
        answer = Answer(connection)
        assert answer.read_head() == 401
        answer.read_body()


def test_keys_open_their_routes(service: RunningService) -> None:
    """A user's key opens what users need, an admin's everything, and the metrics are the admin's alone."""
    for key in (USER, OTHER, ADMIN):
        assert httpx.get(f"{service.url}/v1/models", headers=bearer(key)).status_code == 200
        assert httpx.get(f"{service.url}/v1/models", headers={"Authorization": f"bearer  {key}"}).status_code == 200
        body = {"prompt": "a", "max_tokens": 2}
        assert httpx.post(f"{service.url}/v1/completions", json=body, headers=bearer(key)).status_code == 200
    for path in ADMIN_ROUTES:
        assert httpx.get(service.url + path, headers=bearer(ADMIN)).status_code == 200
        refused = httpx.get(service.url + path, headers=bearer(USER))
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_key_needed"


def test_a_key_may_come_as_x_api_key(service: RunningService) -> None:
    """`X-API-Key` opens what the same bearer key opens; where both are sent, `Authorization` alone counts."""
    models = f"{service.url}/v1/models"
    assert httpx.get(models, headers={"X-API-Key": USER, "x-request-id": "other-header"}).status_code == 200
    assert service.logged("other-header")["key"] == digest(USER)[:8]
    assert USER not in service.log.getvalue()
    assert httpx.get(f"{service.url}/metrics", headers={"X-API-Key": USER}).status_code == 403
    for headers in ({"X-API-Key": "wrong"}, {"X-API-Key": ""}, {"X-API-Key": USER, **bearer("wrong")}):
        assert httpx.get(models, headers=headers).status_code == 401


def test_the_log_says_which_key(service: RunningService) -> None:
    """The line has the first digits of the key's hash, and the key itself is nowhere in the log."""
    httpx.get(f"{service.url}/v1/models", headers={**bearer(USER), "x-request-id": "who"})
    httpx.get(f"{service.url}/v1/models", headers={**bearer("wrong-key"), "x-request-id": "nobody"})
    assert service.logged("who")["key"] == digest(USER)[:8]
    assert service.logged("nobody")["reason"] == "invalid_api_key" and "key" not in service.logged("nobody")
    assert USER not in service.log.getvalue() and "wrong-key" not in service.log.getvalue()


def test_a_request_knows_its_caller() -> None:
    """Requests with one key have one caller, those with different keys different ones; without keys there is one."""
    ring = KeyRing(frozenset({hashlib.sha256(USER.encode()).digest(), hashlib.sha256(OTHER.encode()).digest()}))

    def caller(ring: KeyRing, key: str) -> str:
        record = RequestRecord("r", "GET", "/v1/models", make_log(StringIO()))
        headers = [(name.lower().encode(), value.encode()) for name, value in bearer(key).items()]
        scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": headers, "state": {"record": record}}
        assert ring.refusal(scope) is None
        return record.caller

    assert [caller(ring, key) for key in (USER, USER, OTHER)] == [digest(USER), digest(USER), digest(OTHER)]
    assert caller(KeyRing(), USER) == ""


def test_the_official_client_sends_its_key(service: RunningService) -> None:
    """With the right key it works, with another one it raises its own error."""
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key=USER, max_retries=0) as client:
        assert client.models.list().data[0].id == "tiny"
    with (
        openai.OpenAI(base_url=f"{service.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="not one of this service"),
    ):
        client.models.list()


def test_any_key_opens_everything_while_there_is_no_admin_key(tmp_path: Path) -> None:
    """Without admin keys the metrics ask for a user's key, and without users' keys everything for an admin's."""
    with running_service(tmp_path, api_keys=(digest(USER),)) as service:
        assert httpx.get(f"{service.url}/metrics").status_code == 401
        assert httpx.get(f"{service.url}/metrics", headers=bearer(USER)).status_code == 200
    with running_service(tmp_path, admin_keys=(digest(ADMIN),)) as service:
        assert httpx.get(f"{service.url}/v1/models").status_code == 401
        assert httpx.get(f"{service.url}/v1/models", headers=bearer(ADMIN)).status_code == 200


def test_a_file_without_keys_does_not_open_the_service(tmp_path: Path) -> None:
    """A file that is missing, empty, not ASCII, or with a key that no header carries, is refused before anything
    listens, and without showing the key.
    """
    model = model_folder(tmp_path)
    (tmp_path / "empty").write_text("# none yet\n")
    (tmp_path / "umlaut").write_text("schlüssel\n")
    (tmp_path / "phrase").write_text("# ours\nfirst-key\na pass phrase\n")
    (tmp_path / "long").write_text("k" * 513 + "\n")
    cases = {"none": "No such file", "empty": "holds no key", "umlaut": "ASCII", "phrase": "key 2", "long": "key 1"}
    for name, word in cases.items():
        settings = Settings(api_address="ipc:///x", model=model, api_keys_file=tmp_path / name)
        with pytest.raises(ConfigError, match=word) as refused:
            KeyRing.read(settings)
        assert "pass phrase" not in str(refused.value)


def asked(service: RunningService, *headers: str, method: str = "POST", path: str = "/tokenize") -> tuple[int, str]:
    """Status and error code of a request with just these headers."""
    with service.connect() as connection:
        body = b'{"prompt": "a"}' if method == "POST" else b""
        lines = (f"{method} {path} HTTP/1.1", *headers, f"Content-Length: {len(body)}", "Connection: close", "", "")
        connection.sendall("\r\n".join(lines).encode() + body)
        answer = Answer(connection)
        status = answer.read_head()
        found = answer.read_body() if "content-length" in answer.headers else b"{}"
        return status, json.loads(found)["error"]["code"] if status >= 400 else ""


@pytest.fixture(scope="module")
def keyless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service without keys that has a name of its own."""
    with running_service(tmp_path_factory.mktemp("keyless"), allowed_hosts=("API.example",)) as running:
        yield running


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LocalHost:8000",
        "127.0.0.1",
        "192.168.1.7:80",
        "[::1]:8000",
        "api.example:1",
        "api.example.",
        "api:8000",
    ],
)
def test_without_keys_known_names_and_addresses_are_answered(keyless: RunningService, host: str) -> None:
    """Nobody can make an address, or a name without a dot, point elsewhere; the operator knows the rest."""
    assert asked(keyless, f"Host: {host}")[0] == 200
    assert asked(keyless, f"Host: {socket.gethostname()}")[0] == 200


@pytest.mark.parametrize(
    "host",
    ["rebound.evil.example", "localhost.evil.example", "127.0.0.1.evil.example:80", "x@localhost", "[::1", "a b"],
)
def test_without_keys_other_names_are_not_answered(keyless: RunningService, service: RunningService, host: str) -> None:
    """A page whose own name points here by now (DNS rebinding) reads and does nothing; health checks are for all."""
    for method, path in (("POST", "/v1/sessions"), ("GET", "/v1/jobs"), ("POST", "/v1/completions")):
        assert asked(keyless, f"Host: {host}", method=method, path=path) == (421, "host_not_allowed")
    assert asked(keyless, f"Host: {host}", method="GET", path="/livez")[0] == 200
    assert asked(service, f"Host: {host}", f"Authorization: Bearer {USER}")[0] == 200  # no page has the key


@pytest.mark.parametrize(
    "headers",
    [
        ("Sec-Fetch-Site: cross-site", "Origin: https://evil.example"),
        ("Sec-Fetch-Site: same-site", "Origin: http://localhost:3000"),
        ("Origin: https://evil.example",),
        ("Origin: null",),
        ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate"),
    ],
)
def test_without_keys_pages_of_other_sites_are_refused(keyless: RunningService, headers: tuple[str, ...]) -> None:
    """A form or a script of theirs does nothing here, though the browser can reach the service and would send it."""
    assert asked(keyless, "Host: localhost:8000", *headers) == (403, "origin_not_allowed")


def test_without_keys_the_own_page_links_and_programs_are_answered(keyless: RunningService) -> None:
    """The page of the service may do everything, a link to it may be followed, and programs send no such headers."""
    host = "Host: localhost:8000"
    assert asked(keyless, host)[0] == 200
    assert asked(keyless, host, "Origin: http://localhost:8000")[0] == 200
    assert asked(keyless, host, "Sec-Fetch-Site: same-origin", "Origin: http://localhost:8000")[0] == 200
    link = ("Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate")
    assert asked(keyless, host, *link, method="GET", path="/v1/models")[0] == 200
    assert asked(keyless, host, "Sec-Fetch-Site: cross-site", method="GET", path="/v1/models")[0] == 403


def test_only_admin_keys_are_served_before_others(service: RunningService, tmp_path: Path) -> None:
    """`high` is refused to other keys on every route, jobs too, while there is an admin key; else any key may ask."""
    body = {"prompt": "a", "max_tokens": 2}
    tries = (
        ("/v1/completions", body, {"x-request-priority": "high"}),
        ("/v1/completions", {**body, "priority": "high"}, {}),
        ("/v1/embeddings", {"input": "a"}, {"x-request-priority": "HIGH"}),
        ("/v1/jobs", {"completion": {**body, "priority": "high"}}, {}),
    )
    for path, wanted, headers in tries:
        refused = httpx.post(service.url + path, json=wanted, headers={**bearer(USER), **headers})
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_key_needed"
        assert httpx.post(service.url + path, json=wanted, headers={**bearer(ADMIN), **headers}).status_code < 300
    low = httpx.post(f"{service.url}/v1/completions", json={**body, "priority": "low"}, headers=bearer(USER))
    assert low.status_code == 200
    with running_service(tmp_path, api_keys=(digest(USER),)) as other:
        high = httpx.post(f"{other.url}/v1/completions", json={**body, "priority": "high"}, headers=bearer(USER))
        assert high.status_code == 200

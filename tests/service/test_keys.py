"""Bearer keys: nothing answers without one once keys are set, and what a key opens."""

import hashlib
import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import httpx
import openai
import pytest
from starlette.routing import Route

from dist_attn.errors import ConfigError
from service.app import create_app
from service.auth import ADMIN_ROUTES, OPEN_ROUTES, KeyRing
from service.logs import RequestRecord, make_log
from service.page_files import PAGE_FILES
from service.settings import Settings
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
        scope = {"type": "http", "path": "/v1/models", "headers": headers, "state": {"record": record}}
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

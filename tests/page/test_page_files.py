"""The files of the page: open to everybody, whole, and with nothing from elsewhere."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import dist_attn_service
import httpx
import pytest
from dist_attn_service.http.pages import PAGE_FILES

from tests.service.test_keys import USER, digest
from tests.support.service_server import RunningService, running_service

FOLDER = Path(dist_attn_service.__file__).parent / "page"
MARKUP = re.compile(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|style=")
REFERENCE = re.compile(r"""(?:from|import|src=|href=|SCRIPT =)\s*"([^"#]+)\"""")
# The names of SVG and of nothing else.
ALLOWED = {"http://www.w3.org/2000/svg"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service that asks for a key."""
    with running_service(tmp_path_factory.mktemp("service"), api_keys=(digest(USER),)) as running:
        yield running


def test_every_file_is_served_without_a_key_under_a_strict_policy(running: RunningService) -> None:
    """Each file answers 200 with its media type, `HEAD` the same without the file, and the browser is told to load
    nothing from elsewhere.
    """
    assert set(PAGE_FILES) >= {"/", "/page/app.js", "/page/style/base.css", "/page/vectors/worker.js"}
    with httpx.Client(base_url=running.url) as client:
        for path, file in PAGE_FILES.items():
            answer = client.get(path)
            assert (answer.status_code, answer.content) == (200, file.data), path
            asked = client.head(path)
            assert (asked.status_code, asked.content, asked.headers["etag"]) == (200, b"", file.etag), path
            assert answer.headers["content-type"] == file.media_type
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"


def test_what_is_the_same_is_not_sent_again(running: RunningService) -> None:
    """The entity tag of a file is answered with 304 and no body; another one with the file."""
    tag = httpx.get(running.url).headers["etag"]
    assert httpx.get(running.url, headers={"if-none-match": f'"old", W/{tag}'}).status_code == 304
    assert httpx.get(running.url, headers={"if-none-match": '"old"'}).status_code == 200


@pytest.mark.parametrize(
    "path", ["/page/", "/page/index.html", "/page/../auth.py", "/page/%2e%2e/auth.py", "/page/app.js/"]
)
def test_no_other_address_is_open(running: RunningService, path: str) -> None:
    """An address that is no file of the page asks for a key, and with one there is nothing there."""
    assert httpx.get(running.url + path).status_code == 401
    assert httpx.get(running.url + path, headers={"authorization": f"Bearer {USER}"}).status_code == 404


def test_everything_that_a_file_names_is_there() -> None:
    """Each import, style, script and picture that the files name is one of the files, and each file is named."""
    named = {"/"}
    for path, file in PAGE_FILES.items():
        for target in REFERENCE.findall(file.data.decode()):
            if target in ("/", "/docs"):
                continue
            base = PurePosixPath("/page/index.html" if path == "/" else path).parent
            parts: list[str] = []
            for part in (base / target).parts:
                parts = parts[:-1] if part == ".." else [*parts, part]
            named.add("/" + "/".join(parts[1:]))
    assert named == set(PAGE_FILES)


def test_nothing_comes_from_elsewhere_and_nothing_is_a_heap() -> None:
    """No address of another host, no markup made of text, no code over 300 lines, and words about each module."""
    for path, file in PAGE_FILES.items():
        text = file.data.decode()
        assert set(re.findall(r"https?://[\w./-]+", text)) <= ALLOWED, path
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|style=", text
        )
        assert text.count("\n") <= 300 or path.endswith(".txt"), path
        assert len(file.data) <= 150_000, path
        assert not path.endswith(".js") or text.startswith("/**"), path


def test_the_wheel_carries_the_page() -> None:
    """Every file in the folder is served, and the packaging's pattern takes it."""
    there = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()}
    assert {path.removeprefix("/page/") for path in PAGE_FILES if path != "/"} | {"index.html"} == there
    assert 'dist_attn_service = ["page/**"' in (FOLDER.parents[2] / "pyproject.toml").read_text()

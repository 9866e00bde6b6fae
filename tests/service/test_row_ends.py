"""Rows of /v1/encodings that end where the text or its sender says."""

import asyncio
import io
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import numpy as np
import pytest
from dist_attn_service.encodings.encoding_run import LOOKED_AT_BYTES, pieces_of
from dist_attn_service.text.tokenising import TextMark, ThreadTokeniser

from dist_attn.text import ByteTokeniser
from dist_attn.text.cuts import CutFinder
from dist_attn.wire.messages import RowSpec
from tests.service.test_encodings import ROUTE, encode
from tests.support.fake_engine import row_vector
from tests.support.raw_http import lines_of
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually

STORY = ("One night. Mr. Dee left.\n\nTwo “nights.” Gone!\n\nCHAPTER I\nThree é" + " and more" * 50 + "\n") * 40


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service for all of these."""
    with running_service(tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.mark.parametrize("form", ["ndjson", "npy", "arrow"])
@pytest.mark.parametrize("granularity", ["sentence", "paragraph", "chapter"])
def test_rows_of_sentences_paragraphs_and_chapters(service: RunningService, granularity: str, form: str) -> None:
    """Every row is the mean of its range, in any format and with the same edges as the body of a JSON request."""
    data = STORY.encode()
    lines = encode(service, data, f"granularity={granularity}")
    edges = [0, *(line["byte_stop"] for line in lines[:-1])]
    assert [(line["byte_start"], line["byte_stop"]) for line in lines[:-1]] == list(pairwise(edges))
    assert edges[-1] == len(data) and len(lines) - 1 == {"sentence": 161, "paragraph": 81, "chapter": 41}[granularity]
    tokens = np.frombuffer(data, np.uint8).astype(np.int32)
    wanted = np.array([row_vector(tokens[a:b], "mean") for a, b in pairwise(edges)])
    np.testing.assert_array_equal(np.array([line["embedding"] for line in lines[:-1]], np.float32), wanted)
    asked = {"input": STORY, "granularity": granularity, "format": form}
    answer = httpx.post(f"{service.url}{ROUTE}", json=asked, timeout=60)
    assert answer.status_code == 200, answer.text
    if form == "npy":
        np.testing.assert_array_equal(np.load(io.BytesIO(answer.content)), wanted)
    elif form == "arrow":
        assert (
            pytest.importorskip("pyarrow.ipc", reason="pip install -e '.[arrow]'")
            .open_stream(answer.content)
            .read_all()["byte_stop"]
            .to_pylist()
            == edges[1:]
        )


def test_rows_between_given_boundaries(service: RunningService) -> None:
    """Byte offsets in JSON; those that do not rise, lie outside or stand beside another choice are refused."""

    def ask(**more: Any) -> httpx.Response:
        return httpx.post(f"{service.url}{ROUTE}", json={"input": "abcdéf", **more}, timeout=60)

    lines = lines_of(ask(boundaries=[1, 5]).content)
    assert [(line["byte_start"], line["byte_stop"]) for line in lines[:-1]] == [(0, 1), (1, 5), (5, 7)]
    assert [line["index"] for line in lines_of(ask(boundaries=[1, 5], from_row=2).content)[:-1]] == [2]
    assert len(lines_of(ask(boundaries=[7]).content)) == 2
    for more in ({"boundaries": [5, 1]}, {"boundaries": [8]}, {"boundaries": [1], "granularity": "sentence"}):
        for answer in (ask(**more), httpx.post(f"{service.url}/v1/jobs", json={"input": "abcdéf", **more})):
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "boundaries", answer.text


def test_a_block_is_looked_at_a_little_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends are looked for between other requests' turns, however long the block that has come."""
    sizes: list[int] = []
    push = CutFinder.push

    def watched(finder: CutFinder, data: bytes, *, final: bool = False) -> None:
        sizes.append(len(data))
        push(finder, data, final=final)

    async def block() -> AsyncIterator[bytes]:
        yield b"A sentence. " * 5000

    async def rows() -> int:
        with ThreadPoolExecutor(1) as threads:
            tokeniser = ThreadTokeniser(ByteTokeniser(), threads)
            pieces = pieces_of(tokeniser, RowSpec(granularity="sentence"), block(), TextMark())
            return sum([int((piece.tokens < 0).sum()) async for piece in pieces])

    monkeypatch.setattr(CutFinder, "push", watched)
    assert asyncio.run(rows()) == 4999
    assert sum(sizes) == 60_000 and max(sizes) <= LOOKED_AT_BYTES


def test_a_job_keeps_boundaries(service: RunningService) -> None:
    """An encoding with boundaries becomes a job as any other; one that lost them has lost its input."""
    asked = {"input": STORY, "boundaries": [700, 701, 2000]}
    wanted = lines_of(httpx.post(f"{service.url}{ROUTE}", json=asked, timeout=60).content)
    for route, headers in (("/v1/jobs", {}), (ROUTE, {"prefer": "respond-async"})):
        made = httpx.post(f"{service.url}{route}", json=asked, headers=headers).json()
        address = f"{service.url}/v1/jobs/{made['id']}"
        eventually(lambda address=address: httpx.get(address).json()["status"] == "succeeded", "the job to end")
        assert lines_of(httpx.get(f"{address}/result").content) == wanted
    service.engine.ready = False
    made = httpx.post(f"{service.url}/v1/jobs", json=asked).json()
    next(service.settings.data_dir.glob(f"jobs/files/*/{made['id']}/boundaries")).unlink()
    service.engine.ready = True
    address = f"{service.url}/v1/jobs/{made['id']}"
    eventually(lambda: httpx.get(address).json()["status"] == "failed", "the job to fail")
    assert httpx.get(address).json()["error"]["code"] == "input_lost"

"""The measurement of estimates, in small."""

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from dist_attn.text import train_bpe
from dist_attn_research.service.eta import compare, read
from tests.support.fake_engine import FakeEngine
from tests.support.service_server import model_folder, running_service

PROSE = "The whale went down, and the ship went on towards the south, as she had done all day. " * 60


def test_the_benchmark_compares_estimate_and_truth(tmp_path: Path) -> None:
    """Its small form: both figures of one document."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(PROSE)
    model = model_folder(tmp_path, train_bpe([corpus], 290))
    with running_service(tmp_path, FakeEngine(keep=False), model=model) as service:

        async def once() -> Any:
            async with httpx.AsyncClient(base_url=service.url, timeout=20) as http:
                await read(http, PROSE.encode() * 20)  # by which the service measures its speed
                return await compare(http, PROSE.encode() * 20)

        found = asyncio.run(once())
    assert found.tokens == pytest.approx(found.estimated_tokens, rel=0.05) and found.ratio > 0
    assert found.as_json()["within_goal"] in (True, False)

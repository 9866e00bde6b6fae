"""The measurements of the service, in small: each counts what it is to count, and sees what goes wrong."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from dist_attn.text import train_bpe
from dist_attn_papers.service import disconnects, eta, load, sessions, stops, streaming
from tests.support import fake_rank
from tests.support.engines import running_engine
from tests.support.fake_engine import FakeEngine
from tests.support.models import write_small_folder
from tests.support.served import ROOT
from tests.support.service_server import model_folder, running_service
from tests.support.streams import Stream
from tests.support.whole_service import ServiceProcess

PROSE = "The whale went down, and the ship went on towards the south, as she had done all day. " * 60
GRID = 1024


def test_work_ends_in_every_phase(tmp_path):
    """One client per phase leaves, and what it had open is gone from the engine."""
    with running_service(tmp_path, FakeEngine(hold_replies=True)) as service:
        seen = asyncio.run(disconnects.observe(service.url, 1, longest_s=0.1))
        assert service.engine.open_count == 0
    assert [left.phase for left in seen] == list(disconnects.PHASES)
    assert all(left.seconds >= 0 for left in seen)


def test_the_benchmark_compares_estimate_and_truth(tmp_path: Path) -> None:
    """Its small form: both figures of one document."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(PROSE)
    model = model_folder(tmp_path, train_bpe([corpus], 290))
    with running_service(tmp_path, FakeEngine(keep=False), model=model) as service:

        async def once() -> Any:
            async with httpx.AsyncClient(base_url=service.url, timeout=20) as http:
                await eta.read(http, PROSE.encode() * 20)  # by which the service measures its speed
                return await eta.compare(http, PROSE.encode() * 20)

        found = asyncio.run(once())
    assert found.tokens == pytest.approx(found.estimated_tokens, rel=0.05) and found.ratio > 0
    assert found.as_json()["within_goal"] in (True, False)


@pytest.mark.slow
def test_the_promises_in_small(tmp_path: Path) -> None:
    """New processes restore the bits without reading a token again; forks stay apart; retried appends are fed once."""
    model = write_small_folder(tmp_path / "tiny")
    options = "--tokens 12000 --bytes-per-token 1 --draws 8 --forks 5 --fork-ms 1e9 --kills 1 --pause-ms 150"
    sizes = f"--retry-bytes {GRID * 96} --checkpoint-tokens {GRID}"
    assert sessions.main([f"--model={model}", *options.split(), *sizes.split(), f"--json={tmp_path}/out"]) == 0
    result = json.loads((tmp_path / "out").read_text())
    assert result["append"]["tokens"] == result["restore"]["tokens"] == 12_000
    assert (result["restore"]["recomputed_tokens"], result["restore"]["reason"]) == (0, "")
    assert result["retries"]["equal"] == 1 and result["retries"]["different"] == 0


@pytest.mark.slow
def test_a_stopped_rank_is_noticed_and_named_while_streams_go_on(tmp_path, monkeypatch):
    """/readyz names the rank, and the streams go on when it is replaced and have the bits of a run in peace."""
    # With deadlines shorter than those of `serve`, whose promise `dist-attn bench service-stops` measures.
    # Real ranks take seconds to load; fake ones could be back between two looks at them.
    monkeypatch.setenv("FAKE_RANK_STARTS_S", "2")
    # Texts that do not change: none of the tokens of the streams is one that makes a fake rank fail.
    model = model_folder(
        tmp_path, train_bpe(sorted((ROOT / "docs/decisions/archive").glob("000*.md")), fake_rank.VOCAB)
    )
    sizes = {"vocab_size": fake_rank.VOCAB, "hidden_size": fake_rank.DIM, "kind": "language_model"}
    (model / "config.json").write_text(json.dumps(sizes))
    streams = [Stream(f"text {number}", "It was a dark night. " * (20_000 + number)) for number in range(2)]
    fields = {"ranks": 2, "losses_to_fail": 9, "save_tokens": 4096, "heartbeat_deadline_s": 1.5}
    with running_engine(**fields) as (handle, _, _):
        behind = {"ranks": 2, "model": str(model), "api_address": handle.api_address}
        with ServiceProcess(tmp_path, **behind) as service:
            found = asyncio.run(stops.observe(service.url, streams, stops=1))
    (stop,) = found.stops
    assert stop.during == "reading" and stop.open_streams == 2 and stop.named
    assert 1.0 < stop.noticed_s <= stop.ready_s
    assert (found.equal, found.different, found.errors, found.false_alarms) == (2, [], [], 0)
    assert found.as_json()["named"] == 1


def test_both_clients_are_watched():
    """Every token of both documents reaches the engine, and memory and waits are measured all the while."""
    found = streaming.measure(1)
    reads, never = found.rows
    assert (reads.client, never.client) == ("reads", "never reads")
    assert reads.tokens == never.tokens > 100_000
    for row in found.rows:
        assert row.before_bytes > 1 << 20
        assert 0 < row.livez_p50_ms <= row.livez_p99_ms <= row.livez_max_ms
        assert row.grew_bytes >= 0
    assert json.loads(found.as_json())["megabytes"] == 1
    assert "| never reads |" in found.as_markdown()


def test_every_client_gets_its_tokens(tmp_path):
    """Several clients at once finish without an error, and all tokens drawn are counted."""
    with running_service(tmp_path, FakeEngine()) as service:
        together, seen = asyncio.run(load.run_clients(service.url, 4, 0.2, 8))
    assert together.errors == 0
    assert together.requests >= 4
    assert sum(client.tokens for client in seen) == 8 * together.requests
    assert together.tokens_least <= together.tokens_most


def test_failures_are_counted_and_end_the_program_with_1(capsys):
    """Nobody listens: each client gives up after three errors, and the exit code tells."""
    assert load.main(["http://127.0.0.1:9", "--clients", "2", "--seconds", "5"]) == 1
    one, many, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert (one["errors"], many["errors"]) == (3, 6)

"""The load program: it counts what clients get, and says what goes wrong."""

import asyncio
import json

from dist_attn_research.service.load import main, run_clients
from tests.support.fake_engine import FakeEngine
from tests.support.service_server import running_service


def test_every_client_gets_its_tokens(tmp_path):
    """Several clients at once finish without an error, and all tokens drawn are counted."""
    with running_service(tmp_path, FakeEngine()) as service:
        load, seen = asyncio.run(run_clients(service.url, 4, 0.2, 8))
    assert load.errors == 0
    assert load.requests >= 4
    assert sum(client.tokens for client in seen) == 8 * load.requests
    assert load.tokens_least <= load.tokens_most


def test_failures_are_counted_and_end_the_program_with_1(capsys):
    """Nobody listens: each client gives up after three errors, and the exit code tells."""
    assert main(["http://127.0.0.1:9", "--clients", "2", "--seconds", "5"]) == 1
    one, many, _ = map(json.loads, capsys.readouterr().out.splitlines())
    assert (one["errors"], many["errors"]) == (3, 6)

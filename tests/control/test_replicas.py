"""Several API processes on one controller: each has its own requests, and dies alone."""

import os
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dist_attn.wire.messages import RowSpec
from tests.support import fake_rank
from tests.support.controller_client import ControllerClient
from tests.support.engines import running_engine

pytestmark = pytest.mark.slow

BLOCK = 512
REPLICA = """
import sys
from itertools import pairwise
import numpy as np
from dist_attn.wire.messages import RowSpec
from tests.support.controller_client import ControllerClient
from tests.support.fake_rank import SLOW
with ControllerClient(sys.argv[1]) as client:
    for name in ("a", "b"):
        client.open_encoding(name, RowSpec("window", 512))
    for name in ("a", "b"):
        client.feed(name, np.full(4096, SLOW), final=False)
    client.wait_until(lambda: client.requests["b"].starts)
    print("open", flush=True)
    while True:
        client.pump(1.0)
"""


@pytest.fixture(scope="module")
def engine():
    """Two ranks whose every block of slow tokens takes 20 ms."""
    with running_engine(ranks=2, block_tokens=BLOCK) as (handle, _, _):
        yield handle


def test_a_killed_replica_takes_only_its_own_requests_along(engine):
    """kill -9 of one API process: its requests end on the engine, another one's under the same names do not notice."""
    root = Path(__file__).parents[2]
    tokens = np.arange(40_000) % 900
    with ControllerClient(engine.api_address) as client:
        client.open_encoding("a", RowSpec("window", BLOCK))
        client.feed("a", tokens[:20_000], final=False)
        with subprocess.Popen(
            [sys.executable, "-c", REPLICA, engine.api_address], cwd=root, stdout=subprocess.PIPE, text=True
        ) as other:
            assert other.stdout.readline() == "open\n"
            both = client.status()
            os.kill(other.pid, signal.SIGKILL)
        assert both.active + both.queued == 3
        client.wait_for_status(lambda status: status.active + status.queued == 1)
        client.feed("a", tokens[20_000:], start=20_000)
        rows = client.finish("a").rows
        assert client.status().epoch == 1
    wanted = fake_rank.fake_hidden(tokens, 0).astype(np.float64)
    edges = [*range(0, len(tokens), BLOCK), len(tokens)]
    assert np.array_equal(rows, np.array([wanted[a:b].mean(0) for a, b in pairwise(edges)], "f4"))


def test_replicas_share_the_ranks_equally(engine):
    """Two that send the same come equally far: neither is ever more than what is under way ahead of the other."""
    slow = np.full(100_000, fake_rank.SLOW)
    with ControllerClient(engine.api_address) as left, ControllerClient(engine.api_address) as right:
        for client in (left, right):
            client.open_encoding("same", RowSpec("window", BLOCK))
            client.feed("same", slow[: 6 * BLOCK], final=False)
        for more in range(6, 60, 6):
            for client in (left, right):
                client.feed("same", slow[more * BLOCK : (more + 6) * BLOCK], start=more * BLOCK, final=False)
        rows = {}
        for client in (left, right):
            client.pump(0.0)
            rows[client] = len(client.requests["same"].starts)
        assert abs(rows[left] - rows[right]) <= 24
        for client in (left, right):
            client.cancel("same")

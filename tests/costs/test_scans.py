"""The formulas of the scan over ranks against what communicators count."""

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.costs import Link, ScanMessage, scan_cost, scan_seconds
from dist_attn.errors import ConfigError
from dist_attn.layout import SequenceLayout
from dist_attn.model_config import figures
from dist_attn.ops import LinearState
from dist_attn.sharded import ScanExchange, ShardedSequenceOps, exclusive_scan
from dist_attn.sharded.prefix_scan import LogDecay

HOSTS = {1: ((0,),), 2: ((0,), (1,)), 3: ((0, 1), (2,)), 5: ((0, 1), (2, 3, 4)), 8: ((0, 1, 2, 3), (4, 5, 6, 7))}


@pytest.mark.parametrize("ranks", HOSTS)
def test_bytes_and_messages_of_every_exchange(ranks: int) -> None:
    """Every exchange sends exactly the bytes and messages of its formula, from every rank."""
    exchanges = [
        *(ScanExchange(name) for name in ("gather", "exscan", "log_step", "serial_ring")),
        *(ScanExchange("pipelined_ring", pieces=pieces) for pieces in (1, 3, 6)),
        ScanExchange("two_level", hosts=HOSTS[ranks]),
        *([ScanExchange("pair")] if ranks == 2 else []),
    ]
    message = ScanMessage(groups=2 * 3, sums=4 * 5 + 4 + 1)

    def measure(comm: Communicator) -> None:
        for exchange in exchanges:
            comm.traffic.clear()
            exclusive_scan(comm, LinearState.identity(2, 3, 4, 5), None, exchange)
            want = scan_cost(
                exchange.algorithm, message, ranks, comm.rank, pieces=exchange.pieces, hosts=exchange.hosts
            )
            assert (comm.traffic.bytes_sent, comm.traffic.messages) == (want.bytes_sent, want.messages), exchange

    run_simulated(measure, ranks)
    assert LogDecay().weights == figures.LOG_DECAY


@pytest.mark.parametrize("tokens", [1_024, 16_384, 262_144])
def test_the_carry_does_not_grow_with_the_tokens(tokens: int) -> None:
    """A rank with 1k, 16k or 256k tokens sends the same carry, that of the formula, by any exchange."""
    layout = SequenceLayout.from_lengths([tokens, tokens])
    names = ("pair", "gather", "log_step", "pipelined_ring") if tokens < 262_144 else ("gather",)

    def measure(comm: Communicator) -> dict[str, int]:
        sent = {}
        x = torch.zeros(1, 1, tokens, 2)
        for name in names:
            ops = ShardedSequenceOps(comm, layout, exchange=name)
            comm.traffic.clear()
            ops.linear_attention(x, x, x)
            sent[name] = comm.traffic.bytes_sent
        return sent

    whole = 4 * (2 * 2 + 2 + 2)
    ring = 4 * 4 * (2 + 1)  # 7 sums in 4 pieces of 2, each with the log decay
    for sent in run_simulated(measure, 2):
        assert sent == {name: ring if name == "pipelined_ring" else whole for name in names}


def test_seconds() -> None:
    """Time is latency and volume of the longest chain of messages, and parts of a message cost parts of its volume."""
    link, slow = Link(1e-3, 1e6), Link(1e-2, 1e6)
    message = ScanMessage(groups=1, sums=999)  # 4,000 bytes: 5 ms over the link
    assert scan_seconds("pair", message, 2, link) == pytest.approx(5e-3)
    assert scan_seconds("gather", message, 4, link) == pytest.approx(15e-3)
    assert scan_seconds("log_step", message, 4, link) == pytest.approx(10e-3)
    assert scan_seconds("log_step", message, 3, link) == pytest.approx(20e-3)
    assert scan_seconds("exscan", message, 4, link) == pytest.approx(20e-3)
    assert scan_seconds("serial_ring", message, 4, link) == pytest.approx(25e-3)
    assert scan_seconds("pipelined_ring", message, 3, link, pieces=2) == pytest.approx(5 * (1e-3 + 2.004e-3))
    hosts = ((0, 1), (2, 3))
    two = scan_seconds("two_level", message, 4, link, hosts=hosts, between_hosts=slow)
    assert two == pytest.approx(5e-3 + (1e-3 + 4.008e-3) + (1e-2 + 2.004e-3))
    assert two < scan_seconds("gather", message, 4, link, hosts=hosts, between_hosts=slow)
    assert scan_seconds("gather", message, 1, link) == 0


def test_an_unknown_exchange() -> None:
    """An exchange without a formula is an error."""
    message = ScanMessage(1, 1)
    with pytest.raises(ConfigError, match="telepathy"):
        scan_cost("telepathy", message, 2, 0)
    with pytest.raises(ConfigError, match="telepathy"):
        scan_seconds("telepathy", message, 2, Link(1, 1))

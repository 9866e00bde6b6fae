"""What `dist-attn serve` does when its controller dies: a new one at the same address, or the end."""

import os
import signal
import threading

import numpy as np

from dist_attn.commands import serve
from tests.support.engines import rank_processes, running_engine


class _Api:
    def poll(self):
        return None


class _Engine:
    """A controller that dies as often as it is told, then asks for the end."""

    def __init__(self, deaths, stopped):
        self.restarts, self._deaths, self._stopped = 0, deaths, stopped

    def exit_code(self):
        if self.restarts < self._deaths:
            return -9
        self._stopped.set()
        return None

    def restart(self):
        self.restarts += 1


def test_a_controller_that_dies_is_started_again(monkeypatch):
    """Some deaths are got over, and the end that was asked for is a clean one."""
    monkeypatch.setattr(serve, "POLL_S", 0.001)
    stopped = threading.Event()
    engine = _Engine(serve.DEATHS_TO_END - 1, stopped)
    assert serve._watch([engine], _Api(), stopped) == 0
    assert engine.restarts == serve.DEATHS_TO_END - 1


def test_a_controller_that_dies_again_and_again_ends_the_service(monkeypatch, capsys):
    """Its exit code becomes the service's, after words that say what happened."""
    monkeypatch.setattr(serve, "POLL_S", 0.001)
    stopped = threading.Event()
    engine = _Engine(100, stopped)
    assert serve._watch([engine], _Api(), stopped) == -9
    assert engine.restarts == serve.DEATHS_TO_END - 1
    assert "exit code -9" in capsys.readouterr().err


def test_the_next_controller_serves_the_same_clients():
    """kill -9 of a real one: its ranks end, a client that stays connected is served by the new one's ranks."""
    with running_engine(ranks=2) as (handle, client, mark):
        before = rank_processes(mark)
        os.kill(handle.process.pid, signal.SIGKILL)
        handle.process.wait(60)
        handle.restart()
        client.wait_ready()
        assert client.encode("after", np.arange(900)).done.rows == 2
        assert not set(before) & {rank.pid for rank in client.status().ranks}

"""Real controllers, agents and rank processes around the fake model, and a count of what they leave behind."""

import contextlib
import os
import sys
import time
import uuid
from pathlib import Path

from dist_attn.control.launch import start_engine
from dist_attn.wire.curve import ClientKeys
from tests.support.controller_client import ControllerClient

MARK = "TEST_OF_DIST_ATTN"
FAKE_RANK = (sys.executable, "-m", "tests.support.fake_rank")

QUICK = {
    "model": "fake",
    "rank_command": FAKE_RANK,
    "heartbeat_s": 0.1,
    "heartbeat_deadline_s": 20.0,
    "silence_deadline_s": 20.0,
    "stall_limit_s": 20.0,
    "start_deadline_s": 180.0,
    "backoff_s": 0.1,
    "losses_to_fail": 1,
}
"""Settings that start again soon and take nothing for silence that is only a busy machine."""
ALERT = {"heartbeat_deadline_s": 3.0, "silence_deadline_s": 3.0, "stall_limit_s": 3.0}
"""For tests of what is silent or stuck."""


def marked_processes(mark):
    """The living processes that carry the mark: process id -> command line."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in Path(f"/proc/{entry}/environ").read_bytes():
                    found[int(entry)] = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def wait_until_none_left(mark, timeout_s=60.0):
    """Wait until no process carries the mark; returns the seconds it took.

    Raises: AssertionError naming those that are left.
    """
    began = time.monotonic()
    while left := marked_processes(mark):
        assert time.monotonic() - began < timeout_s, f"still there after {timeout_s:g} s: {left}"
        time.sleep(0.02)
    return time.monotonic() - began


def processes_of(mark, what):
    """The ids of marked processes whose command line contains `what`, but for tethers that are about to become it."""
    return sorted(pid for pid, command in marked_processes(mark).items() if what in command and "tether" not in command)


def rank_processes(mark):
    """The ids of the ranks that carry the mark; only a rank has a flag that names its controller."""
    return processes_of(mark, "--controller=")


@contextlib.contextmanager
def running_engine(*, wait=True, **fields):
    """An engine of fake ranks and a client: yields (handle, client, mark); at the end no process may be left."""
    mark = uuid.uuid4().hex
    os.environ[MARK] = mark
    try:
        handle = start_engine(**{**QUICK, **fields})
    finally:
        del os.environ[MARK]
    try:
        keys = ClientKeys.find(handle.settings.keys_dir, "api", handle.api_address)
        with ControllerClient(handle.api_address, keys) as client:
            if wait:
                client.wait_ready()
            yield handle, client, mark
    finally:
        handle.stop()
        wait_until_none_left(mark)

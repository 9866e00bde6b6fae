"""Who holds a session: a dead process of this machine is seen at once, and nobody else is taken for dead."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

from dist_attn.errors import BusyError
from dist_attn.store import open_store
from dist_attn.store.ledger import has_died, this_process

HOLD = """
import asyncio, sys, time
from dist_attn.store import open_store
from dist_attn.store.ledger import this_process

async def hold(folder):
    async with await open_store(folder) as store:
        session = await store.sessions.create("ann")
        await store.sessions.begin_append("ann", session.id, "")
        print(this_process(), session.id, flush=True)
        time.sleep(600)

asyncio.run(hold(sys.argv[1]))
"""


def test_a_killed_writer_holds_a_session_no_longer(tmp_path: Path) -> None:
    """While its process lives a session is busy; after kill -9 the next writer begins at once, not after `writer_s`."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    owner, session = process.stdout.readline().split()

    async def begin() -> str:
        async with await open_store(str(tmp_path)) as store:
            try:
                return (await store.sessions.begin_append("ann", session, ""))[1]
            except BusyError:
                assert (await store.sessions.get("ann", session)).busy_until > 0
                return ""

    try:
        assert not has_died(owner) and not asyncio.run(begin())
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert has_died(owner)  # though nobody has waited for it yet
    finally:
        process.kill()
        process.wait(60)
        process.stdout.close()
    assert has_died(owner) and asyncio.run(begin())


def test_only_the_surely_dead_are_dead() -> None:
    """Neither this process, nor one of another machine or container, nor one that nobody can tell of."""
    own = this_process()
    place, _, process = own.rpartition("/")
    assert own and not has_died(own) and place
    begun = process.partition(".")[2]
    assert has_died(f"{place}/{os.getpid()}.{int(begun) + 1}") and has_died(f"{place}/4194305.1")
    for name in ("", "/", f"other/{process}", f"{place}x/4194305.1", f"{place}/x.1", place, "host/12.34/token"):
        assert not has_died(name), name

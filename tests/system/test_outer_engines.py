"""Agents that an outer engine starts, and starts again when they are lost under open streams: the same bits."""

import hashlib
import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from dist_attn.launchers import find_mpiexec
from dist_attn.wire.curve import make_keys
from tests.support.models import write_small_folder
from tests.support.programs import Program, free_port, running_program
from tests.support.served import ROOT, Served, served
from tests.support.waiting import eventually

STREAMS, AGENTS, SECONDS = 8, 2, 180.0
ADDRESS = "DIST_ATTN_ENGINE__RANK_ADDRESS"
AGENT = [sys.executable, "-m", "dist_attn.control", "agent"]
MPIEXEC = "{mpiexec} -n 2 bash -c 'until {agent}; do sleep 0.1; done'"


def command_of(engine: str, address: str) -> list[str]:
    """What starts two agents and starts them again; skips where that engine is not here."""
    if engine == "Ray":
        pytest.importorskip("ray", reason="needs pip install ray")
        flags = [f"--agents={AGENTS}", "--cpus=0.5", "--strategy=PACK", f"--rank-address={address}"]
        return [sys.executable, str(ROOT / "deploy/ray/agents.py"), *flags]
    if find_mpiexec() is None:
        pytest.skip("needs mpiexec")
    return ["bash", "-c", MPIEXEC.format(agent=shlex.join(AGENT), mpiexec=find_mpiexec())]


def agents_of(program: Program) -> set[int]:
    """The process ids of the agents, each of which is the parent of its ranks."""
    found = set()
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            if process.cmdline()[1:4] == AGENT[1:] and str(program.log.parent) in process.environ().get(ADDRESS, ""):
                found.add(process.pid)
    return found


def rows_of(service: Served, body: Iterator[bytes] | bytes) -> str:
    """SHA-256 of the rows of a text, which must end with its summary."""
    answer = httpx.post(f"{service.url}/v1/encodings?window=500", content=body, timeout=SECONDS)
    lines = answer.text.splitlines()
    assert "tokens" in json.loads(lines[-1]), lines[-1]
    rows = [json.loads(line)["embedding"] for line in lines if "embedding" in line]
    return hashlib.sha256(np.array(rows).tobytes()).hexdigest()


@pytest.mark.parametrize("engine", ["mpiexec", "Ray"])
def test_streams_go_on_with_agents_that_are_started_again(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent and its rank are killed under eight open streams: each ends with the rows of an undisturbed one."""
    model, address = write_small_folder(tmp_path / "tiny"), f"ipc://{tmp_path}/ranks"
    monkeypatch.setenv(ADDRESS, address)
    monkeypatch.setenv("DIST_ATTN_MODEL", str(model))
    for name, value in (("LOCAL_AGENT", "false"), ("AGENTS", str(AGENTS)), ("RANKS", str(AGENTS))):
        monkeypatch.setenv(f"DIST_ATTN_ENGINE__{name}", value)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))
    texts = [bytes(np.random.default_rng(n).integers(32, 127, 20_000, dtype=np.uint8)) for n in range(STREAMS)]
    half_sent, go_on = threading.Barrier(STREAMS + 1), threading.Event()

    def slowly(text: bytes) -> Iterator[bytes]:
        yield text[:8_000]
        half_sent.wait(SECONDS)
        assert go_on.wait(SECONDS)
        yield text[8_000:]

    with running_program(command_of(engine, address), tmp_path / "outer.log", cwd=tmp_path) as outer:
        with served(tmp_path, ranks=AGENTS, model=model) as service, ThreadPoolExecutor(STREAMS) as together:
            wanted = [rows_of(service, text) for text in texts]
            streams = [together.submit(rows_of, service, slowly(text)) for text in texts]
            half_sent.wait(SECONDS)
            before = agents_of(outer)
            assert len(before) == AGENTS
            os.kill(min(before), signal.SIGKILL)
            eventually(lambda: len(agents_of(outer) - {min(before)}) == AGENTS, "a new agent", SECONDS)
            go_on.set()
            assert [stream.result(SECONDS) for stream in streams] == wanted
            assert service.program.stop() == 0
        assert outer.process.wait(SECONDS) == 0, outer.output


STAND_INS = {
    "scontrol": "echo 127.0.0.1",
    "srun": 'shift; for n in 0 1; do SLURM_LOCALID=$n "$@" & done; wait',
}


def test_a_job_of_slurm_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The script starts a service over the agents of all nodes, where tasks of one stand for nodes, and ends them."""
    make_keys(tmp_path / "keys")
    (tmp_path / "bin").mkdir()
    for name, script in STAND_INS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin{os.pathsep}{os.environ['PATH']}")
    port, env = free_port(), {"PYTHON": sys.executable, "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": str(AGENTS)}
    env |= {"DIST_ATTN_ENGINE__KEYS_DIR": f"{tmp_path}/keys", "DIST_ATTN_ENGINE__HOST_ADDRESS": "127.0.0.1"}
    command = ["bash", str(ROOT / "deploy/slurm/engine.sbatch"), str(write_small_folder(tmp_path / "tiny"))]
    command += [f"--port={port}", f"--data-dir={tmp_path}/data"]
    with running_program(command, tmp_path / "job.log", cwd=ROOT, env=env) as job:
        job.wait_for("ready after", SECONDS)
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/encodings?window=500", content=b"x" * 1000, timeout=SECONDS)
        assert answer.status_code == 200
        family = job.family()
        assert job.stop() == 0
        assert not psutil.wait_procs(family, SECONDS)[1]

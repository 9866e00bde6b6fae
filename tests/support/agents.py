"""Agents as they are started on hosts of their own, here beside each other under names of their own."""

import os
import sys
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.support.engines import FAKE_RANK, MARK
from tests.support.programs import running_program

ROOT = Path(__file__).resolve().parents[2]


def agent_flags(name, rank_address, *, model="fake", rank_command=FAKE_RANK, **fields):
    """The command of an agent; what matters to all hosts the controller tells it."""
    values = {"agent_name": name, "rank_address": rank_address, "model": model, "silence_deadline_s": 20.0, **fields}
    command = [sys.executable, "-m", "dist_attn.control", "agent"]
    if rank_command:
        quoted = ", ".join(f'"{word}"' for word in rank_command)
        command.append(f"--rank-command=[{quoted}]")
    return [*command, *(f"--{key.replace('_', '-')}={value}" for key, value in values.items())]


@contextmanager
def running_agent(folder, name, rank_address, mark, **fields):
    """An agent of its own that carries the mark, as everything does that it starts."""
    log = folder / f"agent-{name}-{len(list(folder.iterdir()))}.log"
    with running_program(agent_flags(name, rank_address, **fields), log, env={MARK: mark}, cwd=ROOT) as program:
        yield program


def kill_family(program):
    """Kill a program and everything below it at once, as when a host is switched off."""
    family = program.family()
    for member in family:
        os.kill(member.pid, 9)
    psutil.wait_procs(family, 10)

"""The processes of one rank group: how they are started, what they print, how they are watched and killed."""

import contextlib
import os
import select
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import dist_attn
from dist_attn.control.passing_on import PassOn
from dist_attn.control.processes import GROUP_MARK, kill_processes
from dist_attn.control.settings import ControlSettings
from dist_attn.launchers import find_mpiexec
from dist_attn.wire.agent_messages import (
    StartGroup,
)

__all__ = ["RankProcesses", "child_environment"]

TAIL_BYTES = 8192
STDERR = 2
READS_PER_TURN = 16  # of 64 KiB each: ranks that print without end do not keep the agent from its other work
KILL_TIMEOUT_S = 5.0


def child_environment() -> dict[str, str]:
    """The environment for a Python child that must find this same package."""
    source = str(Path(dist_attn.__file__).resolve().parents[1])
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != source]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([source, *others])}


def launch_command(settings: ControlSettings, start: StartGroup) -> list[str]:
    """The command of the launcher, or of one rank when there is none between."""
    program = [
        *settings.rank_program,
        f"--controller={start.controller_address}",
        f"--epoch={start.epoch}",
        f"--ranks={start.ranks}",
        f"--backend={start.backend}",
        f"--model={start.model}",
        *([f"--keys-dir={settings.keys_dir}"] if settings.keys_dir else []),
        f"--heartbeat-s={settings.heartbeat_s}",
        f"--silence-deadline-s={settings.silence_deadline_s}",
        f"--exchange-deadline-s={settings.exchange_deadline_s}",
        *(["--check-finite"] if settings.check_finite else []),
    ]
    if settings.starts_by == "torchrun":
        # A new rendezvous per epoch: what an old group left in its store must not reach the new one.
        torchrun = f"torch.distributed.run --nnodes=1 --nproc-per-node={start.ranks} --max-restarts=0"
        # Ranks print into this process's pipe: torchrun needs no folder for logs, which it would leave behind.
        torchrun += f" --log-dir={os.devnull}"
        rendezvous = f"--rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0 --rdzv-id=dist-attn-{os.getpid()}-{start.epoch}"
        program = [sys.executable, "-m", *torchrun.split(), *rendezvous.split(), "--no-python", *program]
    elif settings.starts_by == "mpiexec":
        # Where it is missing, the tether says so in the group's output.
        program = [find_mpiexec() or "mpiexec", "-n", str(start.ranks), *program]
    return [sys.executable, "-m", "dist_attn.control.tether", str(os.getpid()), *program]


class RankProcesses:
    """The ranks of one epoch on this machine."""

    def __init__(self, settings: ControlSettings, start: StartGroup, mark: str) -> None:
        self.epoch = start.epoch
        self._mark = f"{mark}{start.epoch}:"
        self._tail: deque[bytes] = deque()
        self._stderr = PassOn(STDERR)
        self._watched: dict[int, tuple[int, int]] = {}  # pidfd -> rank, pid
        self._unwatchable: dict[int, int] = {}  # rank -> pid
        self._reported: list[int] = []
        self._ended_at: float | None = None
        self.output, write_end = os.pipe()
        os.set_blocking(self.output, False)
        command = launch_command(settings, start)
        environment = child_environment()
        environment[GROUP_MARK] = self._mark
        environment.setdefault("OMP_NUM_THREADS", str(settings.threads_per_rank))
        environment["PYTHONUNBUFFERED"] = "1"
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(start.ranks if settings.starts_by == "direct" else 1):
                if settings.starts_by == "direct":
                    environment |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(start.ranks)}
                self._processes.append(
                    subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=write_end, stderr=write_end, env=environment
                    )
                )
        finally:
            os.close(write_end)

    @property
    def launcher_pid(self) -> int:
        """The process that was started first."""
        return self._processes[0].pid

    @property
    def process_ids(self) -> set[int]:
        """The processes that were started directly."""
        return {process.pid for process in self._processes}

    @property
    def descriptors(self) -> list[int]:
        """File descriptors that become readable when something happens."""
        return [*([self.output] if self.output >= 0 else []), *self._watched]

    def watch(self, pids: list[int]) -> None:
        """From now on `ended_ranks` tells of these processes, which stand in order of rank."""
        self._reported = list(pids)
        for rank, pid in enumerate(pids):
            try:
                self._watched[os.pidfd_open(pid)] = (rank, pid)
            except (OSError, AttributeError):
                # It has ended already, or this system has no process descriptors and `ended_ranks` asks for it.
                self._unwatchable[rank] = pid

    def ended_ranks(self) -> list[tuple[int, int]]:
        """Watched ranks that have ended and were not told of before, with their process ids."""
        ended = []
        for descriptor in select.select(list(self._watched), [], [], 0)[0]:
            ended.append(self._watched.pop(descriptor))
            os.close(descriptor)
        for rank, pid in list(self._unwatchable.items()):
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                del self._unwatchable[rank]
                ended.append((rank, pid))
        return ended

    def forward_output(self) -> None:
        """Copy what the ranks have printed to stderr, as far as that is read, and keep the end of it."""
        self._stderr.flush()
        for _ in range(READS_PER_TURN):
            if self.output < 0:
                return
            try:
                data = os.read(self.output, 65536)
            except BlockingIOError:
                return
            if not data:
                os.close(self.output)
                self.output = -1
                return
            self._tail.append(data)
            while len(self._tail) > 1 and sum(map(len, self._tail)) - len(self._tail[0]) >= TAIL_BYTES:
                self._tail.popleft()
            self._stderr.write(data)

    def exit_code(self, patience_s: float) -> int | None:
        """How the group ended, None while it runs.

        When one process ended well, the others have `patience_s` to do the same; one that failed ends the group.
        """
        codes = [process.poll() for process in self._processes]
        failed = [code for code in codes if code]
        if failed:
            return failed[0]
        if None not in codes:
            return 0
        if 0 in codes:
            self._ended_at = self._ended_at or time.monotonic()
            if time.monotonic() - self._ended_at > patience_s:
                return 0
        return None

    def kill(self) -> tuple[int, str]:
        """Kill whatever is left of the group; the launcher's exit code and the end of its output."""
        code = self.exit_code(0.0)
        left = kill_processes(self._mark, [*self._reported, *(p.pid for p in self._processes)], KILL_TIMEOUT_S)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_TIMEOUT_S if process.pid not in left else 0.01)
        self.forward_output()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self._watched.clear()
        self.output = -1
        tail = b"".join(self._tail)[-TAIL_BYTES:].decode(errors="replace")
        return (code if code is not None else self._processes[0].returncode or 0), tail

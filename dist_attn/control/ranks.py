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
from dist_attn.control.host_address import interface_of
from dist_attn.control.passing_on import PassOn
from dist_attn.control.processes import GROUP_MARK, GroupMark, kill_processes
from dist_attn.control.settings import ControlSettings, threads_for
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


def launch_command(settings: ControlSettings, start: StartGroup, mark: GroupMark) -> list[str]:
    """The command of the launcher, or of one rank when there is none between; `settings` are this host's."""
    program = [
        *settings.rank_program,
        f"--controller={settings.rank_address}",
        *([f"--engine={start.engine}"] if start.engine else []),
        f"--epoch={start.epoch}",
        f"--ranks={start.ranks}",
        f"--backend={start.backend}",
        f"--model={settings.model}",
        f"--chunk-tokens={start.chunk_tokens}",
        *([f"--keys-dir={settings.keys_dir}"] if settings.keys_dir else []),
        f"--heartbeat-s={start.heartbeat_s}",
        f"--silence-deadline-s={start.silence_deadline_s}",
        f"--exchange-deadline-s={start.exchange_deadline_s}",
        *([f"--weights={start.weights}"] if start.weights != "float32" else []),
        *(["--check-finite"] if start.check_finite else []),
    ]
    if start.launcher == "torchrun":
        program = [*_torchrun(start, settings.start_deadline_s), "--no-python", *program]
    elif start.launcher == "mpiexec":
        program = [*_mpiexec(start, mark), *program]
    return [sys.executable, "-m", "dist_attn.control.tether", str(os.getpid()), *program]


def _torchrun(start: StartGroup, deadline_s: float) -> list[str]:
    """torchrun for this host's ranks, with a rendezvous that no other epoch has used.

    What an old group left in its store must not reach a new one. Over several hosts the order of the hosts is fixed,
    so that the controller knows whose ranks are where.
    """
    name = f"dist-attn-{start.engine or os.getpid()}-{start.epoch}"
    # Ranks print into this process's pipe: torchrun needs no folder for logs, which it would leave behind.
    words = f"--nproc-per-node={start.local_ranks} --max-restarts=0 --log-dir={os.devnull} --rdzv-id={name}"
    if len(start.hosts) == 1:
        words += " --nnodes=1 --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:0"
    else:
        address, _, port = start.rendezvous.rpartition(":")
        words += f" --nnodes={len(start.hosts)} --node-rank={start.node} --rdzv-backend=static"
        words += f" --master-addr={address} --master-port={port} --rdzv-conf=timeout={max(1, round(deadline_s))}"
    return [sys.executable, "-m", "torch.distributed.run", *words.split()]


def _mpiexec(start: StartGroup, mark: GroupMark) -> list[str]:
    """mpiexec for all ranks, from the first host; where it is missing, the tether says so in the group's output."""
    command = [find_mpiexec() or "mpiexec", "-n", str(start.ranks)]
    if len(start.hosts) > 1:
        command += ["-host", ",".join(f"{host.address}:{host.ranks}" for host in start.hosts)]
        # Not every MPI hands the environment on to other hosts.
        kept = {GROUP_MARK: str(mark), "PYTHONPATH": child_environment()["PYTHONPATH"]}
        command += ["env", *(f"{name}={value}" for name, value in kept.items())]
    return command


def _rank_environment(start: StartGroup, mark: GroupMark) -> dict[str, str]:
    """What the launcher and, through it, the ranks are told by their environment."""
    environment = {**child_environment(), GROUP_MARK: str(mark), "PYTHONUNBUFFERED": "1"}
    environment.setdefault("OMP_NUM_THREADS", str(threads_for(start.local_ranks)))
    interface = interface_of(start.hosts[start.node].address) if len(start.hosts) > 1 else ""
    if interface:
        # Else each host's ranks would listen where the host's name points to, which may be the host itself.
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            environment.setdefault(variable, interface)
    return environment


class RankProcesses:
    """The ranks of one epoch on this machine."""

    def __init__(self, settings: ControlSettings, start: StartGroup) -> None:
        self.epoch = start.epoch
        agent = "*" if start.launcher == "mpiexec" and len(start.hosts) > 1 else settings.host_name
        self._mark = GroupMark(start.engine, start.epoch, agent)
        self._tail: deque[bytes] = deque()
        self._stderr = PassOn(STDERR)
        self._watched: dict[int, tuple[int, int]] = {}  # pidfd -> rank, pid
        self._unwatchable: dict[int, int] = {}  # rank -> pid
        self._reported: list[int] = []
        self._ended_at: float | None = None
        self.output, write_end = os.pipe()
        os.set_blocking(self.output, False)
        command = launch_command(settings, start, self._mark)
        environment = _rank_environment(start, self._mark)
        direct = start.launcher == "direct"
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for local in range(start.local_ranks if direct else 1):
                if direct:
                    rank = {"RANK": start.first_rank + local, "LOCAL_RANK": local, "WORLD_SIZE": start.ranks}
                    environment |= {name: str(value) for name, value in rank.items()}
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

    def watch(self, first_rank: int, pids: list[int]) -> None:
        """From now on `ended_ranks` tells of these processes, which stand in order of rank."""
        self._reported = list(pids)
        for rank, pid in enumerate(pids, first_rank):
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
        left = kill_processes(self._mark.__eq__, [*self._reported, *(p.pid for p in self._processes)], KILL_TIMEOUT_S)
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

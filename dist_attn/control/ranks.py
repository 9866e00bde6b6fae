"""The processes of one rank group: starting them, letting them meet, passing on their output, and ending them."""

import contextlib
import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import dist_attn
from dist_attn.control.memory import rank_bytes, why_killed
from dist_attn.control.processes import GROUP_MARK, PrivateFolder, group_mark, kill_processes
from dist_attn.control.settings import ControlSettings
from dist_attn.errors import ConfigError
from dist_attn.host_limits import compute_environment, oom_kills
from dist_attn.launchers import INTERFACE_VARIABLES, LOOPBACK_INTERFACE, find_mpiexec
from dist_attn.rank_link.rank_settings import RankSettings
from dist_attn.settings import RankTerms
from dist_attn.wire.agent_messages import StartGroup

TAIL_BYTES = 8192
KEPT_BYTES = 1 << 18  # of output that is not read yet
STDERR = 2
READS_PER_TURN = 16  # of 64 KiB each: ranks that print without end do not keep the agent from its other work
KILL_TIMEOUT_S = 5.0
SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
LOOPBACK = "127.0.0.1"


def child_environment() -> dict[str, str]:
    """The environment for a Python child that must find this same package."""
    source = str(Path(dist_attn.__file__).resolve().parents[1])
    others = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != source]
    return {**os.environ, "PYTHONPATH": os.pathsep.join([source, *others])}


def launch_command(settings: ControlSettings, start: StartGroup, rendezvous: str = "") -> list[str]:
    """The command of one rank, or of mpiexec for all; `settings` are this host's, `rendezvous` is a URL."""
    own = {name: getattr(settings, name) for name in RankTerms.model_fields}
    rank = RankSettings(
        **{**own, **start.terms},
        controller=settings.rank_address,
        engine=start.engine,
        epoch=start.epoch,
        model=settings.model,
        rendezvous=rendezvous,
    )
    program = [*settings.rank_program, *rank.to_flags()]
    if start.by_mpiexec:
        # Where it is missing, the tether says so in the group's output.
        program = [find_mpiexec(one_host=True) or "mpiexec", "-n", str(start.ranks), *program]
    return [sys.executable, "-m", "dist_attn.rank_link.tether", str(os.getpid()), *program]


def rank_environment(mark: str, local_ranks: int, address: str | None = None) -> dict[str, str]:
    """The environment of mpiexec and the ranks; values that are already set stay.

    `address` is that of this host where others have ranks too.
    """
    own = {GROUP_MARK: mark, "PYTHONUNBUFFERED": "1"}
    environment = {**child_environment(), **compute_environment(local_ranks), **own}
    # Ranks do not check who connects, so on one host they listen on loopback alone. On several they would by default
    # listen at the address of the host's name, which may be a loopback address.
    interface = LOOPBACK_INTERFACE if address is None else interface_of(address)
    for variable in INTERFACE_VARIABLES[: None if address is None else 2] if interface else ():
        environment.setdefault(variable, interface)
    return environment


class RankProcesses:
    """The ranks of one epoch on this machine, which other hosts reach at `address`."""

    def __init__(self, settings: ControlSettings, start: StartGroup, address: str) -> None:
        self.epoch, self._first_rank = start.epoch, start.first_rank
        self._mark = group_mark(start.engine, settings.host_name, start.epoch)
        self._tail = b""
        self._stderr = PassOn(STDERR)
        self._watched: dict[int, tuple[int, int]] = {}  # pidfd -> rank, pid
        self._unwatchable: dict[int, int] = {}  # rank -> pid
        self._folder: PrivateFolder | None = None
        self._kills_before = oom_kills()
        self._need_bytes = partial(rank_bytes, Path(settings.model), start.ranks, settings.weights)
        self._processes: list[subprocess.Popen[bytes]] = []
        self.rendezvous = ""
        """The place of this host where the ranks of all hosts meet, if that is here."""
        listener: socket.socket | None = None
        url = ""
        several = start.local_ranks < start.ranks
        if several and start.node == 0:
            listener = listen_on(address)
            self.rendezvous = "{}:{}".format(*listener.getsockname())
        if several:
            url = f"tcp://{self.rendezvous or start.rendezvous}"
        elif start.ranks > 1 and not start.by_mpiexec:
            self._folder = PrivateFolder()  # of this epoch: what an older one left there must not reach it
            url = (self._folder.path / "store").as_uri()
        environment = rank_environment(self._mark, start.local_ranks, address if several else None)
        self.output, write_end = os.pipe()
        os.set_blocking(self.output, False)
        try:
            self._start(start, launch_command(settings, start, url), environment, write_end, listener)
        except (OSError, ConfigError):
            self.kill()
            raise
        finally:
            os.close(write_end)
            if listener is not None:
                listener.close()

    def _start(
        self,
        start: StartGroup,
        command: list[str],
        environment: dict[str, str],
        output: int,
        listener: socket.socket | None,
    ) -> None:
        """Start mpiexec, or each rank of this host; rank 0 is handed the socket at which all of them meet."""
        for local in range(1 if start.by_mpiexec else start.local_ranks):
            places = {"RANK": start.first_rank + local, "LOCAL_RANK": local, "WORLD_SIZE": start.ranks}
            own = {name: str(value) for name, value in {**places, "GROUP_RANK": start.node}.items()}
            descriptors = [listener.fileno()] if listener is not None and local == 0 else []
            self._processes.append(
                subprocess.Popen(
                    [*command, *(f"--listener={descriptor}" for descriptor in descriptors)],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment if start.by_mpiexec else environment | own,
                    pass_fds=descriptors,
                )
            )

    @property
    def process_ids(self) -> set[int]:
        """The processes that were started directly."""
        return {process.pid for process in self._processes}

    @property
    def descriptors(self) -> list[int]:
        """File descriptors that become readable when something happens."""
        return [*([self.output] if self.output >= 0 else []), *self._watched]

    def watch(self, pids: list[int]) -> None:
        """Let `ended_ranks` tell of these processes from now on; they stand in order of rank."""
        for rank, pid in enumerate(pids, self._first_rank):
            try:
                self._watched[os.pidfd_open(pid)] = (rank, pid)
            except (OSError, AttributeError):
                # The process has ended already, or this system has no process descriptors and `ended_ranks` asks for
                # it.
                self._unwatchable[rank] = pid

    def ended_ranks(self) -> list[tuple[int, int]]:
        """The watched ranks that have ended and were not told of before, with their process ids."""
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

    def why_ended(self, pid: int | None = None) -> str:
        """Say whether memory may have ended process `pid`, or without one the group's first process that failed."""
        codes = [process.poll() for process in self._processes if pid in (None, process.pid)]
        code = next((code for code in codes if code), None)
        return why_killed(code, self._kills_before, self._need_bytes)

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
            self._tail = (self._tail + data)[-TAIL_BYTES:]
            self._stderr.write(data)

    def exit_code(self) -> int | None:
        """The exit code of the group, None while it runs: all processes until they end well, or one fails."""
        codes = [process.poll() for process in self._processes]
        failed = [code for code in codes if code]
        return failed[0] if failed else None if None in codes else 0

    def kill(self) -> tuple[int, str]:
        """Kill whatever is left of the group; returns the launcher's exit code and the end of its output."""
        code = self.exit_code()
        for process in self._processes:
            process.kill()
        # A killed mpiexec leaves its ranks. On Linux they are found by their mark, elsewhere by their ids alone.
        for pid in () if hasattr(os, "pidfd_open") else self._unwatchable.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        left = kill_processes(self._mark, KILL_TIMEOUT_S)
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(KILL_TIMEOUT_S if process.pid not in left else 0.01)
        self.forward_output()
        for descriptor in self.descriptors:
            os.close(descriptor)
        self._watched.clear()
        self.output = -1
        if self._folder is not None:
            self._folder.remove()
        tail = self._tail.decode(errors="replace")
        return (code if code is not None else self._processes[0].returncode or 0), tail


class PassOn:
    """Bytes for a descriptor that this process shares with others, and whose reader may be slow or gone.

    The descriptor stays in blocking mode, since the others rely on it. It is only written to when it is ready, and
    then at most PIPE_BUF bytes, which a pipe that is ready takes at once. Up to `kept` bytes wait for the next call;
    beyond that the oldest are left out, and a line says how many.
    """

    def __init__(self, descriptor: int, kept: int = KEPT_BYTES) -> None:
        self._descriptor = descriptor
        self._kept = kept
        self._waiting = bytearray()
        self._left_out = 0

    def write(self, data: bytes) -> None:
        """Take `data`, and write as much of all that waits as the descriptor takes now."""
        self._waiting += data
        surplus = len(self._waiting) - self._kept
        if surplus > 0:
            del self._waiting[:surplus]
            self._left_out += surplus
        self.flush()

    def flush(self) -> None:
        """Write as much as the descriptor takes now; what cannot be written at all is dropped."""
        try:
            while (self._waiting or self._left_out) and self._ready():
                if self._left_out:
                    os.write(self._descriptor, f"\n({self._left_out} bytes of output left out)\n".encode())
                    self._left_out = 0
                else:
                    del self._waiting[: os.write(self._descriptor, self._waiting[: select.PIPE_BUF])]
        except BlockingIOError:
            return  # another process has made the descriptor non-blocking, and it is full
        except OSError:
            self._waiting.clear()

    def _ready(self) -> bool:
        poller = select.poll()
        poller.register(self._descriptor, select.POLLOUT)
        return bool(poller.poll(0))


def address_towards(address: str) -> str:
    """This host's own address on the way to a ZeroMQ address; empty while the way is not known."""
    scheme, _, place = address.partition("://")
    if scheme != "tcp":
        return LOOPBACK
    host, _, port = place.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))  # nothing is sent: the kernel only looks up the way
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def interface_of(address: str) -> str:
    """The network interface with an IPv4 address of this host; empty where that cannot be found out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def listen_on(address: str) -> socket.socket:
    """A socket that listens on this address of this host alone, at a port that was free.

    Raises: OSError where the address is not known, none of this host's, or a name that only this host resolves so.
    """
    found = socket.gethostbyname(address) if address else ""
    named_loopback = found.startswith("127.") and found != address  # as in Debian's /etc/hosts
    if found in ("", "0.0.0.0") or named_loopback:
        raise OSError(
            f"the address of this host is {address!r}{f', which is {found} here' if named_loopback else ''}: "
            "set engine.host_address to one that other hosts reach"
        )
    return socket.create_server((found, 0))

"""The agent: one per host, starts the host's ranks when told to, watches them, and leaves none alive."""

import contextlib
import itertools
import os
import signal
import time
from types import FrameType

import structlog
import zmq

from dist_attn.control.processes import group_mark, kill_processes
from dist_attn.control.ranks import KILL_TIMEOUT_S, RankProcesses, address_towards
from dist_attn.control.settings import ControlSettings
from dist_attn.errors import ConfigError, WireError
from dist_attn.rank_link.tether import adopt_orphans, die_with_parent, parent_is_gone
from dist_attn.wire.agent_messages import (
    AgentHello,
    GroupExited,
    GroupStarted,
    KillGroup,
    RankExited,
    StartGroup,
    StopAgent,
    WatchRanks,
)
from dist_attn.wire.curve import ClientKeys
from dist_attn.wire.messages import PROTOCOL_VERSION
from dist_attn.wire.rank_messages import Ping
from dist_attn.wire.sockets import Dealer, agent_identity

HELLO_S = 1.0
TURN_S = 0.2
SEND_S = 1.0

log = structlog.get_logger("dist_attn.agent")


def run_agent(settings: ControlSettings) -> int:
    """Serve the controller at `settings.rank_address` until it stops the agent.

    An agent that a controller has started ends with it; one of its own waits for the next controller.
    Raises: ConfigError for an address or keys that cannot be used.
    """
    if not settings.rank_address:
        raise ConfigError("rank_address is not set; give --rank-address, the one of the controller")
    if settings.parent:
        die_with_parent()
    adopt_orphans()
    keys = ClientKeys.find(settings.keys_dir, "agent", settings.rank_address)
    context = zmq.Context[zmq.Socket[bytes]](1)
    try:
        # A connection of its own for each controller: what one did not take is not for the next.
        for connection in itertools.count():
            identity = agent_identity(settings.host_name, os.getpid(), connection).decode()
            with Dealer(context, settings.rank_address, identity, keys) as dealer:
                if not _Agent(settings, dealer).run():
                    break
        return 0
    finally:
        context.term()


class _Agent:
    def __init__(self, settings: ControlSettings, dealer: Dealer) -> None:
        self._settings = settings
        self._dealer = dealer
        self._group: RankProcesses | None = None
        self._name = settings.host_name
        self._address = settings.host_address
        self._engine: str | None = None  # the controller that spoke last
        self._stop = ""
        self._again = False
        self._signalled = False
        self._unanswered = 0

    def run(self) -> bool:
        """Serve until there is a reason to stop; true if the agent is to wait for the next controller."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        next_hello = 0.0
        try:
            while not self._stop:
                if time.monotonic() >= next_hello:
                    next_hello = time.monotonic() + HELLO_S
                    self._hello()
                    continue
                self._wait()
                while (message := self._receive()) is not None:
                    self._obey(message)
                self._look_after_group()
        except WireError as error:
            self._stop = str(error)
        finally:
            log.info("agent stops", reason=self._stop or "an error")
            if self._again:
                # Before anything else: a controller that starts now would give its orders to this connection.
                self._dealer.close(linger_ms=0)
            if self._group is not None:
                self._group.kill()
            self._clear()
            _reap()
        return self._again and not self._signalled

    def _clear(self) -> None:
        """Kill all ranks of the last controller on this host, also those that an earlier agent has started."""
        if self._engine is not None and (left := kill_processes(group_mark(self._engine, self._name), KILL_TIMEOUT_S)):
            log.error("processes of an older epoch cannot be killed", pids=sorted(left))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stop = f"signal {signal.Signals(number).name}"
        self._signalled = True

    def _hello(self) -> None:
        """Say that the agent is alive; the controller answers each time, so silence is counted in hellos."""
        if parent_is_gone(self._settings.parent):
            self._stop = "its parent is gone"
        elif self._unanswered * HELLO_S >= self._settings.silence_deadline_s:
            self._stop = f"the controller has been silent for {self._settings.silence_deadline_s:g} s"
            self._again = not self._settings.parent
        if self._stop:
            return
        self._unanswered += 1
        with contextlib.suppress(WireError):
            self._address = self._address or address_towards(self._settings.rank_address)
            hello = AgentHello(PROTOCOL_VERSION, os.getpid(), self._name, self._address)
            self._dealer.send(hello)

    def _wait(self) -> None:
        poller = zmq.Poller()
        poller.register(self._dealer.socket, zmq.POLLIN)
        for descriptor in self._group.descriptors if self._group is not None else ():
            poller.register(descriptor, zmq.POLLIN)
        poller.poll(int(TURN_S * 1000))

    def _receive(self) -> object | None:
        while True:
            try:
                return self._dealer.receive()
            except WireError as error:
                log.warning("unreadable message", error=str(error))

    def _obey(self, message: object) -> None:
        match message:
            case Ping():
                self._unanswered = 0
            case StartGroup():
                self._start(message)
            case WatchRanks() if self._group is not None and self._group.epoch == message.epoch:
                self._group.watch(message.pids)
            case KillGroup():
                self._engine = message.engine
                if self._group is not None and self._group.epoch == message.epoch:
                    self._end_group()
                else:
                    kill_processes(group_mark(message.engine, self._name, message.epoch), KILL_TIMEOUT_S)
                    self._dealer.send(GroupExited(message.epoch, 0, ""), SEND_S)
            case StopAgent():
                self._stop = "the controller said so"

    def _start(self, start: StartGroup) -> None:
        if self._group is not None:
            self._group.kill()
        self._engine = start.engine
        self._clear()
        try:
            self._group = RankProcesses(self._settings, start, self._address)
        except (OSError, ConfigError) as error:
            self._group = None
            self._dealer.send(GroupExited(start.epoch, 127, f"the ranks could not be started: {error}"), SEND_S)
            return
        if self._group.rendezvous:
            self._dealer.send(GroupStarted(start.epoch, self._group.rendezvous), SEND_S)

    def _look_after_group(self) -> None:
        if self._group is None:
            return
        self._group.forward_output()
        # Asked first, so that the rank which ended the group is always told of before the group's end is.
        ended = self._group.exit_code() is not None
        for rank, pid in self._group.ended_ranks():
            self._dealer.send(RankExited(self._group.epoch, rank, self._group.why_ended(pid)), SEND_S)
        if ended:
            self._end_group()
        _reap(keep=self._group)

    def _end_group(self) -> None:
        assert self._group is not None
        group, self._group = self._group, None
        why = group.why_ended()  # before it is killed from here
        code, tail = group.kill()
        _reap()
        self._dealer.send(GroupExited(group.epoch, code, tail, why), SEND_S)


def _reap(keep: RankProcesses | None = None) -> None:
    """Wait for adopted processes that have ended, so that none stays as a zombie."""
    own = keep.process_ids if keep is not None else set()
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if ended.si_pid in own:
                return
            os.waitpid(ended.si_pid, os.WNOHANG)

"""The controller's process: its two sockets, its clock, its signals, and the agent of this machine."""

import contextlib
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

import structlog
import zmq

from dist_attn.control.controller import Controller
from dist_attn.control.processes import PrivateFolder, held, remove_left_over
from dist_attn.control.ranks import child_environment
from dist_attn.control.settings import ControlSettings
from dist_attn.control.state_files import StateFiles
from dist_attn.control.store_workers import StoreWorkers
from dist_attn.errors import ConfigError, WireError
from dist_attn.log_lines import say
from dist_attn.rank_link.tether import parent_is_gone
from dist_attn.settings import DataFolder
from dist_attn.wire.curve import ServerKeys, admit_listed
from dist_attn.wire.sockets import Router, agent_identity

TURN_S = 0.02  # while requests are open
IDLE_TURN_S = 0.2
MESSAGES_PER_TURN = 256  # so that a flood on one socket cannot keep the other one waiting
AGENT_RESTART_S = 3.0  # between two starts of the agent
MARGIN_S = 1.0  # for a controller whose parent was killed to see that

log = structlog.get_logger("dist_attn.control")


def run_controller(settings: ControlSettings) -> int:
    """Serve API processes until SIGTERM, SIGINT or the death of the parent; prints one line when it listens.

    Raises: ConfigError if an address cannot be used.
    """
    if not settings.api_address:
        raise ConfigError("api_address is not set; give --api-address, or see --help")
    if settings.rank_address:
        return _listen(settings, settings.rank_address)
    # A private folder: no other user may connect, and its path is short, which the path of a socket has to be.
    folder = PrivateFolder()
    try:
        return _listen(settings, f"ipc://{folder.path}/ranks")
    finally:
        folder.remove()


def _listen(settings: ControlSettings, rank_address: str) -> int:
    with contextlib.ExitStack() as until_closed:
        for address in (settings.api_address, rank_address):
            _hold(until_closed, address, settings.stop_deadline_s + MARGIN_S)
        return _serve(settings, rank_address)


def _hold(until_closed: contextlib.ExitStack, address: str, patience_s: float) -> None:
    """Let no other controller bind the socket's file, as ZeroMQ would let it, and remove the file at the end.

    A controller that is about to end is waited for.

    Raises: ConfigError where another one listens there.
    """
    scheme, _, place = address.partition("://")
    if scheme == "ipc" and not place.startswith("@"):  # that is no file, and cannot be bound twice
        refusal = f"cannot listen on {address}: {{}} does; end it, or choose another address"
        lock = held(Path(f"{place}.lock"), f"the controller with process id {os.getpid()}", refusal, patience_s)
        with contextlib.suppress(OSError):  # of which the socket will tell
            until_closed.enter_context(lock)
        until_closed.callback(Path(place).unlink, missing_ok=True)


def _serve(settings: ControlSettings, rank_address: str) -> int:
    api_keys = ServerKeys.find(settings.keys_dir, "api", settings.api_address)
    agent_keys = ServerKeys.find(settings.keys_dir, "agent", rank_address)
    listed = settings.keys_dir if api_keys or agent_keys else ""
    context = zmq.Context[zmq.Socket[bytes]](1)
    try:
        with (
            admit_listed(context, listed),
            Router(context, settings.api_address, api_keys) as api,
            Router(context, rank_address, agent_keys) as engine,
            contextlib.closing(StoreWorkers(settings.store_address, settings.reader_deadline_s)) as store,
        ):
            folder = Path(settings.data_dir) / DataFolder.STATES
            with contextlib.closing(StateFiles(folder, store)) as states:
                server = _Server(settings, rank_address, api, engine, states, store)
                say(f"dist-attn controller (pid {os.getpid()}) listens on {settings.api_address}")
                return server.run()
    finally:
        context.term()
        remove_left_over()  # that of a parent which was killed, and of an agent that did not stop in time


def local_address(address: str) -> str:
    """The address by which this machine connects to one that is listened on, which may stand for all addresses."""
    return re.sub(r"^tcp://(\*|0\.0\.0\.0):", "tcp://127.0.0.1:", address)


class _Server:
    def __init__(
        self,
        settings: ControlSettings,
        rank_address: str,
        api: Router,
        engine: Router,
        states: StateFiles,
        store: StoreWorkers,
    ) -> None:
        self._settings = settings
        self._rank_address = rank_address
        self._api = api
        self._engine = engine
        self._store = store
        self._controller = Controller(settings, api.send, engine.send, states, secrets.token_hex(8))
        self._agent: subprocess.Popen[bytes] | None = None
        self._agent_started = 0.0
        self._stop = ""
        self._hurried = False

    def run(self) -> int:
        """Serve until there is a reason to stop, then end everything that was started."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        addresses = {"api_address": self._settings.api_address, "rank_address": self._rank_address}
        log.debug("controller starts", **addresses, ranks=self._settings.ranks)
        try:
            while not self._stop:
                self._keep_agent()
                self._turn(IDLE_TURN_S if self._controller.idle else TURN_S)
                if parent_is_gone(self._settings.parent):
                    self._stop = "its parent is gone"
            log.info("controller stops", reason=self._stop)
            self._drain()
            self._finish()
        finally:
            if self._agent is not None and self._agent.poll() is None:
                # The kernel kills the agent's ranks with it.
                self._agent.kill()
                self._agent.wait(self._settings.stop_deadline_s)
        return 0

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._hurried = bool(self._stop)  # asked a second time
        self._stop = f"signal {signal.Signals(number).name}"

    def _drain(self) -> None:
        """Let open requests finish, unless no client waits for them or the stop is asked for again."""
        deadline = time.monotonic() + self._settings.drain_s
        self._controller.drain()
        while not self._controller.idle and not self._hurried and time.monotonic() < deadline:
            if parent_is_gone(self._settings.parent):
                return
            self._keep_agent()
            self._turn(TURN_S)

    def _keep_agent(self) -> None:
        """Start this machine's agent, and again when it has ended or, while it is needed, does not answer."""
        if not self._settings.local_agent:
            return
        now = time.monotonic()
        if self._agent is not None and self._agent.poll() is None:
            identity = agent_identity(self._settings.host_name, self._agent.pid)
            if self._controller.agent_is_stuck(identity, now, self._agent_started):
                # Stopped, or stuck: the kernel ends its ranks with it. The next turn finds it ended.
                log.error("agent is silent and will be killed", pid=self._agent.pid)
                self._agent.kill()
            return
        if self._agent is not None and now - self._agent_started < AGENT_RESTART_S:
            return
        if self._agent is not None:
            log.error("agent ended", pid=self._agent.pid, exit_code=self._agent.returncode)
        settings = self._settings.replace(rank_address=local_address(self._rank_address), parent=os.getpid(), store="")
        command = [sys.executable, "-m", "dist_attn.control", "agent", *settings.to_flags()]
        self._agent_started = now
        self._agent = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=child_environment())

    def _turn(self, timeout_s: float) -> None:
        """Wait for messages, take them in, and act."""
        zmq.select([self._api.socket, self._engine.socket, self._store], [], [], timeout_s)
        for socket, take in ((self._engine, self._controller.on_engine), (self._api, self._controller.on_api)):
            for _ in range(MESSAGES_PER_TURN):
                received = socket.receive()
                if received is None:
                    break
                peer, message = received
                if isinstance(message, WireError):
                    log.warning("unreadable message", peer=peer.hex(), error=str(message))
                    if socket is self._api:
                        self._controller.on_unreadable(peer, message, time.monotonic())
                    continue
                take(peer, message, time.monotonic())
        self._store.take_results()
        self._controller.tick(time.monotonic())

    def _finish(self) -> None:
        """Let ranks and agent end by themselves within the deadline."""
        deadline = time.monotonic() + self._settings.stop_deadline_s
        self._controller.stop(time.monotonic())
        while not self._controller.stopped and time.monotonic() < deadline - self._settings.stop_deadline_s / 2:
            self._turn(TURN_S)
        self._controller.dismiss_agents()
        if self._agent is not None:
            self._agent.terminate()  # one that has not connected yet hears nothing of its dismissal
            try:
                self._agent.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                log.error("agent does not stop", pid=self._agent.pid)

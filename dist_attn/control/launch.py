"""Starting a controller, and with it the agent and the ranks, as children that do not outlive this process."""

import contextlib
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Self, final

from dist_attn.control.processes import PrivateFolder, end_process
from dist_attn.control.ranks import child_environment
from dist_attn.control.settings import STORE_VARIABLE, ControlSettings
from dist_attn.errors import EngineError

LISTEN_DEADLINE_S = 60.0
STOP_MARGIN_S = 3.0


class Part:
    """A process of a service, which can be started again when it has ended by itself."""

    def __init__(self, start: Callable[[], subprocess.Popen[bytes]]) -> None:
        self._start = start
        self.process = start()

    def exit_code(self) -> int | None:
        """The exit code of the process, None while it runs."""
        return self.process.poll()

    def restart(self) -> None:
        """Start the process again.

        Raises: OSError if it cannot be started.
        """
        self.process = self._start()


@final
class EngineHandle(Part):
    """A controller that was started, with everything below it; `wait_until_listening` says when it can be reached.

    Agent and ranks die with the controller; one that is started again has the same addresses.
    """

    def __init__(self, settings: ControlSettings, folder: PrivateFolder | None = None) -> None:
        super().__init__(partial(_start_controller, settings))
        self.settings = settings
        self.api_address = settings.api_address
        self._folder = folder

    def restart(self) -> None:
        """Start the controller again, and wait until it listens.

        Raises: EngineError if it does not come up.
        """
        super().restart()
        self.wait_until_listening()

    def wait_until_listening(self) -> None:
        """Return once the controller listens.

        Raises: EngineError if it does not come up.
        """
        assert self.process.stdout is not None
        with contextlib.closing(self.process.stdout) as stdout:
            if not select.select([stdout], [], [], LISTEN_DEADLINE_S)[0]:
                raise EngineError(f"the controller does not listen after {LISTEN_DEADLINE_S:g} s; see stderr")
            if not stdout.readline():
                code = self.process.wait(STOP_MARGIN_S)
                raise EngineError(f"the controller ended with exit code {code} before it listened; see stderr")

    def stop(self) -> int:
        """End the controller, its agent and its ranks, cleanly if there is time; returns the controller's exit code."""
        code = end_process(self.process, self.settings.drain_s + self.settings.stop_deadline_s + STOP_MARGIN_S)
        if self._folder is not None:
            self._folder.remove()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def start_engine(settings: ControlSettings | None = None, /, **fields: Any) -> EngineHandle:
    """Start a controller; it starts the ranks by itself, and `GetStatus` tells when they are ready.

    Give either `settings` or the fields of ControlSettings; without an `api_address` a private one is chosen.
    Everything ends when this process ends, however it does.

    Raises: ConfigError for settings that do not fit, EngineError if the controller does not come up.
    """
    engine = _started(settings or ControlSettings(**fields))
    try:
        engine.wait_until_listening()
    except BaseException:
        engine.stop()
        raise
    return engine


@contextlib.contextmanager
def start_engines(controllers: Sequence[ControlSettings]) -> Iterator[list[EngineHandle]]:
    """Run an engine for each of these settings while the block runs; then all end at the same time.

    They start side by side, and none listens yet.
    """
    with contextlib.ExitStack() as until_stopped:
        engines = [until_stopped.enter_context(_started(settings)) for settings in controllers]
        try:
            yield engines
        finally:
            for engine in engines:
                engine.process.terminate()


def _started(settings: ControlSettings) -> EngineHandle:
    """Start a controller, at private addresses if it has none."""
    folder = None
    try:
        if not settings.api_address:
            folder = PrivateFolder()
            addresses = {name: f"ipc://{folder.path}/{name}" for name in ("ranks", "api")}
            rank_address = settings.rank_address or addresses["ranks"]
            settings = settings.replace(api_address=addresses["api"], rank_address=rank_address)
        return EngineHandle(settings.replace(parent=os.getpid()), folder)
    except BaseException:
        if folder is not None:
            folder.remove()
        raise


def _start_controller(settings: ControlSettings) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "dist_attn.control", "controller", *settings.replace(store="").to_flags()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        env={**child_environment(), STORE_VARIABLE: settings.store},
        start_new_session=True,
    )

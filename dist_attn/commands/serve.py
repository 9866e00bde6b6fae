"""The whole service on this machine: engines and an API, which are started again when they die, and ended together."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from dist_attn.control.launch import EngineHandle, Part, start_engines
from dist_attn.control.memory import too_little
from dist_attn.control.preflight import check_api, check_before_start, check_engine
from dist_attn.control.processes import end_process, held
from dist_attn.control.ranks import child_environment
from dist_attn.control.settings import ControlSettings
from dist_attn.errors import ConfigError, MissingExtraError
from dist_attn.log_lines import say
from dist_attn.settings import DataFolder, Resolved, Settings, read_settings
from dist_attn.shipped import DEFAULT_ENCODER, resolve_model_folder

__all__ = ["api_stop_deadline_s", "serve"]

POLL_S = 0.2
CONTROLLERS = ("controller", "encoder's controller")  # as they are called on stderr
DEATHS_TO_END, DEATHS_WITHIN_S = 4, 60.0
RESTART_S = 1.0  # before the second restart within that time; then as much more before each
REFUSED = 2  # the exit code of a part that has said what it cannot be started over
API_FAREWELL_S = 8.0  # the API's last words to what did not finish, and its exit


def serve(config: Path | None, flags: Mapping[str, Any]) -> int:
    """Run until SIGTERM or Ctrl-C, or until a part ends again and again; returns the exit code.

    `flags` are values of dist_attn.settings by key, None for those that were not given.
    Raises: ModelFolderError for an unknown or damaged model, ConfigError for settings that do not fit, a port that is
        taken, a data folder that cannot be written to or is another service's, and what `check_api` finds missing;
        EngineError when the controller does not come up.
    """
    settings = beside_default(read_settings(config, environment=os.environ, flags=flags))
    try:
        controllers = _checked(settings)
    except MissingExtraError as error:
        raise ConfigError(str(error)) from None  # nothing has been begun: a setting that cannot be met here
    if words := too_little(controllers):
        say(f"dist-attn: {words}; where that is too little, take fewer ranks or a smaller model", sys.stderr)
    with (
        _listen(settings.http.host, settings.http.port) as listener,
        held(settings.data_dir / DataFolder.LOCK, _whereabouts(listener), _taken(settings.data_dir)),
    ):
        code, last_words = _run(controllers, listener, config, settings)
    if last_words:
        say(f"dist-attn: {last_words}", sys.stderr)
    return code


def _checked(settings: Settings) -> list[ControlSettings]:
    """Check all that a process needs, and make the settings of each controller.

    Raises: as `serve`; MissingExtraError for a package.
    """
    check_api(settings)
    folder = resolve_model_folder(settings.model)
    check_before_start(
        folder=folder,
        host=settings.http.host,
        port=settings.http.port,
        data_dir=settings.data_dir,
        engine=settings.engine,
    )
    controllers = [ControlSettings.of(settings, model=str(folder))]
    if settings.encoder.model:
        controllers.append(ControlSettings.of_encoder(settings))
        check_engine(Path(controllers[1].model), controllers[1], "encoder")
    return controllers


def _run(
    controllers: Sequence[ControlSettings], listener: socket.socket, config: Path | None, settings: Settings
) -> tuple[int, str]:
    """Start all parts, watch them, and end them in order; the exit code and the last words."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with start_engines(controllers) as engines:
        # Ranks take all cores while they start, so the API starts before them; but at an address that others know
        # another controller may still listen.
        early = not any(each.api_address for each in controllers)
        if not early:
            _wait_for(engines)
        api = Part(partial(_start_api, _api_command(engines, config, settings, listener), listener))
        try:
            if early:
                _wait_for(engines)
            return _watch({"API": api, **dict(zip(CONTROLLERS, engines, strict=False))}, stopped)
        finally:
            listener.close()  # no connection is accepted meanwhile
            end_process(api.process, api_stop_deadline_s(settings))


def _wait_for(engines: Sequence[EngineHandle]) -> None:
    """Wait until the controllers listen, and say where."""
    for engine, name in zip(engines, CONTROLLERS, strict=False):
        engine.wait_until_listening()
        say(f"{name} listens on {engine.api_address} for the API")
        if engine.settings.rank_address:
            say(f"{name} listens on {engine.settings.rank_address} for agent and ranks")


def _listen(host: str, port: int) -> socket.socket:
    """Open the API's socket; clients that come while the API is started again wait in its queue."""
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=1024)


def _whereabouts(listener: socket.socket) -> str:
    """The description of this service for another one that comes upon its data folder."""
    host, port = listener.getsockname()[:2]
    place = f"[{host}]" if ":" in host else host
    return f"process {os.getpid()} on {socket.gethostname()} at http://{place}:{port}"


def _taken(data_dir: Path) -> str:
    return f"{data_dir} is the data folder of {{}}; stop that one, or choose another folder with --data-dir"


def beside_default(read: Resolved) -> Settings:
    """The settings, with the encoder that ships beside the model that ships, unless one of them was named."""
    settings = read.settings
    if settings.model is not None or "encoder.model" in read.origins:
        return settings
    encoder = settings.encoder.model_copy(update={"model": DEFAULT_ENCODER})
    return settings.model_copy(update={"encoder": encoder})


def _api_command(
    engines: Sequence[EngineHandle], config: Path | None, settings: Settings, listener: socket.socket
) -> list[str]:
    # File and environment are read again by the API itself, so that nothing secret stands in a command line.
    flags = [f"--config={config}"] if config is not None else []
    writer, *others = engines
    flags += [f"--host={settings.http.host}", f"--port={listener.getsockname()[1]}", f"--listener={listener.fileno()}"]
    flags += [
        f"--api-address={writer.api_address}",
        f"--model={writer.settings.model}",
        f"--data-dir={settings.data_dir}",
        f"--log-level={settings.log_level}",
    ]
    for encoder in others:
        flags += [f"--encoder={encoder.settings.model}", f"--encoder-address={encoder.api_address}"]
    if not others:
        flags.append("--encoder=")  # also where the file names one that a flag has taken away
    tied = [sys.executable, "-m", "dist_attn.rank_link.tether", str(os.getpid())]
    return [*tied, sys.executable, "-m", "dist_attn_service", *flags]


def _start_api(command: Sequence[str], listener: socket.socket) -> subprocess.Popen[bytes]:
    """Start the API at the socket, which stays open between starts."""
    # Its own session: a Ctrl-C in the terminal reaches this process alone, which then ends all parts in order.
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env=child_environment(),
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )


def _watch(parts: Mapping[str, Part], stopped: threading.Event) -> tuple[int, str]:
    """Wait for the end; returns 0 when asked to stop, else the code of a part that ended, and words on it.

    A part that dies is started again. What a controller had open goes on with the next one, over the same connections;
    an API loses its connections and nothing that it has acknowledged. One that dies again and again, or is refused
    what it is started with, ends the service.
    """
    deaths: dict[str, deque[float]] = {name: deque(maxlen=DEATHS_TO_END) for name in parts}
    while not stopped.wait(POLL_S):
        for name, part in parts.items():
            code = part.exit_code()
            if code is None:
                continue
            now, died = time.monotonic(), deaths[name]
            died.append(now)
            lately = sum(now - moment < DEATHS_WITHIN_S for moment in died)
            words = f"the {name} ended with exit code {_shell_code(code)}"
            if code == REFUSED or lately == DEATHS_TO_END:
                often = "; the reason stands above" if code == REFUSED else f", the {lately}th time in a minute"
                return _shell_code(code) or 1, f"{words}{often}; the service ends with it"
            say(f"dist-attn: {words} and is started again", sys.stderr)
            if stopped.wait(RESTART_S * (lately - 1)):
                return 0, ""
            part.restart()
    return 0, ""


def _shell_code(code: int) -> int:
    """Translate the exit code to a shell's: 128 + n for a process that signal n ended."""
    return 128 - code if code < 0 else code


def api_stop_deadline_s(settings: Settings) -> float:
    """The seconds that the API may take to end by itself: it lets open streams finish first."""
    return settings.waits.shutdown_seconds + API_FAREWELL_S

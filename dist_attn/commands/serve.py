"""The whole service on this machine: an engine for each model and an API process, started and ended together."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dist_attn.control.launch import EngineHandle, start_engines
from dist_attn.control.preflight import check_before_start, check_engine
from dist_attn.control.ranks import child_environment
from dist_attn.control.settings import ControlSettings, threads_for
from dist_attn.log_lines import say
from dist_attn.settings import Resolved, Settings, read_settings
from dist_attn.shipped import DEFAULT_ENCODER, resolve_model_folder

__all__ = ["api_stop_deadline_s", "serve"]

POLL_S = 0.2
CONTROLLERS = ("controller", "encoder's controller")  # as they are called on stderr
DEATHS_TO_END, DEATHS_WITHIN_S = 4, 60.0
API_FAREWELL_S = 5.0  # the API's last words to what did not finish, and its exit


def serve(config: Path | None, flags: Mapping[str, Any]) -> int:
    """Run until SIGTERM or Ctrl-C, or until a part ends by itself; the exit code.

    `flags` are values of dist_attn.settings by key, None for those that were not given.
    Raises: ModelFolderError for an unknown or damaged model, ConfigError for settings that do not fit, a port that is
        taken and a data folder that cannot be written to, EngineError when the controller does not come up.
    """
    settings = beside_default(read_settings(config, environment=os.environ, flags=flags))
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
        # Both groups compute at the same time: together they take the threads that one would take by itself.
        here = settings.engine.ranks // settings.engine.agents + controllers[1].ranks
        os.environ.setdefault("OMP_NUM_THREADS", str(threads_for(here)))
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    with start_engines(controllers) as engines:
        for engine, name in zip(engines, CONTROLLERS, strict=False):
            say(f"{name} listens on {engine.api_address} for the API")
            if engine.settings.rank_address:
                say(f"{name} listens on {engine.settings.rank_address} for agent and ranks")
        api = _start_api(engines, config, settings)
        try:
            return _watch(engines, api, stopped)
        finally:
            _stop_api(api, api_stop_deadline_s(settings))


def beside_default(read: Resolved) -> Settings:
    """The settings, with the encoder that ships beside the model that ships, unless one of them was named."""
    settings = read.settings
    if settings.model is not None or "encoder.model" in read.origins:
        return settings
    encoder = settings.encoder.model_copy(update={"model": DEFAULT_ENCODER})
    return settings.model_copy(update={"encoder": encoder})


def _start_api(engines: Sequence[EngineHandle], config: Path | None, settings: Settings) -> subprocess.Popen[bytes]:
    # File and environment are read again by the API itself, so that nothing secret stands in a command line.
    flags = [f"--config={config}"] if config is not None else []
    writer, *others = engines
    flags += [f"--host={settings.http.host}", f"--port={settings.http.port}", f"--api-address={writer.api_address}"]
    flags += [
        f"--model={writer.settings.model}",
        f"--data-dir={settings.data_dir}",
        f"--log-level={settings.log_level}",
    ]
    for encoder in others:
        flags += [f"--encoder={encoder.settings.model}", f"--encoder-address={encoder.api_address}"]
    if not others:
        flags.append("--encoder=")  # also where the file names one that a flag has taken away
    tied = [sys.executable, "-m", "dist_attn.rank_link.tether", str(os.getpid())]
    command = [*tied, sys.executable, "-m", "dist_attn_service", *flags]
    # Its own session: a Ctrl-C in the terminal reaches this process alone, which then ends all parts in order.
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, env=child_environment(), start_new_session=True)


def _watch(engines: Sequence[EngineHandle], api: subprocess.Popen[bytes], stopped: threading.Event) -> int:
    """Wait for the end: 0 when asked to stop, else the code of the part that ended.

    A controller that dies is started again: the API keeps its connections and uploads, and its requests wait for the
    new ranks. One that dies again and again ends the service.
    """
    deaths: list[deque[float]] = [deque(maxlen=DEATHS_TO_END) for _ in engines]
    while not stopped.wait(POLL_S):
        code = api.poll()
        if code is not None:
            say(f"dist-attn: the API ended with exit code {_shell_code(code)}; the service ends with it", sys.stderr)
            return _shell_code(code)
        for engine, died, name in zip(engines, deaths, CONTROLLERS, strict=False):
            code = engine.exit_code()
            if code is None:
                continue
            died.append(time.monotonic())
            say(f"dist-attn: the {name} ended with exit code {code}; see above", sys.stderr)
            if len(died) == DEATHS_TO_END and died[-1] - died[0] < DEATHS_WITHIN_S:
                return code or 1
            engine.restart()
            say(f"dist-attn: the {name} is started again", sys.stderr)
    return 0


def _shell_code(code: int) -> int:
    """The exit code as a shell says it: 128 + n for a process that signal n ended."""
    return 128 - code if code < 0 else code


def api_stop_deadline_s(settings: Settings) -> float:
    """How long the API may take to end by itself: it lets open streams finish first."""
    return settings.waits.shutdown_seconds + API_FAREWELL_S


def _stop_api(api: subprocess.Popen[bytes], deadline_s: float) -> None:
    api.terminate()
    try:
        api.wait(deadline_s)
    except subprocess.TimeoutExpired:
        api.kill()
        api.wait()

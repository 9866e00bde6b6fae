"""`python -m dist_attn_service`: the API process.

Flags for what differs between starts; a file and the environment for all.
"""

import argparse
import asyncio
import gc
import logging
import math
import os
import signal
import socket
import sys
import time
from ipaddress import ip_address
from pathlib import Path

import uvicorn
from fastapi import FastAPI

from dist_attn.errors import CatalogueDamagedError, InputError, StorageError
from dist_attn.settings import read_settings
from dist_attn.wire.curve import check_exposure, open_to_others
from dist_attn.wire.sockets import check_address
from dist_attn_service.app import create_app
from dist_attn_service.base.logs import LibraryLogs, make_log
from dist_attn_service.base.settings import Settings
from dist_attn_service.dependencies import Services
from dist_attn_service.engine.served_model import ServedModel
from dist_attn_service.http.auth import KeyRing
from dist_attn_service.http.limits import RequestLimit
from dist_attn_service.http.protocol import BoundedProtocol, bounded_protocol

__all__ = ["ApiServer", "main", "serve", "server_config"]

USAGE_ERROR = 2
POLL_SECONDS = 0.1
LAST_SECONDS = 4.0  # for clients to read last words; `dist-attn serve` waits a little longer
IDLE_SECONDS = 1.0  # in which a kept-alive connection may carry one more request: it may be on its way already
STARTED = time.monotonic()


class ApiServer(uvicorn.Server):
    """A server that prints where it listens and when the engine is ready, and waits for open requests before it ends.

    Without a `url` it prints nothing.
    """

    def __init__(self, config: uvicorn.Config, app: FastAPI, url: str = "") -> None:
        super().__init__(config)
        self._open_requests: RequestLimit = app.state.open_requests
        self._url = url
        self._announcing: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets=sockets)
        if self.started and self._url:
            self._announcing = asyncio.create_task(self._announce(self.lifespan.state["services"]))

    async def _announce(self, services: Services) -> None:
        """Print what is loaded and where this process listens; then, once every engine is ready, that they are."""
        ids = " and ".join(served.model.id for served in services.models)
        _say(f"loading {ids}, listening on {self._url}  (stop with Ctrl-C)")
        while not all(served.watch.health().ready for served in services.models):  # noqa: ASYNC110 - others make it so
            await asyncio.sleep(POLL_SECONDS)
        where, models = services.settings.data_dir.absolute(), f"model{'s' * (len(services.models) > 1)} {ids}"
        _say(f"ready after {time.monotonic() - STARTED:.1f} s: {self._url}  {models}  data in {where}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen no more, so that proxies take another replica at once; let open requests finish, and those that come
        on open connections, each of which ends with its next answer; end with words what is left then.
        """
        clock = asyncio.get_running_loop().time
        stopped, deadline = clock(), clock() + (self.config.timeout_graceful_shutdown or 0)
        if self._announcing is not None:
            self._announcing.cancel()
        await asyncio.sleep(0)  # so that clients that have connected by now are let in
        for server in self.servers:
            server.close()
        for listener in sockets or []:
            listener.close()
        self._open_requests.stopping = True
        for connection in self._connections:
            connection.last_answer()
        await self._connections_ended(min(deadline, stopped + IDLE_SECONDS))
        for connection in self._connections:
            connection.shutdown()
        while not self.force_exit and clock() < deadline and not await self._open_requests.drained(POLL_SECONDS):
            pass
        self.config.timeout_graceful_shutdown = max(0, math.ceil(deadline - clock()))
        await super().shutdown(sockets=sockets)
        await self._connections_ended(deadline + LAST_SECONDS)

    async def _connections_ended(self, deadline: float) -> None:
        clock = asyncio.get_running_loop().time
        while not self.force_exit and self._connections and clock() < deadline:  # noqa: ASYNC110 - uvicorn tells nobody
            await asyncio.sleep(POLL_SECONDS)

    @property
    def _connections(self) -> list[BoundedProtocol]:
        return [one for one in self.server_state.connections if isinstance(one, BoundedProtocol)]


def _say(line: str) -> None:
    print(f"{line}\n", end="", flush=True)  # in one piece: other processes write to the same pipe


def server_config(settings: Settings, app: FastAPI) -> uvicorn.Config:
    """The configuration with which uvicorn serves the app."""
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=bounded_protocol(
            head_bytes=settings.request_head_bytes,
            head_seconds=settings.request_head_seconds,
            on_refused=app.state.refused,
            stopping=lambda: app.state.open_requests.stopping,
        ),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=settings.keep_alive_seconds,
        timeout_graceful_shutdown=settings.shutdown_seconds,
    )


def serve(settings: Settings, descriptor: int | None = None) -> int:
    """Run until SIGTERM or Ctrl-C; returns the exit code.

    `descriptor` is of a socket that listens already, in the place of one at the settings' host and port.

    Raises: InputError for a model folder or a controller address that cannot be used.
    """
    for of_model in settings.of_models():  # refused before anything is opened
        ServedModel.read(of_model.model, of_model.served_model_name)
        for address in of_model.addresses:
            check_address(address)
            check_exposure(address, settings.keys_dir, insecure=settings.insecure_network)
    try:
        if descriptor is not None:
            listener = socket.socket(fileno=descriptor)
        else:
            family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
            listener = socket.create_server((settings.host, settings.port), family=family, backlog=1024)
    except (OSError, UnicodeError) as error:
        # UnicodeError: a host that is no name, such as one with a part of more than 63 characters
        print(
            f"cannot listen on {settings.host}:{settings.port}: {getattr(error, 'strerror', error)}; choose another "
            "with --host and --port",
            file=sys.stderr,
        )
        return USAGE_ERROR
    host, port = listener.getsockname()[:2]
    log = make_log(level=settings.log_level, form=settings.log_format)
    if KeyRing.read(settings).open and not ip_address(host).is_loopback:
        log.warning(f"{host} is open to the network and asks for no key; see http.api_keys")
    for file in (settings.api_keys_file, settings.admin_keys_file):
        if file is not None and (words := open_to_others(file)):
            log.warning(f"{words}, or whoever reads it can call this service (docs/how-to/secure.md)")
    logging.basicConfig(level=logging.WARNING, handlers=[LibraryLogs(log)])
    app = create_app(settings, log=log)
    place = f"[{host}]" if ":" in host else host
    server = ApiServer(server_config(settings, app), app, f"http://{place}:{port}")
    # The error that keeps the service from starting is printed below; its traceback tells nothing more.
    logging.getLogger("uvicorn.error").addFilter(
        lambda record: not (app.state.cannot_start and record.getMessage().startswith("Traceback"))
    )
    # uvicorn raises the signal again once everything is closed: then this exit is a clean one
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    # All that is loaded by now stays: looking through it for garbage would hold up every request for some 50 ms.
    gc.freeze()
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        return 0
    except SystemExit:  # uvicorn's, when the application has not started
        if not app.state.cannot_start:
            raise
        print(app.state.cannot_start, file=sys.stderr)
        # A store may be within reach again soon; a setting, a model folder or a lost catalogue does not mend itself.
        soon = isinstance(app.state.cannot_start, StorageError)
        return 1 if soon and not isinstance(app.state.cannot_start, CatalogueDamagedError) else USAGE_ERROR
    return 0 if server.started else 1


FLAGS = {
    "host": ("http.host", "address to listen on (default 127.0.0.1)"),
    "port": ("http.port", "port to listen on, 0 for any (default 8000)"),
    "api-address": ("engine.api_address", "ZeroMQ address of the controller"),
    "model": ("model", "model folder"),
    "encoder": ("encoder.model", "folder of a second model, for encodings and embeddings"),
    "encoder-address": ("encoder.api_address", "ZeroMQ address of the second model's controller"),
    "data-dir": ("data_dir", "where uploads, spools and states are kept (default: the user's data folder)"),
    "log-level": ("log_level", "debug, info, warning or error (default info)"),
}


def main(arguments: list[str] | None = None) -> int:
    """Read flags, environment and configuration, then serve."""
    parser = argparse.ArgumentParser(prog="python -m dist_attn_service", description=__doc__, allow_abbrev=False)
    parser.add_argument("--config", type=Path, help="TOML file with settings; `dist-attn config show` lists them")
    for flag, (key, words) in FLAGS.items():
        parser.add_argument(f"--{flag}", dest=key, help=words)
    parser.add_argument("--listener", type=int, help="descriptor of a socket that listens at host and port already")
    flags = vars(parser.parse_args(arguments))
    listener = flags.pop("listener")
    try:
        tree = read_settings(flags.pop("config"), environment=os.environ, flags=flags).settings
        return serve(Settings.of(tree), listener)
    except InputError as error:
        print(error, file=sys.stderr)
        return USAGE_ERROR

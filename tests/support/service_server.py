"""A real service on a real port, in a thread of the test."""

import asyncio
import json
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn.server
from dist_attn_service import api_process
from dist_attn_service.api_process import ApiServer, server_config
from dist_attn_service.app import create_app, stream_limits
from dist_attn_service.base.logs import make_log
from dist_attn_service.base.settings import Settings
from dist_attn_service.base.tracing import Tracing
from dist_attn_service.engine.served_model import ServedModel

from dist_attn.settings import StoreSettings
from dist_attn.text import ByteTokeniser, Tokeniser
from tests.support.fake_engine import HIDDEN, FakeEngine, FakeEnginePort
from tests.support.waiting import PATIENCE_SECONDS, eventually


async def _nap(seconds: float) -> None:
    await asyncio.sleep(min(seconds, 0.01))


# uvicorn and ours look every tenth of a second whether a service is to stop and is done; a thousand tests stop one.
uvicorn.server.asyncio = SimpleNamespace(**{**vars(asyncio), "sleep": _nap})
api_process.POLL_SECONDS = 0.01


def model_folder(folder: Path, tokeniser: Tokeniser | None = None) -> Path:
    """A model folder as far as the service reads it."""
    model = folder / "tiny"
    model.mkdir(parents=True, exist_ok=True)
    tokeniser = tokeniser or ByteTokeniser()
    tokeniser.save(model)
    sizes = {"vocab_size": tokeniser.vocab_size, "hidden_size": HIDDEN}
    (model / "config.json").write_text(json.dumps({**sizes, "kind": "language_model"}))
    return model


@dataclass
class RunningService:
    """Where it listens and what is behind it."""

    port: int
    engine: FakeEngine
    engine_port: FakeEnginePort
    settings: Settings
    log: StringIO
    encoder_port: FakeEnginePort | None = None
    stop: Callable[[], None] = lambda: None  # and do not wait for the end

    @property
    def url(self) -> str:
        """http://host:port"""
        return f"http://127.0.0.1:{self.port}"

    def connect(self) -> socket.socket:
        """A raw connection."""
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_SECONDS)

    def log_lines(self) -> list[dict[str, Any]]:
        """What has been logged so far."""
        return [json.loads(line) for line in self.log.getvalue().splitlines()]

    def logged(self, request_id: str) -> dict[str, Any]:
        """The line of one request, as soon as it is there."""
        found: list[dict[str, Any]] = []

        def look() -> bool:
            found[:] = [
                x for x in self.log_lines() if x.get("request_id") == request_id and x.get("event") == "request"
            ]
            return bool(found)

        eventually(look, f"a log line of {request_id}")
        return found[0]


@contextmanager
def running_service(
    folder: Path,
    engine: FakeEngine | None = None,
    tracing: Tracing | None = None,
    encoder_engine: FakeEngine | None = None,
    **values: Any,
) -> Iterator[RunningService]:
    """Serve from a thread until the block ends; `encoder_engine` is that of a second model, which the values name."""
    engine = engine or FakeEngine()
    if "model" not in values:
        values["model"] = model_folder(folder)
    values.setdefault("shutdown_seconds", 2)
    store = values.pop("store", StoreSettings(address="memory:"))
    if store.address == "memory:":
        folder.mkdir(parents=True, exist_ok=True)
        store = store.model_copy(update={"blobs": tempfile.mkdtemp(prefix="blobs-", dir=folder)})
    settings = Settings(api_address="ipc:///nowhere", data_dir=folder / "data", store=store, **values)
    for one in filter(None, (engine, encoder_engine)):
        one.store.address = settings.store.blobs or settings.store_address
    engine.vocab_size = ServedModel.read(settings.model).vocab_size
    log = StringIO()
    port = FakeEnginePort(engine, stream_limits(settings))
    encoder_port = None if encoder_engine is None else FakeEnginePort(encoder_engine, stream_limits(settings))
    ports = (port,) if encoder_port is None else (port, encoder_port)
    app = create_app(settings, ports, make_log(log, "debug"), tracing)
    listener = socket.create_server(("127.0.0.1", 0))
    server = ApiServer(server_config(settings, app), app)

    def stop() -> None:
        server.should_exit = True

    thread = threading.Thread(target=server.run, args=([listener],), name="service")
    thread.start()
    try:
        eventually(lambda: server.started or not thread.is_alive(), "the service to start")
        place = listener.getsockname()[1]
        yield RunningService(place, engine, port, settings, log, encoder_port, stop)
    finally:
        stop()
        thread.join(PATIENCE_SECONDS)
        listener.close()
        if thread.is_alive():
            raise AssertionError("the service did not stop")

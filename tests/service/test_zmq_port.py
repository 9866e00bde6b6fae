"""What only the ZeroMQ port has: a connection that may be missing, break and come back."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import zmq
from dist_attn_service.api_process import main
from dist_attn_service.base.errors import Code, ServiceError
from dist_attn_service.base.logs import make_log
from dist_attn_service.engine.port import ZmqEnginePort
from dist_attn_service.engine.stream import StreamLimits

from dist_attn.errors import WireError
from dist_attn.wire.curve import ClientKeys, ServerKeys, admit_listed, make_keys
from dist_attn.wire.messages import Accepted, AnyMessage, Credit, GetStatus, OpenWork, RowSpec, Tokens
from dist_attn.wire.sockets import Router
from tests.support.begun import begin_encoding
from tests.support.fake_engine import FakeEngine, fake_controller
from tests.support.programs import free_port
from tests.support.service_server import model_folder

SECONDS = 60


def make_port(address: str) -> ZmqEnginePort:
    """A port that looks often, and does not wait for long for another controller."""
    return ZmqEnginePort(address, StreamLimits(resend_seconds=0.1), make_log(), status_seconds=0.05, stale_seconds=1.5)


async def until_ready(port: ZmqEnginePort, wanted: bool) -> None:
    """Wait for the health to become that."""
    async with asyncio.timeout(SECONDS):
        while port.health().ready is not wanted:  # noqa: ASYNC110 - a port has no event for this
            await asyncio.sleep(0.005)


def test_without_a_controller_nothing_opens(tmp_path: Path) -> None:
    """No controller: not ready, the address is named, and a request is refused at once."""

    async def scenario() -> None:
        port = make_port(f"ipc://{tmp_path}/nobody")
        await port.start()
        assert "nobody" in port.health().reason and not port.health().ready
        with pytest.raises(ServiceError) as refused:
            begin_encoding(port)
        assert (refused.value.status, refused.value.code) == (503, Code.ENGINE_UNREACHABLE)
        await port.close()

    asyncio.run(scenario())


def test_a_controller_that_dies_fails_its_requests_and_may_come_back(tmp_path: Path) -> None:
    """Open requests end with an error when no other one comes in time; a new one at the same address is found again."""
    address = f"ipc://{tmp_path}/c"

    async def scenario() -> None:
        port = make_port(address)
        await port.start()
        with fake_controller(FakeEngine(), address):
            await until_ready(port, True)
            stream = begin_encoding(port)
            await stream.admitted(SECONDS)
        with pytest.raises(ServiceError, match="connection") as broken:
            async with asyncio.timeout(SECONDS):
                await stream.next()
        assert broken.value.status == 503
        stream.close()
        await until_ready(port, False)
        with fake_controller(FakeEngine(), address):
            await until_ready(port, True)
            with begin_encoding(port, RowSpec(window=4)) as again:
                await again.send(np.zeros(4, dtype=np.int32), final=True)
                await again.next()
            await port.close()

    asyncio.run(scenario())


def test_a_controller_that_hangs_is_noticed(tmp_path: Path) -> None:
    """A status that is too old means not ready, with its age."""
    engine = FakeEngine()

    async def scenario() -> None:
        with fake_controller(engine, f"ipc://{tmp_path}/c") as address:
            port = make_port(address)
            await port.start()
            await until_ready(port, True)
            engine.mute_status = True
            await until_ready(port, False)
            assert "has not answered for" in port.health().reason
            await port.close()

    asyncio.run(scenario())


def test_an_answer_that_cannot_be_read_ends_its_request_alone(tmp_path: Path) -> None:
    """Nobody waits for what was in it, and the other requests of the connection go on."""
    address = f"ipc://{tmp_path}/c"

    async def scenario() -> None:
        port = make_port(address)
        await port.start()
        with Router(zmq.Context.instance(), address) as controller:

            async def next_of(kind: type) -> tuple[bytes, AnyMessage | WireError]:
                async with asyncio.timeout(SECONDS):
                    while True:
                        received = controller.receive()
                        if received is not None and isinstance(received[1], kind):
                            return received
                        await asyncio.sleep(0.005)

            await next_of(GetStatus)
            streams = [begin_encoding(port), begin_encoding(port)]
            for stream in streams:
                peer, opened = await next_of(OpenWork)
                assert isinstance(opened, OpenWork) and opened.request_id == stream.request_id
                controller.send(peer, Accepted(opened.request_id))
                controller.send(peer, Credit(opened.request_id, 1 << 60 if stream is streams[0] else 8))
            with pytest.raises(ServiceError, match="could not be read") as broken:
                async with asyncio.timeout(SECONDS):
                    await streams[0].next()
            assert broken.value.status == 500
            await streams[1].send(np.zeros(4, dtype=np.int32), final=True)
            assert isinstance((await next_of(Tokens))[1], Tokens)
            for stream in streams:
                stream.close()
            await port.close()

    asyncio.run(scenario())


def test_keys_that_do_not_fit_are_said(tmp_path: Path) -> None:
    """A controller that does not know this API's key: not ready, and the reason speaks of keys, not of the network."""
    make_keys(tmp_path / "ours")
    make_keys(tmp_path / "theirs")
    address = f"tcp://127.0.0.1:{free_port()}"

    async def scenario() -> str:
        keys = ClientKeys.find(str(tmp_path / "ours"), "api", address)
        port = ZmqEnginePort(address, StreamLimits(), make_log(), keys=keys)
        await port.start()
        async with asyncio.timeout(SECONDS):
            while "keys" not in port.health().reason:  # noqa: ASYNC110 - a port has no event for this
                await asyncio.sleep(0.005)
        await port.close()
        return port.health().reason

    context = zmq.Context()
    theirs = str(tmp_path / "theirs")
    with admit_listed(context, theirs), Router(context, address, ServerKeys.find(theirs, "api", address)):
        assert "engine.keys_dir" in asyncio.run(scenario())
    context.term()


def test_a_controller_on_a_network_needs_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An API that would speak to another host in the clear does not start, and says what to set."""
    assert main([f"--model={model_folder(tmp_path)}", "--api-address=tcp://engine:5555", "--port=0"]) == 2
    assert "engine.keys_dir" in capsys.readouterr().err

"""Several engines of one model: their addresses, and which of them gets a request."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import msgspec
import pytest
from dist_attn_service.app import _connections, create_app
from dist_attn_service.base.errors import EngineUnavailable, ServiceError
from dist_attn_service.base.logs import make_log
from dist_attn_service.base.parsing import RequestTerms
from dist_attn_service.base.settings import Settings
from dist_attn_service.completions.prepared import prepare
from dist_attn_service.dependencies import ModelServices
from dist_attn_service.engine.pool import EnginePool
from dist_attn_service.engine.resending import GivenMemory
from dist_attn_service.engine.served_model import ServedModel
from dist_attn_service.engine.stream import EngineStream
from dist_attn_service.engine.watch import EngineWatch
from dist_attn_service.schemas.completions import CompletionRequest

from dist_attn.errors import ConfigError
from dist_attn.settings import EncoderSettings
from dist_attn.wire.messages import AnyMessage, BeginState, Checkpoint, OpenWork, RowSpec
from dist_attn.wire.sockets import check_address
from tests.support.begun import begin_encoding, begin_session
from tests.support.fake_engine import FakeEngine, FakeEnginePort, fake_controller
from tests.support.fake_sessions import MANIFEST
from tests.support.opening import is_opening
from tests.support.service_server import model_folder
from tests.support.waiting import until

SECONDS = 60
ENCODING = OpenWork("", rows=RowSpec())
OTHER = msgspec.structs.replace(MANIFEST, model=msgspec.structs.replace(MANIFEST.model, weights="f" * 64))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("ipc:///a, tcp://b:1,ipc:///a,", ("ipc:///a", "tcp://b:1")),
        ("ipc:///with,comma/a,ipc:///with,comma/b", ("ipc:///with,comma/a", "ipc:///with,comma/b")),
    ],
)
def test_addresses_stand_between_commas(given: str, wanted: tuple[str, ...]) -> None:
    """Each counts once; a socket's path may have commas."""
    assert Settings(api_address=given, model=Path("m"), data_dir=Path("d")).addresses == wanted
    assert [check_address(address) for address in wanted] == list(wanted)


@pytest.mark.parametrize("given", [",", " , ", "ipc:///a,nowhere://b", "tcp://a:1,b:2"])
def test_addresses_that_cannot_be_used_are_refused(given: str) -> None:
    """One that is no address is told, also where nothing is left between the commas."""
    with pytest.raises(ConfigError, match="cannot be used"):
        for address in Settings(api_address=given, model=Path("m"), data_dir=Path("d")).addresses:
            check_address(address)


def test_one_engine_beside_a_model_with_several_refuses_as_ever(tmp_path: Path) -> None:
    """Its work does not wait for another engine: there is none."""
    settings = Settings(
        api_address=f"ipc://{tmp_path}/a,ipc://{tmp_path}/b",
        model=model_folder(tmp_path / "writer"),
        encoder=EncoderSettings(
            model=str(model_folder(tmp_path / "encoder")), api_address=f"ipc://{tmp_path}/c", served_model_name=("e",)
        ),
        data_dir=tmp_path / "data",
        status_seconds=0.05,
    )

    async def scenario() -> None:
        several, one = _connections(settings, make_log())
        assert list(several.engines()) == list(settings.addresses) and not one.engines()
        with fake_controller(FakeEngine(refuse="engine_not_ready"), f"ipc://{tmp_path}/c"):
            await one.start()
            await until(lambda: one.health().ready)
            with begin_encoding(one) as stream, pytest.raises(ServiceError, match="refused by the test"):
                await stream.admitted(SECONDS)
            await one.close()

    asyncio.run(scenario())


class Port(FakeEnginePort):
    """One of several ports, in memory."""

    def __init__(self, engine: FakeEngine, address: str) -> None:
        super().__init__(engine, memory=GivenMemory(1 << 20, several=True))
        self.address = address
        self.changed: Callable[[], None] = lambda: None

    load = property(lambda self: len(self._streams))
    held = property(lambda self: self._streams.held)

    def take_over(self, stream: EngineStream) -> None:
        """As the real one."""
        self._streams.take_over(stream, self._post)


def pool_of(*engines: FakeEngine, log: StringIO | None = None) -> EnginePool:
    """A pool of engines called a, b and so on, each in memory."""
    ports = [Port(engine, name) for engine, name in zip(engines, "abc", strict=False)]
    return EnginePool(ports, make_log(log or StringIO(), "info"))


@dataclass
class Changing(FakeEngine):
    """An engine that another model takes the place of after so many requests."""

    after: int = 0

    def handle(self, message: AnyMessage) -> list[AnyMessage]:
        """As ever."""
        self.after -= is_opening(message)
        self.manifest = OTHER if self.after <= 0 else MANIFEST
        return super().handle(message)


def taken(*engines: FakeEngine) -> list[int]:
    """The requests that each engine got."""
    return [sum(map(is_opening, engine.received)) for engine in engines]


def test_a_refused_engine_gets_no_work(tmp_path: Path) -> None:
    """Not even where none is ready: then work waits at one that may become so, and ends with words where none may."""
    settings = Settings(api_address="ipc:///x", model=model_folder(tmp_path), data_dir=tmp_path / "data")

    async def scenario() -> None:
        refused, other = FakeEngine(vocab_size=999), FakeEngine(ready=False, reason="it starts")
        pool = pool_of(refused, other)
        pool.refusal = EngineWatch(pool, ServedModel.read(settings.model), settings).refusal
        await pool.start()
        with begin_encoding(pool):
            assert taken(refused, other) == [0, 1]
        other.vocab_size = 999
        with pytest.raises(EngineUnavailable, match=r"a: the engine runs 'fake' .*; b: it starts"):
            begin_encoding(pool)
        await pool.close()

    asyncio.run(scenario())


def test_requests_wait_for_an_engine_that_loads_beside_one_that_is_refused(tmp_path: Path) -> None:
    """An engine has no vocabulary before it has its model."""
    settings = Settings(api_address="ipc:///x", model=model_folder(tmp_path), data_dir=tmp_path / "data")

    async def scenario() -> None:
        refused, loads = (
            FakeEngine(vocab_size=999),
            FakeEngine(ready=False, reason="loads", hidden_size=0, vocab_size=0),
        )
        pool = pool_of(refused, loads)
        watch = EngineWatch(pool, ServedModel.read(settings.model), settings)
        pool.refusal = watch.refusal
        waiting = asyncio.create_task(watch.until_ready())
        await until(lambda: watch.waiting == 1 or waiting.done())
        loads.ready, loads.hidden_size, loads.vocab_size = True, FakeEngine().hidden_size, FakeEngine().vocab_size
        await asyncio.wait_for(waiting, SECONDS)
        assert pool.health().ready

    asyncio.run(scenario())


def test_an_engine_that_differs_says_so() -> None:
    """Its status tells why it idles, and the log once."""
    log = StringIO()
    engines = FakeEngine(), FakeEngine(), FakeEngine(manifest=OTHER)
    pool = pool_of(*engines, log=log)
    for _ in range(3):
        pool._changed()
    assert [(health.ready, "new work goes to" in health.reason) for health in pool.engines().values()] == [
        (True, False), (True, False), (True, True)
    ]  # fmt: skip
    assert log.getvalue().count("an engine differs") == 1


def test_work_that_is_one_of_several_keeps_to_its_kind() -> None:
    """It goes to engines of that kind alone, also after its own is lost; where there is none it is refused."""

    async def scenario() -> None:
        engines = one, two, _ = FakeEngine(), FakeEngine(), FakeEngine(manifest=OTHER)
        pool = pool_of(*engines)
        await pool.start()
        only = pool.kind()
        assert only is not None and only.manifest == MANIFEST and pool.kind(OTHER).manifest == OTHER
        one.refuse, one.ready = "engine_not_ready", False
        two.ready = False
        with pool.open(ENCODING, only=only) as held, begin_encoding(pool) as free:
            assert taken(*engines) == [1, 0, 1] and held.bound and not free.bound
            await until(lambda: held.held)
            pool._changed()
            assert held.held
            two.ready = True
            pool._changed()
            assert not held.held and taken(*engines) == [1, 1, 1]
        one.manifest = two.manifest = OTHER
        with pytest.raises(EngineUnavailable, match="of the model that the request began with"):
            pool.open(ENCODING, only=only)
        await pool.close()

    asyncio.run(scenario())


def test_an_append_goes_on_once_its_state_is_recorded() -> None:
    """Not before: the store lets go of bytes that it has already, and another engine would look for them."""

    async def scenario() -> None:
        engines = one, _ = FakeEngine(), FakeEngine()
        pool = pool_of(*engines)
        await pool.start()
        with begin_session(pool) as stream:
            stream.deliver(Checkpoint(stream.request_id, 0, 0, "ab", "cd", 9))
            one.ready = not stream.hold()
            pool._changed()
            assert stream.held and taken(*engines) == [1, 0]
            stream.recorded_as(BeginState(0, "ef", "cd", 9))
            pool._changed()
            assert not stream.held and taken(*engines) == [1, 1]
        await pool.close()

    asyncio.run(scenario())


@asynccontextmanager
async def served(folder: Path, *engines: FakeEngine) -> AsyncIterator[ModelServices]:
    """The services of one model with several engines."""
    settings = Settings(api_address="ipc:///x", model=model_folder(folder), data_dir=folder / "data")
    app = create_app(settings, [pool_of(*engines)], make_log(StringIO()))
    async with app.router.lifespan_context(app) as state:
        yield state["services"].models[0]


@pytest.mark.parametrize("kind", ["embeddings", "choices"])
def test_no_answer_is_of_two_models(tmp_path: Path, kind: str) -> None:
    """Where no engine runs the first one's model any more, the request ends with words."""

    async def scenario() -> None:
        engines = Changing(after=3), FakeEngine(manifest=OTHER)
        async with served(tmp_path, *engines) as services:
            with pytest.raises(ServiceError) as raised:
                if kind == "embeddings":
                    await services.embeddings.embed([b"a text"] * 99, "r", RequestTerms())
                else:
                    request = CompletionRequest.model_validate({"prompt": "abc", "n": 5, "max_tokens": 3})
                    prepared = await prepare(services, request, RequestTerms())
                    await services.completions.gather(prepared, "r", counted=lambda _: None)
        assert raised.value.status == 503 and taken(*engines)[1] == 0

    asyncio.run(asyncio.wait_for(scenario(), SECONDS))

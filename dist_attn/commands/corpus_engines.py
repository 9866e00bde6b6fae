"""The workers of `dist-attn encode-corpus`: processes of this machine, or actors of a Ray cluster. No torch."""

import contextlib
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, final

import msgspec

from dist_attn.commands.corpus_parts import CorpusSettings, Unit, UnitReport, WorkerAnswer
from dist_attn.errors import DistAttnError, EngineError, MissingExtraError, extra_hint
from dist_attn.host_limits import compute_environment

SILENT_S = 1800.0  # without a word of a worker that has work
ASK_S = 5.0  # between two questions to actors how far they are
ENCODER = "dist_attn.commands.corpus_encode"


class LostError(Exception):
    """A worker died of a unit, or beside it."""


@final
class LocalEngine:
    """Processes of this machine, which end with this one, each with at most one unit.

    `wait` raises EngineError where workers cannot start or write.
    """

    def __init__(self, settings: CorpusSettings, workers: int, gpus: int) -> None:
        self.size, self._settings, self._gpus = workers, msgspec.json.encode(settings), gpus
        self._free: list[subprocess.Popen[bytes]] = []
        self._busy = selectors.DefaultSelector()
        self._started, self._began = 0, set[int]()

    def submit(self, unit: Unit) -> None:
        """Write the unit to a worker, which is started where none is free."""
        worker = self._free.pop() if self._free else self._start()
        # A worker reads its unit when it has loaded its model; meanwhile others are started.
        threading.Thread(target=_say, args=(worker, msgspec.json.encode(unit)), daemon=True).start()
        assert worker.stdout is not None
        self._busy.register(worker.stdout, selectors.EVENT_READ, (worker, unit))

    def wait(self) -> tuple[Unit, WorkerAnswer | LostError]:
        """Read the next line of a worker that has work."""
        ready = self._busy.select(SILENT_S)
        key = ready[0][0] if ready else next(iter(self._busy.get_map().values()))
        worker, unit = key.data
        line = worker.stdout.raw.readline() if ready else b""  # no more than a line, of which `select` would not know
        answer = msgspec.json.decode(line, type=WorkerAnswer) if line.endswith(b"\n") else None
        if answer is None or answer.report:
            self._busy.unregister(key.fileobj)
        if answer is None:
            words = f"its worker ended ({_end(worker)})" if ready else f"its worker was silent for {SILENT_S:g} s"
            _end(worker)
            if worker.pid in self._began:
                return unit, LostError(words)
            raise EngineError(f"workers cannot start: {words}")
        if answer.error:
            raise EngineError(answer.error)
        self._began.add(worker.pid)
        if answer.report:
            self._free.append(worker)
        return unit, answer

    def close(self) -> None:
        """Kill what still works."""
        for worker in [*self._free, *(key.data[0] for key in self._busy.get_map().values())]:
            _end(worker)

    def _start(self) -> "subprocess.Popen[bytes]":
        tied = [sys.executable, "-P", "-m", "dist_attn.rank_link.tether", str(os.getpid())]
        own = {"CUDA_VISIBLE_DEVICES": str(self._started % self._gpus)} if self._gpus > 1 and self.size > 1 else {}
        self._started += 1
        # A session of its own: Ctrl-C on the terminal reaches the workers through this process.
        worker = subprocess.Popen(
            [*tied, sys.executable, "-P", "-m", ENCODER], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            env=os.environ | compute_environment(self.size) | own, start_new_session=True,
        )  # fmt: skip
        _say(worker, self._settings)
        return worker


def _say(worker: "subprocess.Popen[bytes]", line: bytes) -> None:
    assert worker.stdin is not None
    with contextlib.suppress(BrokenPipeError, ValueError):  # `wait` sees its end, or `_end` closed it
        worker.stdin.write(line + b"\n")
        worker.stdin.flush()


def _end(worker: "subprocess.Popen[bytes]") -> int:
    worker.kill()
    with contextlib.suppress(BrokenPipeError), worker:  # closes its pipes, with what it has not read
        worker.wait()
    return worker.returncode


@final
class RayEngine:
    """Actors of a Ray cluster, or of one that is started here, with the methods of `LocalEngine`."""

    def __init__(self, settings: CorpusSettings, workers: int, address: str | None) -> None:
        try:
            import ray
        except ImportError:
            raise MissingExtraError(f"--engine ray needs Ray, which is not installed: {extra_hint('ray')}") from None
        from dist_attn.commands.corpus_encode import CorpusEncoder

        alone = {} if address else {"num_cpus": workers, "include_dashboard": False}
        ray.init(address, log_to_driver=False, **alone)
        gpus = 0 if settings.device == "cpu" or not ray.cluster_resources().get("GPU") else 1
        made = ray.remote(num_cpus=1, num_gpus=gpus, max_concurrency=2)(CorpusEncoder)  # it tells while it works
        threads = {"env_vars": {"OMP_NUM_THREADS": "1"}}
        self._make: Callable[[], Any] = partial(made.options(runtime_env=threads).remote, msgspec.json.encode(settings))
        self.size, self._ray = workers, ray
        self._free: list[Any] = []
        self._busy: dict[Any, tuple[Any, Unit]] = {}
        self._rooms: dict[Any, Any] = {}  # of each actor what is there once it has started
        self._done: dict[Any, int] = {}  # of each actor's unit

    def submit(self, unit: Unit) -> None:
        """Call an actor, which is made where none is free."""
        actor = self._free.pop() if self._free else self._make()
        self._rooms.setdefault(actor, actor.__ray_ready__.remote())
        self._done[actor] = 0
        self._busy[actor.encode.remote(msgspec.json.encode(unit))] = actor, unit

    def wait(self) -> tuple[Unit, WorkerAnswer | LostError]:
        """Wait for the first call that is done or goes on; an actor that finds no room meanwhile is given up."""
        until = time.monotonic() + SILENT_S
        while not (done := self._ray.wait(list(self._busy), num_returns=1, timeout=ASK_S)[0]):
            started, _ = self._ray.wait([*self._rooms.values()], num_returns=len(self._rooms), timeout=0)
            if (answer := self._further(started)) is not None:
                return answer
            if time.monotonic() < until:
                continue
            roomless = [ref for ref, (actor, _) in self._busy.items() if self._rooms[actor] not in started]
            if roomless and not started:
                raise EngineError(f"workers cannot start: the Ray cluster has had no room for {SILENT_S:g} s")
            actor, unit = self._busy.pop((roomless or list(self._busy))[0])
            self._ray.kill(actor)
            silent = f"its worker was silent for {SILENT_S:g} s"
            return unit, LostError("the Ray cluster had no room for its worker" if roomless else silent)
        (first,) = done
        actor, unit = self._busy.pop(first)
        try:
            report = msgspec.json.decode(self._ray.get(first), type=UnitReport)
        except self._ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, DistAttnError | OSError) or "__init__" in str(error):
                raise EngineError(f"workers cannot start or write: {cause or str(error).splitlines()[-1]}") from None
            self._ray.kill(actor)
            return unit, LostError(f"its worker ended ({cause or type(error).__name__})")
        self._free.append(actor)
        return unit, WorkerAnswer(report=report)

    def _further(self, started: Sequence[Any]) -> tuple[Unit, WorkerAnswer] | None:
        """A unit of which more is done than before, and how much."""
        asked = {one[0].done.remote(): one for one in self._busy.values() if self._rooms[one[0]] in started}
        answered, _ = self._ray.wait(list(asked), num_returns=len(asked), timeout=ASK_S) if asked else ([], [])
        for ref in answered:
            actor, unit = asked[ref]
            with contextlib.suppress(self._ray.exceptions.RayError):  # the call for its rows tells of its end
                if (done := self._ray.get(ref)) > self._done[actor]:
                    self._done[actor] = done
                    return unit, WorkerAnswer(done)
        return None

    def close(self) -> None:
        """Leave the cluster, whose actors of this job end."""
        self._ray.shutdown()


Engine = LocalEngine | RayEngine

"""States with sound digests and wild values, in the ranks: each is refused in words, or gone on from without an error.

    python -m tests.fuzz.wild_states --inputs 100000

Positions, shapes, types, numbers and what a state says of itself are drawn anew; models of every kind restore the
states, read and draw on from them, and save them again.
"""

import io
import math
import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import torch

from dist_attn.comm.local import LocalCommunicator
from dist_attn.errors import WireError
from dist_attn.generation import computation_of
from dist_attn.rank.decode_slots import SLOTS
from dist_attn.rank.executor import ModelExecutor
from dist_attn.rank.worker import ReceivedStates, perform
from dist_attn.rank_link.heartbeat import Pulse
from dist_attn.wire.manifest import Manifest
from dist_attn.wire.messages import SamplingSpec
from dist_attn.wire.rank_messages import (
    DecodeEntry,
    DecodeOp,
    OpenOp,
    PrefillOp,
    RequestFault,
    SavedState,
    SaveOp,
    StatePart,
    Step,
)
from dist_attn.wire.snapshot import SnapshotParser, largest_snapshot, pack_snapshot, read_snapshot
from dist_attn.wire.specs import LONGEST_TEXT
from tests.fuzz.running import main
from tests.support.model_cases import MODEL_CASES, small_model
from tests.support.snapshots import manifest, mutate

__all__ = ["go_on", "run", "sound_states", "wild"]

POSITIONS = (
    *(0, 1, 2, 63, 64, 511, 512, 513, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 40, 1 << 51),
    *(LONGEST_TEXT + more for more in (-4096, -20, -5, -3, -2, -1, 0, 1)),
    *((1 << 53) - 1, 1 << 53),
)
NUMBERS = (0.0, -0.0, 1.0, -1.0, math.nan, math.inf, -math.inf, 1e-45, -1e-40, 1e-38, 3.4e38, -3.4e38, 1e20, 0.5, 1e9)
TYPES = (np.bool_, np.int32, np.int64, np.uint16, np.float16, np.float32, np.float64, np.complex64, np.complex128)
Arrays = dict[str, np.ndarray[Any, Any]]


def wild(sound: bytes, rng: random.Random) -> bytes:
    """Another snapshot, whose digests are right."""
    if rng.random() < 0.15:
        return mutate(sound, rng)
    snapshot = read_snapshot(io.BytesIO(sound))
    header, arrays = snapshot.header, dict(snapshot.arrays)
    position = rng.choice(POSITIONS) if rng.random() < 0.5 else header.position
    described = _told_otherwise(header.manifest, rng) if rng.random() < 0.2 else header.manifest
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        rng.choice((_numbers, _numbers, _numbers, _shape, _type, _which))(arrays, rng)
    storage = rng.choice(("exact", "exact", "bf16", "int8"))
    try:
        return b"".join(pack_snapshot(described, position, arrays.items(), storage=storage).pieces())
    except WireError:  # no file can say so
        return mutate(sound, rng)


def _numbers(arrays: Arrays, rng: random.Random) -> None:
    """Other numbers in some arrays, in all of their places or in some."""
    one = rng.choice(sorted(arrays))
    for name in [one] if rng.random() < 0.7 else sorted(arrays):
        array = arrays[name] = arrays[name].copy()
        if array.dtype.kind in "iu":
            low, high = np.iinfo(array.dtype).min, np.iinfo(array.dtype).max
            value: Any = rng.choice((low, low + 1, 0, 1, high - 1, high))
        else:
            value = rng.choice(NUMBERS)
        with warnings.catch_warnings(action="ignore"):
            if rng.random() < 0.5:
                array[...] = value
            elif array.size:
                array.reshape(-1)[rng.randrange(array.size)] = value


def _shape(arrays: Arrays, rng: random.Random) -> None:
    name = rng.choice(sorted(arrays))
    array = arrays[name]
    match rng.randrange(6) if array.ndim else 3:
        case 0:
            arrays[name] = array.reshape(-1)
        case 1:
            arrays[name] = array.reshape(array.shape + (1,) * min(2, 8 - array.ndim))
        case 2:
            arrays[name] = array.T
        case 3:
            arrays[name] = array[:0] if array.ndim else array.reshape(1)
        case 4:
            arrays[name] = np.concatenate([array] * rng.choice((2, 3)), axis=rng.randrange(array.ndim))
        case _:
            arrays[name] = array[..., : rng.randrange(1 + array.shape[-1])]


def _type(arrays: Arrays, rng: random.Random) -> None:
    name = rng.choice(sorted(arrays))
    with warnings.catch_warnings(action="ignore"):  # of imaginary parts and of numbers that do not fit
        arrays[name] = arrays[name].astype(rng.choice(TYPES))


def _which(arrays: Arrays, rng: random.Random) -> None:
    """One that is missing, in another place or too many."""
    name = rng.choice(sorted(arrays))
    array = arrays.pop(name)
    if not arrays or rng.random() < 0.5:
        layer = rng.randrange(4)
        arrays[f"layers.{layer}.{rng.randrange(8)}"] = array
        ordered = sorted(arrays.items(), key=lambda item: (item[0] != "logits", item[0]))
        arrays.clear()
        arrays.update(ordered)


def _told_otherwise(described: Manifest, rng: random.Random) -> Manifest:
    part = rng.choice(("model", "computed", "computed"))
    fields = msgspec.structs.asdict(getattr(described, part))
    name = rng.choice(sorted(fields))
    if isinstance(fields[name], int) and not isinstance(fields[name], bool):
        fields[name] = rng.choice((1, 2, 7, 511, 1 << 20, 1 << 40))
    elif isinstance(fields[name], str):
        fields[name] = fields[name][::-1]
    return msgspec.structs.replace(described, **{part: type(getattr(described, part))(**fields)})


def sound_states(made: ModelExecutor) -> list[bytes]:
    """States of a model after a few tokens, with their logits."""
    states = []
    for number, length in enumerate((1, 12, 70)):
        made.open(OpenOp(number, None, SamplingSpec(4), None, {}, True))
        made.prefill(PrefillOp(number, 0, [length], (np.arange(length) % 50).astype("<i4").tobytes()))
        saved = made.save(number, snapshot=True)
        assert saved is not None
        states.append(saved[1])
        made.close(number)
    return states


def executor(case: str) -> ModelExecutor:
    """A small model of this kind, whose states can be stored."""
    model = small_model(case)
    computed = computation_of(model, chunk_tokens=512, decode_slots=SLOTS, ranks=1)
    config = model.config
    identity = manifest(vocab_size=config.vocab_size, hidden_size=config.hidden_size, mixers=model.kinds).model
    return ModelExecutor(model, LocalCommunicator(), name="small", manifest=Manifest(identity, computed))


def go_on(made: ModelExecutor, data: bytes, rng: random.Random) -> list[RequestFault]:
    """Restore a state as a rank does, read, draw and save; the faults.

    Raises: WireError for a state that no rank is sent, as the controller refuses it; whatever ends a rank.
    """
    parser = SnapshotParser(max_bytes=largest_snapshot(made.loaded.state_bytes_at(200), made.loaded.vocab_size))
    parser.feed(data)
    header = parser.finish().header
    read, drawn = rng.choice((0, 1, 5, 80)), rng.choice((0, 1, 3))
    if header.manifest.model != (made.loaded.manifest and made.loaded.manifest.model):
        raise WireError("another model's")
    if made.loaded.state_bytes_at(header.position) > 1 << 24 or header.position + read + drawn > LONGEST_TEXT:
        raise WireError("a text that is too long")
    states, pulse, faults = ReceivedStates(1 << 24), Pulse(), list[RequestFault]()
    states.add(StatePart(1, 0, 1, 0, data))
    spec = SamplingSpec(4, temperature=rng.choice((0.0, 1.0)), logprobs=rng.choice((None, 3)), seed=1)
    tokens = (np.arange(read) % 50).astype("<i4").tobytes()
    steps: list[list[Any]] = [
        [OpenOp(1, None, spec, SavedState(1, header.position, 0, len(data), snapshot=True), {}, True)],
        [PrefillOp(1, header.position, [read], tokens)] if read else [],
        *([DecodeOp([DecodeEntry(1)])] for _ in range(drawn)),
        [SaveOp(1, 1, True)],
    ]
    for k, ops in enumerate(steps, 1):
        done = perform(Step(1, k, ops), 0, made, pulse, states, lambda _: None)
        faults += done.faults
        msgspec.msgpack.encode(done)
        if faults:
            break
    made.close(1)
    return faults


def run(inputs: int, seed: int, cases: tuple[str, ...] = tuple(MODEL_CASES)) -> Counter[str]:
    """How many states were gone on from, and how many refused, by the first words.

    Raises: AssertionError for a fault that is no refusal in words; whatever would end a rank.
    """
    rng, outcomes = random.Random(seed), Counter[str]()
    torch.manual_seed(seed)
    for number, case in enumerate(cases):
        made = executor(case)
        sound = sound_states(made)
        for _ in range(inputs * (number + 1) // len(cases) - inputs * number // len(cases)):
            try:
                faults = go_on(made, wild(rng.choice(sound), rng), rng)
            except WireError:
                outcomes["refused before a rank"] += 1
                continue
            for fault in faults:
                assert "cannot go on" not in fault.error, (case, seed, fault)
            outcomes[" ".join(faults[0].error.split()[:4]) if faults else "read"] += 1
    return outcomes


def _by_coverage(data: bytes) -> None:
    rng = random.Random(data)
    run(1, rng.randrange(1 << 30), (rng.choice(tuple(MODEL_CASES)),))


Run = Callable[[int, int], Counter[str]]

if __name__ == "__main__":
    main(__doc__, run, _by_coverage, ["dist_attn.wire.snapshot", "dist_attn.generation"])

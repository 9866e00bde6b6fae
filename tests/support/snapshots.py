"""Small snapshots and manifests, and the ways in which a file of one can be spoilt."""

import hashlib
import random
from copy import deepcopy
from typing import Any

import msgspec
import numpy as np

from dist_attn.wire.manifest import Computation, Manifest, ModelIdentity
from dist_attn.wire.snapshot import MAGIC, PRELUDE, SnapshotFile, Storage, pack_snapshot

__all__ = ["VOCABULARY", "manifest", "mutate", "seal", "small_arrays", "small_snapshot"]

VOCABULARY = 11


def manifest(**changes: Any) -> Manifest:
    """A manifest of three layers; `changes` are fields of either part."""
    model: dict[str, Any] = {
        "weights": "ab" * 32,
        "config": "cd" * 32,
        "tokeniser": None,
        "features": "ef" * 32,
        "feature_seed": 7,
        "hidden_size": 16,
        "vocab_size": VOCABULARY,
        "mixers": ["rfa_gate", "s4d", "softmax"],
        "weight_precision": "float32",
    }
    computed: dict[str, Any] = {
        "chunk_tokens": 512,
        "decode_slots": 8,
        "ranks": 1,
        "threads": 1,
        "device": "cpu",
        "denormals_flushed": True,
        "library_version": "0.1.0",
        "torch_version": "2.9.1+cpu",
    }
    for name, value in changes.items():
        (model if name in model else computed)[name] = value
    return Manifest(ModelIdentity(**model), Computation(**computed))


def small_arrays(seed: int = 0) -> list[tuple[str, np.ndarray[Any, Any]]]:
    """Arrays of every type, an empty one and a scalar among them."""
    rng = np.random.default_rng(seed)
    return [
        ("logits", rng.standard_normal(VOCABULARY).astype(np.float32)),
        ("layers.0.0", rng.standard_normal((2, 8, 20)).astype(np.float32)),
        ("layers.0.1", rng.standard_normal((2, 8))),
        ("layers.0.2", np.array([True, False])),
        ("layers.0.3", np.array(12345678901, dtype=np.int64)),
        ("layers.1.0", (rng.standard_normal((16, 20)) + 1j).astype(np.complex64)),
        ("layers.1.1", np.arange(5, dtype=np.int32)),
        ("layers.2.0", np.zeros((2, 0, 4), dtype=np.float32)),
        ("layers.2.1", rng.standard_normal(3).astype(np.float16)),
        ("layers.2.2", np.array([0x3F80, 0x4000], dtype=np.uint16)),
        ("layers.2.3", rng.standard_normal(2) + 2j),
    ]


def small_snapshot(storage: Storage = "exact", *, seed: int = 0, position: int = 1024) -> SnapshotFile:
    """A snapshot of `small_arrays`."""
    return pack_snapshot(manifest(), position, small_arrays(seed), storage=storage)


def seal(header: object, payload: bytes) -> bytes:
    """A file around any value as its header, with a digest that fits."""
    encoded = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    return PRELUDE.pack(MAGIC, len(encoded), hashlib.sha256(encoded).digest()) + encoded + payload


def mutate(file: bytes, rng: random.Random) -> bytes:
    """Another file: bytes changed, cut or moved, or a header with another value somewhere and digests that fit."""
    if rng.random() < 0.4:
        return _mutate_bytes(file, rng)
    _, length, _ = PRELUDE.unpack_from(file)
    head, payload = file[PRELUDE.size : PRELUDE.size + length], file[PRELUDE.size + length :]
    kind = rng.random()
    if kind < 0.2:
        return seal(_mutate_bytes(head, rng), payload)
    header = msgspec.msgpack.decode(head)
    if kind < 0.5:
        payload = _mutate_bytes(payload, rng)
        at = 0
        for entry in header["arrays"]:
            size = len(payload) // max(1, len(header["arrays"])) if rng.random() < 0.01 else _stored_bytes(entry)
            entry[4] = hashlib.sha256(payload[at : at + size]).digest()
            at += size
        return seal(header, payload)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        _mutate_value(header, rng)
    return seal(header, payload)


def _stored_bytes(entry: list[Any]) -> int:
    numbers = int(np.prod([int(n) for n in entry[2]], dtype=np.float64))
    sizes = {"bool": 1, "i32": 4, "i64": 8, "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8, "c128": 16}
    if entry[3] == "raw":
        return numbers * sizes[entry[1]]
    numbers *= 2 if entry[1] == "c64" else 1
    return 2 * numbers if entry[3] == "bf16" else numbers + 4 * -(-numbers // 64)


def _mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    spoilt = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(spoilt) + 1)
        match rng.randrange(5):
            case 0 if at < len(spoilt):
                spoilt[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(spoilt):
                spoilt[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
            case 2:
                del spoilt[at : at + rng.randrange(1, 40)]
            case 3:
                spoilt[at:at] = rng.randbytes(rng.randrange(1, 40))
            case _:
                del spoilt[at:]
    return bytes(spoilt)


ODD_VALUES = (
    *(None, True, -1, 0, 1, 8, 255, 1 << 31, 1 << 40, 1 << 53, (1 << 64) - 1, 1.5, float("nan"), float("inf")),
    *("", "raw", "int8", "bf16", "f32", "c64", "bool", "logits", "layers.0.0", "layers.2.0", "layers.9999.99", "a\n"),
    *("x" * 300, b"", b"\0" * 32, [], {}),
    *([1 << 40] * 8, [0, 1 << 40, 1 << 40], [1 << 20, 1 << 20], [1] * 9, [[[[]]]]),
)


def _mutate_value(value: Any, rng: random.Random) -> None:
    """Change, remove, add or double one thing somewhere below `value`."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return
    key = rng.choice(keys)
    if isinstance(value[key], dict | list) and rng.random() < 0.85:
        _mutate_value(value[key], rng)
        return
    match rng.randrange(6):
        case 0:
            del value[key]
        case 1 if isinstance(value, dict):
            value[rng.choice(("name", "x", "position"))] = deepcopy(rng.choice(ODD_VALUES))
        case 1:
            value.insert(key, deepcopy(rng.choice((value[key], rng.choice(ODD_VALUES)))))
        case 2 if isinstance(value[key], int) and not isinstance(value[key], bool):
            value[key] = max(-(1 << 63), min((1 << 64) - 1, value[key] + rng.choice((-1, 1, 2, 1000))))
        case 3:
            other = rng.choice(keys)
            value[key], value[other] = value[other], value[key]
        case _:
            value[key] = deepcopy(rng.choice(ODD_VALUES))

"""The file of a state: what goes in comes out bit for bit, and anything else is refused in words before it costs."""

import io
import random
import tracemalloc

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.errors import StateMismatchError, WireError
from dist_attn.wire.compact import decode_compact, encode_compact
from dist_attn.wire.manifest import Manifest, require_same_model, why_other_bits
from dist_attn.wire.snapshot import (
    DEFAULT_MAX_BYTES,
    LEAST_COMPACT,
    MAX_HEADER_BYTES,
    PRELUDE,
    SnapshotParser,
    pack_snapshot,
    read_snapshot,
)
from tests.fuzz.snapshot_files import CAP_BYTES, read_or_refuse, run, seeds
from tests.support.examples import examples
from tests.support.snapshots import manifest, mutate, seal, small_arrays, small_snapshot


def packed(arrays, **options):
    """The bytes of a snapshot of these arrays."""
    return b"".join(pack_snapshot(manifest(), 3, arrays, **options).pieces())


def read(data, **options):
    """The snapshot that these bytes are."""
    return read_snapshot(io.BytesIO(data), **options)


def test_every_type_of_array_comes_back_bit_for_bit():
    """Arrays of all types, empty and scalar ones too, and NaN with its payload, have the same bytes after the trip."""
    arrays = small_arrays()
    odd = np.array([0x7FC12345, 0xFF800000, 0x80000000, 1], dtype=np.uint32).view(np.float32)
    arrays[1] = ("layers.0.0", odd)
    snapshot = read(packed(arrays))
    assert list(snapshot.arrays) == [name for name, _ in arrays]
    for name, array in arrays:
        got = snapshot.arrays[name]
        assert (got.shape, got.dtype, got.tobytes()) == (array.shape, array.dtype, array.tobytes()), name
    assert (snapshot.header.position, snapshot.header.manifest) == (3, manifest())


@examples(30)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=30), st.sampled_from(["exact", "bf16", "int8"]))
def test_it_does_not_matter_how_the_bytes_are_cut(cuts, storage):
    """A file that comes in pieces of any sizes is read as one that comes whole."""
    file = small_snapshot(storage)
    data = b"".join(file.pieces())
    assert len(data) == file.nbytes
    parser, at = SnapshotParser(keep=True), 0
    while at < len(data):
        size = cuts[at % len(cuts)]
        parser.feed(data[at : at + size])
        at += size
    whole, pieces = read(data), parser.finish()
    assert pieces.digest == whole.digest == file.digest
    assert all(np.array_equal(pieces.arrays[name], whole.arrays[name]) for name in whole.arrays)
    assert b"".join(file.pieces(size=13)) == data


def test_equal_states_have_equal_files():
    """Arrays that lie differently in memory, or in the other byte order, make the same bytes."""
    arrays = dict(small_arrays())
    other = {name: np.array(a, order="F").astype(a.dtype.newbyteorder(">")) for name, a in arrays.items()}
    assert packed(arrays.items()) == packed(other.items())
    assert packed(arrays.items()) != packed(small_arrays(1))


def test_every_truncation_and_every_further_byte_is_noticed():
    """A file that ends early at any byte, or has one more, is refused."""
    data = b"".join(small_snapshot().pieces())
    for length in range(0, len(data), 7):
        with pytest.raises(WireError):
            read(data[:length])
    with pytest.raises(WireError, match="follow the end"):
        read(data + b"\0")
    assert read(data).header.position == 1024


def test_every_changed_byte_is_noticed():
    """Whichever byte is changed, the file is refused: no digest covers only a part."""
    data = bytearray(b"".join(small_snapshot().pieces()))
    for at in range(0, len(data), 5):
        data[at] ^= 0x10
        with pytest.raises(WireError):
            read(bytes(data))
        data[at] ^= 0x10
    assert read(bytes(data)).arrays


def changed(**fields):
    """A header with other values in its fields."""
    import msgspec

    data = b"".join(small_snapshot().pieces())
    _, length, _ = PRELUDE.unpack_from(data)
    header = msgspec.msgpack.decode(data[PRELUDE.size : PRELUDE.size + length])
    return seal({**header, **fields}, data[PRELUDE.size + length :])


def entry(name="layers.0.0", dtype="f32", shape=(1,), encoding="raw", digest=b"\0" * 32):
    """One array of a header as it stands in the file."""
    return [name, dtype, list(shape), encoding, digest]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"PK\3\4" + b"\0" * 60, "first bytes"),
        (b"DASTATE\x02" + b"\0" * 60, "format 2"),
        (PRELUDE.pack(b"DASTATE\x01", 1 << 30, b"\0" * 32), "1073741824 bytes was announced"),
        (PRELUDE.pack(b"DASTATE\x01", 3, b"\0" * 32) + b"abc", "damaged"),
        (seal(b"\xc1\xc1", b""), "unreadable"),
        (changed(position=-1), "position"),
        (changed(position=(1 << 52) + 1), "a text has at most 4503599627370496 tokens"),
        (changed(position=1 << 53), "a text has at most"),
        (changed(position=(1 << 53) + 1), "position"),
        (changed(extra=1), "unknown field"),
        (changed(arrays=[entry("../../etc/passwd")]), "arrays\\[0\\]"),
        (changed(arrays=[entry("layers.0.0\n")]), "arrays\\[0\\]"),
        (changed(arrays=[entry("layers.3.0")]), "below 3"),
        (changed(arrays=[entry("layers.0.1")]), "without a gap"),
        (changed(arrays=[entry("layers.1.0"), entry("layers.0.0")]), "go by layer"),
        (changed(arrays=[entry(), entry()]), "without a gap"),
        (changed(arrays=[entry("logits", shape=(4,))]), r"f32 \[11\]"),
        (changed(arrays=[entry(dtype="object")]), "arrays\\[0\\]"),
        (changed(arrays=[entry(shape=[1 << 30, 1 << 10])]), "over the limit"),
        (changed(arrays=[entry(shape=[0, 1 << 40, 1 << 40])]), "larger than any"),
        (changed(arrays=[entry(shape=[1 << 40] * 8)]), "larger than any"),
        (changed(arrays=[entry(encoding="int8")]), "calls itself exact"),
        (changed(storage="int8", arrays=[entry(encoding="bf16")]), "snapshot of int8"),
        (changed(storage="int8", arrays=[entry(dtype="i64", encoding="int8")]), "must be raw"),
        (changed(arrays=[entry(), *[entry(f"layers.0.{n}") for n in range(1, 100)], entry("layers.0.100")]), "arrays"),
    ],
)
def test_what_is_wrong_is_said(data, words):
    """Every kind of malformed file is a WireError with what was given and what is needed, before any array is read."""
    with pytest.raises(WireError, match=words):
        read(data + b"\0" * 8, max_bytes=1 << 20)


def test_a_claim_costs_nothing():
    """A header that claims as much as the limit allows, with nothing behind it, takes only its own memory."""
    claim = DEFAULT_MAX_BYTES // 4
    data = changed(arrays=[entry(shape=[claim])])[:MAX_HEADER_BYTES]
    tracemalloc.start()
    with pytest.raises(WireError, match="bytes are missing"):
        read(data)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_check_alone_keeps_nothing():
    """Checking a large snapshot as it streams by takes less memory than one of its arrays."""
    arrays = [("layers.0.0", np.zeros(1 << 21, dtype=np.float32)), ("layers.0.1", np.ones(1 << 21, dtype=np.float32))]
    file = pack_snapshot(manifest(), 5, arrays)
    parser = SnapshotParser()
    tracemalloc.start()
    for piece in file.pieces():
        parser.feed(piece)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert parser.finish().header.position == 5
    assert peak < 4 << 20


def test_what_would_not_be_read_is_not_written():
    """Layers out of order are refused by the writer, in a reader's words."""
    one = np.zeros(1, np.float32)
    with pytest.raises(WireError, match=r"layers\.0\.0"):
        pack_snapshot(manifest(), 3, [("layers.1.0", one), ("layers.0.0", one)])


def test_too_many_layers_are_refused_when_written():
    """A state whose header does not fit is refused by the writer, not found out by a reader."""
    many = manifest(mixers=["rfa"] * 2000)
    arrays = [(f"layers.{n}.0", np.zeros(1, dtype=np.float32)) for n in range(2000)]
    with pytest.raises(WireError, match="too many layers"):
        pack_snapshot(many, 0, arrays)
    with pytest.raises(WireError, match="cannot be stored"):
        pack_snapshot(manifest(), 0, [("weights", np.zeros(1))])
    with pytest.raises(WireError, match="has type <U"):
        pack_snapshot(manifest(), 0, [("layers.0.0", np.array(["a"]))])


@pytest.mark.parametrize(("storage", "bytes_each"), [("bf16", 2.0), ("int8", 1.0 + 4 / 64)])
def test_compact_storage_is_smaller_and_as_near_as_it_says(storage, bytes_each):
    """bf16 is within 2^-8 of each number and int8 within max / 254 of its block; logits and small arrays stay."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((4, 1000)) * 10.0 ** rng.integers(-5, 5, (4, 1000))).astype(np.float32)
    x[0, :64] = 0.0
    small = rng.standard_normal(LEAST_COMPACT - 1).astype(np.float32)
    logits = rng.standard_normal(11).astype(np.float32)
    arrays = [("logits", logits), ("layers.0.0", x), ("layers.0.1", small)]
    snapshot = read(packed(arrays, storage=storage))
    assert snapshot.header.storage == storage
    assert snapshot.header.arrays[1].stored_bytes <= np.ceil(bytes_each * x.size) + 4
    assert np.array_equal(snapshot.arrays["logits"], logits) and np.array_equal(snapshot.arrays["layers.0.1"], small)
    error = np.abs(snapshot.arrays["layers.0.0"].astype(np.float64) - x).reshape(-1)
    assert error.max() > 0
    if storage == "bf16":
        bound = np.abs(x).reshape(-1) * 2.0**-8
    else:
        blocks = np.zeros(-(-x.size // 64) * 64)
        blocks[: x.size] = np.abs(x).reshape(-1)
        bound = np.repeat(blocks.reshape(-1, 64).max(1) / 254, 64)[: x.size] * (1 + 1e-5)
    assert (error <= bound).all()


@pytest.mark.parametrize("encoding", ["bf16", "int8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, np.finfo(np.float32).max])
def test_numbers_that_compact_storage_cannot_hold_are_refused(encoding, value):
    """NaN, infinities and numbers that would overflow are refused when stored, and their forms when read."""
    x = np.ones(LEAST_COMPACT, dtype=np.float32)
    x[5] = value
    with pytest.raises(WireError, match="store it exactly"):
        encode_compact(x, encoding)
    forged = np.full(2 * 64 if encoding == "bf16" else 68, 0xFF, dtype=np.uint8)
    with pytest.raises(WireError):
        decode_compact(memoryview(forged), encoding, 64)


def test_a_state_of_another_model_is_refused_with_both_values():
    """What differs in the model is named with both values; how the state was computed only changes bits."""
    stored = manifest()
    others = {"weights": "00" * 32, "feature_seed": 8, "mixers": ["rfa", "s4d", "softmax"], "tokeniser": "11" * 32}
    others["weight_precision"] = "int8"
    for name, value in others.items():
        present = manifest(**{name: value})
        with pytest.raises(StateMismatchError) as refused:
            require_same_model(stored.model, present.model)
        words = str(refused.value)
        assert name in words
        assert (str(value) in words) and ("none" in words if name == "tokeniser" else True), words
    require_same_model(stored.model, manifest(ranks=4).model)
    assert why_other_bits(stored.computed, manifest(ranks=4).computed) == "ranks was 1 and is 4"
    assert why_other_bits(stored.computed, stored.computed) == ""
    on_gpu = manifest(kernels="fla_kda (fla 0.6.0)").computed
    assert why_other_bits(on_gpu, stored.computed) == "kernels was fla_kda (fla 0.6.0) and is none"


def test_a_state_without_kernels_is_stored_as_before_there_were_any():
    """Where flash-linear-attention computes nothing, files have the bytes that they had before states told of it."""
    assert b"kernels" not in msgspec.msgpack.encode(manifest(kernels=""))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(manifest()), type=Manifest) == manifest(kernels="")


def test_spoilt_files_are_refused_and_never_crash():
    """Some thousand files with bytes, values and digests changed are refused in words, or are sound as they stand."""
    outcomes = run(4000, seed=1)
    assert sum(outcomes.values()) == 4000
    assert len(outcomes) > 15, outcomes  # many different refusals, so the inputs reach far


@examples(300)
@given(st.binary(max_size=300), st.integers(0, 5), st.integers(0, 1 << 32))
def test_any_bytes_are_read_or_refused(junk, which, seed):
    """Any bytes, alone, behind a sound beginning or as a header with a digest that fits, are refused or sound."""
    sound = seeds()[which]
    for data in (junk, sound[: seed % len(sound)] + junk, seal(junk, b""), mutate(sound, random.Random(seed)) + junk):
        assert read_or_refuse(data) is not None
    assert len(junk) <= CAP_BYTES

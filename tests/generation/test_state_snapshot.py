"""States as files: whoever restores one goes on bit for bit, in a new process too, or is told why not."""

import hashlib
import io
import json
import subprocess
import sys
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from dist_attn.checkpoints import load_model, save_model
from dist_attn.comm import run_simulated
from dist_attn.commands.states import show_state
from dist_attn.errors import InputError, ShapeError, StateMismatchError
from dist_attn.generation import computation_of, identity_of, pack_state, restore_state, state_snapshot
from dist_attn.layout import SequenceLayout
from dist_attn.mixers.softmax import SoftmaxState
from dist_attn.models import ModelState
from dist_attn.ops import KeyValueCache
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.shipped import SHIPPED, without_classes
from dist_attn.wire.manifest import Manifest, why_other_bits
from dist_attn.wire.snapshot import read_snapshot
from tests.support.closeness import assert_close
from tests.support.model_cases import MODEL_CASES, small_model

TOKENS = torch.from_numpy(np.random.default_rng(3).integers(0, 96, 60))
READ = 37
IN_A_NEW_PROCESS = (
    *("gated", "softmax", "key weights", "rg_lru", "rwkv7"),
    *("mlstm", "hybrid, with exact attention"),
)


def manifest(model, folder=None, **changes):
    """What a model and this process say about its states; without a folder, files of no model."""
    computed = computation_of(model, chunk_tokens=512, decode_slots=8, ranks=1)
    if folder is None:
        from tests.support.snapshots import manifest as any_manifest

        identity = any_manifest(vocab_size=96, mixers=["rfa"] * len(model.blocks)).model
    else:
        identity = identity_of(model, folder)
    return Manifest(identity, msgspec.structs.replace(computed, **changes))


@torch.inference_mode()
def read(model, stop=READ):
    """The state after some tokens, and the logits of the next one."""
    logits_BLV, state = model(TOKENS[None, :stop])
    return state, logits_BLV[0, -1]


@torch.inference_mode()
def go_on(model, state):
    """Logits after one token more, and after a block behind it, as bytes."""
    first_BV, state = model.step(TOKENS[READ : READ + 1], state)
    rest_BLV, _ = model(TOKENS[None, READ + 1 :], None, state)
    return first_BV.numpy().tobytes() + rest_BLV.numpy().tobytes()


def written(state, described, **options):
    """The snapshot of a state after a trip through bytes."""
    return read_snapshot(io.BytesIO(b"".join(pack_state(state, described, **options).pieces())))


@pytest.mark.parametrize("case", MODEL_CASES)
def test_every_kind_of_state_goes_on_bit_for_bit(case):
    """Logits after a restore have the bits of a run that was never interrupted, for every model that streams."""
    torch.manual_seed(0)
    model = small_model(case)
    state, logits_V = read(model)
    described = manifest(model)
    restored = restore_state(written(state, described, logits_V=logits_V), model, described)
    assert go_on(model, restored.state) == go_on(model, state)
    assert torch.equal(restored.logits_V, logits_V)
    report = restored.report
    assert (report.restored_position, report.recomputed_tokens, report.bit_exact, report.reason) == (READ, 0, True, "")


RESTORE = """
import hashlib, json, sys
from pathlib import Path
from dist_attn.checkpoints import load_model
from dist_attn.generation import restore_state
from dist_attn.wire.snapshot import read_snapshot
from tests.generation.test_state_snapshot import go_on, manifest

for folder in sys.argv[1:]:
    model = load_model(Path(folder))
    with open(Path(folder) / "state", "rb") as file:
        restored = restore_state(read_snapshot(file), model, manifest(model, Path(folder)))
    digest = hashlib.sha256(go_on(model, restored.state) + restored.logits_V.numpy().tobytes()).hexdigest()
    report = restored.report
    print(json.dumps([report.restored_position, report.recomputed_tokens, report.bit_exact, report.reason, digest]))
"""


@pytest.mark.slow
def test_a_new_process_goes_on_bit_for_bit(tmp_path):
    """A state saved by one process and restored by another: no token is read again, and logits are equal to the bit."""
    check_a_new_process(tmp_path, IN_A_NEW_PROCESS)


def check_a_new_process(tmp_path, cases):
    """What `test_a_new_process_goes_on_bit_for_bit` says, of these models."""
    wanted = []
    for number, case in enumerate(cases):
        folder = tmp_path / str(number)
        torch.manual_seed(number)
        save_model(small_model(case), folder)
        model = load_model(folder)
        state, logits_V = read(model)
        with (folder / "state").open("wb") as file:
            file.writelines(pack_state(state, manifest(model, folder), logits_V=logits_V).pieces())
        digest = hashlib.sha256(go_on(model, state) + logits_V.numpy().tobytes()).hexdigest()
        wanted.append([READ, 0, True, "", digest])
    command = [sys.executable, "-c", RESTORE, *(str(tmp_path / str(n)) for n in range(len(wanted)))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line) for line in done.stdout.splitlines()] == wanted


def test_a_state_goes_into_no_other_model(tmp_path):
    """Other weights, configurations or random matrices are refused, naming what differs and both values."""
    described = []
    for number, seed in enumerate((1, 2)):
        torch.manual_seed(seed)
        save_model(small_model("gated"), tmp_path / str(number))
        model = load_model(tmp_path / str(number))
        described.append(manifest(model, tmp_path / str(number)))
    snapshot = written(read(model)[0], described[0])
    with pytest.raises(StateMismatchError) as refused:
        restore_state(snapshot, model, described[1])
    for one in described:
        assert one.model.weights in str(refused.value)
    assert described[0].model.config == described[1].model.config
    assert described[0].model.mixers == ["rfa_gate", "rfa_gate"]
    assert described[0].model.features is not None


def test_arrays_that_do_not_fit_are_refused():
    """A snapshot with an array missing, added, of another type or another length is refused, naming the array."""
    model = small_model("softmax")
    described = manifest(model)
    snapshot = written(read(model)[0], described)
    keys = snapshot.arrays["layers.1.0"]
    for changed, words in (
        ({"layers.1.0": keys[:, :-1]}, f"layer 1: keys of {READ - 1} tokens and values of {READ}, .* needs {READ}"),
        ({"layers.1.1": keys[:, :-1]}, f"layer 1: keys of {READ} tokens and values of {READ - 1}, .* needs {READ}"),
        ({"layers.1.0": keys[:, :, :-1]}, rf"layers.1.0 .*float32 \[4, {READ}, 15\]; .*\[4, {READ}, 16\]"),
        ({"layers.1.0": keys.astype(np.float64)}, "layers.1.0 of the snapshot is torch.float64"),
        ({"layers.1.3": keys}, "holds 7 arrays, the states of the model here 6"),
    ):
        with pytest.raises(StateMismatchError, match=words):
            restore_state(replace(snapshot, arrays={**snapshot.arrays, **changed}), model, described)
    without = {name: array for name, array in snapshot.arrays.items() if name != "layers.0.2"}
    with pytest.raises(StateMismatchError, match=r"no array layers\.0\.2"):
        restore_state(replace(snapshot, arrays=without), model, described)
    restored = restore_state(snapshot, model, described)
    assert restored.logits_V is None and restored.state.position == READ


def test_a_state_is_valid_at_one_position():
    """Going back is refused; going on says how many tokens are to be read again, and when that costs equal bits."""
    model = small_model("gated")
    described = manifest(model)
    snapshot = written(read(model)[0], described)
    with pytest.raises(InputError, match=f"stands at token {READ} and cannot go back to 36"):
        restore_state(snapshot, model, described, position=36)
    off_grid = restore_state(snapshot, model, described, position=60).report
    assert (off_grid.restored_position, off_grid.recomputed_tokens, off_grid.bit_exact) == (READ, 23, False)
    assert "not on the grid of 512" in off_grid.reason
    described = manifest(model, chunk_tokens=READ)
    on_grid = restore_state(written(read(model)[0], described), model, described, position=60).report
    assert (on_grid.recomputed_tokens, on_grid.bit_exact) == (23, True)


def test_other_circumstances_are_said():
    """A state that other ranks or threads computed goes on without a promise about bits, and says what differs."""
    model = small_model("gated")
    snapshot = written(read(model)[0], manifest(model))
    report = restore_state(snapshot, model, manifest(model, ranks=4, decode_slots=16)).report
    assert (report.bit_exact, report.reason) == (False, "decode_slots was 8 and is 16; ranks was 1 and is 4")


def test_a_library_of_products_is_a_circumstance(monkeypatch):
    """Float32 is multiplied by oneDNN where MKL lacks AVX-512, and rounds otherwise."""
    model, found = small_model("gated"), []
    for lacks in (False, True):
        monkeypatch.setattr(state_snapshot, "mkl_lacks_avx512", lambda lacks=lacks: lacks)
        found.append(manifest(model).computed)
    assert why_other_bits(*found) == f"device was {found[0].device} and is {found[0].device}_onednn"


@pytest.mark.parametrize("storage", ["bf16", "int8"])
@pytest.mark.parametrize("case", ["gated", "softmax"])
def test_compact_states_never_call_themselves_exact(storage, case):
    """A rounded state is smaller, its logits are near, and the report says that and how it was rounded."""
    torch.manual_seed(0)
    model = small_model(case)
    described = manifest(model)
    state, logits_V = read(model)
    exact, compact = (pack_state(state, described, logits_V=logits_V, storage=kind) for kind in ("exact", storage))
    assert compact.nbytes < {"bf16": 0.65, "int8": 0.45}[storage] * exact.nbytes
    restored = restore_state(read_snapshot(io.BytesIO(b"".join(compact.pieces()))), model, described)
    assert (restored.report.bit_exact, restored.report.reason) == (
        False,
        f"the state was stored as {storage}, not exactly",
    )
    got, want = (torch.frombuffer(bytearray(go_on(model, s)), dtype=torch.float32) for s in (restored.state, state))
    assert not torch.equal(got, want)
    assert_close(got.bfloat16(), want.bfloat16())
    assert torch.equal(restored.logits_V, logits_V)


def test_what_is_not_one_whole_state_is_refused():
    """Several sequences, and a cache of which other ranks hold the rest, cannot be packed."""
    model = small_model("softmax")
    described = manifest(model)
    state, _ = read(model)
    with pytest.raises(ShapeError, match="2 sequences"):
        pack_state(ModelState.stack([state, state]), described)
    caches = [replace(layer.cache, blocks=((20, 17),)) for layer in state.layers]
    assert all(isinstance(cache, KeyValueCache) for cache in caches)
    spread = [SoftmaxState(cache, layer.tail_BKD) for cache, layer in zip(caches, state.layers, strict=True)]
    with pytest.raises(InputError, match="one rank's share"):
        pack_state(ModelState(tuple(spread), state.position_B), described)


def test_the_command_shows_a_state_and_checks_it(tmp_path, capsys):
    """`dist-attn state` prints what a sound file holds, and says in one line what is wrong with another."""
    model = small_model("gated")
    file = tmp_path / "session.state"
    state, logits_V = read(model)
    packed = pack_state(state, manifest(model), logits_V=logits_V)
    file.write_bytes(b"".join(packed.pieces()))

    show_state(file, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["position"], told["digest"], told["bytes"]) == (READ, packed.digest, packed.nbytes)
    assert told["arrays"][0] == {"name": "logits", "type": "f32", "shape": [96], "stored_as": "raw"}
    show_state(file, as_json=False)
    shown = capsys.readouterr().out
    assert all(words in shown for words in (str(READ), packed.digest, "layers.1.5", "every digest fits"))
    file.write_bytes(file.read_bytes()[:-1])
    refused = subprocess.run(
        [sys.executable, "-m", "dist_attn", "state", str(file)], capture_output=True, text=True, timeout=60
    )
    assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "1 of its bytes are missing" in refused.stderr


@pytest.mark.parametrize("case", ["gated", "hybrid, twice around"])
def test_a_state_goes_on_over_another_number_of_ranks(case):
    """Ranks that read a text together have equal states, and one rank goes on from them as if it had read alone."""
    model = small_model(case)
    layout = SequenceLayout.from_lengths([20, 0, READ - 20])
    described = manifest(model, ranks=3)

    @torch.inference_mode()
    def body(comm):
        start, stop = layout.range(comm.rank)
        _, state = model.hidden(TOKENS[None, start:stop], ShardedSequenceOps(comm, layout))
        return b"".join(pack_state(state, described).pieces())

    files = run_simulated(body, 3)
    assert files[0] == files[1] == files[2]
    restored = restore_state(read_snapshot(io.BytesIO(files[1])), model, manifest(model))
    assert (restored.report.bit_exact, restored.report.reason) == (False, "ranks was 3 and is 1")
    states = restored.state, read(model)[0]
    got, want = (torch.frombuffer(bytearray(go_on(model, state)), dtype=torch.float32) for state in states)
    assert_close(got, want)


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("writer-12m", "1e76a013736a2352fefb4facbbb638f332ea42fb7315fc8ac2c2ab3eae20b071"),
        ("books-6m", "9716ad268dba6a1ea0aba80da3271238fc1ad3eefd2eb455cb1d5118ca944fff"),
    ],
)
def test_states_of_before_transformers_found_the_classes_go_on(name, digest):
    """What config.json says of classes is no part of a model's identity, which is that of folders without it."""
    assert hashlib.sha256(without_classes((SHIPPED / name / "config.json").read_bytes())).hexdigest() == digest

"""Decoding with rounded weights: streams are the steps, and stored states go to nobody with other weights."""

import io
import threading

import numpy as np
import pytest
import torch

from dist_attn.checkpoints import load_model
from dist_attn.errors import ConfigError, StateMismatchError
from dist_attn.generation import generator_for, identity_of, pack_state, restore_state, sample
from dist_attn.generation.decode import prefill
from dist_attn.model_config.figures import SLOTS
from dist_attn.models import ModelState
from dist_attn.ops.processor import flushes_denormals
from dist_attn.rank.decode_slots import DecodeSlots
from dist_attn.rank.executor import open_executor
from dist_attn.rank_link.heartbeat import Pulse
from dist_attn.rank_link.rank_settings import RankSettings
from dist_attn.wire.manifest import Manifest
from dist_attn.wire.messages import RowSpec, SamplingSpec
from dist_attn.wire.rank_messages import DecodeEntry, Drawn, OpenOp, PrefillOp, RequestFault, SavedState
from dist_attn.wire.snapshot import read_snapshot
from tests.support.models import write_small_folder
from tests.support.snapshots import manifest

PRECISIONS = ("float32", "bfloat16", "int8")
PROMPT = torch.arange(40, dtype=torch.int64)
SPEC = SamplingSpec(30, temperature=0.9, seed=3, logit_bias={256: -100.0})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small model on disk."""
    return write_small_folder(tmp_path_factory.mktemp("models") / "small")


@pytest.fixture(autouse=True)
def as_before():
    """What a rank sets for the whole of its process is taken back here."""
    threads, flushed, rounded = torch.get_num_threads(), flushes_denormals(), torch.is_autocast_enabled("cpu")
    yield
    torch.set_autocast_enabled("cpu", rounded)
    torch.set_num_threads(threads)
    torch.set_flush_denormal(flushed)


def opened(folder, precision, dtype="auto"):
    """The executor of a rank that was told how to hold its weights, and how to compute."""
    settings = RankSettings(
        controller="ipc:///tmp/none", epoch=1, ranks=1, rank=0, model=str(folder), weights=precision, dtype=dtype
    )
    return open_executor(settings, Pulse())


def drawn_in_slots(model, requests, count):
    """What the first of so many requests draws beside the others."""
    slots = DecodeSlots(model, [256])
    for request in range(requests):
        state = prefill(model, PROMPT[request:-1])
        slots.take_in(request, state, SPEC if request == 0 else SamplingSpec(30, temperature=1.0, seed=request))
    tokens = []
    for turn in range(count):
        entries = [DecodeEntry(request, int(PROMPT[-1]) if turn == 0 else None) for request in range(requests)]
        results = {one.request: one for one in slots.draw(entries)}
        assert all(isinstance(one, Drawn) for one in results.values())
        tokens.append(results[0].token)
    return tokens


@pytest.mark.parametrize("precision", PRECISIONS)
@torch.inference_mode()
def test_a_stream_is_the_steps_of_the_same_precision(folder, precision):
    """Sessions side by side draw what steps of the model draw one by one, and nobody's neighbours matter."""
    model = load_model(folder, weights=precision)
    state = ModelState.stack([prefill(model, PROMPT[:-1])] * SLOTS)
    generator, token, want = generator_for(SPEC, 0), int(PROMPT[-1]), []
    for _ in range(12):
        logits_BV, state = model.step(torch.full((SLOTS,), token), state)
        (token,) = sample(logits_BV[:1].float(), [SPEC], [generator])
        want.append(token)
    assert drawn_in_slots(model, 1, 12) == drawn_in_slots(model, 5, 12) == want


def test_a_rank_holds_its_weights_as_it_was_told(folder, capsys):
    """A rank says on stderr what its weights come to, and its manifest says how they are held."""
    for precision in PRECISIONS:
        made = opened(folder, precision)
        assert made.loaded.manifest.model.weight_precision == precision
        said = capsys.readouterr().err
        assert (f"held as {precision}" in said) == (precision != "float32")
        made.shut_down()


def test_a_rank_refuses_them_of_another_kind_of_model(tmp_path):
    """A rank that was started without `serve` says what `serve` says, before it loads anything."""
    (tmp_path / "config.json").write_text('{"kind": "text_encoder"}')
    with pytest.raises(ConfigError, match=r"engine\.weights is int8, and .* holds a text_encoder"):
        opened(tmp_path, "int8")


def test_states_go_to_no_other_precision(folder):
    """A request's stored state is a fault of the request under other weights; under its own it goes on."""
    stored = {}
    for precision in PRECISIONS:
        made = opened(folder, precision)
        made.open(OpenOp(1, None, SPEC, None, {}, True))
        made.prefill(PrefillOp(1, 0, [40], PROMPT.numpy().astype("<i4").tobytes()))
        stored[precision] = made.save(1, snapshot=True)[1]
        made.close(1)
        for other, data in stored.items():
            fault = made.open(OpenOp(1, None, SPEC, SavedState(1, 40, 0, len(data), snapshot=True), {}, True), data)
            if other == precision:
                assert fault is None
            else:
                assert isinstance(fault, RequestFault) and "weight_precision" in fault.error
                assert other in fault.error and precision in fault.error
            made.close(1)


def test_a_file_says_how_the_weights_were_held(folder):
    """The identity differs in nothing else; files of float32 weights are as they were before there was a choice."""
    models = {precision: load_model(folder, weights=precision) for precision in PRECISIONS}
    identities = {precision: identity_of(model, folder) for precision, model in models.items()}
    one, other = identities["float32"], identities["int8"]
    differing = [name for name in one.__struct_fields__ if getattr(one, name) != getattr(other, name)]
    assert differing == ["weight_precision"]
    computed, files = manifest().computed, {}
    for precision, model in models.items():
        state = prefill(model, PROMPT)
        files[precision] = b"".join(pack_state(state, Manifest(identities[precision], computed)).pieces())
    assert b"weight_precision" in files["int8"] and b"weight_precision" not in files["float32"]
    with pytest.raises(StateMismatchError, match="its weight_precision is int8, that of the model here is float32"):
        restore_state(read_snapshot(io.BytesIO(files["int8"])), models["float32"], Manifest(one, computed))


def test_a_rank_computes_in_the_precision_it_was_told(folder, capsys):
    """Rows of bfloat16 products are float32's but for their rounding, and a state says how it was computed."""
    rows = {}

    def read(dtype):
        made = opened(folder, "float32", dtype)
        loaded = made.loaded
        assert (loaded.device, loaded.backend, loaded.manifest.computed.dtype) == (f"cpu, {dtype}", "local", dtype)
        made.open(OpenOp(1, RowSpec("document"), None, None, {}))
        pieces = made.prefill(PrefillOp(1, 0, [40], PROMPT.numpy().astype("<i4").tobytes()))
        rows[dtype] = np.frombuffer(pieces.vectors, "<f4")
        made.shut_down()

    for dtype in ("float32", "bfloat16"):
        rank = threading.Thread(target=read, args=(dtype,))  # a rank keeps its precision for as long as it lives
        rank.start()
        rank.join()
        assert f"device cpu, {dtype}, 1 rank, kernels: " in capsys.readouterr().err
    error = np.abs(rows["float32"] - rows["bfloat16"]).max()
    assert 0 < error < 0.03 * np.abs(rows["float32"]).max()

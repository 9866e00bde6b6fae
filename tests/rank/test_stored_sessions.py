"""Stored sessions on real models: what goes on from a snapshot has the bits of what was never interrupted."""

import io
import json
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from dist_attn.checkpoints import load_model, save_model
from dist_attn.comm import Communicator
from dist_attn.comm.local import LocalCommunicator
from dist_attn.control.scheduler import split
from dist_attn.generation import computation_of
from dist_attn.model_config.figures import SLOTS
from dist_attn.rank.executor import ModelExecutor
from dist_attn.sharded import trials
from dist_attn.wire.manifest import Manifest, report_restore
from dist_attn.wire.messages import RowSpec, SamplingSpec
from dist_attn.wire.rank_messages import DecodeEntry, DecodeOp, Drawn, OpenOp, PrefillOp, RequestFault, SavedState
from dist_attn.wire.snapshot import read_snapshot
from tests.fuzz import wild_states
from tests.support.models import small_config, small_model
from tests.support.ranks import run_ranks
from tests.support.snapshots import manifest

CHUNK = 512
TOKENS = np.random.default_rng(5).integers(0, 250, 2600).astype("<i4")
KINDS = {
    "rfa_gate": {},
    "rfa": {},
    "mamba": {"mixer": {"kind": "mamba", "hidden_size": 16, "state_size": 6}},
    "softmax": {},
    "hybrid": {},
}
WITHOUT_END = {256: -100.0}
SPEC = SamplingSpec(40, temperature=0.9, seed=3, logit_bias=WITHOUT_END)


def executor(comm=None, kind="rfa_gate", model=None):
    """An executor of a small model, the same one each time, whose states can be stored."""
    comm = comm or LocalCommunicator()
    model = model or small_model(small_config(kind, **KINDS.get(kind, {})))
    computed = computation_of(model, chunk_tokens=CHUNK * comm.size, decode_slots=SLOTS, ranks=comm.size)
    identity = manifest(vocab_size=model.vocab_size, hidden_size=16, mixers=["rfa"] * len(model.parts)).model
    return ModelExecutor(model, comm, name="small", end_tokens=[256], manifest=Manifest(identity, computed))


def test_states_tell_which_kernels_came_out_right(monkeypatch):
    """Once trials have ended they name them, and where they differ a restore does not promise equal bits."""
    monkeypatch.setattr(trials, "end_trials", lambda also_right: ["said"])
    monkeypatch.setattr(trials, "found_right", lambda: ["a", "b"])
    monkeypatch.setattr("dist_attn.rank.executor.found_right", lambda: ["a", "b"])
    made = executor()
    before = made.loaded.manifest
    assert made.end_trials() == ["said"]
    assert made.loaded.manifest.model == before.model
    report = report_restore(made.loaded.manifest.computed, before.computed, 512)
    assert (report.bit_exact, report.reason) == (False, "kernels was a; b and is none")


def begin(made, stored=None, *, spec=None, rows=None, draws=0):
    """Open session 1 from the bytes of a state, or from nothing."""
    saved = None
    if stored is not None:
        data, position = stored
        saved = SavedState(1, position, draws, len(data), snapshot=True)
    made.close(1)
    return made.open(OpenOp(1, rows, spec, saved, {}, True), b"" if stored is None else stored[0])


def feed(made, start, stop, comm=None):
    """Feed tokens in blocks that end on the grid, as a controller cuts them; what the rows are."""
    size, rank = (1, 0) if comm is None else (comm.size, comm.rank)
    vectors, at = [], start
    while at < stop:
        edge = min(stop, (at // (CHUNK * size) + 1) * CHUNK * size)
        lengths = split(at, edge - at, size)
        before = at + sum(lengths[:rank])
        own = TOKENS[before : before + lengths[rank]]
        pieces = made.prefill(PrefillOp(1, at, list(lengths), own.tobytes()))
        vectors.append(b"" if pieces is None else pieces.vectors)
        at = edge
    return b"".join(vectors)


def stored(made):
    """The session's state as it is handed out, and where it stands."""
    saved, data = made.save(1, snapshot=True)
    return data, saved.position


def draw(made, count):
    """So many tokens."""
    tokens = []
    for _ in range(count):
        (drawn,) = made.decode(DecodeOp([DecodeEntry(1)]))
        assert isinstance(drawn, Drawn)
        tokens.append(drawn.token)
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_stored_state_goes_on_bit_for_bit(kind):
    """Rows, drawn tokens and the states handed out later, logits with them, are those of a run without interruption."""
    first, second = executor(kind=kind), executor(kind=kind)
    begin(first, spec=SPEC, rows=RowSpec("window", 64))
    feed(first, 0, 1024)
    kept = stored(first)
    begin(second, kept, spec=SPEC, rows=RowSpec("window", 64))
    assert stored(second) == kept
    assert feed(second, 1024, 2600) == feed(first, 1024, 2600)
    assert stored(second) == stored(first)
    assert draw(second, 12) == draw(first, 12)
    assert stored(second) == stored(first)
    assert stored(first)[1] == 2612


@pytest.mark.parametrize(("kind", "position"), [("rfa_gate", 700), ("hybrid", 20)])
def test_a_state_of_an_earlier_version_goes_on(kind, position):
    """States that were written on 25 November 2026 come back to the bit, and the same tokens are drawn from them."""
    kept = np.load(Path(__file__).with_name("states-0.1.0.npz"))
    data, made = kept[kind].tobytes(), executor(kind=kind)
    assert begin(made, (data, position), spec=SPEC) is None
    before, after = (read_snapshot(io.BytesIO(one)).arrays for one in (data, stored(made)[0]))
    assert before.keys() == after.keys() and len(before) > 2
    for name, array in before.items():
        np.testing.assert_array_equal(after[name], array)
    assert draw(made, 12) == kept[f"{kind}_tokens"].tolist()


def test_a_restore_makes_no_pass_of_the_model():
    """Where layers lie on one rank each, a pass of all ranks would stand before every stored state."""
    model = small_model(small_config("rfa_gate"))
    made, passes = executor(model=model), []
    begin(made, spec=SPEC)
    feed(made, 0, 100)
    kept = stored(made)
    model.parts[0].register_forward_hook(lambda *_: passes.append(1))
    begin(made, kept, spec=SPEC)
    assert stored(made)[1] == 100 and not passes


def of_pieces(comm: Communicator, cuts: tuple[int, ...], kind: str) -> bytes:
    """The state after an append that ended at each of the cuts, handed out and gone on from each time."""
    made, kept, grid = executor(comm, kind), None, CHUNK * comm.size
    for start, stop in zip((0, *cuts[:-1]), cuts, strict=True):
        begin(made, kept)
        feed(made, start, stop, comm)
        last = (stop - 1) // grid * grid
        # The rank that has read the last token has its logits; all ranks have the rest.
        holder = max(rank for rank, length in enumerate(split(last, stop - last, comm.size)) if length)
        states = comm.all_gather_text(stored(made)[0].hex())
        kept = (bytes.fromhex(states[holder]), stop)
    return kept[0]


CUTS = {1: (1024, 2048, 2600), 2: (1024, 2048, 2600), 3: (1536, 2600)}


@pytest.mark.parametrize(
    ("place", "ranks", "kind"),
    [("local", 1, "rfa_gate"), ("simulated", 2, "rfa_gate"), ("gloo", 2, "rfa_gate"), ("simulated", 3, "hybrid")],
)
def test_appends_that_meet_on_the_grid_are_one_append(place, ranks, kind):
    """A text in pieces leaves the bits that it leaves at once, logits too, as long as the pieces end on the grid."""
    wanted = run_ranks(place, partial(of_pieces, cuts=(2600,), kind=kind), ranks)
    assert len(set(wanted)) == 1 and b"logits" in wanted[0]
    assert run_ranks(place, partial(of_pieces, cuts=CUTS[ranks], kind=kind), ranks) == wanted


def test_an_append_off_the_grid_goes_on_bit_for_bit():
    """Blocks that begin off the grid end on it, interrupted or not: the same appends leave equal bits."""
    parts, again = executor(), executor()
    begin(parts, spec=SPEC)
    feed(parts, 0, 700)
    begin(again, stored(parts), spec=SPEC)
    feed(again, 700, 1536)
    feed(parts, 700, 1536)
    assert stored(again) == stored(parts)
    assert draw(again, 5) == draw(parts, 5)


def test_drawing_is_the_same_in_one_request_or_two():
    """Tokens drawn after a restore are those that would have come next; the first needs no token, only the logits."""
    once, twice = executor(), executor()
    greedy = SamplingSpec(20, temperature=0.0, logit_bias=WITHOUT_END)
    begin(once, spec=greedy)
    feed(once, 0, 700)
    wanted = draw(once, 14)
    begin(twice, spec=greedy)
    feed(twice, 0, 700)
    first = draw(twice, 5)
    kept = stored(twice)
    fresh = executor()
    begin(fresh, kept, spec=greedy)
    assert first + draw(fresh, 9) == wanted
    assert stored(fresh) == stored(once)


def test_a_replay_feeds_what_was_sent():
    """A state saved between draws goes on with the same random numbers; forced tokens are fed as they were sent."""
    first, second = executor(), executor()
    begin(first, spec=SPEC)
    feed(first, 0, 300)
    draw(first, 6)
    kept, rest = stored(first), draw(first, 8)
    begin(second, kept, spec=SPEC, draws=6)
    again = [second.decode(DecodeOp([DecodeEntry(1, token)]))[0].token for token in rest]
    assert again == rest
    assert stored(second) == stored(first)


def test_the_end_token_is_not_fed():
    """Once it has been drawn the state stays where it is, whatever else is asked for."""
    made = executor()
    begin(made, spec=SamplingSpec(9, temperature=0.0, logit_bias={256: 100.0}))
    feed(made, 0, 300)
    before = stored(made)
    (drawn,) = made.decode(DecodeOp([DecodeEntry(1)]))
    assert drawn.token == 256
    assert made.decode(DecodeOp([DecodeEntry(1)])) == []
    assert stored(made)[1] == 300
    assert stored(made) == before


def test_states_that_do_not_fit_are_faults_of_their_session():
    """A damaged state, one of another shape and one without logits are refused; the rank and other sessions go on."""
    made = executor()
    begin(made, spec=SPEC)
    feed(made, 0, 300)
    data, position = stored(made)
    assert isinstance(begin(made, (data[:-1] + b"x", position)), RequestFault)
    assert made.prefill(PrefillOp(1, position, [5], TOKENS[:5].tobytes())) is None
    assert made.save(1, snapshot=True) is None and made.decode(DecodeOp([DecodeEntry(1)])) == []
    other = executor(kind="mamba")
    fault = begin(other, (data, position))
    assert isinstance(fault, RequestFault) and fault.code == "invalid_state"
    assert begin(made, (data, position), spec=SPEC) is None
    assert len(draw(made, 3)) == 3


PROGRAM = """
import json, sys
from pathlib import Path
from dist_attn.checkpoints import load_model
from tests.rank.test_stored_sessions import begin, draw, executor, feed, stored, SPEC

folder = Path(sys.argv[1])
made = executor(model=load_model(folder))
begin(made, ((folder / "state").read_bytes(), 700), spec=SPEC)
feed(made, 700, 1500)
tokens = draw(made, 10)
print(json.dumps([tokens, stored(made)[0].hex()]))
"""


def test_a_new_process_goes_on_bit_for_bit(tmp_path):
    """Saved, restored by another process, read on and drawn from: tokens, states and logits are equal to the bit."""
    save_model(small_model(small_config("rfa_gate")), tmp_path)
    made = executor(model=load_model(tmp_path))
    begin(made, spec=SPEC)
    feed(made, 0, 700)
    (tmp_path / "state").write_bytes(stored(made)[0])
    feed(made, 700, 1500)
    wanted = [draw(made, 10), stored(made)[0].hex()]
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == wanted


def test_wild_states_are_refused_in_words_or_gone_on_from():
    """With sound digests: no number, shape, type or position ends a rank.

    `python -m tests.fuzz.wild_states` draws as many as are asked for, of models of every kind.
    """
    outcomes = wild_states.run(300, 0, ("gated", "mlstm", "hybrid, with exact attention"))
    assert outcomes["read"] > 50 and outcomes["refused before a rank"] > 50 and len(outcomes) > 8

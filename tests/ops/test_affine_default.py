"""What computes affine recurrences on a GPU by default: what is known of versions and devices, records, and trials."""

import fcntl
import re
import sys
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.mixers import build_mixer
from dist_attn.model_config.mixer import mixer_config_class
from dist_attn.ops import AffineState, LocalSequenceOps, fla_known, local_sequence_ops, trial
from dist_attn.ops.affine import AffineCall, recur_by_chunks
from dist_attn.ops.affine import trial as affine_trial
from dist_attn.ops.affine.implementation import attempt, choose, recurrences_taken, why_not_by_default
from dist_attn.ops.affine.streaming import stream_recurrence
from dist_attn.ops.affine.trial import AffineKind, compared
from dist_attn.ops.fla_known import Asked, Surroundings, surroundings_of, why_known_not
from dist_attn.ops.gpu_record import GpuRecord
from dist_attn.ops.trial import Attempt, tried
from dist_attn.sharded import ShardedSequenceOps, trials
from dist_attn.sharded import affine as sharded_affine
from tests.ops.kernel_table import BEGIN, END, PAGE, section
from tests.support.affine import AffineInputs
from tests.support.fla import fla_adapter
from tests.support.machines import Machine
from tests.support.native import needs_kernels
from tests.support.ranks import run_ranks
from tests.support.waiting import eventually

__all__ = ["fla_adapter"]

RIGHT = "flash-linear-attention's fla_kda bfloat16 forward, 2 x 16 x 16 (fla 0.6.0, Triton 3.7.1)"
LAYOUT = SequenceLayout.from_lengths([7, 0, 5])
H100 = Machine((9, 0), "3.7.1", "0.6.0")
ON = Surroundings("3.7.1", "0.6.0", (9, 0))
RECORD = GpuRecord(driver="570", torch="2.13", triton="3.7.1", commit="abc")


def call_on(device: torch.device, tokens: int = 128, gradients: bool = False, **fields: object) -> AffineCall:
    """A call of the delta rule with a decay for each channel, in bfloat16; `fields` are others."""
    q, k, v = (
        torch.zeros(1, 2, tokens, 16, dtype=torch.bfloat16, device=device, requires_grad=gradients) for _ in range(3)
    )
    decay, beta = torch.zeros(1, 2, tokens, 16, device=device), torch.zeros(1, 2, tokens, device=device)
    return replace(AffineCall(q, k, v, decay, beta_BHL=beta), **fields)


@pytest.mark.parametrize(
    ("asked", "on", "words"),
    [
        ({}, {}, None),
        ({"gradients": True}, {}, None),
        ({"gradients": True}, {"triton": "3.6.0"}, "Hopper GPUs Triton 3.6.0 gets gradients"),
        ({"gradients": True, "operation": "fla_simple_gla"}, {"triton": "3.7.0"}, "Hopper GPUs Triton 3.7.0"),
        ({"gradients": True, "operation": "fla_simple_gla", "gated": False}, {"triton": "3.7.0"}, None),
        ({"gradients": True, "operation": "fla_kda"}, {"triton": "3.6.0"}, None),
        ({"gradients": True}, {"triton": "3.6.0", "capability": (8, 0)}, None),
        ({}, {"triton": "3.6.0"}, None),
        ({}, {"triton": "3.3.1"}, "Triton 3.3.1 is here: 3.4 is the first"),
        ({}, {"fla": "0.4.2"}, "flash-linear-attention 0.4.2 is here: 0.5 is the first"),
        ({"dtype": torch.float16}, {}, "float16's range is too small"),
        ({"dtype": torch.float32}, {}, "float32 as TF32"),
        ({"dtype": torch.float32, "by_name": True}, {}, None),
        ({}, {"capability": (7, 5)}, "older than Ampere"),
        ({}, {"capability": (10, 0)}, "Blackwell GPUs .* Triton 3.7.1"),
        ({}, {"capability": (12, 0), "triton": "3.7.1+git1"}, "Blackwell"),
        ({}, {"capability": (10, 3), "triton": "3.8.0"}, None),
        ({}, {"capability": None}, None),
        ({}, {"fla": "of an unknown version"}, "flash-linear-attention of an unknown version is here: 0.5"),
        ({}, {"triton": "of an unknown version"}, "Triton of an unknown version is here: 3.4"),
    ],
)
def test_what_is_known_against_the_kernels(asked, on, words) -> None:
    """Versions, device, type and gradients decide, in words that name what is at fault."""
    found = why_known_not(
        replace(Asked("fla_gated_delta", torch.bfloat16, gradients=False), **asked), replace(ON, **on)
    )
    if words is None:
        assert found is None
    else:
        assert re.search(words, found or "")


def test_triton_says_its_version_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Triton that is no distribution of that name has a version; one that does not say it is refused by version."""
    monkeypatch.setitem(sys.modules, "triton", found := ModuleType("triton"))
    monkeypatch.setattr(fla_known, "find_spec", lambda name: object())
    found.__version__ = "3.5.1+rocm"
    assert surroundings_of.__wrapped__(torch.device("cpu")).triton == "3.5.1+rocm"
    del found.__version__
    assert surroundings_of.__wrapped__(torch.device("cpu")).triton == "of an unknown version"
    monkeypatch.setattr(fla_known, "find_spec", lambda name: None)
    monkeypatch.setitem(sys.modules, "triton", None)  # importing it is an error
    assert surroundings_of.__wrapped__(torch.device("cpu")).triton == "of an unknown version"


def test_the_kernels_are_the_default_where_they_come_out_right() -> None:
    """On a GPU "auto" takes them, for training too; what a trial finds wrong is said, and streams."""
    for gradients in (False, True):
        with H100.entered():
            assert choose(call_on(H100.device, gradients=gradients)).implementation == "fla"
        with (
            H100.entered(outcome="a state is wrong"),
            pytest.warns(RuntimeWarning, match="a state is wrong; the stream"),
        ):
            choice = choose(call_on(H100.device, gradients=gradients))
            assert (choice.implementation, choice.reason) == ("streaming", "a state is wrong")
            assert choose(call_on(H100.device, gradients=gradients)) == choice  # and is not warned of again


@pytest.mark.parametrize(
    ("machine", "fields", "words"),
    [
        (Machine((9, 0), "3.7.1"), {}, "not installed"),
        (H100, {"tokens": 63}, "there are 63 tokens"),
        (H100, {"read": "before", "beta_BHL": None, "erase": ()}, "before a token that erases"),
        (H100, {"products": torch.float16}, "float16"),
        (Machine((10, 0), "3.7.1", "0.6.0"), {}, "Blackwell"),
    ],
)
def test_what_the_kernels_do_not_compute_streams(machine, fields, words) -> None:
    """The streaming form computes it, and the choice says by name what stands against the kernels; nothing is tried."""
    with machine.entered(outcome="it was tried"):
        call = call_on(machine.device, **fields)
        if call.erase is not None:
            call = replace(call, erase=(call.q_BHLK, call.k_BHLK))
        choice = choose(call)
    assert choice.implementation == "streaming"
    assert words in choice.reason


def test_a_rank_that_is_ready_tries_nothing_more() -> None:
    """Once trials have ended, calls of another kind stream, with one warning, and those of a kind tried as before."""
    with H100.entered():
        assert choose(call_on(H100.device)).implementation == "fla"
        (said,) = trial.end_trials()
        assert said == RIGHT
        assert choose(call_on(H100.device, tokens=900)).implementation == "fla"
        with pytest.warns(RuntimeWarning, match="forward and backward, .* were not tried before this rank was ready"):
            other = choose(call_on(H100.device, gradients=True))
        assert choose(call_on(H100.device, gradients=True)) == other  # and is not warned of again
    assert other.implementation == "streaming"
    assert "not tried before this rank was ready" in other.reason


def test_a_rank_with_few_tokens_tries_too() -> None:
    """Ranks try kernels, and meet, before they exchange anything of a call, however few tokens one has."""
    with H100.entered():
        tried_by_ranks = attempt(call_on(H100.device, tokens=3))
        assert tried_by_ranks is not None
        assert tried_by_ranks.why_not() is None
        assert choose(call_on(H100.device, tokens=3)).implementation == "streaming"
        assert [kind.operation for kind in trial._outcomes] == ["fla_kda"]
    tried_by: list[int] = []

    def on_rank(comm: Communicator) -> None:
        inputs = AffineInputs.random("delta rule", 12, channels=False).leaves(*LAYOUT.range(comm.rank))
        inputs.run(ShardedSequenceOps(comm, LAYOUT))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_affine, "_try_together", lambda sharding, call: tried_by.append(call.tokens))
        run_simulated(on_rank, LAYOUT.size)
    assert sorted(tried_by) == sorted(LAYOUT.lengths)


def tries_longer_than_an_exchange_may_take(folder: Path, comm: Communicator) -> tuple[list[str], float]:
    """Try kernels that are not there; rank 1 comes last, and the others wait. What was overruled."""
    overruled: list[str] = []

    def in_turn() -> str | None:
        if comm.rank == 1:
            eventually(lambda: all((folder / str(rank)).exists() for rank in (0, 2)), "the others to have tried")
        with trial._in_turn():
            time.sleep(1.5 * (comm.rank == 1))
        (folder / str(comm.rank)).touch()
        return "a state is wrong" if comm.rank == 1 else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(folder))
        patch.setattr(trials, "overrule", lambda kind, reason: overruled.append(reason))
        attempts = [Attempt(SMALL, in_turn), Attempt(replace(SMALL, gradients=False), lambda: None)]
        comm.barrier()
        comm.set_deadline(0.3)
        trials.try_together(comm, attempts)
        left_s = comm.timeout_s
        comm.set_deadline(60.0)
        met = comm.traffic.calls
        trials.try_together(comm, attempts)
        assert comm.traffic.calls == met
    return overruled, left_s


def test_ranks_wait_for_trials_and_agree_on_what_they_came_to(tmp_path: Path) -> None:
    """A trial may take longer than an exchange; one that failed on a rank streams on all, and they meet once for it."""
    outcomes = run_ranks("gloo", partial(tries_longer_than_an_exchange_may_take, tmp_path), LAYOUT.size)
    others = (["rank 1: a state is wrong"], 0.3)
    assert outcomes == [others, ([], 0.3), others]


def test_ranks_end_trials_with_what_all_found_right() -> None:
    """Kinds that one rank has not found right stream on all."""
    ended: list[set[str]] = []

    def on_rank(comm: Communicator) -> None:
        trials.end_trials_together(comm)

    with pytest.MonkeyPatch.context() as patch:
        found = iter([["a", "b"], ["b", "c"], ["b"]])
        patch.setattr(trials, "found_right", lambda: next(found))
        patch.setattr(trials, "end_trials", lambda also_right: ended.append(also_right))
        run_simulated(on_rank, 3)
    assert ended == [{"b"}] * 3
    with H100.entered():
        assert choose(call_on(H100.device)).implementation == "fla"
        (right,) = trial.found_right()
        assert right == RIGHT
        trial.end_trials([right])
        assert choose(call_on(H100.device)).implementation == "fla"
        with pytest.warns(RuntimeWarning, match="not come out right on all ranks"):
            trial.end_trials([])
        assert choose(call_on(H100.device)).implementation == "streaming"


def test_processes_of_a_host_measure_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one measures tiles another waits, says so, and not for ever; without a folder each measures for itself."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(trial, "WAIT_S", 0.5)
    monkeypatch.setattr(trial, "TOLD_S", 0.1)
    with trial._in_turn(), (tmp_path / "cache/dist-attn-trials").open("w") as other:
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        said = "for another process that tries kernels .*dist-attn-trials"
        with pytest.warns(RuntimeWarning, match=said), trial._in_turn():  # of another one that waits in vain
            pass
    with (tmp_path / "cache/dist-attn-trials").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache/dist-attn-trials/none"))
    with trial._in_turn():
        pass


def test_deterministic_chunks_take_no_measured_tiles(monkeypatch) -> None:
    """What promises equal bits is the streaming form on a GPU, whose ranks may measure other tiles."""
    asked = []
    monkeypatch.setattr("dist_attn.ops.affine.recurrence.recur", lambda call: asked.append(call) or (call.v_BHLV, None))
    with FakeTensorMode():
        recur_by_chunks(call_on(torch.device("cuda"), tokens=0))
    assert [call.implementation for call in asked] == ["streaming"]


WRONG = replace(RECORD, kernels={"fla_kda bfloat16 1x16 documents=0": "errors of 2"})
OTHER = replace(RECORD, kernels={"fla_gla bfloat16 1x16 documents=0": "errors of 2"})
FAST = replace(RECORD, ratios={"fla_kda bfloat16 forward": {"ours_ms": 1.2, "fla_ms": 1.1}})
SLOW = replace(RECORD, ratios={"fla_kda bfloat16 forward": {"ours_ms": 1.0, "fla_ms": 1.1}})


@pytest.mark.parametrize(
    ("record", "gradients", "words"),
    [
        (None, True, None),
        (RECORD, True, None),
        (WRONG, True, "not come out right on X .*errors of 2"),
        (WRONG, False, None),
        (OTHER, True, None),
        (replace(WRONG, triton="3.6.0"), True, None),
        (FAST, False, None),
        (SLOW, False, "form was faster on X"),
        (SLOW, True, None),
    ],
)
def test_what_a_visit_found_counts_before_a_trial(record, gradients, words) -> None:
    """Kernels that came out wrong or slower on such a GPU, with this Triton and in this case, are not taken."""
    found = why_not_by_default(call_on(torch.device("cpu"), gradients=gradients), ON, "X", record)
    if words is None:
        assert found is None
    else:
        assert re.search(words, found or "")


@pytest.mark.parametrize("kind", ["gated_delta", "kda", "rwkv7", "gla", "lightning", "mamba2"])
def test_the_calls_of_models_are_taken(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixer in bfloat16 hands over what the kernels take, also keys in float32 beside values in bfloat16."""
    calls = []
    run = local_sequence_ops.run_locally

    def noted(call):
        calls.extend([call] if isinstance(call, AffineCall) else [])
        return run(call)

    monkeypatch.setattr(local_sequence_ops, "run_locally", noted)
    mixer = build_mixer(mixer_config_class(kind)(kind=kind, hidden_size=32, num_heads=2))
    with torch.autocast("cpu", torch.bfloat16):
        mixer(torch.randn(1, 128, 32), LocalSequenceOps())
        assert why_not_by_default(calls[0], ON, "X", None) is None


def test_the_first_line_says_what_recurrences_take() -> None:
    """Whoever starts a run is told the version and that trials decide, or what is known against the kernels."""
    with H100.entered():
        assert recurrences_taken(H100.device) == (
            "flash-linear-attention's 0.6.0 in bfloat16, each where its trial comes out right"
        )
    blackwell = Machine((10, 0), "3.7.1", "0.6.0")
    with blackwell.entered():
        assert recurrences_taken(blackwell.device).startswith("torch's operations; on Blackwell")


@needs_kernels
def test_the_table_of_kernels_is_what_operations_choose() -> None:
    """The page about GPUs says which operation takes what; `python -m tests.ops.kernel_table` writes it."""
    _, begin, rest = PAGE.read_text().partition(BEGIN)
    assert begin + rest.partition(END)[0] + END == section()


SMALL = AffineKind(torch.device("cpu"), "fla_gla", torch.float32, (1, 1, 4, 6), packed=False, gradients=True)


def with_fault(fault: str):
    """The streaming form, and what kernels have been seen to do wrong: in a state, in its gradient, in one token."""

    def form(call: AffineCall) -> tuple[torch.Tensor, AffineState]:
        if fault == "memory" and call.tokens > trial.TOKENS:
            raise torch.cuda.OutOfMemoryError
        if fault == "error":
            raise RuntimeError("no kernel image\nis available")
        if fault == "gradient" and call.state is not None:
            s = call.state.s_BHKV
            call = replace(call, state=AffineState(2 * s - s.detach()))
        out, after = stream_recurrence(call)
        scale = torch.ones(out.shape[2], 1)
        scale[-1] = {"token": 0.0, "nan": torch.nan}.get(fault, 1.0)
        return out * scale, AffineState(after.s_BHKV * (1.1 if fault == "state" else 1.0))

    return form


@pytest.mark.usefixtures("fla_adapter")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("", None),
        ("memory", None),
        ("state", "state 0.1"),
        ("gradient", "gradient of s 1)"),
        ("token", "outputs 0."),
        ("nan", "outputs nan"),
        ("error", "failed on this GPU (RuntimeError: no kernel image)"),
    ],
)
def test_a_trial_finds_what_is_wrong(fault: str, words: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output, a state or a gradient that is wrong is named with its error, as is what the kernels raise."""
    monkeypatch.setattr("dist_attn.ops.affine.fla.fla_recurrence", with_fault(fault))
    call = SMALL.call()
    if fault == "memory":  # a call of a model, beside a step
        call = call.with_sequence(tuple(None if x is None else torch.cat([x, x], dim=2) for x in call.sequence))
    found = tried(SMALL, partial(compared, call, SMALL))
    assert (found is None) == (words is None)
    if words is not None:
        assert words in found


@pytest.mark.usefixtures("fla_adapter")
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU rounds products of float32 to TF32")
@pytest.mark.parametrize("operation", ["fla_simple_gla", "fla_gla", "fla_gated_delta", "fla_dplr", "fla_rwkv6"])
def test_a_trial_finds_the_kernels_right(operation, monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients and packed documents, without disturbing random numbers that others draw."""
    if (
        operation != "fla_gla"
    ):  # one has the size of a real trial, two chunks of 64 and a part; here it is one and a part
        for name, value in (("TOKENS", 80), ("STARTS", (30, 70)), ("CLOSED", 66)):
            monkeypatch.setattr(affine_trial, name, value)
    kind = replace(SMALL, operation=operation, packed=True)
    before = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # fla's own of float32, and numpy's of numbers that a mask drops
        assert tried(kind, partial(compared, kind.call(), kind)) is None
    assert torch.equal(torch.get_rng_state(), before)

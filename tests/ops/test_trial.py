"""Trials of Triton's kernels: which calls begin one, what it finds, and what calls take by it."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from dist_attn import feature_maps
from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LinearState, trial
from dist_attn.ops.fla_known import surroundings_of
from dist_attn.ops.linear_attention import LinearCall, choose
from dist_attn.ops.linear_attention import trial as linear_trial
from dist_attn.ops.linear_attention.implementation import (
    Choice,
    choose_attention,
    choose_step,
    kernels_taken,
    why_not_by_default,
)
from dist_attn.ops.linear_attention.trial import LinearKind, compared
from dist_attn.ops.state import steps_in_place
from dist_attn.ops.trial import results_of, tried
from dist_attn.sharded import ShardedSequenceOps, carry_scan, linear, trials
from tests.support.machines import Machine

H100 = Machine((9, 0), "3.7.1")
LAYOUT = SequenceLayout.from_lengths([7, 0, 5])
PACKED = SequenceLayout(LAYOUT.cuts, documents=(0, 3))
Works = Callable[[Communicator, torch.Tensor], list[Callable[[], object]]]
SIZE = 4


def call_of(device: torch.device | str, tokens: int = 3, dtype: torch.dtype = torch.float32, **fields) -> LinearCall:
    """A call with a Gaussian map, gates and key scales; `fields` are others."""
    q, k, v = (torch.zeros(1, 2, tokens, SIZE, dtype=dtype, device=device) for _ in range(3))
    gate, scale = (torch.zeros(1, 2, tokens, device=device) for _ in range(2))
    phi = feature_maps.Gaussian(torch.zeros(2, SIZE, SIZE, device=device))
    return replace(LinearCall(q, k, v, gate, scale, phi), **fields)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No trial waits for one of another process."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.fixture
def begun() -> Iterator[list[str]]:
    """The kinds of trials that were begun on an H100, whose outcome is right."""
    found: list[str] = []
    with H100.entered(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(trial, "tried", lambda kind, compare: found.append(kind.words))
        yield found


def test_each_kind_of_call_is_tried_once(begun: list[str]) -> None:
    """What kernels are compiled for begins a trial of its own; numbers of tokens, sequences and heads do not."""
    call = call_of("cuda")
    others = [
        replace(call, causal=False),
        replace(call, documents=(1,)),
        replace(call, log_gate_BHS=None),
        replace(call, key_scale_BHS=None),
        replace(call, feature_map=None),
        replace(call, denominator=replace(call.denominator, kind="mass")),
        call_of("cuda", dtype=torch.bfloat16),
        replace(call, v_BHSV=torch.zeros(1, 2, 3, 2, device="cuda")),
    ]
    with torch.no_grad():
        for one in (call, call_of("cuda", tokens=900), *others, call):
            assert choose_attention(one).reason == "the tensors are on a GPU"
        assert choose_step(call_of("cuda", 1)).implementation == "triton"
        assert choose(call, form="parts").implementation == "triton"
    assert len(begun) == len(set(begun)) == 1 + len(others) + 2
    assert choose_attention(call).implementation == "triton"  # where autograd is on
    assert len(begun) == len(set(begun)) == 1 + len(others) + 3
    assert begun[0] == (
        "Triton's linear causal float32 forward, gaussian 4 x 4 x 4, denominator floor, gates in float32, "
        "scales in float32 (Triton 3.7.1)"
    )


@pytest.mark.parametrize(
    ("machine", "dtype", "words"),
    [
        (Machine((7, 5), "3.7.1"), torch.bfloat16, "older than Ampere have no bfloat16"),
        (H100, torch.float64, "torch.float64"),
    ],
)
def test_what_kernels_cannot_take_is_not_tried(machine: Machine, dtype: torch.dtype, words: str) -> None:
    """The streaming form computes it, and the choice says why."""
    with machine.entered(outcome="it was tried"):
        choice = choose_attention(call_of("cuda", dtype=dtype))
    assert choice.implementation == "streaming"
    assert words in choice.reason


def test_what_a_trial_finds_wrong_streams() -> None:
    """It is said once, with what was found, and calls of the kind take the streaming form from then on."""
    with H100.entered(outcome="a state is wrong"):
        check_streams(lambda: choose_attention(call_of("cuda")))
        assert kernels_taken(H100.device) == "Triton's 3.7.1, each where its trial comes out right"


def check_streams(chosen: Callable[[], Choice]) -> None:
    """A choice where every trial finds a state wrong."""
    with pytest.warns(RuntimeWarning, match="a state is wrong; the streaming form is taken"):
        choice = chosen()
    assert (choice.implementation, choice.reason) == ("streaming", "a state is wrong")
    assert chosen() == choice  # and is not warned of again


def test_nothing_is_tried_once_trials_have_ended_or_in_a_capture(begun: list[str], monkeypatch) -> None:
    """Kinds that came out right go on; of others one that came up in a capture may be tried later."""
    assert choose_attention(call_of("cuda")).implementation == "triton"
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert choose_attention(call_of("cuda")).implementation == "triton"
        assert "before a CUDA graph was captured" in choose_step(call_of("cuda", 1)).reason
    assert choose_step(call_of("cuda", 1)).implementation == "triton"
    assert trial.end_trials() == trial.found_right() == begun
    assert choose_attention(call_of("cuda")).implementation == "triton"
    with pytest.warns(RuntimeWarning, match="full .* were not tried before this rank was ready"):
        choice = choose_attention(call_of("cuda", causal=False))
    assert choice.implementation == "streaming"
    assert choose_attention(call_of("cuda", causal=False)) == choice  # and is not warned of again
    assert len(begun) == 2


def test_ranks_try_all_that_their_parts_take(begun: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank without tokens tries the same; what it then computes of a call begins no trial amid exchanges."""
    tried_by: dict[str, list[str]] = {}
    for tokens in (0, 3):
        calls: list[list[trial.Attempt]] = []

        def note(_: object, attempts: list[trial.Attempt], *met_by: object, calls=calls) -> None:
            calls.append(attempts)

        monkeypatch.setattr(trials, "try_together", note)
        call = call_of("cuda", tokens)
        trials.try_linear(None, call, torch.float32, "full", "parts")
        found = [(one.kind.words, one.why_not()) for attempts in calls for one in attempts]
        assert [reason for _, reason in found] == [None] * 2
        tried_by[str(tokens)] = [words for words, _ in found]
    assert tried_by["0"] == tried_by["3"] == begun
    state = LinearState.identity(1, 2, 2 * SIZE, SIZE, device="cuda")
    for part, form in (
        (call.of_keys(), "full"),
        (replace(call.of_keys(), state=state), "full"),
        (call_of("cuda", 2), "parts"),
        (replace(call, k_BHSK=call.q_BHLK, v_BHSV=call.q_BHLK, state=state), "parts"),
    ):
        assert choose(part, form=form).implementation == "triton"
    assert choose_attention(replace(call, causal=False, state=state)).implementation == "triton"
    assert len(begun) == 2


def test_ranks_try_before_they_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each operation over ranks that has kernels tries them on all ranks, those without tokens too."""

    def works(comm: Communicator, x: torch.Tensor) -> list[Callable[[], object]]:
        deterministic = SequenceLayout.from_lengths([64 * length for length in LAYOUT.lengths])
        many = torch.ones(1, 2, 64 * x.shape[2], SIZE)
        return [
            lambda: ShardedSequenceOps(comm, LAYOUT).linear_attention(x, x, x),
            lambda: ShardedSequenceOps(comm, LAYOUT).linear_attention(x, x, x, causal=False),
            lambda: ShardedSequenceOps(comm, PACKED).linear_attention(x, x, x),
            lambda: ShardedSequenceOps(comm, deterministic, deterministic=True).linear_attention(many, many, many),
        ]

    check_ranks_try_first({carry_scan: "try_linear", linear: "try_linear"}, works, monkeypatch)


def check_ranks_try_first(tries: dict[ModuleType, str], works: Works, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of `tries`, functions of modules, are called by all ranks before these works exchange anything."""
    met: list[tuple[str, int]] = []
    for module, name in tries.items():

        def note(comm: Communicator, call, *form, of=module.__name__) -> None:
            labels = [event.label for event in comm.traffic.events][before[comm.rank] :]
            assert {*labels} <= {"require_equal"}  # of what is asked for
            met.append((of, comm.rank))

        monkeypatch.setattr(module, name, note)
    before = [0] * LAYOUT.size

    def on_rank(comm: Communicator) -> None:
        start, stop = LAYOUT.range(comm.rank)
        for work in works(comm, torch.ones(1, 2, stop - start, SIZE)):
            before[comm.rank] = len(comm.traffic.events)
            work()

    run_simulated(on_rank, LAYOUT.size)
    by_rank = [[of for of, rank in met if rank == own] for own in range(LAYOUT.size)]
    assert by_rank[0] == by_rank[1] == by_rank[2]
    assert {*by_rank[0]} == {module.__name__ for module in tries}


class Plain:
    """A kind of calls that torch computes."""

    device, words = torch.device("cpu"), "torch's"


def plainly(fault: float = 0.0):
    """What a trial compares, the gradients of one of them off by `fault`."""
    given = {"x": torch.linspace(0.1, 1.0, 12).view(1, 1, 4, 3)}
    right = results_of(lambda x: {"outputs": x["x"].sin().exp()}, given, gradients=True)
    return {**right, "gradient of x by outputs": right["gradient of x by outputs"] * (1 + fault)}, right


def keeping(operation: torch._ops.OpOverload):
    """What `checkpoint` keeps outputs of this operation by."""
    return partial(create_selective_checkpoint_contexts, [operation])


@pytest.mark.parametrize("kept", [noop_context_fn, keeping(torch.ops.aten.exp.default)])
def test_a_trial_leaves_those_around_it_alone(kept: Callable[[], object]) -> None:
    """Within a block that is computed again, in part or whole, it saves nothing, and the gradients come out."""
    packed: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        assert tried(Plain(), plainly) is None
    assert not packed
    x, tried_in = torch.ones(3, requires_grad=True), []

    def block(x: torch.Tensor) -> torch.Tensor:
        if not tried_in:
            tried_in.append(tried(Plain(), plainly))
        return x.sin().exp()

    checkpoint(block, x, use_reentrant=False, context_fn=kept).sum().backward()
    assert tried_in == [None]
    torch.testing.assert_close(x.grad, x.cos() * x.sin().exp())
    assert "gradient of x by outputs 0.1)" in (tried(Plain(), partial(plainly, 0.1)) or "")


INTERPRETED = [
    ("causal", {"documents": (1,)}, torch.float32),
    ("causal", {"log_gate_BHS": None}, torch.bfloat16),
    ("full", {}, torch.bfloat16),
    ("parts", {}, torch.float32),
    ("step", {}, torch.bfloat16),
]


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's kernels without a GPU."""
    pytest.importorskip("triton", reason="needs triton")
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(trial, "_outcomes", {})
    monkeypatch.setattr(trial, "_ended", False)


def few_tokens(patch: pytest.MonkeyPatch, chunks: int = 1) -> None:
    """Chunks of 64 and a part, where a real trial has two and a part: the interpreter takes its time for each."""
    first = 64 * chunks
    for name, value in (("TOKENS", first + 16), ("STARTS", (first // 2 + 1, first + 6)), ("CLOSED", first + 2)):
        patch.setattr(linear_trial, name, value)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("form", "fields", "dtype"), INTERPRETED)
def test_trials_find_the_kernels_right(
    form: str, fields: dict[str, object], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all gradients, in each way that they compute; also where steps write into the states they are given."""
    if form != "parts":  # one has the size of a real trial
        few_tokens(monkeypatch)
    call = call_of("cuda" if torch.cuda.is_available() else "cpu", dtype=dtype, **fields)
    kind, before = LinearKind.of(call, form), torch.get_rng_state()
    with warnings.catch_warnings(), steps_in_place():
        warnings.simplefilter("ignore")  # the interpreter's, of numbers that a mask drops
        assert why_not_by_default(kind.case, kind, partial(compared, call, kind)) is None
    assert trial.found_right() == [kind.words]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.slow
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(
    ("kernels", "faulty", "words"),
    [
        ("triton.triton_linear_attention", "v", "gradient of v by outputs 1"),
        ("triton.triton_linear_attention", "log_gate", "gradient of log_gate by outputs 1"),
        ("triton.triton_linear_attention", "state", "relative errors: s 0.5"),
        ("triton.triton_linear_attention", "raise", "failed on this GPU (RuntimeError: no kernel image)"),
        ("triton_decode.triton_linear_attention_step", "state", "relative errors: s 0.5"),
    ],
)
def test_trials_find_what_kernels_get_wrong(kernels: str, faulty: str, words: str, monkeypatch) -> None:
    """A gradient that is twice itself, a state that is half, and what a compiler raises; such a kind streams."""
    few_tokens(monkeypatch, chunks=0)
    module, _, name = kernels.partition(".")
    where = import_module(f"dist_attn.ops.linear_attention.{module}")
    compute = getattr(where, name)

    def wrong(call: LinearCall, **options):
        if faulty == "raise":
            raise RuntimeError("no kernel image\nis available")
        if faulty == "v":
            call = replace(call, v_BHSV=2 * call.v_BHSV - call.v_BHSV.detach())
        if faulty == "log_gate":
            gate = call.log_gate_BHS
            call = replace(call, log_gate_BHS=gate + (gate - gate.detach()).nan_to_num())
        out, after = compute(call, **options)
        return out, replace(after, s_BHMV=after.s_BHMV / 2) if faulty == "state" else after

    monkeypatch.setattr(where, name, wrong)
    call = call_of("cuda" if torch.cuda.is_available() else "cpu")
    kind = LinearKind.of(call, "step" if module == "triton_decode" else "causal")
    with pytest.warns(RuntimeWarning, match="the streaming form is taken"):
        reason = why_not_by_default(kind.case, kind, partial(compared, call, kind))
    assert words in reason
    assert f"(Triton {surroundings_of(call.v_BHSV.device).triton})" in reason

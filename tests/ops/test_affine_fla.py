"""Affine recurrences by flash-linear-attention's kernels against the oracle; without a GPU in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch

from dist_attn.comm import run_simulated
from dist_attn.errors import ConfigError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import AffineState, LocalSequenceOps
from dist_attn.ops.affine import AffineCall
from dist_attn.ops.affine.implementation import choose, fla_operation
from dist_attn.ops.fla_known import Surroundings
from dist_attn.ops.linear_attention import implementation
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.sharded.affine import recur_over_ranks
from tests.support.affine import KINDS, AffineInputs
from tests.support.attention import weighted_sum
from tests.support.closeness import assert_close
from tests.support.fla import fla_adapter
from tests.support.interpreter import one_at_a_time

__all__ = ["fla_adapter"]

interpreted = [
    pytest.mark.slow,
    pytest.mark.usefixtures("fla_adapter"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU rounds products of float32 to TF32"),
    # fla's own words about DPLR, which it has in bfloat16 first; numpy's of numbers that a mask drops
    pytest.mark.filterwarnings("ignore:ChunkDeltaRuleFunction does not support float32:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:(overflow|invalid value|divide by zero) encountered"),
]


# One for each of fla's operations: two take a decay for each channel only, and are given the other in `test_one_token`.
OPERATIONS = [
    (kind, channels) for kind in KINDS for channels in (False, True) if channels or kind in ("decay", "delta rule")
]


def marked(function):
    """A test of kernels."""
    for mark in interpreted:
        function = mark(function)
    return function


def random(kind: str, tokens: int, *, heads: int = 2, **options: object) -> AffineInputs:
    return AffineInputs.random(kind, tokens, sizes=(1, heads, 8, 5), dtype=torch.float32, **options)


def computed(leaves: AffineInputs, ops: LocalSequenceOps | None, documents: tuple[int, ...] = ()):
    """Outputs, the state and all gradients; without `ops`, those of the oracle."""
    out, after = leaves.naive(documents) if ops is None else leaves.run(ops)
    weighted_sum(out, after.s_BHKV).backward()
    return out, after.s_BHKV, leaves.gradients()


def assert_like_the_oracle(inputs: AffineInputs, documents: tuple[int, ...] = ()):
    """Compare all that `computed` gives; returns what the kernels gave."""
    want, want_state, want_gradients = computed(inputs.leaves(), None, documents)
    got, state, gradients = computed(inputs.leaves(), LocalSequenceOps(documents, "fla"))
    assert_close(got, want)
    assert_close(state, want_state, kind="state")
    for name, gradient in want_gradients.items():
        assert_close(gradients[name], gradient, kind="gradient", what=name)
    return got, state, gradients


@marked
@pytest.mark.parametrize(("kind", "channels"), OPERATIONS)
def test_kernels_equal_the_oracle(kind: str, channels: bool) -> None:
    """Outputs, the state and all gradients are those of the loop over tokens, behind a closed gate too."""
    assert_like_the_oracle(random(kind, 70, heads=1, channels=channels))


@marked
@pytest.mark.parametrize("kind", KINDS)
def test_one_token(kind: str) -> None:
    """A sequence of one token is the oracle's."""
    assert_like_the_oracle(random(kind, 1, channels=False))


@marked
@pytest.mark.parametrize(("kind", "channels"), OPERATIONS)
def test_documents_do_not_see_each_other(kind: str, channels: bool) -> None:
    """Packed documents equal the oracle's, gradients too, and a number that is not finite stays in its own."""
    inputs, documents = random(kind, 20, heads=1, channels=channels, closed=False), (3, 14)
    want = assert_like_the_oracle(inputs, documents)
    spoiled = inputs.leaves()
    with torch.no_grad():
        spoiled.sequence["v"][:, :, 13] = torch.nan
    got = computed(spoiled, LocalSequenceOps(documents, "fla"))
    assert torch.equal(got[1], want[1])
    for one, other in ((got[0], want[0]), *((got[2][name], want[2][name]) for name in inputs.sequence)):
        assert torch.equal(one[:, :, 14:], other[:, :, 14:])


@marked
@pytest.mark.parametrize(
    ("kind", "channels", "documents", "exchange"),
    [
        ("decay", False, None, "auto"),
        ("decay", True, (0, 9, 20), "gather"),
        ("decay, read before", True, None, "auto"),
        ("delta rule", False, (9, 20), "auto"),
        ("delta rule", True, None, "gather"),
        ("erasing", True, (0, 20), "auto"),
    ],
)
def test_over_ranks(kind: str, channels: bool, documents, exchange: str, monkeypatch) -> None:
    """Uneven and empty slices and packed documents give one rank's outputs, states and gradients, of states too."""
    one_at_a_time(monkeypatch)
    inputs = random(kind, 30, channels=channels, closed=False)
    layout = SequenceLayout.from_lengths([17, 0, 13], documents=documents)

    def on_rank(comm):
        leaves = inputs.leaves(*layout.range(comm.rank))
        ops = ByName(comm, layout, exchange=exchange)
        return gradients_of(leaves, ops, *layout.range(comm.rank), last=comm.rank == 2)

    want, want_state, want_gradients = gradients_of(
        inputs.leaves(), LocalSequenceOps(layout.documents, "streaming"), 0, 30, last=True
    )
    ranks = run_simulated(on_rank, 3, timeout_s=300.0)  # interpreted kernels take long on a busy machine
    assert_close(torch.cat([out for out, _, _ in ranks], 2), want)
    for _, state, _ in ranks:
        assert_close(state, want_state, kind="state")
    for name, gradient in want_gradients.items():
        parts = [gradients[name] for _, _, gradients in ranks]
        got = torch.cat(parts, 2) if name in inputs.sequence else torch.stack(parts).sum(0)
        assert_close(got, gradient, kind="gradient", what=name)


class ByName(ShardedSequenceOps):
    """Operations that take the kernels for affine recurrences alone, as "auto" does: for packed documents too."""

    def run(self, call):
        return recur_over_ranks(self._sharding, replace(call, implementation="fla"))


def gradients_of(leaves: AffineInputs, ops, start: int, stop: int, *, last: bool):
    """Outputs, the state after, and gradients of a loss in which the state counts on the last rank."""
    out, after = leaves.run(ops)
    weights = torch.randn(*out.shape[:2], 30, out.shape[3], generator=torch.Generator().manual_seed(9))
    ((out * weights[:, :, start:stop]).sum() + float(last) * weighted_sum(after.s_BHKV)).backward()
    return out.detach(), after.s_BHKV.detach(), leaves.gradients()


@marked
def test_second_derivatives() -> None:
    """A backward pass that is differentiated again gives the streaming form's second derivatives."""
    inputs, found = random("delta rule", 6, channels=False), []
    for name in ("streaming", "fla"):
        leaves = inputs.leaves()
        out, _ = leaves.run(LocalSequenceOps(implementation=name))
        (first,) = torch.autograd.grad(out.square().sum(), leaves.sequence["q"], create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), leaves.sequence["beta"])[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-2, atol=1e-3)


X, D = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 1)
CALL = AffineCall(X, X, X, D, implementation="fla")


@pytest.mark.parametrize(
    ("given", "operation"),
    [
        ({}, "fla_simple_gla"),
        ({"log_decay_BHLG": X}, "fla_gla"),
        ({"beta_BHL": D[..., 0]}, "fla_gated_delta"),
        ({"beta_BHL": D[..., 0], "log_decay_BHLG": X}, "fla_kda"),
        ({"erase": (X, X)}, "fla_dplr"),
        ({"read": "before"}, "fla_rwkv6"),
        ({"read": "before", "erase": (X, X)}, None),
    ],
)
def test_every_call_has_its_operation(given, operation) -> None:
    """A call goes to the least general kernels that compute it, or to none."""
    assert fla_operation(replace(CALL, **given)) == operation


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"read": "before", "erase": (X, X)}, "before a token that erases"),
        ({"state": AffineState(torch.zeros(1, 2, 4, 4, dtype=torch.float64))}, "sums in torch.float64"),
        ({"q_BHLK": X.half(), "k_BHLK": X.half(), "v_BHLV": X.half()}, "float16's range is too small"),
        ({"v_BHLV": X[..., :0]}, "some values"),
        (dict.fromkeys(("q_BHLK", "k_BHLK"), torch.zeros(1, 2, 3, 257)), "key size of 1 to 256"),
        (dict.fromkeys(("q_BHLK", "k_BHLK", "v_BHLV"), X[..., :3].bfloat16()), "take even sizes"),
    ],
)
def test_what_the_kernels_cannot_take_is_an_error_that_says_why(given, words, monkeypatch) -> None:
    """By name it is refused in words, with tokens and without, also where fla is not installed; "auto" passes on."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(implementation, "find_spec", lambda name: object())
    here = Surroundings("3.7.1", "0.6.0", None)
    monkeypatch.setattr("dist_attn.ops.affine.implementation.surroundings_of", lambda device: here)
    call = replace(CALL, **given)
    for one in (call, call.part(0, 0)):
        with pytest.raises(ConfigError, match=words):
            choose(one)
        assert choose(replace(one, implementation="auto")).implementation != "fla"
    assert choose(CALL).implementation == "fla"
    assert choose(CALL.part(0, 0)).implementation == "streaming"
    for name in ("triton", "cuda"):
        with pytest.raises(ConfigError, match=f"no Triton kernels|{name}' is unknown"):
            choose(replace(CALL, implementation=name))

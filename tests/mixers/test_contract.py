"""The contract of every token mixer: parallel = streamed = stepwise, causal, batch-independent, sharded = whole."""

import inspect
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from pydantic import ValidationError

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError
from dist_attn.layout import SequenceLayout
from dist_attn.mixers import (
    ConvolutionConfig,
    EfficientConfig,
    EluConfig,
    HippoConfig,
    LsslConfig,
    MixerState,
    PerformerConfig,
    RandomFeatureConfig,
    RelativeConfig,
    RotaryConfig,
    S4Config,
    S4DConfig,
    ScaleformerConfig,
    SoftmaxConfig,
    StaticKernelConfig,
    TokenMixer,
    build_mixer,
)
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from tests.support.autocast import assert_trains_under_autocast
from tests.support.closeness import assert_close

SIZE, HEADS = 12, 3
CONFIGS = {
    "rfa": RandomFeatureConfig(kind="rfa", hidden_size=SIZE, num_heads=HEADS, num_random=8),
    "rfa-arccos": RandomFeatureConfig(
        kind="rfa", hidden_size=SIZE, num_heads=HEADS, num_random=8, feature="arc_cosine", short_convolution=0
    ),
    "rfa_gate": RandomFeatureConfig(kind="rfa_gate", hidden_size=SIZE, num_heads=HEADS, num_random=8),
    "softmax": SoftmaxConfig(kind="softmax", hidden_size=SIZE, num_heads=HEADS),
    "softmax-no-convolution": SoftmaxConfig(kind="softmax", hidden_size=SIZE, num_heads=HEADS, short_convolution=0),
    "softmax-rotary": SoftmaxConfig(
        kind="softmax", hidden_size=SIZE, num_heads=HEADS, rotary=RotaryConfig(size=4), projection_bias=True
    ),
    "softmax-relative": SoftmaxConfig(
        kind="softmax", hidden_size=SIZE, num_heads=HEADS, relative=RelativeConfig(reach=4)
    ),
    "softmax-relative-shared": SoftmaxConfig(
        kind="softmax",
        hidden_size=SIZE,
        num_heads=HEADS,
        short_convolution=0,
        relative=RelativeConfig(reach=0, values=False, shared=True),
    ),
    "rfa-rotary": RandomFeatureConfig(
        kind="rfa", hidden_size=SIZE, num_heads=HEADS, num_random=8, rotary=RotaryConfig(size=2), projection_bias=True
    ),
    "rfa-key-weights": RandomFeatureConfig(
        kind="rfa", hidden_size=SIZE, num_heads=HEADS, num_random=6, weighting="norm", rotary=RotaryConfig(size=2)
    ),
    "rfa_gate-key-weights": RandomFeatureConfig(
        kind="rfa_gate", hidden_size=SIZE, num_heads=HEADS, num_random=6, weighting="norm", short_convolution=0
    ),
    "rfa_gate-full-rank": RandomFeatureConfig(
        kind="rfa_gate", hidden_size=SIZE, num_heads=HEADS, num_random=6, value_rank=SIZE
    ),
    "softmax-rank-2": SoftmaxConfig(
        kind="softmax", hidden_size=SIZE, num_heads=HEADS, value_rank=2, relative=RelativeConfig(reach=3)
    ),
    "scaleformer-rank-5": ScaleformerConfig(
        kind="scaleformer", hidden_size=SIZE, num_heads=HEADS, reach=4, value_rank=5
    ),
    "rfa-one-gate": RandomFeatureConfig(
        kind="rfa_gate", hidden_size=SIZE, num_heads=HEADS, num_random=6, shared_gate=True, orthogonal=True, pool=5
    ),
    "elu": EluConfig(kind="elu", hidden_size=SIZE, num_heads=HEADS),
    "elu-gated": EluConfig(
        kind="elu", hidden_size=SIZE, num_heads=HEADS, gated=True, short_convolution=0, rotary=RotaryConfig(size=4)
    ),
    "performer": PerformerConfig(kind="performer", hidden_size=SIZE, num_heads=HEADS, num_random=6),
    "performer-gated": PerformerConfig(
        kind="performer", hidden_size=SIZE, num_heads=HEADS, num_random=5, gated=True, shared_gate=True, pool=4
    ),
    "efficient": EfficientConfig(kind="efficient", hidden_size=SIZE, num_heads=HEADS),
    "efficient-gated": EfficientConfig(
        kind="efficient", hidden_size=SIZE, num_heads=HEADS, gated=True, short_convolution=0, value_rank=5
    ),
    "static_kernel": StaticKernelConfig(kind="static_kernel", hidden_size=SIZE),
    "static_kernel-random": StaticKernelConfig(
        kind="static_kernel", hidden_size=SIZE, num_heads=HEADS, feature="gaussian", num_random=6, divisor="length"
    ),
    "scaleformer": ScaleformerConfig(kind="scaleformer", hidden_size=SIZE, num_heads=HEADS, reach=5),
    "scaleformer-no-reach": ScaleformerConfig(kind="scaleformer", hidden_size=SIZE, num_heads=HEADS, reach=0),
    "convolution": ConvolutionConfig(kind="convolution", hidden_size=SIZE, taps=7),
    "convolution-wider-than-a-slice": ConvolutionConfig(kind="convolution", hidden_size=SIZE, taps=50),
    "convolution-pointwise": ConvolutionConfig(kind="convolution", hidden_size=SIZE, taps=1),
    "s4d": S4DConfig(kind="s4d", hidden_size=SIZE, state_size=8),
    "s4": S4Config(kind="s4", hidden_size=SIZE, state_size=6),
    "lssl": LsslConfig(kind="lssl", hidden_size=SIZE, state_size=6, outputs=2),
    "hippo": HippoConfig(kind="hippo", hidden_size=SIZE, state_size=7),
    "hippo-one-coefficient": HippoConfig(kind="hippo", hidden_size=SIZE, state_size=1),
    "lssl-backward": LsslConfig(kind="lssl", hidden_size=SIZE, state_size=4, alpha=1.0),
    "s4d-bilinear": S4DConfig(kind="s4d", hidden_size=SIZE, state_size=6, spectrum="legs", rule="bilinear"),
}


def _mixer(name: str) -> TokenMixer:
    mixer = build_mixer(CONFIGS[name]).double()
    generator = torch.Generator().manual_seed(0)  # not the global one: simulated ranks are threads
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return mixer


def _tokens(length: int = 90) -> torch.Tensor:
    return torch.randn(2, length, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("name", CONFIGS)
def test_parallel_equals_streamed_equals_stepwise(name):
    """One call, a stream of uneven pieces, and one token at a time give the same outputs and the same final state."""
    mixer, x, ops = _mixer(name), _tokens(), LocalSequenceOps()
    want, want_state = mixer(x, ops)
    streamed, state = [], None
    for piece in x.split([1, 2, 64, 0, 23], dim=1):
        y, state = mixer(piece, ops, state)
        streamed.append(y)
    assert_close(torch.cat(streamed, 1), want)
    stepped, step_state = [], mixer.initial_state(2)
    for t in range(x.shape[1]):
        y, step_state = mixer.step(x[:, t], step_state)
        stepped.append(y)
    assert_close(torch.stack(stepped, 1), want)
    for end in (state, step_state):
        for got, field in zip(end.tensors(), want_state.tensors(), strict=True):
            assert_close(got, field, kind="state")


@pytest.mark.parametrize("name", CONFIGS)
def test_the_future_changes_nothing(name):
    """Changing a token leaves all earlier outputs bitwise the same."""
    mixer, x = _mixer(name), _tokens()
    before, _ = mixer(x, LocalSequenceOps())
    changed = x.clone()
    changed[:, 50] += 1.0
    after, _ = mixer(changed, LocalSequenceOps())
    assert torch.equal(before[:, :50], after[:, :50])
    assert not torch.equal(before[:, 50:], after[:, 50:])


@pytest.mark.parametrize("name", CONFIGS)
def test_batch_elements_do_not_touch_each_other(name):
    """A sequence gives the same outputs alone as in a batch, and its state can be taken out and gone on with."""
    mixer, x, ops = _mixer(name), _tokens(), LocalSequenceOps()
    both, state = mixer(x, ops)
    alone, _ = mixer(x[1:], ops)
    assert_close(both[1:], alone)
    taken = state.replace(tuple(t[1:] for t in state.tensors()))
    goes_on, _ = mixer(x[1:, :5], ops, taken)
    together, _ = mixer(x[:, :5], ops, state)
    assert_close(together[1:], goes_on)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_of_training_under_autocast(name):
    """Under bf16 autocast outputs and gradients are finite, and those of float32 as far as bf16 can tell."""
    assert_trains_under_autocast(_mixer(name), _tokens())


@pytest.mark.parametrize("lengths", [(40, 50), (31, 19, 40), (0, 31, 2, 57), (90, 0)])
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_change_nothing(name, lengths):
    """Over several ranks outputs, state, and the gradients of inputs and parameters are those of one rank."""
    layout, x = SequenceLayout.from_lengths(lengths), _tokens()
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def run(ops, start: int, stop: int):
        mixer = _mixer(name)
        mine = x[:, start:stop].clone().requires_grad_()
        y, state = mixer(mine, ops)
        (y * weights[:, start:stop]).sum().backward()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in mixer.named_parameters()}
        return y.detach(), [t.detach() for t in state.tensors()], mine.grad, gradients

    def body(comm: Communicator):
        # A state that is equal on all ranks: with a key-value cache, the whole one.
        return run(ShardedSequenceOps(comm, layout, cache="whole"), *layout.range(comm.rank))

    want = run(LocalSequenceOps(), 0, layout.total)
    ranks = run_simulated(body, len(lengths))
    assert_close(torch.cat([r[0] for r in ranks], 1), want[0])
    assert_close(torch.cat([r[2] for r in ranks], 1), want[2], kind="gradient")
    for rank in ranks:
        for got, field in zip(rank[1], want[1], strict=True):
            assert_close(got, field, kind="state")
    for parameter, gradient in want[3].items():
        total = torch.stack([r[3][parameter] for r in ranks]).sum(0)
        assert_close(total, gradient, kind="gradient", what=parameter)


def _kinds(base: type[TokenMixer]) -> Iterator[type[TokenMixer]]:
    for kind in base.__subclasses__():
        if kind.__module__.startswith("dist_attn."):
            yield kind
            yield from _kinds(kind)


def test_a_mixer_is_abstract_or_final():
    """A class of mixers that can be made is final, and one that is derived from cannot be made."""
    kinds = set(_kinds(TokenMixer))
    assert {type(_mixer(name)) for name in CONFIGS} <= kinds
    assert {kind for kind in kinds if inspect.isabstract(kind) == getattr(kind, "__final__", False)} == set()


def test_gates_start_over_a_spread_of_time_scales():
    """The gates of the heads start from forgetting within two tokens to remembering more than a hundred."""
    mixer = build_mixer(RandomFeatureConfig(kind="rfa_gate", hidden_size=64, num_heads=8))
    gates = torch.sigmoid(mixer.gate.bias.detach())
    memory = 1 / (1 - gates)
    assert float(memory.min()) < 2
    assert float(memory.max()) > 100


@cache
def _a_state(name: str) -> tuple[str, list[tuple[int, ...]], MixerState]:
    """Of each variant: its kind, the sizes of its state, and the state after three tokens."""
    _, state = _mixer(name)(_tokens(3), LocalSequenceOps())
    return CONFIGS[name].kind, [tuple(tensor.shape) for tensor in state.tensors()], state


@pytest.mark.parametrize("name", CONFIGS)
def test_states_of_other_mixers_are_refused(name):
    """A state of another kind of mixer, of the same kind with other sizes, or of another batch raises an InputError."""
    mixer, x, ops = _mixer(name), _tokens(1), LocalSequenceOps()
    kind, shapes, own = _a_state(name)
    mixer(x, ops, own)
    mixer.step(x[:, 0], own)
    others = [state for k, s, state in map(_a_state, CONFIGS) if (k, s) != (kind, shapes)]
    for state in (*others, own.replace(tuple(tensor[:1] for tensor in own.tensors()))):
        with pytest.raises(InputError, match="needs its own state"):
            mixer(x, ops, state)
        with pytest.raises(InputError, match="needs its own state"):
            mixer.step(x[:, 0], state)


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "rfa", "hidden_size": 10, "num_heads": 3},
        {"kind": "rfa", "hidden_size": 12, "num_heads": 3, "sigma": 1},
        {"kind": "rfaa", "hidden_size": 12, "num_heads": 3},
        {"kind": "rfa", "hidden_size": 12, "num_heads": 3, "num_random": 0},
        {"kind": "rfa", "hidden_size": 12, "num_heads": 3, "pool": 2},
        {"kind": "rfa", "hidden_size": 12, "num_heads": 3, "shared_gate": True},
    ],
)
def test_bad_configurations_are_refused(values):
    """Heads that do not divide, unknown keys and kinds, empty maps, small pools and stray gates are refused."""
    with pytest.raises(ValidationError):
        RandomFeatureConfig.model_validate(values)

"""The contract of every token mixer: parallel = streamed = stepwise, causal, batch-independent, sharded = whole."""

import inspect
from collections.abc import Iterator

import pytest
import torch
from pydantic import ValidationError

from dist_attn.mixers import (
    BidirectionalConfig,
    ConvolutionConfig,
    DenominatorConfig,
    EluConfig,
    GatedDeltaConfig,
    GlaConfig,
    KimiDeltaConfig,
    LightningConfig,
    Mamba2Config,
    MambaConfig,
    MLstmConfig,
    RandomFeatureConfig,
    RelativeConfig,
    RgLruConfig,
    RotaryConfig,
    Rwkv7Config,
    SoftmaxConfig,
    TokenMixer,
    build_mixer,
    contract,
)
from dist_attn.mixers.all_keys import build_attention
from tests.support.model_cases import streaming_kinds

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
    "rfa-one-gate": RandomFeatureConfig(
        kind="rfa_gate", hidden_size=SIZE, num_heads=HEADS, num_random=6, shared_gate=True, orthogonal=True, pool=5
    ),
    "elu": EluConfig(kind="elu", hidden_size=SIZE, num_heads=HEADS),
    "elu-gated": EluConfig(
        kind="elu", hidden_size=SIZE, num_heads=HEADS, gated=True, short_convolution=0, rotary=RotaryConfig(size=4)
    ),
    "convolution": ConvolutionConfig(kind="convolution", hidden_size=SIZE, taps=7),
    "convolution-wider-than-a-slice": ConvolutionConfig(kind="convolution", hidden_size=SIZE, taps=50),
    "convolution-pointwise": ConvolutionConfig(kind="convolution", hidden_size=SIZE, taps=1),
    "gla": GlaConfig(kind="gla", hidden_size=SIZE, num_heads=HEADS, key_size=5),
    "lightning": LightningConfig(kind="lightning", hidden_size=SIZE, num_heads=HEADS),
    "lightning-retention": LightningConfig(
        kind="lightning", hidden_size=SIZE, num_heads=HEADS, key_size=5, slopes="retention", norm="heads"
    ),
    "mamba2": Mamba2Config(kind="mamba2", hidden_size=SIZE, num_heads=HEADS, key_size=6),
    "mamba2-groups": Mamba2Config(
        kind="mamba2", hidden_size=SIZE, num_heads=4, key_size=5, value_size=3, groups=2, convolution_bias=False
    ),
    # Small heads would have queries and keys so short that their norms are what bf16 has rounded.
    "gated_delta": GatedDeltaConfig(kind="gated_delta", hidden_size=SIZE, num_heads=HEADS, key_size=8),
    "gated_delta-shared-keys": GatedDeltaConfig(
        kind="gated_delta",
        hidden_size=SIZE,
        num_heads=4,
        key_heads=2,
        key_size=8,
        value_size=5,
        short_convolution=1,
    ),
    "gated_delta-negative": GatedDeltaConfig(
        kind="gated_delta", hidden_size=SIZE, num_heads=HEADS, key_size=8, allow_negative=True
    ),
    "kda": KimiDeltaConfig(kind="kda", hidden_size=SIZE, num_heads=HEADS, key_size=8, value_size=8),
    "kda-rank": KimiDeltaConfig(kind="kda", hidden_size=SIZE, num_heads=2, key_size=16, gate_rank=3),
    "rwkv7": Rwkv7Config(kind="rwkv7", hidden_size=SIZE, num_heads=HEADS),
    "rwkv7-ranks": Rwkv7Config(
        kind="rwkv7",
        hidden_size=SIZE,
        num_heads=HEADS,
        key_size=6,
        value_size=5,
        decay_rank=3,
        rate_rank=2,
        gate_rank=5,
    ),
    "mamba": MambaConfig(kind="mamba", hidden_size=SIZE, state_size=5),
    "mamba-one-tap": MambaConfig(
        kind="mamba",
        hidden_size=SIZE,
        expand=1,
        state_size=1,
        dt_rank=3,
        short_convolution=1,
        convolution_bias=False,
        projection_bias=True,
    ),
    "rg_lru": RgLruConfig(kind="rg_lru", hidden_size=SIZE, num_heads=HEADS),
    "rg_lru-wide": RgLruConfig(kind="rg_lru", hidden_size=SIZE, num_heads=2, width=20, short_convolution=1),
    "mlstm": MLstmConfig(kind="mlstm", hidden_size=SIZE, num_heads=HEADS),
    "mlstm-biases": MLstmConfig(
        kind="mlstm", hidden_size=SIZE, num_heads=2, key_size=4, value_rank=5, projection_bias=True, gate_soft_cap=None
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parallel_equals_streamed_equals_stepwise(name):
    """One call, a stream of uneven pieces, and one token at a time give the same outputs and the same final state."""
    contract.check_streams(CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_the_future_changes_nothing(name):
    """Changing a token leaves all earlier outputs bitwise the same."""
    contract.check_causal(CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_batch_elements_do_not_touch_each_other(name):
    """A sequence gives the same outputs alone as in a batch, and its state can be taken out and gone on with."""
    contract.check_batch(CONFIGS[name])


@pytest.mark.parametrize("name", CONFIGS)
def test_a_step_of_training_under_autocast(name):
    """Under bf16 autocast outputs and gradients are finite, and those of float32 as far as bf16 can tell."""
    contract.check_autocast(CONFIGS[name])


@pytest.mark.parametrize("lengths", contract.CUTS)
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_change_nothing(name, lengths):
    """Over several ranks outputs, state, and the gradients of inputs and parameters are those of one rank."""
    contract.check_ranks(CONFIGS[name], lengths)


@pytest.mark.parametrize("name", CONFIGS)
def test_states_of_other_mixers_are_refused(name):
    """A state of another kind of mixer, of the same kind with other sizes, or of another batch raises an InputError."""
    contract.check_states(CONFIGS[name], tuple(CONFIGS.values()))


def test_no_kind_is_left_out():
    """Every kind that goes on from a state is judged here."""
    assert {config.kind for config in CONFIGS.values()} >= {*streaming_kinds()}


def _kinds(base: type[TokenMixer]) -> Iterator[type[TokenMixer]]:
    for kind in base.__subclasses__():
        if kind.__module__.startswith("dist_attn."):
            yield kind
            yield from _kinds(kind)


def test_a_mixer_is_abstract_or_final():
    """A class of mixers that can be made is final, and one that is derived from cannot be made."""
    kinds = set(_kinds(TokenMixer))
    assert {type(build_mixer(config)) for config in CONFIGS.values()} <= kinds
    assert {kind for kind in kinds if inspect.isabstract(kind) == getattr(kind, "__final__", False)} == set()


def test_gates_start_over_a_spread_of_time_scales():
    """The gates of the heads start from forgetting within two tokens to remembering more than a hundred."""
    mixer = build_mixer(RandomFeatureConfig(kind="rfa_gate", hidden_size=64, num_heads=8))
    gates = torch.sigmoid(mixer.gate.bias.detach())
    memory = 1 / (1 - gates)
    assert float(memory.min()) < 2
    assert float(memory.max()) > 100


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "rfa", "hidden_size": 10, "num_heads": 3},
        {"kind": "rfa", "hidden_size": 12, "num_heads": 3, "sigmas": 1},
        {"kind": "rfa", "hidden_size": 12, "num_heads": 3, "sigma": 0},
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


def test_what_attention_over_all_keys_divides_by():
    """A new configuration has the low floor and says so when it is saved; null keeps what it meant before that."""
    check_divisors(BidirectionalConfig)


def check_divisors(config):
    """Attention over all keys by this class of configurations divides as it did when they were saved."""
    sizes = {"attention": "rfa", "hidden_size": 12, "num_heads": 3}
    new = config.model_validate(sizes)
    assert config.model_validate(new.model_dump()).denominator == DenominatorConfig(kind="floor", eps=0.03)
    before = config.model_validate({**sizes, "denominator": None})
    assert before.denominator is None
    assert (build_attention(new).denominator.eps, build_attention(before).denominator.eps) == (0.03, 0.3)

"""The contract of every token mixer of the papers: parallel = streamed = stepwise, causal, sharded = whole; costs."""

import pytest
import torch

from dist_attn.commands.mixer_table import mixer_facts
from dist_attn.mixers import BidirectionalConfig, Paradigm, build_mixer, contract
from dist_attn.model_config.mixer import MIXERS
from dist_attn.ops import LocalSequenceOps
from dist_attn_papers.mixers.convolution_configs import FourierConfig, SgConvConfig, TokenMlpConfig
from dist_attn_papers.mixers.positive_configs import EfficientConfig, PerformerConfig
from dist_attn_papers.mixers.scaleformer_config import ScaleformerConfig
from dist_attn_papers.mixers.state_space_configs import HippoConfig, LsslConfig, S4Config, S4DConfig
from dist_attn_papers.mixers.static_kernel_config import StaticKernelConfig
from tests.mixers.test_contract import CONFIGS as CORE
from tests.mixers.test_contract import SIZE

TOKENS = 24
STATE_SPACES = {"s4", "s4d", "lssl", "hippo"}
CONFIGS = {
    "static_kernel": StaticKernelConfig(kind="static_kernel", hidden_size=SIZE),
    "static_kernel-random": StaticKernelConfig(
        kind="static_kernel", hidden_size=SIZE, num_heads=3, feature="gaussian", num_random=6, divisor="length"
    ),
    "performer": PerformerConfig(kind="performer", hidden_size=SIZE, num_heads=3, num_random=6),
    "performer-gated": PerformerConfig(
        kind="performer", hidden_size=SIZE, num_heads=3, num_random=5, gated=True, shared_gate=True, pool=4
    ),
    "efficient": EfficientConfig(kind="efficient", hidden_size=SIZE, num_heads=3),
    "efficient-gated": EfficientConfig(
        kind="efficient", hidden_size=SIZE, num_heads=3, gated=True, short_convolution=0, value_rank=5
    ),
    "scaleformer": ScaleformerConfig(kind="scaleformer", hidden_size=SIZE, num_heads=3, reach=5),
    "scaleformer-no-reach": ScaleformerConfig(kind="scaleformer", hidden_size=SIZE, num_heads=3, reach=0),
    "scaleformer-rank-5": ScaleformerConfig(kind="scaleformer", hidden_size=SIZE, num_heads=3, reach=4, value_rank=5),
    "s4d": S4DConfig(kind="s4d", hidden_size=SIZE, state_size=8),
    "s4": S4Config(kind="s4", hidden_size=SIZE, state_size=6),
    "lssl": LsslConfig(kind="lssl", hidden_size=SIZE, state_size=6, outputs=2),
    "hippo": HippoConfig(kind="hippo", hidden_size=SIZE, state_size=7),
    "hippo-one-coefficient": HippoConfig(kind="hippo", hidden_size=SIZE, state_size=1),
    "lssl-backward": LsslConfig(kind="lssl", hidden_size=SIZE, state_size=4, alpha=1.0),
    "s4d-bilinear": S4DConfig(kind="s4d", hidden_size=SIZE, state_size=6, spectrum="legs", rule="bilinear"),
}
WHOLE = {
    "static_kernel-all-keys": StaticKernelConfig(
        kind="static_kernel", hidden_size=SIZE, num_heads=3, bidirectional=True
    ),
    "fnet": FourierConfig(kind="fnet", hidden_size=SIZE),
    "mlp_mixer": TokenMlpConfig(kind="mlp_mixer", hidden_size=SIZE, length=TOKENS, token_mlp_size=7),
    "sgconv": SgConvConfig(kind="sgconv", hidden_size=SIZE, length=TOKENS, piece=4),
    "sgconv-both-ways": SgConvConfig(kind="sgconv", hidden_size=SIZE, length=TOKENS, piece=4, bidirectional=True),
    "s4d-convolution": S4DConfig(kind="s4d", hidden_size=SIZE, state_size=4, form="convolution"),
    "s4d-both-ways": S4DConfig(kind="s4d", hidden_size=SIZE, state_size=4, form="convolution", bidirectional=True),
    "s4-both-ways": S4Config(kind="s4", hidden_size=SIZE, state_size=4, form="convolution", bidirectional=True),
    "lssl-learned": LsslConfig(kind="lssl", hidden_size=SIZE, state_size=4, transition="learned"),
}
ALL = CONFIGS | WHOLE
OVER_ALL_KEYS = {
    attention: BidirectionalConfig(
        hidden_size=SIZE, num_heads=3, attention=attention, num_random=5, reach=3, projection_bias=True
    )
    for attention in ("performer", "efficient", "scaleformer")
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
    contract.check_states(CONFIGS[name], (*CONFIGS.values(), CORE["rfa_gate"], CORE["softmax"]))


@pytest.mark.parametrize("name", ALL)
def test_costs_are_the_mixers(name):
    """Weights, the bytes of the state after some tokens, and what every rank sends are what was said, exactly."""
    contract.check_costs(ALL[name], TOKENS)


@pytest.mark.parametrize("config", OVER_ALL_KEYS.values(), ids=OVER_ALL_KEYS)
def test_costs_over_all_keys_are_the_mixers(config):
    """So they are of attention over all keys by the papers' kernels."""
    contract.check_costs(config, TOKENS)


@pytest.mark.parametrize("attention", OVER_ALL_KEYS)
def test_attention_over_all_keys_has_a_row_of_its_own(attention):
    """It is beside the causal form of its kind, which streams, as a form of `bidirectional`, which does not."""
    found = {(one.kind, one.form): one for one in mixer_facts(4096, hidden_size=32, num_heads=4, ranks=4)}
    assert found[attention, ""].streams and not found["bidirectional", attention].streams
    assert found["bidirectional", attention].travels == "a state"


@pytest.mark.parametrize("name", [name for name in CONFIGS if name.startswith(tuple(OVER_ALL_KEYS))])
def test_states_that_are_gathered_are_the_same_at_any_length(name):
    """A state and what travels for it are the same at any length."""
    costs = build_mixer(CONFIGS[name]).costs()
    short, long = ([n] * 3 for n in (100, 10_000))
    assert costs.bytes_sent(short, 0) == costs.bytes_sent(long, 0)
    assert costs.state_bytes(100) == costs.state_bytes(10_000)


def test_second_pass_of_several_ranks():
    """With several ranks Scaleformer reads a token's keys twice: once more into a state."""
    config = ScaleformerConfig(kind="scaleformer", hidden_size=64, num_heads=4, reach=5)
    one, several = config.prefill_flops(1, ranks=1), config.prefill_flops(1, ranks=5)
    assert several.state - one.state == 2 * 4 * 16 * 17
    assert (several.projections, several.features, several.scores) == (one.projections, one.features, one.scores)


def test_no_kind_is_left_out():
    """Every kind that the package offers is judged here."""
    MIXERS.load_offered()
    offered = {
        kind for kind, one in MIXERS.loaded().items() if one.config.__module__.startswith("dist_attn_papers.mix")
    }
    assert {config.kind for config in ALL.values()} == offered


def test_paradigms():
    """Every kind is in one of the four paradigms, where the paper puts it, and says so in words."""
    facts = {one.kind: one for one in mixer_facts(64, hidden_size=16, num_heads=2, ranks=2) if not one.form}
    assert [facts[kind].paradigm.value for kind in ("convolution", "softmax", "fnet", "lssl")] == [1, 2, 3, 4]
    assert build_mixer(WHOLE["lssl-learned"]).paradigm is Paradigm.LEARNED_DEPENDENT
    for kind in STATE_SPACES:
        assert facts[kind].paradigm.dependent and facts[kind].streams


def test_dependence_on_the_input_is_what_the_mixer_does():
    """Twice the input is twice the Fourier transform."""
    mixer, x = build_mixer(WHOLE["fnet"]), torch.randn(1, TOKENS, SIZE)
    assert not mixer.paradigm.dependent
    once, twice = (mixer(s * x, LocalSequenceOps())[0] for s in (1, 2))
    torch.testing.assert_close(twice, 2 * once, rtol=1e-3, atol=1e-4)


def test_forms_have_rows_of_their_own():
    """A state space as a convolution is beside its scan, with its own figures."""
    found = {(one.kind, one.form): one for one in mixer_facts(4096, hidden_size=32, num_heads=4, ranks=4)}
    for kind in ("s4", "s4d"):
        whole = found[kind, "as a convolution"]
        assert whole.causal and not whole.streams and not whole.state_bytes
        assert whole.bytes_sent > found[kind, ""].bytes_sent

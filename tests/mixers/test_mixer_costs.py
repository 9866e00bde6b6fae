"""What mixers say of themselves: paradigm, parameters, state and traffic, against the mixers and what ranks count."""

import json

import pytest
import torch
from typer.testing import CliRunner

from dist_attn.commands.cli import app
from dist_attn.commands.mixer_table import mixer_facts
from dist_attn.costs import layer_costs
from dist_attn.errors import ConfigError, InputError
from dist_attn.mixers import (
    BidirectionalConfig,
    ConvolutionConfig,
    build_mixer,
    contract,
)
from dist_attn.ops import LocalSequenceOps
from tests.mixers.test_contract import CONFIGS, SIZE
from tests.support.model_cases import built_in_mixers

TOKENS = 24
WHOLE = {
    "convolution-centred": ConvolutionConfig(kind="convolution", hidden_size=SIZE, taps=5, centred=True),
    **{
        f"all-keys-{attention}": BidirectionalConfig(
            hidden_size=SIZE, num_heads=3, attention=attention, num_random=5, projection_bias=True
        )
        for attention in ("rfa", "elu", "softmax")
    },
}
ALL = CONFIGS | WHOLE
KINDS = {*built_in_mixers()} - {"bidirectional"}


@pytest.mark.parametrize("name", ALL)
def test_costs_are_the_mixers(name):
    """Weights, the bytes of the state after some tokens, and what every rank sends are what was said, exactly."""
    contract.check_costs(ALL[name], TOKENS)
    assert bool(ALL[name].state_bytes(TOKENS)) == (ALL[name].streams and name != "convolution-pointwise")


@pytest.mark.parametrize("name", ALL)
def test_what_grows_with_the_length(name):
    """States and edge tokens are the same at any length; where all tokens travel, it is more with each of them."""
    costs = build_mixer(ALL[name]).costs()
    short, long = ([n] * 3 for n in (100, 10_000))
    assert (costs.bytes_sent(short, 0) < costs.bytes_sent(long, 0)) == costs.travels.startswith("all tokens")
    assert (costs.state_bytes(100) == costs.state_bytes(10_000)) == (ALL[name].kind != "softmax")


def test_paradigms():
    """Every kind is in one of the four paradigms, where the paper puts it, and says so in words."""
    found = mixer_facts(64, hidden_size=16, num_heads=2, ranks=2)
    facts = {one.kind: one for one in found if not one.form}
    assert facts.keys() >= KINDS
    assert {str(facts[kind].paradigm) for kind in KINDS} >= {"learned, independent", "learned, dependent"}
    assert [facts[kind].paradigm.value for kind in ("convolution", "softmax")] == [1, 2]


def test_dependence_on_the_input_is_what_the_mixers_do():
    """Twice the input is twice the mixing where the paper says that its weights do not depend on it, but for biases."""
    for name in ("convolution", "convolution-centred"):
        mixer, x = build_mixer(ALL[name]), torch.randn(1, TOKENS, SIZE)
        assert not mixer.paradigm.dependent
        nothing, once, twice = (mixer(s * x, LocalSequenceOps())[0] for s in (0, 1, 2))
        torch.testing.assert_close(twice - nothing, 2 * (once - nothing), rtol=1e-3, atol=1e-4)


def test_forms_have_rows_of_their_own():
    """What sees both sides or takes the sequence whole is beside the causal form of its kind, with its own figures."""
    found = {(one.kind, one.form): one for one in mixer_facts(4096, hidden_size=32, num_heads=4, ranks=4)}
    attentions = ("rfa", "elu", "softmax")
    assert {(kind, form) for kind, form in found if form} >= {
        ("convolution", "centred"),
        *(("bidirectional", attention) for attention in attentions),
    }  # fmt: skip
    assert not [key for key, facts in found.items() if key[1] and (facts.streams or facts.state_bytes)]
    assert found["convolution", "centred"].bytes_sent == found["convolution", ""].bytes_sent
    assert found["bidirectional", "elu"].travels == "a state"


def test_the_command_prints_all_kinds():
    """`dist-attn mixers` has a line for every kind, and its JSON holds the facts."""
    runner = CliRunner()
    sizes = ["--hidden-size", "32", "--num-heads", "4", "--tokens", "4k", "--ranks", "2"]
    text = runner.invoke(app, ["mixers", *sizes])
    assert text.exit_code == 0
    assert {line.split()[0] for line in text.stdout.splitlines() if line.strip()} >= KINDS
    assert "convolution, centred " in text.stdout and "bidirectional, softmax " in text.stdout
    told = json.loads(runner.invoke(app, ["mixers", *sizes, "--json"]).stdout)
    kinds = {one["kind"] for one in told["mixers"]}
    assert (told["tokens"], told["ranks"]) == (4000, 2)
    assert kinds >= KINDS | {"bidirectional"}
    for one, facts in zip(told["mixers"], mixer_facts(4000, hidden_size=32, num_heads=4, ranks=2), strict=True):
        assert one["paradigm"]["number"] == facts.paradigm.value
        assert (one["bytes_sent"], one["state_bytes"], one["parameters"]) == (
            facts.bytes_sent, facts.state_bytes, facts.parameters
        )  # fmt: skip


def test_one_rank_sends_nothing():
    """Alone, no kind sends a byte."""
    assert {one.bytes_sent for one in mixer_facts(100, hidden_size=8, num_heads=2, ranks=1)} == {0}


def test_sizes_that_make_no_mixer_are_refused():
    """Heads that do not divide, and values that are no mixer's, are refused in words."""
    with pytest.raises(InputError, match="cannot have these sizes: hidden_size 9 must be a multiple of num_heads 2"):
        mixer_facts(10, hidden_size=9, num_heads=2, ranks=1)
    with pytest.raises(ConfigError, match="'abacus'"):
        layer_costs({"kind": "abacus", "hidden_size": 4})
    with pytest.raises(ConfigError, match="not the configuration of a mixer"):
        layer_costs({"kind": "convolution"})

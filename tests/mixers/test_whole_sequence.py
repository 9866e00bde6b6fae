"""Mixers that take a sequence whole: over ranks as on one, and no step."""

import pytest
import torch
from pydantic import ValidationError

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError
from dist_attn.layout import SequenceLayout
from dist_attn.mixers import MixerConfig, build_mixer
from dist_attn.mixers.contract import check_autocast
from dist_attn.models import LanguageModelConfig
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from tests.support.closeness import assert_close

SIZE, LENGTH = 6, 40
MIXERS = {
    "convolution, centred": {"kind": "convolution", "taps": 9, "centred": True},
}  # fmt: skip


def _mixer(name: str):
    torch.manual_seed(0)
    return build_mixer(MixerConfig.model_validate({"hidden_size": SIZE, **MIXERS[name]})).double()


@pytest.mark.parametrize("lengths", [(17, 23), (0, 11, 2, 27), (40, 0)])
@pytest.mark.parametrize("name", MIXERS)
def test_ranks_change_nothing(name, lengths):
    """Over several ranks outputs and the gradients of inputs and parameters are those of one rank."""
    layout = SequenceLayout.from_lengths(lengths)
    g = torch.Generator().manual_seed(1)
    x, weights = (torch.randn(2, LENGTH, SIZE, generator=g, dtype=torch.float64) for _ in range(2))
    initial = _mixer(name).state_dict()

    def run(ops, start: int, stop: int):
        mixer = build_mixer(MixerConfig.model_validate({"hidden_size": SIZE, **MIXERS[name]})).double()
        mixer.load_state_dict(initial)
        mine = x[:, start:stop].clone().requires_grad_()
        y, _ = mixer(mine, ops)
        (y * weights[:, start:stop]).sum().backward()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in mixer.named_parameters()}
        return y.detach(), mine.grad, gradients

    def body(comm: Communicator):
        return run(ShardedSequenceOps(comm, layout), *layout.range(comm.rank))

    want = run(LocalSequenceOps(), 0, LENGTH)
    ranks = run_simulated(body, len(lengths))
    assert_close(torch.cat([r[0] for r in ranks], 1), want[0])
    assert_close(torch.cat([r[1] for r in ranks], 1), want[1], kind="gradient")
    for parameter, gradient in want[2].items():
        assert_close(torch.stack([r[2][parameter] for r in ranks]).sum(0), gradient, kind="gradient", what=parameter)


@pytest.mark.parametrize("name", MIXERS)
def test_a_step_of_training_under_autocast(name):
    """Under bf16 autocast outputs and gradients are finite, and those of float32 as far as bf16 can tell."""
    check_autocast(MixerConfig.model_validate({"hidden_size": SIZE, **MIXERS[name]}), LENGTH)


@pytest.mark.parametrize("name", MIXERS)
def test_there_is_no_step(name):
    """Asked for a step, or given a state, each says so in words; nor can a language model have it."""
    mixer = _mixer(name)
    state = mixer.initial_state(1)
    with pytest.raises(InputError, match="has no step; take a causal mixer"):
        mixer.step(torch.zeros(1, SIZE, dtype=torch.float64), state)
    foreign = build_mixer(MixerConfig.model_validate({"kind": "mamba", "hidden_size": SIZE})).initial_state(1)
    with pytest.raises(InputError, match="takes no state"):
        mixer(torch.zeros(1, LENGTH, SIZE, dtype=torch.float64), LocalSequenceOps(), foreign)
    sizes = {"vocab_size": 9, "hidden_size": SIZE, "num_layers": 1, "mlp_size": 8}
    with pytest.raises(ValidationError, match="takes a sequence whole"):
        LanguageModelConfig.model_validate({**sizes, "mixer": {"hidden_size": SIZE, **MIXERS[name]}})


@pytest.mark.parametrize(
    "values",
    [
        {"kind": "convolution", "taps": 0},
    ],
)
def test_bad_configurations_are_refused(values):
    """No taps are refused."""
    with pytest.raises(ValidationError):
        MixerConfig.model_validate({"hidden_size": SIZE, **values})

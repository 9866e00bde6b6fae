"""A decode step of transformers' modules is one graph for torch.compile."""

import pytest
import torch
from transformers import Mamba2Config, Mamba2ForCausalLM

from dist_attn.adapters.model import AdaptedModel
from dist_attn.errors import InputError
from tests.support.closeness import assert_close


def small_model() -> AdaptedModel:
    """One layer of Mamba-2."""
    torch.manual_seed(0)
    config = Mamba2Config(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_heads=4, head_dim=8, state_size=8, n_groups=2,
        bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return AdaptedModel(Mamba2ForCausalLM(config))


def test_a_compiled_step_is_the_step() -> None:
    """Traced without a break in it, a step gives the logits and the states of the same step as it is."""
    model = small_model()
    with torch.inference_mode():
        _, state = model.hidden(torch.tensor([[3, 1, 4], [1, 5, 9]]))
        x_BD = model.embed_step(torch.tensor([2, 6]), state)
        logits_BV, layers = model.step_layers(x_BD, state)
        compiled = torch.compile(model.step_layers, fullgraph=True, dynamic=False, backend="eager")
        found_BV, found = compiled(x_BD, state)
    assert_close(found_BV, logits_BV)
    for one, expected in zip(found, layers, strict=True):
        for got, want in zip(one.tensors(), expected.tensors(), strict=True):
            assert_close(got, want)


def test_a_pass_that_misses_operations_is_refused() -> None:
    """Where modules went past operations along the sequence, there is an error and no state with holes."""
    model = small_model()
    state = model.initial_state(1)
    model.parts[0].forward = lambda hidden_states, **_: hidden_states
    with pytest.raises(InputError, match=r"called 0 operations .* its state is of 2; compile a step with fullgraph"):
        model.step(torch.tensor([2]), state)


def test_a_pass_with_too_many_operations_is_refused() -> None:
    """Where a layer runs twice, the state that would be read for the second time does not exist, and that is said."""
    model = small_model()
    state, once = model.initial_state(1), model.parts[0].forward
    model.parts[0].forward = lambda hidden_states, **more: once(once(hidden_states, **more), **more)
    with pytest.raises(InputError, match="called more than the 2 operations along the sequence"):
        model.step(torch.tensor([2]), state)

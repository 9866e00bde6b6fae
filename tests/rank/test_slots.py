"""A request's bits do not depend on the slots that others have."""

import pytest
import torch

from dist_attn.model_config.mixer import registered_mixers
from dist_attn.rank import decode_slots
from dist_attn.rank.decode_slots import DecodeSlots
from dist_attn.wire.messages import SamplingSpec
from dist_attn.wire.rank_messages import DecodeEntry
from tests.support.model_cases import streaming_kinds
from tests.support.models import small_config, small_model
from tests.support.slots import digests

GATED = {"norm": {"kind": "rms"}, "mlp": {"kind": "gated", "activation": "silu", "bias": False}}
VOCABULARY = small_config().vocab_size


@pytest.mark.parametrize("kind", [kind for kind in streaming_kinds() if kind != "hybrid"])
def test_every_mixer_has_the_same_bits_in_full_batches(kind):
    """Of any heads, tokens, log-probabilities and states are alone what they are beside 1, 3, 7 and 15 others."""
    fields = registered_mixers()[kind].model_fields
    for heads in (1, 3, 6, 7):
        asked = {"num_heads": heads, "num_random": 6}
        size = 4 * heads
        mixer = {"kind": kind, "hidden_size": size} | {name: asked[name] for name in asked if name in fields}
        block = GATED if heads % 2 else {"mlp": {"activation": "gelu_tanh"}}
        model = small_model(small_config(hidden_size=size, mlp_size=size + heads, mixer=mixer, block=block))
        assert len(set(digests(model, vocabulary=VOCABULARY))) == 1, f"{heads} heads"


@pytest.mark.parametrize(("bound", "threads"), [(decode_slots.WEIGHTS_OF_ONE_THREAD, 1), (0, 3)])
def test_a_small_model_steps_on_one_thread(bound, threads, monkeypatch):
    """Others keep all; the process has its threads again behind each step, and behind one that fails."""
    monkeypatch.setattr(decode_slots, "WEIGHTS_OF_ONE_THREAD", bound)
    model, before = small_model(small_config("rfa_gate")), torch.get_num_threads()
    seen: list[int] = []

    def look(*_: object) -> None:
        seen.append(torch.get_num_threads())
        if len(seen) > 1:
            raise ValueError("the second step")

    model.norm.register_forward_pre_hook(look)
    try:
        torch.set_num_threads(3)
        with torch.inference_mode():
            slots = DecodeSlots(model)
            slots.take_in(0, model.initial_state(1), SamplingSpec(4, seed=0))
            slots.draw([DecodeEntry(0, 5)])
            assert torch.get_num_threads() == 3
            with pytest.raises(ValueError, match="the second step"):
                slots.draw([DecodeEntry(0, None)])
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [threads, threads]

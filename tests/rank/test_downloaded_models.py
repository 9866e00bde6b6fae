"""A rank reads and writes with a model of transformers as with one of ours."""

import numpy as np
import pytest
import torch

from dist_attn.adapters.model import load_adapted_model
from dist_attn.comm import run_simulated
from dist_attn.control.scheduler import split
from dist_attn.generation import StateShapes
from dist_attn.rank.decode_slots import DecodeSlots
from dist_attn.rank.executor import ModelExecutor
from dist_attn.rank.state_bytes import read_state, write_state
from dist_attn.wire.messages import SamplingSpec
from dist_attn.wire.rank_messages import DecodeEntry, DecodeOp, OpenOp, PrefillOp
from tests.support.downloaded import VOCABULARY, qwen3_next, save

transformers = pytest.importorskip("transformers", reason="the folder is written by transformers")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
PROMPT = np.random.default_rng(2).integers(3, VOCABULARY, 1200).astype("<i4")
DRAWN = 12


@torch.inference_mode()
def test_draws_do_not_depend_on_those_beside_them(tmp_path):
    """With experts too, whose products hold tokens of all sequences, a request's draws have the bits of one alone."""
    model = load_adapted_model(save(qwen3_next(), tmp_path / "model"))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=parameter.shape[-1] ** -0.5)

    def drawn(requests):
        slots = DecodeSlots(model)
        for request in requests:
            state = model.hidden(torch.from_numpy(PROMPT[None, request : request + 40].astype(np.int64)))[1]
            slots.take_in(request, state, SamplingSpec(DRAWN, seed=request, logprobs=0))
        firsts = [slots.draw([DecodeEntry(request, 5) for request in requests])]
        more = [slots.draw([DecodeEntry(request, None) for request in requests]) for _ in range(DRAWN - 1)]
        return [one for step in firsts + more for one in step if one.request == 1]

    assert drawn([1, 2, 3]) == drawn([1])


@pytest.mark.parametrize("steps", ["eager", "captured"])
@torch.inference_mode()
def test_a_cache_that_a_window_keeps_at_one_size_is_saved(steps, tmp_path):
    """The tokens that it has dropped are counted, so that the state comes back from its bytes and goes on."""
    theirs = transformers.MistralConfig(vocab_size=VOCABULARY, sliding_window=8, **SIZES)
    model = load_adapted_model(save(transformers.AutoModelForCausalLM.from_config(theirs), tmp_path / "model"))
    slots = DecodeSlots(model, steps=steps)
    slots.take_in(1, model.hidden(torch.from_numpy(PROMPT[None, :20].astype(np.int64)))[1], SamplingSpec(DRAWN))
    for _ in range(5):
        slots.draw([DecodeEntry(1, 5)])
    state = slots.state_of(1)[0]
    back = read_state(write_state(state), StateShapes.of(model))
    assert [layer.cache.tokens for layer in back.layers] == [25, 25]
    assert torch.equal(model.step(torch.tensor([7]), back)[0], model.step(torch.tensor([7]), state)[0])


@pytest.mark.parametrize("ranks", [1, 3])
def test_greedy_tokens_are_those_of_generate(ranks, tmp_path):
    """After a prompt that was read over any number of ranks, greedy tokens are those of transformers' generate."""
    theirs = qwen3_next()
    folder = save(theirs, tmp_path / "model")
    prompt_1L = torch.from_numpy(PROMPT.astype(np.int64))[None]
    wanted = theirs.generate(prompt_1L, max_new_tokens=DRAWN, do_sample=False, eos_token_id=None)[0, len(PROMPT) :]

    def rank_work(comm):
        made = ModelExecutor(load_adapted_model(folder), comm, name="downloaded")
        made.open(OpenOp(1, None, SamplingSpec(DRAWN, temperature=0.0)))
        block = PROMPT[:-1]
        lengths = split(0, len(block), ranks)
        start = sum(lengths[: comm.rank])
        own = block[start : start + lengths[comm.rank]]
        made.prefill(PrefillOp(1, 0, list(lengths), own.tobytes(), None))
        if comm.rank:
            return None
        entries = [DecodeEntry(1, int(PROMPT[-1])), *(DecodeEntry(1, None) for _ in range(DRAWN - 1))]
        return [made.decode(DecodeOp([entry]))[0].token for entry in entries]

    assert run_simulated(rank_work, ranks)[0] == wanted.tolist()

"""Repetition is penalised over prompt and draws alike, and a request that goes on elsewhere draws the same tokens."""

from collections import Counter

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dist_attn.adapters.model import AdaptedModel
from dist_attn.comm.local import LocalCommunicator
from dist_attn.generation import generate
from dist_attn.rank.executor import ModelExecutor
from dist_attn.wire.messages import SamplingSpec
from dist_attn.wire.rank_messages import DecodeEntry, DecodeOp, OpenOp, PrefillOp
from tests.support.models import small_config, small_model

PROMPT = np.random.default_rng(3).integers(0, 60, 40).astype(np.int32)
ASKED = SamplingSpec(40, temperature=0.8, seed=3, repetition_penalty=1.7, presence_penalty=0.2)


def empty_rank() -> ModelExecutor:
    """A rank that no request is open on."""
    return ModelExecutor(small_model(small_config("rfa_gate")), LocalCommunicator(), name="small", end_tokens=[])


def opened(spec: SamplingSpec) -> ModelExecutor:
    """A rank that has read the prompt but for its last token."""
    made = empty_rank()
    made.open(OpenOp(1, None, spec))
    made.prefill(PrefillOp(1, 0, [len(PROMPT) - 1], PROMPT[:-1].tobytes()))
    return made


def drawn_on(made: ModelExecutor, token: int, count: int) -> list[int]:
    """The next tokens, the first of them after `token`."""
    entries = [DecodeEntry(1, token)] + [DecodeEntry(1)] * (count - 1)
    return [made.decode(DecodeOp([entry]))[0].token for entry in entries]


def test_a_rank_draws_what_the_model_alone_draws() -> None:
    """With the tokens of the prompt in the specification; without them, and without a penalty, it draws others."""
    alone = generate(small_model(small_config("rfa_gate")), PROMPT, ASKED)
    last = int(PROMPT[-1])
    assert drawn_on(opened(ASKED.after(PROMPT)), last, 40) == alone
    assert drawn_on(opened(ASKED), last, 40) != alone


def test_a_saved_request_goes_on_bit_for_bit() -> None:
    """After a loss the specification, the saved state and the counts of what was drawn are all that is needed."""
    spec = ASKED.after(PROMPT)
    first = opened(spec)
    drawn = drawn_on(first, int(PROMPT[-1]), 15)
    saved, state = first.save(1)
    second = empty_rank()
    second.open(OpenOp(1, None, spec, saved, dict(Counter(drawn[:-1]))), state)
    assert drawn_on(second, drawn[-1], 25) == drawn_on(first, drawn[-1], 25)


@pytest.mark.parametrize("penalty", [0.6, 1.0, 1.3])
@torch.inference_mode()
def test_greedy_text_is_that_of_transformers(penalty: float) -> None:
    """Of a downloaded model, with its prompt counted."""
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    theirs = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=60, initializer_range=0.4)).eval()
    ids = torch.from_numpy(PROMPT.astype(np.int64))[None]
    want = theirs.generate(
        ids, max_new_tokens=30, do_sample=False, repetition_penalty=penalty, eos_token_id=None, pad_token_id=0
    )[0, len(PROMPT) :]
    theirs.set_attn_implementation("dist_attn")
    spec = SamplingSpec(30, temperature=0.0, repetition_penalty=penalty)
    assert generate(AdaptedModel(theirs), PROMPT, spec) == want.tolist()

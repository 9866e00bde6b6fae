"""Every supported type of transformers: its logits over our operations, its states, and the page that lists it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from dist_attn.adapters.model import AdaptedModel, load_adapted_model
from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import ConfigError
from dist_attn.layout import SequenceLayout
from dist_attn.models import ModelState
from dist_attn.ops import local_sequence_ops
from dist_attn.ops.affine import AffineCall
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.shipped.downloaded import SUPPORTED
from tests.adapters import context_parallel_table
from tests.support.foreign_models import (
    BLOCK,
    TYPES,
    VOCABULARY,
    WAYS,
    after_a_block,
    compared,
    distances,
    forked,
    restored_elsewhere,
    with_heads,
    written,
)
from tests.support.slots import digests

FURTHEST = 1e-4


@pytest.mark.parametrize("kind", TYPES)
def test_logits_are_those_of_transformers(kind: str) -> None:
    """Read whole, in blocks, by steps and over ranks with uneven and empty slices, logits are transformers' own."""
    case = compared(kind)
    apart = (case.want_BLV[0, 5] - case.want_BLV[1, 5]).abs().max().item()
    assert apart > 10 * FURTHEST, "the logits hardly depend on the text"
    found = dict(zip(WAYS, distances(case), strict=True))
    assert max(found.values()) <= FURTHEST, found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
@torch.inference_mode()
def test_a_model_that_was_loaded_with_another_attention_sees_the_other_ranks(kind: str, attention: str) -> None:
    """Whatever attention transformers gave a model, over two ranks its logits are its own; by itself it is refused."""
    theirs, tokens_BL = written(kind)
    theirs.set_attn_implementation(attention)
    want_BLV = theirs(tokens_BL, use_cache=False).logits
    ours, cut = AdaptedModel(theirs), tokens_BL.shape[1] // 3

    def read(comm: Communicator) -> torch.Tensor:
        ops = ShardedSequenceOps(comm, SequenceLayout((0, cut, tokens_BL.shape[1])))
        return ours.readout(ours.hidden(tokens_BL[:, :cut] if comm.rank == 0 else tokens_BL[:, cut:], ops)[0])

    found_BLV = torch.cat(run_simulated(read, 2), dim=1)
    assert (found_BLV - want_BLV).abs().max().item() <= FURTHEST
    with pytest.raises(RuntimeError, match="call the whole model"):
        theirs(tokens_BL)


def test_a_type_that_is_not_bound_is_refused() -> None:
    """A model whose operations along the sequence nobody has bound is named, with those that are supported."""
    sizes = {"n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 9, "bos_token_id": 0, "eos_token_id": 0}
    with pytest.raises(ConfigError, match="type 'gpt2' was given; supported are qwen3_next"):
        AdaptedModel(GPT2LMHeadModel(GPT2Config(**sizes)))


@pytest.mark.parametrize("kind", TYPES)
@torch.inference_mode()
def test_a_restored_state_goes_on_bit_for_bit(kind: str) -> None:
    """A new process that reads the bytes of a snapshot goes on as the one that wrote them does, bit for bit."""
    case = compared(kind)
    stayed_BLD, _ = case.ours.hidden(case.tokens_BL[:1, BLOCK:], None, after_a_block(case).select(0))
    assert torch.equal(restored_elsewhere()[kind], stayed_BLD)


@pytest.mark.parametrize("kind", TYPES)
@torch.inference_mode()
def test_forks_go_on_by_themselves(kind: str) -> None:
    """Forks that stand side by side are given different tokens, and each has the logits of its own text."""
    case = compared(kind)
    assert (forked(case) - case.want_BLV[:, BLOCK:]).abs().max().item() <= FURTHEST


@pytest.mark.parametrize("kind", TYPES)
@torch.inference_mode()
def test_texts_of_different_lengths_decode_side_by_side(kind: str) -> None:
    """Each has its own logits, with the bits of one that has empty slots beside it."""
    case, places = compared(kind), [BLOCK, BLOCK + 2]
    states = [case.ours.hidden(case.tokens_BL[row : row + 1, :place])[1] for row, place in enumerate(places)]
    token_B = torch.zeros(8, dtype=torch.int64)
    token_B[:2] = case.tokens_BL[[0, 1], places]
    both_BV, _ = case.ours.step(token_B, ModelState.beside(states, 8))
    token_B[1] = 0
    alone_BV, _ = case.ours.step(token_B, ModelState.beside(states[:1], 8))
    assert torch.equal(both_BV[0], alone_BV[0])
    assert (both_BV[:2] - case.want_BLV[[0, 1], places]).abs().max().item() <= FURTHEST


# Every type has each number of heads and each number of others, and over all types each of these two meets the other.
COMPANIES = ((0, 1, 15), (0, 3), (0, 7))


@pytest.mark.parametrize(("place", "kind"), list(enumerate(TYPES)), ids=list(TYPES))
def test_full_batches_change_no_bit(place: int, kind: str, tmp_path: Path) -> None:
    """Of any heads, tokens, log-probabilities and states are alone what they are beside 1, 3, 7 and 15 others."""
    for number, heads in enumerate((3, 6, 7)):
        written(kind, **with_heads(kind, heads))[0].save_pretrained(tmp_path / str(heads))
        model, companies = load_adapted_model(tmp_path / str(heads)), COMPANIES[(place + number) % 3]
        assert len(set(digests(model, vocabulary=VOCABULARY, companies=companies))) == 1, f"{heads} heads"


# A choice of experts that flips moves logits further than all rounding does, in transformers' bfloat16 as in ours:
# where there are experts, all of them are asked.
EVERY_EXPERT = {"qwen3_next": {"num_experts_per_tok": 8}, "bailing_hybrid": {"topk_group": 4, "num_experts_per_tok": 8}}


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2", "bailing_hybrid", "llama"])
@torch.inference_mode()
def test_bfloat16_is_as_near_as_that_of_transformers(kind: str, tmp_path: Path) -> None:
    """In bfloat16 the mean square distance from float32, over three models, is at most 1.1 times transformers' own."""
    ours, theirs = 0.0, 0.0
    for seed in range(3):
        wide, tokens_BL = written(kind, seed, **EVERY_EXPERT.get(kind, {}))
        wide.save_pretrained(tmp_path)
        want_BLV = wide(tokens_BL, use_cache=False).logits
        narrow = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager")
        theirs += (narrow(tokens_BL, use_cache=False).logits - want_BLV).square().mean().item()
        ours += (load_adapted_model(tmp_path, torch.bfloat16).logits(tokens_BL) - want_BLV).square().mean().item()
    assert ours**0.5 <= 1.1 * theirs**0.5


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2", "bailing_hybrid", "minimax"])
@torch.inference_mode()
def test_kernels_may_multiply_in_the_type_of_the_weights(kind: str, tmp_path: Path, monkeypatch) -> None:
    """Recurrences whose inputs transformers widens name the weights' bfloat16 to kernels that multiply in one type."""
    asked, run = [], local_sequence_ops.run_locally

    def noted(call):
        asked.extend([call.products_dtype()] if isinstance(call, AffineCall) else [])
        return run(call)

    monkeypatch.setattr(local_sequence_ops, "run_locally", noted)
    model, tokens_BL = written(kind)
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        asked.clear()
        load_adapted_model(tmp_path, dtype).logits(tokens_BL)
        assert set(asked) == {dtype}


def test_every_supported_type_is_compared() -> None:
    """What is served is what is compared here, in this order."""
    assert list(TYPES) == list(SUPPORTED)


def test_the_page_of_gradients_lists_what_is_supported() -> None:
    """`docs/measurements/context-parallel.md` has a row for each type, none with a gradient of another document."""
    page = context_parallel_table.PAGE.read_text()
    assert context_parallel_table.listed(page) == list(TYPES)
    assert "**" not in page

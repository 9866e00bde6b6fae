"""The stream encoder: a sentence encoder over blocks, and context that goes on from block to block."""

import math
from typing import Any

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.conversion import begin_stream_encoder
from dist_attn.conversion.stream_encoder import memory_of, remember
from dist_attn.errors import ConfigError, InputError
from dist_attn.layout import SequenceLayout
from dist_attn.model_config import figures
from dist_attn.model_config.figures import GRAIN
from dist_attn.models import ContextConfig, StreamEncoder, TextEncoder, TextEncoderConfig, build_model, stream_encoder
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from tests.support.closeness import assert_close
from tests.support.over_ranks import assert_ranks_change_nothing, randomised

BLOCK, DIM, VOCABULARY = 8, 16, 40
PAIR = 2 * BLOCK
GATED_DELTA = {"kind": "gated_delta", "hidden_size": DIM, "num_heads": 2}
MIXERS: dict[str, dict[str, Any]] = {
    "gated_delta": GATED_DELTA,
    "rfa_gate": {"kind": "rfa_gate", "hidden_size": DIM, "num_heads": 2, "num_random": 8},
    "mamba": {"kind": "mamba", "hidden_size": DIM},
}


def teacher(attention: dict[str, Any] | None = None, **changes: Any) -> TextEncoder:
    """A small random sentence encoder of BERT's shape, in float64."""
    mixer = {"kind": "bidirectional", "hidden_size": DIM, "num_heads": 2, "attention": "softmax"}
    encoder = {
        "hidden_size": DIM,
        "num_layers": 2,
        "mlp_size": 24,
        "mixer": mixer | {"projection_bias": True} | (attention or {}),
        "block": {"norm_placement": "post"},
        "positions": "learned",
        "max_length": 24,
        "embedding_norm": True,
    }
    values = {"vocab_size": VOCABULARY, "encoder": encoder, "max_tokens": BLOCK + 2, "prefix": [1], "suffix": [2]}
    return randomised(build_model(TextEncoderConfig.model_validate(values | changes)))


def context(mixer: dict[str, Any], num_layers: int = 2) -> ContextConfig:
    return ContextConfig.model_validate({"num_layers": num_layers, "mlp_size": 20, "mixer": mixer})


def small(mixer: dict[str, Any] = GATED_DELTA, **attention: Any) -> StreamEncoder:
    """All parts random, in float64."""
    return randomised(begin_stream_encoder(teacher(attention), BLOCK, context(mixer)))


def tokens(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(length))


@pytest.mark.parametrize(("length", "blocks"), [(5, (5,)), (BLOCK, (BLOCK,)), (BLOCK + 1, (5, 4)), (PAIR - 1, (8, 7))])
@pytest.mark.parametrize("mixer", [*MIXERS.values(), None], ids=[*MIXERS, "none"])
def test_it_begins_with_the_hidden_states_of_the_sentence_encoder(
    mixer: dict[str, Any] | None, length: int, blocks: tuple[int, ...]
) -> None:
    """Each block has the hidden states that the sentence encoder gives it alone; what is left at the end is halved."""
    own, text_BL = teacher(), tokens(PAIR + length)
    model = begin_stream_encoder(own, BLOCK, None if mixer is None else context(mixer)).double().eval()
    model.sentence.load_state_dict(own.state_dict())
    h_BLD, state = model.hidden(text_BL)
    want = [own.hidden(own.frame(part_BC))[:, 1:-1] for part_BC in text_BL.split((BLOCK, BLOCK, *blocks), dim=1)]
    assert_close(h_BLD, torch.cat(want, dim=1))
    assert_close(model.blocks_hidden(text_BL), h_BLD)
    assert state.position == text_BL.shape[1]


@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_a_text_read_in_steps_gives_what_it_gives_whole(mixer: dict[str, Any]) -> None:
    """Steps of whole pairs of blocks, and a last one that ends inside one, across the grid of batches."""
    model, text_BL = small(mixer), tokens(512 + 3 * PAIR + 5)
    want_BLD, want = model.hidden(text_BL)
    state, parts = None, []
    for part_BL in text_BL.split([PAIR, 0, 5 * PAIR, 512 - 4 * PAIR, PAIR + 5], dim=1):
        h_BLD, state = model.hidden(part_BL, None, state)
        parts.append(h_BLD)
    assert_close(torch.cat(parts, dim=1), want_BLD)
    assert state is not None and state.position == want.position
    for own, wanted in zip(state.layers, want.layers, strict=True):
        for got, needed in zip(own.tensors(), wanted.tensors(), strict=True):
            assert_close(got, needed, kind="state")


@torch.inference_mode()
def test_blocks_are_read_together_as_the_device_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU the grid of ranks bounds a pass of the sentence encoder, elsewhere a few times as much; rows agree."""
    many = 4 * GRAIN
    monkeypatch.setattr(figures, "GPU_TOKENS", many)
    model, text_BL = small(), tokens(many + GRAIN + BLOCK, batch=1)
    passes: list[int] = []
    model.sentence.encoder.register_forward_hook(lambda _, given, __: passes.append(given[0].shape[0]))
    want_BLD = model.hidden(text_BL)[0]
    on_cpu = passes.copy()
    passes.clear()
    model.to("meta").hidden(text_BL)
    assert on_cpu == [GRAIN // BLOCK] * (many // GRAIN + 1) + [1]
    assert passes == [many // BLOCK, GRAIN // BLOCK, 1]
    monkeypatch.setattr(stream_encoder, "tokens_at_once", lambda _: many)
    assert_close(small().hidden(text_BL)[0], want_BLD)


packs = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="weights are packed on processors with AVX2 or AVX-512",
)


@packs
@pytest.mark.parametrize("bias", [True, False])
@torch.inference_mode()
def test_packed_weights_change_no_hidden_state(bias: bool) -> None:
    """Long texts, and short ones of more tokens than are read together."""
    model = small(projection_bias=bias).float()
    long_BL = tokens(GRAIN + 3 * PAIR + 5, batch=1)
    short = [tokens(length, batch=1)[0] for length in [*range(1, PAIR)] * 20]
    want_BLD, want = model.hidden(long_BL)[0], model.short_hidden(short)
    model.pack_weights()
    assert_close(model.hidden(long_BL)[0], want_BLD)
    for got_1LD, want_1LD in zip(model.short_hidden(short), want, strict=True):
        assert_close(got_1LD, want_1LD)


@packs
@torch.inference_mode()
def test_whole_blocks_are_read_by_packed_weights() -> None:
    """With their own weights lost, linear layers still read what they were packed for, and nothing else."""
    model = small().float()
    model.pack_weights()
    for layer in model.sentence.encoder.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.weight.fill_(torch.nan)
    assert bool(model.hidden(tokens(GRAIN, batch=1))[0].isfinite().all())
    assert bool(model.hidden(tokens(PAIR, batch=1))[0].isnan().all())


@pytest.mark.parametrize("lengths", [(PAIR, 3 * PAIR, PAIR + 3), (0, 2 * PAIR, 0, BLOCK + 5)], ids=str)
@pytest.mark.parametrize("mixer", MIXERS.values(), ids=MIXERS)
def test_ranks_change_neither_outputs_nor_gradients(mixer: dict[str, Any], lengths: tuple[int, ...]) -> None:
    """Slices of whole pairs of blocks, some longer and some empty, give the loss and every gradient of one process."""
    layout = SequenceLayout.from_lengths(lengths)
    text_BL = tokens(layout.total)
    weight_BLD = torch.randn(2, layout.total, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(3))

    def share(model: torch.nn.Module, comm: Communicator | None) -> torch.Tensor:
        assert isinstance(model, StreamEncoder)
        start, stop = (0, layout.total) if comm is None else layout.range(comm.rank)
        ops = LocalSequenceOps() if comm is None else ShardedSequenceOps(comm, layout)
        h_BLD, _ = model.hidden(text_BL[:, start:stop], ops)
        return (h_BLD * weight_BLD[:, start:stop]).sum()

    assert_ranks_change_nothing(lambda: small(mixer), share, len(lengths))


@pytest.mark.parametrize("lengths", [(PAIR + 1, PAIR), (PAIR - 1, 0, 4), (BLOCK, PAIR), (0, 3, 2 * PAIR)], ids=str)
def test_a_cut_inside_a_pair_of_blocks_is_refused_on_every_rank(lengths: tuple[int, ...]) -> None:
    """Also on ranks whose own slice begins with a pair, or has no tokens."""
    layout, model = SequenceLayout.from_lengths(lengths), small()
    text_BL = tokens(layout.total)

    def read(comm: Communicator) -> str:
        start, stop = layout.range(comm.rank)
        with pytest.raises(InputError) as refused:
            model.hidden(text_BL[:, start:stop], ShardedSequenceOps(comm, layout))
        return str(refused.value)

    assert all("inside a pair of blocks of 16" in words for words in run_simulated(read, len(lengths)))


def test_a_text_ends_with_an_unfinished_pair() -> None:
    """What was read short of a pair's end cannot be gone on from; nothing more is no reading on."""
    model = small()
    _, state = model.hidden(tokens(BLOCK + 3))
    assert model.hidden(tokens(0), None, state)[1].position == BLOCK + 3
    with pytest.raises(InputError, match="stands at token 11, inside a pair of blocks of 16"):
        model.hidden(tokens(BLOCK), None, state)


def test_packed_documents_are_refused() -> None:
    """Documents in one sequence have blocks of their own, which this model does not look for."""
    with pytest.raises(InputError, match="packed documents"):
        small().hidden(tokens(2 * BLOCK), LocalSequenceOps(documents=(0, BLOCK)))


@pytest.mark.parametrize(
    ("changes", "block", "own", "words"),
    [
        ({}, 7, context(GATED_DELTA), "multiples of 512, which it must divide"),
        ({}, 32, context(GATED_DELTA), "max_tokens 34 is over the encoder's max_length 24"),
        ({}, BLOCK, context(GATED_DELTA | {"hidden_size": 32}), "must equal the sentence encoder's 16"),
        ({"pooling": "first"}, BLOCK, None, "whose pooling is mean"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    changes: dict[str, Any], block: int, own: ContextConfig | None, words: str
) -> None:
    """The words say which of the values it is."""
    with pytest.raises(ConfigError, match=words):
        begin_stream_encoder(teacher(**changes), block, own)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"mixer": GATED_DELTA | {"kind": "bidirectional", "attention": "rfa"}}, "takes a sequence whole"),
        ({"mixer": GATED_DELTA, "block": {"norm_placement": "post"}}, "norm_placement = pre"),
    ],
)
def test_context_that_cannot_stream_or_would_change_what_it_adds_to_is_refused(
    values: dict[str, Any], words: str
) -> None:
    """Mixers go on from a state, and layers leave what they add nothing to as it is."""
    with pytest.raises(ValueError, match=words):
        ContextConfig.model_validate({"num_layers": 1, "mlp_size": 20, **values})


def test_memory_is_a_decaying_mean():
    """The context that is set adds a share of a mean of the blocks' hidden states so far, which fades with age."""
    own, tokens, share = teacher(), 40.0, 0.4
    model = remember(begin_stream_encoder(own, BLOCK, memory_of(own.config.encoder.hidden_size)), tokens, share).eval()
    text_1L = torch.randint(own.config.vocab_size, (1, 3 * BLOCK), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        h_LD, read_LD = model.hidden(text_1L)[0][0], model.blocks_hidden(text_1L)[0]
    normed_LD = read_LD - read_LD.mean(-1, keepdim=True)
    normed_LD = normed_LD / normed_LD.std(-1, correction=0, keepdim=True)
    age_LL = torch.arange(len(h_LD))[:, None] - torch.arange(len(h_LD))
    weight_LL = torch.where(age_LL >= 0, torch.exp(-age_LL / tokens), torch.zeros(()))
    mean_LD = (1 - math.exp(-1 / tokens)) * weight_LL @ normed_LD
    added_LD = h_LD - read_LD
    scale = (added_LD * mean_LD).sum() / mean_LD.square().sum()
    torch.testing.assert_close(added_LD, scale * mean_LD, atol=1e-4, rtol=1e-3)
    assert 0 < scale < 2 * share * read_LD.std()

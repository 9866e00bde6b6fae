"""A fused encoder reads what its layers read one by one, to the digits of bfloat16, each text as if alone."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from dist_attn.errors import NotFiniteError
from dist_attn.models import TextEncoder, TextEncoderConfig, build_model
from dist_attn.ops import FiniteCheck, LocalSequenceOps, Watch, watching
from dist_attn.ops.finite import checked
from dist_attn.ops.fused_encoder import takes_encoder
from tests.support.over_ranks import randomised

needs_kernel = pytest.mark.skipif(not takes_encoder(), reason="no C compiler, or no products of bfloat16 numbers")
VOCABULARY, LONGEST = 50, 140
LENGTHS = (1, 16, 29, 30, 31, LONGEST - 2)  # around the edges of squares, with a frame of two


def encoder(size: int = 64, heads: int = 2, inner: int = 96, *, bias: bool = True, **block: Any) -> TextEncoder:
    """Random weights of BERT's shape, in float32."""
    mixer = {"kind": "bidirectional", "hidden_size": size, "num_heads": heads, "attention": "softmax"}
    layers = {
        "hidden_size": size,
        "num_layers": 2,
        "mlp_size": inner,
        "mixer": mixer | {"projection_bias": bias},
        "block": {"norm_placement": "post", "mlp": {"activation": "gelu"}} | block,
        "positions": "learned",
        "max_length": LONGEST,
        "embedding_norm": True,
    }
    values = {"vocab_size": VOCABULARY, "encoder": layers, "max_tokens": LONGEST, "token_types": 2}
    values |= {"prefix": [1], "suffix": [2]}
    return randomised(build_model(TextEncoderConfig.model_validate(values))).float().eval()


def texts(*lengths: int) -> list[torch.Tensor]:
    return [torch.randint(3, VOCABULARY, (n,), generator=torch.Generator().manual_seed(n)) for n in lengths]


def packed(model: TextEncoder) -> TextEncoder:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model.pack_weights()
    return model


@needs_kernel
@pytest.mark.parametrize(
    ("size", "heads", "inner", "bias"), [(64, 2, 96, True), (64, 1, 32, False), (32, 1, 160, True), (96, 3, 64, True)]
)
@torch.inference_mode()
def test_its_hidden_states_are_those_of_its_layers(size: int, heads: int, inner: int, bias: bool) -> None:
    """For heads of one square and of several, and texts that end anywhere in one."""
    model = encoder(size, heads, inner, bias=bias)
    want = [model.hidden(model.frame(text_T[None])) for text_T in texts(*LENGTHS)]
    assert packed(model).fused is not None
    for got_1LD, want_1LD in zip(model.hidden_together(texts(*LENGTHS)), want, strict=True):
        assert got_1LD.dtype == torch.float32
        assert float(F.cosine_similarity(got_1LD, want_1LD, dim=-1).min()) > 0.9995
        torch.testing.assert_close(got_1LD, want_1LD, rtol=0.05, atol=0.05)


@needs_kernel
@torch.inference_mode()
def test_a_text_has_the_bits_of_one_alone() -> None:
    """Whatever is read beside it, packed or in a batch, by however many threads."""
    model, given = packed(encoder()), texts(*LENGTHS)
    alone = [model.hidden(model.frame(text_T[None])) for text_T in given]
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert all(map(torch.equal, model.hidden_together(given), alone))
            pair_2L = model.hidden(model.frame(torch.stack([given[-1].flip(0), given[-1]])))
            assert torch.equal(pair_2L[1:], alone[-1])
    finally:
        torch.set_num_threads(before)


@needs_kernel
@pytest.mark.parametrize("block", [{"norm_placement": "pre"}, {"mlp": {"activation": "relu"}}], ids=str)
def test_other_layers_stay_as_they_are(block: dict[str, Any]) -> None:
    """As well as sizes that are no multiples of a square."""
    assert packed(encoder(**block)).fused is None
    assert packed(encoder(size=48)).fused is None and packed(encoder(heads=4)).fused is None
    assert packed(encoder().bfloat16()).fused is None


@needs_kernel
@torch.inference_mode()
def test_texts_without_tokens_have_no_hidden_states() -> None:
    """One, several, and none of them: not even of a frame."""
    model = packed(encoder())
    for shape in ((1, 0), (3, 0), (0, 5)):
        assert model.hidden(torch.zeros(shape, dtype=torch.int64)).shape == (*shape, 64)


@needs_kernel
@torch.inference_mode()
def test_numbers_that_are_not_finite_are_still_found() -> None:
    """Layers are then read one by one; fused, a text's NaN stays its own."""
    model = encoder()
    model.embedding.weight[9] = torch.nan
    packed(model)
    ill_T, well_T = torch.tensor([5, 9, 6]), torch.tensor([5, 8, 6])
    ill, well = model.hidden_together([ill_T, well_T])
    assert bool(ill.isnan().all()) and bool(well.isfinite().all())
    with watching(Watch(FiniteCheck())), pytest.raises(NotFiniteError, match="layer 0"):
        model.hidden(model.frame(ill_T[None]), checked(LocalSequenceOps()))

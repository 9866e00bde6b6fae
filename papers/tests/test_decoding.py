"""The studies of decoding and prefill: what steps, what is held, and what is compared with what."""

from importlib.util import find_spec

import pytest
import torch

from benchmarks.targets import TARGETS
from dist_attn.mixers import RandomFeatureConfig
from dist_attn_papers.studies.decoding import CACHED, EAGER, GPT2, forms, ratios_of, step_costs
from dist_attn_papers.studies.decoding_forms import CachedForm, Gpt2Form, Sizes, StateForm, language_model
from dist_attn_papers.studies.prefill import prefill_costs

TINY = Sizes(width=32, layers=2, heads=2, mlp=64, vocabulary=64)
NO_TRANSFORMERS = find_spec("transformers") is None  # loading it takes seconds


def test_ratios_compare_like_with_like() -> None:
    """Both eager in float32, or the fastest of each; bytes under theirs; without GPT-2 there is no ratio against it."""
    seconds = {EAGER: 0.02, "ours, bfloat16, compiled": 0.01, CACHED: 0.1, "cached, bfloat16": 0.08, GPT2: 0.3}
    held = {EAGER: 5, "ours, bfloat16, compiled": 5, CACHED: 80, GPT2: 100}
    found = ratios_of(16, seconds, held)
    assert found == {
        "batch 16, cached / ours, eager float32": 5.0,
        "batch 16, cached / ours, fastest of each": 8.0,
        "batch 16, gpt2 / ours, eager float32": 15.0,
        "batch 16, memory ours / gpt2": 0.05,
    }
    del seconds[GPT2]
    assert not any("gpt2" in name for name in ratios_of(16, seconds, held))


def test_no_target_divides_one_precision_by_another() -> None:
    """Targets of decoding's speed are ratios of the same precision, both eager, or of the fastest of each."""
    speeds = [target for target in TARGETS if target.benchmark == "decode" and "cached" in target.ratio]
    assert len(speeds) == 4
    assert all(target.ratio.endswith(("eager float32", "fastest of each")) for target in speeds)
    assert not any(target.ratio.startswith("batch") and "gpt2 / ours" in target.ratio for target in TARGETS)


def test_all_forms_step_with_what_they_should_hold() -> None:
    """States do not grow with steps; caches are those of every layer's keys and values."""
    found, reasons = forms(TINY, 3, 10, room=8, compiled=False)
    assert reasons == {}
    assert {"ours, float32", "ours, bfloat16", "cached, float32", "cached, bfloat16"} <= found.keys()
    assert NO_TRANSFORMERS or {GPT2, "gpt2, bfloat16"} <= found.keys()
    before = {name: form.held_bytes for name, form in found.items()}
    for form in found.values():
        form.steps(2)()
        assert form.token_B.shape == (3,)
    cache_numbers = 2 * TINY.layers * 3 * TINY.width
    assert before["cached, float32"] == found["cached, float32"].held_bytes == 4 * cache_numbers * 18
    assert before[EAGER] == found[EAGER].held_bytes
    if not NO_TRANSFORMERS:
        assert before[GPT2] == 4 * cache_numbers * 10
        assert found[GPT2].held_bytes == 4 * cache_numbers * 12


def test_a_state_form_goes_on_from_what_it_has_read() -> None:
    """The step after reading some tokens has the logits that the model has behind these tokens."""
    model = language_model(TINY)
    form = StateForm(model, 2, 9)
    tokens_L = torch.randint(TINY.vocabulary, (9,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        want_BV = model.logits(torch.cat([tokens_L, torch.zeros(1, dtype=torch.int64)])[None])[:, -1]
        torch.testing.assert_close(form.step(), want_BV.expand(2, -1), rtol=1e-4, atol=1e-5)
    assert form.state.position == 10


@pytest.mark.skipif(NO_TRANSFORMERS, reason="transformers is not installed")
def test_gpt2_goes_on_from_its_cache() -> None:
    """A step behind the cache has the logits of the whole text read at once."""
    form = Gpt2Form(TINY, 2, 7, 4)
    tokens_BL = torch.randint(TINY.vocabulary, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole_BL = torch.cat([tokens_BL, torch.zeros(2, 1, dtype=torch.int64)], dim=1)
        want_BV = form.model(input_ids=whole_BL).logits[:, -1]
        torch.testing.assert_close(form.step(), want_BV, rtol=1e-4, atol=1e-4)


def test_costs_at_the_roof() -> None:
    """A step reads every weight once whatever the batch, and every state twice; prefill's products grow with tokens."""
    one, two = step_costs(TINY, 1), step_costs(TINY, 2)
    state = RandomFeatureConfig(kind="rfa", hidden_size=32, num_heads=2, short_convolution=0).state_bytes()
    assert two[0] == 2 * one[0]
    assert two[1] - one[1] == 2 * TINY.layers * state
    assert prefill_costs(TINY, 20)[0] == 2 * prefill_costs(TINY, 10)[0]
    assert CachedForm(TINY, 1, 4, 2).held_bytes == 4 * 2 * TINY.layers * TINY.width * 6

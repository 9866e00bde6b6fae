"""Options of supported types: another value gives transformers' logits, or it is refused."""

from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from dist_attn.adapters.model import AdaptedModel
from dist_attn.shipped.downloaded import COMMON, SUPPORTED
from tests.support.foreign_models import BLOCK, TYPES, written

FURTHEST = 1e-3  # rounding moves these logits by 2e-4 at most, an option that is left out by 1e-2 and more
SIZES = {"vocab_size", "hidden_size", "num_hidden_layers", "use_cache"}
OTHER_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("relu",),
    "hidden_activation": ("relu",),
    "mlp_hidden_act": ("silu",),
    "time_step_limit": ([0.01, 0.3],),
    "inference_state_dtype": ("bfloat16",),
    "position_embedding_type": ("rope",),
    "sliding_window": (8,),
}


def _others(name: str, value: Any) -> tuple[Any, ...]:
    if name in OTHER_VALUES or isinstance(value, bool):
        return OTHER_VALUES.get(name, (not value,))
    if isinstance(value, float):
        return (1.5 * value + 0.1,)
    return (value + 1, 2 * value) if isinstance(value, int) else ()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in TYPES if "text_config" not in TYPES[kind]])
@torch.no_grad()
def test_every_option_is_computed_or_refused(kind: str) -> None:
    """Models with one option changed have transformers' logits, in blocks too; values that are refused may differ."""
    options = CONFIG_MAPPING[kind](**TYPES[kind]).to_dict()
    tried, wrong = 0, []
    for name, value in options.items():
        accepted = (COMMON | SUPPORTED[kind]).get(name)
        for other in _others(name, value) if name not in SIZES else ():
            if accepted is not None and other not in accepted:
                continue
            try:
                theirs, tokens_BL = written(kind, **{name: other})
                want_BLV = theirs(tokens_BL, use_cache=False, output_hidden_states=True).logits
            except Exception:  # sizes that do not go together end in many ways
                continue
            tried += 1
            difference = (_in_blocks(AdaptedModel(theirs), tokens_BL) - want_BLV).abs().max().item()
            wrong += [(name, other, difference)] if difference > FURTHEST else []
    assert tried > 5
    assert not wrong


def _in_blocks(model: AdaptedModel, tokens_BL: torch.Tensor) -> torch.Tensor:
    first_BLD, state = model.hidden(tokens_BL[:, :BLOCK])
    return model.readout(torch.cat([first_BLD, model.hidden(tokens_BL[:, BLOCK:], None, state)[0]], dim=1))

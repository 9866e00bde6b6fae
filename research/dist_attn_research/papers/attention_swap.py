"""The same weights under another attention function, and attention's weights drawn anew."""

import torch

from dist_attn.errors import ConfigError
from dist_attn.models import EncoderDecoder, EncoderDecoderConfig, build_model

__all__ = ["ATTENTION", "with_attention_reset", "with_attention_swapped"]

ATTENTION = (".mixer.qkv.weight", ".mixer.out.weight", ".cross.q.weight", ".cross.kv.weight", ".cross.out.weight")
"""How the names of a decoder's maps to queries, keys, values and outputs end."""
# What belongs to a kernel and not to the projections: learned scales, and the fixed random vectors.
_OF_KERNELS = ("sigma_H1K", "w_HDK")


def with_attention_swapped(model: EncoderDecoder, config: EncoderDecoderConfig) -> EncoderDecoder:
    """A model of `config`, which has other attention functions, with every weight of `model` that both have.

    Scales of a kernel that `model` does not have begin as in a fresh model.

    Raises: ConfigError where the two differ in more than their kernels.
    Reference: Random Feature Attention, Appendix C.3.
    """
    swapped = build_model(config)
    assert isinstance(swapped, EncoderDecoder)  # by its configuration
    given, needed = model.state_dict(), swapped.state_dict()
    for name in sorted(given.keys() ^ needed.keys()):
        if not name.endswith(_OF_KERNELS):
            raise ConfigError(
                f"only one of the two models has {name}; they must differ in their attention functions alone"
            )
    swapped.load_state_dict({**needed, **{name: given[name] for name in given.keys() & needed.keys()}})
    return swapped.eval()


@torch.no_grad()
def with_attention_reset(model: EncoderDecoder, seed: int) -> EncoderDecoder:
    """A copy whose decoder has fresh projections of queries, keys, values and outputs, as a new model's are drawn.

    Reference: Random Feature Attention, Appendix C.4.
    """
    torch.manual_seed(seed)
    reset = build_model(model.config)
    assert isinstance(reset, EncoderDecoder)  # by its configuration
    fresh = reset.state_dict()
    kept = {name: tensor for name, tensor in model.state_dict().items() if not _is_attention(name)}
    reset.load_state_dict({**fresh, **kept})
    return reset.eval()


def _is_attention(name: str) -> bool:
    return name.startswith("blocks.") and name.endswith(ATTENTION)

"""The layers that read a million tokens: every kind whose cost grows with the length, not with its square."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from dist_attn.costs import LayerCosts
from dist_attn.layout import SequenceLayout
from dist_attn.mixers import MixerConfig, MixerState, TokenMixer, build_mixer
from dist_attn.mixers.all_keys import BidirectionalAttention
from dist_attn.model_config.mixers.attention import BidirectionalConfig
from dist_attn.ops import SequenceOps
from dist_attn_papers.million.config import MillionConfig
from dist_attn_papers.million.model import MillionModel

__all__ = ["ARMS", "BYTES", "HEADS", "WIDTH", "Arm", "Layer", "build_layer", "formula_bytes", "million_config"]

WIDTH, HEADS, BYTES = 32, 2, 256
# Of the model that keeps few tokens: which share, and how many each expert has to attend to in full.
KEPT_SHARE, TOKENS_PER_EXPERT = 1 / 64, 1024

_DRAWING = threading.Lock()

Layer = Callable[[Tensor, SequenceOps, MixerState | None], tuple[Tensor, MixerState | None]]
"""From bytes [L] of this process to vectors [L, D], and the state to go on from where there is one."""


@dataclass(frozen=True)
class Arm:
    """One kind. `carries`: what travels between ranks does not depend on the length; `share` of the tokens is read."""

    options: Mapping[str, Any] = field(default_factory=dict)
    carries: bool = True
    streams: bool = True
    # Less than all where the form's memory would be more than a machine has.
    share: float = 1.0


_HEADS = {"num_heads": HEADS}
_WHOLE = {"carries": False, "streams": False}
ARMS: Mapping[str, Arm] = {
    "rfa": Arm({"kind": "rfa", **_HEADS}),
    "rfa_gate": Arm({"kind": "rfa_gate", **_HEADS}),
    "elu": Arm({"kind": "elu", **_HEADS}),
    "performer": Arm({"kind": "performer", **_HEADS}),
    "efficient": Arm({"kind": "efficient", **_HEADS}),
    "static_kernel": Arm({"kind": "static_kernel", **_HEADS}),
    "scaleformer": Arm({"kind": "scaleformer", **_HEADS}),
    "bidirectional-rfa": Arm({"kind": "bidirectional", "attention": "rfa", **_HEADS}, streams=False),
    **{
        f"bidirectional-{attention}": Arm({"kind": "bidirectional", "attention": attention, **_HEADS}, streams=False)
        for attention in ("elu", "performer", "efficient", "scaleformer")
    },
    "convolution": Arm({"kind": "convolution"}),
    "convolution-centred": Arm({"kind": "convolution", "centred": True}, streams=False),
    "s4d": Arm({"kind": "s4d"}),
    "s4": Arm({"kind": "s4"}),
    "lssl": Arm({"kind": "lssl"}),
    "hippo": Arm({"kind": "hippo"}),
    "fnet": Arm({"kind": "fnet", "norm": "ortho"}, **_WHOLE),
    "sgconv": Arm({"kind": "sgconv"}, **_WHOLE),
    "s4d-convolution": Arm({"kind": "s4d", "form": "convolution"}, **_WHOLE),
    # Its kernel is made of N numbers for every token and channel.
    "s4-convolution": Arm({"kind": "s4", "form": "convolution"}, carries=False, streams=False, share=1 / 32),
    "mlp_mixer": Arm({"kind": "mlp_mixer", "token_mlp_size": 16}, streams=False),
    "million": Arm({}, **_WHOLE),
}


def build_layer(name: str, tokens: int, seed: int) -> tuple[nn.Module, Layer]:
    """The module and how it reads bytes; the same weights wherever it is built. A fixed length is that of all tokens.

    Bytes become vectors by a table of Gaussian numbers, which belongs to the weights.
    """
    # Ranks may be threads, and the generator is the process's.
    with _DRAWING, torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        if name == "million":
            return _million(tokens)
        table_VD = torch.randn(BYTES, WIDTH)
        mixer = _mixer(name, tokens).eval()

    def read(tokens_L: Tensor, ops: SequenceOps, state: MixerState | None) -> tuple[Tensor, MixerState | None]:
        y_BLD, after = mixer(table_VD[tokens_L.long()][None], ops, state)
        return y_BLD[0], after

    return mixer, read


def million_config(tokens: int, ranks: int) -> MillionConfig:
    """The model that keeps few tokens, with as many experts as the kept ones fill, at least one for each rank."""
    experts = max(ranks, round(KEPT_SHARE * tokens / TOKENS_PER_EXPERT))
    return MillionConfig.model_validate(
        {
            "vocab_size": BYTES,
            "hidden_size": WIDTH,
            "num_heads": HEADS,
            "mlp_size": 4 * WIDTH,
            "context": 7,
            "selector": {"gate": "top_k", "rate": KEPT_SHARE},
            "router": {"num_experts": experts},
            "max_tokens": max(tokens, 1 << 20),
        }
    )


def _mixer(name: str, tokens: int) -> TokenMixer:
    options = ARMS[name].options
    if options["kind"] == "bidirectional":
        return BidirectionalAttention(BidirectionalConfig.model_validate({"hidden_size": WIDTH, **options}))
    return build_mixer(_config(name, tokens))


def _million(tokens: int) -> tuple[nn.Module, Layer]:
    model = MillionModel(million_config(tokens, ranks=4)).eval()
    # Taps that see the neighbours, so that two equal bytes do not have equal scores.
    nn.init.normal_(cast(Tensor, model.context_KD), std=0.5)

    def read(tokens_L: Tensor, ops: SequenceOps, state: MixerState | None) -> tuple[Tensor, None]:
        return model.hidden(tokens_L.long()[None], ops)[0], None

    return model, read


def formula_bytes(name: str, tokens: int, ranks: int) -> int | None:
    """What the rank that sends most sends by formula, forward; None for what has no formula."""
    if name == "million" or ARMS[name].options["kind"] == "bidirectional":
        return None
    costs, lengths = LayerCosts(_config(name, tokens)), SequenceLayout.even(tokens, ranks).lengths
    return max(costs.bytes_sent(lengths, rank) for rank in range(ranks))


def _config(name: str, tokens: int) -> MixerConfig:
    values = {"hidden_size": WIDTH, **ARMS[name].options}
    if values["kind"] in ("sgconv", "mlp_mixer"):
        values["length"] = tokens
    return MixerConfig.model_validate(values)

"""What we are measured against, each as its own users would call it; a peer that is not installed says why."""

import contextlib
import importlib
import inspect
import io
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any, cast

import torch
import torch.nn.functional as F

from dist_attn.errors import ConfigError

__all__ = ["INSTALL", "absent", "delta_rule", "require", "sdpa"]

INSTALL = "it is not installed; `pip install -e .[bench]` adds it"
# What each peer of the extra [bench] is imported by.
MODULES: Mapping[str, str] = {
    "performer-pytorch": "performer_pytorch.performer_pytorch",
    "flash-linear-attention": "fla.ops.simple_gla.naive",
    "llama.cpp": "xllamacpp",
    "gguf": "gguf.quants",
    "sentence-transformers": "sentence_transformers",
    "transformers": "transformers.models.qwen3_next.modeling_qwen3_next",
}


@cache
def _load(peer: str) -> Any:
    """Its module, or the reason why there is none as a string."""
    # Libraries without a GPU warn when they are imported, and some print.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(MODULES[peer])
        except ModuleNotFoundError as error:
            missing = error.name or ""
            return INSTALL if MODULES[peer].startswith(missing.split(".")[0]) else f"it needs {missing}"
        except Exception as error:
            # Whatever a library raises when it does not fit this machine or this torch is a reason, not a failure.
            return f"it cannot be imported: {type(error).__name__}: {error}"[:200]


def absent(*names: str) -> dict[str, str]:
    """Of these peers the ones that cannot run here, each with the reason."""
    return {name: found for name in names if isinstance(found := _load(name), str)}


def require(*names: str) -> None:
    """Raises ConfigError where one of these peers cannot run here, with the reason."""
    missing = absent(*names)
    if missing:
        raise ConfigError("; ".join(f"{name}: {reason}" for name, reason in missing.items()))


def sdpa(q_BHLK: torch.Tensor, k_BHLK: torch.Tensor, v_BHLV: torch.Tensor) -> torch.Tensor:
    """torch's exact causal attention through its own choice of kernel."""
    return F.scaled_dot_product_attention(q_BHLK, k_BHLK, v_BHLV, is_causal=True)


def delta_rule(
    q_BHLK: torch.Tensor,
    k_BHLK: torch.Tensor,
    v_BHLV: torch.Tensor,
    log_decay_BHL1: torch.Tensor,
    beta_BHL: torch.Tensor,
) -> torch.Tensor:
    """The gated delta rule by transformers' own plain form, unscaled; of its function, what no package replaces."""
    chunks = inspect.unwrap(_load("transformers").torch_chunk_gated_delta_rule)
    q, k, v, g, beta = (t.transpose(1, 2) for t in (q_BHLK, k_BHLK, v_BHLV, log_decay_BHL1[..., 0], beta_BHL))
    out_BLHV, _ = chunks(q * q.shape[-1] ** 0.5, k, v, g, beta)
    return cast(torch.Tensor, out_BLHV).transpose(1, 2)

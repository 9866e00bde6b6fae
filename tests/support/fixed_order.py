"""Finds operations that may give other bits in another run on a GPU, on any device: torch documents them by name.

`torch.use_deterministic_algorithms` has the list. Beside it stand the backward passes of fused softmax attention,
which torch makes deterministic by that switch without a word of it.
"""

import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

import dist_attn

__all__ = ["ALLOWED", "FixedOrder"]

Arguments = Mapping[str, Any]
ONE_BLOCK = 128  # numbers of a row: on any GPU torch gives more than these to the first block of threads


def _lone_row(given: Arguments) -> bool:
    """A row that several blocks of threads share is summed up in the order in which they come."""
    x = given["self"]
    return bool(x.is_floating_point() and x.dim() and ONE_BLOCK < x.numel() == x.shape[given["dim"]])


# By the names of aten without their last underscore: at any time, and when.
ALWAYS = """
_adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _ctc_loss_backward _embedding_bag_dense_backward
_scaled_dot_product_cudnn_attention_backward _scaled_dot_product_efficient_attention_backward
_scaled_dot_product_flash_attention_backward _scaled_dot_product_flash_attention_for_cpu_backward
adaptive_max_pool2d_backward avg_pool3d_backward convolution convolution_backward fractional_max_pool2d_backward
fractional_max_pool3d_backward grid_sampler_2d_backward grid_sampler_3d_backward histc index_add index_copy
index_reduce max_pool3d_with_indices_backward max_unpool2d max_unpool3d median nanmedian nll_loss2d_forward put
reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward
replication_pad2d_backward replication_pad3d_backward scatter_add upsample_bicubic2d_backward
upsample_bilinear2d_backward upsample_linear1d_backward upsample_trilinear3d_backward
"""
RACES: dict[str, Callable[[Arguments], bool]] = {
    **dict.fromkeys(ALWAYS.split(), lambda given: True),
    "bincount": lambda given: given.get("weights") is not None,
    "cumsum": _lone_row,
    # Of two values for one place either may stay; what is added up is sorted first.
    "_index_put_impl": lambda given: not given.get("accumulate", False),
    "index_put": lambda given: not given.get("accumulate", False),
    "scatter": lambda given: "src" in given,
    "scatter_reduce": lambda given: given["reduce"] in ("sum", "mean", "prod"),
}

EXACT = "_scaled_dot_product_flash_attention_for_cpu_backward"
# What is taken all the same, by the file that calls it ("" for what autograd does), and why its bits are fixed.
ALLOWED: dict[tuple[str, str], str] = {
    ("index_put", "ops/documents.py"): "one value, true, wherever a document starts",
    ("index_copy", "ops/softmax_attention/slots.py"): "each token has one place",
    ("scatter", "ops/softmax_attention/slots.py"): "each row has one new token",
    ("scatter", "ops/softmax_attention/tiled.py"): "a row that several keys share is written over",
    (EXACT, ""): "exact attention, whose gradients docs/reference/operations.md promises to rounding only",
    ("scatter", ""): "the gradient of a sort or a maximum: each value came from one place",
}


class FixedOrder(TorchDispatchMode):
    """Refuses operations of `RACES` inside it, unless `ALLOWED` has them; `allowed` counts these."""

    def __init__(self) -> None:
        super().__init__()
        self.allowed: set[tuple[str, str]] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = function._schema
        name = schema.name.removeprefix("aten::").removesuffix("_")
        if name in RACES:
            given = dict(zip((a.name for a in schema.arguments), args, strict=False)) | (kwargs or {})
            if RACES[name](given):
                where = (name, _caller())
                assert where in ALLOWED, (
                    f"{name} of {where[1] or 'autograd'} may give other bits in another run on a GPU: take an "
                    "operation with one order, or say in ALLOWED why its bits are fixed"
                )
                self.allowed.add(where)
        return function(*args, **(kwargs or {}))


def _caller() -> str:
    """The innermost file of the package that is at work, relative to it, or of the papers' package.

    Constant folding passes on what others call.
    """
    root = Path(dist_attn.__file__).parent
    bases = {root: root, root.parent / "papers" / "dist_attn_papers": root.parent / "papers"}
    files = [Path(frame.filename) for frame in traceback.extract_stack(limit=60)]
    files = [file for file in files if file.name != "constant_folding.py"]
    inside = [f.relative_to(base).as_posix() for f in files for of, base in bases.items() if f.is_relative_to(of)]
    return inside[-1] if inside else ""

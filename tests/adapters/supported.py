"""`python -m tests.adapters.supported`: the page of supported types, with distances measured where it is written."""

import re
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.support.foreign_models import (
    BLOCK,
    TYPES,
    WAYS,
    after_a_block,
    compared,
    distances,
    forked,
    restored_elsewhere,
)

__all__ = ["PAGE", "listed"]

PAGE = Path(__file__).resolve().parents[2] / "docs/models/supported.md"
HEAD = """\
# Types of models

<!-- Written by `python -m tests.adapters.supported`; a test compares its list of types with the code. -->

A folder of transformers is taken [as it was downloaded](../how-to/your-model.md) where its `model_type` is one of
these. transformers' own modules run; what mixes along the sequence is ours, so a text may be read whole, in blocks,
token by token or spread over ranks, and its state saved and forked.

Each number is the largest difference of a logit from transformers' own forward pass in float32: random weights of the
type's configuration, shrunk in width, layers and experts, two texts of 61 tokens, logits of about 4. Slices on ranks
are uneven, and on four ranks one is empty and the text comes in two blocks. Forks of a state after 37 tokens go on side
by side with different tokens. The last column says whether a new process that reads the bytes of a snapshot after
37 tokens goes on as the one that wrote them. `tests/adapters/test_types.py` holds every number to 1e-4 and the last
column to the same bits.

In bfloat16, logits of `qwen3_next`, `mamba2`, `bailing_hybrid` and `llama` are no further from float32 than 1.1 times
those of transformers' own bfloat16, as the root of the mean square over three models with all experts asked. A choice
of experts that flips moves logits further than all rounding does, there as here.
"""


def listed(page: str) -> list[str]:
    """The types that the page has a row for."""
    return re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)


def _lines() -> Iterator[str]:
    yield HEAD
    yield f"| type | {' | '.join(WAYS)} | after a fork | restored |"
    yield "|---" * (3 + len(WAYS)) + "|"
    for kind in TYPES:
        case = compared(kind)
        after_fork = (forked(case) - case.want_BLV[:, BLOCK:]).abs().max().item()
        numbers = " | ".join(f"{distance:.0e}" for distance in (*distances(case), after_fork))
        yield f"| `{kind}` | {numbers} | {_restored(kind)} |"


@torch.inference_mode()
def _restored(kind: str) -> str:
    case = compared(kind)
    stayed_BLD, _ = case.ours.hidden(case.tokens_BL[:1, BLOCK:], None, after_a_block(case).select(0))
    return "same bits" if torch.equal(restored_elsewhere()[kind], stayed_BLD) else "**differs**"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(_lines()) + "\n")

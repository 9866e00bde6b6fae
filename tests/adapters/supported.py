"""`python -m tests.adapters.supported`: the page of supported types, with distances measured where it is written."""

from collections.abc import Iterator
from pathlib import Path

from tests.support.foreign_models import BLOCK, TYPES, compared, distances, forked

PAGE = Path(__file__).resolve().parents[2] / "docs/models/supported.md"
HEAD = """\
# Types of models

<!-- Written by `python -m tests.adapters.supported`; a test compares its list of types with the code. -->

A folder of transformers is taken [as it was downloaded](../how-to/your-model.md) where its `model_type` is one of
these. transformers' own modules run; what mixes along the sequence is ours, so a text may be read whole, in blocks,
token by token or spread over ranks, and its state saved and forked.

Each number is the largest difference of a logit from transformers' own forward pass in float32: random weights of the
type's configuration, shrunk in width, layers and experts, two texts of 61 tokens, logits of about 4. In parts: blocks
of 37 tokens, single tokens, and forks of a state after 37 tokens that go on side by side with different tokens. Ranks
are 1, 2 and 4; their slices are uneven, and of four one is empty and the text comes in two blocks.
`tests/adapters/test_types.py` holds every number to 1e-4. A new process that reads the bytes of a snapshot after 37
tokens goes on with the same bits as the one that wrote them.

In bfloat16, logits of `qwen3_next`, `mamba2`, `bailing_hybrid` and `llama` are no further from float32 than 1.1 times
those of transformers' own bfloat16, as the root of the mean square over three models with all experts asked. A choice
of experts that flips moves logits further than all rounding does, there as here.
"""


def _lines() -> Iterator[str]:
    yield HEAD
    yield "| type | whole | in parts | over ranks |"
    yield "|---|---|---|---|"
    for kind in TYPES:
        case = compared(kind)
        after_fork = (forked(case) - case.want_BLV[:, BLOCK:]).abs().max().item()
        whole, blocks, steps, *ranks = distances(case)
        yield f"| `{kind}` | {whole:.0e} | {max(blocks, steps, after_fork):.0e} | {max(ranks):.0e} |"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text("\n".join(_lines()) + "\n")

"""`python -m tests.adapters.context_parallel_table`: the page of gradients over ranks, measured where it is written."""

import re
from functools import partial
from pathlib import Path

import torch

from dist_attn.comm import Communicator
from tests.adapters.test_context_parallel import (
    TOTAL,
    alone,
    computed_again,
    errors,
    ids,
    in_segments,
    of_rounding,
    of_the_middle_document,
    one_by_one,
    over_ranks,
    packed,
    unsegmented,
)
from tests.adapters.test_context_parallel_processes import WRAPPERS, Gradients, over_a_mesh, run, second_step
from tests.adapters.test_context_parallel_processes import alone as alone_by_rows
from tests.support import ranks
from tests.support.foreign_models import TYPES

__all__ = ["PAGE", "listed"]

PAGE = Path(__file__).resolve().parents[2] / "docs/measurements/context-parallel.md"
HEAD = """\
# Gradients over ranks

<!-- Written by `python -m tests.adapters.context_parallel_table`; a test compares its list of types with the code. -->

The largest difference of any parameter's gradient from one process of transformers, relative to that gradient's largest
number plus 1e-4, in float32 on CPUs: small random models, a text of 61 tokens over ranks of 17, 0 and 44. "From a
state": two ranks and a text in two segments, with gradients through the state between them; FSDP2 and DDP: 2 x 2
processes, two texts over 61 and 0 tokens each; compiled: by torch.compile, over three processes, without its code
generator. The largest are decays of delta rules, sums that nearly cancel.

In bfloat16, weights and activations (states stay in float32), it is the norm of the difference of all gradients of
three models relative to theirs: from transformers in bfloat16, from it in float32, and between these two. Gradients of
other documents are 0 there too.

|type|one rank|17, 0 and 44 tokens|documents packed|gradient of other documents|computed again|compiled|from a state|\
FSDP2|DDP|bfloat16|from float32|theirs from float32|
|---|---|---|---|---|---|---|---|---|---|---|---|---|
"""


def listed(page: str) -> list[str]:
    """The types that the page has a row for."""
    return re.findall(r"^\|`(\w+)`\|", page, re.MULTILINE)


def _compiled(comm: Communicator, kind: str) -> tuple[float, Gradients]:
    return second_step(kind, "whole", (17, 0, 44))


def _row(kind: str) -> str:
    text = [{"input_ids": ids(), "labels": ids()}]
    pairs = [
        (over_ranks(kind, text, lengths=(TOTAL,)), alone(kind)),
        (over_ranks(kind, text), alone(kind)),
        (over_ranks(kind, [packed()]), one_by_one(kind)),
        (over_ranks(kind, text, computed_again), alone(kind)),
        (run(partial(_compiled, kind=kind), 3)[0], alone(kind)),
        (in_segments(kind, detach=False), unsegmented(kind)),
        *((over_a_mesh(*TYPES)[0][kind, wrapper].whole, alone_by_rows(kind, rows=2)) for wrapper in WRAPPERS),
    ]
    cells = [f"{max(errors(got, want).values()):.0e}" for (_, got), (_, want) in pairs]
    cells += [f"{distance:.1e}" for distance in of_rounding(kind)]
    leak = max(of_the_middle_document(kind, dtype)[1].max().item() for dtype in (torch.float32, torch.bfloat16))
    cells.insert(3, "0" if leak == 0 else f"**{leak:.0e}**")
    return f"|`{kind}`|{'|'.join(cells)}|\n"


if __name__ == "__main__":
    ranks.PROCESS_DEADLINE_S = 1800.0  # of one group of processes, for all types
    _, mark, others = PAGE.read_text().partition("\n## ")  # sections of other numbers
    PAGE.write_text(HEAD + "".join(map(_row, TYPES)) + mark + others)

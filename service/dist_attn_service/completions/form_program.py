"""The process in which the grammar of one form is written and tried, so that its memory and time are bounded.

    python -m dist_attn_service.completions.form_program

The form is a JSON list on stdin: its kind and its content. The answer on stdout is one of the grammar and the refusal.
"""

import json
import sys

from dist_attn.bounded_process import bound_here
from dist_attn.errors import GrammarError
from dist_attn.text import ByteTokeniser
from dist_attn.text.grammars import FollowedGrammar, Grammars, written_grammar

__all__ = ["MEMORY_BYTES", "MOST_SECONDS"]

MEMORY_BYTES = 1 << 29
MOST_SECONDS = 0.5  # of the processor's time; a rank, whose tokens are many, takes up to three times as long


def main() -> None:
    """Read a form, write its grammar and make the first mask of it for bytes."""
    bound_here(MEMORY_BYTES, MOST_SECONDS)
    answer = {"grammar": "", "refusal": ""}
    try:
        kind, content = json.load(sys.stdin)
        answer["grammar"] = written_grammar(kind, content)
        FollowedGrammar(Grammars(ByteTokeniser, [256]), answer["grammar"]).allowed()
    except (GrammarError, RecursionError) as error:
        answer["refusal"] = str(error)
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()

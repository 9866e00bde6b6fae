"""Answers under public JSON schemas: each is valid, or the service refuses the schema in words.

`python -m tests.fuzz.json_schemas COUNT FOLDER...` draws schemas of the folders until COUNT are answered, or none is
left, and tells why others are not, and what a token takes. A folder holds the JSON Schema Test Suite (`json/` in the
sdist of `jsonschema`), or files of one schema each. The tokens are bytes, drawn at random.
"""

import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema_rs
import numpy as np
from dist_attn_service.completions.bounded_grammar import bounded_grammar

from dist_attn.errors import GrammarError
from dist_attn.text import ByteTokeniser
from dist_attn.text.grammars import FollowedGrammar, Grammars

END = 256
MOST_TOKENS = 1000
NEWEST = "https://json-schema.org/draft/2020-12/schema"
DRAFTS = {
    "draft2020-12": NEWEST,
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
}
CLOSERS = frozenset(b'"]}0')


@dataclass
class Outcome:
    """The schemas by what became of them, the invalid answers, and the seconds of each token."""

    valid: int = 0
    unfinished: int = 0
    at_fault: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    invalid: list[tuple[Any, str, str]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def answered(self) -> int:
        """The schemas whose answers ended."""
        return self.valid + len(self.invalid)


def schemas_of(folders: Iterable[Path]) -> list[dict[str, Any]]:
    """The different schemas of the folders that are objects: of each folder those of the suite's drafts, or of all."""
    found: dict[str, dict[str, Any]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.json")):
            try:
                read = json.loads(path.read_text(encoding="utf-8"))
            except (ValueError, RecursionError):
                continue
            draft = next((name for part, name in DRAFTS.items() if part in path.parts), None)
            if isinstance(read, dict) and ("$schema" in read or {"type", "properties"} <= read.keys()):
                schemas = [{"$schema": NEWEST, **read}]
            elif isinstance(read, list) and draft:
                groups = (group["schema"] for group in read if isinstance(group, dict) and "schema" in group)
                schemas = [{"$schema": draft, **schema} for schema in groups if isinstance(schema, dict)]
            else:
                schemas = []
            for schema in schemas:
                bare = {key: value for key, value in schema.items() if key != "$schema"}
                found.setdefault(json.dumps(bare, sort_keys=True), schema)
    return list(found.values())


def examine(schemas: list[dict[str, Any]], count: int) -> Outcome:
    """Draw an answer under each until so many have ended."""
    grammars, rng, outcome = Grammars(ByteTokeniser, [END]), random.Random(1), Outcome()
    for schema in schemas:
        if outcome.answered == count:
            break
        try:
            answer = _drawn(FollowedGrammar(grammars, bounded_grammar("json_schema", schema)), rng, outcome)
        except GrammarError as error:
            outcome.refused[str(error).partition(":")[0][:60]] += 1
            continue
        if answer is None:
            outcome.unfinished += 1
            continue
        try:
            validator = jsonschema_rs.validator_for(schema, validate_formats=True)
        except ValueError:  # by its own draft it is no schema
            outcome.at_fault += 1
            continue
        try:
            validator.validate(json.loads(answer))
            outcome.valid += 1
        except (ValueError, jsonschema_rs.ValidationError) as error:
            outcome.invalid.append((schema, answer, str(error).splitlines()[0]))
    return outcome


def _drawn(form: FollowedGrammar, rng: random.Random, outcome: Outcome) -> str | None:
    """The text, or None where it is still open after MOST_TOKENS; what ends it is drawn rather than not."""
    text = bytearray()
    while len(text) < MOST_TOKENS:
        began = time.perf_counter()
        allowed = np.flatnonzero(form.allowed()).tolist()
        outcome.seconds.append(time.perf_counter() - began)
        likely = [token for token in allowed if token in CLOSERS or token == END]
        token = rng.choice(likely if likely and rng.random() < 0.5 + len(text) / MOST_TOKENS else allowed)
        if token == END:
            return text.decode()
        text.append(token)
        form.take(token)
    return None


def main(count: str, *folders: str) -> int:
    """Tell the outcome; 1 where an answer is invalid."""
    schemas = schemas_of(map(Path, folders))
    random.Random(0).shuffle(schemas)
    outcome = examine(schemas, int(count))
    took = np.array(outcome.seconds) * 1e6
    refused = sum(outcome.refused.values())
    drawn = outcome.answered + outcome.unfinished + outcome.at_fault + refused
    print(f"{drawn} of {len(schemas)} schemas drawn: {refused} refused,", end=" ")
    print(f"{outcome.at_fault} taken that are no schemas by their draft,", end=" ")
    print(f"{outcome.unfinished} without end in {MOST_TOKENS} tokens, {outcome.answered} answered:", end=" ")
    print(f"{outcome.valid} valid, {len(outcome.invalid)} invalid")
    print(f"a token, of {len(took)}: {np.median(took):.0f} us in the median, {took.mean():.0f} in the mean,", end=" ")
    print(f"99 of 100 within {np.percentile(took, 99):.0f}")
    for words, number in outcome.refused.most_common():
        print(f"  {number} refused: {words}")
    for schema, answer, why in outcome.invalid:
        print(f"  invalid: {json.dumps(schema)[:300]} gave {answer[:100]!r}: {why[:150]}")
    return bool(outcome.invalid)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Forms are tried in a process with bounds before a rank is told of them."""

import json
import subprocess
import threading
from typing import Any

import pytest
from dist_attn_service.base.errors import ServiceError
from dist_attn_service.completions import bounded_grammar as bounded
from dist_attn_service.completions.bounded_grammar import bounded_grammar

from dist_attn.errors import GrammarError
from dist_attn.text.grammars import GrammarKind, written_grammar

HARD = {"type": "integer", "multipleOf": 9_999_991}


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("json_schema", HARD),
        ("json_schema", {"type": "array", "prefixItems": [{**HARD, "multipleOf": 999_983 - at} for at in (0, 2, 4)]}),
        ("json_schema", {"properties": {"a": {"type": "array", "items": HARD}}}),
        ("grammar", f'start: "a" %json {json.dumps(HARD)}'),
    ],
)  # fmt: skip
def test_a_form_that_takes_long_to_prepare_is_refused(kind: GrammarKind, content: Any) -> None:
    """A few bytes would keep a rank at work for a minute, and all callers' tokens with it."""
    with pytest.raises(GrammarError, match=r"the form takes longer than 0\.5 s to prepare: make it smaller"):
        bounded_grammar(kind, content)


def test_a_form_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was taken is known when it comes again; a busy machine is no fault of a form."""
    schema = {"type": "integer", "multipleOf": 7, "maximum": 70}
    assert bounded_grammar("json_schema", schema) == written_grammar("json_schema", schema)

    def busy(*_: Any, timeout: float, **__: Any) -> Any:
        raise subprocess.TimeoutExpired("program", timeout)

    monkeypatch.setattr(subprocess, "run", busy)
    assert bounded_grammar("json_schema", schema) == written_grammar("json_schema", schema)
    with pytest.raises(ServiceError, match="try again"):
        bounded_grammar("json_schema", {**schema, "maximum": 77})


def test_what_is_too_large_is_refused_before_it_is_tried() -> None:
    """By its characters, and by its depth."""
    with pytest.raises(GrammarError, match="at most 262144"):
        bounded_grammar("regex", "a" * 300_000)
    deep: Any = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(GrammarError, match="too deep"):
        bounded_grammar("json_schema", deep)


def test_few_forms_are_tried_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """While other processes try forms, one that does not come to its turn is asked to come again."""
    monkeypatch.setattr(bounded, "WAIT_SECONDS", 0.01)
    monkeypatch.setattr(bounded, "_places", threading.BoundedSemaphore(1))
    with bounded._places, pytest.raises(ServiceError, match="other forms are being tried") as refused:
        bounded.bounded_grammar("regex", "one that nobody has sent")
    assert refused.value.code == "overloaded"
    bounded.bounded_grammar("regex", "one that nobody has sent")

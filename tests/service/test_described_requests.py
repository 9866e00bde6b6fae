"""The service keeps to its own description: requests made of the OpenAPI text are answered as it says."""

from pathlib import Path

import pytest

pytest.importorskip("schemathesis", reason="schemathesis is not installed")

from tests.fuzz.described_requests import examine, served

pytestmark = pytest.mark.slow


def test_answers_keep_to_the_description(tmp_path: Path) -> None:
    """At the edges of every operation's description: no 5xx, answers as described, and what breaks it is refused.

    `python -m tests.fuzz.described_requests` sends all cases and random ones.
    """
    with served(tmp_path) as service:
        outcome = examine(service.url, examples=0, share=6)
    assert not outcome.findings, "\n".join(outcome.findings.values())
    operations = {label for label, _, _ in outcome.answers}
    assert len(operations) > 40 and outcome.requests > 250
    taken = {label for label, mode, status in outcome.answers if mode == "positive" and status < 300}
    refused = {label for label, mode, status in outcome.answers if mode == "negative" and 400 <= status < 500}
    assert {"POST /v1/completions", "POST /v1/sessions", "POST /v1/files"} <= taken & refused

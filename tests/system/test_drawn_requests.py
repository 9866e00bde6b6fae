"""What anybody may send to a whole service over two ranks, drawn at random: the short form of a program."""

from pathlib import Path

import pytest

pytest.importorskip("schemathesis", reason="schemathesis is not installed")

from tests.fuzz.served_requests import one_round


def test_no_drawn_request_is_an_error_of_ours(tmp_path: Path) -> None:
    """Requests of the OpenAPI text, states and model folders of wild values: no 5xx, no lost rank, no traceback.

    `python -m tests.fuzz.served_requests` draws as many as are asked for.
    """
    found = one_round(tmp_path, 1, examples=0, share=16, states=60, folders=100)
    assert not found.findings, "\n".join(found.findings)
    assert found.described > 100 and found.states > 150 and len(found.statuses) > 5

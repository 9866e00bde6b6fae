"""The measurement of sessions that outlive processes, in small."""

import json
from pathlib import Path

import pytest

from dist_attn_research.service.sessions import main
from tests.support.models import write_small_folder

GRID = 1024


@pytest.mark.slow
def test_the_promises_in_small(tmp_path: Path) -> None:
    """New processes restore the bits without reading a token again; forks stay apart; retried appends are fed once."""
    model = write_small_folder(tmp_path / "tiny")
    options = "--tokens 12000 --bytes-per-token 1 --draws 8 --forks 5 --fork-ms 1e9 --kills 1 --pause-ms 150"
    sizes = f"--retry-bytes {GRID * 96} --checkpoint-tokens {GRID}"
    assert main([f"--model={model}", *options.split(), *sizes.split(), f"--json={tmp_path}/out"]) == 0
    result = json.loads((tmp_path / "out").read_text())
    assert result["append"]["tokens"] == result["restore"]["tokens"] == 12_000
    assert (result["restore"]["recomputed_tokens"], result["restore"]["reason"]) == (0, "")
    assert result["retries"]["equal"] == 1 and result["retries"]["different"] == 0

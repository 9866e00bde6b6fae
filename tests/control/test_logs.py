"""Lines that several processes write to one pipe."""

import json
import subprocess
import sys
import textwrap

import pytest

from tests.support.engines import running_engine

WRITER = """
import sys
import structlog
from dist_attn.log_lines import configure_logs, say

class Pieces:
    def __init__(self): self.written = []
    def write(self, text): self.written.append(text)
    def flush(self): pass
    def isatty(self): return False

sys.stderr = Pieces()
configure_logs("controller", "info")
structlog.get_logger().info("request ended", outcome="stop")
say("controller listens", sys.stderr)
print(len(sys.stderr.written), all(one.endswith(chr(10)) for one in sys.stderr.written))
"""


def test_a_start_is_told_in_two_lines(capfd: pytest.CaptureFixture[str]) -> None:
    """One when ranks are started and one when they are ready, each with the model, of which there may be two."""
    with running_engine(ranks=1):
        lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert [(line["event"], line["model"]) for line in lines] == [("epoch starts", "fake"), ("epoch ready", "fake")]


def test_a_line_is_written_in_one_piece() -> None:
    """A line and its end go out together, so that another process's line cannot come between them."""
    command = [sys.executable, "-c", textwrap.dedent(WRITER)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["2", "True"], done

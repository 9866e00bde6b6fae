"""The tests first: a number about something that does not work is worth nothing."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

__all__ = ["ROOT", "why_red"]

ROOT = Path(__file__).resolve().parent.parent
# Where Python finds what tests import: of this folder, and of research/ where that is there.
SOURCES = (str(ROOT), str(ROOT / "research"))
DEADLINE_S = 600.0
LINES_SHOWN = 15


def why_red(tests: Sequence[str], *, deadline_s: float = DEADLINE_S) -> str:
    """Run these tests; empty when they pass, else how the run ended."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*SOURCES, os.environ.get("PYTHONPATH", "")])}
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=deadline_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"the tests did not end within {deadline_s:g} s"
    if done.returncode == 0:
        return ""
    said = (done.stdout + done.stderr).strip().splitlines()
    return "\n".join([f"pytest ended with code {done.returncode}:", *said[-LINES_SHOWN:]])

"""The tests that hold a promise, run file by file: `python -m dist_attn_papers.service.held_by_tests FILE …`."""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from benchmarks.setting import ROOT

__all__ = ["main", "run_file"]

MOST_S = 900.0


def run_file(test: str) -> dict[str, int]:
    """How many tests of a file passed, failed and were skipped.

    Raises: RuntimeError where pytest wrote nothing about it; subprocess.TimeoutExpired.
    """
    with tempfile.TemporaryDirectory() as scratch:
        written = Path(scratch) / "result.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={written}", test]
        ended = subprocess.run(command, cwd=ROOT, check=False, timeout=MOST_S, stdout=sys.stderr).returncode
        if not written.exists():
            raise RuntimeError(f"pytest ended with exit code {ended} and wrote nothing about {test}")
        suites = list(ElementTree.parse(written).getroot().iter("testsuite"))
    count = {key: sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")}
    failed = count["failures"] + count["errors"]
    return {"passed": count["tests"] - failed - count["skipped"], "failed": failed, "skipped": count["skipped"]}


def main(arguments: Sequence[str]) -> int:
    """The exit code: 0 when all passed, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m dist_attn_papers.service.held_by_tests", description=__doc__)
    parser.add_argument("tests", nargs="+")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    result = {test: run_file(test) for test in given.tests}
    print(json.dumps(result, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(result))
    return int(any(counts["failed"] for counts in result.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

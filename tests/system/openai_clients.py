"""The official client in its major versions, each in an environment of its own.

By hand, against a service that runs: `python -m tests.system.openai_clients http://127.0.0.1:8000 [KEY]`.
"""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

VERSIONS = ("openai>=1.40,<2", "openai>=2,<3", "openai>=3,<4")
PROGRAM = Path(__file__).with_name("openai_program.py")
INSTALL_SECONDS = 300
RUN_SECONDS = 300


class CannotInstall(Exception):
    """pip could not get a version here."""


def make_environment(folder: Path, version: str) -> Path:
    """An environment with that version of the client; its Python.

    Raises: CannotInstall with pip's last line.
    """
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    command = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", version]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        raise CannotInstall(f"{version}: pip took more than {INSTALL_SECONDS} s") from None
    if done.returncode:
        raise CannotInstall(f"{version}: {(done.stderr.strip().splitlines() or ['pip failed'])[-1]}")
    return python


def run_client(python: Path, url: str, key: str) -> subprocess.CompletedProcess[str]:
    """The program of a user, in that environment."""
    command = [python, "-I", PROGRAM, url, key]
    return subprocess.run(command, capture_output=True, text=True, timeout=RUN_SECONDS)


def main(url: str, key: str = "none") -> int:
    """Every version in turn; 1 when one of them fails."""
    failed = 0
    for version in VERSIONS:
        with tempfile.TemporaryDirectory() as folder:
            done = run_client(make_environment(Path(folder), version), url, key)
        print(done.stdout.strip() or f"{version}: {done.stderr.strip().splitlines()[-1]}", flush=True)
        failed |= done.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

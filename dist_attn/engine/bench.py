"""`dist-attn bench`: the benchmarks of a source tree, which an installed package does not carry."""

import subprocess
import sys
from pathlib import Path

import dist_attn
from dist_attn.control.ranks import child_environment
from dist_attn.errors import EngineError, InputError

__all__ = ["bench"]

DEADLINE_S = 1800.0


def bench(name: str, json_file: Path | None, *, root: Path | None = None) -> int:
    """Run one benchmark of the source tree at `root` (by default this package's) in a process; its exit code.

    Raises: InputError where there are no benchmarks, EngineError when they do not end.
    """
    root = Path(dist_attn.__file__).resolve().parents[1] if root is None else root
    if not (root / "benchmarks" / "run.py").is_file():
        raise InputError(
            f"there are no benchmarks at {root}: an installed package does not carry them; in a source tree, run "
            f"`make bench ARGS={name}`"
        )
    command = [sys.executable, "-m", "benchmarks.run", name]
    if json_file is not None:
        command.append(f"--json={json_file.absolute()}")
    try:
        return subprocess.run(command, cwd=root, env=child_environment(), timeout=DEADLINE_S, check=False).returncode
    except subprocess.TimeoutExpired:
        raise EngineError(
            f"benchmark {name} did not end within {DEADLINE_S:g} s; run it on a quieter machine"
        ) from None

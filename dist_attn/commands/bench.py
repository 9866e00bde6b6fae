"""`dist-attn bench`: benchmarks and papers of a source tree, which an installed package does not carry."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import dist_attn
from dist_attn.control.processes import end_process
from dist_attn.control.ranks import child_environment
from dist_attn.errors import EngineError, InputError, MissingExtraError

__all__ = ["bench"]

# Packages that benchmarks and the tests before them import, and that an environment which only serves lacks.
NEEDED = ("hypothesis", "psutil", "pytest", "transformers")
DEADLINE_S = 1800.0
# The time for an experiment that is told to stop to save itself and to report what it has found.
STOPPING_S = 120.0


def bench(
    name: str | None,
    json_file: Path | None,
    *,
    options: Sequence[str] = (),
    deadline_s: float = DEADLINE_S,
    root: Path | None = None,
) -> int:
    """Run one benchmark of the source tree at `root` (by default this package's) in a process; returns its exit code.

    Without a name it lists them all.

    `options` are the benchmark's own. At the deadline it is told to stop; an experiment then saves how far it is.

    Units: deadline_s in seconds.
    Raises: InputError where there are no benchmarks, MissingExtraError without the packages that they import,
        EngineError when they do not end.
    """
    root = Path(dist_attn.__file__).resolve().parents[1] if root is None else root
    if not (root / "benchmarks" / "run.py").is_file():
        raise InputError(
            f"there are no benchmarks at {root}: an installed package does not carry them; in a source tree, run "
            f"`make bench ARGS={name or '--list'}`"
        )
    missing = sorted(name for name in NEEDED if importlib.util.find_spec(name) is None)
    if missing:
        raise MissingExtraError(
            f"benchmarks need {', '.join(missing)}: `make setup` in the checkout installs what they need"
        )
    papers = root / "papers"  # tables and studies, which know the benchmarks too
    module = "dist_attn_papers" if (papers / "dist_attn_papers").is_dir() else "benchmarks.run"
    command = [sys.executable, "-m", module, name or "--list", *options]
    environment = child_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(papers), environment["PYTHONPATH"]])
    if json_file is not None:
        command.append(f"--json={json_file.absolute()}")
    process = subprocess.Popen(command, cwd=root, env=environment)
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        end_process(process, STOPPING_S)
        raise EngineError(
            f"benchmark {name} did not end within {deadline_s:g} s; run it on a quieter machine, or give it longer by "
            "--minutes: an experiment goes on where it was stopped"
        ) from None
    except BaseException:
        process.kill()
        process.wait()
        raise

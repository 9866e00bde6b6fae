"""`dist-attn` as its users start it, over a text that every checkout has."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.cases import DEVICE, Row, judged
from benchmarks.verify import ROOT
from dist_attn.control.ranks import child_environment

__all__ = ["MODEL", "SHARED", "compared", "dist_attn", "write_book"]

MODEL = "books-6m"
# Where several ranks are to share the one GPU; of a CPU there is only one.
SHARED = "cuda:0" if DEVICE == "cuda" else "cpu"
DEADLINE_S = 300.0  # the piece that waits for a command has a shorter one


def write_book(folder: Path, size: int) -> Path:
    """A file of so many characters: the pages of the documentation, one after the other."""
    pages = "\n".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    book = folder / "book.txt"
    book.write_text((pages * (1 + size // len(pages)))[:size])
    return book


def dist_attn(*words: str, ranks: int = 0) -> str:
    """Run a command, under torchrun where there are `ranks`; what it prints.

    Raises: RuntimeError with the end of what it said where it fails.
    """
    launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "-m"] if ranks else []
    command = [sys.executable, "-m", *launcher, "dist_attn", *words]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode:
        raise RuntimeError(f"dist-attn {' '.join(words)} ended with {done.returncode}: {done.stderr[-2_000:]}")
    return done.stdout


def compared(want: Path, got: Path, dtype: torch.dtype) -> Row:
    """Two files of rows."""
    wanted, found = (torch.from_numpy(np.load(file)) for file in (want, got))
    return {"rows": len(found), **judged({"rows": wanted}, {"rows": found}, dtype)}

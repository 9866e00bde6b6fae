"""The scripts about GPUs run through without one, and say what they are to say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own: Triton reads its variable once."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_the_longest_attention_is_within_its_bytes(tmp_path: Path) -> None:
    """Each form on one rank stays within the bytes for which its length was found; `--tiny` needs no GPU."""
    file = tmp_path / "longest.json"
    assert run("dist_attn_research.gpu.longest").returncode == 2
    done = run("dist_attn_research.gpu.longest", "--tiny", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(row["at_longest"]["within"] for row in json.loads(file.read_text())["rows"] if row["ranks"] == 1)


@pytest.mark.slow
def test_kernels_compile_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    """Kernels are compiled for an H200 here, and those of the forward pass and of the step spill no register."""
    pytest.importorskip("triton", reason="needs triton: pip install -e '.[gpu]'")
    file, parts = tmp_path / "registers.json", ("sums", "scan", "outputs", "step")
    done = run("dist_attn_research.gpu.kernel_registers", "--only", *parts, "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = json.loads(file.read_text())["kernels"]
    assert set(parts) <= set(kernels)
    assert all(row["spilled"] == 0 for row in kernels.values()), kernels

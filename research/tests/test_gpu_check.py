"""The scripts about GPU kernels run through without a GPU, and say what they are to say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
pytest.importorskip("triton", reason="needs triton: pip install -e '.[gpu]'")


def run(*arguments: str, interpreted: bool) -> subprocess.CompletedProcess[str]:
    """A script in a process of its own: Triton reads its variable once."""
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpreted else "0", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-m", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_the_check_runs_in_the_interpreter(tmp_path: Path) -> None:
    """Every part of the check runs at the smallest sizes, nothing is wrong, and all of it is in the JSON file."""
    file = tmp_path / "check.json"
    done = run("dist_attn_research.gpu.check", "--tiny", "--tune", "--json", str(file), interpreted=True)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    parts = ("correctness", "relative_correctness", "graph_correctness")
    assert all(row["right"] for part in parts for row in found[part])
    assert found["relative"][0]["kernels causal with backward"] > 0
    assert found["graph"][0]["captured"] > 0
    assert {"kernels", "kernels with backward", "sdpa"} <= set(found["attention"][0])
    assert found["decode"][0]["kernel"] > 0
    assert all(row["at_longest"]["within"] for row in found["longest"] if row["ranks"] == 1)
    assert found["tiles"]["best"]["seconds"] > 0


def test_without_a_gpu_the_full_check_says_what_to_do() -> None:
    """On a machine without a GPU the full check ends with status 2 and one line that names the tiny one."""
    done = run("dist_attn_research.gpu.check", interpreted=True)
    assert done.returncode == 2
    assert "--tiny" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_kernels_compile_for_hopper_without_a_gpu(tmp_path: Path) -> None:
    """Kernels are compiled for an H200 here, and those of the forward pass and of the step spill no register."""
    file = tmp_path / "registers.json"
    done = run(
        "dist_attn_research.gpu.kernel_registers",
        "--only",
        "sums",
        "scan",
        "outputs",
        "step",
        "--json",
        str(file),
        interpreted=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kernels = json.loads(file.read_text())["kernels"]
    assert {"sums", "scan", "outputs", "step"} <= set(kernels)
    assert all(row["spilled"] == 0 for row in kernels.values()), kernels

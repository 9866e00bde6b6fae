"""The scripts about GPUs run through without one, and say what they are to say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dist_attn_papers.gpu.kernel_registers import SPILLING

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
    assert run("dist_attn_papers.gpu.longest").returncode == 2
    done = run("dist_attn_papers.gpu.longest", "--tiny", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(row["at_longest"]["within"] for row in json.loads(file.read_text())["rows"] if row["ranks"] == 1)


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90", "100"])
def test_kernels_spill_no_register(capability: str) -> None:
    """Compiled without a GPU for three generations of them, only walks for bfloat16 spill registers by default."""
    pytest.importorskip("triton", reason="needs triton: pip install -e '.[gpu]'")
    done = run("dist_attn_papers.gpu.kernel_registers", "--dtype", "bfloat16", "--capability", capability)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("\n| ") > 20


def test_what_is_filed_of_kernels_spills_nothing_but_of_walks() -> None:
    """The filed table has every kernel for every type and generation, of which only walks over chunks spill."""
    numbers = json.loads((ROOT / "benchmarks/results/kernel-registers.json").read_text())["numbers"]
    spilled = {name: value for name, value in numbers.items() if name.endswith(", spilled")}
    for dtype in ("float32", "bfloat16", "float16"):
        for capability in ("8.0", "9.0", "10.0"):
            assert any(name.startswith(f"{dtype}, {capability}, outputs") for name in spilled)
    assert {name.split(", ")[2] for name, value in spilled.items() if value} <= set(SPILLING)


@pytest.mark.parametrize(
    ("file", "spills"),
    [
        ("kernel-registers", {"sums": 160.0, "states": 184.0, "states back": 384.0}),
        ("kernel-registers-triton-3.6.0", {"sums": 164.0, "states": 172.0, "states back": 388.0}),
    ],
)
def test_what_is_filed_of_hopper(file: str, spills: dict[str, float]) -> None:
    """In bfloat16 values are right, only walks spill so many bytes, and two programs share an H100's 228 KiB."""
    filed = json.loads((ROOT / f"benchmarks/results/{file}.json").read_text())
    numbers = filed["numbers"]
    of_kernels = {name: value for name, value in numbers.items() if name.startswith("bfloat16, 9.0")}
    shared = [value for name, value in of_kernels.items() if name.endswith(", shared")]
    assert len(shared) >= 20 and max(shared) <= (228 // 2 - 1) * 1024
    spilled = {f"bfloat16, 9.0, {kernel}, spilled": value for kernel, value in spills.items()}
    assert {name: value for name, value in of_kernels.items() if name.endswith(", spilled") and value} == spilled
    assert all(value < 3e-2 for name, value in numbers.items() if name.endswith(", error"))
    assert filed["setting"]["versions"]["triton"]

"""`doctor --compile`: kernels for a GPU that is not here, in Triton's cache, where the next process finds them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dist_attn.commands import compile_kernels as module
from dist_attn.commands.compile_kernels import compile_kernels
from dist_attn.errors import ConfigError
from dist_attn.ops.kernel_target import kernel_target
from tests.support.model_cases import model_config


def _compiled(model: Path, cache: Path) -> dict[str, Any]:
    """The report of a process of its own: Triton reads its variables once."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment |= {"DIST_ATTN_ENGINE__RANKS": "2"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "dist_attn", "doctor", "--compile", "sm_90", "--model", str(model), "--json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


@pytest.mark.slow
@pytest.mark.timeout(1_800)
def test_kernels_are_compiled_once(tmp_path: Path) -> None:
    """The first call compiles those of reading, drawing, ranks and training, and the second finds them all."""
    pytest.importorskip("triton", reason="needs triton: pip install -e '.[gpu]'")
    model, cache = tmp_path / "model", tmp_path / "cache"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(model_config("gated") | {"num_layers": 1}))
    first = _compiled(model, cache)
    needed = {"sums_kernel", "outputs_kernel", "read_kernel", "step_kernel", "features_gradient_kernel"}
    needed |= {"gates_kernel", "gate_gradients_kernel"}
    assert needed <= first["compiled"].keys()
    assert not first["cached"]
    assert (first["cache"], first["dtype"]) == (str(cache), "bfloat16")
    described = [json.loads(path.read_text()) for path in cache.glob("*/[a-z]*_kernel.json")]
    assert len(described) == sum(first["compiled"].values()) == len(list(cache.glob("*/*.cubin")))
    assert {kernel["target"]["arch"] for kernel in described} == {90}
    second = _compiled(model, cache)
    assert not second["compiled"]
    assert second["cached"] == first["compiled"]


@pytest.mark.parametrize(
    ("architecture", "environ", "installed", "says"),
    [
        ("h100", {}, True, r"--compile is 'h100'; needed is one of .* sm_90 \(H100, H200\)"),
        ("sm_91", {}, True, "--compile is 'sm_91'; needed is one of"),
        ("sm_90", {"TRITON_INTERPRET": "1"}, True, "TRITON_INTERPRET is set, .*: unset it"),
        ("sm_90", {}, False, r"--compile needs Triton, which is not installed; .*\[gpu\]"),
    ],
)
def test_what_cannot_be_compiled_is_said(
    monkeypatch: pytest.MonkeyPatch, architecture: str, environ: dict[str, str], installed: bool, says: str
) -> None:
    """Before anything is loaded, with what to do."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(module, "find_spec", lambda name: object() if installed else None)
    with pytest.raises(ConfigError, match=says):
        compile_kernels(architecture, None, {}, as_json=False)
    assert kernel_target() is None

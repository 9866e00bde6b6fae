"""The assembler of Triton's kernels: the package's where it is new enough and the driver takes what it makes."""

import os
from pathlib import Path

import pytest
import torch

from dist_attn.ops.kernel_target import packaged_assembler, use_newest_assembler


def install(site: Path, version: str) -> Path:
    """A package of this version with a program; where that is."""
    program, about = site / "nvidia/cu13/bin/ptxas", site / f"nvidia_cuda_nvcc-{version}.dist-info"
    for folder in (program.parent, about):
        folder.mkdir(parents=True)
    program.touch()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: nvidia-cuda-nvcc\nVersion: {version}\n")
    (about / "RECORD").write_text("nvidia/cu13/bin/nvcc,,\nnvidia/cu13/bin/ptxas,,\n")
    return program


@pytest.mark.parametrize(
    ("version", "cuda", "before", "taken"),
    [
        ("13.5.37", "13.0", None, "package"),
        ("13.10.1", "13.0", "/own/ptxas", "/own/ptxas"),
        ("13.5.37", "12.8", None, None),
        ("13.2.80", "13.0", None, None),
        (None, "13.0", None, None),
    ],
    ids=["new", "chosen by hand", "an older driver", "as wrong as Triton's", "none"],
)
def test_a_newer_assembler_is_taken(
    version: str | None,
    cuda: str,
    before: str | None,
    taken: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of the package, from CUDA 13.3 on, unless the user names one or torch is built for drivers before 13."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setenv("TRITON_PTXAS_PATH", before or "")  # so that it is put back, whatever comes
    if before is None:
        monkeypatch.delenv("TRITON_PTXAS_PATH")
    program = None if version is None else str(install(tmp_path, version))
    if version is None and packaged_assembler() is not None:
        pytest.skip("nvidia-cuda-nvcc is installed here")
    use_newest_assembler()
    assert os.environ.get("TRITON_PTXAS_PATH") == (program if taken == "package" else taken)

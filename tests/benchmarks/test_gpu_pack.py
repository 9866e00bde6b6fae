"""What travels to a machine with a GPU and no network: small enough, all that is needed, and nothing lost at home."""

import json
import lzma
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from benchmarks import setting
from benchmarks.gpu.__main__ import environment
from benchmarks.gpu.pack import bring_back, leave_behind, pack_kernels, pack_wheels, travelling
from benchmarks.setting import ROOT

LARGE, READ = "dist_attn/shipped/big/model.safetensors", "dist_attn/shipped/books-6m/model.safetensors"
# What the machine has, and little more; torch brings what it imports.
THERE = ("torch==2.11.0", "triton==3.6.0", "numpy==2.5.2", "scipy", "transformers==5.17.0")
PYTHON = "3.12"


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(["git", *who, *arguments], cwd=folder, capture_output=True, text=True, check=True)
    return done.stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A repository with two models."""
    for name in (LARGE, READ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(f"weights of {name}")
    (tmp_path / "code").write_text("1")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "all")
    return tmp_path


def test_what_stays_behind_is_never_lost(clone: Path) -> None:
    """Weights that nothing there reads do not travel, commits made meanwhile keep them, and undoing returns them."""
    (clone / LARGE).write_text("trained on")
    with pytest.raises(ValueError, match="not committed as it is"):
        leave_behind(clone)
    assert (clone / LARGE).read_text() == "trained on"
    git(clone, "checkout", LARGE)
    assert leave_behind(clone) == [LARGE] and leave_behind(clone) == []
    assert {str(path.relative_to(clone)): path.stat().st_size for path in travelling(clone)}[LARGE] == 0
    assert (clone / READ).stat().st_size
    assert git(clone, "status", "--porcelain") == ""
    (clone / "code").write_text("2")
    git(clone, "add", "-A")
    git(clone, "commit", "-qam", "meanwhile")
    assert git(clone, "show", f"HEAD:{LARGE}") == f"weights of {LARGE}"
    assert bring_back(clone) == [LARGE] and bring_back(clone) == []
    assert (clone / LARGE).read_text() == f"weights of {LARGE}"
    assert git(clone, "status", "--porcelain") == ""


def test_what_was_put_in_the_place_of_weights_is_kept(clone: Path) -> None:
    """Undoing overwrites no file that has come there since, and says where the other one is."""
    leave_behind(clone)
    (clone / LARGE).write_text("new")
    with pytest.raises(FileExistsError, match="left-behind"):
        bring_back(clone)
    with pytest.raises(ValueError, match="not committed as it is"):
        leave_behind(clone)
    assert (clone / LARGE).read_text() == "new"
    (clone / LARGE).unlink()
    assert bring_back(clone) == [LARGE]
    assert (clone / LARGE).read_text() == f"weights of {LARGE}"


def test_a_packed_tree_finds_its_packages_and_kernels(tmp_path: Path) -> None:
    """Wheels are unpacked of packages that this Python lacks, and of transformers; kernels and assembler are found."""
    wheels, cache = tmp_path / "wheels", tmp_path / "made"
    wheels.mkdir()
    (tmp_path / ".gpu").mkdir()
    for name in ("packaging", "no_such_package", "transformers", "numpy", "hf_xet"):
        with zipfile.ZipFile(wheels / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"{name}/__init__.py", "")
            wheel.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (cache / "KEY").mkdir(parents=True)
    for name in ("a.cubin", "a.json", "a.ptx"):
        (cache / "KEY" / name).write_text(name)
    files = {name: str(cache / "KEY" / name) for name in ("a.cubin", "a.json", "a.ptx")}
    (cache / "KEY/__grp__a.json").write_text(json.dumps({"child_paths": files}))
    pack_kernels(cache, tmp_path / ".gpu/triton.tar.xz")
    pack_wheels(wheels, tmp_path / ".gpu/wheels.tar.xz")
    (tmp_path / ".gpu/ptxas.xz").write_bytes(lzma.compress(b"#!/bin/sh\necho assembled\n"))
    for _ in range(2):
        found = environment(tmp_path, {"PYTHONPATH": "/exported", "HOME": "/h"})
    site, kernels = tmp_path / ".gpu/site", tmp_path / ".gpu/triton"
    assert {path.name for path in site.iterdir() if path.suffix == ""} == {"no_such_package", "transformers"}
    assert {path.name for path in (tmp_path / ".gpu/wheels").iterdir()} == {
        f"{name}-1.0-py3-none-any.whl" for name in ("packaging", "no_such_package", "transformers")
    }
    paths = [*(str(tmp_path / source) for source in (".", "service", "client")), str(site), "/exported"]
    kept = {"TRITON_CACHE_DIR": str(kernels), "TRITON_PTXAS_PATH": str(tmp_path / ".gpu/ptxas"), "HOME": "/h"}
    assert found == {"PYTHONPATH": os.pathsep.join(paths), **kept}
    assert subprocess.check_output([found["TRITON_PTXAS_PATH"]], text=True) == "assembled\n"
    assert {path.name for path in (kernels / "KEY").iterdir()} == {"a.cubin", "a.json", "__grp__a.json"}
    group = json.loads((kernels / "KEY/__grp__a.json").read_text())["child_paths"]
    assert group["a.cubin"] == str(kernels / "KEY/a.cubin")
    assert "PYTHONPATH" in environment(tmp_path / "plain", {})
    (tmp_path / ".gpu/wheels/other-1.0-cp27-cp27mu-manylinux1_x86_64.whl").touch()
    with pytest.raises(SystemExit, match="another Python than this one: pack again with --python=3"):
        environment(tmp_path, {})


def test_a_packed_tree_knows_its_commit(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a repository of its own, also inside another one, the commit is that which was packed."""
    (clone / "tree/.gpu").mkdir(parents=True)
    (clone / "tree/.gpu/commit").write_text("abcdef123\n")
    monkeypatch.setattr(setting, "ROOT", clone / "tree")
    assert setting.look_around().commit == "abcdef123"


def _python() -> str:
    """One of the machine's version that can make environments.

    Raises: pytest.skip.Exception where there is none.
    """
    found = [shutil.which(f"python{PYTHON}"), *map(str, Path.home().glob(f".pyenv/versions/{PYTHON}.*/bin/python3"))]
    for one in filter(None, found):
        if subprocess.run([one, "-c", "import ensurepip, venv"], capture_output=True, check=False).returncode == 0:
            return one
    pytest.skip(f"needs Python {PYTHON}, and there is none")


@pytest.mark.slow
@pytest.mark.timeout(7_200)
def test_both_calls_run_on_a_machine_that_has_torch_alone(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Packed, copied without git and without a network, all pieces end right in the smallest sizes."""
    if not pytestconfig.getoption("stand_in"):
        pytest.skip("fetches 2.5 GB of packages and takes minutes: run with --stand-in before a visit")
    python, sender, machine, venv = _python(), tmp_path / "sender", tmp_path / "machine", tmp_path / "venv"
    try:
        sender.mkdir()
        for path in travelling(ROOT):
            _copy(path, sender / path.relative_to(ROOT))
        git(sender, "init", "-q")
        git(sender, "add", "-A")
        git(sender, "commit", "-qm", "all")
        subprocess.run([python, "-m", "venv", venv], check=True)
        for command in (
            [venv / "bin/python", "-m", "pip", "install", "-q", *THERE],
            [sys.executable, "-m", "benchmarks.gpu.pack", f"--python={PYTHON}"],
        ):
            done = subprocess.run(command, cwd=sender, capture_output=True, text=True, check=False)
            if done.returncode and "No matching distribution" in done.stderr + done.stdout:
                pytest.skip(f"the packages cannot be had: {done.stderr[-300:]}")
            assert done.returncode == 0, done.stdout + done.stderr
        assert "MiB of 64" in done.stdout
        for path in [*travelling(sender), *(file for file in (sender / ".gpu").rglob("*") if file.is_file())]:
            _copy(path, machine / path.relative_to(sender))
        commit = git(sender, "rev-parse", "--short=9", "HEAD").strip()
        shutil.rmtree(sender)
        for part in (1, 2):
            command = [venv / "bin/python", "-m", "benchmarks.gpu", "--tiny", f"--part={part}", "--seconds=3000"]
            alone = {"PATH": os.defpath, "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, cwd=machine, env=alone, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
        first = json.loads((machine / "gpu-check.jsonl").read_text().splitlines()[0])
        assert (first["setting"]["commit"], first["setting"]["triton"]) == (commit, "3.6.0")
    finally:
        for folder in (venv, sender, machine):  # some gigabytes, which pytest would keep
            shutil.rmtree(folder, ignore_errors=True)


def _copy(path: Path, to: Path) -> None:
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(path, to, follow_symlinks=False)

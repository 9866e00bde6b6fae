"""What is released: wheels and sdists carry what they need, each wheel works by itself, and the papers are named."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import numpy as np
import pytest
import yaml

from dist_attn import __version__

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240
SHIPPED = {
    f"dist_attn/shipped/{model}/{name}"
    for model in ("books-6m", "minilm-stream", "writer-12m")
    for name in ("config.json", "manifest.json", "model.safetensors", "tokenizer.json", "README.md")
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree; what is built leaves files in it."""
    if importlib.util.find_spec("build") is None:
        pytest.skip("needs build: pip install build")
    folder = tmp_path_factory.mktemp("source")
    for name in ("dist_attn", "service", "client"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
    for model in ("books-6m", "writer-12m"):  # no test reads these weights, and compressing them takes long
        (folder / f"dist_attn/shipped/{model}/model.safetensors").write_bytes(b"none")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def packages(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with wheel and sdist, the wheel from the sdist."""
    return built(source, tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def client_packages(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same of the client."""
    return built(source / "client", tmp_path_factory.mktemp("client"))


def built(source: Path, out: Path) -> Path:
    """The folder `out`, into which a distribution was built."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=out, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return out


def modules_of(folder: str) -> set[str]:
    """The Python files of a folder, by their paths below it."""
    return {path.relative_to(ROOT / folder).as_posix() for path in (ROOT / folder).rglob("*.py")}


def test_wheel_and_sdist_carry_all_that_is_needed(packages: Path) -> None:
    """Models, types and licence are in both, tests and caches in neither."""
    (wheel,), (sdist,) = packages.glob("*.whl"), packages.glob("*.tar.gz")
    held = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {*SHIPPED, "dist_attn/py.typed", "dist_attn_service/py.typed", "dist_attn_service/app.py"} <= held
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in held)
    assert {*SHIPPED, "dist_attn/py.typed", "pyproject.toml", "LICENSE", "README.md"} <= packed
    assert not [name for name in held | packed if name.startswith("tests/") or "__pycache__" in name]
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "dist_attn").rglob("*.py")}
    assert sources | modules_of("service") | modules_of("client") <= held
    assert sources | {f"{folder}/{path}" for folder in ("service", "client") for path in modules_of(folder)} <= packed
    assert {name.split("/")[0] for name in held} == {
        "dist_attn",
        "dist_attn_api",
        "dist_attn_client",
        "dist_attn_service",
        f"dist_attn-{__version__}.dist-info",
    }


def test_the_client_is_a_wheel_of_its_own(client_packages: Path) -> None:
    """It holds the two packages that need no torch, with types and licence, and requires three others."""
    (wheel,), (_,) = client_packages.glob("*.whl"), client_packages.glob("*.tar.gz")
    info = f"dist_attn_client-{__version__}.dist-info"
    with zipfile.ZipFile(wheel) as archive:
        held, metadata = set(archive.namelist()), archive.read(f"{info}/METADATA").decode()
        assert archive.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
    assert {name for name in held if not name.startswith(f"{info}/")} == {
        *modules_of("client"), "dist_attn_api/py.typed", "dist_attn_client/py.typed",
    }  # fmt: skip
    needed = [line.removeprefix("Requires-Dist: ") for line in metadata.splitlines() if "Requires-Dist" in line]
    assert needed == tomllib.loads((ROOT / "client/pyproject.toml").read_text())["project"]["dependencies"]
    main = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert set(needed) <= set(main), "the main distribution carries the client, so it requires what the client does"


def test_the_wheel_works_without_the_repository(packages: Path, tmp_path: Path) -> None:
    """In an environment and a folder of its own `dist-attn encode FILE` gives rows, with its own copy of the model."""
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    site = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    # What the wheel requires is not downloaded again: after its own packages it finds those that are installed here.
    (site / "installed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(site)]
    (wheel,) = packages.glob("*.whl")
    done = subprocess.run([sys.executable, *install, str(wheel)], capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
    (tmp_path / "place").mkdir()
    (tmp_path / "place" / "text.txt").write_bytes(b"It was the best of times. " * 200)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(*command: str) -> str:
        told = subprocess.run(
            [str(tmp_path / "venv/bin/python"), *command], capture_output=True, text=True, timeout=SECONDS,
            cwd=tmp_path / "place", env=environment,
        )  # fmt: skip
        assert told.returncode == 0, told.stderr
        return told.stdout

    assert Path(run("-c", "import dist_attn; print(dist_attn.__file__)").strip()).is_relative_to(site)
    report = json.loads(run("-m", "dist_attn", "encode", "text.txt", "--out", "rows.npy").splitlines()[-1])
    rows = np.load(tmp_path / "place" / "rows.npy", allow_pickle=False)
    assert report["model"] == "minilm-stream" and rows.shape[0] == report["rows"] > 0 and np.isfinite(rows).all()


def test_the_citation_names_the_papers_and_this_version() -> None:
    """CITATION.cff is valid, has the five papers, and the version and licence of the package."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.citation-file-format"]
    done = subprocess.run([*command, str(ROOT / "CITATION.cff")], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    told = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (told["version"], told["license"]) == (__version__, "Apache-2.0")
    papers = told["references"]
    assert len(papers) == 5
    assert {paper["title"].partition(":")[0] for paper in papers} == {
        "Random Feature Attention",
        "Scaleformer",
        "A Unified View of Long-Sequence Models towards Modeling Million-Scale Dependencies",
        "An Introduction to Transformers",
    }


def test_the_workflow_calls_what_people_call() -> None:
    """The workflow is valid, and every step that runs something runs a target of the Makefile."""
    file = ROOT / ".github/workflows/check.yml"
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [
        step["run"]
        for job in yaml.safe_load(file.read_text())["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    assert {step.split()[0] for step in steps} == {"make"}
    targets = (ROOT / "Makefile").read_text()
    assert {step.split()[1] for step in steps} == {"check", "docs", "test-all", "package"}
    assert all(f"\n{step.split()[1]}: setup" in targets for step in steps)

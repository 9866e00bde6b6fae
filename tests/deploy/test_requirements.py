"""The images' lists of packages: tested versions with hashes, no more and no fewer than needed, and no torch."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support.api_image import (
    REQUIREMENTS,
    ROOT,
    make_image_environment,
    needed_by_engine,
    needed_distributions,
    pins,
)

LISTS = sorted((ROOT / "deploy").glob("requirements-*.txt"))


@pytest.mark.parametrize("file", LISTS, ids=lambda path: path.name)
def test_every_version_is_the_tested_one_and_has_hashes(file: Path) -> None:
    """Each version of a list stands in constraints.txt, and each has the SHA-256 of its files."""
    tested, listed = pins(ROOT / "constraints.txt"), pins(file)
    differing = {name: (line, tested.get(name)) for name, line in listed.items() if line != tested.get(name)}
    assert not differing, differing
    entries = re.findall(r"^\S+==\S+ \\\n(?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", file.read_text(), re.MULTILINE)
    assert len(entries) == len(listed) > 0


def test_the_engines_list_is_what_the_project_requires() -> None:
    """It names what pyproject.toml requires and what that requires, but for torch, whose build is chosen."""
    listed, needed = set(pins(ROOT / "deploy/requirements-engine.txt")), needed_by_engine()
    assert listed == needed, f"missing: {sorted(needed - listed)}, not needed: {sorted(listed - needed)}"


def test_the_list_is_what_the_source_needs() -> None:
    """It names what the API's source imports and what that requires, and nothing else."""
    listed, needed, tested = set(pins(REQUIREMENTS)), needed_distributions(), pins(ROOT / "constraints.txt")
    missing = [tested.get(name, name) for name in sorted(needed - listed)]
    assert not missing, f"add to {REQUIREMENTS.name}: {missing}"
    assert not listed - needed, f"not needed in {REQUIREMENTS.name}: {sorted(listed - needed)}"


@pytest.mark.slow
def test_the_app_loads_with_nothing_but_the_list(tmp_path: Path) -> None:
    """In an environment that holds the listed packages alone, the app is imported, and torch cannot be."""
    python = make_image_environment(tmp_path / "venv")
    code = (
        "import importlib.util as u, sys, dist_attn_service.app, dist_attn_service.api_process\n"
        "sys.exit(str([m for m in ('torch', 'transformers', 'pytest') if u.find_spec(m)] or '') or 0)"
    )
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr

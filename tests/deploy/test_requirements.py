"""The API image's list of packages: the tested versions, no more and no fewer than its source needs, and no torch."""

import subprocess
from pathlib import Path

from tests.support.api_image import REQUIREMENTS, ROOT, make_image_environment, needed_distributions, pins


def test_every_version_is_the_tested_one() -> None:
    """Each line of the list stands in constraints.txt, letter for letter."""
    tested = pins(ROOT / "constraints.txt")
    differing = {
        name: (line, tested.get(name)) for name, line in pins(REQUIREMENTS).items() if line != tested.get(name)
    }
    assert not differing, differing


def test_the_list_is_what_the_source_needs() -> None:
    """It names what the API's source imports and what that requires, and nothing else."""
    listed, needed, tested = set(pins(REQUIREMENTS)), needed_distributions(), pins(ROOT / "constraints.txt")
    missing = [tested.get(name, name) for name in sorted(needed - listed)]
    assert not missing, f"add to {REQUIREMENTS.name}: {missing}"
    assert not listed - needed, f"not needed in {REQUIREMENTS.name}: {sorted(listed - needed)}"


def test_the_app_loads_with_nothing_but_the_list(tmp_path: Path) -> None:
    """In an environment that holds the listed packages alone, the app is imported, and torch cannot be."""
    python = make_image_environment(tmp_path / "venv")
    code = (
        "import importlib.util as u, sys, service.app, service.__main__\n"
        "sys.exit(str([m for m in ('torch', 'transformers', 'pytest') if u.find_spec(m)] or '') or 0)"
    )
    done = subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert done.returncode == 0, done.stderr

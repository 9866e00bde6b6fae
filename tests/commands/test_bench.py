"""`dist-attn bench`: runs the benchmarks of a source tree, and says so where there is none."""

import sys
from pathlib import Path

import pytest

from dist_attn.commands.bench import bench
from dist_attn.errors import EngineError, InputError, MissingExtraError


def test_says_where_benchmarks_are(tmp_path: Path) -> None:
    """An installed package has no benchmarks: the message says so and what to do."""
    with pytest.raises(InputError, match="make bench"):
        bench("forward", None, root=tmp_path)


def test_missing_packages_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the service is installed, the message names what is missing and what installs it."""
    for name in ("transformers", "psutil"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match="benchmarks need psutil, transformers: `make setup`"):
        bench(None, None)


def test_runs_the_benchmarks_of_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The name and an absolute path for the JSON are passed on, and the exit code comes back."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "run.py").write_text(
        "import sys\nopen('seen', 'w').write(' '.join(sys.argv[1:]))\nsys.exit(7)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", "")
    assert bench("forward", Path("out.json"), root=tmp_path) == 7
    assert (tmp_path / "seen").read_text() == f"forward --json={tmp_path / 'out.json'}"


def test_papers_are_started_where_they_are(tmp_path: Path) -> None:
    """A tree with papers/ has its names too: they are its own module's to find."""
    for folder in ("benchmarks", "papers/dist_attn_papers"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "benchmarks" / "run.py").touch()
    (tmp_path / "papers" / "dist_attn_papers" / "__init__.py").touch()
    (tmp_path / "papers" / "dist_attn_papers" / "__main__.py").write_text(
        "import sys\nopen('seen', 'w').write(' '.join(sys.argv[1:]))\n"
    )
    assert bench("mixers", None, options=["--seeds", "0"], root=tmp_path) == 0
    assert (tmp_path / "seen").read_text() == "mixers --seeds 0"


def test_an_option_of_the_benchmark_is_passed_on(tmp_path: Path) -> None:
    """What the command does not know goes to the benchmark; one that does not end is told to stop, and it is said."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "run.py").write_text(
        "import sys, time\nopen('seen', 'w').write(' '.join(sys.argv[1:]))\n"
        "time.sleep(60 if sys.argv[1] == 'long' else 0)\n"
    )
    assert bench("mixers", None, options=["--smoke", "--only", "rfa"], root=tmp_path) == 0
    assert (tmp_path / "seen").read_text() == "mixers --smoke --only rfa"
    with pytest.raises(EngineError, match=r"long did not end within 0\.5 s"):
        bench("long", None, deadline_s=0.5, root=tmp_path)

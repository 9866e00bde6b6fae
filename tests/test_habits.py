"""What CONTRIBUTING.md and the commit hooks tell people to run exists, and needs no network."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parent.parent
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
HOOKS = ROOT / ".pre-commit-config.yaml"


def test_every_make_target_has_a_line_of_help() -> None:
    """`make help` lists every target."""
    command = ["make", "--no-print-directory", "help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert {line.split()[1] for line in done.stdout.splitlines()} == TARGETS


def test_no_page_or_message_installs_from_an_index() -> None:
    """No package index has this project, so nothing tells people to `pip install dist-attn`, with extras or without."""
    places = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("papers/**/*.md")]
    places += [
        path
        for tree in ("dist_attn", "client", "service", "benchmarks", "papers")
        for path in (ROOT / tree).rglob("*.py")
    ]
    told = [path for path in places if re.search(r"pip install '?dist-attn\b", path.read_text(encoding="utf-8"))]
    # The checklist of a release comes after it is on an index.
    assert {path.name for path in told} <= {"release.md"}


def test_serving_installs_less_than_the_tests_need(tmp_path: Path) -> None:
    """`make serve` installs torch and this project alone; `make test` goes on from there and adds the rest."""

    def installs(target: str) -> list[str]:
        command = ["make", "--no-print-directory", "--dry-run", target, f"VENV={tmp_path}/venv"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return [line for line in done.stdout.splitlines() if "pip install" in line]

    serving = installs("serve")
    assert len(serving) == 2 and " torch==" in serving[0].replace('"', " ") and serving[1].endswith(" -e .")
    *together, apart = installs("test")
    assert together == [*serving, serving[1].removesuffix(" .") + ' ".[dev,docs]" -e papers']
    assert apart.endswith(f"--no-deps --upgrade --target {tmp_path}/venv/.fla fla-core einops")


def test_contributing_names_what_exists() -> None:
    """Every make target and every file that CONTRIBUTING.md names is there."""
    assert set(re.findall(r"make ([a-z-]+)", CONTRIBUTING)) <= TARGETS
    paths = re.findall(r"`((?:dist_attn|client|service|tests|docs|deploy|\.ci)/[\w./-]+)`", CONTRIBUTING)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == ["docs/decisions/NNNN-title.md"]


def test_the_hooks_are_valid_and_local() -> None:
    """pre-commit accepts its configuration, and every hook runs something of this checkout."""
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(HOOKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    for repository in yaml.safe_load(HOOKS.read_text())["repos"]:
        assert repository["repo"] == "local"
        for hook in repository["hooks"]:
            assert hook["language"] == "system"
            program, *words = hook["entry"].split()
            assert program.startswith(".venv/bin/") or (program == "make" and words[0] in TARGETS), hook["entry"]


def test_the_drawing_of_the_layers_is_complete() -> None:
    """docs/architecture.md draws every module and package of both trees, and none that is not there."""
    page = (ROOT / "docs/architecture.md").read_text()
    drawing = re.search(r"```\n(dist_attn: .*?)```", page, re.DOTALL)
    assert drawing is not None
    trees = ("dist_attn", "service/dist_attn_service")
    for tree, drawn in zip(trees, drawing[1].split("dist_attn_service:"), strict=True):
        there = {path.stem for path in (ROOT / tree).glob("[!_]*.py")}
        there |= {path.parent.name for path in (ROOT / tree).glob("*/__init__.py")}
        assert set(re.findall(r"[a-z_]+", drawn.removeprefix("dist_attn:"))) - {"__main__"} == there


def test_pages_name_files_that_exist() -> None:
    """Every source file that docs/architecture.md names, by its path or the end of it, is there."""
    page = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"`([\w/]+\.py)`", page))
    sources = [
        path.relative_to(ROOT).as_posix()
        for tree in ("dist_attn", "client", "service")
        for path in (ROOT / tree).rglob("*.py")
    ]
    assert len(named) > 15
    assert [name for name in sorted(named) if not any(f"/{path}".endswith(f"/{name}") for path in sources)] == []


def test_decisions_are_numbered_once_and_listed() -> None:
    """Decisions count from 0001 without gap or double, name themselves so, and stand in the list of their folder."""
    folder = ROOT / "docs" / "decisions"
    pages = sorted(folder.rglob("[0-9]*.md"), key=lambda page: page.name)
    assert [page.name[:4] for page in pages] == [f"{number:04}" for number in range(1, len(pages) + 1)]
    for page in pages:
        title = page.read_text().splitlines()[0].removeprefix("# ")
        assert title.startswith(f"{page.name[:4]}. ")
        listed = (page.parent / "README.md").read_text().splitlines()
        assert [line for line in listed if line.startswith(f"* [{title}]({page.name})")], page.name


FACTORIES = {"arange", "as_tensor", "empty", "eye", "full", "linspace", "logspace", "ones"}
FACTORIES |= {"rand", "randint", "randn", "randperm", "tensor", "zeros"}
# Where a new tensor need not say on which device it lies.
ANYWHERE = {
    "dist_attn/comm/": "a few numbers of the host that ranks tell each other; a back end takes them to its device",
    "dist_attn/commands/": "numbers and files of the host",
    "dist_attn/mixers/contract.py": "inputs of the contract's checks, which are made on the CPU",
    "dist_attn/ops/affine/native": "memory for the kernels in C, which are the CPU's",
    "dist_attn/ops/c_call.py": "memory for the kernels in C, which are the CPU's",
    "dist_attn/ops/linear_attention/native": "memory for the kernels in C, which are the CPU's",
}


def test_new_tensors_say_where_they_lie() -> None:
    """No tensor is made on the CPU by default and mixed with those of a device; parameters are, and move with `.to`.

    `torch.tensor` of numbers makes them on the CPU and copies them while the host waits for the device, so it says
    "cpu", and `ops.device.send` does the rest.
    """
    found = []
    for path in sorted((ROOT / "dist_attn").rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        if not name.startswith(tuple(ANYWHERE)):
            found += [f"{name}:{line}" for line in _without_device(ast.parse(path.read_text()))]
    assert found == []


def _without_device(tree: ast.AST) -> Iterator[int]:
    """Lines of calls that make a tensor without a word about its device, outside of modules' parameters."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            continue
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "nn.Parameter":
            continue
        if isinstance(node, ast.Call):
            module, _, function = ast.unparse(node.func).partition(".")
            device = [ast.unparse(word.value) for word in node.keywords if word.arg == "device"]
            of_numbers = function in ("tensor", "as_tensor")
            if module == "torch" and function in FACTORIES and (not device or (of_numbers and device != ["'cpu'"])):
                yield node.lineno
        yield from _without_device(node)


def test_a_test_that_hangs_is_ended_and_the_next_one_runs(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Every test has a limit of time, which fails it alone; here it is set to a moment."""
    hanging = "import threading\n\ndef test_hangs():\n    threading.Event().wait()\n\ndef test_next():\n    pass\n"
    (tmp_path / "test_hanging.py").write_text(hanging)
    settings = ["-c", str(ROOT / "pyproject.toml"), "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-n", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *settings, "-o", "timeout=0.5", "test_hanging.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "Timeout (>0.5s) from pytest-timeout" in done.stdout
    assert float(pytestconfig.getini("timeout")) > 0

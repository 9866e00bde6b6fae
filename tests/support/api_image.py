"""What the API image holds, and a virtual environment that holds no more: links to what is installed here."""

import ast
import re
import sys
import tomllib
import venv
from importlib.metadata import Distribution, distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
REQUIREMENTS = ROOT / "deploy/requirements-api.txt"
# Where the API begins: its package and the script that starts it.
API_SOURCE = (*(ROOT / "service").rglob("*.py"), ROOT / "deploy/entrypoints/start.py")
# uvicorn loads these by name.
LOADED_BY_NAME = {"uvloop", "httptools"}


def pins(file: Path) -> dict[str, str]:
    """`name==version`, with the name in its one spelling, for each line of a requirements file; by that name."""
    found = re.findall(r"^([\w.-]+)==([^\s;]+)", file.read_text(), re.MULTILINE)
    return {normalised(name): f"{normalised(name)}=={version}" for name, version in found}


def normalised(name: str) -> str:
    """A distribution's name in its one spelling."""
    return re.sub(r"[-_.]+", "-", name).lower()


def needed_distributions() -> set[str]:
    """What the API's source imports, and what that requires in turn, without extras."""
    owners = packages_distributions()
    waiting = {
        normalised(owner)
        for module in _imported_modules()
        if module not in sys.stdlib_module_names and not module.startswith("dist_attn")
        for owner in owners[module]
    } | LOADED_BY_NAME
    return _with_what_they_require(waiting)


def needed_by_engine() -> set[str]:
    """What this project requires with Redis and forms of answers, and that in turn, but for torch and its builds'."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["redis"], *extras["structured"]]
    needed = _with_what_they_require({normalised(Requirement(line).name) for line in required})
    return {name for name in needed if name not in ("torch", "triton") and not name.startswith(("nvidia-", "cuda-"))}


def _with_what_they_require(waiting: set[str]) -> set[str]:
    needed: set[str] = set()
    while waiting:
        name = waiting.pop()
        needed.add(name)
        for line in distribution(name).requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting |= {normalised(requirement.name)} - needed
    return needed


def make_image_environment(folder: Path) -> Path:
    """A virtual environment with what `deploy/requirements-api.txt` names and this project; the path of its Python."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for name in pins(REQUIREMENTS):
        for path in _top_level_paths(distribution(name)):
            link = packages / path.name
            if not link.exists():
                link.symlink_to(path)
    for package in ("dist_attn", "client/dist_attn_api", "client/dist_attn_client", "service/dist_attn_service"):
        (packages / Path(package).name).symlink_to(ROOT / package)
    return folder / "bin/python"


def _imported_modules() -> set[str]:
    """The top-level names that the API's source imports, and the files of dist_attn that it reaches."""
    waiting, seen, names = list(API_SOURCE), set[Path](), set[str]()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            for module in modules:
                names.add(module.split(".")[0])
                waiting += _files_of(module)
    return names


def _files_of(module: str) -> list[Path]:
    """The files of this repository that importing a dotted name runs; the name may end in something of a module."""
    parts = module.split(".")
    if parts[0] not in ("dist_attn", "dist_attn_api"):
        return []
    root = ROOT if parts[0] == "dist_attn" else ROOT / "client"
    folders = [root.joinpath(*parts[:count]) for count in range(1, len(parts) + 1)]
    files = [file for folder in folders for file in (folder / "__init__.py", folder.with_suffix(".py"))]
    return [file for file in files if file.is_file()]


def _top_level_paths(dist: Distribution) -> set[Path]:
    """The files and folders of a distribution that lie directly in site-packages."""
    names = {file.parts[0] for file in dist.files or () if ".." not in file.parts and not file.is_absolute()}
    return {Path(str(dist.locate_file(name))) for name in names - {"__pycache__"}}

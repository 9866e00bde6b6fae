"""The rules of the house that linters do not know: read from the source, and from fresh interpreters."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE_FOLDERS = ("dist_attn", "client", "service", "benchmarks", "papers", "examples", "deploy")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

TORCH_FREE = (
    "dist_attn_service.app",
    "dist_attn.client",
    "dist_attn_client",
    "dist_attn.control.controller",
    "dist_attn.control.scheduler",
    "dist_attn.costs",
    "dist_attn.errors",
    "dist_attn.layout",
    "dist_attn.launchers",
    "dist_attn.model_config",
    "dist_attn.settings",
    "dist_attn.shipped.downloaded",
    "dist_attn.store",
    "dist_attn.text",
    "dist_attn.wire.messages",
    "dist_attn.wire.snapshot",
    "dist_attn.wire.sockets",
)
SERVICE_MAY_IMPORT = {
    "wire", "text", "store", "shipped", "costs", "settings", "host_limits", "bounded_process", "log_lines", "errors",
    "__version__",
}  # fmt: skip
UNTRUSTED_LOADERS = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
# What torch.distributed sends as pickles.
OBJECT_COLLECTIVES = {
    "all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list",
    "send_object_list",
}  # fmt: skip
NAMES_THAT_SAY_NOTHING = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "stuff"}
PLAIN_FOLDERS = ("dist_attn", "service", "client", "deploy")
# A docstring is an imperative, or a noun phrase with its article: neither a clause nor a pronoun begins it.
RIDDLE = re.compile(
    r"(Those|What|Whether|How|Where|When|Who|As|The same|So many|It is|Likewise|That of|One that|Which|Whose|Why"
    r"|Whatever|They|It)\b"
)

Function = ast.FunctionDef | ast.AsyncFunctionDef


def python_files(*folders: str) -> list[Path]:
    """Every Python file of these folders, as far as they exist."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    """The parsed file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def functions_of(path: Path) -> Iterator[Function]:
    """Every function of a file, nested ones and methods included."""
    return (node for node in ast.walk(tree_of(path)) if isinstance(node, Function))


def imports_of(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a file imports; `from a import b` counts as a.b."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def place(path: Path, line: int = 1) -> str:
    """A file and line as an editor understands them."""
    return f"{path.relative_to(ROOT)}:{line}"


def test_these_load_without_torch() -> None:
    """A fresh interpreter that imports them has no torch in it, whatever the packages around them import."""
    code = "import sys\n" + "".join(
        f"import {module}\nif 'torch' in sys.modules: sys.exit('{module} loads torch')\n" for module in TORCH_FREE
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_service_reaches_only_what_it_may() -> None:
    """The service imports the shared, torch-free parts of dist_attn and nothing else of it."""
    found = [
        f"{place(path, line)} imports {name}"
        for path in python_files("service")
        for line, name in imports_of(path)
        if name.split(".")[0] == "dist_attn" and name.split(".")[1] not in SERVICE_MAY_IMPORT
    ]
    assert not found, found


def test_nothing_but_itself_imports_papers() -> None:
    """The papers stand on the product and on what measures, and neither of them on the papers."""
    found = [
        f"{place(path, line)} imports {name}"
        for path in python_files(*SOURCE_FOLDERS, "tests", "docs")
        if not path.is_relative_to(ROOT / "papers") and "dist_attn_papers" in path.read_text()
        for line, name in imports_of(path)
        if name.split(".")[0] == "dist_attn_papers"
    ]
    assert not found, found


def test_nothing_is_unpickled() -> None:
    """No source file imports a module that runs what it reads, or calls torch.load, torch.save, eval or a collective of
    objects.
    """
    found = [
        f"{place(path, line)} imports {name}"
        for path in python_files(*SOURCE_FOLDERS)
        for line, name in imports_of(path)
        if name.split(".")[0] in UNTRUSTED_LOADERS or name in ("torch.load", "torch.save")
    ]
    for path in python_files(*SOURCE_FOLDERS):
        for node in ast.walk(tree_of(path)):
            if not isinstance(node, ast.Call):
                continue
            last = getattr(node.func, "attr", getattr(node.func, "id", ""))  # the whole name takes long to write
            whole = ast.unparse(node.func) if last in ("load", "save", "eval", "exec") else ""
            if whole in ("torch.load", "torch.save", "eval", "exec") or last in OBJECT_COLLECTIVES:
                found.append(f"{place(path, node.lineno)} calls {last}")
    assert not found, found


def test_every_module_says_what_it_is() -> None:
    """Every Python file begins with a docstring."""
    found = [place(path) for path in python_files(*SOURCE_FOLDERS, "tests") if not ast.get_docstring(tree_of(path))]
    assert not found, found


def test_docstrings_say_what_things_are() -> None:
    """No docstring of the product begins with a clause or a pronoun, such as Those, Whether or What."""
    found = [
        f"{place(path, node.body[0].lineno)} {text.splitlines()[0]}"
        for path in python_files(*PLAIN_FOLDERS)
        for node in ast.walk(tree_of(path))
        if isinstance(node, Function | ast.ClassDef | ast.Module)
        if RIDDLE.match(text := ast.get_docstring(node) or "")
    ]
    assert not found, "\n".join(found)


def test_every_test_says_what_it_promises() -> None:
    """Every test function has a docstring of exactly one sentence."""
    found = []
    for path in python_files("tests"):
        for function in functions_of(path):
            if function.name.startswith("test_"):
                sentence = " ".join((ast.get_docstring(function) or "").split())
                if not sentence.endswith(".") or re.search(r"[.!?] [A-Z]", sentence):
                    found.append(f"{place(path, function.lineno)} {function.name}: {sentence!r}")
    assert not found, "\n".join(found)


def test_files_are_short() -> None:
    """No Python file is longer than 500 lines."""
    sizes = {place(path): len(path.read_text().splitlines()) for path in python_files(*SOURCE_FOLDERS, "tests")}
    found = {path: lines for path, lines in sizes.items() if lines > MAX_FILE_LINES}
    assert not found, found


def test_functions_are_short() -> None:
    """No function of the source is longer than 60 lines, docstring not counted."""
    found = []
    for path in python_files("dist_attn", "client", "service"):
        for function in functions_of(path):
            lines = (function.end_lineno or function.lineno) - function.lineno + 1
            first = function.body[0]
            if ast.get_docstring(function) is not None:
                lines -= (first.end_lineno or first.lineno) - first.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                found.append(f"{place(path, function.lineno)} {function.name} has {lines} lines")
    assert not found, found


def test_files_have_names_that_say_something() -> None:
    """No file or folder is called utils, helpers, common or the like."""
    found = [
        place(path)
        for path in python_files(*SOURCE_FOLDERS, "tests")
        if NAMES_THAT_SAY_NOTHING & {path.stem, *path.relative_to(ROOT).parts[:-1]}
    ]
    assert not found, found

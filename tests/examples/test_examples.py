"""Each example is run as its docstring says, but shorter, and does what it promises."""

import json
import os
import re
import runpy
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.support.programs import free_port
from tests.support.ranks import forkserver
from tests.support.served import Served, served
from tests.support.source_path import SOURCE_PATH

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("*.py"))
TEXT = "".join(
    f"Chapter {n}. The old sailor told the boy of whale number {n}, and the boy told the town.\n" for n in range(400)
)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A whole service over a small random model, whose id is `tiny`."""
    with served(tmp_path_factory.mktemp("served")) as whole:
        yield whole


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A book of 400 chapters of a line each."""
    path = tmp_path_factory.mktemp("book") / "book.txt"
    path.write_text(TEXT)
    return path


def run(name: str, *arguments: object, seconds: float = 200) -> str:
    """What an example prints; it must succeed."""
    environment = {**os.environ, "PYTHONPATH": SOURCE_PATH}
    command = [sys.executable, str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What an example prints that is run in this process, which has torch already."""

    def call(name: str, *arguments: object) -> str:
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as ended:
            assert not ended.code, ended.code
        return capsys.readouterr().out

    return call


@pytest.mark.parametrize("name", SCRIPTS)
def test_each_says_what_it_does(name: str, run_here: Callable[..., str]) -> None:
    """Every script has --help, which is its docstring, and the page of examples names it."""
    first = (EXAMPLES / name).read_text().split('"""')[1].splitlines()[0]
    assert first in run_here(name, "--help")
    assert f"examples/{name})" in (ROOT / "docs/how-to/examples.md").read_text()


@pytest.mark.parametrize(("tokens", "ranks"), [(1000, 4), (7, 9), (5, 1)])
def test_engine(tokens: int, ranks: int, run_here: Callable[..., str]) -> None:
    """Rows, gradients, the library's rows and the next token are those of one rank, with empty slices too."""
    try:
        said = run_here("engine_in_100_lines.py", "--tokens", tokens, "--ranks", ranks)
    finally:
        torch.set_default_dtype(torch.float32)
    first, *differences = said.splitlines()
    assert first.startswith(f"{tokens} tokens over {ranks} ranks") and len(differences) == 4
    assert all(float(line.split(": ")[1].split()[0]) < 1e-11 for line in differences)


def _train_on_a_rank(log: Path, port: int, rank: int, size: int, *arguments: object) -> None:
    """Run the example as torchrun does, but in a process that has what it imports."""
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {name: str(number) for name, number in found.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    sys.argv = ["train_hybrid.py", *map(str, arguments)]
    with log.open("w") as out, redirect_stdout(out), redirect_stderr(out):
        runpy.run_path(str(EXAMPLES / "train_hybrid.py"), run_name="__main__")


def _train(place: Path, size: int) -> str:
    """What the first rank prints; all must succeed."""
    arguments = ["--steps", 6, "--length", 301, "--out", place / str(size)]
    logs, port = [place / f"{rank}-of-{size}.log" for rank in range(size)], free_port()
    ranks = [
        forkserver().Process(target=_train_on_a_rank, args=(log, port, rank, size, *arguments), daemon=True)
        for rank, log in enumerate(logs)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(200)
    said = [log.read_text() for log in logs]
    assert [process.exitcode for process in ranks] == [0] * size, said
    return said[0]


def test_training_over_two_ranks(tmp_path: Path) -> None:
    """Two ranks have the losses of one, they fall, and the folder that is written is one of transformers."""
    one, two = (list(map(float, re.findall(r"loss (.*?),", _train(tmp_path, size)))) for size in (1, 2))
    assert len(one) == 6 and two == pytest.approx(one, abs=2e-3) and one[-1] < one[0]
    assert json.loads((tmp_path / "2/config.json").read_text())["model_type"] == "qwen3_next"


def test_search(service: Served, book: Path, run_here: Callable[..., str]) -> None:
    """A passage is nearest to itself; a question is answered with as many passages as are asked for."""
    alike = run_here(
        "search_in_a_book.py", book, "--like", 7, "--window", 128, "--best", 3, "--url", service.url
    ).splitlines()
    assert len(alike) == 3 and re.match(r" 1\.000  passage 7, byte \d+: ", alike[0])
    found = run_here("search_in_a_book.py", book, "a whale", "--window", 128, "--url", service.url).splitlines()
    assert len(found) == 5


def test_forks(service: Served, book: Path, run_here: Callable[..., str]) -> None:
    """Ten ways go on from one reading, differ from each other, and leave the story where it was."""
    said = run_here("forked_story.py", book, "--bytes", 3000, "--tokens", 12, "--url", service.url)
    assert said.startswith("3,000 tokens read") and "still stands at token 3,000" in said
    ways = re.findall(r"--- way \d+: forked in \d+ ms\n(.*?)\n(?=\n)", said, re.DOTALL)
    assert len(ways) == 10 and len(set(ways)) > 5


def test_a_growing_log(tmp_path: Path, run_here: Callable[..., str]) -> None:
    """Lines are read until no more come; the one that is unlike all others is shown, and no usual one before it."""
    path = tmp_path / "app.log"
    path.touch()

    def write() -> None:
        with path.open("a") as file:
            for n in range(60):
                usual = f"2026-11-22 10:00:{n:02} INFO request {4000 + n} answered in {n % 7 + 3} ms\n"
                file.write("Segmentation fault!! 0xDEADBEEF $$ kernel panic ~~\n" if n == 50 else usual)
                file.flush()
                time.sleep(0.01)

    writer = threading.Thread(target=write)
    writer.start()
    said = run_here("follow_a_log.py", path, "--idle", 3, "--above", 4).splitlines()
    writer.join()
    assert said[0].startswith("line 51: ") and "kernel panic" in said[0], said
    assert said[-1].startswith("60 lines, ") and "the state has" in said[-1]


def test_training_on_own_text(book: Path, tmp_path: Path, run_here: Callable[..., str]) -> None:
    """A vocabulary, a run and a model come of a text; the model writes, and the folder serves other commands."""
    small = ["--vocabulary", 300, "--width", 32, "--layers", 1, "--segment", 32, "--batch", 2, "--steps", 6]
    said = run_here("train_on_your_text.py", book, "--out", tmp_path / "own", *small)
    assert "vocabulary in" in said and "goes on with the text that was kept apart" in said
    assert (tmp_path / "own/run/model/model.safetensors").is_file()
    steps = [json.loads(line)["step"] for line in (tmp_path / "own/run/metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 6


def test_long_dna(run_here: Callable[..., str]) -> None:
    """A short training tells genes from what lies between them by their bits alone."""
    said = run_here("long_dna.py", "--bases", 12_000, "--steps", 60)
    inside, outside = map(float, re.search(r"per base: ([\d.]+) in genes, ([\d.]+) between", said).groups())  # type: ignore[union-attr]
    assert inside < 1.8 < 1.95 < outside
    told_apart = re.search(r"surprise alone: ([\d.]+) %", said)
    assert told_apart is not None and float(told_apart[1]) > 90


@pytest.mark.skipif(find_spec("langchain_openai") is None, reason="needs langchain-openai")
def test_langchain(service: Served) -> None:
    """LangChain completes, streams, chains and searches through the OpenAI-compatible routes."""
    said = run("with_langchain.py", "--url", service.url, "--model", "tiny", "--encoder", "tiny", "--tokens", 8)
    streamed, chained, nearest = re.split(r"--- .*\n", said)[1:]
    assert streamed.strip() and chained.strip()
    assert nearest.strip() in (
        "The whale rose beside the boat.",
        "She danced with the count until dawn.",
        "The judge read the verdict.",
    )


NOTEBOOK = EXAMPLES / "what_a_state_keeps.ipynb"


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg")
def test_the_notebook_says_what_works(
    book: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The notebook's cells run one after the other, as a program; it draws three figures."""
    import matplotlib.pyplot as plt

    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert code.count("plt.show()") == 3
    assert not any(cell.get("outputs") for cell in cells), "the notebook is filed without outputs"
    for name, value in (("TEXT", str(book)), ("BYTES", "4000")):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(EXAMPLES)
    plt.switch_backend("agg")
    try:
        exec(code, {})
        assert len(plt.get_fignums()) == 3
    finally:
        plt.close("all")
    assert "bits per byte" in capsys.readouterr().out


@pytest.mark.skipif(
    find_spec("nbclient") is None or find_spec("ipykernel") is None, reason="needs nbclient and ipykernel"
)
def test_the_notebook_in_a_kernel(book: Path) -> None:
    """In a kernel of Jupyter the notebook shows its three figures in place."""
    program = f"""
import nbformat, nbclient
notebook = nbformat.read({str(NOTEBOOK)!r}, 4)
nbclient.NotebookClient(notebook, timeout=150, resources={{"metadata": {{"path": {str(EXAMPLES)!r}}}}}).execute()
print(sum("image/png" in output.get("data", {{}}) for cell in notebook.cells for output in cell.get("outputs", [])))
"""
    environment = {
        **os.environ,
        "TEXT": str(book),
        "BYTES": "4000",
        "PYTHONPATH": SOURCE_PATH,
    }
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, env=environment)
    assert (done.returncode, done.stdout.strip()) == (0, "3"), done.stderr

"""Every code block of README.md and docs/ is run, or the table says why it cannot be: `make docs-blocks` prints it."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.docs import block_runs as runs
from tests.docs.block_table import BLOCKS
from tests.docs.blocks import ROOT, Block, Elsewhere, Not, Run, blocks_of, commands_of, main, pages
from tests.support.sentence_encoders import write_sentence_encoder
from tests.support.service_server import RunningService, model_folder, running_service

ALL = {page.relative_to(ROOT).as_posix(): blocks_of(page) for page in pages()}
RUN = [
    pytest.param(block, treatment, id=block.name, marks=[pytest.mark.slow] if treatment.how == "shell" else [])
    for page, blocks in ALL.items()
    for block, treatment in zip(blocks, BLOCKS.get(page, ()), strict=False)
    if isinstance(treatment, Run)
]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service for all blocks, over an engine in a few lines; its model is called as the pages call it."""
    folder = tmp_path_factory.mktemp("service")
    model = model_folder(folder).rename(folder / "writer-12m")
    with running_service(folder, model=model) as whole:
        yield whole


def test_the_table_has_every_block() -> None:
    """Each page has as many entries in the table as it has code blocks: each is run, or it is said why not."""
    found = {page: [block.line for block in blocks] for page, blocks in ALL.items()}
    wrong = [
        f"{page} has blocks at lines {lines}; tests/docs/block_table.py has {len(BLOCKS.get(page, ()))}"
        for page, lines in found.items()
        if len(lines) != len(BLOCKS.get(page, ()))
    ]
    assert wrong == []


def test_the_table_has_no_more_than_there_is() -> None:
    """Every page of the table exists, and every test that it names."""
    assert BLOCKS.keys() <= ALL.keys()
    words = " ".join(treatment.words for treatments in BLOCKS.values() for treatment in treatments)
    named = set(re.findall(r"(?:papers/)?tests/[\w/]+(?:\.py)?", words))
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_the_list_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """`make docs-blocks` prints a line for each block with what is done with it."""
    assert main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(map(len, ALL.values()))
    assert any(line.startswith("docs/how-to/gpus.md:") and "it needs four GPUs" in line for line in lines)


def test_most_blocks_of_code_are_run() -> None:
    """At least three of five blocks that are no drawings are run, here or by a test of their own."""
    kinds = [treatment for treatments in BLOCKS.values() for treatment in treatments]
    done = sum(isinstance(treatment, Run | Elsewhere) for treatment in kinds)
    drawings = sum(
        isinstance(treatment, Not) and treatment.why in ("a drawing", "a form to be copied") for treatment in kinds
    )
    assert done >= 0.6 * (len(kinds) - drawings)


def test_commands_are_told_from_what_they_print() -> None:
    """A command goes on over lines that end in a backslash; everything else without `$ ` is output."""
    assert commands_of("$ a \\\n   b\nprinted\n$ c\nprinted \\\nd\n") == ["a \\\n   b", "c"]


@pytest.mark.parametrize(("block", "run"), RUN)
def test_a_block_does_what_its_page_says(
    block: Block,
    run: Run,
    service: RunningService,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The block runs to its end without an error, as a reader would run it, and prints what the table says."""
    runs.prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "0")
    code = runs.filled_in(block, run, service.url)
    if run.how == "python":
        runs.run_python(code, run.before)
    elif run.how == "syntax":
        runs.check_syntax(code)
    elif run.how == "settings":
        runs.check_settings(code, tmp_path)
    elif run.how == "section":
        runs.check_section(code, run.of)
    elif run.how == "mixer":
        runs.check_mixer(code)
    elif run.how == "answer":
        runs.check_answer(code, run.of)
    else:
        if "curl" in code and shutil.which("curl") is None:
            pytest.skip("needs curl")
        STANDS_READY.get(run.before, lambda *_: None)(tmp_path, service)
        print(runs.run_shell(code, run, tmp_path))
    printed = capsys.readouterr().out
    assert [words for words in run.says if words not in printed] == [], printed


def _minilm(folder: Path, _: RunningService) -> None:
    write_sentence_encoder(folder / "downloads/all-MiniLM-L6-v2")


def _state(folder: Path, service: RunningService) -> None:
    with httpx.Client(base_url=service.url) as client:
        session = client.post("/v1/sessions").raise_for_status().json()["id"]
        client.post(f"/v1/sessions/{session}/append", json={"input": "A text. "}).raise_for_status()
        (folder / "book.state").write_bytes(client.get(f"/v1/sessions/{session}/state").raise_for_status().content)


STANDS_READY = {"minilm": _minilm, "state": _state}

"""Folders of Hugging Face's that are neither ours nor served are refused before anything starts."""

from pathlib import Path

import pytest

from dist_attn.shipped import convertible_words
from tests.support.command_line import finish, run_here, start_command
from tests.support.hugging_face import change_config, write_foreign_folder
from tests.support.programs import free_port
from tests.support.sentence_encoders import write_sentence_encoder
from tests.support.tokenisers import PROSE


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a text."""
    (tmp_path / "book.txt").write_bytes(3 * PROSE.encode())
    return tmp_path


@pytest.fixture
def run(place, monkeypatch, capsys):
    """The command line in this process: exit code, stdout, stderr."""
    return lambda *arguments: (run_here(monkeypatch, place, *arguments), *capsys.readouterr())


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of transformers that were not converted: one that `convert` takes and one that it does not."""
    folder = tmp_path_factory.mktemp("foreign")
    write_sentence_encoder(folder / "bert")
    write_foreign_folder(folder / "t5")
    change_config(folder / "t5", model_type="t5", architectures=["T5ForConditionalGeneration"])
    return folder


CONVERT = "convert FOLDER --out NEW_FOLDER"
OTHERS = f"dist-attn convert makes model folders of the types {convertible_words()}"


@pytest.mark.parametrize(("kind", "words"), [("bert", CONVERT), ("t5", OTHERS)])
def test_serve_refuses_a_folder_that_was_not_converted(foreign, tmp_path, kind, words):
    """`serve` ends with code 2 and one line that says what the folder is and what to do; nothing was started."""
    folder = foreign / kind
    flags = [f"--model={folder}", f"--port={free_port()}", "--data-dir=data"]
    code, out, err = finish(start_command(["dist_attn", "serve", *flags], tmp_path))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{folder} is a Hugging Face folder (model_type '{kind}'" in err
    assert words.replace("FOLDER", str(folder), 1) in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command", [["encode", "book.txt", "--out=rows.npy"], ["generate", "--prompt=a"], ["evaluate", "book.txt"]]
)
def test_commands_refuse_a_folder_that_was_not_converted(run, foreign, command):
    """`encode`, `generate` and `evaluate` say the same."""
    code, out, err = run(*command, f"--model={foreign / 'bert'}")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"dist-attn convert {foreign / 'bert'} --out NEW_FOLDER" in err

"""A JSON file that is nothing but brackets, deeper than any parser goes, is refused in words wherever it is read."""

from collections.abc import Callable
from pathlib import Path

import pytest
from dist_attn_service.engine.served_model import ServedModel

from dist_attn.checkpoints import load_model_and_tokeniser
from dist_attn.conversion.source import read_source_config, read_source_weights
from dist_attn.costs import calibration_file, model_kind, read_calibration, read_model_costs
from dist_attn.errors import ConfigError, ModelFolderError
from dist_attn.shipped import check_manifest
from dist_attn.text import load_tokeniser, read_foreign
from tests.support import chat_templates
from tests.support.command_line import run_here
from tests.support.models import write_small_folder

DEEP = b"[" * 200_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder without a manifest, which would refuse every other file first."""
    made = write_small_folder(tmp_path / "tiny")
    (made / "manifest.json").unlink()
    return made


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "tokeniser": ("tokenizer.json", load_tokeniser),
    "tokeniser of another library": ("tokenizer.json", read_foreign),
    "model": ("config.json", load_model_and_tokeniser),
    "manifest": ("manifest.json", check_manifest),
    "costs": ("config.json", read_model_costs),
    "what is served": ("config.json", ServedModel.read),
    "chat template": ("tokenizer_config.json", chat_templates.read),
    "config to convert": ("config.json", read_source_config),
    "weights to convert": ("model.safetensors.index.json", read_source_weights),
}


@pytest.mark.parametrize("what", READERS)
def test_brackets_without_end_are_refused_in_words(folder: Path, what: str) -> None:
    """The file is named, and it is an error of the folder."""
    name, read = READERS[what]
    if name.endswith("index.json"):
        (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(DEEP)
    with pytest.raises((ModelFolderError, ConfigError), match=name):
        read(folder)


def test_what_is_only_a_hint_is_passed_over(tmp_path: Path) -> None:
    """A kind that cannot be read is none, and so is a calibration."""
    (tmp_path / "config.json").write_bytes(DEEP)
    assert model_kind(tmp_path) == ""
    file = calibration_file({"XDG_CACHE_HOME": str(tmp_path)})
    file.parent.mkdir()
    file.write_bytes(DEEP)
    assert read_calibration(file).times == ()


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "manifest.json"])
def test_the_command_line_says_it_and_exits_with_code_2(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, no traceback."""
    (folder / name).write_bytes(DEEP)
    assert run_here(monkeypatch, folder, "generate", "--prompt", "It was", "--model", str(folder)) == 2
    said = capsys.readouterr().err
    assert name in said and "Traceback" not in said and len(said.splitlines()) == 1

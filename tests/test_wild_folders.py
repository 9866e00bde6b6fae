"""Model folders whose files are no files, or hold far more than any model: refused in words, in linear time."""

import gc
import json
import os
import resource
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from dist_attn_service.engine.served_model import ServedModel

from dist_attn.checkpoints import load_any_model, load_model_and_tokeniser
from dist_attn.conversion.source import read_source_config, read_source_weights
from dist_attn.costs import model_kind, read_model_costs
from dist_attn.errors import ConfigError, ModelFolderError
from dist_attn.shipped import check_manifest, resolve_model_folder, stored_tensors
from dist_attn.shipped.generation_config import read_generation_defaults
from dist_attn.shipped.stored_tensors import read_stored_tensors
from dist_attn.text import load_tokeniser, read_foreign
from tests.support import chat_templates
from tests.support.command_line import run_here
from tests.support.models import write_small_folder

READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "name of a model": ("config.json", resolve_model_folder),
    "model": ("config.json", load_any_model),
    "costs": ("config.json", read_model_costs),
    "what is served": ("config.json", ServedModel.read),
    "config to convert": ("config.json", read_source_config),
    "how texts end": ("generation_config.json", lambda folder: read_generation_defaults(folder, 9)),
    "tokeniser": ("tokenizer.json", load_tokeniser),
    "tokeniser of another program": ("tokenizer.json", read_foreign),
    "about the tokeniser": ("tokenizer_config.json", load_tokeniser),
    "special tokens": ("special_tokens_map.json", read_foreign),
    "weights": ("model.safetensors", load_model_and_tokeniser),
    "weights of a downloaded model": ("model.safetensors", read_stored_tensors),
    "index": ("model.safetensors.index.json", read_stored_tensors),
    "chat template": ("chat_template.jinja", chat_templates.read),
    "chat template in a file of JSON": ("tokenizer_config.json", chat_templates.read),
}


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _folder(path: Path) -> None:
    path.mkdir()


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(path.name)
    finally:
        os.chdir(here)


def _endless(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder without a manifest, which would refuse every other file first."""
    made = write_small_folder(tmp_path / "tiny")
    (made / "manifest.json").unlink()
    return made


@pytest.mark.parametrize("what", READERS)
@pytest.mark.parametrize("make", [_pipe, _device, _folder, _socket, _endless])
def test_what_is_no_file_of_a_model_is_refused_in_words(folder: Path, make: Callable[[Path], None], what: str) -> None:
    """The file is named, nothing is waited for, and nothing without an end is read."""
    name, read = READERS[what]
    for unlinked in {name, "model.safetensors" if name.endswith("index.json") else name}:
        (folder / unlinked).unlink(missing_ok=True)
    make(folder / name)
    with pytest.raises((ModelFolderError, ConfigError), match=f"{name}|no model at"):
        read(folder)


def test_a_manifest_is_checked_against_files_alone(folder: Path) -> None:
    """A pipe that it lists is not there; a kind that cannot be told is none."""
    (folder / "manifest.json").write_text(json.dumps({"sha256": {"config.json": "0"}}))
    (folder / "config.json").unlink()
    _pipe(folder / "config.json")
    with pytest.raises(ModelFolderError, match=r"lacks 'config\.json'"):
        check_manifest(folder)
    assert model_kind(folder) == ""


COMMANDS = {
    "plan": ("config.json", ["plan", "--tokens", "9", "--model"]),
    "generate": ("model.safetensors", ["generate", "--prompt", "It was", "--model"]),
    "logits": ("model.safetensors", ["logits", "--tokens", "tokens.npy", "--out", "rows.npy", "--model"]),
    "encode": ("tokenizer_config.json", ["encode", "book.txt", "--out", "rows.npy", "--model"]),
    "convert": ("config.json", ["convert", "--out", "new"]),
}


@pytest.mark.parametrize("what", COMMANDS)
def test_a_command_says_it_and_exits_with_code_2(
    folder: Path, what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the file, no traceback."""
    name, command = COMMANDS[what]
    (folder.parent / "book.txt").write_text("It was")
    np.save(folder.parent / "tokens.npy", np.ones(2, np.int64))
    (folder / name).unlink()
    _pipe(folder / name)
    assert run_here(monkeypatch, folder.parent, *command, str(folder)) == 2
    said = capsys.readouterr().err
    assert name in said and "Traceback" not in said and len(said.splitlines()) == 1


def _write_header(path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def _header_of(tensors: int) -> dict[str, object]:
    return {f"t{number}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for number in range(tensors)}


@pytest.fixture
def few_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound of 2,000 tensors: 262,144 take seconds to write."""
    monkeypatch.setattr(stored_tensors, "MAX_TENSORS", 2_000)


@pytest.mark.usefixtures("few_tensors")
@pytest.mark.parametrize("read", [read_stored_tensors, read_source_weights, load_any_model])
def test_more_tensors_than_any_model_has_are_refused(folder: Path, read: Callable[[Path], object]) -> None:
    """In one file, and before the library that reads them without bounds sees it."""
    _write_header(folder / "model.safetensors", _header_of(2_001))
    with pytest.raises(ModelFolderError, match=r"safetensors has 2,001 tensors or more; needed are at most 2,000"):
        read(folder)


@pytest.mark.usefixtures("few_tensors")
def test_more_tensors_in_all_files_than_any_model_has_are_refused(folder: Path) -> None:
    """However many files they lie in."""
    (folder / "model.safetensors").unlink()
    half = list(_header_of(2_002))
    for part, names in enumerate((half[:1_001], half[1_001:])):
        entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        _write_header(folder / f"{part}.safetensors", dict.fromkeys(names, entry))
    places = {"weight_map": {"a": "0.safetensors", "b": "1.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(places))
    with pytest.raises(ModelFolderError, match=r"2,002 tensors or more"):
        read_stored_tensors(folder)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": {"dtype": "F32", "shape": [1 << 62] * 100_000, "data_offsets": [0, 0]}}, "does not say what 'a' is"),
        ({"a": [0] * 12_000_000}, "its header would have 36,000,007"),
    ],
)
def test_headers_beyond_any_model_are_refused(folder: Path, header: object, words: str) -> None:
    """Shapes of a hundred thousand dimensions, and more than 32 MiB."""
    _write_header(folder / "model.safetensors", header)
    with pytest.raises(ModelFolderError, match=words):
        read_stored_tensors(folder)


def _many_tensors(folder: Path, n: int) -> Callable[[], object]:
    _write_header(folder / "model.safetensors", _header_of(n))
    return lambda: read_stored_tensors(folder)


def _many_files(folder: Path, n: int) -> Callable[[], object]:
    (folder / "model.safetensors").unlink(missing_ok=True)
    _write_header(folder / "one.safetensors", _header_of(n))
    places = {"weight_map": {f"t{number}": "one.safetensors" for number in range(n)}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(places))
    return lambda: read_stored_tensors(folder)


def _many_tokens(folder: Path, n: int) -> Callable[[], object]:
    contents = json.loads((folder / "tokenizer.json").read_text())
    vocab = contents["model"]["vocab"]
    first = 1 + max(vocab.values())
    vocab.update({f"w{number}": first + number for number in range(n)})
    (folder / "many.json").write_text(json.dumps(contents))
    return lambda: (os.replace(folder / "many.json", folder / "tokenizer.json"), read_foreign(folder))


def _many_added_tokens(folder: Path, n: int) -> Callable[[], object]:
    contents = json.loads((folder / "tokenizer.json").read_text())
    first = 1 + max(contents["model"]["vocab"].values())
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    contents["added_tokens"] += [flags | {"id": first + n_, "content": f"<{n_}>"} for n_ in range(n)]
    (folder / "many.json").write_text(json.dumps(contents))
    return lambda: (os.replace(folder / "many.json", folder / "tokenizer.json"), read_foreign(folder))


def _long_template(folder: Path, n: int) -> Callable[[], object]:
    (folder / "chat_template.jinja").write_text("{% if a %}{{ a + 'b' }}{% endif %}" * n)
    return lambda: chat_templates.read(folder)


GROWING = {
    "tensors": (_many_tensors, 8_000),
    "an index": (_many_files, 8_000),
    "tokens": (_many_tokens, 8_000),
    "added tokens": (_many_added_tokens, 4_000),
    "a template": (_long_template, 250),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", GROWING)
def test_reading_takes_time_linear_in_what_is_there(folder: Path, what: str) -> None:
    """Four times as much takes far less than the sixteenfold of what is quadratic, in time of the processor."""
    grow, n = GROWING[what]

    def processor_s() -> float:
        used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return sum(one.ru_utime + one.ru_stime for one in used)

    def best(size: int) -> float:
        times = []
        for _ in range(3):
            work = grow(folder, size)
            gc.disable()  # it would go through all that earlier tests have left
            try:
                before = processor_s()
                work()
                times.append(processor_s() - before)
            finally:
                gc.enable()
        return min(times)

    assert best(4 * n) <= 8 * best(n)

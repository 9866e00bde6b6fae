"""Model folders: what is written is what is read, and every kind of broken folder is named in words."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dist_attn import checkpoints
from dist_attn.checkpoints import (
    load_model,
    load_model_and_tokeniser,
    load_reader_and_tokeniser,
    resolve_model_folder,
    save_model,
)
from dist_attn.errors import ModelFolderError
from dist_attn.text import ByteTokeniser
from tests.support.closeness import assert_close
from tests.support.models import small_config, small_model, write_small_folder
from tests.support.tokenisers import small_bpe


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_small_folder(tmp_path / "model")


def test_a_saved_model_is_loaded_as_it_was(folder):
    """Every tensor, the configuration and the tokeniser come back exactly, by path as text or as Path."""
    model, tokeniser = load_model_and_tokeniser(str(folder))
    want = small_model()
    assert model.config == want.config
    assert tokeniser.digest == ByteTokeniser().digest
    assert not model.training
    assert model.state_dict().keys() == want.state_dict().keys()
    for name, tensor in want.state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    tokens = torch.arange(20)[None]
    assert torch.equal(model.logits(tokens), want.logits(tokens))


def test_half_storage_is_loaded_as_float32(tmp_path):
    """Matrices stored as float16 halve the file, come back as float32 and are right to half precision."""
    model = small_model()
    save_model(model, tmp_path / "whole")
    save_model(model, tmp_path / "half", half=True)
    stored = load_file(tmp_path / "half" / "model.safetensors")
    assert stored["embedding.weight"].dtype == torch.float16
    assert stored["norm.weight"].dtype == torch.float32
    loaded = load_model(tmp_path / "half")
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == torch.float32
        assert_close(tensor.half(), model.state_dict()[name].half())
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("half", "whole")]
    assert sizes[0] < 0.7 * sizes[1]


def test_the_manifest_names_every_file_and_the_facts(tmp_path):
    """The manifest has the digest of each file, the parameter count, and what the caller wanted remembered."""
    model = small_model()
    save_model(model, tmp_path / "m", tokeniser=ByteTokeniser(), facts={"bits_per_byte": 2.0})
    manifest = json.loads((tmp_path / "m" / "manifest.json").read_text())
    for_transformers = {"generation_config.json", "modeling_dist_attn.py", "tokenizer_config.json"}
    assert set(manifest["sha256"]) == {"config.json", "model.safetensors", "tokenizer.json"} | for_transformers
    assert manifest["parameters"] == sum(p.numel() for p in model.parameters())
    assert manifest["bits_per_byte"] == 2.0


def _remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def _write(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def _weights(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "model.safetensors"
        tensors = load_file(path)
        change(tensors)
        save_file(tensors, path)

    return apply


def _config(**changes: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


def _other_tokeniser(folder: Path) -> None:
    (folder / "manifest.json").unlink()
    small_bpe().save(folder)


BROKEN = {
    "no config": (_remove("config.json"), "no model at .* needed is a folder with config.json"),
    "config is not JSON": (_write("config.json", b"{"), "config.json is not JSON"),
    "config is a list": (_write("config.json", b"[]"), "config.json holds no JSON object"),
    "unknown key": (_config(colour="red"), "config.json: colour: there is no such key; leave it out"),
    "wrong type": (_config(num_layers="two"), "config.json: num_layers: "),
    "unknown mixer": (_config(mixer={"kind": "magic"}), "config.json: mixer: .*'magic'"),
    "no weights": (_remove("model.safetensors"), "model.safetensors cannot be read"),
    "weights cut off": (
        _write("model.safetensors", b"\x10"),
        "model.safetensors .* cut short, or no safetensors",
    ),
    "tensor missing": (_weights(lambda t: t.pop("norm.bias")), "has no tensor 'norm.bias'"),
    "tensor too many": (_weights(lambda t: t.update(odd=torch.zeros(1))), "holds a tensor 'odd'"),
    "wrong shape": (_weights(lambda t: t.update({"norm.bias": torch.zeros(3)})), r"'norm.bias' has shape \(3,\)"),
    "other weights": (_weights(lambda t: t["norm.bias"].add_(1)), "model.safetensors has sha256 .* mixed or damaged"),
    "other size": (_config(mlp_size=64), r"'blocks.0.mlp_in.bias' has shape \(32,\), .* needs \(64,\)"),
    "a size over 64 bits": (_config(mlp_size=1 << 64), "the model that .*config.json describes cannot be made: "),
    "a size over all memory": (_config(mlp_size=1 << 50), "the model that .*config.json describes cannot be made: "),
    "no tokeniser": (_remove("tokenizer.json"), "tokenizer.json"),
    "other tokeniser": (_other_tokeniser, r"tokenizer.json has \d+ tokens, .* says 257"),
    "manifest is not JSON": (_write("manifest.json", b"x"), "manifest.json is not a manifest"),
    "manifest is a list": (_write("manifest.json", b"[]"), "manifest.json is not a manifest"),
    "manifest points outside": (_write("manifest.json", b'{"sha256":{"../x":"1"}}'), "lacks '../x'"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_broken_folders_are_named(folder, how):
    """Whatever is missing, damaged or from another model, the message says which file and what was needed."""
    breaks, words = BROKEN[how]
    breaks(folder)
    with pytest.raises(ModelFolderError, match=words) as caught:
        load_model_and_tokeniser(folder)
    assert "\n" not in str(caught.value)


def test_missing_folders_are_named():
    """A name that is neither a folder nor shipped raises with the name and what is needed."""
    with pytest.raises(ModelFolderError, match=re.escape("no model at 'nowhere/at-all'")):
        resolve_model_folder("nowhere/at-all")


def test_a_model_that_makes_no_vectors_of_texts_is_refused_for_them(folder):
    """To encode, a classifier is refused by what encoding needs, and to generate by what generating needs."""
    (folder / "config.json").write_text(json.dumps({"kind": "text_classifier"}))
    words = "holds a text_classifier; needed to encode is a language model, an encoder or a model of sequences"
    with pytest.raises(ModelFolderError, match=words):
        load_reader_and_tokeniser(folder)
    with pytest.raises(ModelFolderError, match="holds a text_classifier; needed here is a language model, which can"):
        load_model_and_tokeniser(folder)


def test_a_folder_without_a_manifest_is_loaded(folder):
    """The manifest is a check, not a need: a folder without one loads."""
    (folder / "manifest.json").unlink()
    assert load_model(folder).config == small_config()


def test_a_failed_save_leaves_what_was_there(folder, monkeypatch):
    """When writing breaks half-way the old folder still loads, and nothing half-written lies beside it."""

    def break_off(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_file", break_off)
    for target in (folder, folder.with_name("new")):
        with pytest.raises(OSError, match="No space left"):
            save_model(small_model(seed=1), target)
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert torch.equal(load_model(folder).norm.bias, small_model().norm.bias)


def test_a_save_replaces_the_folder_whole(folder):
    """Saving over a folder leaves exactly the new model, also where the old one had more files."""
    (folder / "notes.txt").write_text("old")
    save_model(small_model(seed=1), folder)
    names = ["config.json", "manifest.json", "model.safetensors", "modeling_dist_attn.py"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert [path.name for path in folder.parent.iterdir()] == ["model"]
    assert torch.equal(load_model(folder).norm.bias, small_model(seed=1).norm.bias)

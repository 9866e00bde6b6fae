"""A GGUF file is the model that transformers reads of it: numbers, tokens, end and chat; other files are refused."""

import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from shutil import copytree
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dist_attn.adapters.model import load_adapted_model
from dist_attn.adapters.weights import current_blocks
from dist_attn.comm import Communicator, run_simulated
from dist_attn.commands import cli
from dist_attn.conversion.gguf import convert_gguf
from dist_attn.errors import InputError, ModelFolderError, StorageError
from dist_attn.generation.text import generate_text
from dist_attn.layout import SequenceLayout
from dist_attn.ops.decode_step import has_decode_step
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.shipped import gguf_file, resolve_model_folder
from dist_attn.shipped.generation_config import read_generation_defaults
from dist_attn.shipped.stored_tensors import BLOCKS, read_stored_blocks
from dist_attn.text import load_tokeniser
from dist_attn.wire.specs import SamplingSpec
from tests.support import chat_templates
from tests.support.gguf_files import TOKENS, write_gguf

CASES = [("llama", "Q4_1"), ("llama", "Q8_0"), ("llama", "F16"), ("llama", "BF16"), ("qwen3", "Q5_0")]
CASES += [("gemma3_text", "Q8_0"), ("lfm2", "Q4_0")]
TEXT = "the was <|end|> thethe a\n\nB \N{BLACK STAR} <think>1234"


@cache
def made(kind: str, stored: str) -> tuple[Path, Path]:
    """A file and its folder."""
    place = Path(mkdtemp())
    file = write_gguf(place / f"{kind}.gguf", kind, stored)
    convert_gguf(file, place / "made")
    return file, place / "made"


def theirs(file: Path) -> tuple[Any, Any]:
    """The model and the tokeniser that transformers makes of a file."""
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    return AutoModelForCausalLM.from_pretrained(**where).eval(), AutoTokenizer.from_pretrained(**where)


@pytest.mark.parametrize(("kind", "stored"), CASES)
@torch.inference_mode()
def test_logits_are_those_of_transformers_reading_the_same_file(kind: str, stored: str) -> None:
    """By itself and on three ranks with uneven slices, to 1e-5; and the tokens of a text are the same."""
    file, folder = made(kind, stored)
    model, tokeniser = theirs(file)
    tokens = tokeniser(TEXT)["input_ids"]
    assert load_tokeniser(folder).encode_whole(TEXT.encode(), framed=True).tolist() == tokens
    tokens_BL = torch.tensor([tokens])
    want_BLV, ours = model(tokens_BL).logits, load_adapted_model(folder)
    places = (0, 3, 5, len(tokens))

    def read(comm: Communicator) -> torch.Tensor:
        ops = ShardedSequenceOps(comm, SequenceLayout(places))
        return ours.readout(ours.hidden(tokens_BL[:, places[comm.rank] : places[comm.rank + 1]], ops)[0])

    alone_BLV, spread_BLV = ours.readout(ours.hidden(tokens_BL)[0]), torch.cat(run_simulated(read, 3), dim=1)
    assert want_BLV.std() > 0.1
    torch.testing.assert_close(alone_BLV, want_BLV, atol=1e-5, rtol=0)
    torch.testing.assert_close(spread_BLV, want_BLV, atol=1e-5, rtol=0)


@torch.inference_mode()
def test_positions_scaled_as_llama_3_has_them(tmp_path: Path) -> None:
    """Divisors of frequencies become the numbers they are made of, and the logits those of that folder; others not."""
    base, periods_K = 500_000.0, 2 * np.pi * 500_000.0 ** (np.arange(0, 8, 2) / 8)
    smooth_K = np.clip((8192 / periods_K - 1) / 3, 0, 1)
    divisors_K = 1 / ((1 - smooth_K) / 32 + smooth_K)
    file = write_gguf(tmp_path / "llama.gguf", "llama", divisors=divisors_K)
    convert_gguf(file, tmp_path / "made")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "made").eval()
    frequencies_K = model.model.rotary_emb.inv_freq.numpy()
    np.testing.assert_allclose(frequencies_K, base ** (-np.arange(0, 8, 2) / 8) / divisors_K, rtol=1e-5)
    tokens_BL = torch.arange(40)[None]
    ours = load_adapted_model(tmp_path / "made")
    torch.testing.assert_close(ours.readout(ours.hidden(tokens_BL)[0]), model(tokens_BL).logits, atol=1e-5, rtol=0)
    with pytest.raises(ModelFolderError, match="scaled otherwise than Llama 3's"):
        convert_gguf(write_gguf(tmp_path / "other.gguf", "llama", divisors=divisors_K + 0.5), tmp_path / "other")


@pytest.mark.parametrize(
    ("kind", "stored"), [("qwen3", "Q4_1"), ("qwen3", "Q4_0"), ("qwen3", "Q8_0"), ("llama", "Q4_1")]
)
@torch.inference_mode()
def test_steps_read_blocks_as_they_are_stored(kind: str, stored: str, tmp_path: Path) -> None:
    """Of every matrix, also where transformers has its rows in another order; numbers have the bits of float32."""
    _, folder = made(kind, stored)
    plain, drawn = copytree(folder, tmp_path / "plain"), list[torch.Tensor]()
    (plain / BLOCKS).unlink()
    assert {key.split()[0] for key in read_stored_blocks(folder)} == {stored} and not read_stored_blocks(plain)
    for place in (folder, plain):
        model = load_adapted_model(place)
        matrices = [module for module in model.inner.modules() if type(module) is torch.nn.Linear]
        assert [current_blocks(module) is not None for module in matrices] == [place == folder] * len(matrices)
        assert kind == "llama" or (model._fused is not None) == has_decode_step()  # whose heads have 8 numbers
        logits_BV, state = model.step(torch.tensor([5]), model.hidden(torch.arange(9)[None])[1])
        drawn += [logits_BV, model.step(torch.tensor([7]), state)[0]]
        matrices[0].weight = torch.nn.Parameter(2 * matrices[0].weight, requires_grad=False)
        assert current_blocks(matrices[0]) is None
    assert torch.equal(torch.stack(drawn[:2]), torch.stack(drawn[2:]))


@pytest.mark.parametrize("damage", ["cut short", "another model's"])
def test_blocks_that_are_not_the_model_s_are_refused(damage: str, tmp_path: Path) -> None:
    """Before anything is computed with them."""
    folder = copytree(made("qwen3", "Q4_0")[1], tmp_path / "model")
    blocks, other = folder / BLOCKS, made("llama", "Q4_1")[1] / BLOCKS
    blocks.write_bytes(blocks.read_bytes()[:-1] if damage == "cut short" else other.read_bytes())
    with pytest.raises(ModelFolderError, match=f"{BLOCKS}.* again"):
        load_adapted_model(folder)


def test_ends_chat_and_drawing_are_the_file_s(tmp_path: Path) -> None:
    """All tokens that end a text, the template and the file's way to draw are read; bfloat16 halves the folder."""
    more = {"general.sampling.temp": 0.25, "general.sampling.top_k": 7}
    file = write_gguf(tmp_path / "some.gguf", "llama", more=more)
    half, full = convert_gguf(file, tmp_path / "out", "bfloat16"), convert_gguf(file, tmp_path / "full")
    assert half["parameters"] == full["parameters"]
    found = read_generation_defaults(tmp_path / "out", len(TOKENS))
    assert found.end_tokens == (TOKENS.index("<|end|>"), TOKENS.index("<|turn|>"))
    assert found.sampling == {"temperature": 0.25, "top_k": 7}
    special = {text: number for number, text in enumerate(TOKENS) if text.startswith("<|")}
    prompt = chat_templates.prompt(tmp_path / "out", special, [{"role": "user", "content": "the"}])
    assert prompt == [TOKENS.index("<|begin|>"), "the", TOKENS.index("<|turn|>")]
    sizes = [(tmp_path / name / "model.safetensors").stat().st_size for name in ("out", "full")]
    assert sizes[0] < 0.7 * sizes[1]
    with pytest.raises(InputError, match="exists"):
        convert_gguf(file, tmp_path / "out")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "positions that are scaled": ({"llama.rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn'"),
    "a window that is not read": ({"llama.attention.sliding_window": 8}, "attention.sliding_window is 8"),
    "attention both ways": ({"llama.attention.causal": False}, "attention.causal is False"),
    "a scale of logits": ({"llama.logit_scale": 0.5}, "logit_scale is 0.5"),
    "another width": ({"llama.embedding_length": 64}, "it would be computed wrongly"),
    "an end that is no token": ({"tokenizer.ggml.eos_token_id": 999}, "transformers cannot read it|eos_token_id"),
    "a tokeniser of an unknown kind": ({"tokenizer.ggml.model": "other"}, "Cannot build a tokenizer"),
    "another type": ({"general.architecture": "bloom"}, "block_count is None"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_transformers_would_read_wrongly_is_refused(tmp_path: Path, what: str) -> None:
    """In words, and nothing is left of it."""
    more, words = REFUSED[what]
    file = write_gguf(tmp_path / "some.gguf", "llama", more=more)
    with pytest.raises(ModelFolderError, match=words):
        convert_gguf(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["some.gguf"]


def test_a_disk_without_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is loaded."""
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=9))
    with pytest.raises(StorageError, match="9 are free there"):
        convert_gguf(made("llama", "Q8_0")[0], tmp_path / "out")


def test_commands_take_the_file_and_keep_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A process without torch has it converted, once; logits and text are transformers', and a copy has its folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, _ = made("llama", "Q4_1")
    code = "import sys; from dist_attn.shipped import resolve_model_folder as find; print(find(sys.argv[1]).name)"
    code += "; assert not {'torch', 'transformers'} & sys.modules.keys()"
    done = subprocess.run([sys.executable, "-c", code, str(file)], capture_output=True, text=True, timeout=500)
    assert (done.returncode, done.stdout) == (0, "llama\n") and "this once" in done.stderr, done.stderr
    model, tokeniser = theirs(file)
    ids = tokeniser("the was", return_tensors="pt")["input_ids"]
    np.save(tmp_path / "tokens.npy", ids[0].numpy())
    command = ["logits", "--model", file, "--tokens", tmp_path / "tokens.npy", "--out", tmp_path / "rows.npy"]
    cli.app([str(part) for part in command], standalone_mode=False)
    with torch.inference_mode():
        want = model(ids).logits[0]
    np.testing.assert_allclose(np.load(tmp_path / "rows.npy"), want, atol=1e-5, rtol=0)
    spec = SamplingSpec(max_tokens=8, temperature=0.0)
    report = generate_text(str(file), b"the was", spec)
    ends = [TOKENS.index("<|end|>"), TOKENS.index("<|turn|>")]
    drawn = model.generate(ids, max_new_tokens=8, do_sample=False, eos_token_id=ends)[0, ids.shape[1] :]
    assert report["text"] == tokeniser.decode(drawn) and report["model"] == "llama"
    copy = tmp_path / file.name
    copy.write_bytes(file.read_bytes())
    assert resolve_model_folder(copy) == resolve_model_folder(file)
    assert "this once" not in capfd.readouterr().err, "it was there already"


def test_ranks_that_come_together_convert_it_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first makes the folder while the others wait for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made_by = list[str]()

    def convert(path: Path, folder: Path) -> None:
        made_by.append(threading.current_thread().name)
        threading.Event().wait(0.05)
        folder.mkdir()

    monkeypatch.setattr(gguf_file, "_convert", convert)
    with ThreadPoolExecutor(3) as ranks:
        found = {*ranks.map(gguf_file.folder_of_gguf, [made("llama", "Q8_0")[0]] * 3)}
    assert len(found) == 1 and len(made_by) == 1

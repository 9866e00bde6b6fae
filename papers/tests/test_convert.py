"""Language models of Hugging Face become folders of ours: the same logits, the same tokens, refusals in one line."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file

import dist_attn_papers.conversion  # noqa: F401 - also where an older installation does not offer it
from dist_attn.checkpoints import load_model, load_model_and_tokeniser
from dist_attn.comm import Communicator, run_simulated
from dist_attn.conversion import Conversion, convert_folder
from dist_attn.errors import InputError, ModelFolderError
from dist_attn.generation import generate
from dist_attn.layout import SequenceLayout
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.text import SentencePieceTokeniser
from dist_attn.training import train
from dist_attn.training.config import read_config
from dist_attn.training.evaluation import score_tokens
from dist_attn.wire.messages import SamplingSpec
from tests.support.closeness import assert_close
from tests.support.command_line import run_here
from tests.support.hugging_face import SHAPES, VOCABULARY, change_config, write_foreign_folder
from tests.support.tokenisers import PROSE, sentence_piece, sentence_piece_contents
from tests.support.training import small_run


def _tokens(length: int = 50) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, length), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers(shape: str, tmp_path: Path) -> None:
    """As softmax every shape gives the logits of transformers to 1e-4: whole, streamed, and step by step."""
    theirs, tokens = write_foreign_folder(tmp_path / "theirs", shape), _tokens()
    convert_folder(tmp_path / "theirs", tmp_path / "ours")
    model = load_model(tmp_path / "ours")
    with torch.inference_mode():
        want = theirs(tokens).logits
        assert float(want.std()) > 0.1
        torch.testing.assert_close(model.logits(tokens), want, atol=1e-4, rtol=0)
        streamed, state = [], None
        for piece in tokens[:, :40].split([1, 30, 9], dim=1):
            logits, state = model(piece, None, state)
            streamed.append(logits)
        for t in range(40, 50):
            logits, state = model.step(tokens[:, t], state)
            streamed.append(logits[:, None])
    torch.testing.assert_close(torch.cat(streamed, 1), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("shape", "to"), [("gpt2", "rfa"), ("llama", "softmax")])
def test_ranks_change_nothing(shape: str, to: str, tmp_path: Path) -> None:
    """Converted models give the same hidden states over uneven ranks, an empty one too, block after block."""
    write_foreign_folder(tmp_path / "theirs", shape)
    convert_folder(tmp_path / "theirs", tmp_path / "ours", Conversion(to, num_random=8))
    model, tokens = load_model(tmp_path / "ours").double(), _tokens()
    layout = SequenceLayout.from_lengths((9, 0, 16))

    def body(comm: Communicator) -> list[torch.Tensor]:
        (start, stop), state, parts = layout.range(comm.rank), None, []
        for block in tokens.split(25, dim=1):
            h, state = model.hidden(block[:, start:stop], ShardedSequenceOps(comm, layout), state)
            parts.append(h.detach())
        return parts

    ranks = run_simulated(body, 3)
    got = torch.cat([torch.cat([parts[block] for parts in ranks], 1) for block in range(2)], 1)
    assert_close(got, model.encode(tokens))


def test_tokens_scores_and_text(tmp_path: Path) -> None:
    """The folder has its tokens, padded ids and end token; it is scored and continued as transformers does."""
    theirs = write_foreign_folder(tmp_path / "theirs", "llama")
    convert_folder(tmp_path / "theirs", tmp_path / "ours")
    model, tokeniser = load_model_and_tokeniser(tmp_path / "ours")
    assert (tokeniser.vocab_size, tokeniser.end_token) == (VOCABULARY, 0)
    tokens = tokeniser.encode(PROSE.encode()[:300])
    row = torch.from_numpy(tokens.astype("int64"))[None]
    with torch.inference_mode():
        loss = theirs(row, labels=row).loss
        want = theirs.generate(row[:, :20], max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
    score = score_tokens(model, tokens, 300)
    first = torch.tensor(float(VOCABULARY)).log2()
    assert (score.bits - float(first)) == pytest.approx(float(loss) * (len(tokens) - 1) / 0.6931471805599453, rel=1e-4)
    drawn = generate(model, tokens[:20], SamplingSpec(max_tokens=12, temperature=0.0))
    assert drawn == want[0, 20:].tolist()


@pytest.mark.parametrize("shape", ["gpt2", "llama", "gpt_neox"])
def test_kernel_attention_has_the_same_weights(shape: str, tmp_path: Path) -> None:
    """As rfa every weight is the softmax model's, the random vectors are those of the seed, and gradients reach all."""
    write_foreign_folder(tmp_path / "theirs", shape)
    folders = {"softmax": Conversion(), "rfa": Conversion("rfa", 8, 5), "again": Conversion("rfa", 8, 5)}
    states = {}
    for name, conversion in folders.items():
        convert_folder(tmp_path / "theirs", tmp_path / name, conversion)
        states[name] = load_file(tmp_path / name / "model.safetensors")
    for name, tensor in states["softmax"].items():
        assert torch.equal(tensor, states["rfa"][name])
    extra = states["rfa"].keys() - states["softmax"].keys()
    assert {name.rsplit(".")[-1] for name in extra} == {"sigma_H1K", "w_HDK"}
    assert all(torch.equal(states["rfa"][name], states["again"][name]) for name in extra)
    other = Conversion("rfa", 8, 6)
    convert_folder(tmp_path / "theirs", tmp_path / "other", other)
    model = load_model(tmp_path / "other")
    assert not torch.equal(model.blocks[0].mixer.w_HDK, states["rfa"]["blocks.0.mixer.w_HDK"])
    model.logits(_tokens(80)).square().sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_some_layers_stay_exact(tmp_path: Path) -> None:
    """Layers that stay exact are softmax beside rfa, with the same weights; a layer that there is not is refused."""
    write_foreign_folder(tmp_path / "theirs", "llama")
    convert_folder(tmp_path / "theirs", tmp_path / "exact")
    convert_folder(tmp_path / "theirs", tmp_path / "mixed", Conversion("rfa", 8, exact_layers=(1,)))
    exact, mixed = load_model(tmp_path / "exact"), load_model(tmp_path / "mixed")
    assert [block.mixer.config.kind for block in mixed.blocks][:2] == ["rfa", "softmax"]
    weights = mixed.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in exact.state_dict().items())
    assert {name.split(".")[1] for name in weights.keys() - exact.state_dict().keys()} == {
        str(layer) for layer in range(len(mixed.blocks)) if layer != 1
    }
    for conversion in (Conversion("rfa", exact_layers=(9,)), Conversion("softmax", exact_layers=(0,))):
        with pytest.raises(InputError, match=r"layers from 0 to \d+ and a conversion to kernel attention"):
            convert_folder(tmp_path / "theirs", tmp_path / "refused", conversion)
        assert not (tmp_path / "refused").exists()


def test_weights_in_several_files(tmp_path: Path) -> None:
    """A folder whose weights are split over files by an index gives the same model as one file."""
    for name, shards in (("one", False), ("many", True)):
        write_foreign_folder(tmp_path / name, "gpt_neox", shards=shards)
        convert_folder(tmp_path / name, tmp_path / f"our {name}")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    one, many = (load_model(tmp_path / f"our {name}").state_dict() for name in ("one", "many"))
    assert all(torch.equal(one[name], many[name]) for name in one)


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        ("gpt2", {"model_type": "mamba"}, "model_type is 'mamba'; supported are bert, gpt2, gpt_neox, llama"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "layer_idx is True; supported is false"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function is 'tanh'; supported is \"gelu_new\" or"),
        ("gpt2", {"n_embd": "many"}, "n_embd is 'many'; needed is a whole number"),
        ("gpt2", {"n_head": 5}, "hidden_size 32 must be a multiple of num_heads 5"),
        (
            "gpt2",
            {"n_embd": 64},
            r"what becomes 'embedding.weight' has shape \(352, 32\), config.json needs \(352, 64\)",
        ),
        ("gpt2", {"vocab_size": 20}, "350 tokens and config.json says vocab_size 20"),
        (
            "gpt2",
            {"n_layer": 1},
            r"holds a tensor 'transformer\.h\.1\..*' that a model of its config.json does not have",
        ),
        ("gpt2", {"n_layer": 3}, r"has no tensor 'transformer\.h\.2\.ln_1\.weight'"),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2.0}},
            r"scaled \('linear'\); supported are plain ones",
        ),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, r"scaled \('yarn'\)"),
        ("llama", {"sliding_window": 128}, "sliding_window is 128; supported is null"),
        ("llama", {"head_dim": 16}, "supported are heads that fill it"),
        (
            "gpt_neox",
            {"rope_parameters": {"partial_rotary_factor": 0.4}},
            "turn 3 of 8 numbers per head; needed is an even",
        ),
    ],
)
def test_what_is_not_supported_is_refused(shape: str, changes: dict, message: str, tmp_path: Path) -> None:
    """Another architecture, an option that computes something else, and sizes that do not fit are refused in words."""
    write_foreign_folder(tmp_path / "theirs", shape)
    change_config(tmp_path / "theirs", **changes)
    with pytest.raises(ModelFolderError, match=message):
        convert_folder(tmp_path / "theirs", tmp_path / "ours")
    assert not (tmp_path / "ours").exists()


def test_a_folder_in_use_is_left_alone(tmp_path: Path) -> None:
    """What stands at `out` is never written over; the end token comes from config.json where nothing else names it."""
    write_foreign_folder(tmp_path / "theirs")
    (tmp_path / "theirs" / "tokenizer_config.json").unlink()
    change_config(tmp_path / "theirs", eos_token_id=0)
    (tmp_path / "ours").mkdir()
    (tmp_path / "ours" / "mine").write_text("kept")
    with pytest.raises(InputError, match="exists; give a folder that does not"):
        convert_folder(tmp_path / "theirs", tmp_path / "ours")
    assert (tmp_path / "ours" / "mine").read_text() == "kept"
    report = convert_folder(tmp_path / "theirs", tmp_path / "new")
    model, tokeniser = load_model_and_tokeniser(tmp_path / "new")
    assert tokeniser.end_token == 0
    assert report["parameters"] == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("to", ["softmax", "rfa"])
def test_a_run_begins_from_a_folder(tmp_path: Path, to: Literal["softmax", "rfa"]) -> None:
    """Without [model] a run takes a converted folder's model, lowers its loss, and leaves a folder with its tokens."""
    write_foreign_folder(tmp_path / "theirs", "gpt2")
    convert_folder(tmp_path / "theirs", tmp_path / "converted", Conversion(to, num_random=8))
    values = small_run(tmp_path, steps=30, log_every=10, dtype="float32").model_dump(mode="json")
    del values["model"]
    values["data"] |= {"tokeniser": str(tmp_path / "converted"), "segment": 8}
    values["run"]["begin_from"] = str(tmp_path / "converted")
    path = tmp_path / "run.toml"
    path.write_text("".join(f"[{name}]\n{_lines(section)}" for name, section in values.items() if section))
    config, reports = read_config(path), []
    train(config, report=reports.append)
    losses = [report["loss"] for report in reports if "loss" in report]
    assert losses[-1] < losses[0]
    model, tokeniser = load_model_and_tokeniser(tmp_path / "run" / "model")
    assert model.config == load_model(tmp_path / "converted").config
    assert tokeniser.decode(tokeniser.encode(b"as before")) == b"as before"
    manifest = (tmp_path / "run" / "model" / "manifest.json").read_text()
    assert str(tmp_path) not in manifest


def _lines(section: dict[str, Any]) -> str:
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in section.items() if value is not None)


def test_a_foreign_model_is_converted_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`convert` makes a folder that evaluate, encode, generate and plan take; a refusal is one line with code 2."""
    write_foreign_folder(tmp_path / "theirs", "gpt_neox")
    (tmp_path / "book.txt").write_bytes(3 * PROSE.encode())

    def run(*arguments: str) -> tuple[int, str, str]:
        return (run_here(monkeypatch, tmp_path, *arguments), *capsys.readouterr())

    code, out, _ = run("convert", "theirs", "--out", "ours", "--to", "rfa", "--num-random", "8")
    assert code == 0
    assert json.loads(out)["architecture"] == "gpt_neox"
    code, out, _ = run("evaluate", "book.txt", "--model", "ours")
    assert code == 0
    assert json.loads(out)["bytes"] == (tmp_path / "book.txt").stat().st_size
    for command in (["encode", "book.txt", "--out", "b.npy"], ["generate", "--prompt", "It", "--max-tokens", "3"]):
        assert run(*command, "--model", "ours")[0] == 0
    assert run("plan", "--tokens", "1000", "--model", "ours")[0] == 0
    code, out, err = run("convert", "theirs", "--out", "ours")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "ours exists" in err


def test_a_llama_with_sentence_piece_is_converted(tmp_path: Path) -> None:
    """`convert` takes the folder, pads the tokens, and the model folder gives the same tokeniser back."""
    write_foreign_folder(tmp_path / "theirs", "llama")
    (tmp_path / "theirs" / "tokenizer.json").write_text(sentence_piece_contents("BPE", False))
    (tmp_path / "theirs" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    convert_folder(tmp_path / "theirs", tmp_path / "ours")
    model, tokeniser = load_model_and_tokeniser(tmp_path / "ours")
    assert isinstance(tokeniser, SentencePieceTokeniser)
    assert (tokeniser.vocab_size, tokeniser.end_token) == (model.config.vocab_size, 2)
    assert tokeniser.encode(PROSE.encode()).tolist() == sentence_piece("BPE", False).encode(PROSE.encode()).tolist()

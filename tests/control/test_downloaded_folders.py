"""Folders of transformers as they were downloaded are served, and wrong ones refused in words before a rank starts."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dist_attn_service.engine.served_model import ServedModel
from dist_attn_service.schemas.completions import CompletionRequest
from safetensors.torch import load_file, save_file

from dist_attn.adapters.check import check_tensors
from dist_attn.adapters.model import load_adapted_model
from dist_attn.checkpoints import load_causal_model
from dist_attn.control.preflight import check_model_folder
from dist_attn.errors import ModelFolderError
from dist_attn.shipped import origin, resolve_model_folder
from dist_attn.shipped.downloaded import ROPES, ROPES_BY_LENGTH, SUPPORTED, read_downloaded
from dist_attn.wire.messages import SamplingSpec
from tests.support.command_line import run_here
from tests.support.downloaded import llama, save
from tests.support.foreign_models import written
from tests.support.hugging_face import VOCABULARY, change_config
from tests.support.programs import free_port
from tests.support.tokenisers import foreign_contents

transformers = pytest.importorskip("transformers", reason="the folders are written by transformers")

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 4, "linear_value_head_dim": 4, "num_experts": 2, "num_experts_per_tok": 1,
    "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8,
    "layer_types": ["linear_attention", "full_attention"], "eos_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
INDEX = "model.safetensors.index.json"
Spoil = Callable[[Path], object]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3-Next with two small layers in several files, as transformers writes it."""
    folder = tmp_path_factory.mktemp("downloaded") / "good"
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3NextConfig(**SIZES))
    model.save_pretrained(folder, max_shard_size="30KB")
    (folder / "tokenizer.json").write_text(foreign_contents())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    """A copy to be spoilt."""
    return Path(shutil.copytree(good, tmp_path / "model"))


def _first(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def _header(path: Path) -> tuple[dict[str, Any], bytes]:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:end]), data[end:]


def _write(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def _with_tensors(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Other names, shapes or kinds of numbers in the header of the file that holds the embedding."""
    index = json.loads((folder / INDEX).read_text())
    path = folder / index["weight_map"]["model.embed_tokens.weight"]
    header, data = _header(path)
    change(header)
    _write(path, json.dumps(header).encode(), data)
    kept = {name: file for name, file in index["weight_map"].items() if file != path.name or name in header}
    new = {name: path.name for name in header if name != "__metadata__"}
    (folder / INDEX).write_text(json.dumps({"weight_map": kept | new}))


def _index(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / INDEX).read_text())
    for key, value in changes.items():
        values[key] |= value
    (folder / INDEX).write_text(json.dumps(values))


def _config(**changes: Any) -> Spoil:
    return lambda folder: change_config(folder, **changes)


def _without_type(folder: Path) -> None:
    values = json.loads((folder / "config.json").read_text())
    del values["model_type"]
    (folder / "config.json").write_text(json.dumps(values))


def _unpickled_only(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"PK")


def _link(folder: Path) -> None:
    path = _first(folder)
    path.unlink()
    path.symlink_to("nowhere")


def _folder_for_shard(folder: Path) -> None:
    path = _first(folder)
    path.unlink()
    path.mkdir()


def _more_tokens(folder: Path) -> None:
    contents = json.loads((folder / "tokenizer.json").read_text())
    contents["model"]["vocab"]["more"] = VOCABULARY
    (folder / "tokenizer.json").write_text(json.dumps(contents))


def _another_end(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<more>"}))
    change_config(folder, vocab_size=len(json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]))


CODE = {"AutoConfig": "configuration_new.NewConfig", "AutoModelForCausalLM": "modeling_new.NewForCausalLM"}
WRONG: dict[str, tuple[Spoil, str]] = {
    "missing shard": (lambda f: _first(f).unlink(), r"00001-of-.* is not there, which model.safetensors.index"),
    "index names no file": (
        lambda f: _index(f, weight_map={"lm_head.weight": "other.safetensors"}), "other.safetensors is not there"
    ),
    "index names a path": (lambda f: _index(f, weight_map={"lm_head.weight": "../x"}), "names of files in the same"),
    "index names another tensor": (
        lambda f: _index(f, weight_map={"lm_tail.weight": _first(f).name}), "'lm_tail.weight' is in .* does not hold it"
    ),
    "index of 8 GB": (
        lambda f: _index(f, metadata={"total_size": 8 << 30}), r"8,589,934,592 bytes, and its files hold .* incomplete"
    ),
    "index without a map": (lambda f: (f / INDEX).write_text("{}"), "has no weight_map"),
    "truncated shard": (lambda f: _first(f).write_bytes(_first(f).read_bytes()[:-9]), "cut short or damaged"),
    "empty shard": (lambda f: _first(f).write_bytes(b""), "has 0 bytes .* cut short, or no safetensors file"),
    "header that is no JSON": (lambda f: _write(_first(f), b"{]", b""), "has a header that is not JSON"),
    "header of absurd length": (lambda f: _first(f).write_bytes(b"\xff" * 99), "its header would have 18,446,744"),
    "tensor of other bytes": (
        lambda f: _with_tensors(f, lambda h: h["model.embed_tokens.weight"].update(shape=[9, 9])),
        r"'model.embed_tokens.weight' has .* and \[9, 9\] of F32 take 324",
    ),
    "unknown kind of number": (
        lambda f: _with_tensors(f, lambda h: h["model.embed_tokens.weight"].update(dtype="F4")), "holds 'F4'; needed"
    ),
    "tensor without a shape": (
        lambda f: _with_tensors(f, lambda h: h["model.embed_tokens.weight"].pop("shape")), "does not say what"
    ),
    "unknown type": (
        _config(model_type="rwkv9"), "model_type 'rwkv9'.* takes the types qwen3_next, .*gpt_neox as they were"
    ),
    **{
        f"flash-linear-attention's {kind}": (
            _config(model_type=kind, architectures=[f"{kind}ForCausalLM"]),
            rf"model_type '{kind}', .* flash-linear-attention writes are not read: {words}dist-attn serve takes",
        )
        for kind, words in (
            ("gla", "dist-attn train .* mixer.kind = gla; "),
            ("rwkv7", "dist-attn train .* mixer.kind = rwkv7; "),
            ("gated_deltanet", "dist-attn train .* mixer.kind = gated_delta; "),
            ("delta_net", ""),
        )
    },
    "no type": (_without_type, r"is a Hugging Face folder \(architectures \['Qwen3NextForCausalLM'\]\)"),
    "code of its own": (_config(model_type="new", auto_map=CODE), r"\(auto_map\) is never run"),
    "unknown rope": (
        _config(rope_parameters={"rope_type": "spiral"}), "rotary positions are 'spiral'; supported are default, linear"
    ),
    "unknown rope of an older file": (_config(rope_scaling={"type": "su"}), "rotary positions are 'su'"),
    "rope of one type of layer": (
        _config(rope_parameters={"full_attention": {"rope_type": "spiral"}}), "rotary positions are 'spiral'"
    ),
    "rope by length": (_config(rope_scaling={"rope_type": "dynamic"}), "'dynamic', whose angles depend on the length"),
    "unbound option": (_config(use_bidirectional_attention=True), "use_bidirectional_attention is True, which is not"),
    "attention that looks ahead": (_config(is_causal=None), "is_causal is None, which is not supported; supp"),
    "option of one type": (
        _config(use_sliding_window=True), "use_sliding_window is True, which is not supported; supported is False"
    ),
    "unbound layer": (_config(layer_types=["chunked_attention"]), "layer_types has 'chunked_attention'; supported"),
    "quantised": (_config(quantization_config={"quant_method": "fp8"}), "quantization_config is set, which is not"),
    "quantised by GPTQ": (
        _config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantization_config is set, which is not"
    ),
    "quantised by bitsandbytes": (
        _config(quantization_config={"load_in_4bit": True}), "quantization_config is set, which is not"
    ),
    "layers that are no list": (_config(layer_types=5), "layer_types is 5; needed is a list"),
    "no layers": (_config(num_hidden_layers=0), "num_hidden_layers is 0; needed is a whole number of at least 1"),
    "negative heads": (_config(num_attention_heads=-2), "num_attention_heads is -2; needed"),
    "no window": (_config(sliding_window=0), "sliding_window is 0; needed"),
    "no experts for a token": (_config(num_experts_per_tok=0), "num_experts_per_tok is 0; needed is .* its 2 experts"),
    "more experts for a token than there are": (_config(num_experts_per_tok=9), "num_experts_per_tok is 9; needed"),
    "another task": (
        _config(architectures=["Qwen3NextForSequenceClassification"]), "'Qwen3NextForSequenceClassification'; needed"
    ),
    "another type and task": (
        _config(model_type="bert", architectures=["BertForMaskedLM"]), r"model_type 'bert', .* dist-attn convert"
    ),
    "type that is no name": (_config(model_type=["llama"]), r"model_type \['llama'\]"),
    "no dtype": (_config(dtype="bfloat17"), "dtype is 'bfloat17'; needed is one of float32, bfloat16, float16"),
    "no dtype of an older file": (_config(dtype=None, torch_dtype="auto"), "torch_dtype is 'auto'; needed"),
    "several dtypes": (_config(dtype=["float32"]), r"dtype is \['float32'\]; needed"),
    "no size": (_config(hidden_size="wide"), "hidden_size is 'wide'; needed is a whole number"),
    "no tokeniser": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json cannot be read: there is no such file"),
    "tokeniser of tiktoken": (
        lambda f: (f / "tokenizer.json").rename(f / "tiktoken.model"), "no such file; tiktoken.model is not read"
    ),
    "tokeniser of more tokens": (_more_tokens, f"has {VOCABULARY + 1} tokens, the model {VOCABULARY}"),
    "tokeniser of another end": (_another_end, "neither frame nor end a text, so the files are of two models"),
    "tokeniser that is no JSON": (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json is not JSON"),
    "configuration that is no JSON": (lambda f: (f / "config.json").write_text("{"), "config.json is not JSON"),
    "configuration that is an array": (lambda f: (f / "config.json").write_text("[]"), "config.json holds no JSON obj"),
    "pickles only": (_unpickled_only, "it has pytorch_model.bin, which is unpickled.* needed are weights"),
    "generation that is no JSON": (
        lambda f: (f / "generation_config.json").write_text("?"), "generation_config.json is not JSON"
    ),
    "end outside of the vocabulary": (
        lambda f: (f / "generation_config.json").write_text('{"eos_token_id": [0, 999]}'), "eos_token_id is 999; needed"
    ),
    "temperature that is no number": (
        lambda f: (f / "generation_config.json").write_text('{"temperature": "hot"}'), "temperature is 'hot'; needed is"
    ),
    "empty stop string": (
        lambda f: (f / "generation_config.json").write_text('{"stop_strings": ["a", ""]}'), "stop_strings is .* empty"
    ),
    "link to nowhere": (_link, "is a link to nowhere, and nothing is there"),
    "folder for a shard": (_folder_for_shard, "00001-of-.* is a folder"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_folder_is_refused(case: str, folder: Path) -> None:
    """The file and what is wrong with it are named, and what is needed, by `serve` and by what loads it at once."""
    spoil, words = WRONG[case]
    spoil(folder)
    with pytest.raises(ModelFolderError, match=words):
        check_model_folder(folder)
    if "tokeniser" not in case:  # `logits` takes tokens
        with pytest.raises(ModelFolderError, match=words):
            load_causal_model(folder)


def _rename(header: dict[str, Any], old: str, new: str) -> None:
    header[new] = header.pop(old)


EMBEDDING = "model.embed_tokens.weight"
UNFIT: dict[str, tuple[Spoil, str]] = {
    "wrong shape": (
        _config(hidden_size=32), r"'.*' has shape \(.*\), the model of config.json needs \(.*32"
    ),
    "missing tensor": (
        lambda f: _with_tensors(f, lambda h: _rename(h, EMBEDDING, "mtp.unused.weight")),
        f"lack 1 .* such as '{EMBEDDING}'",
    ),
    "unexpected tensor": (
        _config(num_hidden_layers=1, layer_types=["linear_attention"]), r"hold \d+ tensors .* such as 'model.layers.1"
    ),
    "weights of another model": (_config(model_type="mistral"), r"lack \d+ of the tensors"),
    "unknown activation": (_config(hidden_act="swishy"), "transformers cannot load it: KeyError: 'swishy'"),
    "positions without their factor": (
        _config(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "cannot load it: .* 'rope_type'='yarn'"
    ),
    "a part of another kind": (_config(text_config=3), "transformers cannot load it: AttributeError"),
    "a value that transformers refuses": (_config(num_experts="many"), "transformers cannot load it: .*num_experts"),
}  # fmt: skip


@pytest.mark.parametrize("case", UNFIT)
def test_tensors_of_another_model_are_refused(case: str, folder: Path) -> None:
    """A tensor is named, by transformers' own way of loading, that does not fit the model of config.json."""
    spoil, words = UNFIT[case]
    spoil(folder)
    for check in (lambda: check_tensors(read_downloaded(folder)), lambda: load_causal_model(folder)):
        with pytest.raises(ModelFolderError, match=words):
            check()


def test_a_good_folder_passes(good: Path) -> None:
    """Its files, its tensors and what the service tells of it agree with the model that transformers makes of it."""
    model = read_downloaded(good)
    made = transformers.AutoModelForCausalLM.from_pretrained(good)
    sizes, served = check_tensors(model), ServedModel.read(good)
    assert (sizes.parameters, sizes.weight_bytes) == (made.num_parameters(), {"float32": 4 * made.num_parameters()})
    assert (model.weight_bytes, model.dtype, model.generation.end_tokens) == (
        4 * made.num_parameters(),
        "float32",
        (0,),
    )
    assert (served.vocab_size, served.hidden_size, served.num_layers) == (VOCABULARY, 16, 2)
    assert (origin(good), resolve_model_folder(good)) == ("downloaded", good)


def test_a_number_without_bound_is_read(folder: Path) -> None:
    """`Infinity`, which Python writes and JSON does not know, is read by the service as by the ranks."""
    change_config(folder, time_step_limit=[0.0, float("inf")])
    assert '"time_step_limit": [0.0, Infinity]' in " ".join((folder / "config.json").read_text().split())
    assert (ServedModel.read(folder).vocab_size, read_downloaded(folder).vocab_size) == (VOCABULARY, VOCABULARY)


@pytest.mark.parametrize(
    ("said", "drawn"),
    [
        ({"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20}, {"temperature": 0.6, "top_p": 0.95}),
        ({"do_sample": False, "temperature": 0.6}, {"temperature": 0.0}),
        ({"do_sample": False, "repetition_penalty": 1.1}, {"temperature": 0.0, "repetition_penalty": 1.1}),
        ({}, {}),
    ],
)
def test_a_request_is_drawn_as_the_folder_says(said: dict[str, Any], drawn: dict[str, Any], folder: Path) -> None:
    """What a request does not name is what generation_config.json names; what it names counts."""
    (folder / "generation_config.json").write_text(json.dumps(said | {"eos_token_id": [0, 7]}))
    request, served = CompletionRequest(prompt="text", top_k=-1), ServedModel.read(folder)
    assert request.spec(5, {}, None, served.drawing) == SamplingSpec(5, **drawn)
    assert read_downloaded(folder).generation.end_tokens == (0, 7)


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2", "llama"])
def test_the_size_of_a_state_is_known_before_weights_are_read(kind: str, tmp_path: Path) -> None:
    """What the folder's state is said to take after so many tokens is what it takes, to the byte."""
    mamba = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8, "n_groups": 1}
    config = transformers.CONFIG_MAPPING[kind](**(mamba if kind == "mamba2" else SIZES | {"intermediate_size": 24}))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text(foreign_contents())
    sizes, model = check_tensors(read_downloaded(tmp_path)), load_adapted_model(tmp_path)
    for length in (3, 41):
        with torch.inference_mode():
            state = model.hidden(torch.arange(length)[None])[1]
        assert sizes.state_bytes_at(length) == state.num_bytes()


@pytest.mark.parametrize(
    ("kind", "options"),
    [("mamba2", {"norm_before_gate": True}), ("jamba", {"num_experts": 1, "num_experts_per_tok": 2})],
    ids=["a key of Mamba-Codestral", "one expert"],
)
def test_what_transformers_passes_over_is_no_obstacle(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    """A value that decides nothing, such as how often a layer without experts asks them, is taken."""
    theirs, tokens_BL = written(kind, **options)
    theirs.save_pretrained(tmp_path)
    change_config(tmp_path, **options)
    with torch.inference_mode():
        difference = load_adapted_model(tmp_path).logits(tokens_BL) - theirs(tokens_BL, use_cache=False).logits
    assert difference.abs().max() < 1e-4


@pytest.mark.parametrize("same", [True, False])
def test_tied_weights_may_be_stored_twice(same: bool, tmp_path: Path) -> None:
    """Where the embedding and the read-out are the same they are one, else two, as transformers has it."""
    save(llama(tie_word_embeddings=True), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.clone() if same else embedding.flip(0).contiguous()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    ours, tokens = load_adapted_model(tmp_path), torch.arange(9)[None]
    assert check_tensors(read_downloaded(tmp_path)).parameters == theirs.num_parameters() == ours.inner.num_parameters()
    with torch.inference_mode():
        assert (ours.logits(tokens) - theirs(tokens).logits).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("command", "case"),
    [
        ("serve", "missing shard"),
        ("logits", "quantised by GPTQ"),
        ("serve", "flash-linear-attention's gla"),
        ("serve", "wrong shape"),
        ("logits", "wrong shape"),
    ],
)
def test_commands_refuse_it_before_anything_is_started(
    command: str,
    case: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """The command ends with code 2 and one line on stderr; there is no line of a controller or a rank."""
    (WRONG | UNFIT)[case][0](folder)
    np.save(tmp_path / "tokens.npy", np.arange(9))
    flags = {
        "serve": [f"--port={free_port()}", f"--data-dir={tmp_path / 'data'}"],
        "logits": [f"--tokens={tmp_path / 'tokens.npy'}", f"--out={tmp_path / 'logits.npy'}"],
    }
    code = run_here(monkeypatch, tmp_path, command, f"--model={folder}", *flags[command])
    out, err = capfd.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert str(folder) in err


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    """What was looked for is named."""
    (tmp_path / "model").write_text("{}")
    with pytest.raises(ModelFolderError, match=r"no model at .*needed is a folder with config.json"):
        resolve_model_folder(tmp_path / "model")


def test_types_and_ropes_are_those_of_transformers() -> None:
    """Each supported type is one that transformers makes a language model of, and no rotary positions are forgotten."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    assert set(SUPPORTED) <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert {*ROPES, *ROPES_BY_LENGTH} == {"default", *ROPE_INIT_FUNCTIONS}


def test_the_page_names_every_type() -> None:
    """What the page of users' models sends its reader to has a row for each type served, in order, and no other."""
    docs = Path(__file__).parents[2] / "docs"
    assert "](../models/supported.md)" in (docs / "how-to" / "your-model.md").read_text()
    page = (docs / "models" / "supported.md").read_text()
    assert re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE) == list(SUPPORTED)

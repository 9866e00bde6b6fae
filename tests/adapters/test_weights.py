"""Weights of downloaded folders: read as they are needed, in the precision that is wanted, and held once."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dist_attn.adapters.model import load_adapted_model
from dist_attn.adapters.weights import NarrowLinear
from dist_attn.checkpoints import load_causal_model
from dist_attn.errors import ModelFolderError
from dist_attn.models import weight_bytes, weight_precision_of
from dist_attn.ops.narrow_weights import widen_rows
from tests.support.downloaded import VOCABULARY, llama, mamba2, qwen3_next, save

transformers = pytest.importorskip("transformers", reason="the folders are written by transformers")

TOKENS = torch.randint(0, VOCABULARY, (2, 40), generator=torch.Generator().manual_seed(0))
READS_AND_WRITES = """
import os, sys, torch
from dist_attn.checkpoints import load_causal_model

def now(key):
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(key + ":"))

@torch.inference_mode()
def use(folder, weights):
    model = load_causal_model(folder, weights=weights)
    model.hidden(torch.zeros(1, 8, dtype=torch.int64))
    model.step(torch.zeros(8, dtype=torch.int64), model.initial_state(8))
    return model

small, large, *ways = sys.argv[1:]
torch.set_num_threads(1)
use(small, "float32")  # all modules are there now
for weights in ways:
    if os.fork():
        assert os.wait()[1] == 0
        continue
    use(small, weights)  # and their pages, and what products of these sizes take on this processor
    before, own_before = now("VmRSS"), now("RssAnon")
    open("/proc/self/clear_refs", "w").write("5")  # the largest size so far is forgotten
    model = use(large, weights)
    print(now("VmHWM") - before, now("RssAnon") - own_before, flush=True)
    os._exit(0)
"""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of transformers in bfloat16, in several files."""
    place = tmp_path_factory.mktemp("models")
    made = {
        "small": llama(),
        "narrow": llama(512, 1),
        "large": llama(512, 8),
        "experts": qwen3_next(),
        "states": mamba2(),
    }
    for name, model in made.items():
        model.bfloat16().save_pretrained(place / name, max_shard_size="10MB" if name == "large" else "20KB")
        assert (place / name / "model.safetensors.index.json").is_file()
    return {name: place / name for name in made}


@pytest.mark.parametrize("stored", [torch.float16, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_transformers(stored, wanted, tmp_path):
    """Whatever precision a folder has, its parameters are in the wanted one, with the numbers that transformers has."""
    folder = save(qwen3_next().to(stored), tmp_path / "model")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=wanted)
    ours = load_adapted_model(folder, wanted).inner
    for (name, one), (other, two) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert (name, one.dtype) == (other, two.dtype) and torch.equal(one, two)


def test_tensors_may_begin_at_any_byte(tmp_path):
    """A file whose header does not end at a multiple of eight bytes is read all the same."""
    theirs = llama()
    path = save(theirs, tmp_path / "model") / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little") + 1
    path.write_bytes(length.to_bytes(8, "little") + data[8 : 7 + length] + b" " + data[7 + length :])
    ours = load_adapted_model(path.parent).inner.state_dict()
    assert all(torch.equal(tensor, ours[name]) for name, tensor in theirs.state_dict().items())


def test_a_folder_without_all_weights_is_refused(tmp_path):
    """A model is never completed with random numbers."""
    theirs = llama()
    folder = save(theirs, tmp_path / "model")
    left = {name: tensor for name, tensor in theirs.state_dict().items() if name != "model.layers.1.mlp.up_proj.weight"}
    theirs.save_pretrained(folder, state_dict=left)
    with pytest.raises(ModelFolderError, match=r"lack 1 of the tensors .* 'model\.layers\.1\.mlp\.up_proj\.weight'"):
        load_adapted_model(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="memory is asked of /proc")
@pytest.mark.slow
def test_the_largest_size_is_that_of_the_weights(folders):
    """A model never takes more memory than 1.15 of its weights, and hardly any for what it has as it is stored."""
    stored = sum(path.stat().st_size for path in folders["large"].glob("*.safetensors"))
    bounds = {"bfloat16": (1.15, 0.1), "float32": (2.3, 2.3)}
    command = [sys.executable, "-c", READS_AND_WRITES, str(folders["narrow"]), str(folders["large"]), *bounds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for line, (weights, bound) in zip(done.stdout.splitlines(), bounds.items(), strict=True):
        sizes = tuple(int(number) / stored for number in line.split())
        assert sizes[0] <= bound[0] and sizes[1] <= bound[1], (weights, sizes, done.stdout)


@pytest.mark.parametrize("name", ["small", "experts", "states"])
def test_int8_is_the_model_of_the_rounded_weights(name, folders):
    """With 8 bits the logits are those of transformers' own layers over the numbers that the rounded rows stand for."""
    narrow = load_causal_model(folders[name], weights="int8")
    wide = load_adapted_model(folders[name])
    layers = [(at, one.layer) for at, one in narrow.inner.named_modules() if isinstance(one, NarrowLinear)]
    assert layers and weight_precision_of(narrow) == "int8"
    with torch.inference_mode():
        for at, layer in layers:
            wide.inner.get_parameter(f"{at}.weight").copy_(widen_rows(layer.weight, layer.scale))
        wanted = wide.logits(TOKENS)
        difference = (narrow.logits(TOKENS).float() - wanted).abs().max() / wanted.abs().max()
        state, steps = narrow.initial_state(2), []
        for token_B in TOKENS.t():
            logits_BV, state = narrow.step(token_B, state)
            steps.append(logits_BV.float())
        stepwise = (torch.stack(steps, 1) - wanted).abs().max() / wanted.abs().max()
    assert max(difference, stepwise) < 0.03, (difference, stepwise)
    assert weight_bytes(narrow) < 0.85 * weight_bytes(load_adapted_model(folders[name], torch.bfloat16))

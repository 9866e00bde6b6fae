"""Folders of transformers that are trained on: gradients, the folder that is written, and what is refused."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM

from dist_attn.adapters.check import check_tensors
from dist_attn.checkpoints import load_model_and_tokeniser
from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import ConfigError, ModelFolderError
from dist_attn.generation.text import generate_text
from dist_attn.shipped.downloaded import read_downloaded
from dist_attn.training import TrainingConfig, train
from dist_attn.training.averaging import average_folders
from dist_attn.training.checkpointing import latest_checkpoint
from dist_attn.training.config import read_config
from dist_attn.training.loop import build_task
from dist_attn.training.mesh import Mesh, Share
from dist_attn.training.optim import build_optimisers
from dist_attn.wire.messages import SamplingSpec
from tests.support.foreign_models import TYPES, auto_class
from tests.support.hugging_face import change_config
from tests.support.ranks import run_ranks
from tests.support.tokenisers import foreign_contents
from tests.support.training import small_run, write_toml

ROWS, VOCABULARY = 3, 352


def downloaded(folder: Path, kind: str, stored: str = "float32") -> Path:
    """A folder of this type with transformers' first weights, a tokeniser, and code of its own."""
    sizes = TYPES[kind] | {"vocab_size": VOCABULARY}
    text = {"text_config": sizes["text_config"] | {"vocab_size": VOCABULARY}} if "text_config" in sizes else {}
    config = CONFIG_MAPPING[kind](**sizes | text)
    torch.manual_seed(0)
    auto_class(config).from_config(config, dtype=getattr(torch, stored)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(foreign_contents())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "modeling_own.py").write_text("raise SystemExit")
    return folder


def run_of(
    place: Path, kind: str, segment: int = 24, stored: str = "float32", **sections: dict[str, Any]
) -> TrainingConfig:
    """A run that trains a folder of this type."""
    values = small_run(place, dtype="float32").model_dump(mode="json", exclude_none=True)
    data = {name: value for name, value in values["data"].items() if name not in ("tokeniser", "stateful")}
    values |= {
        "model": {"folder": str(downloaded(place / "downloaded", kind, stored))},
        "optimiser": {"learning_rate": 1e-3},
    }
    values["data"] = data | {"batch": ROWS, "segment": segment, "validation_bytes": 100}
    return TrainingConfig.model_validate({n: section | sections.get(n, {}) for n, section in values.items()})


Gradients = dict[str, Tensor]


def _step(config: TrainingConfig, shape: tuple[int, int], comm: Communicator) -> tuple[float, Gradients]:
    """This rank's part of a step's loss, and of its gradients."""
    with Mesh(comm, *shape) as mesh:
        task = build_task(config, mesh.share())
        (rows,) = mesh.micro_batches(ROWS, 1)
        loss = task.loss(1, rows)
        loss.backward()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in task.model.named_parameters()}
        return loss.item(), gradients


class InDoubles(TorchFunctionMode):
    """Lets transformers' modules compute in float64 where they ask for float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func is torch.Tensor.float else func
        args = [torch.float64 if each is torch.float32 else each for each in args]
        return func(*args, **{n: torch.float64 if v is torch.float32 else v for n, v in (kwargs or {}).items()})


def of_transformers(config: TrainingConfig) -> tuple[float, Gradients]:
    """The loss of the step and its gradients by transformers alone, in float64."""
    folder = config.model.folder  # type: ignore[attr-defined]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").train()
    model.set_experts_implementation("eager")
    task = build_task(config, Share())
    inputs_BT, targets_BT = task._stream(1)  # type: ignore[attr-defined]
    with InDoubles():
        logits_BTV = model(inputs_BT, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())
    loss.backward()
    return loss.item(), {f"inner.{n}": p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba"])
@pytest.mark.parametrize(("shape", "segment"), [((1, 1), 24), ((1, 3), 24), ((2, 2), 24), ((1, 3), 2)])
def test_gradients_are_those_of_transformers(tmp_path: Path, kind: str, shape: tuple[int, int], segment: int) -> None:
    """Loss and every gradient are transformers' own in float64 to 1e-5, over rows, slices and an empty slice too."""
    # In float32 transformers' own are up to a thousandth off for decays of delta rules, sums of what nearly cancels.
    config = run_of(tmp_path, kind, segment, run={"activation_checkpointing": shape == (2, 2)})
    want, gradients = of_transformers(config)
    ranks = run_simulated(lambda comm: _step(config, shape, comm), shape[0] * shape[1], timeout_s=60.0)
    assert sum(loss for loss, _ in ranks) == pytest.approx(want, rel=1e-6)
    assert gradients.keys() == ranks[0][1].keys()
    for name, gradient in gradients.items():
        got = torch.stack([own[name].double() for _, own in ranks]).sum(0)
        error = float((got - gradient).abs().max() / gradient.abs().max().clamp_min(1e-12))
        assert error < 1e-5, f"{name} differs by {error}"


@pytest.mark.parametrize(
    ("kind", "stored"),
    [("qwen3_next", "float32"), ("mamba", "bfloat16"), ("qwen3_5", "float32"), ("gemma3", "float32")],
)
def test_the_folder_that_is_written(tmp_path: Path, kind: str, stored: str) -> None:
    """It opens in transformers and here with the weights that were trained, and its tokeniser; and it writes text."""
    config = run_of(tmp_path, kind, stored=stored, run={"export": "best"})
    assert train(config, stop=lambda: True)["stopped"]
    train(config, resume=True)  # also with weights that no text trains, as those of gemma3 that see
    folder, newest = config.run.folder / "model", latest_checkpoint(config.run.folder / "checkpoints")
    assert newest is not None
    trained, tokens_BL = load_file(newest / "model.safetensors"), torch.arange(40)[None]
    written = auto_class(AutoConfig.from_pretrained(folder))
    theirs = written.from_pretrained(folder, dtype=torch.float32)
    assert len(trained) == len(list(theirs.parameters()))  # weights that are tied are kept once
    for name, weight in theirs.named_parameters():
        kept = trained[f"inner.{name}"]
        assert torch.equal(weight, kept.to(getattr(torch, stored)).float() if kept.dim() > 1 else kept)
    ours, _ = load_model_and_tokeniser(folder)
    with torch.no_grad():
        difference = ours.logits(tokens_BL) - theirs.eval()(tokens_BL, use_cache=False).logits
    assert difference.abs().max() < 1e-4
    assert check_tensors(read_downloaded(folder)).parameters == theirs.num_parameters()
    assert read_downloaded(folder).dtype == stored
    source = tmp_path / "downloaded"
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    assert generate_text(str(folder), b"Call me", SamplingSpec(max_tokens=3))["tokens"] == 3
    assert not (folder / "modeling_own.py").exists()
    with pytest.raises(ConfigError, match="only those of own models are averaged"):
        average_folders([newest], tmp_path / "average")
    assert json.loads((folder / "manifest.json").read_text())["trained_on"].keys() == {"prose.txt"}


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:The following:RuntimeWarning")
def test_adapters(tmp_path: Path, kind: str) -> None:
    """Adapters are kept by themselves, by peft's files beside a merged folder, and a run goes on with the same bits."""
    peft = pytest.importorskip("peft", reason="pip install -e '.[lora]'")
    recomputed = {"activation_checkpointing": True}
    config = run_of(tmp_path, kind, model={"lora": {"rank": 4}}, run=recomputed)
    last, tokens_BL = train(config), torch.arange(40)[None]
    merged = AutoModelForCausalLM.from_pretrained(config.run.folder / "model")
    base = AutoModelForCausalLM.from_pretrained(config.model.folder)  # type: ignore[attr-defined]
    with torch.no_grad():
        before = base(tokens_BL, use_cache=False).logits
        with_adapters = peft.PeftModel.from_pretrained(base, config.run.folder / "adapter").eval()
        logits, own = (model(tokens_BL, use_cache=False).logits for model in (merged, with_adapters))
    assert (logits - own).abs().max() < 1e-5 < 1e-4 < (logits - before).abs().max()
    newest = latest_checkpoint(config.run.folder / "checkpoints")
    assert newest is not None
    kept = load_file(newest / "model.safetensors")
    assert all("lora_" in name for name in kept)
    again = config.model_copy(update={"run": config.run.model_copy(update={"folder": tmp_path / "again"})})
    assert train(again, stop=lambda: True)["stopped"]
    train(again, resume=True)
    for name, tensor in load_file(tmp_path / "again" / "checkpoints" / newest.name / "model.safetensors").items():
        assert torch.equal(tensor, kept[name])
    ranks = config.run.model_copy(update={"folder": tmp_path / "ranks", "sequence_ranks": 2})
    over = config.model_copy(update={"run": ranks})
    assert run_simulated(lambda comm: train(over, comm=comm), 2, timeout_s=60.0)[0] == pytest.approx(last, rel=1e-5)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:The following:RuntimeWarning")
def test_adapters_of_bfloat16(tmp_path: Path) -> None:
    """Frozen matrices stay in bfloat16, with the bits of float32 under autocast; they are merged in float32."""
    pytest.importorskip("peft", reason="pip install -e '.[lora]'")
    lora, run = {"lora": {"rank": 4}}, {"dtype": "bfloat16"}
    config = run_of(tmp_path, "qwen3_next", stored="bfloat16", model=lora, run=run)
    task = build_task(config, Share())

    def step() -> tuple[float, list[Tensor]]:
        task.model.zero_grad()
        loss = task.loss(1, slice(0, ROWS))
        loss.backward()
        return loss.item(), [p.grad for p in task.model.parameters() if p.grad is not None]

    name = "model.layers.0.linear_attn.out_proj"
    assert task.model.inner.get_submodule(name).base_layer.weight.dtype == torch.bfloat16
    halved = step()
    task.model.float()
    whole = step()
    assert halved[0] == whole[0] and all(map(torch.equal, halved[1], whole[1]))
    train(config)
    adapter = load_file(config.run.folder / "adapter" / "adapter_model.safetensors")
    down, up = (adapter[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
    before, after = (
        load_file(folder / "model.safetensors")[f"{name}.weight"]
        for folder in (tmp_path / "downloaded", config.run.folder / "model")
    )
    assert up.abs().max() > 0
    assert torch.equal(after, (before.float() + up @ down * (32 / 4)).bfloat16())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_next", "mamba"])
def test_sharded_parameters(tmp_path: Path, kind: str) -> None:
    """Two processes that each keep a share of the parameters, and compute layers again, train what one process does."""
    config = run_of(tmp_path, kind)
    train(config)
    changes = {"shard_parameters": True, "sequence_ranks": 2, "activation_checkpointing": True}
    run = config.run.model_copy(update={"folder": tmp_path / "sharded", **changes})
    sharded = config.model_copy(update={"run": run})
    run_ranks("gloo", partial(_trained, sharded), 2)
    want, got = (load_file(each.run.folder / "model" / "model.safetensors") for each in (config, sharded))
    assert want.keys() == got.keys()
    for name, weight in want.items():
        assert (got[name] - weight).abs().max() < 1e-5, name


def _trained(config: TrainingConfig, comm: Communicator) -> None:
    train(config, comm=comm)


def test_decay_is_of_matrices(tmp_path: Path) -> None:
    """Weights of two dimensions and more decay, but for those that are decays themselves."""
    task = build_task(run_of(tmp_path, "mamba"), Share())
    (optimiser,) = build_optimisers(task.model, task._config.optimiser, by_name=task.matrices_by_name)
    names = {parameter: name for name, parameter in task.model.named_parameters()}
    decayed, kept = ({names[p] for p in group["params"]} for group in optimiser.param_groups)
    assert {name for name in decayed if ".layers.0." in name} == {
        f"inner.backbone.layers.0.mixer.{part}.weight"
        for part in ("conv1d", "in_proj", "x_proj", "dt_proj", "out_proj")
    }
    assert "inner.backbone.layers.0.mixer.A_log" in kept


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {"folder": "bert"}}, "model_type 'bert'.*dist-attn convert"),
        ({"model": {"folder": "t5"}}, "model_type 't5'.*takes the types qwen3_next"),
        ({"model": {"folder": "writer-12m"}}, "of this project; train it on with run.begin_from"),
        ({"model": {"folder": "nowhere"}}, "no model at 'nowhere'"),
        ({"run": {"begin_from": "x"}}, "run.begin_from is for models of this project"),
        ({"objective": {"dropout": 0.1}}, "objective.dropout is for models of this project"),
        ({"optimiser": {"kind": "muon"}}, "optimiser.kind muon is for models of this project.*take adamw"),
        ({"model": {"lora": {"targets": ["nothing"]}}}, "model.lora.targets: .*nothing"),
        (
            {"model": {"lora": {}}, "run": {"shard_parameters": True}},
            "run.shard_parameters does not go with model.lora",
        ),
        ({"contrast": {}}, r"a \[contrast\] section has no meaning for a folder"),
        (
            {"config.json": {"attention_dropout": 0.1}},
            r"config.json: attention_dropout is 0\.1, which is not trained here",
        ),
        ({"config.json": {"output_router_logits": True}}, "output_router_logits is True, which is not trained here"),
        ({"config.json": {"vocab_size": 100}}, "tokens"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, dict[str, Any]], words: str
) -> None:
    """A type without an adapter is refused by its name, and so are options that would come out otherwise."""
    values = run_of(tmp_path, "qwen3_next").model_dump(mode="json", exclude_none=True)
    change_config(tmp_path / "downloaded", **changes.pop("config.json", {}))
    for kind in ("bert", "t5"):
        (tmp_path / kind).mkdir()
        (tmp_path / kind / "config.json").write_text(json.dumps({"model_type": kind}))
    monkeypatch.chdir(tmp_path)
    toml = write_toml(values | {n: values.get(n, {}) | section for n, section in changes.items()}, tmp_path / "a.toml")
    with pytest.raises((ConfigError, ModelFolderError), match=words):
        train(read_config(toml))


def test_a_folder_in_the_place_of_another_model(tmp_path: Path) -> None:
    """`--model` stands for a [model] section of any kind; the folder's tokens and small steps go without saying."""
    folder = downloaded(tmp_path / "downloaded", "llama")
    values = small_run(tmp_path).model_dump(mode="json", exclude_none=True, exclude={"optimiser": True})
    del values["data"]["tokeniser"], values["data"]["stateful"]
    config = read_config(write_toml(values, tmp_path / "a.toml"), (), str(folder))
    assert config.model.model_dump(mode="json") == {"kind": "folder", "folder": str(folder), "lora": None}
    assert (config.data.tokenisers()[0], config.optimiser.learning_rate) == (folder, 1e-5)

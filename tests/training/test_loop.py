"""Training runs: the loss falls, a run that was killed ends like one that was not, and a bad start leaves no trace."""

import gzip
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.modules.module import register_module_forward_pre_hook

from dist_attn.checkpoints import load_model, load_model_and_tokeniser
from dist_attn.errors import ConfigError, EngineError, InputError
from dist_attn.model_config.language_model import LearnedPositions
from dist_attn.models import LanguageModel, build_model
from dist_attn.training import TrainingConfig, checkpointing, language_task, train
from dist_attn.training.config import OptimiserConfig
from dist_attn.training.language_task import LanguageTask, SegmentStream
from dist_attn.training.optim import build_optimisers
from dist_attn.training.task import first_model
from tests.support.models import small_config, write_small_folder
from tests.support.training import small_run


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours catches it."""


def _metrics(config: TrainingConfig) -> list[dict[str, float]]:
    lines = (config.run.folder / "metrics.jsonl").read_text().splitlines()
    timing = ("tokens_per_second",)
    return [{k: v for k, v in json.loads(line).items() if k not in timing} for line in lines]


def _last_tensors(config: TrainingConfig) -> dict[str, torch.Tensor]:
    folder = config.run.folder / "checkpoints" / f"step-{config.run.steps:06d}"
    files = ("model", "optimiser", "carried_state")
    return {f"{f}.{name}": t for f in files for name, t in load_file(folder / f"{f}.safetensors").items()}


def _kill_before_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    whole = SegmentStream.__call__

    def stream(self: SegmentStream, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        if at == step:
            raise Killed
        return whole(self, at)

    monkeypatch.setattr(SegmentStream, "__call__", stream)


def test_a_run_learns_and_leaves_a_model(tmp_path):
    """The loss falls, every report is in metrics.jsonl, and the exported folder loads with a matching tokeniser."""
    reports = []
    config = small_run(tmp_path, steps=60, log_every=10, checkpoint_every=30, evaluate_every=60)
    last = train(config, report=reports.append)
    losses = [report["loss"] for report in reports if "loss" in report]
    assert len(losses) == 6
    assert losses[-1] < 0.8 * losses[0]
    assert last["bits_per_byte"] < 5.5
    assert [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()] == reports
    model, tokeniser = load_model_and_tokeniser(tmp_path / "run" / "model")
    assert model.config == config.model
    assert tokeniser.vocab_size == 257
    manifest = json.loads((tmp_path / "run" / "model" / "manifest.json").read_text())
    assert (manifest["steps"], manifest["tokens_seen"]) == (60, 60 * 2 * 24)
    kept = [path.name for path in sorted((tmp_path / "run" / "checkpoints").glob("step-*"))]
    assert kept == ["step-000030", "step-000060"]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("killed_at", [2, 5])
def test_a_killed_run_ends_like_an_undisturbed_one(tmp_path, monkeypatch, kind, killed_at):
    """Killed before or after its first checkpoint and resumed, a run has the same weights and state, bit for bit."""
    runs = {}
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        run = small_run(tmp_path / name, steps=7)
        runs[name] = run.model_copy(update={"optimiser": run.optimiser.model_copy(update={"kind": kind})})
    train(runs["whole"])
    with monkeypatch.context() as patched, pytest.raises(Killed):
        _kill_before_step(patched, killed_at)
        train(runs["killed"])
    train(runs["killed"], resume=True)
    want, got = _last_tensors(runs["whole"]), _last_tensors(runs["killed"])
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    steps = [report["step"] for report in _metrics(runs["killed"])]
    assert steps == [report["step"] for report in _metrics(runs["whole"])]


def test_a_run_killed_while_it_writes_a_checkpoint_goes_on_from_the_one_before(tmp_path, monkeypatch):
    """A checkpoint is there whole or not at all: killed half-way through the second, the run resumes from the first."""
    config, whole = small_run(tmp_path, evaluate_every=6), checkpointing.save_file

    def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if "step-000006" in str(path) and path.name == "carried_state.safetensors":
            raise Killed
        whole(tensors, path)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(checkpointing, "save_file", save_file)
        train(config)
    newest = checkpointing.latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert newest is not None
    assert newest.name == "step-000003"
    train(config, resume=True)
    assert [report["step"] for report in _metrics(config)] == [2, 4, 6, 6]


def test_a_resume_killed_while_it_trims_the_metrics_loses_none(tmp_path, monkeypatch):
    """Killed at any moment of its start, a resumed run leaves the metrics and the configuration that were there."""
    config = small_run(tmp_path)
    train(config)
    files = [config.run.folder / name for name in ("metrics.jsonl", "config.json")]
    before = [file.read_bytes() for file in files]
    whole = Path.write_bytes

    def half(path: Path, contents: bytes) -> int:
        whole(path, contents[: len(contents) // 2])
        raise Killed

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(Killed):
        train(config, resume=True)
    assert [file.read_bytes() for file in files] == before


def test_the_state_is_carried_from_segment_to_segment(tmp_path):
    """The state in a checkpoint has seen every token of its stream so far."""
    config = small_run(tmp_path)
    train(config)
    carried = load_file(tmp_path / "run" / "checkpoints" / "step-000006" / "carried_state.safetensors")
    positions = carried[str(len(carried) - 1)]
    assert positions.tolist() == [6 * 24, 6 * 24]


def test_a_carried_state_and_a_pool_of_features_are_refused(tmp_path):
    """A state of one step's random features would be read by those of another: the run does not begin."""
    config = small_run(tmp_path)
    mixer = config.model.mixer.model_copy(update={"pool": 20})
    config = config.model_copy(update={"model": small_config(mixer=mixer.model_dump())})
    with pytest.raises(ConfigError, match=r"from a pool of 20 at every step.*set data\.stateful = false, or pool = 0"):
        train(config)
    alone = config.model_copy(update={"data": config.data.model_copy(update={"stateful": False})})
    assert train(alone)["step"] == 6


def test_sigma_learns_at_a_rate_of_its_own():
    """The sigmas, and they alone, have the step size that the optimiser is told; a model without any is refused."""
    config = OptimiserConfig(sigma_learning_rate=0.5)
    model = build_model(small_config())
    (optimiser,) = build_optimisers(model, config)
    rates = {id(p): group["peak_lr"] for group in optimiser.param_groups for p in group["params"]}
    assert {name: rates[id(p)] for name, p in model.named_parameters()} == {
        name: 0.5 if name.endswith("sigma_H1K") else config.learning_rate for name, _ in model.named_parameters()
    }
    with pytest.raises(ConfigError, match="the model learns no sigma"):
        build_optimisers(build_model(small_config("softmax")), config)


def test_segments_stand_alone_where_the_run_is_not_stateful(tmp_path, monkeypatch):
    """With stateful = false every step begins with the empty state, and validation sees no more than a segment."""
    config, before, contexts = small_run(tmp_path), [], []
    config = config.model_copy(
        update={
            "data": config.data.model_copy(update={"stateful": False}),
            "model": small_config(kind="softmax"),
        }
    )
    hidden, score = LanguageModel.hidden, language_task.score_tokens

    def seen(self, tokens_BL, ops=None, state=None):
        if self.training:
            before.append(state.position_B.tolist())
        return hidden(self, tokens_BL, ops, state)

    def scored(model, tokens, num_bytes, context, share):
        contexts.append(context)
        return score(model, tokens, num_bytes, context, share)

    monkeypatch.setattr(LanguageModel, "hidden", seen)
    monkeypatch.setattr(language_task, "score_tokens", scored)
    train(config)
    assert before == [[0, 0]] * config.run.steps
    assert contexts == [24, 24]


def test_folders_of_other_runs_are_left_alone(tmp_path):
    """A folder in use is refused without --resume, and a resume under another configuration names the section."""
    config = small_run(tmp_path)
    train(config)
    before = (tmp_path / "run" / "config.json").read_text()
    with pytest.raises(ConfigError, match="holds a run already; give --resume"):
        train(config)
    other = config.model_copy(update={"optimiser": config.optimiser.model_copy(update={"learning_rate": 1.0})})
    with pytest.raises(ConfigError, match=r"was started with another \[optimiser\] section"):
        train(other, resume=True)
    assert (tmp_path / "run" / "config.json").read_text() == before
    last = train(config, resume=True)
    assert last["step"] == 6


@pytest.mark.parametrize(
    ("section", "changes", "words"),
    [
        ("data", {"tokeniser": Path("nowhere")}, "nowhere"),
        ("data", {"train": (Path("missing.txt"),)}, "missing.txt cannot be read"),
        ("data", {"validation": Path("missing.txt")}, "missing.txt cannot be read"),
        ("data", {"validation": Path("/dev/null")}, "validation text /dev/null is empty"),
        ("data", {"batch": 10_000}, "one batch of 10000 segments"),
        ("data", {"validation": Path("documents.jsonl")}, "documents.jsonl is .jsonl; needed is one text"),
        ("data", {"validation": Path("cut.txt.gz")}, "validation text .*cut.txt.gz cannot be read"),
        ("model", {"vocab_size": 300}, "model.vocab_size is 300: .* has 257 tokens"),
        ("model", {"positions": LearnedPositions(length=99)}, "streams with a carried state have no end"),
    ],
)
def test_a_start_that_fails_leaves_the_folder_free(tmp_path, section, changes, words):
    """What is missing or does not fit is named, and the corrected run starts in the same folder."""
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"text" * 999)[:20])
    config = small_run(tmp_path, steps=1)
    bad = config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})
    with pytest.raises(ValueError, match=words):
        train(bad)
    train(config)


def test_input_that_proves_unusable_at_the_first_step_leaves_the_folder_free(tmp_path, monkeypatch):
    """Where the first step refuses its input there is nothing to go on with, and the corrected run starts there."""

    def refuse(self, step, rows):
        raise InputError("the sequence has 4 tokens")

    config = small_run(tmp_path, steps=1)
    with monkeypatch.context() as patch, pytest.raises(InputError, match="has 4 tokens"):
        patch.setattr(LanguageTask, "loss", refuse)
        train(config)
    assert train(config)["step"] == 1


def test_a_folder_is_trained_into_by_one_process(tmp_path):
    """While a run goes on a second one is refused, with --resume as well; afterwards the folder is free."""
    config = small_run(tmp_path, steps=4, checkpoint_every=2)
    refused = []

    def meanwhile(metrics):
        with pytest.raises(ConfigError, match="another process trains into"):
            train(config, resume=True)
        refused.append(metrics["step"])

    train(config, report=meanwhile)
    assert refused
    assert train(config, resume=True)["step"] == 4


def test_the_validation_text_may_be_gzipped(tmp_path):
    """A gzipped text has the score of the text itself, not of its compressed bytes."""
    config = small_run(tmp_path, steps=1)
    (tmp_path / "prose.txt.gz").write_bytes(gzip.compress((tmp_path / "prose.txt").read_bytes()))
    data = config.data.model_copy(update={"validation": Path("prose.txt.gz")})
    run = config.run.model_copy(update={"folder": tmp_path / "gzipped"})
    scores = [train(each)["bits_per_byte"] for each in (config, config.model_copy(update={"data": data, "run": run}))]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("line", [b"\xff", b"[]", b"{}", b'{"step": "3"}', b"\0\0"])
def test_a_damaged_line_of_metrics_is_named(tmp_path, line):
    """A resume over metrics.jsonl with a line that is no report names file and line."""
    config = small_run(tmp_path, steps=2)
    train(config)
    (config.run.folder / "metrics.jsonl").write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl, line 2 is no report"):
        train(config, resume=True)


def test_folders_beside_checkpoints_are_no_checkpoints(tmp_path):
    """A copy that somebody keeps under a name like a checkpoint's is passed over."""
    config = small_run(tmp_path, steps=2)
    train(config)
    for name in ("step-000002.bak", "step-old"):
        (config.run.folder / "checkpoints" / name).mkdir()
    (config.run.folder / "checkpoints" / "step-000009").write_text("")
    assert train(config, resume=True)["step"] == 2


def test_recomputed_activations_change_no_bit_of_a_run(tmp_path):
    """With activation_checkpointing every layer runs twice per step, and the last checkpoint is bitwise the same."""
    small_run(tmp_path)  # writes the text
    runs = [small_run(tmp_path, folder=tmp_path / str(on), activation_checkpointing=on) for on in (False, True)]
    calls = []
    with register_module_forward_pre_hook(lambda module, _: calls.append(1)):
        counts = []
        for run in runs:
            calls.clear()
            train(run.model_copy(update={"data": run.data.model_copy(update={"validation": None})}))
            counts.append(len(calls))
    want, got = (_last_tensors(run) for run in runs)
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    assert counts[1] > 1.5 * counts[0]


def test_muon_under_a_torch_without_it_is_refused(tmp_path, monkeypatch):
    """A recipe for Muon says which torch it needs where torch is older."""
    monkeypatch.delattr(torch.optim, "Muon")
    config = small_run(tmp_path)
    muon = config.model_copy(update={"optimiser": config.optimiser.model_copy(update={"kind": "muon"})})
    with pytest.raises(ConfigError, match=r"use torch 2\.9 or newer, or adamw"):
        train(muon)


def test_a_run_folder_that_cannot_be_used_is_named(tmp_path):
    """A run folder under a file, or with a config.json that is something else, is a ConfigError."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.folder .* cannot be used"):
        train(small_run(tmp_path, folder=tmp_path / "file" / "run"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not the configuration of a run"):
        train(small_run(tmp_path), resume=True)


@pytest.mark.parametrize("where", ["loss", "gradients"])
def test_a_run_that_blows_up_stops_at_that_step(tmp_path, monkeypatch, where):
    """A loss or gradient that is not finite stops the run with the step, and the last checkpoint is sound."""
    whole = LanguageTask.loss

    def loss(self: LanguageTask, step: int, rows: slice) -> torch.Tensor:
        value = whole(self, step, rows)
        if step == 4 and where == "loss":
            return value * float("nan")
        if step == 4:
            value.register_hook(lambda grad: grad * float("inf"))
        return value

    monkeypatch.setattr(LanguageTask, "loss", loss)
    with pytest.raises(EngineError, match=rf"the .*{where} is (nan|inf) at step 4: "):
        train(small_run(tmp_path, checkpoint_every=1))
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert [path.name for path in checkpoints] == ["step-000003", "step-000004"]
    assert all(bool(t.isfinite().all()) for t in load_file(checkpoints[-1] / "model.safetensors").values())
    assert not (tmp_path / "run" / "model").exists()


def test_damaged_checkpoints_are_named(tmp_path):
    """A checkpoint with a file missing, cut off or of another shape is refused with its name, and the way out works."""
    config = small_run(tmp_path)
    train(config)
    newest = tmp_path / "run" / "checkpoints" / "step-000006"
    sound = (newest / "optimiser.safetensors").read_bytes()
    (newest / "optimiser.safetensors").write_bytes(sound[:100])
    with pytest.raises(ConfigError, match=r"step-000006 is damaged: .*; delete it to resume from an older one"):
        train(config, resume=True)
    shutil.rmtree(newest)
    assert train(config, resume=True)["step"] == 6


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("9.0.exp_avg", torch.zeros(1)), ("0.0.momentum", torch.zeros(1)), ("0.1.momentum_buffer", torch.zeros(3, 3))],
)
def test_the_state_of_another_optimiser_is_refused(tmp_path, name, tensor):
    """A checkpoint with more of an optimiser's state than there is here, or of another shape, is refused."""
    config = small_run(tmp_path, steps=1)
    train(config)
    path = config.run.folder / "checkpoints" / "step-000001" / "optimiser.safetensors"
    save_file({**load_file(path), name: tensor}, path)
    with pytest.raises(ConfigError, match="step-000001 was written by another optimiser"):
        train(config, resume=True)


def test_a_run_begins_with_the_weights_it_was_given(tmp_path):
    """The model of a run is the folder's, bit for bit; one that differs from [model] is refused."""
    write_small_folder(tmp_path / "first", seed=3)
    config = small_run(tmp_path, begin_from=tmp_path / "first")
    want = load_model(tmp_path / "first").state_dict()
    got = first_model(config.model, config.run.begin_from).state_dict()
    assert all(torch.equal(got[name], tensor) for name, tensor in want.items())
    write_small_folder(tmp_path / "second", kind="softmax")
    with pytest.raises(ConfigError, match=r"is not the one of \[model\]; leave that section out"):
        train(small_run(tmp_path, begin_from=tmp_path / "second"))


def test_a_run_of_an_older_version_goes_on(tmp_path):
    """A run folder whose config.json lacks keys that have defaults is resumed as if it had them."""
    config = small_run(tmp_path, steps=3)
    train(config)
    path = tmp_path / "run" / "config.json"
    values = json.loads(path.read_text())
    del values["run"]["begin_from"], values["model"]["block"], values["model"]["readout"]
    path.write_text(json.dumps(values))
    assert train(config, resume=True)["step"] == 3

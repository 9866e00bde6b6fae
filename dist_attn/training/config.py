"""The training configuration: one TOML file, one frozen value, unknown keys refused."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from dist_attn.errors import ConfigError
from dist_attn.model_config.folder import read_any_config
from dist_attn.model_config.language_model import expand_preset
from dist_attn.model_config.model import AnyModel, ModelConfig, register_model
from dist_attn.model_config.refusal import key_of, nearest_key, refusal
from dist_attn.shipped import SHIPPED, resolve_model_folder
from dist_attn.training.datasets.config import AnyData, DataConfig
from dist_attn.training.kinds import TASKS, TaskKind, register_task
from dist_attn.wire.choices import Precision, check_device

__all__ = [
    "EXECUTION",
    "ContrastConfig",
    "ObjectiveConfig",
    "OptimiserConfig",
    "RunConfig",
    "TrainingConfig",
    "read_config",
]

EXAMPLES = {
    "model": '[model] with the line preset = "tiny"',
    "model.vocab_size": "vocab_size = 4096",
    "model.hidden_size": "hidden_size = 256",
    "model.num_layers": "num_layers = 6",
    "model.mlp_size": "mlp_size = 1024",
    "model.mixer": 'mixer = { kind = "rfa_gate", hidden_size = 256, num_heads = 4, num_random = 64 }',
    "data": '[data] with the lines folder = "texts", train = ["a.txt"] and validation = "b.txt"',
    "data.folder": 'folder = "texts"',
    "data.train": 'train = ["a.txt", "b.txt"]',
    "data.validation": 'validation = "c.txt"',
    "run": '[run] with the lines folder = "runs/first" and steps = 1000',
    "run.folder": 'folder = "runs/first"',
    "run.steps": "steps = 1000",
}
"""An example to write for each needed key that is missing."""

Share = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class ObjectiveConfig(_Config):
    """The options of the objective; an option of another kind of model is refused."""

    # The share dropped in training behind every mixer and MLP, and of embeddings; for all models.
    dropout: Share = 0.0
    # The share of the probability that is spread over all answers; for classifiers and translation.
    label_smoothing: Share = 0.0
    # The share of the patches that is hidden, None: 0.75; for the masked auto-encoder.
    hidden_share: float | None = Field(default=None, gt=0, le=1)


class OptimiserConfig(_Config):
    """AdamW, or Muon for the matrices inside the blocks and AdamW for the rest; cosine decay after a warm-up."""

    kind: Literal["adamw", "muon"] = "adamw"
    learning_rate: Rate = 2e-3
    # Step size of the matrices under Muon, scaled to the RMS of an AdamW update; `learning_rate` then drives the rest:
    # embeddings, norms, gates and biases.
    matrix_learning_rate: Rate = 2e-3
    # Step size of the sigma that random features learn; None: `learning_rate`.
    sigma_learning_rate: Rate | None = None
    final_ratio: float = Field(default=0.05, ge=0, le=1)
    warmup_steps: int = Field(default=100, ge=0)
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    betas: tuple[Share, Share] = (0.9, 0.95)
    clip_norm: float = Field(default=1.0, gt=0)


class ContrastConfig(_Config):
    """The windows of chapters: two of one are drawn together. `data.batch` counts sets of `chapters` chapters."""

    chapters: int = Field(default=32, ge=2)
    # The books of a set, with equally many chapters of each.
    books: int = Field(default=4, ge=1)
    temperature: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    # The weight of the next token's cross entropy beside; 0 trains encodings alone.
    language_weight: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    # Tokens of the windows that validation looks for; training's are `data.segment`.
    validation_window: int = Field(default=512, ge=1)

    @model_validator(mode="after")
    def _books_divide(self) -> "ContrastConfig":
        if self.chapters % self.books:
            raise ValueError(f"chapters {self.chapters} must be a multiple of books {self.books}")
        return self


class RunConfig(_Config):
    """The folder and the length of a run, and when it reports, validates and saves."""

    folder: Path
    # A model folder whose weights the run begins with; its config.json stands for the section [model].
    begin_from: Path | None = None
    steps: int = Field(ge=1)
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    # The device, as for --device: auto, cpu, cuda (a GPU for each process) or cuda:N.
    device: Annotated[str, AfterValidator(check_device)] = "auto"
    # The precision of products; parameters, states and sums are float32. auto: float32 on CPUs.
    dtype: Precision = "bfloat16"
    threads: int = Field(default=1, ge=1, le=1024)
    # Layers keep their inputs only and compute the rest again in the backward pass: less memory, a third more time.
    activation_checkpointing: bool = False
    # The mesh of the processes that were started: the ranks that divide the rows of a batch, times the ranks that share
    # each sequence. What is left out follows from the number of processes; with neither, all divide rows.
    data_ranks: int | None = Field(default=None, ge=1)
    sequence_ranks: int | None = Field(default=None, ge=1)
    # Every rank keeps a share of the parameters, their gradients and the optimiser's state (FSDP) and gathers a layer
    # when it needs it: less memory, more exchanges, the same result. For torchrun and AdamW.
    shard_parameters: bool = False
    # The seconds that a rank waits for the others before it gives up; rank 0 tokenises and saves meanwhile.
    wait_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    log_every: int = Field(default=20, ge=1)
    evaluate_every: int = Field(default=500, ge=1)
    checkpoint_every: int = Field(default=250, ge=1)
    # The number of newest checkpoints that stay; an average of the last ones needs them.
    keep_checkpoints: int = Field(default=2, ge=1)
    # The run ends after so many validations in a row that were not better than the best by more than `min_delta`.
    patience: int | None = Field(default=None, ge=1)
    min_delta: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    # The weights of the model folder. The best checkpoint by validation is kept in either case.
    export: Literal["last", "best"] = "last"
    # Files of the run folder beside metrics.jsonl: events for TensorBoard, and a picture of the losses.
    tensorboard: bool = True
    plot: bool = True

    @model_validator(mode="before")
    @classmethod
    def _takes_bf16(cls, values: Any) -> Any:
        """Take `bf16 = true` or `false`, as configurations of earlier runs have it, for `dtype`."""
        if not isinstance(values, dict) or not isinstance(values.get("bf16"), bool) or "dtype" in values:
            return values
        others = {key: value for key, value in values.items() if key != "bf16"}
        return {**others, "dtype": "bfloat16" if values["bf16"] else "float32"}


# Keys that may change when a run goes on: they say where and by how many ranks the work is done, not what it computes.
EXECUTION = frozenset(
    {
        "activation_checkpointing",
        "data_ranks",
        "device",
        "export",
        "plot",
        "sequence_ranks",
        "shard_parameters",
        "tensorboard",
        "threads",
        "wait_seconds",
    }
)


class LoraConfig(_Config):
    """Low-rank adapters of peft, which are trained in the place of the linear layers that they lie beside."""

    rank: int = Field(default=16, ge=1)
    # The sum of a layer's output and `alpha` / `rank` times its adapter's is what goes on.
    alpha: int = Field(default=32, ge=1)
    # The layers, by the ends of their names; "all-linear": all but the read-out.
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"


class FolderConfig(ModelConfig):
    """A model of transformers, in the folder that it was downloaded to."""

    kind: Literal["folder"] = "folder"
    folder: Path
    # With this section adapters are trained, and the folder's weights stay as they are.
    lora: LoraConfig | None = None


def _of_folder(values: dict[str, Any]) -> dict[str, Any]:
    """Fill in what goes without saying where the model is that of a folder: its tokens, and steps of fine-tuning."""
    filled = {"optimiser": {}} | values
    for section, own in (
        ("data", {"tokeniser": values["model"].get("folder"), "stateful": False}),
        ("optimiser", {"learning_rate": 1e-5 if values["model"].get("lora") is None else 1e-4}),
    ):
        if isinstance(filled.get(section), dict) and filled[section].get("kind") in (None, "text", "adamw"):
            filled[section] = own | filled[section]
    return filled


def _check_folder(config: "TrainingConfig") -> None:
    """Raise ValueError for options that are of this project's own models."""
    for key, given, instead in (
        ("run.begin_from", config.run.begin_from is not None, "the run begins with the weights of model.folder"),
        ("objective.dropout", config.objective.dropout > 0, "nothing is dropped in such a model"),
        ("optimiser.kind muon", config.optimiser.kind == "muon", "take adamw"),
    ):
        if given:
            raise ValueError(f"{key} is for models of this project, and model.folder is of transformers: {instead}")
    if config.run.shard_parameters and cast(FolderConfig, config.model).lora is not None:
        raise ValueError("run.shard_parameters does not go with model.lora, whose adapters are small: leave one out")


def _takes(task: TaskKind, data: str) -> bool:
    """Return whether a task reads a kind of data; one of labelled texts reads all kinds of them."""
    labelled = "labelled_text" in task.data and DataConfig.registry.find(data).texts is not None
    return data in task.data or labelled


class TrainingConfig(_Config):
    """Everything a run depends on; it is written into the run folder and compared on resume."""

    model: AnyModel
    data: AnyData
    objective: ObjectiveConfig = ObjectiveConfig()
    optimiser: OptimiserConfig = OptimiserConfig()
    # With this section the run trains encodings of chapters.
    contrast: ContrastConfig | None = None
    run: RunConfig

    @model_validator(mode="before")
    @classmethod
    def _kinds(cls, values: Any) -> Any:
        """Make sections that name no kind those of a language model, or of a folder if it names one, and of text."""
        if not isinstance(values, dict):
            return values
        filled = dict(values)
        for section, kind in (("model", "language_model"), ("data", "text")):
            if isinstance(filled.get(section), dict):
                kind = "folder" if section == "model" and "folder" in filled[section] else kind
                filled[section] = {"kind": kind, **filled[section]}
        model = filled.get("model")
        return _of_folder(filled) if isinstance(model, dict) and model.get("kind") == "folder" else filled

    @model_validator(mode="after")
    def _fits(self) -> "TrainingConfig":
        model, data, objective = self.model.kind, self.data.kind, self.objective
        if model not in TASKS.names():
            raise ValueError(f"a {model} is not trained here; model.kind is one of {', '.join(TASKS.names())}")
        task = TASKS.find(model)
        if not _takes(task, data):
            raise ValueError(f"model.kind {model} trains on data.kind {' or '.join(task.data)}; given is {data}")
        if objective.label_smoothing and "label_smoothing" not in task.objective:
            raise ValueError(f"objective.label_smoothing has no meaning for a {model}; leave it out")
        if objective.hidden_share is not None and "hidden_share" not in task.objective:
            raise ValueError(f"objective.hidden_share has no meaning for a {model}; leave it out")
        if task.check is not None:
            task.check(self)
        if self.contrast is not None and model != "language_model":
            raise ValueError(f"a [contrast] section has no meaning for a {model}; leave it out")
        if self.run.shard_parameters and self.optimiser.kind != "adamw":
            raise ValueError(
                f"run.shard_parameters does not go with optimiser.kind = {self.optimiser.kind}, which works on whole "
                "matrices: take adamw, or leave the parameters whole"
            )
        return self


register_task("language_model", TaskKind("dist_attn.training.chapters:language_task", ("text",)))
register_model(FolderConfig, "dist_attn.training.folder_task:read_model")
register_task("folder", TaskKind("dist_attn.training.folder_task:FolderTask", ("text",), check=_check_folder))
register_task(
    "text_classifier",
    TaskKind("dist_attn.training.text_tasks:TextClassificationTask", ("labelled_text",), ("label_smoothing",)),
)


def read_config(path: Path, overrides: Sequence[str] = (), model: str | None = None) -> TrainingConfig:
    """Read the configuration of a TOML file, with `section.key=value` overrides (values as TOML, or plain words).

    A `model.preset` stands for the sizes of that name, where the model's section says no others. `data.tokeniser` and
    `run.begin_from` may be the name of a shipped model. `model`, or else `model.folder`, is a folder or a name as
    `--model` takes them; a section [model] of another kind gives way to it. Paths are relative to the current folder.

    Raises: ConfigError naming the file and the key.
    """
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    for override in overrides:
        _apply(values, override)
    section = values.get("model")
    if model is not None:
        section = values["model"] = {**(section if _names_folder(section) else {}), "folder": model}
    if _names_folder(section):
        section["folder"] = str(resolve_model_folder(section["folder"]))
    elif isinstance(section, dict) and section.get("kind", "language_model") == "language_model":
        values["model"] = expand_preset(section)
    _find_shipped(values)
    _take_model(values)
    try:
        return TrainingConfig.model_validate(values)
    except ValidationError as error:
        first = _first_error(error)
        key, words = refusal(error, values)
        if first["type"] == "extra_forbidden":
            nearest = nearest_key(TrainingConfig, first["loc"])
            words = "there is no such key" + (f"; did you mean {nearest}?" if nearest else "")
            key = key_of(TrainingConfig, first["loc"], unknown=True)
        if key in EXAMPLES and first["type"] == "missing":
            words += f"; for example: {EXAMPLES[key]}"
        raise ConfigError(f"{path}: {key}{': ' if key else ''}{words}") from None


def _names_folder(section: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(section, dict) and isinstance(section.get("folder"), str)


def _first_error(error: ValidationError) -> Any:
    """Pick the first error; where a key is missing, an unknown one of the same section says more: a slip of the pen."""
    first, *others = error.errors()
    unknown = (e for e in others if e["type"] == "extra_forbidden" and e["loc"][:-1] == first["loc"][:-1])
    return next(unknown, first) if first["type"] == "missing" else first


def _find_shipped(values: dict[str, Any]) -> None:
    """Put the folders of shipped models in the place of their names; a path that exists comes first."""
    for section, key in (("data", "tokeniser"), ("run", "begin_from")):
        keys = values.get(section)
        name = keys.get(key) if isinstance(keys, dict) else None
        if isinstance(name, str) and not Path(name).exists() and (SHIPPED / name / "config.json").is_file():
            values[section][key] = str(SHIPPED / name)


def _take_model(values: dict[str, Any]) -> None:
    """Put the model that a run begins from in the place of a [model] section that is not there."""
    run = values.get("run")
    begin_from = run.get("begin_from") if isinstance(run, dict) else None
    if isinstance(begin_from, str) and "model" not in values:
        values["model"] = read_any_config(Path(begin_from)).model_dump()


def _apply(values: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key:
        raise ConfigError(f"override {override!r} needs the form section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"override {override!r}: {section!r} is not a section")
    values[last] = value

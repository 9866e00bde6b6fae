"""The training configuration: one TOML file, one frozen value, unknown keys refused."""

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dist_attn.checkpoints import read_config as read_model_config
from dist_attn.errors import ConfigError
from dist_attn.models import LanguageModelConfig
from dist_attn.models.presets import expand_preset

__all__ = ["EXECUTION", "DataConfig", "OptimiserConfig", "RunConfig", "TrainingConfig", "read_config"]


Share = Annotated[float, Field(ge=0, lt=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class DataConfig(_Config):
    """What is read: text files (relative to `folder`), cut into `batch` streams of segments with carried state."""

    folder: Path = Path()
    train: tuple[Path, ...] = Field(min_length=1)
    validation: Path | None = None
    # Bytes of the validation file that are scored during training; the whole file is for `evaluate`.
    validation_bytes: int = Field(default=300_000, ge=1)
    tokeniser: Path
    batch: int = Field(default=8, ge=1)
    segment: int = Field(default=512, ge=1)
    # False: every segment begins with the empty state, in training and in the validation score. For mixers whose state
    # grows with every token (softmax), or that are to learn nothing beyond a segment.
    stateful: bool = True

    # The rows of a step are worked on in so many parts, one after the other: less memory, the same result.
    micro_batches: int = Field(default=1, ge=1)

    @property
    def train_files(self) -> tuple[Path, ...]:
        """The training texts, found from `folder`."""
        return tuple(self.folder / path for path in self.train)

    @property
    def validation_file(self) -> Path | None:
        """The validation text, found from `folder`."""
        return None if self.validation is None else self.folder / self.validation


class OptimiserConfig(_Config):
    """AdamW, or Muon for the matrices inside the blocks and AdamW for the rest; cosine decay after a warm-up."""

    kind: Literal["adamw", "muon"] = "adamw"
    learning_rate: Rate = 2e-3
    # Step size of the matrices under Muon, scaled to the RMS of an AdamW update; `learning_rate` then drives the rest:
    # embeddings, norms, gates and biases.
    matrix_learning_rate: Rate = 2e-3
    final_ratio: float = Field(default=0.05, ge=0, le=1)
    warmup_steps: int = Field(default=100, ge=0)
    weight_decay: float = Field(default=0.1, ge=0, allow_inf_nan=False)
    betas: tuple[Share, Share] = (0.9, 0.95)
    clip_norm: float = Field(default=1.0, gt=0)


class RunConfig(_Config):
    """Where the run lives and when it looks around."""

    folder: Path
    # A model folder whose weights the run begins with; its config.json stands for the section [model].
    begin_from: Path | None = None
    steps: int = Field(ge=1)
    seed: int = 0
    bf16: bool = True
    threads: int = Field(default=1, ge=1)
    # Layers keep their inputs only and compute the rest again in the backward pass: less memory, a third more time.
    activation_checkpointing: bool = False
    # The mesh of the processes that were started: the ranks that divide the rows of a batch, times the ranks that share
    # each sequence. What is left out follows from the number of processes; with neither, all divide rows.
    data_ranks: int | None = Field(default=None, ge=1)
    sequence_ranks: int | None = Field(default=None, ge=1)
    # How long a rank waits for the others before it gives up, in seconds; rank 0 tokenises and saves meanwhile.
    wait_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    log_every: int = Field(default=20, ge=1)
    evaluate_every: int = Field(default=500, ge=1)
    checkpoint_every: int = Field(default=250, ge=1)
    # So many of the newest checkpoints stay; an average of the last ones needs them.
    keep_checkpoints: int = Field(default=2, ge=1)


# What may change when a run goes on: where and by how many it is worked on, not what it computes.
EXECUTION = frozenset({"activation_checkpointing", "threads", "data_ranks", "sequence_ranks", "wait_seconds"})


class TrainingConfig(_Config):
    """Everything a run depends on; it is written into the run folder and compared on resume."""

    model: LanguageModelConfig
    data: DataConfig
    optimiser: OptimiserConfig = OptimiserConfig()
    run: RunConfig


def read_config(path: Path, overrides: Sequence[str] = ()) -> TrainingConfig:
    """The configuration of a TOML file, with `section.key=value` overrides (values as TOML, or plain words).

    A `model.preset` stands for the sizes of that name, where the model's section says no others.

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
    if isinstance(values.get("model"), dict):
        values["model"] = expand_preset(values["model"])
    _take_model(values)
    try:
        return TrainingConfig.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {key}: {first['msg']}") from None


def _take_model(values: dict[str, Any]) -> None:
    """Put the model that a run begins from in the place of a [model] section that is not there."""
    run = values.get("run")
    begin_from = run.get("begin_from") if isinstance(run, dict) else None
    if isinstance(begin_from, str) and "model" not in values:
        values["model"] = read_model_config(Path(begin_from)).model_dump()


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

"""Checkpoints of a run: everything the next step depends on, in safetensors and JSON, renamed into place whole."""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from dist_attn.errors import ConfigError

__all__ = ["latest_checkpoint", "read_weights", "restore", "save"]

FILES = ("model", "optimiser", "carried_state")


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimisers: Sequence[torch.optim.Optimizer],
    carried: Mapping[str, torch.Tensor],
    keep: int,
) -> None:
    """Write `folder/step-NNNNNN`; the newest `keep` checkpoints stay. A failure leaves those that were there."""
    final = folder / f"step-{step:06d}"
    temporary = folder / f".step-{step:06d}.writing"
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        save_file({n: t.contiguous() for n, t in model.state_dict().items()}, temporary / "model.safetensors")
        save_file(dict(_optimiser_tensors(optimisers)), temporary / "optimiser.safetensors")
        save_file({n: t.contiguous() for n, t in carried.items()}, temporary / "carried_state.safetensors")
        (temporary / "progress.json").write_text(json.dumps({"step": step}))
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
    except (OSError, SafetensorError):
        shutil.rmtree(temporary, ignore_errors=True)  # on a full disk it is in the way
        raise
    for old in _checkpoints(folder)[:-keep]:
        shutil.rmtree(old)


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint, if there is one."""
    return next(reversed(_checkpoints(folder)), None)


def read_weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The weights of the model, and its buffers, as the checkpoint has them.

    Raises: ConfigError for a damaged checkpoint.
    """
    return _read(checkpoint, "model")


def restore(
    checkpoint: Path, model: nn.Module, optimisers: Sequence[torch.optim.Optimizer]
) -> tuple[int, dict[str, torch.Tensor]]:
    """Load a checkpoint into model and optimisers; its step, and what the task carries.

    Raises: ConfigError when the checkpoint belongs to another model or optimiser.
    """
    weights, tensors, carried = (_read(checkpoint, name) for name in FILES)
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:
        line = str(error).splitlines()[-1].strip()
        raise ConfigError(f"checkpoint {checkpoint} is of another model: {line}") from None
    for index, optimiser in enumerate(optimisers):
        _restore_optimiser(optimiser, index, tensors, checkpoint)
    return _step(checkpoint), carried


def _read(checkpoint: Path, name: str) -> dict[str, torch.Tensor]:
    try:
        return load_file(checkpoint / f"{name}.safetensors")
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"checkpoint {checkpoint} is damaged: {error}; delete it to resume from an older one"
        ) from None


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"), key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _parameters(optimiser: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimiser.param_groups for p in group["params"]]


def _optimiser_tensors(optimisers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, torch.Tensor]]:
    for index, optimiser in enumerate(optimisers):
        for number, parameter in enumerate(_parameters(optimiser)):
            for key, value in optimiser.state[parameter].items():
                yield f"{index}.{number}.{key}", torch.as_tensor(value).contiguous()


def _restore_optimiser(
    optimiser: torch.optim.Optimizer, index: int, tensors: dict[str, torch.Tensor], checkpoint: Path
) -> None:
    for number, parameter in enumerate(_parameters(optimiser)):
        prefix = f"{index}.{number}."
        own = {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}
        if not own:
            raise ConfigError(f"checkpoint {checkpoint} was written by another optimiser; start a new run folder")
        optimiser.state[parameter] = own

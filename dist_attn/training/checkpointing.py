"""Checkpoints of a run: everything the next step depends on, in safetensors and JSON, renamed into place whole.

Where every rank has all weights, rank 0 writes `model.safetensors` and `optimiser.safetensors`. Where they are sharded,
each rank writes its shards with `torch.distributed.checkpoint`, as `model-00002-of-00004.safetensors`, with the place
of each shard in the file's header. Both can be read by any number of ranks, and nothing is unpickled: the ranks do not
even send each other plans, since each of them knows its own shards.
"""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dist_attn.comm.call import first_line
from dist_attn.errors import ConfigError, EngineError
from dist_attn.training.mesh import Mesh
from dist_attn.training.parallel import is_sharded

__all__ = ["latest_checkpoint", "load_checkpoint_weights", "read_weights", "restore", "save"]


def save(
    folder: Path,
    step: int,
    model: nn.Module,
    optimisers: Sequence[torch.optim.Optimizer],
    carried: Mapping[str, Tensor],
    keep: int,
    mesh: Mesh,
) -> None:
    """Write `folder/step-NNNNNN`, on all ranks together; the newest `keep` checkpoints stay.

    Raises: OSError where this rank and rank 0 cannot write, EngineError where another one cannot; the checkpoints that
        are there stay as they are.
    """
    final = folder / f"step-{step:06d}"
    temporary = folder / f".step-{step:06d}.writing"

    def begin() -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)

    def write() -> None:
        parts = {"model": dict(model.state_dict()), "optimiser": dict(_optimiser_tensors(optimisers))}
        for part, tensors in parts.items():
            _write(temporary, part, tensors, mesh)
        if mesh.is_first:
            save_file({n: t.contiguous() for n, t in carried.items()}, temporary / "carried_state.safetensors")
            (temporary / "progress.json").write_text(json.dumps({"step": step}))

    def finish() -> None:
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        for old in _checkpoints(folder)[:-keep]:
            shutil.rmtree(old)

    steps = ((begin, mesh.is_first), (write, True), (finish, mesh.is_first))
    try:
        for work, wanted in steps:
            mesh.together(partial(_written, work if wanted else None))
    except (EngineError, OSError):
        if mesh.is_first:
            shutil.rmtree(temporary, ignore_errors=True)  # on a full disk it is in the way
        raise


def latest_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint, if there is one."""
    return next(reversed(_checkpoints(folder)), None)


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Read the whole weights of the model, and its buffers, from a checkpoint, sharded or not.

    Raises: ConfigError for a damaged checkpoint.
    """
    with _readable(checkpoint):
        files = _files(checkpoint, "model")
        if len(files) == 1:
            return load_file(files[0])
        from dist_attn.training.sharded_files import read_whole

        return read_whole(files)


def restore(
    checkpoint: Path, model: nn.Module, optimisers: Sequence[torch.optim.Optimizer]
) -> tuple[int, dict[str, Tensor]]:
    """Load a checkpoint into model and optimisers, sharded or not; returns its step, and what the task carries.

    Raises: ConfigError when the checkpoint belongs to another model or optimiser, or is damaged.
    """
    load_checkpoint_weights(model, checkpoint)
    with _readable(checkpoint):
        sizes = _sizes(checkpoint, "optimiser")
        tensors: dict[str, Tensor] = {}
        for index, optimiser in enumerate(optimisers):
            state = _optimiser_state(optimiser, index, sizes, checkpoint)
            for parameter, own in state.items():
                optimiser.state[parameter] = {key: tensor for _, key, tensor in own}
                tensors |= {name: tensor for name, _, tensor in own}
        if tensors.keys() != sizes.keys():
            raise _of_another_optimiser(checkpoint)
        _read(checkpoint, "optimiser", tensors)
        carried = load_file(checkpoint / "carried_state.safetensors")
    return _step(checkpoint), carried


def load_checkpoint_weights(model: nn.Module, checkpoint: Path) -> None:
    """Fill a model, sharded or not, with the weights of a checkpoint, sharded or not.

    Raises: ConfigError when it belongs to another model or is damaged.
    """
    own = model.state_dict()
    with _readable(checkpoint):
        sizes = _sizes(checkpoint, "model")
    for name in sorted(own.keys() | sizes.keys()):
        if name not in own or name not in sizes or own[name].shape != sizes[name]:
            theirs = list(sizes[name]) if name in sizes else "nothing"
            ours = list(own[name].shape) if name in own else "nothing"
            raise ConfigError(f"checkpoint {checkpoint} is of another model: {name} is {theirs} there and {ours} here")
    with _readable(checkpoint), torch.no_grad():
        _read(checkpoint, "model", own)


def _checkpoints(folder: Path) -> list[Path]:
    named = [path for path in folder.glob("step-*") if path.name.removeprefix("step-").isdecimal() and path.is_dir()]
    return sorted(named, key=_step)


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step-"))


def _parameters(optimiser: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [p for group in optimiser.param_groups for p in group["params"]]


def _optimiser_tensors(optimisers: Sequence[torch.optim.Optimizer]) -> Iterator[tuple[str, Tensor]]:
    for index, optimiser in enumerate(optimisers):
        for number, parameter in enumerate(_parameters(optimiser)):
            for key, value in optimiser.state[parameter].items():
                yield (
                    f"{index}.{number}.{key}",
                    value if isinstance(value, Tensor) else torch.tensor(value, device="cpu"),
                )


def _optimiser_state(
    optimiser: torch.optim.Optimizer, index: int, sizes: Mapping[str, torch.Size], checkpoint: Path
) -> dict[nn.Parameter, list[tuple[str, str, Tensor]]]:
    """Make, for each parameter, a place for each tensor of its state, sharded as it is, with the name and the key.

    A parameter that no loss depends on has none.
    """
    keys = sorted({name.split(".", 2)[2] for name in sizes if name.startswith(f"{index}.")})
    if not keys:
        raise _of_another_optimiser(checkpoint)
    state = {}
    for number, parameter in enumerate(_parameters(optimiser)):
        own = [(name, key) for key in keys if (name := f"{index}.{number}.{key}") in sizes]
        # A parameter has a state for each of its elements, or one number for all of them.
        whole = len(own) in (0, len(keys))
        if not whole or any(sizes[name] not in (parameter.shape, torch.Size()) for name, _ in own):
            raise _of_another_optimiser(checkpoint)
        state[parameter] = [
            (
                name,
                key,
                torch.zeros_like(parameter, requires_grad=False)
                if sizes[name] == parameter.shape
                else torch.zeros(sizes[name], device="cpu"),
            )
            for name, key in own
        ]
    return state


def _of_another_optimiser(checkpoint: Path) -> ConfigError:
    return ConfigError(f"checkpoint {checkpoint} was written by another optimiser; start a new run folder")


def _write(folder: Path, part: str, tensors: dict[str, Tensor], mesh: Mesh) -> None:
    """Write this rank's share of one part of a checkpoint; rank 0 writes what is not sharded."""
    if any(map(is_sharded, tensors.values())):
        from dist_attn.training.sharded_files import write_shards

        own = {n: t for n, t in tensors.items() if mesh.is_first or is_sharded(t)}
        write_shards(folder / f"{part}-{mesh.world.rank + 1:05d}-of-{mesh.world.size:05d}.safetensors", own)
    elif mesh.is_first:
        save_file({n: t.contiguous() for n, t in tensors.items()}, folder / f"{part}.safetensors")


def _files(checkpoint: Path, part: str) -> list[Path]:
    whole = checkpoint / f"{part}.safetensors"
    shards = sorted(checkpoint.glob(f"{part}-*-of-*.safetensors"))
    if whole.exists() or not shards:
        return [whole]
    count = int(shards[0].stem.rpartition("-")[2])
    if len(shards) != count:
        raise FileNotFoundError(f"{len(shards)} of {count} files of its {part} are there")
    return shards


def _sizes(checkpoint: Path, part: str) -> dict[str, torch.Size]:
    """Read the shapes of the whole tensors of one part."""
    files = _files(checkpoint, part)
    if len(files) > 1:
        from dist_attn.training.sharded_files import whole_sizes

        return whole_sizes(files)
    with safe_open(files[0], framework="pt") as file:
        return {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def _read(checkpoint: Path, part: str, tensors: dict[str, Tensor]) -> None:
    """Fill tensors, whole or sharded, from files that hold them whole or sharded."""
    files = _files(checkpoint, part)
    if len(files) > 1 or any(map(is_sharded, tensors.values())):
        from dist_attn.training.sharded_files import read_shards

        read_shards(files, tensors)
        return
    for name, tensor in load_file(files[0]).items():
        tensors[name].copy_(tensor)


def _written(work: Callable[[], None] | None) -> None:
    """Do this rank's part of the work; an error of safetensors becomes an OSError."""
    try:
        if work is not None:
            work()
    except SafetensorError as error:
        raise OSError(first_line(error)) from error


@contextmanager
def _readable(checkpoint: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"checkpoint {checkpoint} is damaged: {first_line(error)}; delete it to resume from an older one"
        ) from None

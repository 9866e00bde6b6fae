"""`doctor --compile`: the kernels that models take on a GPU, compiled into Triton's cache on a machine that has none.

The layers run under a driver of Triton that names the GPU and launches nothing, so that kernels are asked for as they
are at work. A kernel is one more for each way in which lengths divide: by 16, or being 1.
"""

import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.commands.serve import beside_default
from dist_attn.commands.tables import byte_size, duration, stdout_console
from dist_attn.devices import Compute
from dist_attn.errors import ConfigError, InputError, extra_hint
from dist_attn.layout import SequenceLayout
from dist_attn.model_config.folder import read_any_config
from dist_attn.models import CausalModel, StreamEncoder, StreamingModel, build_model
from dist_attn.ops import LocalSequenceOps
from dist_attn.ops.gpu_record import recorded_names
from dist_attn.ops.kernel_target import KernelTarget, compiling_for
from dist_attn.settings import Settings, read_settings
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.shipped import resolve_model_folder

__all__ = ["compile_kernels"]

# By compute capability: some GPUs that have it, and the bytes of shared memory that a kernel may take there.
GPUS = {
    80: ("A100", 166_912),
    86: ("A40, RTX 30", 101_376),
    89: ("L4, L40, RTX 40", 101_376),
    90: ("H100, H200", 232_448),
    100: ("B200", 232_448),
    120: ("RTX 50", 101_376),
}
# Tokens, and chunks of 64 or 32 of them, that are one, a multiple of 16, or neither.
LENGTHS = (1, 20, 32, 50, 64, 500, 512, 1_000, 1_024)
TRAINED = (512, 1_024)
DOCUMENTS = (0, 5, 16)


def compile_kernels(architecture: str, config: Path | None, flags: Mapping[str, Any], *, as_json: bool) -> None:
    """Compile what `serve`, `encode`, `generate` and `train` take of Triton's kernels with these settings.

    Prints what was compiled, for what, and where it lies; one line on stderr for each length as it comes.

    Raises: ConfigError for an architecture that is not known, without Triton, and in its interpreter; what
        `read_settings` and `read_any_config` raise for settings and models.
    """
    capability = _capability(architecture)
    settings = beside_default(read_settings(config, environment=os.environ, flags=flags))
    names = [settings.model, *([settings.encoder.model] if settings.encoder.model else [])]
    folders = [resolve_model_folder(name) for name in names]
    dtype = torch.float32 if settings.engine.dtype == "float32" else torch.bfloat16
    began, found = time.monotonic(), _Found()
    _launch_nothing(capability, found)
    for folder in folders:
        for name in ("", *recorded_names()):  # without a record the tiles are those that fit any GPU
            with compiling_for(KernelTarget(capability, name)):
                _work(folder, Compute(torch.device("cpu"), dtype), settings.engine.ranks)
    report = _report(capability, folders, dtype, settings, found) | {"seconds": round(time.monotonic() - began, 1)}
    if as_json:
        print(json.dumps(report))
        return
    for line in _lines(report):
        stdout_console().print(line, soft_wrap=True, markup=False)


def _capability(architecture: str) -> int:
    named = re.fullmatch(r"sm_(\d+)a?", architecture)
    known = ", ".join(f"sm_{capability} ({gpus})" for capability, (gpus, _) in GPUS.items())
    if named is None or int(named[1]) not in GPUS:
        raise ConfigError(f"--compile is {architecture[:80]!r}; needed is one of {known}")
    if os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on"):
        raise ConfigError("TRITON_INTERPRET is set, and interpreted kernels are not compiled: unset it")
    if find_spec("triton") is None:
        raise ConfigError(f"--compile needs Triton, which is not installed; {extra_hint('gpu')}")
    return int(named[1])


class _Found:
    """Kernels by name: how many were compiled, and how many lay in the cache."""

    def __init__(self) -> None:
        self.compiled: Counter[str] = Counter()
        self.cached: Counter[str] = Counter()

    def note(self, *, src: Any, cache_hit: bool, **_: Any) -> None:
        """Triton tells of every kernel that it compiled or found."""
        (self.cached if cache_hit else self.compiled)[src.name] += 1


def _launch_nothing(capability: int, found: _Found) -> None:
    """Have Triton compile for GPUs of this capability from now on, and tell of it."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import DriverBase
    from triton.runtime import driver

    class Driver(DriverBase):  # type: ignore[misc]  # of Any, as all of Triton
        """The answers that Triton wants of a GPU before a launch; the launch itself does nothing."""

        launcher_cls: ClassVar[Any] = staticmethod(lambda src, metadata: lambda *given: None)

        def __init__(self) -> None:
            super().__init__()
            self.utils = self

        @classmethod
        def is_active(cls) -> bool:
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self) -> int:
            return 0

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_device_capability(self, device: int = 0) -> tuple[int, int]:
            return divmod(capability, 10)

        def get_device_properties(self, device: int) -> dict[str, int]:
            return {"max_shared_mem": GPUS[capability][1], "multiprocessor_count": 1, "warpSize": 32}

        def load_binary(self, *kernel: Any) -> tuple[None, int, int, int, int]:
            """Module, function, registers, spilled ones, and as many threads of a block as any GPU has."""
            return None, 0, 0, 0, 1_024

        def get_active_torch_device(self) -> torch.device:
            return torch.device("cpu")

        def map_python_to_cpp_type(self, ty: str) -> str:
            return ty

        def get_benchmarker(self) -> Any:
            raise NotImplementedError("nothing is launched, and so nothing is timed")

    # Both stay: without a GPU Triton has no other driver to go back to, and the process ends with the command.
    knobs.compilation.listener = found.note
    driver.set_active(Driver())


def _work(folder: Path, compute: Compute, ranks: int) -> None:
    """All that is done with a model on one GPU, and over ranks where the settings have several, by one layer a mixer.

    Weights are random, as kernels do not depend on them.
    """
    model = build_model(_shallow(read_any_config(folder)))
    if not isinstance(model, StreamingModel):
        raise ConfigError(f"{folder} is read whole; --compile takes models that read a stream")
    layout = SequenceLayout.from_lengths((512, 500))

    def tokens(length: int) -> torch.Tensor:
        return torch.zeros(1, length, dtype=torch.int64)

    def rank(comm: Communicator) -> None:
        with torch.inference_mode(), compute.autocast():
            model.hidden(tokens(layout.lengths[comm.rank]), ShardedSequenceOps(comm, layout))

    with compute.autocast():
        with torch.inference_mode():
            for length in LENGTHS:
                _tell(folder, f"texts of {length} tokens")
                model.hidden(tokens(length), LocalSequenceOps())
                if length > max(DOCUMENTS):
                    _read_packed(model, tokens(length))
            if isinstance(model, CausalModel):
                model.step(tokens(1)[:, 0], model.initial_state(1))
        for length in TRAINED:
            _tell(folder, f"training on {length} tokens")
            h_BLD, _ = model.hidden(tokens(length), LocalSequenceOps())
            h_BLD.sum().backward()
    if ranks > 1:
        _tell(folder, "ranks")
        run_simulated(rank, 2)


def _read_packed(model: StreamingModel, tokens_1L: torch.Tensor) -> None:
    """Several texts beside each other, as many tokens as these in all."""
    if isinstance(model, StreamEncoder):
        texts = tokens_1L[0].tensor_split(sorted([*DOCUMENTS[1:], tokens_1L.shape[1] // 2]))
        model.short_hidden([text for text in texts if 0 < len(text) <= model.grain])
        return
    with suppress(InputError):  # of mixers that take no packed documents
        model.hidden(tokens_1L, LocalSequenceOps(DOCUMENTS))


def _shallow(config: Any) -> Any:
    """The model with each of its mixers once."""
    found = {}
    for name, value in config:
        if name == "num_layers":
            found[name] = min(value, len(getattr(config.mixer, "pattern", [0])))
        elif name in ("context", "encoder", "sentence"):
            found[name] = _shallow(value)
    return config.model_copy(update=found)


def _tell(folder: Path, what: str) -> None:
    print(f"doctor: {folder.name}: {what}", file=sys.stderr, flush=True)


def _report(
    capability: int, folders: list[Path], dtype: torch.dtype, settings: Settings, found: _Found
) -> dict[str, Any]:
    import triton
    from triton import knobs

    cache = Path(knobs.cache.dir).absolute()
    return {
        "object": "kernels",
        "architecture": f"sm_{capability}",
        "models": [str(folder) for folder in folders],
        "dtype": str(dtype).removeprefix("torch."),
        "ranks": settings.engine.ranks,
        "compiled": dict(found.compiled),
        "cached": dict(found.cached),
        "cache": str(cache),
        "bytes": sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) if cache.exists() else 0,
        "triton": triton.__version__,
        "torch": torch.__version__,
    }


def _lines(report: Mapping[str, Any]) -> Iterator[str]:
    compiled, cached = report["compiled"], report["cached"]
    gpus = GPUS[int(report["architecture"].removeprefix("sm_"))][0]
    models = " and ".join(Path(folder).name for folder in report["models"])
    if not compiled and not cached:
        yield f"{models}: no layer takes a Triton kernel of this project, so there is nothing to compile"
        return
    for name in sorted(compiled | cached):
        yield f"{name:<36} {compiled.get(name, 0):>3} compiled {cached.get(name, 0):>3} were there"
    made, there = sum(compiled.values()), sum(cached.values())
    yield (
        f"{made} kernels compiled and {there} found for {report['architecture']} ({gpus}) in "
        f"{duration(report['seconds'])}: {models}, {report['dtype']}"
    )
    yield f"cache: {report['cache']}, {byte_size(report['bytes'])}; another folder with TRITON_CACHE_DIR"
    yield (
        f"it holds for Triton {report['triton']} and this version of dist-attn (compiled beside torch "
        f"{report['torch']}); another Triton finds nothing there, and compiles anew"
    )
    yield (
        "to carry it: pack the folder, unpack it under the same path (Triton's index has whole paths), and start with "
        f"TRITON_CACHE_DIR={report['cache']}. A node still needs a C compiler, for Triton's launcher"
    )

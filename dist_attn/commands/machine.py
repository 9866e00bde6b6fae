"""The findings of `doctor` that load and measure nothing: what this machine offers, asked of the system."""

import importlib.metadata
import os
import platform
import shutil
import sys
from pathlib import Path
from typing import Literal

import msgspec

from dist_attn.commands.tables import byte_size
from dist_attn.control.preflight import GPU_DRIVERS, why_not_listen
from dist_attn.errors import extra_hint
from dist_attn.host_limits import affine_cores, available_memory, compute_environment, core_quota, given_threads
from dist_attn.launchers import find_mpiexec


class MachineFinding(msgspec.Struct, frozen=True, kw_only=True):
    """A finding of `doctor`. `needed`: the service does not start without it. `measured`: figures named with units."""

    name: str
    status: Literal["ok", "missing", "broken", "unknown"]
    detail: str
    advice: str = ""
    needed: bool = True
    measured: dict[str, float] = {}

    @property
    def blocks(self) -> bool:
        """Return whether the service cannot start because of this."""
        return self.needed and self.status in ("missing", "broken")

    def line(self) -> str:
        """The finding in one line."""
        text = f"{self.detail}; {self.advice}" if self.advice else self.detail
        return f"{self.status:<8} {self.name:<10} {' '.join(text.split())}"


def ok(name: str, detail: str, **measured: float) -> MachineFinding:
    """A finding that something is there and works."""
    return MachineFinding(name=name, status="ok", detail=detail, measured=measured)


def missing(name: str, detail: str, advice: str, *, needed: bool = False) -> MachineFinding:
    """A finding that something is not here; `advice` says how to get it."""
    return MachineFinding(name=name, status="missing", detail=detail, advice=advice, needed=needed)


def broken(name: str, detail: str, advice: str, *, needed: bool = True) -> MachineFinding:
    """A finding that something is here and does not work; `advice` says what to do."""
    return MachineFinding(name=name, status="broken", detail=detail, advice=advice, needed=needed)


def unknown(name: str, detail: str, advice: str, *, needed: bool = True) -> MachineFinding:
    """A finding that something could not be tried in the time there was, so it may work."""
    return MachineFinding(name=name, status="unknown", detail=detail, advice=advice, needed=needed)


OLDEST_PYTHON = (3, 11)
FREE_DISK_BYTES = 1 << 30

# The packages that the service needs, by the names of pyproject.toml.
LIBRARIES = (
    "torch", "numpy", "safetensors", "tokenizers", "msgspec", "pyzmq", "fastapi", "uvicorn", "httptools", "pydantic",
    "prometheus-client", "structlog", "typer", "rich", "scipy", "aiosqlite", "jinja2", "httpx", "anyio",
)  # fmt: skip
# The packages and the purpose of each optional extra. [mpi] is looked at with the back ends.
EXTRAS: dict[str, tuple[tuple[str, ...], str]] = {
    "gpu": (("triton", "nvidia-cuda-nvcc"), "kernels for NVIDIA GPUs"),
    "fla": (("fla-core",), "flash-linear-attention's kernels for GPUs"),
    "arrow": (("pyarrow",), "encodings as Arrow and Parquet, corpora"),
    "documents": (("kreuzberg",), "the text of PDFs, web pages, EPUBs and DOCX files"),
    "ray": (("ray", "pyarrow"), "corpora on a Ray cluster"),
    "redis": (("redis",), "states shared by several controllers"),
    "obstore": (("obstore",), "states in the buckets of S3, GCS and Azure"),
    "hf": (("transformers", "gguf", "accelerate"), "downloaded models, and models in Hugging Face's Auto classes"),
    "lora": (("transformers", "peft"), "adapters trained beside downloaded models"),
    "structured": (("llguidance",), "answers held to a form"),
    "plot": (("matplotlib",), "pictures of training runs"),
    "tensorboard": (("tensorboard",), "training runs in TensorBoard"),
    "otel": (("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"), "traces"),
    "bench": (
        (
            "matplotlib",
            "transformers",
            "performer-pytorch",
            "flash-linear-attention",
            "xllamacpp",
            "gguf",
            "sentence-transformers",
        ),
        "peers of the benchmarks",
    ),
    "docs": (("mkdocs", "mkdocs-material", "mkdocstrings", "matplotlib"), "the documentation as a site"),
    "browser": (("playwright",), "tests of the web page"),
}


def check_python() -> MachineFinding:
    """Check the interpreter's version."""
    name = f"{platform.python_implementation()} {platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info >= OLDEST_PYTHON:
        return ok("python", name)
    needed = ".".join(map(str, OLDEST_PYTHON))
    return broken("python", f"{name}, needed is {needed} or newer", f"install Python {needed}")


def check_libraries() -> MachineFinding:
    """Check that the libraries which the service needs are installed, and tell their versions."""
    versions = {name: _version(name) for name in LIBRARIES}
    absent = [name for name, version in versions.items() if version is None]
    if absent:
        advice = f"`{sys.executable} -m pip install {' '.join(absent)}`, or `make setup`"
        return missing("libraries", f"not installed: {', '.join(absent)}", advice, needed=True)
    return ok("libraries", ", ".join(f"{name} {version}" for name, version in versions.items()))


def check_extras() -> list[MachineFinding]:
    """Look for the optional extras, each with what it is for."""
    findings = []
    for extra, (packages, purpose) in EXTRAS.items():
        versions = {name: _version(name) for name in packages}
        installed = ", ".join(f"{name} {version}" for name, version in versions.items())
        if all(versions.values()) and extra == "gpu" and not any(device.exists() for device in GPU_DRIVERS):
            findings.append(missing(extra, f"optional, {installed} is installed; no GPU", "models run on the CPU"))
        elif all(versions.values()):
            findings.append(ok(extra, installed))
        else:
            findings.append(missing(extra, f"optional, for {purpose}", extra_hint(extra)))
    return findings


def check_mpi() -> MachineFinding:
    """Look for mpi4py and an mpiexec."""
    version, program = _version("mpi4py"), find_mpiexec()
    if version is None or program is None:
        absent = " and ".join(name for name, present in (("mpi4py", version), ("mpiexec", program)) if present is None)
        return missing("mpi", f"optional back end, lacks {absent}", extra_hint("mpi"))
    return ok("mpi", f"mpi4py {version}, {program}")


def check_cores(ranks: int = 1) -> MachineFinding:
    """Count the cores that the ranks of this host may use, by affinity and the container's quota, and their threads."""
    cores, quota = affine_cores(), core_quota()
    given, threads = given_threads(os.environ), int(compute_environment(ranks, {})["OMP_NUM_THREADS"])
    detail = _counted(cores, "core")
    if quota is not None and quota < cores:
        detail += f", limited to {quota:g} by the container"
    detail += f"; {_counted(ranks, 'rank')} with {_counted(given or threads, 'thread')}{' each' if ranks > 1 else ''}"
    if given is not None:
        detail += f" (OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']})"
        if given > threads:
            advice = f"they wait for each other: leave OMP_NUM_THREADS out, or set it to {threads}"
            return broken("cpu", detail, advice, needed=False)
    return ok("cpu", detail, cores=cores if quota is None else min(cores, quota))


def check_memory(rank_bytes: int, ranks: int = 1, encoder_bytes: int = 0) -> MachineFinding:
    """Compare the free memory with what each of the ranks needs (0: not known), and all of the encoder's."""
    total, available = available_memory()
    if available is None:
        return ok("memory", "not known on this system")
    detail = f"{byte_size(available)} available" + (f" of {byte_size(total)}" if total else "")
    if rank_bytes:
        each = "one rank needs" if ranks == 1 else f"each of {ranks} ranks needs"
        detail += f"; {each} about {byte_size(rank_bytes)}"
    if encoder_bytes:
        detail += f"; those of the encoder need about {byte_size(encoder_bytes)} together"
    if rank_bytes * ranks + encoder_bytes > available:
        return broken("memory", detail, "free memory, or take fewer ranks or a smaller model")
    return ok("memory", detail, available_bytes=available)


def check_port(host: str, port: int) -> MachineFinding:
    """Check whether the service could listen here."""
    if why := why_not_listen(host, port):
        advice = "stop what listens there, or choose another with `dist-attn serve --port N`"
        return broken("port", f"{host}:{port} cannot be listened on: {why}", advice)
    return ok("port", f"{host}:{port} is free")


def check_disk(data_dir: Path) -> MachineFinding:
    """Check whether the data folder can be written to and has room; the folder itself may not be there yet."""
    place = data_dir.absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    advice = "choose another folder with `dist-attn serve --data-dir DIR`"
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return broken("disk", f"{place} is not a folder that can be written to", advice)
    free = shutil.disk_usage(place).free
    detail = f"{byte_size(free)} free for {data_dir}"
    if free < FREE_DISK_BYTES:
        return broken("disk", f"{detail}, needed is {byte_size(FREE_DISK_BYTES)}", f"make room, or {advice}")
    return ok("disk", detail, free_bytes=free)


def _counted(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None

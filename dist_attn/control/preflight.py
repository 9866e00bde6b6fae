"""Checks, before anything is started, of what would keep a service from working here."""

import importlib.metadata
import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path

import msgspec

from dist_attn.control.ranks import child_environment
from dist_attn.costs import model_kind, read_model_costs
from dist_attn.errors import ConfigError, EngineError, MissingExtraError, ModelFolderError, extra_hint
from dist_attn.launchers import lacks_for_mpi
from dist_attn.settings import EngineSettings, Settings, read_keys
from dist_attn.shipped import check_manifest, origin, refuse_foreign
from dist_attn.shipped.downloaded import LoadedSizes, read_downloaded
from dist_attn.store.open import check_place
from dist_attn.store.private import make_private
from dist_attn.text import fitted, load_tokeniser, read_foreign
from dist_attn.wire.choices import WeightPrecision
from dist_attn.wire.curve import ClientKeys, ServerKeys

SPANS = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")  # of two distributions
GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))  # NVIDIA's, on Linux and in WSL
MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json")
CHECK_S = 300.0  # a model of thousands of experts has a hundred thousand tensors


def check_before_start(
    *,
    folder: Path,
    host: str,
    port: int,
    data_dir: Path,
    engine: EngineSettings,
) -> None:
    """Look at the address, the data folder, which is made if needed, and what the engine needs.

    Raises: ConfigError for the first two, as `check_engine` for the engine.
    """
    if why := why_not_listen(host, port):
        raise ConfigError(f"cannot listen on {host}:{port}: {why}; choose another with --host and --port")
    _check_data_dir(data_dir)
    check_engine(folder, engine)


def check_api(settings: Settings) -> None:
    """Look for what the API needs by its settings: files of keys, and packages.

    Raises: ConfigError for a file that is missing or holds no keys, MissingExtraError for a package that is not
        installed, StorageError for an address that Redis does not understand.
    """
    for file in (settings.http.api_keys_file, settings.http.admin_keys_file):
        if file is not None:
            read_keys(file)
    engine = settings.engine
    for address in (engine.api_address, settings.encoder.api_address):
        ServerKeys.find(engine.keys_dir, "api", address)
        ClientKeys.find(engine.keys_dir, "api", address)
    ServerKeys.find(engine.keys_dir, "agent", engine.rank_address)
    for place in (settings.store.address, settings.store.blobs, settings.jobs.address, settings.files.catalogue):
        if place:
            check_place(place)
    if settings.tracing.endpoint and not all(map(_is_installed, SPANS)):
        raise MissingExtraError(f"tracing.endpoint is set, and OpenTelemetry is not installed: {extra_hint('otel')}")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # what it is a part of is missing
        return False


def check_engine(folder: Path, engine: EngineSettings, section: str = "engine") -> None:
    """Look at what an engine needs; `section` is that of the settings of its own.

    Raises: as `check_model_folder` for the folder, MissingExtraError for a back end that is not installed, ConfigError
        for GPUs that are not there.
    """
    if engine.backend == "mpi" and (absent := lacks_for_mpi()):
        raise MissingExtraError(f"back end mpi needs {' and '.join(absent)}: {extra_hint('mpi')}")
    check_gpus(engine, os.environ, section)
    check_model_folder(folder)
    check_weights_fit(folder, engine.weights, section)
    if engine.weights_over_ranks and engine.ranks > 1:
        check_layers_fit(folder, engine.ranks)


def check_model_folder(folder: Path) -> None:
    """Check a model folder without loading the model; of a downloaded one transformers does it, in another process.

    Raises: ModelFolderError for a folder that lacks a file, holds a damaged one or is of a type that is not supported,
        ConfigError for a config.json that describes no model, MissingExtraError where transformers is needed and is not
        installed, EngineError where its process fails or is late.
    """
    refuse_foreign(folder)
    if origin(folder) == "downloaded":
        check_downloaded(folder)
        return
    for name in MODEL_FILES:
        if not (folder / name).is_file():
            raise ModelFolderError(f"{folder} has no {name}; needed is a model folder of this project")
    load_tokeniser(folder)
    check_manifest(folder)
    if model_kind(folder) in ("", "language_model"):
        read_model_costs(folder)  # reads the same configuration as the ranks will, without torch


def check_downloaded(folder: Path) -> LoadedSizes:
    """The parameters and bytes of the model of a downloaded folder, whose weights are not read.

    Raises: as `check_model_folder`.
    """
    check_downloaded_files(folder)
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError(f"{folder} is a model of transformers, which is not installed: {extra_hint('hf')}")
    command = [sys.executable, "-m", "dist_attn.adapters", str(folder)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=CHECK_S, env=child_environment()
        )
        sizes = msgspec.json.decode(done.stdout, type=LoadedSizes)
    except subprocess.TimeoutExpired:
        raise EngineError(f"transformers did not look at {folder} within {CHECK_S:g} s") from None
    except msgspec.MsgspecError:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        said = words[-1] if words else f"exit code {done.returncode}"
        raise EngineError(f"the process in which transformers looks at {folder} failed: {said}") from None
    if sizes.refusal:
        raise ModelFolderError(sizes.refusal)
    return sizes


def check_downloaded_files(folder: Path) -> None:
    """Raises: ModelFolderError for what `read_downloaded` refuses, and for a tokeniser that is not of this model."""
    fitted(read_foreign(folder), folder, read_downloaded(folder).vocab_size)


def check_gpus(engine: EngineSettings, environ: Mapping[str, str], section: str = "engine") -> None:
    """Raises: ConfigError where GPUs are asked for and the driver shows none, or fewer than this host's ranks need."""
    asked = "engine.backend is nccl" if engine.backend == "nccl" else f"engine.device is {engine.device}"
    if engine.device == "cpu" and engine.backend == "nccl":
        raise ConfigError(f"{asked}, which is for GPUs, and engine.device is cpu: leave one of them out")
    has_driver = any(device.exists() for device in GPU_DRIVERS)
    if not has_driver and (engine.device.startswith("cuda") or engine.backend == "nccl"):
        raise ConfigError(f"{asked}, and this machine shows no driver of NVIDIA GPUs: `dist-attn doctor` tells more")
    one_each = engine.device == "cuda" or (engine.device == "auto" and has_driver and _torch_has_cuda())
    gpus = [gpu.name for gpu in Path("/dev").glob("nvidia*") if gpu.name.removeprefix("nvidia").isdecimal()]
    if (shown := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        gpus = list(takewhile(lambda gpu: gpu not in ("", "-1"), map(str.strip, shown.split(","))))
        if not gpus and engine.device.startswith("cuda"):
            raise ConfigError(f"{asked}, and CUDA_VISIBLE_DEVICES={shown} shows no GPU: leave one of them out")
    count = len(gpus)
    if one_each and engine.agents == 1 and 0 < count < engine.ranks:
        raise ConfigError(
            f"{section}.ranks is {engine.ranks}, and there {'is 1 GPU' if count == 1 else f'are {count} GPUs'}: take "
            "as many ranks, let them share a GPU with --device cuda:0, or compute on CPUs with --device cpu"
        )


def _torch_has_cuda() -> bool:
    """Return whether the installed torch was built for GPUs, without loading it."""
    try:
        return "+cpu" not in importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False


def check_weights_fit(folder: Path, weights: WeightPrecision, section: str = "engine") -> None:
    """Raises: ConfigError where the model of `folder` is of a kind that holds its weights in float32 only."""
    if weights != "float32" and (kind := model_kind(folder)) not in ("", "language_model"):
        raise ConfigError(
            f"{section}.weights is {weights}, and {folder} holds a {kind}; only language models hold their weights so: "
            "set it to float32"
        )


def check_layers_fit(folder: Path, ranks: int) -> None:
    """Raises: ConfigError where weights cannot lie over so many ranks: of a model of this project, or of few layers."""
    if origin(folder) != "downloaded":
        raise ConfigError(
            f"engine.weights_over_ranks is for models as they were downloaded, and {folder} is a model of this "
            "project; leave it out"
        )
    layers = read_downloaded(folder).num_layers
    if layers is not None and layers < ranks:
        raise ConfigError(f"engine.weights_over_ranks: {folder} has {layers} layers, too few for {ranks} ranks")


def why_not_listen(host: str, port: int) -> str:
    """Say why the API could not listen here; empty where it could, though another process may still take the port."""
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as trial:
            # As the API does, so that the connections of an earlier service, which end slowly, are no obstacle.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(address)
            trial.listen()
    except (OSError, UnicodeError) as error:
        # UnicodeError: a host that is no name, such as one with a part of more than 63 characters.
        return str(getattr(error, "strerror", error))
    return ""


def _check_data_dir(data_dir: Path) -> None:
    try:
        make_private(data_dir)
        with tempfile.TemporaryFile(dir=data_dir):
            pass
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte
        why = getattr(error, "strerror", error)
        raise ConfigError(
            f"{data_dir} cannot hold data: {why}; choose a folder that can be written to with --data-dir"
        ) from None

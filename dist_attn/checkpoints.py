"""Model folders: config.json, model.safetensors, tokenizer.json and a manifest that ties them together."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import dist_attn
from dist_attn.comm import Communicator
from dist_attn.errors import ConfigError, InputError, ModelFolderError
from dist_attn.host_limits import load
from dist_attn.model_config.folder import kind_of_model, read_any_config, read_config
from dist_attn.model_config.language_model import CODE_FOR_OTHERS, CODE_NAME, NAMES_FOR_OTHERS
from dist_attn.model_config.model import MODELS
from dist_attn.model_config.registry import load_build
from dist_attn.models import (
    CausalModel,
    LanguageModel,
    Model,
    SequenceModel,
    StreamEncoder,
    StreamingModel,
    TextEncoder,
    TextEncoderConfig,
    build_model,
    check_precision,
    hold_weights_as,
    weight_precision_of,
)
from dist_attn.models.text_encoder import fuses
from dist_attn.shipped import check_manifest, default_model_folder, origin, resolve_model_folder, sha256
from dist_attn.shipped.stored_tensors import check_safetensors
from dist_attn.text import Tokeniser, fitted, load_tokeniser
from dist_attn.wire.choices import WeightPrecision

__all__ = [
    "default_model_folder",
    "fuses_on_cpus",
    "kind_of_model",
    "load_any_model",
    "load_causal_model",
    "load_model",
    "load_model_and_tokeniser",
    "load_reader_and_tokeniser",
    "load_stream_encoder",
    "load_text_encoder",
    "load_weights",
    "replaced_folder",
    "resolve_model_folder",
    "save_model",
    "write_manifest",
]


def load_model(path_or_name: str | Path | None = None, *, weights: WeightPrecision = "float32") -> LanguageModel:
    """Load the model of a folder or of a shipped name, in float32 and in evaluation mode.

    With other `weights` most of them are held in fewer bits, see `hold_weights_as`: such a model cannot be trained.

    Raises: ModelFolderError when a file is missing, unreadable, or does not fit the others; ConfigError for `weights`
        that there are not; InputError naming a tensor that is not finite, which cannot be held in fewer bits.
    """
    check_precision(weights)
    folder = resolve_model_folder(path_or_name)
    with _making(folder):
        model = build_model(read_config(folder))
    load_weights(model, folder / "model.safetensors")
    check_manifest(folder)
    hold_weights_as(model.eval(), weights)
    return model


def load_causal_model(
    path_or_name: str | Path | None = None,
    *,
    weights: WeightPrecision = "float32",
    dtype: torch.dtype = torch.float32,
    over: Communicator | None = None,
) -> CausalModel:
    """Load a model as `load_model`, or that of a folder of transformers as it was downloaded.

    Such a model computes in `dtype`, or in bfloat16 where `weights` are of fewer bits than float32, and may have its
    layers divided `over` several ranks (one is the same as None); see `adapters.model.load_adapted_model`.

    Raises: as `load_model`; ConfigError for a model of this project with `over` several ranks.
    """
    folder = resolve_model_folder(path_or_name)
    over = over if over is not None and over.size > 1 else None
    if origin(folder) != "downloaded":
        if over is not None:
            raise ConfigError(
                f"engine.weights_over_ranks is for models as they were downloaded; {folder} is not: leave it out"
            )
        return load_model(folder, weights=weights)
    check_precision(weights)
    load("dist_attn.adapters.model")  # transformers takes seconds
    from dist_attn.adapters.model import load_adapted_model

    return load_adapted_model(folder, dtype, weights, over)


def load_any_model(path_or_name: str | Path | None = None) -> Model:
    """Load a model of any kind as `load_model`: classifiers, auto-encoders and encoder-decoders too."""
    folder = resolve_model_folder(path_or_name)
    with _making(folder):
        model = build_model(read_any_config(folder))
    load_weights(model, folder / "model.safetensors")
    check_manifest(folder)
    return model.eval()


@contextmanager
def _making(folder: Path) -> Iterator[None]:
    """Raises: ModelFolderError in place of what a model of impossible sizes raises while it is made."""
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError, TypeError) as error:  # TypeError: a size over 64 bits
        words = str(error).partition("\n")[0]
        raise ModelFolderError(f"the model that {folder}/config.json describes cannot be made: {words}") from None


def load_text_encoder(path_or_name: str | Path | None = None) -> TextEncoder:
    """Load a text encoder as `load_model`.

    Raises: ModelFolderError as `load_model`, and for a model of another kind.
    """
    model = load_any_model(path_or_name)
    if not isinstance(model, TextEncoder):
        folder = resolve_model_folder(path_or_name)
        raise ModelFolderError(f"{folder} holds a {model.config.kind}; needed is a text_encoder")
    return model


def fuses_on_cpus(path_or_name: str | Path | None = None) -> bool:
    """Return whether a CPU of this machine computes the model best in bfloat16, as one kernel: encoders such as BERT.

    Raises: ModelFolderError.
    """
    folder = resolve_model_folder(path_or_name)
    if kind_of_model(folder) not in ("text_encoder", "stream_encoder"):
        return False
    config = read_any_config(folder)
    return fuses(cast(TextEncoderConfig, getattr(config, "sentence", config)))


def load_stream_encoder(path_or_name: str | Path | None = None) -> StreamEncoder:
    """Load a stream encoder as `load_text_encoder`."""
    model = load_any_model(path_or_name)
    if not isinstance(model, StreamEncoder):
        folder = resolve_model_folder(path_or_name)
        raise ModelFolderError(f"{folder} holds a {model.config.kind}; needed is a stream_encoder")
    return model


def load_model_and_tokeniser(
    path_or_name: str | Path | None = None, *, weights: WeightPrecision = "float32"
) -> tuple[CausalModel, Tokeniser]:
    """Load the model of a folder, with `weights` as in `load_causal_model`, and the tokeniser beside it.

    Raises: as `load_causal_model`, and ModelFolderError when the tokeniser does not fit, see `text.fitted`.
    """
    check_precision(weights)
    folder = resolve_model_folder(path_or_name)
    tokeniser, model = load_tokeniser(folder), load_causal_model(folder, weights=weights)
    return model, fitted(tokeniser, folder, model.vocab_size)


def load_reader_and_tokeniser(
    path_or_name: str | Path | None = None,
) -> tuple[StreamingModel | TextEncoder | SequenceModel, Tokeniser]:
    """Load whatever makes vectors of texts, with its tokeniser: a language, encoder or sequence model.

    Raises: ModelFolderError as `load_model_and_tokeniser`.
    """
    folder = resolve_model_folder(path_or_name)
    kind = kind_of_model(folder)
    if kind == "language_model" or kind not in MODELS.names():
        return load_model_and_tokeniser(folder)
    made = load_build(MODELS.find(kind).build)
    if not (isinstance(made, type) and issubclass(made, TextEncoder | StreamEncoder | SequenceModel)):
        raise ModelFolderError(
            f"{folder} holds a {kind}; needed to encode is a language model, an encoder or a model of sequences"
        )
    tokeniser, model = load_tokeniser(folder), load_any_model(folder)
    assert isinstance(model, TextEncoder | StreamEncoder | SequenceModel)
    return model, fitted(tokeniser, folder, model.vocab_size)


def load_weights(model: torch.nn.Module, path: Path) -> None:
    """Fill `model` from a safetensors file; names and shapes must be exactly the model's.

    Raises: ModelFolderError naming the first difference.
    """
    try:
        check_safetensors(path)
        weights = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelFolderError(f"{path} cannot be read as safetensors: {error}") from None
    own = model.state_dict()
    for name in sorted(own.keys() | weights.keys()):
        if name not in weights:
            raise ModelFolderError(f"{path} has no tensor {name!r}, which the model of config.json needs")
        if name not in own:
            raise ModelFolderError(f"{path} holds a tensor {name!r} that the model of config.json does not have")
        if own[name].shape != weights[name].shape:
            raise ModelFolderError(
                f"{path}: {name!r} has shape {tuple(weights[name].shape)}, the model of config.json needs "
                f"{tuple(own[name].shape)}"
            )
    model.load_state_dict({name: t.to(own[name].dtype) for name, t in weights.items()})


def save_model(
    model: Model,
    folder: Path,
    *,
    tokeniser: Tokeniser | None = None,
    half: bool = False,
    facts: dict[str, Any] | None = None,
    weights: Mapping[str, torch.Tensor] | None = None,
    source_tokeniser: Tokeniser | None = None,
    token_ids: Mapping[str, int] | None = None,
) -> None:
    """Write a model folder beside its final place and rename it there, so that a half-written one is never seen.

    `half` stores matrices as float16 (loaded back to float32); `facts` go into the manifest as they are. `weights`
    stand for the model's own, where those are sharded. A `source_tokeniser`, of sources with a vocabulary of their own,
    goes into the folder `source`. With a language model goes what transformers needs: the module that config.json
    names, the ids of special tokens, which are the tokeniser's or else `token_ids`, and with a tokeniser
    generation_config.json.

    Raises: InputError for a model whose weights are held in fewer bits.
    """
    if (precision := weight_precision_of(model)) != "float32":
        raise InputError(
            f"a model whose weights are held as {precision} cannot be saved, as it has rounded them; keep the folder "
            "that it was loaded from, and say how weights are held when it is loaded"
        )
    with replaced_folder(folder) as temporary:
        config = model.config.model_dump(mode="json")
        if tokeniser is not None:
            tokeniser.save(temporary)
            token_ids = tokeniser.token_ids
            if isinstance(model, LanguageModel) and token_ids:
                (temporary / "generation_config.json").write_text(json.dumps(dict(token_ids), indent=2) + "\n")
        if source_tokeniser is not None:
            source_tokeniser.save(temporary / "source")
        if isinstance(model, LanguageModel):
            config = NAMES_FOR_OTHERS | config | dict(token_ids or {})
            (temporary / f"{CODE_NAME}.py").write_text(CODE_FOR_OTHERS)
        _write_folder(temporary, model, config, model.state_dict() if weights is None else weights, half, facts or {})


@contextmanager
def replaced_folder(folder: Path) -> Iterator[Path]:
    """Make a folder beside `folder`, which takes its place, from an older one too, when the block ends."""
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.writing")
    retired = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if folder.exists():
            folder.rename(retired)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        if retired.exists() and not folder.exists():
            retired.rename(folder)
        raise
    shutil.rmtree(retired, ignore_errors=True)


def _write_folder(
    folder: Path,
    model: Model,
    config: dict[str, Any],
    weights: Mapping[str, torch.Tensor],
    half: bool,
    facts: dict[str, Any],
) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    stored = {
        name: (t.half() if half and t.dim() >= 2 and t.is_floating_point() else t).contiguous()
        for name, t in weights.items()
    }
    save_file(stored, folder / "model.safetensors")
    # safetensors makes files that only their owner may read; a model folder is as public as its other files.
    (folder / "model.safetensors").chmod((folder / "config.json").stat().st_mode)
    write_manifest(folder, model, facts)


def write_manifest(folder: Path, model: torch.nn.Module, facts: dict[str, Any]) -> None:
    """Write manifest.json, with these facts and the digests of all files."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {
        "format": "dist-attn model folder 1",
        "library_version": dist_attn.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "sha256": {path.relative_to(folder).as_posix(): sha256(path) for path in files},
        **facts,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")

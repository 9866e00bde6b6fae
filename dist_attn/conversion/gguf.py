"""`python -m dist_attn.conversion.gguf FILE OUT`: a GGUF file as transformers reads it, as a folder of transformers.

Weights are dequantised, for what is read; blocks that decode steps read as they are stored are kept beside them.
"""

import os
import re
import shutil
import sys
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal

import torch
from safetensors.torch import save_file

from dist_attn.control.preflight import check_downloaded_files
from dist_attn.errors import DistAttnError, InputError, MissingExtraError, ModelFolderError, StorageError, extra_hint
from dist_attn.ops.decode_step import BLOCKS
from dist_attn.rank_link.tether import die_with_parent
from dist_attn.shipped import stored_tensors
from dist_attn.shipped.downloaded import SUPPORTED
from dist_attn.shipped.gguf_file import REFUSED, GgufHeader, read_gguf_header

__all__ = ["GgufPrecision", "convert_gguf"]

GgufPrecision = Literal["float32", "bfloat16"]
LEFT_OUT: Final = re.compile(
    r"\.(rope\.scaling\.(type|factor)|(logit|residual|embedding|attention)[._]scale|attention\.(clamp_kqv|causal"
    r"|sliding_window)|(attn|final|router)_logit_softcapping)$"
)
"""Keys that change what is computed; transformers passes over those that it has no place for."""
NEUTRAL: Final = ("none", 0, 1)
ENDS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
SCALES: Final = "rope_freqs.weight"
LLAMA_3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of all models of Llama 3.1 and later, for which alone files have `SCALES`."""
SAMPLING: Final = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip


def convert_gguf(file: Path, out: Path, weights: GgufPrecision = "float32") -> dict[str, Any]:
    """Write the model of a GGUF file to a folder that is not there yet; returns what was done, as plain values.

    Memory: all weights in the precision that is written.

    Raises: as `read_gguf_header`; ModelFolderError for a model that is not supported or whose tensors are not its
        configuration's; InputError where `out` is there; StorageError where the disk has no room for it.
    """
    header = read_gguf_header(file)
    if out.exists():
        raise InputError(f"{out} exists; give a folder that does not")
    out.parent.mkdir(parents=True, exist_ok=True)
    dtype: torch.dtype = getattr(torch, weights)
    needed, free = header.numbers * dtype.itemsize, shutil.disk_usage(out.parent).free
    if needed > free:
        raise StorageError(f"{out} would take {needed:,} bytes, and {free:,} are free there; make room")
    with TemporaryDirectory(dir=out.parent, prefix=".converting-") as place:
        made = Path(place) / out.name
        try:
            _write(file.resolve(), header, made, dtype)
            check_downloaded_files(made)
        except DistAttnError:
            raise
        except Exception as error:  # transformers raises whatever it comes upon
            said = " ".join(f"{error}".split())[:400] or type(error).__name__
            raise ModelFolderError(f"{file}: transformers cannot read it: {said}") from None
        made.replace(out)
    return {"architecture": header.architecture, "weights": weights, "parameters": header.numbers, "out": str(out)}


def _write(file: Path, header: GgufHeader, out: Path, dtype: torch.dtype) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import accelerate  # noqa: F401  # transformers asks for it
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
        from transformers.integrations import GGUF_CONFIG_MAPPING
    except ImportError as error:
        raise MissingExtraError(f"{file} needs {error.name or error}: {extra_hint('hf')}") from None
    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    _check_read(file, header, GGUF_CONFIG_MAPPING.get(header.architecture, {}))
    config = AutoConfig.from_pretrained(**where)
    if config.model_type not in SUPPORTED:
        raise ModelFolderError(f"{file} is a model of type {config.model_type!r}; supported are {', '.join(SUPPORTED)}")
    scales = prod(header.shapes.get(SCALES, (0,)))
    if scales:
        _scale_positions(file, header, config)
    with torch.device("meta"):
        wanted = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if wanted != header.numbers - scales:
        raise ModelFolderError(
            f"{file} has {header.numbers:,} numbers, and transformers makes a {config.model_type} of {wanted:,} of its "
            "keys: it would be computed wrongly; take the folder with safetensors"
        )
    model, about = AutoModelForCausalLM.from_pretrained(
        **where, config=config, dtype=dtype, quantization_config=GgufConfig(dequantize=True), output_loading_info=True
    )
    if odd := sorted(map(str, {*about["missing_keys"], *about["unexpected_keys"], *about["mismatched_keys"]})):
        raise ModelFolderError(f"{file}: {odd[0]} is not as its {config.model_type} needs it; fetch it again")
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # none of its weights are any more
    _set_generation(model.generation_config, header.keys)
    model.save_pretrained(out)
    _write_blocks(file, model, out)
    AutoTokenizer.from_pretrained(**where).save_pretrained(out)


def _write_blocks(file: Path, model: Any, out: Path) -> None:
    """Keep what decode steps read as it is stored, under its names in the model.

    A matrix is found by its rows, which some architectures have in another order.
    """
    from gguf import GGUFReader, quants

    ours = {weight.shape: list[tuple[str, Any, Any]]() for weight in model.parameters() if weight.dim() == 2}
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            ours[weight.shape].append((name, weight.detach(), _hashes(weight.detach())))
    kept: dict[str, torch.Tensor] = {}
    for tensor in GGUFReader(file).tensors:
        if (form := tensor.tensor_type.name) not in BLOCKS:
            continue
        w_OI = torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type)).to(model.dtype)
        hashes_O = _hashes(w_OI)
        for name, weight_OI, own_O in ours.get(w_OI.shape, ()):
            order_O = torch.empty_like(own_O)
            order_O[own_O.argsort()] = hashes_O.argsort()
            if torch.equal(hashes_O[order_O], own_O) and torch.equal(w_OI[order_O], weight_OI):
                kept[f"{form} {name}"] = torch.from_numpy(tensor.data.copy())[order_O]
                break
    if kept:
        save_file(kept, out / stored_tensors.BLOCKS)


def _hashes(w_OI: torch.Tensor) -> torch.Tensor:
    return torch.tensor([hash(row.tobytes()) for row in w_OI.view(torch.uint8).numpy()], device="cpu")


def _check_read(file: Path, header: GgufHeader, places: dict[str, Any]) -> None:
    """Raises: ModelFolderError for what would change the numbers and transformers does not look at."""
    for key, value in header.keys.items():
        known = key.removeprefix(f"{header.architecture}.") in places
        if LEFT_OUT.search(key) and not known and (value is False or value not in NEUTRAL):
            raise ModelFolderError(f"{file}: {key} is {value!r}, which transformers does not read from GGUF files")


def _scale_positions(file: Path, header: GgufHeader, config: Any) -> None:
    """Scale rotary positions as Llama 3's files do, by divisors of frequencies in place of the numbers they are from.

    Raises: ModelFolderError for other divisors.
    """
    from gguf import GGUFReader
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stored = next(tensor.data for tensor in GGUFReader(file).tensors if tensor.name == SCALES)
    divisors_K = torch.tensor(stored, dtype=torch.float32, device="cpu").flatten()
    plain = getattr(config, "rope_parameters", None) or {}
    scaled = {**plain, "rope_type": "llama3", "factor": round(float(divisors_K.max()), 4), **LLAMA_3}
    config.rope_parameters = scaled
    base, size = float(plain.get("rope_theta", 10_000.0)), 2 * len(divisors_K)
    plain_K = base ** -(torch.arange(0, size, 2, device="cpu") / size)
    wanted_K, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    if header.architecture != "llama" or not torch.allclose(plain_K / divisors_K, wanted_K, rtol=1e-4):
        raise ModelFolderError(
            f"{file} has {SCALES}, positions that are scaled otherwise than Llama 3's; take the folder with safetensors"
        )


def _set_generation(generation: Any, keys: dict[str, Any]) -> None:
    """Name all tokens that end a text, and the file's own way to draw."""
    ends = [keys[f"tokenizer.ggml.{name}"] for name in ENDS if f"tokenizer.ggml.{name}" in keys]
    generation.eos_token_id = list(dict.fromkeys(ends)) or generation.eos_token_id
    for key, name in SAMPLING.items():
        if f"general.sampling.{key}" in keys:
            setattr(generation, name, keys[f"general.sampling.{key}"])
            generation.do_sample = True


def main(file: str, out: str) -> None:
    """Convert, or print why not."""
    die_with_parent()
    try:
        convert_gguf(Path(file), Path(out))
    except DistAttnError as error:
        print(error, file=sys.stderr)
        sys.exit(REFUSED)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Put the weights of a run into the folder that ships: `dist-attn bench writer-store RUN/model FOLDER`.

Matrices are rounded to multiples of a power of two, of each its own, and stay float16: packed (in a wheel, in git)
they take half the bytes.
"""

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from dist_attn.shipped import sha256

__all__ = ["main", "on_grid"]

STEPS = 16  # the root mean square of a matrix is so many steps of its grid or more, and less than twice as many
FACTS = ("trained_on", "tokens_seen", "steps", "training", "last")


def on_grid(weight: Tensor) -> Tensor:
    """A matrix with each element at the nearest multiple of a power of two; a vector as it is."""
    size = weight.float().square().mean().sqrt().item()
    if weight.dim() < 2 or not size:
        return weight
    step = 2.0 ** math.floor(math.log2(size / STEPS))
    return ((weight.float() / step).round() * step).to(weight.dtype)


def main(arguments: Sequence[str]) -> int:
    """Write the weights, and into the manifest their digest and what it says of both trainings.

    The run is taken to have begun from the weights in the folder; its last score is that of the weights as trained.
    """
    parser = argparse.ArgumentParser(prog="writer-store", description=__doc__)
    parser.add_argument("trained", type=Path, help="the model folder of the run")
    parser.add_argument("folder", type=Path, help="a folder of the same model, with its tokeniser and templates")
    chosen = parser.parse_args(arguments)
    weights, place = load_file(chosen.trained / "model.safetensors"), chosen.folder / "model.safetensors"
    save_file({name: on_grid(weight) for name, weight in weights.items()}, place)
    trained, manifest = (json.loads((one / "manifest.json").read_text()) for one in (chosen.trained, chosen.folder))
    before = {name: manifest[name] for name in FACTS}
    manifest |= {name: trained[name] for name in FACTS} | {"trained_before": before}
    manifest["sha256"][place.name] = sha256(place)
    (chosen.folder / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    return 0

"""Model folders with wild values in their files: each is read, or refused in words by whoever reads it first.

    python -m tests.fuzz.wild_folders --inputs 100000

Files stay what they are by their form: JSON with other values, tensors with a sound header and other types, shapes and
places. A folder of this project and one of transformers are read as the API, the checks before a start and the ranks
read them.
"""

import json
import math
import random
import re
import resource
import shutil
import struct
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

from dist_attn_service.engine.served_model import ServedModel

from dist_attn.checkpoints import load_any_model, load_causal_model
from dist_attn.control.preflight import check_downloaded_files, check_model_folder, check_weights_fit
from dist_attn.errors import DistAttnError
from dist_attn.shipped import origin
from dist_attn.text import load_tokeniser
from tests.fuzz.running import main
from tests.support.downloaded import qwen3_next
from tests.support.models import write_small_folder
from tests.support.tokenisers import foreign_contents

__all__ = ["ERROR", "bound_memory", "read", "run", "sound_folders", "spoil_folder"]

ERROR = "error:"
"""Of what a reader raised that is no refusal in words."""
MEMORY_BYTES = 16 << 30  # of addresses
DEEP = "lists in lists"
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 3, 7, 255, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 40, 1 << 53, 1 << 63, 1 << 64),
    *(-(1 << 63), 10**30, 0.0, -0.0, 0.5, 1e-300, 1e300, math.nan, math.inf, -math.inf),
    *("", "a", "x" * 5000, "\\0", "\\ud800", "../../etc/passwd", "/dev/zero", "float32", "F32", "{{ x", "(a+)+$", "["),
    *([], {}, [[]], [None], [0], ["a"], [1 << 40] * 8, {"": ""}, {"kind": "x"}, [[[[[[[[]]]]]]]]),
)


def _somewhere(value: Any, rng: random.Random) -> None:
    """Change, remove or add one thing somewhere below `value`."""
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    if not keys:
        return
    key = rng.choice(keys)
    if isinstance(value[key], dict | list) and value[key] and rng.random() < 0.8:
        _somewhere(value[key], rng)
        return
    match rng.randrange(8):
        case 0:
            del value[key]
        case 1 if isinstance(value, dict):
            value[rng.choice(("x", "kind", "model_type", "type", "", "auto_map"))] = deepcopy(rng.choice(VALUES))
        case 1:
            value.insert(key, deepcopy(rng.choice((value[key], rng.choice(VALUES)))))
        case 2 if isinstance(value[key], int) and not isinstance(value[key], bool):
            value[key] += rng.choice((-1, 1, 8, 1000))
        case 3:
            other = rng.choice(keys)
            value[key], value[other] = value[other], value[key]
        case 4:
            value[key] = [deepcopy(value[key])] * rng.choice((1, 2, 100))
        case 5:
            value[key] = DEEP
        case _:
            value[key] = deepcopy(rng.choice(VALUES))


def spoil_folder(folder: Path, rng: random.Random) -> str:
    """Give one file other values; its name."""
    (folder / "manifest.json").unlink(missing_ok=True)  # its digests would refuse all the rest
    path = rng.choice(sorted(path for path in folder.iterdir() if path.suffix in (".json", ".safetensors")))
    data = path.read_bytes()
    start, stop = 0, len(data)
    if path.suffix == ".safetensors":
        start, stop = 8, 8 + struct.unpack("<Q", data[:8])[0]
    value = json.loads(data[start:stop])
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        _somewhere(value, rng)
    encoded = json.dumps(value).replace(json.dumps(DEEP), "[" * 5000 + "]" * 5000).encode()
    if start:
        path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + data[stop:])
    else:
        path.write_bytes(encoded)
    return path.name


def read(folder: Path) -> DistAttnError | None:
    """Read a folder as all of its readers do; the first refusal."""
    readers: list[Callable[[Path], object]] = [
        ServedModel.read,
        partial(check_weights_fit, weights="float32"),
        load_tokeniser,
    ]
    try:
        if origin(folder) == "downloaded":
            readers += [check_downloaded_files, load_causal_model]
        else:
            readers += [check_model_folder, load_any_model]
        for reader in readers:
            reader(folder)
    except DistAttnError as error:
        assert len(str(error)) > 10, error
        return error
    return None


def sound_folders(folder: Path) -> list[Path]:
    """A folder of this project and one of transformers, both of which are read."""
    own = write_small_folder(folder / "own")
    theirs = folder / "theirs"
    qwen3_next(400).save_pretrained(theirs, max_shard_size="100KB")
    (theirs / "tokenizer.json").write_text(foreign_contents())
    for sound in (own, theirs):
        refused = read(sound)
        assert refused is None, refused
    return [own, theirs]


def bound_memory() -> None:
    """A size that is believed shall fail here, and not take the machine's memory."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


def run(inputs: int, seed: int) -> Counter[str]:
    """How many folders were read, how many refused, by the first words of the refusal, and each error by its place."""
    rng, outcomes = random.Random(seed), Counter[str]()
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings(action="ignore"):
        sound = sound_folders(Path(name))
        for number in range(inputs):
            folder = Path(name) / "spoilt"
            shutil.copytree(rng.choice(sound), folder)
            file = spoil_folder(folder, rng)
            try:
                refusal = read(folder)
                outcomes["read" if refusal is None else _kind(refusal, name)] += 1
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:
                frames = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)]
                words = f"{ERROR} {type(error).__name__} {' '.join(frames[1:4])} … {frames[-1]}"
                if words not in outcomes:
                    print(f"input {number} of seed {seed}, {file}: {words}: {str(error)[:200]}", flush=True)
                outcomes[words] += 1
            shutil.rmtree(folder)
    return outcomes


def _kind(refusal: DistAttnError, folder: str) -> str:
    words = re.sub("'.*?'|[0-9]+", "N", str(refusal).replace(folder, ""))
    return " ".join(words.split()[:6])


def _by_coverage(data: bytes) -> None:
    run(1, random.Random(data).randrange(1 << 30))


if __name__ == "__main__":
    bound_memory()
    main(__doc__, run, _by_coverage, ["dist_attn.shipped", "dist_attn.checkpoints", "dist_attn.text"])

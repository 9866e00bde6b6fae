"""Entry point of the images: turns models' names into their folders, then becomes the process that was asked for.

python start.py api|engine|agent [--model NAME_OR_FOLDER] [--encoder NAME_OR_FOLDER] [--config FILE] [FLAG …]: the flags
are those of that process; of a second model the API alone is told.
"""

import argparse
import os
import sys
from pathlib import Path

from dist_attn.errors import InputError
from dist_attn.settings import read_settings
from dist_attn.shipped import resolve_model_folder

PROGRAMS = {
    "api": ("dist_attn_service",),
    "engine": ("dist_attn.control", "controller"),
    "agent": ("dist_attn.control", "agent"),
}


def main(arguments: list[str]) -> int:
    """Become the process; returns only when that cannot be done."""
    parser = argparse.ArgumentParser(prog="start.py", description=__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("program", choices=PROGRAMS)
    parser.add_argument("--model", help="a model folder or the name of a shipped model")
    parser.add_argument("--encoder", help="likewise, a second model for encodings")
    parser.add_argument("--config", type=Path, help="TOML file with settings")
    own, flags = parser.parse_known_args(arguments)
    try:
        named = {"model": own.model, "encoder.model": own.encoder}
        settings = read_settings(own.config, environment=os.environ, flags=named).settings
        folder = resolve_model_folder(settings.model)
        if own.program == "api" and settings.encoder.model:
            flags.append(f"--encoder={resolve_model_folder(settings.encoder.model)}")
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    if own.config is not None:
        flags.append(f"--config={own.config}")
    # exec, not a child: signals of the container reach the process itself.
    os.execv(sys.executable, [sys.executable, "-m", *PROGRAMS[own.program], f"--model={folder}", *flags])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

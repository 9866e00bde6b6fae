"""The ways in which a code block of the pages is run, in a folder of its own with a service at hand."""

import asyncio
import inspect
import json
import os
import shutil
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import msgspec
from pydantic import TypeAdapter

from dist_attn.settings import read_settings
from dist_attn_client import AppendSummary, PromptProgress, SearchResults
from tests.docs.blocks import ROOT, Block, Run, commands_of
from tests.support.source_path import SOURCE_PATH

SECONDS = 200
PLACE = "127.0.0.1:8000"
FILLED_IN = ("job", "upload", "sess")  # ids that a page cuts short, `job_…`
TEXT = "It was the best of times, it was the worst of times. " * 200


def prepare(folder: Path) -> None:
    """A book, half of it, the commands by name, and what a checkout has beside them."""
    (folder / "book.txt").write_text(TEXT[:9000])
    (folder / "begun.txt").write_text(TEXT[:5242])
    for name in ("examples", "dist_attn", "docs"):
        (folder / name).symlink_to(ROOT / name)
    programs = {"dist-attn": [sys.executable, "-m", "dist_attn"], "python": [sys.executable]}
    (folder / "bin").mkdir()
    for name, command in programs.items():
        program = folder / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {" ".join(command)} "$@"\n')
        program.chmod(0o755)
    if shutil.which("jq") is None:
        program = folder / "bin" / "jq"
        program.write_text(
            f"#!{sys.executable}\nimport json, sys\nprint(json.load(sys.stdin)[sys.argv[-1].strip('.')])\n"
        )
        program.chmod(0o755)


def filled_in(block: Block, run: Run, url: str) -> str:
    """The block's code for this service, with what the table puts in the place of what; all of it must be there."""
    code = block.code
    for given, instead in run.instead.items():
        assert given in code, f"{block.name} no longer has {given!r}: tests/docs/block_table.py is to be changed"
        code = code.replace(given, instead)
    return code.replace("localhost:8000", PLACE).replace(PLACE, url.removeprefix("http://"))


def run_python(code: str, before: str) -> None:
    """The block as a program in this process; one that awaits becomes a coroutine."""
    names: dict[str, Any] = {"__name__": "__page__"}
    exec(inspect.cleandoc(before), names)
    if "async with" in code and "async def" not in code:
        code = "async def _work():\n" + textwrap.indent(code, "    ")
        exec(compile(code, "block", "exec"), names)
        asyncio.run(names["_work"]())
    else:
        exec(compile(code, "block", "exec"), names)


def run_shell(code: str, run: Run, folder: Path) -> str:
    """The commands one after the other in one shell, each of which must succeed; what they print."""
    commands = commands_of(code)
    for left in run.leave:
        assert any(command.startswith(left) for command in commands), f"there is no command {left!r} any more"
    kept = [command for command in commands if not command.startswith(tuple(run.leave))]
    assert kept, "nothing is left to run"
    lines = ["set -eu -o pipefail", 'curl() { command curl -sS --fail-with-body "$@"; }']
    for command in kept:
        for kind in FILLED_IN:
            # An id that the page cuts short is the last of its kind that was printed.
            found = f"$(grep -ohE '{kind}_[A-Za-z0-9_-]{{8,}}' printed | tail -n 1)"
            command = command.replace(f"{kind}_…", found)
        command = command.replace(".venv/bin/", "")
        # In this shell, so that variables stay; what is printed is kept for the ids in it.
        lines.append(f"{{ {command}\n}} > now\ncat now; cat now >> printed")
    environment = {
        **os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": SOURCE_PATH,
    }  # fmt: skip
    script = "touch printed\n" + "\n".join(lines)
    done = subprocess.run(
        ["bash", "-c", script], cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, f"{script}\n--- printed\n{done.stdout}\n--- errors\n{done.stderr}"
    return done.stdout


def check_syntax(code: str) -> None:
    """bash can read it."""
    done = subprocess.run(["bash", "-n"], input=code, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def check_settings(code: str, folder: Path) -> None:
    """It is a file of settings in which nothing is unknown."""
    (folder / "settings.toml").write_text(code)
    read = read_settings(folder / "settings.toml", environment={})
    assert read.origins


def check_section(code: str, section: str) -> None:
    """Every key of it is one of this section of a training file."""
    from dist_attn.training.config import TrainingConfig

    kind = TrainingConfig.model_fields[section].annotation
    TypeAdapter(kind).validate_python(tomllib.loads(code)[section])


def check_mixer(code: str) -> None:
    """A model can be built with it."""
    from dist_attn.models import EncoderConfig

    size = {"hidden_size": 256, "num_layers": 2, "mlp_size": 64}
    EncoderConfig.model_validate({**size, "mixer": json.loads(code)})


def check_answer(code: str, kind: str) -> None:
    """The client reads it as its own type."""
    types: dict[str, Any] = {
        "AppendSummary": AppendSummary,
        "PromptProgress": PromptProgress,
        "SearchResults": SearchResults,
    }
    value = json.loads(code)
    msgspec.convert(value.get("prompt_progress", value), types[kind])

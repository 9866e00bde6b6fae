"""`config show`, the number of flags, and completion in the shell."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from dist_attn.commands import cli
from dist_attn.settings import settings_keys, settings_words

DEADLINE_S = 60.0
MOST_FLAGS = 46


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line as a process of its own."""
    env = {**os.environ, **environment}
    command = [sys.executable, "-m", "dist_attn", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, env=env)


def flags(command: object) -> list[str]:
    """Every flag of a command and of those below it."""
    found = [name for parameter in command.params for name in parameter.opts if name.startswith("--")]  # type: ignore[attr-defined]
    for inner in getattr(command, "commands", {}).values():
        found += flags(inner)
    return [name for name in found if name not in ("--help", "--version", "--install-completion", "--show-completion")]


def test_config_show_explains_every_setting_and_names_its_source(tmp_path: Path) -> None:
    """Each value stands there with where it comes from and what it is, as text and JSON."""
    file = tmp_path / "serve.toml"
    file.write_text('log_level = "debug"\n[http]\nport = 9000\n')
    shown = run("config", "show", "--config", str(file), "--json", DIST_ATTN_HTTP__PORT="9001")
    settings = json.loads(shown.stdout)
    assert tuple(settings) == settings_keys()
    assert {key: setting.pop("what") for key, setting in settings.items()} == settings_words()
    assert settings["http.port"] == {"value": 9001, "origin": "environment DIST_ATTN_HTTP__PORT"}
    assert settings["log_level"] == {"value": "debug", "origin": f"file {file}"}
    assert settings["http.host"] == {"value": "127.0.0.1", "origin": "default"}
    lines = run("config", "show", DIST_ATTN_CONFIG=str(file)).stdout.splitlines()
    shown_port = ["http.port", "9000", "file", str(file), *settings_words()["http.port"].split()]
    assert any(line.split() == shown_port for line in lines)
    assert sum(line.startswith(settings_keys()) for line in lines) == len(settings_keys())


def test_a_setting_that_does_not_fit_ends_serve_with_one_line(tmp_path: Path) -> None:
    """An unknown key, a missing file of keys and a missing package are exit code 2 and a line that names them."""
    file = tmp_path / "serve.toml"
    file.write_text("[engine]\nrank = 2\n")
    (tmp_path / "redis.py").write_text("raise ImportError")
    for refused, word in (
        (run("serve", "--config", str(file)), "did you mean engine.ranks?"),
        (run("serve", DIST_ATTN_HTTP__PROT="1"), "DIST_ATTN_HTTP__PROT"),
        (run("serve", DIST_ATTN_HTTP__API_KEYS_FILE=str(tmp_path / "none")), f"{tmp_path}/none cannot be read"),
        (run("serve", DIST_ATTN_STORE__ADDRESS="redis://127.0.0.1:9", PYTHONPATH=str(tmp_path)), "'.[redis]'"),
    ):
        assert (refused.returncode, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
        assert word in refused.stderr


def test_there_are_few_flags() -> None:
    """All commands together have at most 46 different flags."""
    different = set(flags(typer.main.get_command(cli.app)))
    assert len(different) <= MOST_FLAGS, sorted(different)
    assert {"--config", "--ranks", "--json"} <= different


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_the_shell_completes_commands_and_flags(shell: str) -> None:
    """What the shell asks for when Tab is pressed is answered with the commands, and with the flags of one."""
    words = {"bash": ("COMP_WORDS", "COMP_CWORD"), "zsh": ("_TYPER_COMPLETE_ARGS", "COMP_CWORD")}[shell]

    def complete(line: str, place: str) -> str:
        asked = {"_DIST_ATTN_COMPLETE": f"complete_{shell}", words[0]: line, words[1]: place}
        code = "import sys; sys.argv[0] = 'dist-attn'; from dist_attn.commands.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            env={**os.environ, **asked},
        )
        return done.stdout

    assert "serve" in complete("dist-attn se", "1")
    assert "--data-dir" in complete("dist-attn serve --d", "2")

"""The settings of the control plane: flags that say exactly what the value says."""

import tempfile

import pytest

from dist_attn.control import launch
from dist_attn.control.launch import start_engine
from dist_attn.control.ranks import launch_command
from dist_attn.control.settings import STORE_VARIABLE, ControlSettings
from dist_attn.errors import ConfigError
from dist_attn.rank_link.rank_settings import RankSettings
from dist_attn.shipped import resolve_model_folder
from dist_attn.wire.agent_messages import (
    StartGroup,
)

GIVEN = {"api_address": "ipc:///tmp/a", "model": "m"}


def test_flags_are_read_back_to_the_same_value():
    """What a parent passes to its child is what the child gets, and defaults need no flag."""
    settings = ControlSettings(
        **GIVEN, data_dir="d", ranks=3, local_agent=False, rank_command=("a", "b c"), step_s=0.25
    )
    assert ControlSettings.from_flags(settings.to_flags(), "x") == settings
    assert ControlSettings(**GIVEN).to_flags() == ["--api-address=ipc:///tmp/a", "--model=m"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ranks", 0),
        ("backend", "smoke"),
        ("weights", "int4"),
        ("block_tokens", 100),
        ("heartbeat_s", 0.0),
        ("heartbeat_s", 100.0),
        ("heartbeat_deadline_s", 0.1),
        ("api_address", "nowhere"),
        ("rank_address", "ipc://" + "x" * 200),
    ],
)
def test_values_that_do_not_fit_are_refused(field, value):
    """The error says which value, and what is needed."""
    with pytest.raises(ConfigError):
        ControlSettings(**{**GIVEN, field: value})


def test_settings_count_where_nobody_gave_a_flag(tmp_path):
    """A controller that is started by itself heeds the file, over it the environment, over both its flags."""
    file = tmp_path / "engine.toml"
    file.write_text('model = "books-6m"\nlog_level = "error"\n[engine]\nranks = 3\nmax_open = 9\nstep_s = 1.5\n')
    environment = {"DIST_ATTN_CONFIG": str(file), "DIST_ATTN_ENGINE__MAX_OPEN": "8", "DIST_ATTN_ENGINE__RANKS": "2"}
    flags = ["--api-address=ipc:///tmp/a", "--ranks=1"]
    settings = ControlSettings.from_flags(flags, "x", environment)
    assert (settings.ranks, settings.max_open, settings.step_s, settings.log_level) == (1, 8, 1.5, "error")
    assert settings.model == str(resolve_model_folder("books-6m"))
    assert ControlSettings.from_flags([*flags, f"--config={file}"], "x").max_open == 9


def test_a_child_of_ours_heeds_its_flags_alone(tmp_path):
    """What a parent leaves out of a child's flags is the default, whatever the environment says to those it starts."""
    settings = ControlSettings(**GIVEN, parent=5)
    environment = {"DIST_ATTN_CONFIG": str(tmp_path / "none"), "DIST_ATTN_ENGINE__RANKS": "2"}
    assert ControlSettings.from_flags(settings.to_flags(), "x", environment) == settings


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"DIST_ATTN_ENGINE__RANK": "2"}, "DIST_ATTN_ENGINE__RANK"),
        ({"DIST_ATTN_ENGINE__RANKS": "0"}, "engine.ranks"),
        ({"DIST_ATTN_CONFIG": "/no/such/file"}, "/no/such/file"),
        ({"DIST_ATTN_MODEL": "no such model"}, "no such model"),
        ({}, "model is not set"),
    ],
)
def test_settings_that_do_not_fit_exit_with_code_2(environment, words, capsys):
    """Nothing of the environment is dropped silently: what cannot be used is named."""
    with pytest.raises(SystemExit) as ended:
        ControlSettings.from_flags(["--api-address=ipc:///tmp/a"], "the-program", environment)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_ranks_that_could_not_talk_are_refused(tmp_path, monkeypatch):
    """The local back end knows one rank only, which is said before anything is started or made."""
    assert ControlSettings(**GIVEN, backend="local").ranks == 1
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match="choose auto, gloo, nccl or mpi"):
        start_engine(model="m", backend="local", ranks=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "flags",
    [[], ["--ranks", "two"], ["--ranks", "0"], ["--wat", "1"], ["--weights", "rocket"], ["--rank-command", "["]],
)
def test_bad_flags_exit_with_code_2_and_name_the_program(flags, capsys):
    """A command line that cannot be used never gets further."""
    flags = flags and ["--api-address=ipc:///tmp/a", "--model=m", *flags]
    with pytest.raises(SystemExit) as ended:
        ControlSettings.from_flags(flags, "the-program")
    assert ended.value.code == 2
    assert "the-program: error:" in capsys.readouterr().err


@pytest.mark.parametrize("check", [False, True])
def test_the_search_for_nan_reaches_the_ranks(check):
    """The environment's word for `engine.check_finite` becomes a setting of the controller and of every rank."""
    environment = {"DIST_ATTN_ENGINE__CHECK_FINITE": str(check), "DIST_ATTN_ENGINE__RANKS": "1"}
    flags = ["--api-address=ipc:///tmp/a", "--model=m"]
    settings = ControlSettings.from_flags(flags, "x", environment)
    assert ControlSettings.from_flags([*settings.to_flags(), "--parent=1"], "x").check_finite is check
    start = StartGroup(1, "", [1], 0, {"backend": "local", "check_finite": settings.check_finite})
    command = launch_command(settings, start)
    own = command[command.index("dist_attn.rank") + 1 :]
    assert RankSettings.from_flags(own).check_finite is check


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
def test_the_precision_of_weights_reaches_the_ranks(weights):
    """The environment's word for `engine.weights` becomes a setting of the controller and of every rank."""
    flags = ["--api-address=ipc:///tmp/a", "--model=m"]
    settings = ControlSettings.from_flags(flags, "x", {"DIST_ATTN_ENGINE__WEIGHTS": weights})
    assert ControlSettings.from_flags([*settings.to_flags(), "--parent=1"], "x").weights == weights
    start = StartGroup(1, "", [1], 0, {"backend": "local", "weights": settings.weights})
    command = launch_command(settings, start)
    assert RankSettings.from_flags(command[command.index("dist_attn.rank") + 1 :]).weights == weights


def test_a_password_of_the_store_stands_in_no_command_line(monkeypatch):
    """A controller that is started is told the address by its environment, and reads it there; nothing else is read."""
    started = []

    def popen(command, *, env, **_):
        started.append((command, env))
        raise ConfigError("not started")

    monkeypatch.setattr(launch.subprocess, "Popen", popen)
    store = "redis://:secret@host:6379/0"
    with pytest.raises(ConfigError, match="not started"):
        start_engine(**GIVEN, store=store)
    ((command, environment),) = started
    assert not any("secret" in word for word in command) and environment[STORE_VARIABLE] == store
    flags = command[command.index("controller") + 1 :]
    settings = ControlSettings.from_flags(flags, "x", {**environment, "DIST_ATTN_ENGINE__RANKS": "7"})
    assert (settings.store_address, settings.ranks) == (store, 1) and "secret" not in repr(settings)
    assert ControlSettings.from_flags(flags, "x", {}).store_address == "data/states"

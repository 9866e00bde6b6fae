"""The settings of the control plane: flags that say exactly what the value says."""

import pytest

from dist_attn.control.settings import ControlSettings
from dist_attn.errors import ConfigError

GIVEN = {"api_address": "ipc:///tmp/a", "model": "m"}


def test_flags_are_read_back_to_the_same_value():
    """What a parent passes to its child is what the child gets, and defaults need no flag."""
    settings = ControlSettings(
        **GIVEN, ranks=3, launcher="direct", local_agent=False, rank_command=("a", "b c"), patience_s=0.25
    )
    assert ControlSettings.from_flags(settings.to_flags(), "x") == settings
    assert ControlSettings(**GIVEN).to_flags() == ["--api-address=ipc:///tmp/a", "--model=m"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("ranks", 0),
        ("backend", "smoke"),
        ("block_tokens", 100),
        ("heartbeat_s", 0.0),
        ("api_address", "nowhere"),
        ("rank_address", "ipc://" + "x" * 200),
    ],
)
def test_values_that_do_not_fit_are_refused(field, value):
    """The error says which value, and what is needed."""
    with pytest.raises(ConfigError):
        ControlSettings(**{**GIVEN, field: value})


@pytest.mark.parametrize(
    "flags",
    [[], ["--ranks", "two"], ["--ranks", "0"], ["--wat", "1"], ["--launcher", "rocket"], ["--rank-command", "["]],
)
def test_bad_flags_exit_with_code_2_and_name_the_program(flags, capsys):
    """A command line that cannot be used never gets further."""
    flags = flags and ["--api-address=ipc:///tmp/a", "--model=m", *flags]
    with pytest.raises(SystemExit) as ended:
        ControlSettings.from_flags(flags, "the-program")
    assert ended.value.code == 2
    assert "the-program: error:" in capsys.readouterr().err

"""`python -m dist_attn.control controller|agent`: the two torch-free processes of the engine."""

import gc
import os
import signal
import sys
from pathlib import Path

from dist_attn.errors import ConfigError, MissingExtraError, StorageError
from dist_attn.host_limits import load
from dist_attn.launchers import SIGNALS
from dist_attn.log_lines import configure_logs

RUNNERS = {
    "controller": ("dist_attn.control.server", "run_controller"),
    "agent": ("dist_attn.control.agent", "run_agent"),
}


def main(arguments: list[str]) -> int:
    """Run the process that the first argument names; flags, the environment and a file are its ControlSettings."""
    if not arguments or arguments[0] not in RUNNERS:
        given = repr(arguments[0]) if arguments else "nothing"
        print(f"python -m dist_attn.control: given {given}, needed `controller` or `agent`", file=sys.stderr)
        return 2
    name = arguments[0]
    module, runner = RUNNERS[name]
    load(module)
    gc.freeze()
    from dist_attn.control.settings import ControlSettings

    settings = ControlSettings.from_flags(arguments[1:], f"python -m dist_attn.control {name}", os.environ)
    configure_logs(name, settings.log_level, settings.log_format, model=Path(settings.model).name)
    try:
        return int(getattr(sys.modules[module], runner)(settings))
    except (ConfigError, MissingExtraError, StorageError) as error:
        print(f"python -m dist_attn.control {name}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    code = main(sys.argv[1:])
    for number in SIGNALS:
        # At its exit Python puts the default back, by which a signal that comes late would become the exit code.
        signal.signal(number, signal.SIG_IGN)
    sys.exit(code)

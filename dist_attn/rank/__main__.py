"""`python -m dist_attn.rank`: one rank, started by the agent."""

import gc
import os
import sys

from dist_attn.errors import ConfigError
from dist_attn.host_limits import ask_for_short_slices, load
from dist_attn.rank.worker import Executor, run_rank
from dist_attn.rank_link.heartbeat import Pulse
from dist_attn.rank_link.rank_settings import RankSettings
from dist_attn.rank_link.tether import die_with_parent


def make_executor(settings: RankSettings, pulse: Pulse) -> Executor:
    """Load torch and the model only now: the heartbeat already beats meanwhile."""
    load("dist_attn.rank.executor")
    gc.freeze()
    from dist_attn.rank.executor import open_executor

    return open_executor(settings, pulse)


def main() -> int:
    """Run one rank; the exit code."""
    # mpiexec stands between the agent and this one, so this one ties itself to it.
    die_with_parent()
    ask_for_short_slices()
    try:
        return run_rank(RankSettings.from_flags(sys.argv[1:]), make_executor)
    except ConfigError as error:
        print(f"python -m dist_attn.rank: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Taking libraries apart can wait for ranks that are gone; everything that matters is closed already.
    os._exit(code)

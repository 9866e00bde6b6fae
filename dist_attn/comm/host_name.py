"""On which host a rank counts itself: that of the agent which started it, else the machine."""

import socket
from collections.abc import Mapping

__all__ = ["host_name"]


def host_name(environ: Mapping[str, str]) -> str:
    """Equal for two ranks exactly when one agent (torchrun's, or the engine's) or, without any, one machine runs both.

    Two agents on one machine are two hosts: whoever starts them so wants to try that out.
    """
    return f"{socket.gethostname()} {environ.get('GROUP_RANK', '')}"

"""On which host a rank counts itself: that of its launcher's agent, else the machine."""

import socket
from collections.abc import Mapping

__all__ = ["host_name"]


def host_name(environ: Mapping[str, str]) -> str:
    """Equal for two ranks exactly when one agent of torchrun, or without torchrun one machine, runs both.

    Two agents on one machine are two hosts: whoever starts them so wants to try that out.
    """
    return f"{socket.gethostname()} {environ.get('GROUP_RANK', '')}"

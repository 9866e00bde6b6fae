"""The names that agents and ranks give themselves on the controller's socket.

Those of ranks hold the controller's own name and the epoch, which keeps apart ranks of older ones.
"""

__all__ = ["agent_identity", "beat_identity", "rank_identity"]


def agent_identity(name: str, pid: int) -> bytes:
    """An agent: its host's name, and its process, so that one that is started again is another one."""
    return f"agent-{name}-{pid}".encode()


def rank_identity(epoch: int, rank: int, engine: str = "") -> bytes:
    """A rank's main thread, which takes steps."""
    return f"rank-{engine}-{epoch}-{rank}".encode()


def beat_identity(epoch: int, rank: int, engine: str = "") -> bytes:
    """A rank's heartbeat thread."""
    return f"beat-{engine}-{epoch}-{rank}".encode()

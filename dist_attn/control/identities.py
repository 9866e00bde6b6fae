"""The names that ranks give themselves on the controller's socket; the epoch in them keeps old ranks apart."""

__all__ = ["beat_identity", "rank_identity"]


def rank_identity(epoch: int, rank: int) -> bytes:
    """A rank's main thread, which takes steps."""
    return f"rank-{epoch}-{rank}".encode()


def beat_identity(epoch: int, rank: int) -> bytes:
    """A rank's heartbeat thread."""
    return f"beat-{epoch}-{rank}".encode()

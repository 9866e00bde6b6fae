"""What the controller knows of one rank: when it was heard, how far it is, and what ended it."""

import signal
from collections.abc import Iterable
from dataclasses import dataclass

from dist_attn.wire.agent_messages import (
    GroupExited,
)
from dist_attn.wire.messages import RankStatus
from dist_attn.wire.rank_messages import Heartbeat, LoadedModel, RankHello


@dataclass
class RankVitals:
    """One rank that has said hello. Times are monotonic seconds."""

    hello: RankHello
    heard_at: float
    progress_at: float = 0.0  # when it was last seen to move on
    progress: int = 0
    step_done: int = 0
    phase: str = "idle"
    peak_rss_bytes: int = 0
    busy_s: float = 0.0  # in the steps that it has finished, waiting for other ranks included
    failure: str = ""  # what it reported before it exited
    exited: bool = False

    def same_model(self, other: RankHello) -> bool:
        """Whether another rank has loaded the same."""
        return _told(self.hello.model) == _told(other.model)

    def heartbeat(self, beat: Heartbeat, now: float) -> None:
        """Take in a sign of life."""
        if beat.progress != self.progress:
            self.progress_at = now
        self.heard_at, self.progress, self.phase = now, beat.progress, beat.phase
        self.peak_rss_bytes = beat.peak_rss_bytes

    def finished(self, step: int, seconds: float, now: float) -> None:
        """The rank has finished a step, which took it so long."""
        self.step_done = step
        self.busy_s += seconds
        self.heard_at = self.progress_at = now

    def status(self, now: float) -> RankStatus:
        """The rank as the API sees it."""
        return RankStatus(
            self.hello.rank,
            self.hello.pid,
            self.phase,
            self.step_done,
            round(now - self.heard_at, 3),
            round(now - self.progress_at, 3),
            self.peak_rss_bytes,
            self.busy_s,
            self.hello.model.device,
        )


def _told(model: LoadedModel) -> tuple[object, ...]:
    """What must be equal of the models of all ranks."""
    return model.name, model.hidden_size, model.vocab_size, model.end_tokens, model.manifest and model.manifest.model


def name_culprit(ranks: Iterable[RankVitals]) -> str | None:
    """Which rank brought the group down, as far as that shows.

    A rank that died without a word is the cause; those that reported an error meanwhile are its victims.
    """
    known = list(ranks)
    silent = [v for v in known if v.exited and not v.failure]
    failed = [v for v in known if v.failure]
    if silent:
        names = " and ".join(f"rank {v.hello.rank} (pid {v.hello.pid})" for v in silent)
        return f"{names} died"
    if not failed:
        return None
    text = f"rank {failed[0].hello.rank} failed: {failed[0].failure}"
    quiet = ", ".join(str(v.hello.rank) for v in known if not v.failure)
    return f"{text}; rank {quiet} reported nothing" if quiet else text


def name_ending(exited: GroupExited) -> str:
    """How the processes of a group ended; the end of its output tells why only if it ended by itself."""
    if exited.exit_code < 0:
        names = {number.value: number.name for number in signal.Signals}
        return f"killed by {names.get(-exited.exit_code, f'signal {-exited.exit_code}')}"
    tail = exited.tail.strip().splitlines()[-1:] or ["no output"]
    return f"exit code {exited.exit_code}: {tail[0][:300]}"

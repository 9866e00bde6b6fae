"""The rank's heartbeat thread: tells every `heartbeat_s` seconds that the rank lives and how far it is.

It has a socket of its own and needs neither the device nor the main thread, so "slow" and "stuck" look different.
It also ends the process when the controller falls silent.
"""

import os
import resource
import sys
import threading
from dataclasses import dataclass

import zmq

from dist_attn.errors import WireError
from dist_attn.log_lines import say
from dist_attn.rank_link.rank_settings import RankSettings
from dist_attn.wire.curve import ClientKeys
from dist_attn.wire.rank_messages import Heartbeat
from dist_attn.wire.sockets import Dealer, beat_identity

EXIT_CODE_SILENCE = 3


@dataclass
class Pulse:
    """The progress that the main thread writes and the heartbeat thread reads; single values need no lock."""

    phase: str = "loading"
    step_done: int = 0
    progress: int = 0

    def advance(self) -> None:
        """Count one more operation or layer that is finished."""
        self.progress += 1


def peak_rss_bytes() -> int:
    """The largest resident set of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def leave(reason: str) -> None:
    """End the process at once, from any thread: the main one may be inside a call that never returns."""
    say(f"rank exits: {reason}", sys.stderr)
    os._exit(EXIT_CODE_SILENCE)


class HeartbeatThread:
    """The thread that beats until `stop`; it ends the process after `settings.silence_deadline_s` without an answer."""

    def __init__(self, settings: RankSettings, pulse: Pulse, keys: ClientKeys | None = None) -> None:
        self._settings = settings
        self._pulse = pulse
        self._keys = keys
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to beat."""
        self._thread.start()

    def stop(self) -> None:
        """Stop beating, and wait for the thread to end, at most `heartbeat_s` + 2 seconds."""
        self._stopped.set()
        self._thread.join(timeout=self._settings.heartbeat_s + 2)

    def _run(self) -> None:
        context = zmq.Context[zmq.Socket[bytes]](1)
        settings = self._settings
        identity = beat_identity(settings.epoch, settings.rank, settings.engine).decode()
        with Dealer(context, settings.controller, identity, self._keys) as dealer:
            # Unanswered beats are counted instead of time: when this process was held up, its controller was not.
            unanswered = 0
            while not self._stopped.is_set():
                if unanswered * settings.heartbeat_s >= settings.silence_deadline_s:
                    leave(f"the controller has been silent for {settings.silence_deadline_s:g} s")
                unanswered = self._beat(dealer, unanswered)
                self._stopped.wait(settings.heartbeat_s)
        context.term()

    def _beat(self, dealer: Dealer, unanswered: int) -> int:
        pulse = self._pulse
        try:
            while dealer.receive() is not None:
                unanswered = 0
            progress = (pulse.step_done, pulse.phase, pulse.progress, peak_rss_bytes())
            dealer.send(Heartbeat(self._settings.epoch, self._settings.rank, *progress))
        except WireError:
            # The queue is full because it is not read: one more beat without an answer.
            pass
        return unanswered + 1

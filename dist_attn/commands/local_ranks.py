"""`--ranks N` of a command: it runs again as N ranks of this machine, which share its work.

They are started as those of `serve` are: they meet in a folder that only their user may enter and listen on loopback.
Rank 0 has this process's input and output. The others print nothing; what they would say last comes here, as does what
rank 0 would, and is said once.
"""

import os
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import final
from urllib.parse import urlsplit
from urllib.request import url2pathname

import msgspec

from dist_attn.control.memory import why_killed
from dist_attn.control.processes import PrivateFolder, kill_processes
from dist_attn.control.ranks import TAIL_BYTES, rank_environment
from dist_attn.errors import InputError
from dist_attn.host_limits import oom_kills
from dist_attn.launchers import MEETING_VARIABLE, SIGNALS, read_launch

SRUN_VARIABLE = "SLURM_STEP_NUM_TASKS"  # how many srun has started; a batch script by itself does not have it
PATIENCE_S = 2.0  # of a failed exchange with whoever may have caused it, and says so a moment later
GRACE_S = 5.0  # to end after SIGTERM, or after rank 0
LAST_S = 30.0  # to end after rank 0 has ended well
STOPPING_S = 60.0  # to end after a signal: a run saves its state first
POLL_S = 1.0  # of whether a signal has come


class LastWords(msgspec.Struct, frozen=True):
    """The reason why a rank ended, and its exit code; `of_others`: an exchange with another rank failed.

    `traceback` is the printed one of a rank that left no words.
    """

    message: str
    code: int
    of_others: bool = False
    traceback: str = ""


def run_over_ranks(ranks: int, arguments: Sequence[str]) -> LastWords:
    """Run `dist-attn ARGUMENTS` over `ranks` ranks; returns the words left to say, "" for none, and the exit code.

    SIGINT and SIGTERM are handed on to the ranks. None is left when this returns.

    Raises: InputError inside another launcher's ranks, OSError where no process can be started.
    """
    _refuse_inside_a_launcher(ranks)
    folder = PrivateFolder()
    try:
        words = _Ranks(ranks, arguments, folder.path).wait()
        print(words.traceback, end="", file=sys.stderr)
        return words
    finally:
        folder.remove()


def leave_words(message: str, code: int, *, of_others: bool) -> None:
    """In a rank that `run_over_ranks` has started, leave the last words to it."""
    meeting = Path(url2pathname(urlsplit(os.environ[MEETING_VARIABLE]).path))
    path = _words_path(meeting.parent, int(os.environ["RANK"]))
    with suppress(OSError):  # the folder is gone: so is whoever would read it
        path.write_bytes(msgspec.json.encode(LastWords(message, code, of_others)))


def _words_path(folder: Path, rank: int) -> Path:
    return folder / f"words-{rank}"


def _refuse_inside_a_launcher(ranks: int) -> None:
    launch, tasks = read_launch(os.environ), os.environ.get(SRUN_VARIABLE, "")
    size = launch.size if launch is not None else None
    if size is None and tasks.isdecimal():
        size = int(tasks)
    if size == 1 or (launch is None and not tasks):
        return
    by = "srun" if tasks or launch is None else launch.launcher
    raise InputError(
        f"--ranks {ranks} was given, and {by} has started {size or 'several'} processes already: leave --ranks out, or "
        "start the command without a launcher"
    )


@final
class _Rank:
    """One process, and the end of its output on stderr unless it is rank 0, whose stderr is this process's own."""

    def __init__(self, rank: int, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self.rank = rank
        self.tail = b""
        self._kills_before = oom_kills()
        self._words = _words_path(folder, rank)
        first = rank == 0
        # In a session of its own: Ctrl-C on the terminal reaches the ranks through this process, and once.
        self.process = subprocess.Popen(
            command,
            stdin=None if first else subprocess.DEVNULL,
            stdout=None if first else subprocess.DEVNULL,
            stderr=None if first else subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )

    def follow(self, ended: "queue.Queue[_Rank]") -> None:
        """Wait in a thread until the process ends, keeping the end of its output."""
        if self.process.stderr is not None:
            while data := os.read(self.process.stderr.fileno(), 1 << 16):
                self.tail = (self.tail + data)[-TAIL_BYTES:]
            self.process.stderr.close()
        self.process.wait()
        ended.put(self)

    def send(self, number: int) -> None:
        """Send a signal to the process; does nothing where it has ended."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    @property
    def own_words(self) -> LastWords | None:
        """The last words that the rank has left, if any."""
        with suppress(OSError, msgspec.MsgspecError):
            return msgspec.json.decode(self._words.read_bytes(), type=LastWords)
        return None

    def words(self, ranks: int) -> LastWords:
        """The rank's own last words, or else a description of how it ended."""
        if (own := self.own_words) is not None:
            return own
        code = self.process.returncode
        if code >= 0:  # rank 0's stderr has been seen
            message = f"rank {self.rank} of {ranks} ended with exit code {code}" if self.rank else ""
            return LastWords(message, code, traceback=self.tail.decode(errors="replace"))
        name = signal.Signals(-code).name
        why = why_killed(code, self._kills_before, lambda: 0)
        return LastWords(f"rank {self.rank} of {ranks} was ended by {name}{', ' if why else ''}{why}", 1)


@final
class _Ranks:
    """The ranks of one command."""

    def __init__(self, count: int, arguments: Sequence[str], folder: Path) -> None:
        self._mark = secrets.token_hex(8)
        self._signal: int | None = None
        self._ended: queue.Queue[_Rank] = queue.Queue()
        self._ranks: list[_Rank] = []
        program = [sys.executable, "-P", "-m", "dist_attn", *arguments]  # -P: nothing of the working folder is imported
        command = [sys.executable, "-P", "-m", "dist_attn.rank_link.tether", str(os.getpid()), *program]
        environment = rank_environment(self._mark, count) | {
            MEETING_VARIABLE: (folder / "store").as_uri(),
            "WORLD_SIZE": str(count),
            "LOCAL_WORLD_SIZE": str(count),
        }
        try:
            for rank in range(count):
                own = environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                self._ranks.append(_Rank(rank, command, own, folder))
        except BaseException:
            self._kill()
            raise
        for one in self._ranks:
            threading.Thread(target=one.follow, args=(self._ended,), daemon=True).start()

    def wait(self) -> LastWords:
        """Wait until all ranks have ended, and end by force those that do not; returns what is to be said."""
        before = {number: signal.signal(number, self._hand_on) for number in SIGNALS}
        try:
            return self._wait()
        finally:
            self._kill()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _wait(self) -> LastWords:
        ended: list[_Rank] = []
        until: float | None = None
        while len(ended) < len(self._ranks):
            one = self._next(time.monotonic() + POLL_S if until is None else until)
            if one is None and until is not None:  # too late
                break
            if one is None:
                until = None if self._signal is None else time.monotonic() + STOPPING_S
                continue
            ended.append(one)
            if self._signal is not None or not one.process.returncode:
                # Rank 0 may be saving what it has; its own exchanges have deadlines.
                if one.rank == 0:
                    until = time.monotonic() + (GRACE_S if one.process.returncode else LAST_S)
            elif not one.words(len(self._ranks)).of_others:
                break
            elif until is None:
                until = time.monotonic() + PATIENCE_S
        failed = sorted((one for one in ended if one.process.returncode), key=lambda one: one.rank)
        late = [one for one in self._ranks if one not in ended]
        if late:
            self._end(late)
        if self._signal is not None and (failed or late):
            code = 128 + self._signal
            own = (one.own_words for one in failed)
            return next((words for words in own if words is not None and words.code == code), LastWords("", code))
        if failed:
            return _reason([one.words(len(self._ranks)) for one in failed])
        if late:
            return LastWords(f"rank {late[0].rank} did not end within {LAST_S:g} s after rank 0, and was ended", 1)
        return LastWords("", 0)

    def _next(self, until: float | None) -> _Rank | None:
        try:
            return self._ended.get(timeout=None if until is None else max(0.0, until - time.monotonic()))
        except queue.Empty:
            return None

    def _end(self, late: Sequence[_Rank]) -> None:
        """Ask the ranks to end, so that they remove files which they have not finished."""
        for one in late:
            one.send(signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        for _ in late:
            if self._next(until) is None:
                return

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self._signal = self._signal or number
        for one in self._ranks:
            one.send(number)

    def _kill(self) -> None:
        for one in self._ranks:
            one.process.kill()
        kill_processes(self._mark, GRACE_S)
        for one in self._ranks:
            one.process.wait()


def _reason(words: Sequence[LastWords]) -> LastWords:
    """The last words of the first rank that failed by itself, else of the first rank of all."""
    return next((one for one in words if not one.of_others), words[0])

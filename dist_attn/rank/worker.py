"""The rank loop: takes numbered steps from its socket, performs and answers them; idle, it is in no collective."""

import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from os import getpid
from typing import Protocol, final

import msgspec
import zmq

from dist_attn.errors import InputError, WireError
from dist_attn.rank_link.heartbeat import HeartbeatThread, Pulse
from dist_attn.rank_link.rank_settings import RankSettings
from dist_attn.wire.curve import ClientKeys
from dist_attn.wire.messages import PROTOCOL_VERSION
from dist_attn.wire.rank_messages import (
    STATE_PART_BYTES,
    CloseOp,
    DecodeOp,
    Drawn,
    Draws,
    GuardCounts,
    LoadedModel,
    OpenOp,
    PrefillOp,
    RankFailed,
    RankHello,
    RequestFault,
    RowPieces,
    SavedState,
    SaveOp,
    Shutdown,
    StatePart,
    Step,
    StepDone,
)
from dist_attn.wire.snapshot import largest_snapshot
from dist_attn.wire.sockets import Dealer, rank_identity

WAIT_S = 1.0
SEND_S = 30.0
ERROR_CHARACTERS = 2000

Send = Callable[[StatePart | Draws], object]


class Executor(Protocol):
    """The model on this rank's device; called by one thread, in the order of the steps."""

    @property
    def loaded(self) -> LoadedModel: ...

    def open(self, op: OpenOp, state: bytes = b"") -> RequestFault | None: ...

    def read_ahead(self, ops: Sequence[PrefillOp]) -> None: ...

    def prefill(self, op: PrefillOp, pause: Callable[[], None]) -> RowPieces | None: ...

    def decode(self, op: DecodeOp) -> list[Drawn | RequestFault]: ...

    def save(self, request: int, snapshot: bool = False) -> tuple[SavedState, bytes] | None: ...

    def close(self, request: int) -> None: ...

    def finish_step(self) -> None: ...

    def take_guards(self) -> GuardCounts | None: ...

    def shut_down(self) -> None: ...


@final
class Decoding:
    """All decoding of one step on one rank.

    With R further rounds a step's blocks are R + 1 equal parts, counted in tokens of all ranks and in pauses, and a
    round follows each but the last. Every rank counts the same, so all decode at the same time.
    """

    def __init__(self, step: Step, rank: int, executor: Executor, send: Callable[[Draws], object]) -> None:
        self._step, self._rank, self._executor, self._send = step, rank, executor, send
        blocks = [op for op in step.ops if isinstance(op, PrefillOp)]
        self._left = [sum(op.lengths) for op in blocks]
        self._per_block = max(1, executor.loaded.pauses)
        self._all = sum(self._left) * self._per_block
        self._read = 0  # tokens of blocks that are done
        self._paused = 0  # times in the block that is being read
        self._rounds = 0
        self._results: list[Drawn | RequestFault] = []
        self.seconds = 0.0
        """Spent on decoding so far."""

    def draw(self, op: DecodeOp) -> None:
        """One round; what it gives goes out at once if anything of the step is still to be read."""
        began = time.monotonic()
        results = self._executor.decode(op) if op.entries else []
        self.seconds += time.monotonic() - began
        if not self._left:
            self._results += results
        elif results:
            drawn, faults = _sorted(results)
            self._send(Draws(self._step.epoch, self._step.k, self._rank, drawn, faults))

    def pause(self) -> None:
        """A part of the current block is done: decode if it is time."""
        self._paused += 1
        self._catch_up((self._read * self._per_block) + min(self._paused, self._per_block) * self._left[0])

    def end_block(self, op: PrefillOp) -> None:
        """A block is done: so are the rounds that belong to it, however often it was interrupted."""
        self._read += sum(op.lengths)
        self._paused = 0
        self._catch_up(self._read * self._per_block)
        self._left.pop(0)

    @property
    def kept(self) -> tuple[list[Drawn], list[RequestFault]]:
        """What was drawn after all blocks."""
        return _sorted(self._results)

    def _catch_up(self, done: int) -> None:
        rounds = self._step.rounds
        due = done * (len(rounds) + 1) // max(1, self._all)
        while self._rounds < min(due, len(rounds)):
            self._rounds += 1
            self.draw(rounds[self._rounds - 1])


def _sorted(results: list[Drawn | RequestFault]) -> tuple[list[Drawn], list[RequestFault]]:
    return [r for r in results if isinstance(r, Drawn)], [r for r in results if isinstance(r, RequestFault)]


def run_rank(settings: RankSettings, make_executor: Callable[[RankSettings, Pulse], Executor]) -> int:
    """Load the model, say hello, and take steps until the controller says otherwise; the exit code.

    An exception is reported to the controller; the rank never goes on after one.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to everybody; the controller ends its ranks
    pulse = Pulse()
    keys = ClientKeys.find(settings.keys_dir, "agent", settings.controller)
    heartbeat = HeartbeatThread(settings, pulse, keys)
    heartbeat.start()
    context = zmq.Context[zmq.Socket[bytes]](1)
    identity = rank_identity(settings.epoch, settings.rank, settings.engine).decode()
    with Dealer(context, settings.controller, identity, keys) as dealer:
        try:
            executor = make_executor(settings, pulse)
            _take_steps(settings, executor, dealer, pulse)
            executor.shut_down()
            code = 0
        except Exception as error:
            text = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]
            if isinstance(error, InputError):
                # The words say all there is to know, such as which file of the model folder is damaged.
                print(f"rank {settings.rank}: {text}", file=sys.stderr, flush=True)
            else:
                traceback.print_exc(file=sys.stderr)
                sys.stderr.flush()
            dealer.send(RankFailed(settings.epoch, settings.rank, pulse.step_done + 1, text), 1.0)
            code = 1
    heartbeat.stop()
    context.term()
    return code


def _take_steps(settings: RankSettings, executor: Executor, dealer: Dealer, pulse: Pulse) -> None:
    model, place = executor.loaded, (settings.epoch, settings.rank, settings.ranks)
    dealer.send(RankHello(PROTOCOL_VERSION, *place, getpid(), socket.gethostname(), model), SEND_S)
    pulse.phase = "idle"
    # How far the text has come that a state is of is known only once it is there.
    largest = settings.state_bytes if model.token_bytes else model.state_bytes or 0
    states = ReceivedStates(largest_snapshot(largest, model.vocab_size))
    while True:
        # The heartbeat thread ends this process when the controller is gone, so waiting for it needs no other end.
        message = dealer.receive(WAIT_S)
        if message is None:
            continue
        if isinstance(message, Shutdown) and message.epoch == settings.epoch:
            return
        if isinstance(message, StatePart) and message.epoch == settings.epoch:
            states.add(message)
            continue
        step = _due(message, settings.epoch, pulse.step_done + 1)
        done = perform(step, settings.rank, executor, pulse, states, lambda part: dealer.send(part, SEND_S))
        dealer.send(done, SEND_S)
        pulse.step_done = step.k
        pulse.phase = "idle"


def _due(message: object, epoch: int, k: int) -> Step:
    """The message, if it is the step that is due.

    Raises: WireError for anything else: after a gap this rank's state would be wrong without anybody noticing.
    """
    if not isinstance(message, Step):
        raise WireError(f"a rank was sent a {type(message).__name__}; needed is a Step or a Shutdown")
    if (message.epoch, message.k) != (epoch, k):
        raise WireError(f"step {message.k} of epoch {message.epoch} came; due is step {k} of epoch {epoch}")
    return message


@final
class ReceivedStates:
    """States that are to be gone on from, as far as they have come. Memory: one state each, until it is restored."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._coming: dict[int, bytearray] = {}

    def add(self, part: StatePart) -> None:
        """Take a part.

        Raises: WireError for one that does not follow, or goes beyond what a state of this model has.
        """
        state = self._coming.setdefault(part.request, bytearray())
        if part.start != len(state) or part.start + len(part.data) > self._num_bytes:
            raise WireError(
                f"bytes [{part.start}, {part.start + len(part.data)}) of a state came after its first {len(state)}; "
                f"needed are those that follow, up to {self._num_bytes} in all"
            )
        state += part.data

    def take(self, op: OpenOp) -> bytes:
        """The state that a request begins with; nothing for the empty one.

        Raises: WireError where it has not come whole.
        """
        state = self._coming.pop(op.request, bytearray())
        needed = 0 if op.restore is None else op.restore.num_bytes
        if len(state) != needed:
            raise WireError(f"{len(state)} bytes of the state of request {op.request} came; it has {needed}")
        return bytes(state)


def _send_state(op: SaveOp, step: Step, rank: int, executor: Executor, send: Send) -> list[SavedState]:
    result = executor.save(op.request, op.snapshot)
    if result is None:
        return []
    saved, state = result
    for start in range(0, len(state), STATE_PART_BYTES):
        send(StatePart(step.epoch, rank, op.request, start, state[start : start + STATE_PART_BYTES], op.ordinal))
    return [msgspec.structs.replace(saved, ordinal=op.ordinal)]


def perform(step: Step, rank: int, executor: Executor, pulse: Pulse, states: ReceivedStates, send: Send) -> StepDone:
    """Perform the operations of a step in order, its further rounds of decoding between the layers of its blocks.

    What is drawn before the step's blocks are read goes out through `send`, and so do parts of states.
    """
    began = time.monotonic()
    saved: list[SavedState] = []
    pieces: list[RowPieces] = []
    decoding = Decoding(step, rank, executor, send)
    blocks = [op for op in step.ops if isinstance(op, PrefillOp)]
    faults: list[RequestFault] = []
    for op in step.ops:
        match op:
            case OpenOp():
                fault = executor.open(op, states.take(op))
                faults += [] if fault is None else [fault]
            case PrefillOp():
                pulse.phase = "prefill"
                if op is blocks[0]:
                    executor.read_ahead(blocks)
                result = executor.prefill(op, decoding.pause)
                decoding.end_block(op)
                if result is not None:
                    pieces.append(result)
            case DecodeOp():
                pulse.phase = "decode"
                decoding.draw(op)
            case SaveOp():
                saved += _send_state(op, step, rank, executor, send)
            case CloseOp():
                executor.close(op.request)
        pulse.advance()
    executor.finish_step()
    drawn, more_faults = decoding.kept
    seconds = time.monotonic() - began
    guards = executor.take_guards()
    return StepDone(
        step.epoch, step.k, rank, seconds, pieces, drawn, faults + more_faults, guards, saved, decoding.seconds
    )

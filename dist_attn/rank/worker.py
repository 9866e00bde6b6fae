"""The rank loop: takes numbered steps from its socket, performs and answers them; idle, it is in no collective."""

import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from os import getpid
from typing import Protocol, TypeVar, final

import msgspec
import zmq

from dist_attn.errors import InputError, WireError
from dist_attn.rank_link.heartbeat import HeartbeatThread, Pulse
from dist_attn.rank_link.rank_settings import RankSettings
from dist_attn.wire.curve import ClientKeys
from dist_attn.wire.messages import PROTOCOL_VERSION, AnyMessage
from dist_attn.wire.rank_messages import (
    STATE_PART_BYTES,
    CloseOp,
    DecodeOp,
    Drawn,
    Draws,
    Faulted,
    GoOn,
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
Agree = Callable[[RequestFault, int], None]
"""Returns once all ranks have met a fault of this request after as many exchanges."""

Result = TypeVar("Result")


class Executor(Protocol):
    """The model on this rank's device; called by one thread, in the order of the steps.

    `fatal` errors are those behind which this process cannot go on; `exchanges` counts those with other ranks, and
    `shares` tells whether all ranks take part in an operation. What follows of a request is passed over after `refuse`.
    """

    @property
    def loaded(self) -> LoadedModel: ...

    @property
    def fatal(self) -> tuple[type[Exception], ...]: ...

    @property
    def exchanges(self) -> int: ...

    def shares(self, op: OpenOp | PrefillOp | SaveOp) -> bool: ...

    def refuse(self, request: int) -> None: ...

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
        self.under_way = False
        """Whether a round has begun and not ended: what it raises comes out of the block that it interrupts."""

    def draw(self, op: DecodeOp) -> None:
        """One round; what it gives goes out at once if anything of the step is still to be read."""
        began, self.under_way = time.monotonic(), True
        results = self._executor.decode(op) if op.entries else []
        self.seconds += time.monotonic() - began
        if not self._left:
            self._results += results
        elif results:
            drawn, faults = _sorted(results)
            self._send(Draws(self._step.epoch, self._step.k, self._rank, drawn, faults))
        self.under_way = False

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
        """The tokens and the faults of the rounds drawn after all blocks."""
        return _sorted(self._results)

    def _catch_up(self, done: int) -> None:
        rounds = self._step.rounds
        due = done * (len(rounds) + 1) // max(1, self._all)
        while self._rounds < min(due, len(rounds)):
            self._rounds += 1
            self.draw(rounds[self._rounds - 1])


def _sorted(results: list[Drawn | RequestFault]) -> tuple[list[Drawn], list[RequestFault]]:
    return [r for r in results if isinstance(r, Drawn)], [r for r in results if isinstance(r, RequestFault)]


@final
class FaultNet:
    """Makes of what an operation for one request raises a fault of that request alone.

    No number makes an operation raise, so what does is a length, a shape or a position. Those are the same on all ranks
    that share the operation: each of them raises between the same exchanges, none waits for another, and all take the
    same decision. `agree` makes sure of that; where they differ this rank waits in it, and the group is lost.
    """

    def __init__(self, executor: Executor, decoding: Decoding, agree: Agree) -> None:
        self._executor, self._decoding, self._agree = executor, decoding, agree
        self.faults: list[RequestFault] = []

    def perform(self, op: OpenOp | PrefillOp | SaveOp, work: Callable[[], Result]) -> Result | None:
        """Do the `work` of this operation and return its result; None where it failed.

        Raises: what is fatal, and what a round of decoding in between raised, which is that of many requests.
        """
        executor = self._executor
        before = executor.exchanges
        try:
            return work()
        except Exception as error:
            if isinstance(error, executor.fatal) or self._decoding.under_way:
                raise
            traceback.print_exc(file=sys.stderr)
            text = f"the model cannot go on with this request: {type(error).__name__}: {error}"
            fault = RequestFault(op.request, text[:ERROR_CHARACTERS])
            if executor.shares(op):
                self._agree(fault, executor.exchanges - before)
            if not isinstance(op, SaveOp):  # of which other ranks may know nothing, and go on
                executor.refuse(op.request)
            self.faults.append(fault)
            return None

    def read_ahead(self, ops: Sequence[PrefillOp]) -> None:
        """Read several texts together where that goes well; what fails is read, and found, in its turn."""
        try:
            self._executor.read_ahead(ops)
        except Exception as error:
            if isinstance(error, self._executor.fatal):
                raise


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
    dealer.send(RankHello(PROTOCOL_VERSION, *place, getpid(), model), SEND_S)
    pulse.phase = "idle"
    # How far the text has come that a state is of is known only once it is there.
    largest = settings.state_bytes if model.token_bytes else model.state_bytes or 0
    states = ReceivedStates(largest_snapshot(largest, model.vocab_size))
    early: deque[AnyMessage] = deque()  # came while this rank waited for the others to meet a fault

    def agree(fault: RequestFault, exchanges: int) -> None:
        pulse.phase = "fault"
        dealer.send(Faulted(settings.epoch, pulse.step_done + 1, settings.rank, fault, exchanges), SEND_S)
        go_on = GoOn(settings.epoch, pulse.step_done + 1, fault.request)
        while (message := dealer.receive(WAIT_S)) != go_on:
            early.extend([] if message is None else [message])

    while True:
        # The heartbeat thread ends this process when the controller is gone, so waiting for it needs no other end.
        message = early.popleft() if early else dealer.receive(WAIT_S)
        if message is None:
            continue
        if isinstance(message, Shutdown) and message.epoch == settings.epoch:
            return
        if isinstance(message, StatePart) and message.epoch == settings.epoch:
            states.add(message)
            continue
        step = _due(message, settings.epoch, pulse.step_done + 1)
        done = perform(step, settings.rank, executor, pulse, states, lambda part: dealer.send(part, SEND_S), agree)
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


def _send_state(op: SaveOp, step: Step, rank: int, result: tuple[SavedState, bytes], send: Send) -> SavedState:
    saved, state = result
    for start in range(0, len(state), STATE_PART_BYTES):
        send(StatePart(step.epoch, rank, op.request, start, state[start : start + STATE_PART_BYTES], op.ordinal))
    return msgspec.structs.replace(saved, ordinal=op.ordinal)


def _unmet(fault: RequestFault, exchanges: int) -> None:
    """Of a rank that shares nothing."""
    raise WireError(f"request {fault.request} failed where ranks work together: {fault.error}")


def perform(
    step: Step,
    rank: int,
    executor: Executor,
    pulse: Pulse,
    states: ReceivedStates,
    send: Send,
    agree: Agree = _unmet,
) -> StepDone:
    """Perform the operations of a step in order, its further rounds of decoding between the layers of its blocks.

    What is drawn before the step's blocks are read goes out through `send`, and so do parts of states.
    """
    began = time.monotonic()
    saved: list[SavedState] = []
    pieces: list[RowPieces] = []
    decoding = Decoding(step, rank, executor, send)
    blocks = [op for op in step.ops if isinstance(op, PrefillOp)]
    net = FaultNet(executor, decoding, agree)
    for op in step.ops:
        match op:
            case OpenOp():
                fault = net.perform(op, partial(executor.open, op, states.take(op)))
                net.faults += [] if fault is None else [fault]
            case PrefillOp():
                pulse.phase = "prefill"
                if op is blocks[0]:
                    net.read_ahead(blocks)
                result = net.perform(op, partial(executor.prefill, op, decoding.pause))
                decoding.end_block(op)
                if result is not None:
                    pieces.append(result)
            case DecodeOp():
                pulse.phase = "decode"
                decoding.draw(op)
            case SaveOp():
                state = net.perform(op, partial(executor.save, op.request, op.snapshot))
                saved += [] if state is None else [_send_state(op, step, rank, state, send)]
            case CloseOp():
                executor.close(op.request)
        pulse.advance()
    executor.finish_step()
    drawn, more_faults = decoding.kept
    seconds = time.monotonic() - began
    # On a GPU the host waits for counts, so that those of a text that is drawn are told when it ends.
    guards = None if all(isinstance(op, DecodeOp) for op in step.ops) else executor.take_guards()
    return StepDone(
        step.epoch, step.k, rank, seconds, pieces, drawn, net.faults + more_faults, guards, saved, decoding.seconds
    )

"""Rounds of decoding that go between the layers of a step's blocks, in the same places on all ranks."""

import time
from collections.abc import Callable
from typing import Protocol, final

from dist_attn.wire.rank_messages import DecodeOp, Drawn, Draws, PrefillOp, RequestFault, Step

__all__ = ["Decoder", "Decoding"]


class Decoder(Protocol):
    """What decodes, and how often it can do so while a block is read."""

    @property
    def pauses(self) -> int: ...

    def decode(self, op: DecodeOp) -> list[Drawn | RequestFault]: ...


@final
class Decoding:
    """All decoding of one step on one rank.

    With R further rounds a step's blocks are R + 1 equal parts, counted in tokens of all ranks and in pauses, and a
    round follows each but the last. Every rank counts the same, so all decode at the same time.
    """

    def __init__(self, step: Step, rank: int, decoder: Decoder, send: Callable[[Draws], object]) -> None:
        self._step, self._rank, self._decoder, self._send = step, rank, decoder, send
        blocks = [op for op in step.ops if isinstance(op, PrefillOp)]
        self._left = [sum(op.lengths) for op in blocks]
        self._per_block = max(1, decoder.pauses)
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
        results = self._decoder.decode(op) if op.entries else []
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

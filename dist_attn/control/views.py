"""What the scheduler may know of the open work, and what it makes of it: frozen values."""

from dataclasses import dataclass

from dist_attn.rank_link.rows import GRAIN

__all__ = ["Block", "Limits", "Plan", "RequestView", "Turn", "View"]


@dataclass(frozen=True, slots=True)
class Limits:
    """How much goes into one step. Units: tokens and seconds; `block_tokens` and `beside_decode_tokens` are per rank.

    `step_s` is how long a step should read at most, as far as one chunk allows: what comes meanwhile waits for it.
    `token_s` and `round_s` are what a token of prefill and a round of decoding take; 0: not known yet.
    """

    ranks: int = 1
    block_tokens: int = 2048
    beside_decode_tokens: int = 512
    short_tokens: int = 2048
    max_requests: int = 4  # whose blocks share a step
    max_active: int = 128
    step_s: float = 0.25
    token_s: float = 0.0
    round_s: float = 0.0
    pauses: int = 0  # places in a block where a round of decoding may go


@dataclass(frozen=True, slots=True)
class RequestView:
    """One open request: tokens [start, start + available) may be prefilled now; `final`: none will follow them."""

    number: int
    opened: bool = True  # the ranks hold a state for it
    start: int = 0
    available: int = 0
    final: bool = False
    overdue: bool = False  # its tokens have waited long enough for more to come
    row_length: int | None = None  # a row ends at every multiple of it; None: only at the end of the input
    grid: int = GRAIN  # tokens; blocks and the slices of ranks are cut at multiples of it
    chunk: int = GRAIN  # tokens on all ranks; a block ends at every multiple of it
    due: tuple[int, ...] = ()  # where its next blocks ended when they were read before; they end there again
    home: int = 0  # the rank that reads what is too short to be shared
    ready: bool = False  # its prompt is prefilled: a token can be drawn
    owner: int | None = None  # the rank that keeps its state while it decodes
    blocked: bool = False  # its reader is slow: no work for now
    priority: int = 1  # 0 is the most urgent class, 2 the least
    queued_at: float = 0.0  # since when it waits for a place among the states
    swappable: bool = False  # its state may be put aside for one that is in more of a hurry


@dataclass(frozen=True, slots=True)
class Turn:
    """What a long document has had so far: its tokens, each counted by the weight of its class."""

    number: int
    passed: int


@dataclass(frozen=True, slots=True)
class View:
    """Everything the scheduler may know. `requests` stand in order of arrival."""

    limits: Limits
    requests: tuple[RequestView, ...]
    ring: tuple[Turn, ...] = ()


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens [start, start + sum(lengths)) of a request, `lengths[r]` of them on rank r."""

    request: int
    start: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens on all ranks together."""
        return sum(self.lengths)


@dataclass(frozen=True, slots=True)
class Plan:
    """The work of one step: requests to open, blocks to prefill, and the requests that each rank draws a token for.

    They draw `rounds` times more between the layers of the blocks. The states of `swaps` are put aside before anything
    is opened.
    """

    opens: tuple[int, ...]
    blocks: tuple[Block, ...]
    decodes: tuple[tuple[int, ...], ...]
    ring: tuple[Turn, ...]
    rounds: int = 0
    swaps: tuple[int, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not self.blocks and not any(self.decodes) and not self.swaps

"""The plain numbers in which a layer's costs are given: weights, operations, and traffic between ranks.

Letters: B batch, L tokens, P ranks.
"""

from dataclasses import dataclass

GRAIN = 512  # tokens; the canonical grid of blocks, of rank slices and of row pieces
BLOCK_TOKENS = 4 * GRAIN  # of a rank: in a step of an engine, and in a block that `encode` reads on a CPU
GPU_TOKENS = 32_768  # in a pass: an H100 computes for as long as the host takes to launch what computes them
SLOTS = 8  # sequences in a batch of decoding steps, empty ones included: products of fewer rows have other bits
FLOAT_BYTES = 4
POSITION_BYTES = 8
LOG_DECAY = 1  # numbers that every piece of a scanned message carries beside its sums


def tokens_at_once(device: str, on_cpu: int = GRAIN) -> int:
    """Tokens of a rank that a pass of a model takes at once on this kind of device: on a CPU as stay in its caches.

    On CPUs they decide the last bits of a text, which are the same on any number of ranks.
    """
    return on_cpu if device == "cpu" else max(on_cpu, GPU_TOKENS)


def tokens_of_block(device: str, *, writes: bool, on_cpu: int = GRAIN) -> int:
    """Tokens of a rank in a block of an engine: as many as a pass takes, or fewer where the model writes.

    States of prompts are kept at the ends of blocks alone, and those who wait for a token wait for a whole one.
    """
    return min(tokens_at_once(device, on_cpu), BLOCK_TOKENS if writes else GPU_TOKENS)


@dataclass(frozen=True)
class Weights:
    """The numbers that a layer holds.

    `matrices` are those of linear layers, which are rounded where fewer bits are asked for, with `rows` outputs in all;
    `others` are parameters that stay in float32 (biases, gates, filters, norms); `buffers` are fixed numbers.
    """

    matrices: int = 0
    rows: int = 0
    others: int = 0
    buffers: int = 0

    @property
    def parameters(self) -> int:
        """The number of learned values."""
        return self.matrices + self.others

    def __add__(self, more: "Weights") -> "Weights":
        return Weights(
            self.matrices + more.matrices,
            self.rows + more.rows,
            self.others + more.others,
            self.buffers + more.buffers,
        )

    def __mul__(self, count: int) -> "Weights":
        return Weights(count * self.matrices, count * self.rows, count * self.others, count * self.buffers)


def linear(inputs: int, outputs: int, *, bias: bool = False) -> Weights:
    """The weights of a linear layer."""
    return Weights(matrices=inputs * outputs, rows=outputs, others=outputs if bias else 0)


@dataclass(frozen=True)
class TokenFlops:
    """The cost of one token, by part: floating-point operations, two per multiply-add of a matrix product.

    Element-wise work (norms, activations, sin and cos, the short convolution, the sums over chunks) is not counted; it
    is what `Rates.prefill_efficiency` allows for. `scores` are the causal half of a square of which blocked kernels
    compute all.
    """

    projections: float = 0.0  # q, k, v, output and gates
    features: float = 0.0  # the random projections of the feature map
    scores: float = 0.0  # attention between tokens
    state: float = 0.0  # recurrent state: what a token adds and what it reads
    mlp: float = 0.0
    readout: float = 0.0  # from a hidden state to the vocabulary

    @property
    def total(self) -> float:
        """The sum of all parts."""
        return self.projections + self.features + self.scores + self.state + self.mlp + self.readout


@dataclass(frozen=True)
class ScanMessage:
    """The contribution of one rank to a scan over ranks: in each of `groups`, `sums` numbers, and their decay.

    The sums are `rows` of equal length, which a message that travels in pieces is cut along; each piece has the
    `weights`, which are one log decay for kernel attention.
    """

    groups: int
    sums: int
    element_bytes: int = FLOAT_BYTES
    rows: int = 1
    weights: int = LOG_DECAY
    # Heads of an affine recurrence, at which ranks may take turns in place of a scan; 0: they do not.
    heads: int = 0

    @property
    def state_bytes(self) -> int:
        """The bytes of the sums alone, which ranks that take turns pass on."""
        return self.groups * self.sums * self.element_bytes

    @property
    def erases(self) -> bool:
        """Return whether tokens act on a state by a matrix, and not by decays alone."""
        return self.weights > self.rows

    @property
    def bytes(self) -> int:
        """The bytes |x| of the message."""
        return self.groups * (self.sums + self.weights) * self.element_bytes

    def most_pieces(self, pieces: int) -> int:
        """The number of pieces into which a message can be cut where `pieces` are asked for."""
        return min(pieces, self.sums // self.rows)

    def piece_bytes(self, pieces: int) -> int:
        """The bytes of one of equal pieces, each with the weights."""
        columns = -(-(self.sums // self.rows) // pieces)
        return self.groups * (self.rows * columns + self.weights) * self.element_bytes


@dataclass(frozen=True)
class Traffic:
    """The contribution of one rank to the traffic when a layer mixes one sequence (or a block of it), forward.

    A state is `scanned` by the exchange that is chosen, or all-gathered (`gathered_bytes`); `edge_bytes` are tokens for
    the next rank's convolution, and `aside_bytes` small messages beside a state, both all-gathered. Where tokens are
    exchanged for `columns`, every rank gets all tokens of its share of them, `column_bytes` for a token and column, and
    sends `columns_back` back. `reduced` numbers are summed over ranks by an all-reduce.
    """

    scanned: ScanMessage | None = None
    gathered_bytes: int = 0
    edge_bytes: int = 0
    aside_bytes: int = 0
    columns: int = 0
    columns_back: int = 0
    column_bytes: int = 0
    columns_are: str = "channels"
    reduced: int = 0

    @property
    def carry_bytes(self) -> int:
        """The bytes of the state's message, by whichever exchange it travels."""
        return self.gathered_bytes + (0 if self.scanned is None else self.scanned.bytes)

    @property
    def travels(self) -> str:
        """The messages between ranks, in words."""
        named = {
            "a state": self.carry_bytes,
            f"all tokens of some {self.columns_are}": self.columns,
            "weighed sums of tokens": self.reduced,
            "edge tokens": self.edge_bytes,
        }
        return ", ".join(what for what, there in named.items() if there)


# The time to reduce tokens to what they do to a state, as a share of a walk that attends.
REDUCING_WALK = {"erases": 1.2, "decays": 0.4}


MOST_TURNS = 8
"""The most turns of a rank over groups of heads: each waits for a message, and 24 heads of 512 tokens by themselves
took 1.7 times as long as in 8 groups over two ranks of a busy machine.
"""


def takes_turns(ranks: int, groups: int, *, erases: bool) -> bool:
    """Return whether a recurrence is faster by turns of ranks at `groups` groups of heads than by a scan.

    With turns at G groups the last of P ranks is done after (G + P - 1) / G times its own work; with a scan, after
    1 + `REDUCING_WALK` times. States that have no such groups (0) are only scanned.
    """
    groups = min(groups, MOST_TURNS)
    return groups > 0 and ranks - 1 <= groups * REDUCING_WALK["erases" if erases else "decays"]

"""The memory, traffic, time and output of one document, put together from formulas of the model and of exchanges."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from dist_attn.costs.calibration import usual_exchange
from dist_attn.costs.exchanges import (
    Link,
    all_gather_bytes,
    all_gather_seconds,
    handing_seconds,
    scan_cost,
    scan_seconds,
)
from dist_attn.costs.models import ModelCosts
from dist_attn.errors import ConfigError, InputError
from dist_attn.model_config.figures import FLOAT_BYTES, GRAIN, Traffic
from dist_attn.model_config.mixer import MixerConfig
from dist_attn.wire.choices import WeightPrecision

OutputFormat = Literal["npy", "ndjson", "arrow"]
FORMATS: tuple[OutputFormat, ...] = ("npy", "ndjson")  # of files

NPY_HEADER_BYTES = 128
# A float32 in its fewest digits with its comma, and everything else on a line with its five whole numbers.
TEXT_BYTES_PER_NUMBER = 11.3
TEXT_BYTES_PER_ROW = 110
# Five whole numbers beside the vector, and what stands around a batch of rows.
ARROW_BYTES_PER_ROW, ARROW_BYTES_PER_BATCH, ARROW_BATCH_FLOATS = 40, 400, 1 << 15


def output_bytes(rows: int, hidden_size: int, file_format: OutputFormat) -> int:
    """The size of `rows` vectors: exact for npy, within a percent for arrow in more than a few rows, within a tenth or
    so for ndjson, whose numbers vary in length.
    """
    if file_format == "npy":
        return NPY_HEADER_BYTES + 4 * rows * hidden_size
    if file_format == "arrow":
        batches = 3 + -(-rows * hidden_size // ARROW_BATCH_FLOATS)  # with the schema and the summary
        return rows * (ARROW_BYTES_PER_ROW + 4 * hidden_size) + batches * ARROW_BYTES_PER_BATCH
    return round(rows * (TEXT_BYTES_PER_ROW + TEXT_BYTES_PER_NUMBER * hidden_size))


# Python, torch and the libraries beside it, on a CPU, and what the allocator keeps between blocks: measured, a process
# whose tensors come to 52 MiB takes 351 MiB after 5 blocks of 2048 tokens and 374 to 393 after 60.
PROCESS_BYTES = 320 << 20
STEP_MESSAGES = 9  # that an exchange in steps holds, with any number of ranks


@dataclass(frozen=True)
class Rates:
    """The speeds that one rank is taken to have: cautious figures for one CPU core and for ranks on one machine.

    `prefill_efficiency` is the share of the matmul rate that a whole model reaches in prefill; `text_tokens_per_s` is
    how fast rank 0 reads and tokenises. `exposed_s` is for how long the exchanges of one layer and block hold up a
    rank, its wait for slower ranks among it; `handing_s` is how long the tokens of a block take to the ranks and its
    rows back. None: from the link, as if all ranks were equally fast and computed nothing meanwhile.
    """

    matmul_flops_per_s: float = 30e9
    memory_bytes_per_s: float = 10e9
    prefill_efficiency: float = 0.6
    link: Link = field(default_factory=lambda: Link(latency_s=100e-6, bytes_per_s=1e9))
    text_tokens_per_s: float = 1e6
    exposed_s: float | None = None
    handing_s: float | None = None


@dataclass(frozen=True)
class MemoryPerRank:
    """The parts of a rank's memory.

    Units: bytes. While weights are read they are there twice, in float32 whatever they become: `loading`, which is
    held before there is a state, and is the peak of a model with few activations.
    """

    process: int
    weights: int
    state: int
    activations: int
    exchange: int
    loading: int

    @property
    def peak(self) -> int:
        """The most bytes that are held at once."""
        return self.process + max(self.loading, self.weights + self.state + self.activations + self.exchange)


@dataclass(frozen=True)
class Estimate:
    """The cost of one document of `tokens` on `ranks` ranks.

    Units: bytes and seconds; "sent" is the most that one rank sends in all; `output` holds bytes by rows and by format.
    The four times follow each other on rank 0 and are those of `EncodeReport`: `compute` in the model, `exchange` held
    up by exchanges inside it, `text` reading and tokenising (the other ranks wait), `handing` tokens to the ranks and
    rows back. `exchange` names how states travel; empty where none do. Where layers differ, it names all ways, and the
    two messages are the largest of any layer. `decode_tokens_per_second` is None of a model that writes nothing.
    """

    tokens: int
    ranks: int
    block_tokens: int
    blocks: int
    parameters: int
    weights: WeightPrecision
    flops_per_token: float
    memory: MemoryPerRank
    exchange: str
    carry_message_bytes: int
    halo_message_bytes: int
    carry_bytes_sent: int
    halo_bytes_sent: int
    key_bytes_sent: int
    compute_seconds: float
    exchange_seconds: float
    text_seconds: float
    handing_seconds: float
    decode_tokens_per_second: float | None
    output: dict[str, dict[str, int]]
    rates: Rates

    @property
    def prefill_seconds(self) -> float:
        """The seconds to read the whole document."""
        return self.compute_seconds + self.exchange_seconds + self.text_seconds + self.handing_seconds


def estimate(
    model: ModelCosts,
    tokens: int,
    *,
    ranks: int = 1,
    block_tokens: int = 4 * GRAIN,
    window: int = 512,
    rates: Rates | None = None,
    exchange: str | None = None,
) -> Estimate:
    """Estimate the cost of a document of `tokens`, in blocks of `block_tokens` per rank, with a row per `window`.

    `exchange` is how states travel between ranks, by default what is chosen where nothing was measured.

    Raises: InputError for counts below 1, ConfigError for an exchange that is unknown or not for so many ranks.
    """
    for name, value in (("tokens", tokens), ("ranks", ranks), ("block_tokens", block_tokens), ("window", window)):
        if value < 1:
            raise InputError(f"{name} is {value}; it must be 1 or more")
    rates = Rates() if rates is None else rates
    layers = [_LayerExchange.of(mixer, layers, ranks, exchange) for mixer, layers in model.kinds.items()]
    blocks = -(-tokens // (ranks * block_tokens))
    flops = model.prefill_flops(tokens, ranks).total
    operations = busiest_rank_tokens(tokens, ranks, block_tokens) * flops
    keys = model.over_layers(lambda mixer: mixer.key_bytes_sent(tokens, ranks, block_tokens))
    return Estimate(
        tokens=tokens,
        ranks=ranks,
        block_tokens=block_tokens,
        blocks=blocks,
        parameters=model.parameters,
        weights=model.weights,
        flops_per_token=flops,
        memory=_memory(model, tokens, ranks, block_tokens, layers),
        exchange=" and ".join(dict.fromkeys(layer.algorithm for layer in layers if layer.algorithm)),
        carry_message_bytes=model.carry_bytes,
        halo_message_bytes=max((layer.edge_bytes for layer in layers), default=0),
        carry_bytes_sent=blocks * sum(layer.layers * layer.state_bytes_sent() for layer in layers),
        halo_bytes_sent=blocks * sum(layer.layers * all_gather_bytes(layer.edge_bytes, ranks) for layer in layers),
        key_bytes_sent=keys,
        compute_seconds=operations / (rates.matmul_flops_per_s * rates.prefill_efficiency),
        exchange_seconds=_exchange_seconds(layers, blocks, ranks, keys, rates),
        text_seconds=tokens / rates.text_tokens_per_s,
        handing_seconds=_handing_seconds(model, tokens, ranks, block_tokens, window, rates),
        decode_tokens_per_second=_decode_rate(model, tokens, rates),
        output={
            rows: {kind: output_bytes(count, model.hidden_size, kind) for kind in FORMATS}
            for rows, count in (("token", tokens), ("window", -(-tokens // window)), ("document", 1))
        },
        rates=rates,
    )


@dataclass(frozen=True)
class _LayerExchange:
    """The exchange of states and edge tokens in each of `layers` layers, a block; `algorithm` is "" without states."""

    mixer: MixerConfig
    traffic: Traffic
    layers: int
    algorithm: str
    ranks: int

    @staticmethod
    def of(mixer: MixerConfig, layers: int, ranks: int, exchange: str | None) -> "_LayerExchange":
        traffic = mixer.traffic()
        if ranks == 1 or not traffic.carry_bytes:
            return _LayerExchange(mixer, traffic, layers, "", ranks)
        if traffic.scanned is None:  # whatever is chosen for states that are scanned
            return _LayerExchange(mixer, traffic, layers, "gather", ranks)
        if exchange == "pair" and ranks != 2:
            raise ConfigError(f"the exchange pair is for 2 ranks, not {ranks}; leave it open, or take gather")
        return _LayerExchange(mixer, traffic, layers, exchange or usual_exchange(traffic.scanned, ranks), ranks)

    @property
    def edge_bytes(self) -> int:
        return self.traffic.edge_bytes

    def state_bytes_sent(self) -> int:
        """The bytes in one layer of the rank that sends most."""
        if not self.algorithm:
            return 0
        message = self.traffic.scanned
        if message is None:
            return all_gather_bytes(self.traffic.gathered_bytes, self.ranks)
        costs = (scan_cost(self.algorithm, message, self.ranks, r, hosts=self._hosts) for r in range(self.ranks))
        return max(cost.bytes_sent for cost in costs)

    def seconds(self, link: Link) -> float:
        """The seconds of one layer."""
        edges = all_gather_seconds(self.edge_bytes, self.ranks, link) if self.edge_bytes else 0.0
        if not self.algorithm:
            return edges
        if self.traffic.scanned is None:
            return edges + all_gather_seconds(self.traffic.gathered_bytes, self.ranks, link)
        return edges + scan_seconds(self.algorithm, self.traffic.scanned, self.ranks, link, hosts=self._hosts)

    def memory_bytes(self, block_tokens: int) -> int:
        """The bytes that a rank holds for the exchanges of one layer."""
        edges = 0 if self.ranks == 1 else (3 * self.ranks + 3) * self.edge_bytes
        carries = self._messages_held() * self.traffic.carry_bytes if self.algorithm else 0
        return carries + edges + self.mixer.key_exchange_bytes(self.ranks, block_tokens)

    def _messages_held(self) -> int:
        """The number of messages of state that a rank holds at once, in whole ones."""
        # Folding P states holds the P gathered ones, P + 1 prefixes, and a copy of these from which a rank picks its
        # own; in steps, what is sent and received, the sums before and of all, and the states they are cut from.
        held = 3 * self.ranks + 3
        return held if self.algorithm in ("gather", "two_level") else min(held, STEP_MESSAGES)

    @property
    def _hosts(self) -> tuple[tuple[int, ...], ...]:
        """The one host for which a plan is made."""
        return (tuple(range(self.ranks)),)


def _exchange_seconds(layers: Sequence[_LayerExchange], blocks: int, ranks: int, key_bytes: int, rates: Rates) -> float:
    if ranks == 1:
        return 0.0
    if rates.exposed_s is not None:
        return blocks * sum(layer.layers for layer in layers) * rates.exposed_s
    link = rates.link
    of_keys = sum(layer.layers for layer in layers if layer.mixer.key_exchange_bytes(ranks, 1))
    keys = 2 * blocks * of_keys * (ranks - 1) * link.latency_s + key_bytes / link.bytes_per_s
    return blocks * sum(layer.layers * layer.seconds(link) for layer in layers) + keys


def _handing_seconds(model: ModelCosts, tokens: int, ranks: int, block_tokens: int, window: int, rates: Rates) -> float:
    blocks = -(-tokens // (ranks * block_tokens))
    if rates.handing_s is not None:
        return blocks * rates.handing_s
    row_bytes = FLOAT_BYTES * model.hidden_size * -(-block_tokens // min(window, GRAIN))
    return blocks * handing_seconds(ranks, block_tokens, row_bytes, rates.link)


def busiest_rank_tokens(tokens: int, ranks: int, block_tokens: int) -> int:
    """The tokens of the rank that gets most when every block is cut as evenly as the grain allows."""
    blocks, rest = divmod(tokens, ranks * block_tokens)
    pieces = -(-rest // GRAIN)
    share = -(-pieces // ranks) * GRAIN
    return blocks * block_tokens + min(rest, share)


def _memory(
    model: ModelCosts, tokens: int, ranks: int, block_tokens: int, layers: Sequence[_LayerExchange]
) -> MemoryPerRank:
    return MemoryPerRank(
        process=PROCESS_BYTES,
        weights=model.weights_bytes,
        state=model.state_bytes_of_rank(tokens, ranks),
        activations=model.activation_bytes(busiest_rank_tokens(min(tokens, ranks * block_tokens), ranks, block_tokens)),
        exchange=max((layer.memory_bytes(min(block_tokens, -(-tokens // ranks))) for layer in layers), default=0),
        loading=2 * model.read_bytes,
    )


def _decode_rate(model: ModelCosts, position: int, rates: Rates) -> float | None:
    """The tokens per second of one session: all weights are read, its state read and written, products computed."""
    flops, moved = model.decode_flops(position), model.weights_bytes + 2 * model.state_bytes(position)
    if flops is None:
        return None
    return 1 / max(moved / rates.memory_bytes_per_s, flops.total / rates.matmul_flops_per_s)

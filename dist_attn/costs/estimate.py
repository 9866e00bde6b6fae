"""Memory, traffic, time and output of one document, put together from the model's and the exchanges' formulas."""

from dataclasses import dataclass, field

from dist_attn.costs.exchanges import Link, all_gather_bytes, all_gather_seconds
from dist_attn.costs.models import LanguageModelCosts
from dist_attn.costs.output import FORMATS, output_bytes
from dist_attn.errors import InputError

__all__ = ["GRAIN", "Estimate", "MemoryPerRank", "Rates", "busiest_rank_tokens", "estimate"]

GRAIN = 512  # tokens; ranks are cut on this grid
PROCESS_BYTES = 300 << 20  # Python, torch and the libraries beside it, on a CPU


@dataclass(frozen=True)
class Rates:
    """How fast one rank is taken to be: cautious figures for one CPU core and for ranks on one machine.

    `prefill_efficiency` is the share of the matmul rate that a whole model reaches in prefill.
    """

    matmul_flops_per_s: float = 30e9
    memory_bytes_per_s: float = 10e9
    prefill_efficiency: float = 0.6
    link: Link = field(default_factory=lambda: Link(latency_s=100e-6, bytes_per_s=1e9))


@dataclass(frozen=True)
class MemoryPerRank:
    """Where a rank's memory goes.

    Units: bytes. While weights are read they are there twice, which is the peak of a model with few activations.
    """

    process: int
    weights: int
    state: int
    activations: int
    exchange: int

    @property
    def peak(self) -> int:
        """The most that is held at once."""
        return self.process + self.weights + max(self.weights, self.state + self.activations + self.exchange)


@dataclass(frozen=True)
class Estimate:
    """What one document of `tokens` costs on `ranks` ranks.

    Units: bytes and seconds; "sent" is what one rank sends in all; `output` holds bytes by rows and by format.
    """

    tokens: int
    ranks: int
    block_tokens: int
    blocks: int
    parameters: int
    flops_per_token: float
    memory: MemoryPerRank
    carry_message_bytes: int
    halo_message_bytes: int
    carry_bytes_sent: int
    halo_bytes_sent: int
    key_bytes_sent: int
    compute_seconds: float
    exchange_seconds: float
    decode_tokens_per_second: float
    output: dict[str, dict[str, int]]
    rates: Rates

    @property
    def prefill_seconds(self) -> float:
        """Reading the whole document."""
        return self.compute_seconds + self.exchange_seconds


def estimate(
    model: LanguageModelCosts,
    tokens: int,
    *,
    ranks: int = 1,
    block_tokens: int = 4 * GRAIN,
    window: int = 512,
    rates: Rates | None = None,
) -> Estimate:
    """What a document of `tokens` costs, read in blocks of `block_tokens` per rank.

    Raises: InputError for counts below 1.
    """
    for name, value in (("tokens", tokens), ("ranks", ranks), ("block_tokens", block_tokens), ("window", window)):
        if value < 1:
            raise InputError(f"{name} is {value}; it must be 1 or more")
    rates = Rates() if rates is None else rates
    carry, halo = model.mixer.carry_bytes(), model.mixer.halo_bytes()
    blocks = -(-tokens // (ranks * block_tokens))
    exchanges = blocks * model.num_layers
    flops = model.prefill_flops(tokens, ranks).total
    operations = busiest_rank_tokens(tokens, ranks, block_tokens) * flops
    keys = model.num_layers * model.mixer.key_bytes_sent(tokens, ranks, block_tokens)
    return Estimate(
        tokens=tokens,
        ranks=ranks,
        block_tokens=block_tokens,
        blocks=blocks,
        parameters=model.parameters,
        flops_per_token=flops,
        memory=_memory(model, tokens, ranks, block_tokens),
        carry_message_bytes=carry,
        halo_message_bytes=halo,
        carry_bytes_sent=exchanges * all_gather_bytes(carry, ranks),
        halo_bytes_sent=exchanges * all_gather_bytes(halo, ranks),
        key_bytes_sent=keys,
        compute_seconds=operations / (rates.matmul_flops_per_s * rates.prefill_efficiency),
        exchange_seconds=exchanges * sum(all_gather_seconds(m, ranks, rates.link) for m in (carry, halo) if m)
        + (2 * exchanges * (ranks - 1) * rates.link.latency_s + keys / rates.link.bytes_per_s if keys else 0.0),
        decode_tokens_per_second=1 / _decode_seconds(model, tokens, rates),
        output={
            rows: {kind: output_bytes(count, model.hidden_size, kind) for kind in FORMATS}
            for rows, count in (("token", tokens), ("window", -(-tokens // window)), ("document", 1))
        },
        rates=rates,
    )


def busiest_rank_tokens(tokens: int, ranks: int, block_tokens: int, grain: int = GRAIN) -> int:
    """Tokens of the rank that gets most when every block is cut as evenly as the grain allows."""
    blocks, rest = divmod(tokens, ranks * block_tokens)
    pieces = -(-rest // grain)
    share = -(-pieces // ranks) * grain
    return blocks * block_tokens + min(rest, share)


def _memory(model: LanguageModelCosts, tokens: int, ranks: int, block_tokens: int) -> MemoryPerRank:
    # Folding P states holds the P gathered ones, P + 1 prefixes, and a copy of these from which a rank picks its own.
    messages = 0 if ranks == 1 else 3 * ranks + 3
    return MemoryPerRank(
        process=PROCESS_BYTES,
        weights=model.weights_bytes,
        state=model.state_bytes(model.mixer.kept_tokens(tokens, ranks)),
        activations=model.activation_bytes(busiest_rank_tokens(min(tokens, ranks * block_tokens), ranks, block_tokens)),
        exchange=messages * (model.mixer.carry_bytes() + model.mixer.halo_bytes())
        + model.mixer.key_exchange_bytes(ranks, min(block_tokens, -(-tokens // ranks))),
    )


def _decode_seconds(model: LanguageModelCosts, position: int, rates: Rates) -> float:
    """One token of one session: all weights are read, its state is read and written, and the products are computed."""
    moved = model.weights_bytes + 2 * model.state_bytes(position)
    return max(moved / rates.memory_bytes_per_s, model.decode_flops(position).total / rates.matmul_flops_per_s)

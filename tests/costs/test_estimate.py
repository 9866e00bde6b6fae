"""A whole estimate: against real ranks, real layouts and real output, and what it refuses."""

import io
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from dist_attn_service.encodings.encoding_run import RowBlock
from dist_attn_service.encodings.formats import format_rows

from dist_attn.comm import Communicator, run_simulated
from dist_attn.costs import LanguageModelCosts, Link, Rates, estimate, output_bytes, read_model_costs
from dist_attn.costs.estimate import GRAIN, busiest_rank_tokens
from dist_attn.errors import ConfigError, InputError
from dist_attn.layout import SequenceLayout
from dist_attn.models import LanguageModel
from dist_attn.rank_link import rows as control_rows
from dist_attn.sharded import Algorithm, ScanExchange, ShardedSequenceOps
from tests.support.model_cases import MODEL_CASES, kinds_of, small_model, write_config
from tests.support.models import small_config


def _edges(model: LanguageModelCosts) -> int:
    return next(iter(model.kinds)).traffic().edge_bytes


KERNEL_CASES = [name for name in MODEL_CASES if "softmax" not in kinds_of(name)]


@pytest.mark.parametrize("case", KERNEL_CASES)
def test_bytes_between_ranks(case: str, tmp_path: Path) -> None:
    """What ranks send while they read a text, block by block, is what the estimate says; at most without gradients."""
    model, costs = small_model(case), read_model_costs(write_config(case, tmp_path))
    for ranks in (1, 2, 3):
        check_bytes(model, costs, ranks)


def check_bytes(model: LanguageModel, costs: LanguageModelCosts, ranks: int) -> None:
    """Of so many ranks."""
    block, tokens = 4, 4 * ranks * 2 + 1

    def read(comm: Communicator, gradients: bool) -> dict[str, int]:
        state = None
        for piece in torch.zeros(1, tokens, dtype=torch.int64).split(ranks * block, dim=1):
            layout = SequenceLayout.even(piece.shape[1], ranks)
            mine = slice(*layout.range(comm.rank))
            with torch.set_grad_enabled(gradients):
                _, state = model.hidden(piece[:, mine], ShardedSequenceOps(comm, layout), state)
        sent = Counter[str]()
        for event in comm.traffic.events:
            sent[event.label.removesuffix(" with gradient")] += event.bytes_sent
        return {kind: sent[kind] for kind in ("carry", "halo")}

    sent, without = (run_simulated(partial(read, gradients=gradients), ranks) for gradients in (True, False))
    result = estimate(costs, tokens, ranks=ranks, block_tokens=block)
    want = {"carry": result.carry_bytes_sent, "halo": result.halo_bytes_sent}
    # In turn it is the last rank that sends most, its state to all others.
    assert sent[-1] == want
    assert result.exchange == "in_turn" or sent == [want] * ranks
    assert all(of_rank[kind] <= want[kind] for of_rank in without for kind in want)
    assert result.blocks == 3


@pytest.mark.parametrize("exchange", ["gather", "log_step", "pipelined_ring", "two_level"])
def test_bytes_of_a_chosen_exchange(exchange: Algorithm, tmp_path: Path) -> None:
    """The estimate of an exchange that was chosen is what the busiest rank sends, block by block."""
    model, block, ranks, tokens = small_model("gated"), 4, 3, 20
    hosts = ((0, 1, 2),) if exchange == "two_level" else ()

    def read(comm: Communicator) -> int:
        state = None
        for piece in torch.zeros(1, tokens, dtype=torch.int64).split(ranks * block, dim=1):
            layout = SequenceLayout.even(piece.shape[1], ranks)
            ops = ShardedSequenceOps(comm, layout, exchange=ScanExchange(exchange, hosts=hosts))
            _, state = model.hidden(piece[:, slice(*layout.range(comm.rank))], ops, state)
        return sum(e.bytes_sent for e in comm.traffic.events if e.label == "carry")

    with torch.inference_mode():
        sent = run_simulated(read, ranks)
    costs = read_model_costs(write_config("gated", tmp_path))
    result = estimate(costs, tokens, ranks=ranks, block_tokens=block, exchange=exchange)
    assert max(sent) == result.carry_bytes_sent
    assert result.exchange == exchange


def test_the_exchange_that_is_estimated(tmp_path: Path, running_sum: str) -> None:
    """Without a choice it is the rule's for so many ranks; states that are always gathered have no choice."""
    kernel = read_model_costs(write_config("gated", tmp_path / "kernel"))
    gathered = LanguageModelCosts(small_config(mixer={"kind": running_sum, "hidden_size": 16}))
    exact = read_model_costs(write_config("softmax", tmp_path / "exact"))
    assert [estimate(kernel, 1000, ranks=p).exchange for p in (1, 2, 8, 9)] == ["", "pair", "gather", "log_step"]
    assert estimate(gathered, 1000, ranks=9, exchange="log_step").exchange == "gather"
    assert estimate(exact, 1000, ranks=9, exchange="log_step").exchange == ""
    # What a rank holds of the others' states grows with them only where it gathers them.
    held = [estimate(kernel, 10**6, ranks=p, exchange="log_step").memory.exchange for p in (16, 64)]
    assert held[1] - held[0] == 3 * (64 - 16) * _edges(kernel)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_bytes_of_exact_attention(ranks: int, tmp_path: Path) -> None:
    """With exact attention the ranks send what the estimate says: the first block's heads, then queries and parts."""
    model, block, tokens = small_model("softmax"), 4, 4 * ranks * 3

    def read(comm: Communicator) -> tuple[int, int]:
        state = None
        for piece in torch.zeros(1, tokens, dtype=torch.int64).split(ranks * block, dim=1):
            layout = SequenceLayout.even(piece.shape[1], ranks)
            mine = slice(*layout.range(comm.rank))
            _, state = model.hidden(piece[:, mine], ShardedSequenceOps(comm, layout), state)
        sent = {e.label: 0 for e in comm.traffic.events}
        for event in comm.traffic.events:
            sent[event.label] += event.bytes_sent
        keys = sum(sent.get(label, 0) for label in ("heads", "heads back", "queries", "partial outputs"))
        return keys, sent.get("halo", 0)

    with torch.inference_mode():
        sent = run_simulated(read, ranks)
    result = estimate(read_model_costs(write_config("softmax", tmp_path)), tokens, ranks=ranks, block_tokens=block)
    assert [keys for keys, _ in sent] == [result.key_bytes_sent] * ranks
    assert max(halo for _, halo in sent) == result.halo_bytes_sent


def test_exact_attention_shares_its_keys(tmp_path: Path) -> None:
    """Four ranks keep a quarter of the keys each, and take time to exchange."""
    costs = read_model_costs(write_config("softmax", tmp_path))
    one, four = estimate(costs, 1 << 20), estimate(costs, 1 << 20, ranks=4)
    assert one.memory.state / four.memory.state == pytest.approx(4, rel=1e-3)
    assert four.exchange_seconds > one.exchange_seconds == 0
    assert four.memory.exchange > one.memory.exchange == 0


def test_the_busiest_rank_is_the_layouts() -> None:
    """The most tokens of any rank are those that the even layouts of all blocks give rank 0."""
    for tokens in [1, 511, 512, 513, 2048, 5000, 12_345]:
        for ranks in [1, 2, 3, 7]:
            block = 4 * GRAIN * ranks
            pieces = [min(block, tokens - start) for start in range(0, tokens, block)]
            wanted = sum(SequenceLayout.even(n, ranks, GRAIN).lengths[0] for n in pieces)
            assert busiest_rank_tokens(tokens, ranks, 4 * GRAIN) == wanted


def test_the_grid_is_the_controllers() -> None:
    """Ranks are cut on the grid that the engine uses."""
    assert GRAIN == control_rows.GRAIN


def test_time(tmp_path: Path) -> None:
    """Four parts follow each other: computing, exchanges of every block and layer, the text, tokens and rows."""
    model = read_model_costs(write_config("gated", tmp_path))
    rates = Rates(1e9, 1e8, 0.5, Link(1e-3, 1e6), text_tokens_per_s=1e5)
    one = estimate(model, 10_000, rates=rates)
    assert one.compute_seconds == pytest.approx(10_000 * model.prefill_flops(1).total / 0.5e9)
    assert (one.exchange_seconds, one.text_seconds, one.handing_seconds) == (0, pytest.approx(0.1), 0)
    four = estimate(model, 4 * 2048 * 3, ranks=4, rates=rates)
    assert four.compute_seconds == pytest.approx(3 * 2048 * model.prefill_flops(1, ranks=4).total / 0.5e9)
    message = four.carry_message_bytes + four.halo_message_bytes
    assert four.exchange_seconds == pytest.approx(3 * 2 * 3 * (2 * 1e-3 + message / 1e6))
    # Two steps of two broadcasts; three messages from each of three ranks, with four rows of 64 numbers.
    handed = 2 * (2e-3 + 4 * 4 * 2048 / 1e6) + 3 * (3e-3 + 4 * 4 * 64 / 1e6)
    assert four.handing_seconds == pytest.approx(3 * handed)
    parts = (four.compute_seconds, four.exchange_seconds, four.text_seconds, four.handing_seconds)
    assert four.prefill_seconds == pytest.approx(sum(parts))
    moved = model.weights_bytes + 2 * model.state_bytes()
    assert one.decode_tokens_per_second == pytest.approx(1e8 / moved)


def test_time_of_a_chosen_exchange(tmp_path: Path) -> None:
    """A pair swaps once where a gather of two does as well; log steps of eight ranks take three messages, not seven."""
    model = read_model_costs(write_config("gated", tmp_path))
    rates = Rates(link=Link(1e-3, 1e6))
    steps, gather = (
        estimate(model, 8 * 2048, ranks=8, rates=rates, exchange=name).exchange_seconds
        for name in ("log_step", "gather")
    )
    message_s = 1e-3 + model.carry_bytes / 1e6
    assert gather - steps == pytest.approx(model.config.num_layers * (7 - 3) * message_s)
    pair = estimate(model, 2 * 2048, ranks=2, rates=rates).exchange_seconds
    assert pair == pytest.approx(model.config.num_layers * (message_s + 1e-3 + _edges(model) / 1e6))


def test_measured_times_take_the_place_of_the_links(tmp_path: Path) -> None:
    """What ranks measured counts for each layer and block, and for each block, whatever the link; one rank has none."""
    model = read_model_costs(write_config("gated", tmp_path))
    rates = Rates(link=Link(1.0, 1.0), exposed_s=0.25, handing_s=0.5)
    result = estimate(model, 2 * 2048 * 3 + 1, ranks=2, rates=rates)
    assert result.exchange_seconds == 4 * model.config.num_layers * 0.25
    assert result.handing_seconds == 4 * 0.5
    assert estimate(model, 2048, rates=rates).exchange_seconds == 0


def test_memory_does_not_grow_with_the_document(tmp_path: Path) -> None:
    """A kernel model needs the same memory for a thousand times the tokens; an exact one does not."""
    kernel = read_model_costs(write_config("gated", tmp_path / "kernel"))
    exact = read_model_costs(write_config("softmax", tmp_path / "exact"))
    assert estimate(kernel, 10**8, ranks=4).memory == estimate(kernel, 10**5, ranks=4).memory
    assert estimate(exact, 10**8).memory.peak > 100 * estimate(exact, 10**5).memory.peak


def test_size_of_a_npy_file(tmp_path: Path) -> None:
    """The npy figure is exact."""
    for rows in (1, 999, 100_000):
        file = io.BytesIO()
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (rows, 24)})
        assert output_bytes(rows, 24, "npy") == len(file.getvalue()) + rows * 24 * 4


@pytest.mark.parametrize("dim", [16, 256])
def test_size_of_ndjson(dim: int) -> None:
    """The NDJSON figure is within a tenth of what the service writes for vectors of unit scale."""
    vectors = np.random.default_rng(0).standard_normal((64, dim)).astype("<f4")
    starts_N = np.arange(0, 64 * 512, 512)
    stops_N = starts_N + 512
    lines = format_rows(RowBlock(0, np.stack([starts_N, stops_N, 4 * starts_N, 4 * stops_N], axis=1), vectors))
    assert output_bytes(64, dim, "ndjson") == pytest.approx(len(lines), rel=0.1)


@pytest.mark.parametrize("wrong", [{"tokens": 0}, {"ranks": 0}, {"block_tokens": 0}, {"window": -1}])
def test_refuses_counts_below_one(wrong: dict[str, int], tmp_path: Path) -> None:
    """A count below 1 is refused by name."""
    model = read_model_costs(write_config("gated", tmp_path))
    with pytest.raises(InputError, match=next(iter(wrong))):
        estimate(model, **{"tokens": 10, **wrong})


@pytest.mark.parametrize(("exchange", "says"), [("pair", "for 2 ranks, not 3"), ("pigeons", "no formula")])
def test_refuses_exchanges(exchange: str, says: str, tmp_path: Path) -> None:
    """An exchange that is unknown, or not for so many ranks, is refused."""
    model = read_model_costs(write_config("gated", tmp_path))
    with pytest.raises(ConfigError, match=says):
        estimate(model, 10, ranks=3, exchange=exchange)

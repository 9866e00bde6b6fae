"""How many tokens the million-scale model keeps and its experts take: shares as they are written, and broken scores."""

import math

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.models import build_model
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from dist_attn_papers.million.config import MillionConfig
from dist_attn_papers.million.model import MillionModel

SIZES = {"vocab_size": 40, "hidden_size": 6, "num_heads": 2, "mlp_size": 8, "num_classes": 3}


def _model(**parts: dict) -> MillionModel:
    return build_model(MillionConfig.model_validate({**SIZES, **parts}))


def test_top_k_of_broken_embeddings_keeps_what_one_rank_keeps() -> None:
    """Where all embeddings are NaN a fixed share of the tokens stays all the same, the first ones, over ranks too."""
    torch.manual_seed(0)
    model = _model(selector={"gate": "top_k", "rate": 0.3}, router={"num_experts": 2})
    with torch.no_grad():
        model.embedding.weight.fill_(torch.nan)
    tokens_L = torch.arange(10)

    def run(comm: Communicator) -> list[int]:
        layout = SequenceLayout.from_lengths((1, 9))
        ops = ShardedSequenceOps(comm, layout)
        return model.read(tokens_L[slice(*layout.range(comm.rank))], ops).selected.position_N.tolist()

    assert model.read(tokens_L, LocalSequenceOps()).selected.position_N.tolist() == [0, 1, 2]
    assert [position for own in run_simulated(run, 2) for position in own] == [0, 1, 2]


@pytest.mark.parametrize(("rate", "total", "count"), [(0.07, 100, 7), (0.3, 10, 3), (0.1, 30, 3), (1e-5, 10**6, 10)])
def test_a_share_is_the_number_that_is_written(rate: float, total: int, count: int) -> None:
    """A share of 0.07 of 100 tokens is 7 of them, where the product of the floats lies above; one more token adds 1."""
    selector = _model(selector={"gate": "top_k", "rate": rate}).selector
    kept = [selector(torch.zeros(1, 6), torch.zeros(1, dtype=torch.int64), n, 0).at_most for n in (total, total + 1)]
    assert kept == [count, count + 1]


def test_an_expert_has_room_for_the_share_that_is_written() -> None:
    """1.1 times 100 tokens over 10 experts are 11 each, not 12."""
    (layer,) = _model(router={"num_experts": 10, "capacity_factor": 1.1}).layers
    assert math.ceil(1.1 * 100 / 10) == 12
    assert [layer.capacity(total) for total in (100, 101, 0)] == [11, 12, 1]

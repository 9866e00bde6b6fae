"""How many tokens the million-scale model keeps: also of tokens whose scores are no numbers."""

import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.models import MillionConfig, MillionModel, build_model
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps

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

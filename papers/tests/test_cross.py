"""Attention over a memory: later queries, the options that it shares with other mixers, the order of its sums."""

import pytest
import torch
from torch import Tensor

from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.mixers import RelativeConfig
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from dist_attn_papers.mixers.cross import CrossAttention
from dist_attn_papers.mixers.cross_config import CrossConfig
from tests.mixers.test_contract import check_divisors
from tests.mixers.test_key_weights import SIZE, _options
from tests.mixers.test_random_matrices import _mixer
from tests.support.closeness import assert_close
from tests.support.fixed_order import FixedOrder
from tests.support.sharded_call import random_tensor


def test_cross_attention_reads_later_queries_from_the_state() -> None:
    """Decoding over an absorbed memory gives what the parallel form gave, on each of several ranks."""
    mixer = CrossAttention(CrossConfig(attention="rfa", **_options())).double()
    x, memory = random_tensor(2, 5, SIZE, seed=0), 3 * random_tensor(2, 9, SIZE, seed=1)
    want, _ = mixer(x, memory, LocalSequenceOps())
    layout = SequenceLayout.from_lengths([5, 4])

    def body(comm: Communicator) -> Tensor:
        ops = ShardedSequenceOps(comm, SequenceLayout.from_lengths([1, 0]), layout)
        own = x[:, :1] if comm.rank == 0 else x[:, :0]
        _, state = mixer(own, memory[:, slice(*layout.range(comm.rank))], ops)
        return mixer.read(x, state, torch.arange(5).expand(2, 5)).detach()

    for got in run_simulated(body, 2):
        assert_close(got, want)


def test_orthogonal_matrices_are_those_of_every_mixer() -> None:
    """The option means the same as for causal attention: the same matrices."""
    values = {"hidden_size": 12, "num_heads": 3, "num_random": 8, "orthogonal": True}
    cross = CrossAttention(CrossConfig(attention="rfa", **values, pool=5))
    assert torch.equal(cross.attend.w_HDK, _mixer(orthogonal=True, pool=5).w_HDK)


def test_what_attention_over_a_memory_divides_by() -> None:
    """A new configuration has the low floor and says so when it is saved; null keeps what it meant before that."""
    check_divisors(CrossConfig)


@pytest.mark.parametrize("attention", ["scaleformer", "softmax"])
def test_sums_over_relative_positions_have_one_order(attention: str) -> None:
    """Gradients of a table's row come from many pairs: of decode steps over a memory."""
    sizes = {"hidden_size": 16, "num_heads": 2, "attention": attention}
    sizes |= {"reach": 3} if attention == "scaleformer" else {"relative": RelativeConfig(reach=3)}
    cross = CrossAttention(CrossConfig(**sizes)).to("meta")
    x_BLD = torch.zeros(2, 150, 16, device="meta", requires_grad=True)
    with FixedOrder():
        _, memory = cross(x_BLD, x_BLD, LocalSequenceOps())
        cross.read(x_BLD[:, :3], memory, torch.arange(3, device="meta").expand(2, 3)).sum().backward()

"""On GPUs the same work has the same bits in each run: no sum in models is taken in an order that threads decide.

`test_meta_device.py` holds all models to it on the way; here is what is not a case of it.
"""

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.mixers import BidirectionalConfig, MixerConfig, RelativeConfig, build_mixer
from dist_attn.models import LanguageModelConfig, build_model
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from tests.support.fixed_order import RACES, FixedOrder
from tests.support.model_cases import needed_options, streaming_kinds

LENGTHS = (140, 0, 150)


@pytest.mark.parametrize("kind", streaming_kinds())
def test_one_sequence_of_one_head(kind: str) -> None:
    """A lone row of numbers is summed up in one order too, alone, over ranks, and in packed documents."""
    mixer = {"kind": kind, "hidden_size": 16, **needed_options(kind, 1)}
    packs = MixerConfig.model_validate(mixer).packs
    sizes = {"vocab_size": 9, "hidden_size": 16, "num_layers": 1, "mlp_size": 16}
    model = build_model(LanguageModelConfig.model_validate({"kind": "language_model", **sizes, "mixer": mixer}))
    model = model.to("meta")
    layout = SequenceLayout.from_lengths(LENGTHS)

    def tokens(length: int) -> torch.Tensor:
        return torch.zeros(1, length, dtype=torch.int64, device="meta")

    def rank(comm: Communicator) -> None:
        ops = ShardedSequenceOps(comm, layout, cache="whole")
        with FixedOrder():
            h_BLD, _ = model.hidden(tokens(LENGTHS[comm.rank]), ops)
            torch.autograd.grad(h_BLD.sum(), list(model.parameters()), allow_unused=True)

    with FixedOrder():
        h_BLD, state = model.hidden(tokens(sum(LENGTHS)), None)
        h_BLD.sum().backward()
        model.step(tokens(1)[:, 0], state)
        if packs:
            model.hidden(tokens(sum(LENGTHS)), LocalSequenceOps((0, 20, 50, 200)))[0].sum().backward()
    run_simulated(rank, len(LENGTHS))


def test_relative_positions() -> None:
    """Gradients of a table's row come from many pairs of packed documents."""
    check_relative_positions({"attention": "softmax", "relative": RelativeConfig(reach=3)})


def check_relative_positions(options: dict[str, object]) -> None:
    """What `test_relative_positions` says, of this attention."""
    own = build_mixer(BidirectionalConfig(hidden_size=16, num_heads=2, **options)).to("meta")
    x_BLD = torch.zeros(2, 150, 16, device="meta", requires_grad=True)
    with FixedOrder():
        own(x_BLD, LocalSequenceOps((0, 20, 50)))[0].sum().backward()


def test_what_is_refused() -> None:
    """Names are torch's, and what adds atomically on a GPU is found forward and backward."""
    known = {schema.name.removeprefix("aten::").removesuffix("_") for schema in torch._C._jit_get_all_schemas()}
    assert RACES.keys() <= known
    x, at = torch.ones(3, 2, requires_grad=True), torch.tensor([0, 1, 1])
    for work in (
        lambda: torch.zeros(2, 2).index_add(0, at, x),
        lambda: torch.zeros(2, 2).scatter_add(0, at[:, None].expand(3, 2), x),
        lambda: x.index_select(0, at).sum().backward(),
        lambda: x.gather(0, at[:, None]).sum().backward(),
        lambda: torch.ones(1, 200).cumsum(1),
    ):
        with FixedOrder(), pytest.raises(AssertionError, match="may give other bits in another run on a GPU"):
            work()
    with FixedOrder():
        x[at].sum().backward()
        x.cumsum(0)

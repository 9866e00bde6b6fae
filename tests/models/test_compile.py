"""torch.compile: models and operations, local and over ranks, are one graph without breaks, forward and backward."""

from collections.abc import Iterator
from typing import Literal

import pytest
import torch
from torch import Tensor

from dist_attn.comm import Communicator, differentiable, run_simulated
from dist_attn.errors import InputError
from dist_attn.layout import SequenceLayout
from dist_attn.mixers import BidirectionalConfig
from dist_attn.models import EncoderConfig, hold_weights_as
from dist_attn.models.encoder import Encoder
from dist_attn.ops import LinearState, LocalSequenceOps, Watch, watching
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.sharded.prefix_scan import ScanExchange, scan_over_ranks
from dist_attn.wire.choices import WeightPrecision
from tests.support.closeness import assert_close
from tests.support.models import small_config, small_model

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """What one test has compiled is not kept for the next."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def _results(function, inputs: list[Tensor]) -> list[Tensor]:
    out = function()
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs, allow_unused=True, materialize_grads=True)]


@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("rfa_gate", "aot_eager"),
        ("rfa", "eager"),
        ("softmax", "eager"),
        ("kda", "eager"),
        ("rwkv7", "eager"),
        ("mlstm", "eager"),
    ],
)
def test_a_local_model_is_one_graph(kind: str, backend: str) -> None:
    """A language model compiles with `fullgraph`, and its logits and gradients are those of the model as it is."""
    model = small_model(small_config(kind, num_layers=1))
    tokens, parameters = torch.arange(30)[None] % 7, list(model.parameters())
    compiled = torch.compile(model.logits, fullgraph=True, backend=backend)
    want = _results(lambda: model.logits(tokens), parameters)
    got = _results(lambda: compiled(tokens), parameters)
    for a, b in zip(got, want, strict=True):
        assert_close(a, b, kind="gradient")
    with torch.inference_mode():
        assert_close(compiled(tokens), model.logits(tokens))


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_a_model_of_rounded_weights_is_one_graph(precision: WeightPrecision) -> None:
    """With weights in fewer bits a block and a step compile with `fullgraph` and are those of the model as it is."""
    model = small_model(small_config(num_layers=1))
    hold_weights_as(model, precision)
    tokens = torch.arange(30)[None] % 7
    with torch.inference_mode():
        read = torch.compile(model.logits, fullgraph=True, backend="eager")
        assert_close(read(tokens), model.logits(tokens), kind="exact")
        step, state = torch.compile(model.step, fullgraph=True, backend="eager"), model.initial_state(1)
        assert_close(step(tokens[:, 0], state)[0], model.step(tokens[:, 0], state)[0], kind="exact")


def test_a_sharded_model_is_one_graph() -> None:
    """A model over ranks compiles with `fullgraph` on each, a rank without tokens too, and is the model as it is."""
    layout = SequenceLayout.from_lengths([7, 0, 5])
    tokens = torch.arange(layout.total)[None] % 7

    def on_rank(comm: Communicator) -> list[tuple[Tensor, Tensor]]:
        # A layout that nobody has used yet, so that the graph finds nothing looked up before.
        fresh = SequenceLayout(layout.cuts)
        model, ops = small_model(small_config(num_layers=1)), ShardedSequenceOps(comm, fresh)
        own, parameters = tokens[:, slice(*layout.range(comm.rank))], list(model.parameters())
        compiled = torch.compile(lambda tokens: model(tokens, ops)[0], fullgraph=True, backend="eager")
        got = _results(lambda: compiled(own), parameters)
        return list(zip(got, _results(lambda: model(own, ops)[0], parameters), strict=True))

    for pairs in run_simulated(on_rank, layout.size, timeout_s=120.0):
        for got, want in pairs:
            assert_close(got, want, kind="gradient")


@pytest.mark.parametrize("exchange", ["exscan", "log_step"])
def test_a_scan_of_states_is_one_graph(exchange: Literal["exscan", "log_step"]) -> None:
    """By other exchanges than a model's the scan over ranks goes into a graph too, and is what it is outside."""

    def on_rank(comm: Communicator) -> list[tuple[Tensor, Tensor]]:
        own = torch.rand(1, 2, 5, 4, generator=torch.Generator().manual_seed(comm.rank))
        state = LinearState(own, own[..., 0], own[..., 0, 0], -own[..., 1, 1], torch.zeros(1, 2, dtype=torch.bool))
        message = state.pack().requires_grad_()

        def both(message: Tensor) -> Tensor:
            return torch.stack(scan_over_ranks(comm, state.monoid, message, None, ScanExchange(exchange)))

        compiled = torch.compile(both, fullgraph=True, backend="eager")
        want = _results(lambda: both(message), [message])
        return list(zip(_results(lambda: compiled(message), [message]), want, strict=True))

    for pairs in run_simulated(on_rank, 3, timeout_s=120.0):
        for got, want in pairs:
            assert_close(got, want, kind="gradient")


@pytest.mark.parametrize(
    "kind", ["all_gather", "all_reduce_sum", "reduce_scatter_sum", "all_to_all", "send_receive", "broadcast"]
)
def test_an_exchange_is_one_node(kind: str) -> None:
    """Every exchange with gradients goes into a graph, and its result and gradient are those it has outside."""

    def on_rank(comm: Communicator) -> list[Tensor]:
        arguments = {
            "all_to_all": ([1, 1], [1, 1]),
            "send_receive": ({1 - comm.rank: 2}, {1 - comm.rank: 2}),
            "broadcast": (1,),
        }
        counts = arguments.get(kind, ())
        exchange = getattr(differentiable, kind)
        x = (torch.arange(6.0).reshape(2, 3) + 10 * comm.rank).requires_grad_()

        def square(x: Tensor) -> Tensor:
            return exchange(comm, x.square(), *counts, label="here")

        want = _results(lambda: square(x), [x])
        compiled = torch.compile(square, fullgraph=True, backend="aot_eager")
        assert all(torch.equal(a, b) for a, b in zip(_results(lambda: compiled(x), [x]), want, strict=True))
        return want

    assert len(run_simulated(on_rank, 2, timeout_s=120.0)) == 2


def test_nobody_watches_inside_a_graph() -> None:
    """A watch does not break the graph; it learns nothing of what runs inside."""
    model, tokens, watch = small_model(small_config(num_layers=1)), torch.arange(10)[None], Watch()
    compiled = torch.compile(model.logits, fullgraph=True, backend="eager")
    with torch.no_grad(), watching(watch):
        assert_close(compiled(tokens), model.logits(tokens))
    assert watch.denominators == 2 * 10  # of the model as it is, not of the graph


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
def test_a_compiled_encoder_refuses_more_tokens_than_it_has_positions() -> None:
    """The lengths of documents are plain numbers, which a compiled model compares as the model itself does."""
    mixer = BidirectionalConfig(attention="softmax", hidden_size=16, num_heads=2)
    config = EncoderConfig(hidden_size=16, num_layers=1, mlp_size=32, mixer=mixer, positions="learned", max_length=8)
    encoder = torch.compile(Encoder(config), backend="eager")
    with pytest.raises(InputError, match="12 tokens; this model has learned positions for 8"):
        encoder(torch.zeros(1, 12, 16), LocalSequenceOps())

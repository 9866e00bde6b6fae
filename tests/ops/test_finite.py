"""Naming the first NaN: operation, layer, rank and global token, in operations, models and the engine's decode."""

import numpy as np
import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.comm.local import LocalCommunicator
from dist_attn.errors import CommError, NotFiniteError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import FiniteCheck, LocalSequenceOps, SequenceOps, Watch, watching
from dist_attn.ops.finite import checked
from dist_attn.rank.executor import ModelExecutor
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.wire.messages import SamplingSpec
from dist_attn.wire.rank_messages import DecodeEntry, DecodeOp, OpenOp, PrefillOp
from tests.support.attention import Inputs
from tests.support.models import small_config, small_model

LENGTH = 90
CUTS = SequenceLayout.from_lengths([40, 0, 50])


def _attend(ops: SequenceOps, inputs: Inputs) -> torch.Tensor:
    args, kwargs = inputs.arguments()
    return ops.linear_attention(*args, **kwargs)[0]


@pytest.mark.parametrize(("name", "value", "words"), [("k", "nan", "k_BHSK is NaN"), ("v", "inf", "v_BHSV is inf")])
def test_an_input_is_named(name: str, value: str, words: str) -> None:
    """The parameter, the first token and the row of the batch that hold a number that is not finite are named."""
    inputs = Inputs.random(LENGTH, LENGTH, gate=True, scale=True, state=True)
    inputs.sequence[name][1, 2, [77, 80]] = float(value)
    watch = Watch(FiniteCheck(rank=3, first_tokens=(1000,)))
    watch.layer = 5
    with watching(watch), pytest.raises(NotFiniteError) as caught:
        _attend(checked(LocalSequenceOps()), inputs)
    assert str(caught.value).startswith(f"linear_attention in layer 5 on rank 3: its input {words}")
    assert "at token 1077 (row 1 of the batch; 2 tokens" in str(caught.value)


@pytest.mark.parametrize("where", ["s", "w"])
def test_a_state_or_a_map_is_named(where: str) -> None:
    """What has no tokens is named as well: the state that came in, the feature map's own numbers."""
    inputs = Inputs.random(LENGTH, LENGTH, gate=False, scale=False, state=True)
    inputs.replicated[where][0] = float("nan")
    name = {"s": "state.s_BHMV", "w": "feature_map.w_HDK"}[where]
    with watching(Watch(FiniteCheck())), pytest.raises(NotFiniteError, match=f"its input {name} is NaN"):
        _attend(checked(LocalSequenceOps()), inputs)


def test_an_output_is_named() -> None:
    """Where all inputs are finite but a sum overflows, it is the output that is named, from its first token on."""
    inputs = Inputs.random(LENGTH, LENGTH, gate=False, scale=False, state=False, dtype=torch.float32)
    inputs.sequence["v"][:, :, 50:] = 3e38
    with watching(Watch(FiniteCheck())), pytest.raises(NotFiniteError, match=r"its output 0 is NaN at token 5\d"):
        _attend(checked(LocalSequenceOps()), inputs)


def test_the_rank_and_its_global_token_are_named() -> None:
    """Across ranks, the rank that holds the number speaks, in global tokens; the others lose their partner."""

    def on_rank(comm: Communicator) -> str:
        start, stop = CUTS.range(comm.rank)
        inputs = Inputs.random(LENGTH, LENGTH, gate=True, scale=True, state=False)
        inputs.sequence["log_gate"][0, 1, 61] = float("nan")
        ops = checked(ShardedSequenceOps(comm, CUTS))
        try:
            with watching(Watch(FiniteCheck(comm.rank, (start,)))):
                _attend(ops, inputs.leaves(start, stop))
        except NotFiniteError as error:
            comm.close()
            return str(error)
        except CommError:
            return "lost its partner"
        return "noticed nothing"

    assert run_simulated(on_rank, 3) == [
        "lost its partner",
        "lost its partner",
        "linear_attention in layer 0 on rank 2: its input log_gate_BHS is NaN at token 61 (row 0 of the batch; "
        "1 tokens of this slice have one)",
    ]


def test_without_a_check_nothing_is_looked_at() -> None:
    """Outside of a watch that asks for it, the same operations run and give the same bits, NaN included."""
    inputs = Inputs.random(LENGTH, LENGTH, gate=True, scale=True, state=False)
    inputs.sequence["k"][0, 0, 5] = float("nan")
    want = _attend(LocalSequenceOps(), inputs)
    with watching(Watch()):
        got = _attend(checked(LocalSequenceOps()), inputs)
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0))
    assert checked(LocalSequenceOps()).whole


def _executor(*, check: bool) -> ModelExecutor:
    """One whose model has a hidden size gone wrong for token 99."""
    model = small_model(small_config())
    with torch.no_grad():
        model.embedding.weight[99, 3] = float("nan")
    finite = FiniteCheck() if check else None
    return ModelExecutor(model, LocalCommunicator(), name="small", finite=finite)


def test_the_engine_names_the_token_of_a_document() -> None:
    """A rank that was told to check fails in the first layer at the token itself, in the document's own count."""
    made = _executor(check=True)
    made.open(OpenOp(1, None, SamplingSpec(3)))
    tokens = np.arange(600) % 90
    made.prefill(PrefillOp(1, 0, [512], tokens[:512].astype("<i4").tobytes()))
    tokens[580] = 99
    with pytest.raises(NotFiniteError, match=r"in layer 0 on rank 0: its input x_BLD is NaN at token 580 "):
        made.prefill(PrefillOp(1, 512, [88], tokens[512:].astype("<i4").tobytes()))


def test_the_engine_names_the_token_that_was_decoded() -> None:
    """In decoding it is the first operation with a state, and the token's place in its own text."""
    made = _executor(check=True)
    for number, length in ((1, 20), (2, 30)):
        made.open(OpenOp(number, None, SamplingSpec(3)))
        made.prefill(PrefillOp(number, 0, [length], np.arange(length, dtype="<i4").tobytes()))
    with pytest.raises(NotFiniteError, match=r"linear_attention_step in layer 0 .* is NaN at token 30 \(row 1"):
        made.decode(DecodeOp([DecodeEntry(1, 4), DecodeEntry(2, 99)]))

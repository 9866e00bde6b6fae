"""The language model: one function in parallel, streamed, stepwise and over ranks; its state; its refusals."""

import pytest
import torch
from pydantic import ValidationError

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError, ShapeError, TokenError
from dist_attn.layout import SequenceLayout
from dist_attn.models import LanguageModel, LanguageModelConfig, ModelState
from dist_attn.models.blocks import Block
from dist_attn.models.encoder import sinusoidal
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from tests.support.closeness import assert_close
from tests.support.golden import golden
from tests.support.models import small_config, small_model

LEARNED = {"kind": "learned", "length": 64, "beyond": "repeat"}
CASES = [
    ("rfa", "none"),
    ("rfa_gate", "sinusoidal"),
    ("rfa", LEARNED),
    ("softmax", "sinusoidal"),
    ("rfa", "concatenated"),
]


def _model(kind: str, positions: str | dict[str, object]) -> LanguageModel:
    return small_model(small_config(kind, positions=positions)).double()


def _tokens(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 257, (batch, length), generator=torch.Generator().manual_seed(3))


def _assert_same_state(got: ModelState, want: ModelState, kind: str = "state") -> None:
    assert torch.equal(got.position_B, want.position_B)
    for a, b in zip(got.layers, want.layers, strict=True):
        for x, y in zip(a.tensors(), b.tensors(), strict=True):
            assert_close(x, y, kind=kind)


@pytest.mark.parametrize(("kind", "positions"), CASES)
def test_parallel_equals_streamed_equals_stepwise(kind, positions):
    """One call, a stream of uneven pieces and single steps give the same logits and the same final state."""
    model, tokens = _model(kind, positions), _tokens(75)
    want, want_state = model(tokens)
    assert_close(model.logits(tokens), want, kind="exact")
    streamed, state = [], None
    for piece in tokens.split([1, 2, 0, 64, 8], dim=1):
        logits, state = model(piece, None, state)
        streamed.append(logits)
    stepped, step_state = [], model.initial_state(2)
    for t in range(75):
        logits, step_state = model.step(tokens[:, t], step_state)
        stepped.append(logits)
    assert_close(torch.cat(streamed, 1), want)
    assert_close(torch.stack(stepped, 1), want)
    for end in (state, step_state):
        _assert_same_state(end, want_state)
        assert end.position == 75


@pytest.mark.parametrize(("kind", "positions"), CASES[:3])
def test_ranks_change_nothing(kind, positions):
    """Over ranks, empty ones too, hidden states and the state at the end are those of one rank, block after block."""
    model, tokens = _model(kind, positions), _tokens(2 * 75)
    layout = SequenceLayout.from_lengths((0, 31, 2, 42))

    def body(comm: Communicator):
        (start, stop), state, parts = layout.range(comm.rank), None, []
        for block in tokens.split(75, dim=1):
            h, state = model.hidden(block[:, start:stop], ShardedSequenceOps(comm, layout), state)
            parts.append(h.detach())
        return parts, state.detach()

    want, want_state = model.hidden(tokens)
    ranks = run_simulated(body, layout.size)
    for block in range(2):
        got = torch.cat([parts[block] for parts, _ in ranks], 1)
        assert_close(got, want[:, block * 75 : (block + 1) * 75])
    for _, state in ranks:
        _assert_same_state(state, want_state)


@pytest.mark.parametrize(("kind", "positions"), CASES)
def test_states_are_taken_apart_and_put_together(kind, positions):
    """select then stack is the identity, in any order, and each part goes on as it would have together."""
    model, tokens = _model(kind, positions), _tokens(20, batch=3)
    _, state = model.hidden(tokens)
    parts = [state.select(i) for i in range(3)]
    _assert_same_state(ModelState.stack(parts), state, kind="exact")
    _assert_same_state(state.select([2, 0]), ModelState.stack([parts[2], parts[0]]), kind="exact")
    together, _ = model.step(tokens[:, 0], state)
    alone, _ = model.step(tokens[1:2, 0], parts[1])
    assert_close(together[1:2], alone)
    assert [part.batch for part in parts] == [1, 1, 1]


def test_a_state_taken_out_of_a_batch_does_not_keep_the_batch_alive():
    """A selected state owns exactly the memory that it needs."""
    model = small_model()
    _, state = model.hidden(_tokens(5, batch=3))
    one = state.select(1)
    owned = sum(t.untyped_storage().nbytes() for layer in one.layers for t in layer.tensors())
    assert owned == one.num_bytes() == state.num_bytes() // 3


def test_sequences_at_different_positions_go_on_side_by_side():
    """States of different lengths stack; each keeps its position, and `position` says that there is not one."""
    model = _model("rfa_gate", "sinusoidal")
    _, short = model.hidden(_tokens(3, batch=1))
    _, long = model.hidden(_tokens(9, batch=1))
    both = ModelState.stack([short, long])
    assert both.position_B.tolist() == [3, 9]
    with pytest.raises(InputError, match="different positions"):
        _ = both.position
    token = torch.tensor([65, 66])
    together, after = model.step(token, both)
    assert after.position_B.tolist() == [4, 10]
    for row, state in enumerate((short, long)):
        assert_close(together[row : row + 1], model.step(token[row : row + 1], state)[0])


def test_the_state_of_kernel_attention_does_not_grow():
    """The state of random feature attention takes the same bytes after 0, 1 and 500 tokens; a key-value cache grows."""
    sizes = {}
    for kind in ("rfa_gate", "softmax"):
        model = small_model(small_config(kind))
        sizes[kind] = [model.hidden(_tokens(n, batch=1))[1].num_bytes() for n in (0, 1, 500)]
    assert len(set(sizes["rfa_gate"])) == 1
    assert sizes["softmax"][0] < sizes["softmax"][1] < sizes["softmax"][2]


def test_detaching_cuts_the_gradient_and_nothing_else():
    """A detached state holds the same values, and a loss behind it does not reach the tokens before it."""
    model = _model("rfa_gate", "none")
    _, state = model.hidden(_tokens(10))
    cut = state.detach()
    _assert_same_state(cut, state, kind="exact")
    assert any(t.requires_grad for layer in state.layers for t in layer.tensors())
    assert not any(t.requires_grad for layer in cut.layers for t in layer.tensors())


def test_layers_have_random_vectors_of_their_own():
    """Two layers of one model never share their random vectors, and the same configuration gives the same ones."""
    model, again = small_model(seed=0), small_model(seed=1)
    first, second = (block.mixer.w_HDK for block in model.blocks)
    assert not torch.equal(first, second)
    assert torch.equal(first, again.blocks[0].mixer.w_HDK)


@pytest.mark.parametrize("token", [-1, 257, 10**12])
def test_tokens_outside_the_vocabulary_are_refused(token):
    """Ids that the model does not have raise a TokenError that names the range, in a sequence and in a step."""
    model = small_model()
    with pytest.raises(TokenError, match="knows 0 to 256"):
        model.encode(torch.tensor([[65, token]]))
    with pytest.raises(TokenError, match="knows 0 to 256"):
        model.step(torch.tensor([token]), model.initial_state(1))


def test_tokens_and_states_of_another_shape_are_refused():
    """Tokens without a batch or of another type, and a state of another batch, raise a ShapeError in words."""
    model = small_model()
    for tokens in (torch.tensor([65, 66]), torch.tensor([[65.0]]), torch.tensor([[True]])):
        with pytest.raises(ShapeError, match=r"needed are token ids \[batch, length\] of torch.int64"):
            model.encode(tokens)
    with pytest.raises(ShapeError, match=r"needed are token ids \[batch\]"):
        model.step(torch.tensor([[65]]), model.initial_state(1))
    for call in (
        lambda s: model.hidden(torch.tensor([[65], [66]]), state=s),
        lambda s: model.step(torch.tensor([65, 66]), s),
    ):
        with pytest.raises(ShapeError, match="2 sequences came with a state of 1"):
            call(model.initial_state(1))


def test_learned_positions_end_where_they_end():
    """A text longer than the learned positions is refused with the numbers, on every rank, in a sequence and a step."""
    model = small_model(small_config(positions={"kind": "learned", "length": 8}))
    _, state = model.hidden(_tokens(8))
    with pytest.raises(InputError, match="reaches 9 tokens; this model has learned positions for 8"):
        model.step(torch.tensor([65, 66]), state)
    layout, tokens = SequenceLayout.from_lengths((7, 2)), _tokens(9)

    def body(comm: Communicator):
        start, stop = layout.range(comm.rank)
        with pytest.raises(InputError, match="reaches 9 tokens"):
            model.hidden(tokens[:, start:stop], ShardedSequenceOps(comm, layout))
        return True

    assert run_simulated(body, 2) == [True, True]


def test_positions_that_repeat_begin_again():
    """Where positions repeat, the token after the last learned position gets the vector of the first."""
    model = small_model(small_config(positions={"kind": "learned", "length": 8, "beyond": "repeat"}))
    token = torch.tensor([65, 65])
    first = model._embed(token, torch.tensor([0, 8]), torch.tensor([1, 9]))
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], model.embedding(token)[0])


@pytest.mark.parametrize(
    ("block", "readout"),
    [
        ({"residual": "parallel", "norm": {"kind": "layer", "eps": 1e-3}, "mlp": {"activation": "gelu"}}, "tied"),
        ({"norm": {"kind": "rms"}, "mlp": {"kind": "gated", "activation": "silu", "bias": False}}, "own"),
    ],
)
def test_blocks_of_other_shapes_are_what_their_names_say(block, readout):
    """Parallel residuals, RMS norms, gated MLPs and a read-out of its own compute the formulas written out here."""
    model = small_model(small_config("softmax", block=block, readout=readout)).double()
    layer, x = model.blocks[0], torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(4)).double()

    def norm(values, own):
        if block["norm"]["kind"] == "rms":
            return values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt() * own.weight
        variance = values.var(-1, unbiased=False, keepdim=True)
        return (values - values.mean(-1, keepdim=True)) / (variance + 1e-3).sqrt() * own.weight + own.bias

    def mlp(values):
        inner = values @ layer.mlp_in.weight.T
        if block["mlp"].get("kind") == "gated":
            gate, value = inner[..., :32], inner[..., 32:]
            return (gate * torch.sigmoid(gate) * value) @ layer.mlp_out.weight.T
        inner = inner + layer.mlp_in.bias
        return (0.5 * inner * (1 + torch.erf(inner / 2**0.5))) @ layer.mlp_out.weight.T + layer.mlp_out.bias

    mixed, _ = layer.mixer(norm(x, layer.mixer_norm), LocalSequenceOps())
    middle = x + mixed
    read = x if block.get("residual") == "parallel" else middle
    assert_close(layer(x, LocalSequenceOps())[0], middle + mlp(norm(read, layer.mlp_norm)))
    weight = model.unembedding.weight if readout == "own" else model.embedding.weight
    assert_close(model.readout(x), x @ weight.T)


def test_a_mixer_of_another_width_is_refused():
    """A configuration whose mixer has another hidden size than the model is refused in words."""
    values = small_config().model_dump()
    values["hidden_size"] = 32
    with pytest.raises(ValidationError, match="must equal the model's 32"):
        LanguageModelConfig.model_validate(values)


def test_sinusoids_are_those_of_the_paper():
    """Positions equal the independent test vectors, and keep their digits at position 1,000,000."""
    want = golden("sinusoidal")["pe"]
    assert_close(sinusoidal(torch.arange(9), 8), want.float(), kind="golden")
    far = sinusoidal(torch.tensor([1_000_000]), 8)
    exact = torch.tensor([1e6 / 10_000 ** (2 * (i // 2) / 8) for i in range(8)], dtype=torch.float64)
    exact = torch.where(torch.arange(8) % 2 == 0, exact.sin(), exact.cos())
    assert_close(far[0], exact.float(), kind="golden")
    assert sinusoidal(torch.arange(3), 7).shape == (3, 7)


def test_the_block_is_the_pre_norm_one():
    """A softmax block equals the independent test vectors, up to the form of GELU (tanh here, erf there)."""
    g = golden("preln_block")
    config = small_config(
        "softmax", hidden_size=8, mixer={"kind": "softmax", "hidden_size": 8, "num_heads": int(g["H"])}
    )
    block = Block(config.mixer.model_copy(update={"short_convolution": 0}), 16).double()
    with torch.no_grad():
        block.mixer.qkv.weight.copy_(torch.cat([g["Wq"], g["Wk"], g["Wv"]]))
        block.mixer.out.weight.copy_(g["Wo"])
        for norm, gain, bias in ((block.mixer_norm, "g1", "b1"), (block.mlp_norm, "g2", "b2")):
            norm.weight.copy_(g[gain])
            norm.bias.copy_(g[bias])
        block.mlp_in.weight.copy_(g["W1"])
        block.mlp_in.bias.copy_(g["c1"])
        block.mlp_out.weight.copy_(g["W2"])
        block.mlp_out.bias.copy_(g["c2"])
    # The block's attention has no output bias: it is put in by hand between the two halves.
    x = g["X"][None]
    mixed, _ = block.mixer(block.mixer_norm(x), LocalSequenceOps())
    middle = x + mixed + g["bo"]
    hidden = torch.nn.functional.gelu(block.mlp_in(block.mlp_norm(middle)))
    assert_close((middle + block.mlp_out(hidden))[0], g["out_causal"], kind="golden")
    no_bias, _ = block(x, LocalSequenceOps())
    tanh = torch.nn.functional.gelu(block.mlp_in(block.mlp_norm(x + mixed)), approximate="tanh")
    assert_close(no_bias, x + mixed + block.mlp_out(tanh))

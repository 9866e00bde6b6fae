"""The softmax mixer over several ranks: a cache that stays spread, or becomes whole, block after block."""

from itertools import pairwise

import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError
from dist_attn.layout import SequenceLayout
from dist_attn.mixers import SoftmaxConfig, TokenMixer, build_mixer
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from tests.support.closeness import assert_close

SIZE, HEADS = 12, 3
# Blocks of a stream, cut over three ranks in other places each time.
BLOCKS = [(5, 0, 9), (0, 0, 0), (4, 4, 3), (0, 1, 0), (10, 2, 30)]
EDGES = [0]
for lengths in BLOCKS:
    EDGES.append(EDGES[-1] + sum(lengths))


def _mixer() -> TokenMixer:
    mixer = build_mixer(SoftmaxConfig(kind="softmax", hidden_size=SIZE, num_heads=HEADS)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return mixer


def _tokens() -> torch.Tensor:
    return torch.randn(2, EDGES[-1], SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _stream(comm: Communicator, **choice: str):
    """This rank's outputs of every block, the state at the end, and the gradients of its input and parameters."""
    mixer, x, outs, state = _mixer(), _tokens(), [], None
    x.requires_grad_()
    for (start, _), lengths in zip(pairwise(EDGES), BLOCKS, strict=True):
        layout = SequenceLayout.from_lengths(lengths)
        a, b = layout.range(comm.rank)
        y, state = mixer(x[:, start + a : start + b], ShardedSequenceOps(comm, layout, **choice), state)
        outs.append(y)
    weights = _weights()
    loss = torch.zeros((), dtype=torch.float64)
    for (start, _), lengths, y in zip(pairwise(EDGES), BLOCKS, outs, strict=True):
        a, b = SequenceLayout.from_lengths(lengths).range(comm.rank)
        loss = loss + (y * weights[:, start + a : start + b]).sum()
    loss.backward()
    return [y.detach() for y in outs], state, x.grad, {n: p.grad for n, p in mixer.named_parameters()}


def _weights() -> torch.Tensor:
    shape = (2, EDGES[-1], SIZE)
    return torch.randn(shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@pytest.mark.parametrize("choice", [{}, {"softmax": "ring"}, {"cache": "whole"}])
def test_a_stream_over_ranks_is_one_rank(choice):
    """Blocks cut over three ranks, empty slices and blocks too: outputs and every gradient of one rank in one go."""
    mixer, x = _mixer(), _tokens().requires_grad_()
    want, want_state = mixer(x, LocalSequenceOps())
    (want * _weights()).sum().backward()
    ranks = run_simulated(lambda comm: _stream(comm, **choice), 3)
    got = torch.cat([rank[0][block] for block in range(len(BLOCKS)) for rank in ranks], 1)
    assert_close(got, want)
    # Each rank holds a whole copy of the tokens, of which it uses its slices: its gradient is zero elsewhere.
    assert_close(torch.stack([rank[2] for rank in ranks]).sum(0), x.grad, kind="gradient")
    for name, parameter in mixer.named_parameters():
        total = torch.stack([rank[3][name] for rank in ranks]).sum(0)
        assert_close(total, parameter.grad, kind="gradient", what=name)
    for _, state, _, _ in ranks:
        assert state.cache.tokens == EDGES[-1]
        assert_close(state.tail_BKD, want_state.tail_BKD, kind="state")


def test_every_rank_keeps_the_keys_of_its_own_slices():
    """A spread cache is as large as the slices, its parts are the keys of one rank, and it owns its memory."""
    _, want = _mixer()(_tokens(), LocalSequenceOps())
    for rank, (_, state, _, _) in enumerate(run_simulated(_stream, 3)):
        own = [
            torch.arange(start + sum(lengths[:rank]), start + sum(lengths[: rank + 1]))
            for start, lengths in zip(EDGES[:-1], BLOCKS, strict=True)
        ]
        assert state.cache.blocks == tuple(BLOCKS)
        for got, all_keys in zip(state.tensors()[:2], want.tensors()[:2], strict=True):
            assert_close(got, all_keys[:, :, torch.cat(own)], kind="state")
            assert got.untyped_storage().nbytes() == got.numel() * got.element_size()


def test_traffic_does_not_grow_with_the_cache():
    """What a block sends depends on the block, not on how much was read before: queries there, partial results back."""
    mixer, size = _mixer(), SIZE // HEADS
    lengths = (3, 0, 5)
    layout = SequenceLayout.from_lengths(lengths)
    x = _tokens()[:, :8]

    def body(comm: Communicator) -> list[dict[str, int]]:
        state, sent = None, []
        part = slice(*layout.range(comm.rank))
        with torch.no_grad():
            for _ in range(6):
                ops = ShardedSequenceOps(comm, layout)
                comm.traffic.clear()
                _, state = mixer(x[:, part], ops, state)
                sent.append({event.label: event.bytes_sent for event in comm.traffic.events})
        return sent

    for rank, blocks in enumerate(run_simulated(body, 3)):
        assert "heads" in blocks[0]
        for sent in blocks[1:]:
            assert sent["queries"] == 8 * 2 * HEADS * size * lengths[rank] * 2
            assert sent["partial outputs"] == 8 * 2 * HEADS * (size + 1) * (8 - lengths[rank])
            assert sent == blocks[1]


def test_any_rank_can_decode_from_a_whole_cache():
    """After blocks with a whole cache every rank's next step is that of one rank."""
    mixer, x = _mixer(), _tokens()
    token = x[:, 0]
    _, state = mixer(x, LocalSequenceOps())
    want, _ = mixer.step(token, state)
    for _, state, _, _ in run_simulated(lambda comm: _stream(comm, cache="whole"), 3):
        assert_close(mixer.step(token, state)[0], want)


def test_states_that_would_give_wrong_results_are_refused():
    """No step and no local pass from a share of the keys, and no share from a state that is whole or of other ranks."""
    mixer, x = _mixer(), _tokens()[:, :2]
    layout = SequenceLayout.from_lengths([1, 1])
    spread = run_simulated(_stream, 3)[0][1]
    _, whole = mixer(x, LocalSequenceOps())
    with pytest.raises(InputError, match="one rank's share of the keys"):
        mixer.step(x[:, 0], spread)
    with pytest.raises(InputError, match="one rank's share of the keys"):
        mixer(x, LocalSequenceOps(), spread)

    def body(comm: Communicator) -> None:
        ops, own = ShardedSequenceOps(comm, layout), x[:, :1]
        with pytest.raises(InputError, match="holds all keys"):
            mixer(own, ops, whole)
        with pytest.raises(InputError, match="spread over 3 ranks was given to 2"):
            mixer(own, ops, spread)
        with pytest.raises(InputError, match="one rank's share of the keys"):
            mixer(own, ShardedSequenceOps(comm, layout, cache="whole"), spread)

    run_simulated(body, 2)

"""The contract of every token mixer, for the tests of a new one: `check_mixer(config)`, or its parts one by one.

Each check builds the mixer of a configuration, in float64 with parameters drawn from a seed, and raises AssertionError
with what differs. Checks of states are for mixers that go on from one (`config.streams`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError
from dist_attn.layout import SequenceLayout
from dist_attn.mixers.base import MixerState, TokenMixer, build_mixer
from dist_attn.model_config.mixer import MixerConfig
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn.sharded import ShardedSequenceOps

TOKENS, BATCH = 90, 2
CUTS: tuple[tuple[int, ...], ...] = ((40, 50), (31, 19, 40), (0, 31, 2, 57), (90, 0))
"""Lengths of the ranks' slices, uneven and empty ones among them."""

# (rtol, atol) in float64: another order of the same sums; through a division and back.
_OUTPUT, _STATE, _GRADIENT, _EXACT = (1e-10, 1e-12), (1e-11, 1e-12), (1e-9, 1e-11), (0.0, 0.0)
# Of bfloat16, in norm. Gradients may be small sums of large terms, or 0 but for rounding: each is also held against a
# tenth of all of them together.
_ROUNDED, _ROUNDED_GRADIENT, _SHARE_OF_ALL = 2e-2, 5e-2, 0.1
_NOT_ROUNDED = "gate"  # linear layers of this name stay in float32 where weights are held in fewer bits


def check_mixer(config: MixerConfig, *, tokens: int = TOKENS, others: Sequence[MixerConfig] = ()) -> None:
    """All of the contract, for sequences of `tokens`; states of the mixers of `others` are refused too.

    A mixer for one length is checked at that one.

    Raises: AssertionError for what the mixer does not keep.
    """
    if config.streams:
        check_streams(config, tokens)
        check_batch(config)
        check_states(config, others)
    if config.causal:
        check_causal(config, tokens)
    check_autocast(config, tokens)
    check_costs(config, tokens)
    for lengths in CUTS if tokens == TOKENS else ((tokens // 3, tokens - tokens // 3), (tokens, 0)):
        check_ranks(config, lengths)


def check_streams(config: MixerConfig, tokens: int = TOKENS) -> None:
    """One call, a stream of uneven pieces, and one token at a time give the same outputs and the same final state."""
    mixer, x, ops = _mixer(config), _sequence(config, tokens), LocalSequenceOps()
    want, want_state = mixer(x, ops)
    streamed, state = [], None
    for piece in x.split([1, 2, tokens - 26, 0, 23], dim=1):
        y, state = mixer(piece, ops, state)
        streamed.append(y)
    _assert_close(torch.cat(streamed, 1), want)
    stepped, step_state = [], mixer.initial_state(BATCH)
    for t in range(tokens):
        y, step_state = mixer.step(x[:, t], step_state)
        stepped.append(y)
    _assert_close(torch.stack(stepped, 1), want)
    assert state is not None
    for end in (state, step_state):
        for got, field in zip(end.tensors(), want_state.tensors(), strict=True):
            _assert_close(got, field, _STATE)


def check_causal(config: MixerConfig, tokens: int = TOKENS) -> None:
    """A token changes nothing before it: bit for bit where a state is carried, else but for rounding."""
    mixer, x, ops = _mixer(config), _sequence(config, tokens), LocalSequenceOps()
    at = tokens * 2 // 3
    before, _ = mixer(x, ops)
    x[:, at] += 1
    after, _ = mixer(x, ops)
    _assert_close(after[:, :at], before[:, :at], _EXACT if config.streams else (1e-9, 1e-9))
    assert not torch.equal(after[:, at:], before[:, at:]), "a token changed nothing, not even its own output"


def check_batch(config: MixerConfig) -> None:
    """Each sequence of a batch is mixed as it is alone, and its state can be taken out and gone on with."""
    mixer, x, ops = _mixer(config), _sequence(config, TOKENS), LocalSequenceOps()
    together, state = mixer(x, ops)
    for i in range(BATCH):
        alone, _ = mixer(x[i : i + 1], ops)
        _assert_close(alone, together[i : i + 1])
    taken = state.replace(tuple(t[1:] for t in state.tensors()))
    goes_on, _ = mixer(x[1:, :5], ops, taken)
    together, _ = mixer(x[:, :5], ops, state)
    _assert_close(together[1:], goes_on)


def check_states(config: MixerConfig, others: Sequence[MixerConfig] = ()) -> None:
    """Its own state is taken; one of another batch, or of a mixer of `others` that differs, raises an InputError."""
    mixer, x, ops = _mixer(config), _sequence(config, 1), LocalSequenceOps()
    own = state_after_three(config)
    mixer(x, ops, own)
    mixer.step(x[:, 0], own)
    states = [own.replace(tuple(tensor[:1] for tensor in own.tensors()))]
    for other in others:
        state = state_after_three(other)
        if (other.kind, _shapes(state)) != (config.kind, _shapes(own)):
            states.append(state)
    for state in states:
        for use in (lambda state=state: mixer(x, ops, state), lambda state=state: mixer.step(x[:, 0], state)):
            try:
                use()
            except InputError as error:
                assert "needs its own state" in str(error), f"the refusal does not say what is needed: {error}"
            else:
                raise AssertionError(f"{config.kind} took a state with tensors {_shapes(state)} for its own")


def check_autocast(config: MixerConfig, tokens: int = TOKENS) -> None:
    """Under bf16 autocast outputs and gradients are finite, and those of float32 as far as bf16 can tell."""
    mixer, x_BLD = _mixer(config).float(), _sequence(config, tokens).float()
    weights_BLD = torch.randn(x_BLD.shape, generator=torch.Generator().manual_seed(3))

    def step(enabled: bool) -> dict[str, Tensor]:
        mine = x_BLD.clone().requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            y, _ = mixer(mine, LocalSequenceOps())
        mixer.zero_grad()
        (y.float() * weights_BLD).sum().backward()
        gradients = {name: p.grad for name, p in mixer.named_parameters() if p.grad is not None}
        return {"output": y.detach().float(), "input": _gradient(mine), **gradients}

    want, got = step(False), step(True)
    assert got.keys() == want.keys()
    together = torch.stack([tensor.norm() for name, tensor in want.items() if name != "output"]).norm()
    for name, tensor in want.items():
        assert got[name].isfinite().all(), f"{name} is not finite"
        scale = tensor.norm() + (0.0 if name in ("output", "input") else _SHARE_OF_ALL * together)
        error = float((got[name] - tensor).norm() / scale)
        assert error < (_ROUNDED if name == "output" else _ROUNDED_GRADIENT), f"{name} is off by {error:.3g}"


def check_ranks(config: MixerConfig, lengths: Sequence[int]) -> None:
    """Over ranks with slices of `lengths` outputs, state, and the gradients of inputs and parameters are one rank's."""
    layout = SequenceLayout.from_lengths(lengths)
    x = _sequence(config, layout.total)
    weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def run(ops: SequenceOps, start: int, stop: int) -> tuple[Tensor, list[Tensor], Tensor, dict[str, Tensor]]:
        mixer = _mixer(config)
        mine = x[:, start:stop].clone().requires_grad_()
        y, state = mixer(mine, ops)
        (y * weights[:, start:stop]).sum().backward()
        gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in mixer.named_parameters()}
        return y.detach(), [t.detach() for t in state.tensors()], _gradient(mine), gradients

    def body(comm: Communicator) -> tuple[Tensor, list[Tensor], Tensor, dict[str, Tensor]]:
        # A state that is equal on all ranks: with a key-value cache, the whole one.
        return run(ShardedSequenceOps(comm, layout, cache="whole"), *layout.range(comm.rank))

    y, state, gradient, gradients = run(LocalSequenceOps(), 0, layout.total)
    ranks = run_simulated(body, len(lengths))
    _assert_close(torch.cat([r[0] for r in ranks], 1), y)
    _assert_close(torch.cat([r[2] for r in ranks], 1), gradient, _GRADIENT)
    for rank in ranks:
        for got, field in zip(rank[1], state, strict=True):
            _assert_close(got, field, _STATE)
    for name, want in gradients.items():
        total = torch.stack([r[3][name] for r in ranks]).sum(0)
        _assert_close(total, want, _GRADIENT, name)


def check_costs(config: MixerConfig, tokens: int = TOKENS) -> None:
    """Weights, the bytes of a state, and what every rank sends are what the configuration says, exactly."""
    mixer, costs, weights = build_mixer(config), build_mixer(config).costs(), config.weights()
    assert weights.parameters == sum(p.numel() for p in mixer.parameters()), "weights().parameters"
    assert weights.buffers == sum(b.numel() for b in mixer.buffers()), "weights().buffers"
    linear = [
        m for name, m in mixer.named_modules() if isinstance(m, nn.Linear) and name.split(".")[-1] != _NOT_ROUNDED
    ]
    assert weights.matrices == sum(layer.weight.numel() for layer in linear), "weights().matrices"
    assert weights.rows == sum(layer.out_features for layer in linear), "weights().rows"
    lengths = (tokens // 5, 0, tokens - tokens // 5)
    layout, x = SequenceLayout.from_lengths(lengths), torch.zeros(BATCH, tokens, config.hidden_size)
    with torch.no_grad():
        _, state = mixer(x, LocalSequenceOps())
    held = sum(tensor.numel() * tensor.element_size() for tensor in state.tensors())
    assert config.state_bytes(tokens, BATCH) == held, (
        f"state_bytes() is {config.state_bytes(tokens, BATCH)}, not {held}"
    )

    def body(comm: Communicator) -> int:
        own, ops = build_mixer(config), ShardedSequenceOps(comm, layout)
        comm.traffic.clear()
        own(x[:, slice(*layout.range(comm.rank))], ops)  # with gradients; without, ranks may send less
        return comm.traffic.bytes_sent

    sent = [costs.bytes_sent(lengths, rank, BATCH) for rank in range(layout.size)]
    counted = run_simulated(body, layout.size)
    assert sent == counted, f"by traffic() the ranks send {sent} bytes; they sent {counted}"
    assert config.prefill_flops(tokens).total >= 0 <= config.activation_bytes(tokens, BATCH)


def state_after_three(config: MixerConfig) -> MixerState:
    """The state of a mixer that has seen three tokens."""
    state: MixerState = _mixer(config)(_sequence(config, 3), LocalSequenceOps())[1]
    return state


def _assert_close(got: Tensor, want: Tensor, close: tuple[float, float] = _OUTPUT, what: str = "") -> None:
    rtol, atol = close
    torch.testing.assert_close(
        got.detach(), want.detach(), rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}" if what else text
    )


def _mixer(config: MixerConfig) -> TokenMixer:
    mixer = build_mixer(config).double()
    generator = torch.Generator().manual_seed(0)  # not the global one: simulated ranks are threads
    with torch.no_grad():
        for parameter in mixer.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return mixer


def _sequence(config: MixerConfig, tokens: int) -> Tensor:
    shape = (BATCH, tokens, config.hidden_size)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _gradient(x: Tensor) -> Tensor:
    assert x.grad is not None
    return x.grad


def _shapes(state: MixerState) -> list[tuple[int, ...]]:
    return [tuple(tensor.shape) for tensor in state.tensors()]

"""A step over buffers that stay gives what a plain step gives; what is captured on a GPU is checked there."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dist_attn.errors import ConfigError, ShapeError
from dist_attn.generation import CapturedStep, StepGraphs, captured_step, generate, takes_captured_steps
from dist_attn.generation.captured_step import GROWS, Replayed
from dist_attn.generation.decode import prefill
from dist_attn.mixers.softmax import SoftmaxSlots, SoftmaxState
from dist_attn.model_config.figures import SLOTS
from dist_attn.model_config.mixer import MixerConfig
from dist_attn.model_config.mixers.attention import SoftmaxConfig
from dist_attn.model_config.mixers.delta_rules import GatedDeltaConfig
from dist_attn.model_config.mixers.kernels import RandomFeatureConfig
from dist_attn.models import LanguageModel, LanguageModelConfig, ModelState, build_model
from dist_attn.ops import Watch, watching
from dist_attn.ops.softmax_attention import slots as attention_slots
from dist_attn.rank.decode_slots import DecodeSlots
from dist_attn.wire.messages import SamplingSpec
from dist_attn.wire.rank_messages import DecodeEntry, Drawn, RequestFault

VOCAB = 30
MIXERS: dict[str, MixerConfig] = {
    "rfa_gate": RandomFeatureConfig(kind="rfa_gate", hidden_size=8, num_heads=2, num_random=4),
    "gated_delta": GatedDeltaConfig(kind="gated_delta", hidden_size=8, num_heads=2),
    "softmax": SoftmaxConfig(kind="softmax", hidden_size=8, num_heads=2),
}

HOW = {"rfa_gate": "a CUDA graph" if torch.cuda.is_available() else "on cpu"}
HOW |= dict.fromkeys(("gated_delta", "softmax"), HOW["rfa_gate"])


def model_of(kind: str) -> LanguageModel:
    """Two small layers with random weights, on the GPU where there is one."""
    config = LanguageModelConfig(vocab_size=VOCAB, hidden_size=8, num_layers=2, mlp_size=16, mixer=MIXERS[kind])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = build_model(config).eval()
    return model.to("cuda" if torch.cuda.is_available() else "cpu")


def tensors_of(state: ModelState) -> list[torch.Tensor]:
    """All tensors of a state."""
    return [state.position_B, *(t for layer in state.layers for t in layer.tensors())]


def assert_same(got: ModelState, want: ModelState) -> None:
    """Each sequence has the same state, whatever holds it."""
    for row in range(want.batch):
        pairs = zip(tensors_of(got.select(row)), tensors_of(want.select(row)), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other)


class Recaptured:
    """Stands in for CUDA: its graphs do the step again, operation by operation; `count` is how many there were."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, run: Callable[[], None], warm_up: Callable[[], object], device: torch.device) -> Replayed:
        """What replays `run`, which like a capture changes nothing now."""
        self.count += 1
        warm_up()
        return Rerun(run)


@dataclass(eq=False)
class Rerun:
    """One graph of `Recaptured`."""

    run: Callable[[], None]

    def replay(self) -> None:
        """Do it again."""
        self.run()


def tokens_of(model: LanguageModel, count: int) -> Iterator[torch.Tensor]:
    """Tokens for two sequences, one step at a time."""
    for t in range(count):
        yield torch.tensor([t % VOCAB, (3 * t + 1) % VOCAB], device=model.embedding.weight.device)


@pytest.mark.parametrize("kind", list(MIXERS))
def test_steps_over_buffers_equal_plain_steps(kind: str) -> None:
    """Logits and states are those of plain steps, and a state of constant size stays where it lies in memory."""
    model = model_of(kind)
    state = model.initial_state(2)
    captured = CapturedStep(model, state)
    places = [t.data_ptr() for t in tensors_of(captured.state)]
    with torch.inference_mode():
        for token_B in tokens_of(model, 5):
            want_BV, state = model.step(token_B, state)
            torch.testing.assert_close(captured.step(token_B), want_BV)
    assert_same(captured.state, state)
    assert [t.data_ptr() for t in tensors_of(captured.state)] == places


def test_how_steps_are_taken_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, and for keys that take too much, the reason why there is no graph is said in words."""
    monkeypatch.setattr(captured_step, "SLOT_BYTES", 2 * 2 * 2 * 256 * 8 * 4 - 1)  # layers, keys and values, rows
    growing = CapturedStep(model_of("softmax"), model_of("softmax").initial_state(2))
    constant = CapturedStep(model_of("rfa_gate"), model_of("rfa_gate").initial_state(2))
    for step in (growing, constant):
        for token_B in tokens_of(model_of("softmax"), 2):
            step.step(token_B)
    assert "grows" in growing.how and growing.grows
    assert constant.how == "a CUDA graph" if torch.cuda.is_available() else "on cpu" in constant.how


@pytest.mark.parametrize("enough", [True, False])
def test_full_slots_are_doubled(enough: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that fills its slots goes on in larger ones with another graph, or without one; nothing else changes."""
    monkeypatch.setattr(attention_slots, "LEAST_PLACES", 4)
    monkeypatch.setattr(captured_step, "SLOT_BYTES", (64 if enough else 8) * 2 * 2 * 2 * 8 * 4)
    model, capture = model_of("softmax"), Recaptured()
    state = ModelState.stack([prefill(model, torch.arange(3))] * 2)
    captured = CapturedStep(model, state, graphs=StepGraphs(torch.device("cpu"), capture))
    with torch.inference_mode():
        for token_B in tokens_of(model, 17):
            want_BV, state = model.step(token_B, state)
            torch.testing.assert_close(captured.step(token_B), want_BV)
    assert_same(captured.state, state)
    assert (capture.count, captured.how) == ((3, "a CUDA graph") if enough else (1, f"operation by operation: {GROWS}"))


def test_the_first_token_brings_the_precision_of_keys() -> None:
    """A text that begins with a step keeps its keys as plain steps do, in bfloat16 under autocast, and is captured."""
    model = model_of("softmax").cpu()
    state = model.initial_state(2)
    captured = CapturedStep(model, state, graphs=StepGraphs(torch.device("cpu"), Recaptured()))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        for token_B in tokens_of(model, 4):
            want_BV, state = model.step(token_B.cpu(), state)
            torch.testing.assert_close(captured.step(token_B.cpu()), want_BV, rtol=0.05, atol=0.05)
    types = [[t.dtype for t in tensors_of(each.select(0))] for each in (captured.state, state)]
    assert types[0] == types[1]
    assert captured.how == "a CUDA graph"


def drawn_in(
    made: DecodeSlots, model: LanguageModel, lengths: dict[int, int], spec: SamplingSpec
) -> tuple[dict[int, list[Drawn]], int]:
    """Nine draws of each of these requests, whose texts have such lengths, and the most bytes that slots took."""
    found: dict[int, list[Drawn]] = {request: [] for request in lengths}
    held = 0
    with torch.inference_mode():
        for request, length in lengths.items():
            made.take_in(request, prefill(model, torch.arange(length) % VOCAB), spec)
        for turn in range(9):
            for one in made.draw([DecodeEntry(request, token=5 if turn == 0 else None) for request in lengths]):
                assert isinstance(one, Drawn)
                found[one.request].append(one)
            held = max(held, made.held_bytes)
    return found, held


def test_requests_in_slots_change_no_bit_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of any lengths draw the same logits alone and beside others, however these fill their slots."""
    monkeypatch.setattr(attention_slots, "LEAST_PLACES", 4)
    model = model_of("softmax")
    spec = SamplingSpec(max_tokens=40, temperature=0.0, logprobs=3)

    def drawn(lengths: dict[int, int]) -> dict[int, list[Drawn]]:
        made = DecodeSlots(model, steps="captured", graphs=StepGraphs(torch.device("cpu"), Recaptured()))
        found, _ = drawn_in(made, model, lengths, spec)
        assert made.how == {"a CUDA graph"}
        return found

    together = drawn({1: 2, 2: 5, 3: 14, 4: 3})
    for request, length in {1: 2, 3: 14}.items():
        assert drawn({request: length})[request] == together[request]


def test_numbers_that_a_request_leaves_in_slots_reach_no_other() -> None:
    """After a request whose state held NaN, the next one in its row draws what it draws alone."""
    model = model_of("softmax")
    spec = SamplingSpec(max_tokens=20, temperature=0.0, logprobs=1)

    def drawn(value: float) -> list[Drawn | RequestFault]:
        made = DecodeSlots(model, steps="captured", graphs=StepGraphs(torch.device("cpu"), Recaptured()))
        with torch.inference_mode():
            earlier = prefill(model, torch.arange(20))
            layer = earlier.layers[0]
            assert isinstance(layer, SoftmaxState)
            layer.cache.v_BGSV[0, 0, 10, 0] = value
            made.take_in(1, earlier, spec)
            made.take_in(2, prefill(model, torch.arange(4) + 3), spec)
            made.draw([DecodeEntry(1, 3), DecodeEntry(2, 4)])
            made.forget(1)
            made.take_in(3, prefill(model, torch.arange(5)), spec)
            found = made.draw([DecodeEntry(3, 4), DecodeEntry(2, None)])
        assert made.how == {"a CUDA graph"}
        return found

    assert drawn(float("nan")) == drawn(0.5) and all(isinstance(one, Drawn) for one in drawn(float("nan")))


def test_slots_of_all_batches_keep_to_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches for which there is no room at once take turns in the slots, and draw the same bits in more steps."""
    monkeypatch.setattr(attention_slots, "LEAST_PLACES", 4)
    model = model_of("softmax")
    spec = SamplingSpec(max_tokens=40, temperature=0.0, logprobs=3)
    lengths = {1: 2, 2: 5, 3: 18, **dict.fromkeys(range(4, 14), 9)}
    of_place = SLOTS * 2 * 2 * 8 * 4  # layers, keys and values

    def drawn(most_bytes: int) -> tuple[dict[int, list[Drawn]], int]:
        graphs = StepGraphs(torch.device("cpu"), Recaptured())
        made = DecodeSlots(model, steps="captured", graphs=graphs, most_bytes=most_bytes)
        found = drawn_in(made, model, lengths, spec)
        assert all(how == "a CUDA graph" or "captured yet" in how for how in made.how), made.how
        return found

    enough, all_bytes = drawn(1 << 30)
    little, held = drawn(33 * of_place)
    assert held <= 33 * of_place < all_bytes
    assert little == enough


def test_a_warm_up_copies_no_keys() -> None:
    """Before a capture the step is tried over the slots as they lie, which takes no second copy of them."""
    model = model_of("softmax").cpu()
    copied: list[int] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func is torch.ops.aten.clone.default:
                copied.append(args[0].data_ptr())
            return func(*args, **(kwargs or {}))

    def capture(run: Callable[[], None], warm_up: Callable[[], object], device: torch.device) -> Replayed:
        with Copies():
            warm_up()
        return Rerun(run)

    captured = CapturedStep(model, model.initial_state(2), graphs=StepGraphs(torch.device("cpu"), capture))
    for token_B in tokens_of(model, 3):
        captured.step(token_B.cpu())
    slots = [layer.slots for layer in captured.state.layers if isinstance(layer, SoftmaxSlots)]
    assert len(slots) == 2 and copied
    assert not {t.data_ptr() for each in slots for t in (each.k_BGRK, each.v_BGRV)} & set(copied)


def test_another_state_is_loaded_into_the_same_buffers() -> None:
    """After `load`, steps go on from that state; one of other shapes is refused, and the one given is left alone."""
    model = model_of("rfa_gate")
    device = model.embedding.weight.device
    captured = CapturedStep(model, model.initial_state(2))
    with torch.inference_mode():
        for token_B in tokens_of(model, 3):
            captured.step(token_B)
        other = ModelState.stack([prefill(model, torch.arange(7, device=device))] * 2)
        kept = [t.clone() for t in tensors_of(other)]
        captured.load(other)
        loaded = other
        for token_B in tokens_of(model, 2):
            want_BV, other = model.step(token_B, other)
            torch.testing.assert_close(captured.step(token_B), want_BV)
        assert all(torch.equal(a, b) for a, b in zip(kept, tensors_of(loaded), strict=True))
        with pytest.raises(ShapeError, match="make another"):
            captured.load(model.initial_state(3))


@pytest.mark.parametrize("graph", [False, True])
def test_a_watch_counts_the_same(graph: bool) -> None:
    """Guarded denominators are those of the rows that count, whatever the watch says, before and after a graph."""
    model = model_of("rfa_gate")
    capture = Recaptured()
    captured = CapturedStep(
        model, model.initial_state(2), rows=1, graphs=StepGraphs(torch.device("cpu"), capture) if graph else None
    )
    for rows in (1, None, 2):
        state = model.initial_state(2)
        captured.load(state, rows=rows)
        counted = []
        for plain in (True, False):
            watch = Watch()
            watch.rows = rows if plain else None
            with torch.inference_mode(), watching(watch):
                for token_B in tokens_of(model, 4):
                    if plain:
                        _, state = model.step(token_B, state)
                    else:
                        captured.step(token_B)
            counted.append((watch.denominators, watch.guarded))
            assert watch.rows == (rows if plain else None)
        assert counted[0] == counted[1]
        assert sum(map(sum, counted[0][1]))
    assert capture.count == graph


def test_counts_are_added() -> None:
    """What one watch has counted is added to another, as often as asked, and stays its own."""
    model, one, both = model_of("rfa_gate"), Watch(), Watch()
    with torch.inference_mode(), watching(one):
        model.step(next(tokens_of(model, 1)), model.initial_state(2))
    both.add(one)
    both.add(one, denominators=3)
    assert both.denominators == one.denominators + 3
    assert both.guarded == tuple(tuple(2 * n for n in layer) for layer in one.guarded)


@pytest.mark.parametrize("kind", list(MIXERS))
def test_slots_draw_the_same_tokens(kind: str) -> None:
    """Sessions that come and go draw over captured steps what they draw over plain ones, batch after batch."""
    model = model_of(kind)
    spec = SamplingSpec(max_tokens=20, temperature=1.0, seed=3)
    found = []
    for steps in ("eager", "captured"):
        slots = DecodeSlots(model, steps="captured" if steps == "captured" else "eager")
        drawn: list[tuple[int, int]] = []
        with torch.inference_mode():
            for turn in range(9):
                if turn % 3 == 0:
                    slots.take_in(turn, model.initial_state(1), spec)
                present = [s for s in (0, 3, 6) if s in slots]
                entries = [DecodeEntry(s, token=s + 1 if turn == s else None) for s in present]
                drawn += [(d.request, d.token) for d in slots.draw(entries) if isinstance(d, Drawn)]
                if turn == 4:
                    slots.forget(0)
            positions = [int(slots.state_of(s)[0].position_B) for s in (3, 6)]
        found.append((drawn, positions))
        assert slots.how
        words = "not asked for" if steps == "eager" else HOW[kind]
        assert all(words in how for how in slots.how), slots.how
    assert found[0] == found[1]


def test_one_graph_serves_any_number_of_sessions() -> None:
    """Sessions that come and go are decoded by one graph, with plain steps' tokens; the last one takes it with it."""
    model, capture = model_of("rfa_gate"), Recaptured()
    spec = SamplingSpec(max_tokens=40, temperature=1.0, seed=3)
    device = model.embedding.weight.device
    captured = DecodeSlots(model, steps="captured", graphs=StepGraphs(device, capture))
    found = []
    for slots in (DecodeSlots(model, steps="eager"), captured):
        drawn: list[tuple[int, int]] = []
        with torch.inference_mode():
            for turn in range(12):
                if turn < 5:
                    slots.take_in(turn, model.initial_state(1), spec)
                if turn > 7:
                    slots.forget(turn - 8)
                present = [s for s in range(5) if s in slots]
                entries = [DecodeEntry(s, token=s + 1 if turn == s else None) for s in present]
                drawn += [(d.request, d.token) for d in slots.draw(entries) if isinstance(d, Drawn)]
        found.append(drawn)
    assert found[0] == found[1]
    assert captured.how == {"a CUDA graph"}
    assert capture.count == 1
    captured.forget(4)
    captured.take_in(9, model.initial_state(1), spec)
    with torch.inference_mode():
        for token in (1, None):
            captured.draw([DecodeEntry(9, token=token)])
    assert capture.count == 2


def test_a_capture_that_failed_is_not_tried_again() -> None:
    """Batches of a model whose step cannot be captured go on operation by operation, and torch's words are said."""
    model, tried = model_of("rfa_gate"), []

    def capture(run: Callable[[], None], warm_up: Callable[[], object], device: torch.device) -> Replayed:
        tried.append(device)
        raise RuntimeError("an operation waits\nand so on")

    slots = DecodeSlots(model, steps="captured", graphs=StepGraphs(torch.device("cpu"), capture))
    spec = SamplingSpec(max_tokens=40, temperature=1.0, seed=3)
    with torch.inference_mode():
        for request in range(2):
            slots.take_in(request, model.initial_state(1), spec)
            for token in (1, None, None):
                slots.draw([DecodeEntry(request, token=token)])
            assert slots.how == {"operation by operation: the step could not be captured (an operation waits)"}
            slots.forget(request)
    assert len(tried) == 1


def test_generation_over_captured_steps() -> None:
    """`generate` draws the same tokens either way; a mode that does not exist is refused."""
    model = model_of("rfa_gate")
    spec = SamplingSpec(max_tokens=6, temperature=0.0)
    assert generate(model, [1, 2, 3], spec, steps="captured") == generate(model, [1, 2, 3], spec, steps="eager")
    assert not takes_captured_steps("auto", torch.device("cpu"))
    with pytest.raises(ConfigError, match="use auto, eager or captured"):
        generate(model, [1], spec, steps="graph")  # type: ignore[arg-type]

"""Weights over ranks: each rank holds a run of layers, and requests have the bits that they have without."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dist_attn.adapters.model import load_adapted_model
from dist_attn.adapters.spread import owners_of
from dist_attn.comm import Communicator, run_simulated
from dist_attn.control.preflight import check_layers_fit
from dist_attn.control.scheduler import split
from dist_attn.errors import ConfigError
from dist_attn.rank.executor import ModelExecutor
from dist_attn.shipped.downloaded import read_downloaded
from dist_attn.wire.messages import SamplingSpec
from dist_attn.wire.rank_messages import DecodeEntry, DecodeOp, Drawn, OpenOp, PrefillOp, SavedState
from tests.support.downloaded import VOCABULARY, llama, qwen3_next, save
from tests.support.snapshots import manifest

PROMPTS = [np.random.default_rng(n).integers(3, VOCABULARY, n).astype("<i4") for n in (1200, 700, 700, 5)]
DRAWN = 6
SPECS = [SamplingSpec(DRAWN, seed=n, temperature=0.9, logprobs=2, frequency_penalty=0.5) for n in range(len(PROMPTS))]
MODELS = {"llama": lambda: llama(layers=4), "qwen3_next": qwen3_next}
Answers = tuple[list[list[Drawn]], list[bytes]]


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = MODELS[request.param]()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    return save(model, tmp_path_factory.mktemp("models") / request.param)


def executor(folder: Path, comm: Communicator, over: bool) -> ModelExecutor:
    model = load_adapted_model(folder, over=comm if over else None)
    described = manifest(mixers=model.kinds, vocab_size=VOCABULARY)
    return ModelExecutor(model, comm, name="model", manifest=described)


def read(made: ModelExecutor, comm: Communicator, from_logits: bool) -> list[int]:
    """All prompts but for their last tokens, or whole where their logits are drawn from; whose last token is here."""
    here = []
    for number, prompt in enumerate(PROMPTS):
        made.open(OpenOp(number, None, SPECS[number], from_logits=from_logits))
        block = prompt if from_logits else prompt[:-1]
        lengths = split(0, len(block), comm.size, home=number % comm.size)
        start = sum(lengths[: comm.rank])
        made.prefill(PrefillOp(number, 0, list(lengths), block[start : start + lengths[comm.rank]].tobytes()))
        here += [number] if lengths[comm.rank] and not any(lengths[comm.rank + 1 :]) else []
    return here


def drawn(folder: Path, ranks: int, over: bool, from_logits: bool) -> Answers:
    """What is drawn for requests beside each other, of which one ends early, and what is saved of one of them.

    Ranks that hold all weights draw each for some of the requests.
    """

    def rank_work(comm: Communicator) -> Answers:
        made = executor(folder, comm, over)
        here = read(made, comm, from_logits)
        mine = range(len(PROMPTS)) if over else here
        steps: list[list[Drawn]] = []
        saved: list[bytes] = []
        for step in range(DRAWN):
            fed = {number: int(PROMPTS[number][-1]) if step == 0 and not from_logits else None for number in mine}
            entries = [DecodeEntry(number, token) for number, token in fed.items() if step < 3 or number != 3]
            steps.append(made.decode(DecodeOp(entries)))
            result = made.save(1, snapshot=step % 2 == 1) if 1 in mine else None
            saved += [] if result is None else [result[1]]
        assert not over or comm.rank == comm.size - 1 or (not any(steps) and not saved)
        return steps, saved

    answers = run_simulated(rank_work, ranks)
    together = zip(*(steps for steps, _ in answers), strict=True)
    by_step = [sorted((one for part in parts for one in part), key=lambda one: one.request) for parts in together]
    return by_step, [data for _, saved in answers for data in saved]


@pytest.mark.parametrize("ranks", [2, 3])
def test_draws_and_states_have_the_bits_of_ranks_that_hold_all(ranks: int, folder: Path) -> None:
    """Tokens, their probabilities and saved states are those of a rank with all weights, to the bit."""
    from_logits = (ranks == 2) == (folder.name == "llama")  # each with both models and both numbers of ranks
    whole, apart = (drawn(folder, ranks, over, from_logits) for over in (False, True))
    assert whole == apart
    assert len(whole[0]) == len(whole[1]) == DRAWN


def test_a_request_goes_on_from_a_saved_state(folder: Path) -> None:
    """Ranks that begin with a saved state draw what would have followed, and save the same state."""

    def goes_on(comm: Communicator) -> tuple[list[int], list[int]]:
        made = executor(folder, comm, over=True)
        read(made, comm, from_logits=False)
        first = made.decode(DecodeOp([DecodeEntry(0, int(PROMPTS[0][-1]))]))
        saved = made.save(0)
        assert (saved is None) == (comm.rank < comm.size - 1)
        data = b"" if saved is None else saved[1]
        size, token = comm.broadcast(torch.tensor([len(data), first[0].token if first else 0]), comm.size - 1).tolist()
        held = np.frombuffer(data or bytes(size), dtype=np.uint8).copy()
        state = comm.broadcast(torch.from_numpy(held), comm.size - 1).numpy().tobytes()
        after = [*made.decode(DecodeOp([DecodeEntry(0)])), *made.decode(DecodeOp([DecodeEntry(0)]))]
        restored = SavedState(9, len(PROMPTS[0]), 1, size)
        made.open(OpenOp(9, None, SPECS[0], restored, {token: 0}), state)
        again = [*made.decode(DecodeOp([DecodeEntry(9, token)])), *made.decode(DecodeOp([DecodeEntry(9)]))]
        return [one.token for one in after], [one.token for one in again]

    after, again = run_simulated(goes_on, 2)[-1]
    assert after == again and len(after) == 2


def matrix_bytes(module: torch.nn.Module) -> int:
    """Of what is here; vectors every rank has, such as the [1, D] of a gate."""
    weights = [weight for weight in module.parameters() if weight.numel() > max(weight.shape)]
    return sum(weight.nbytes for weight in weights if not weight.is_meta)


def test_a_rank_holds_its_own_layers_alone(folder: Path) -> None:
    """Of two ranks each has about half of the layers, before and after a text, and nothing else is left behind."""
    whole = load_adapted_model(folder)
    sizes = [matrix_bytes(part) for part in whole.parts]
    other = matrix_bytes(whole) - sum(sizes)

    def rank_work(comm: Communicator) -> tuple[int, int]:
        model = load_adapted_model(folder, over=comm)
        loaded = matrix_bytes(model)
        with torch.inference_mode():
            model.hidden(torch.zeros(1, 8, dtype=torch.int64))
        return loaded - other, matrix_bytes(model) - other

    first, second = run_simulated(rank_work, 2)
    assert first[0] == first[1] and second[0] == second[1]
    assert first[0] + second[0] == sum(sizes)
    assert max(first[0], second[0]) <= sum(sizes) / 2 + max(sizes)


def test_more_ranks_than_layers_are_refused(folder: Path) -> None:
    """The count of both is named, before anything is started and where weights are loaded."""
    with pytest.raises(ConfigError, match="4 layers are too few for 5 ranks"):
        owners_of(read_downloaded(folder), 5)
    with pytest.raises(ConfigError, match="has 4 layers, too few for 5 ranks"):
        check_layers_fit(folder, 5)
    assert owners_of(read_downloaded(folder), 4) == [0, 1, 2, 3]

"""Drawing tokens: what the filters keep, how often, and that nobody else's batch matters."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from transformers import RepetitionPenaltyLogitsProcessor

from dist_attn.errors import EngineError, ShapeError
from dist_attn.generation import generator_for, sample
from dist_attn.generation.sampling import adjust_logits
from dist_attn.wire.messages import SamplingSpec
from tests.support.examples import examples


def spec(**values: Any) -> SamplingSpec:
    """A specification for one draw."""
    return SamplingSpec(max_tokens=1, **values)


def draws(logits: list[float], wanted: SamplingSpec, number: int) -> list[int]:
    """`number` draws from the same logits, one generator going on."""
    generator = generator_for(wanted, 0)
    logits_BV = torch.tensor([logits])
    return [sample(logits_BV, [wanted], [generator])[0] for _ in range(number)]


def test_greedy_takes_the_lowest_of_equals() -> None:
    """Temperature 0 takes the largest logit, the lowest id among equals, in every row."""
    logits_BV = torch.tensor([[0.0, 3.0, 3.0], [1.0, 1.0, 1.0], [-math.inf, -2.0, -math.inf]])
    greedy = [spec(temperature=0.0)] * 3
    assert sample(logits_BV, greedy, [torch.Generator() for _ in range(3)]) == [1, 0, 1]


def test_greedy_leaves_the_generator() -> None:
    """A greedy draw takes no random number, any other exactly one."""
    generator, other = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    logits_BV = torch.zeros(1, 5)
    sample(logits_BV, [spec(temperature=0.0)], [generator])
    assert torch.equal(generator.get_state(), other.get_state())
    sample(logits_BV, [spec(top_k=2, top_p=0.5)], [generator])
    torch.rand((), generator=other, dtype=torch.float64)
    assert torch.equal(generator.get_state(), other.get_state())


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, [0.1, 0.2, 0.3, 0.4]),
        ({"temperature": 0.5}, [1 / 30, 4 / 30, 9 / 30, 16 / 30]),
        ({"top_k": 2}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.69}, [0, 0, 3 / 7, 4 / 7]),
        ({"top_p": 0.71}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"top_k": 2, "top_p": 0.5}, [0, 0, 0, 1]),
        ({"top_p": 1e-9}, [0, 0, 0, 1]),
        ({"min_p": 0.49}, [0, 2 / 9, 3 / 9, 4 / 9]),
        ({"min_p": 1.0}, [0, 0, 0, 1]),
        ({"min_p": 0.5, "temperature": 0.5}, [0, 0, 9 / 25, 16 / 25]),
        ({"min_p": 0.7, "top_k": 3, "top_p": 0.5}, [0, 0, 0, 1]),
        ({"top_k": 99}, [0.1, 0.2, 0.3, 0.4]),
    ],
    ids=str,
)
def test_frequencies(values: dict[str, float], expected: list[float]) -> None:
    """Tokens come as often as the filtered, renormalised distribution says, and filtered ones never."""
    number = 4000
    drawn = draws([math.log(weight) for weight in (1, 2, 3, 4)], spec(seed=5, **values), number)
    for token, probability in enumerate(expected):
        allowed = 4.5 * math.sqrt(probability * (1 - probability) / number)
        assert abs(drawn.count(token) / number - probability) <= allowed


def naive_draw(logits: list[float], wanted: SamplingSpec, number: float) -> int:
    """One draw by the definitions of the filters, one after the other; `number` is the random one."""
    largest = max(logits)
    weights = [math.exp((logit - largest) / wanted.temperature) for logit in logits]
    left = [token for token, weight in enumerate(weights) if weight >= wanted.min_p * max(weights)]
    left = sorted(left, key=lambda token: -weights[token])[: wanted.top_k or None]
    total, before, kept = sum(weights[token] for token in left), 0.0, list[int]()
    for token in left:
        if before < wanted.top_p * total:
            kept.append(token)
        before += weights[token]
    point = number * sum(weights[token] for token in kept)
    for token in kept:
        point -= weights[token]
        if point < 0:
            return token
    return kept[-1]


@given(
    logits=st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=1, max_size=12, unique=True),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 6),
    top_p=st.sampled_from([0.21, 0.63, 0.97, 1.0]),
    min_p=st.sampled_from([0.0, 1e-4, 0.013, 0.11, 0.47, 1.0]),
    seed=st.integers(0, 1 << 40),
)
def test_the_filters_are_their_definitions(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    """Every draw is that of a plain loop over the definitions of min_p, top_k and top_p, in vLLM's order."""
    wanted = spec(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    numbers = torch.rand(5, generator=generator_for(wanted, 0), dtype=torch.float64).tolist()
    assert draws(logits, wanted, 5) == [naive_draw(logits, wanted, number) for number in numbers]


def test_equal_logits_and_filters() -> None:
    """Among equal logits top_k keeps the lowest ids, also of so many that torch sorts them in another way."""
    for logits in ([1.0] * 6, [1.0] * 1000):
        assert set(draws(logits, spec(top_k=2, seed=1), 60)) == {0, 1}


@given(
    row=st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=12),
    others=st.lists(st.floats(-50, 50, width=32), min_size=36, max_size=36),
    values=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.0, 0.3, 1.0, 4.0]),
            "top_k": st.integers(0, 5),
            "top_p": st.floats(0.05, 1),
            "min_p": st.floats(0, 1),
            "seed": st.integers(-(1 << 63), (1 << 63) - 1),
        }
    ),
    place=st.integers(0, 3),
)
def test_batch_does_not_matter(row: list[float], others: list[float], values: dict[str, Any], place: int) -> None:
    """A sequence draws the same tokens alone and anywhere in a batch of other specifications."""
    wanted, size = spec(**values), len(row)
    alone = draws(row, wanted, 4)
    batch = [others[i * size : (i + 1) * size] for i in range(3)]
    specs = [spec(seed=9), spec(temperature=0.0), spec(top_p=0.4, seed=-2)]
    generators = [generator_for(s, 0) for s in specs]
    batch.insert(place, row)
    specs.insert(place, wanted)
    generators.insert(place, generator_for(wanted, 0))
    assert [sample(torch.tensor(batch), specs, generators)[place] for _ in range(4)] == alone


@pytest.mark.parametrize("temperature", [5e-324, 1e-30, 1e30])
def test_extreme_temperatures(temperature: float) -> None:
    """A temperature near 0 is greedy without an overflow, a huge one is uniform."""
    drawn = set(draws([-1e30, 5.0, 7.0, -math.inf], spec(temperature=temperature, seed=0), 200))
    assert drawn == ({2} if temperature < 1 else {0, 1, 2})


def test_ruled_out_is_never_drawn() -> None:
    """A logit of -inf is never drawn, wherever it stands."""
    assert set(draws([-math.inf, 0.0, -math.inf, 0.0], spec(seed=2), 100)) == {1, 3}


def test_seeds() -> None:
    """A seed gives the same draws in every session, other seeds give others, and without a seed each is fresh."""
    logits = [0.0] * 1000
    assert draws(logits, spec(seed=4), 8) == draws(logits, spec(seed=4), 8) != draws(logits, spec(seed=5), 8)
    first = torch.rand(4, generator=generator_for(spec(seed=4), 1))
    assert torch.equal(first, torch.rand(4, generator=generator_for(spec(seed=4), 2)))
    assert draws(logits, spec(), 8) != draws(logits, spec(), 8)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([0.0, math.nan, 1.0], "NaN or .inf for 1 of the 3 logits of sequence 1"),
        ([0.0, math.inf, math.nan], "for 2 of the 3 logits of sequence 1"),
        ([-math.inf] * 3, "sequence 1 in the batch are -inf"),
    ],
    ids=["nan", "inf", "none left"],
)
def test_broken_logits(temperature: float, bad: list[float], message: str) -> None:
    """Logits that allow no draw are an EngineError that says which sequence has them."""
    logits_BV = torch.tensor([[0.0, 1.0, 2.0], bad])
    with pytest.raises(EngineError, match=message):
        sample(logits_BV, [spec(temperature=temperature)] * 2, [torch.Generator(), torch.Generator()])


@pytest.mark.parametrize("shape", [(2, 3), (3,), (1, 1, 3), (1, 0)], ids=str)
def test_numbers_agree(shape: tuple[int, ...]) -> None:
    """Logits that do not fit the specifications are refused."""
    with pytest.raises(ShapeError, match="1 specifications and 1 generators"):
        sample(torch.zeros(shape), [spec()], [torch.Generator()])


def test_empty_batch() -> None:
    """No sequences, no draws."""
    assert sample(torch.zeros(0, 7), [], []) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_types(dtype: torch.dtype) -> None:
    """Half and double precision are drawn from as float32 is."""
    logits_BV = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    wanted = spec(seed=8)
    expected = sample(logits_BV, [wanted], [generator_for(wanted, 0)])
    assert sample(logits_BV.to(dtype), [wanted], [generator_for(wanted, 0)]) == expected


def test_all_bits_of_a_seed_count():
    """Seeds that differ in their upper half alone, or in sign, draw differently."""
    draws = {
        seed: tuple(torch.rand(4, generator=generator_for(SamplingSpec(max_tokens=1, seed=seed), 0)).tolist())
        for seed in (5, 5 + (1 << 32), -1, (1 << 63) - 1)
    }
    assert len(set(draws.values())) == 4


def naive_adjusted(logits: list[float], wanted: SamplingSpec, drawn: list[int]) -> list[float]:
    """Bias and penalties token by token, as OpenAI writes them."""
    adjusted = []
    for token, logit in enumerate(logits):
        times = drawn.count(token)
        logit += wanted.logit_bias.get(token, 0.0)
        adjusted.append(logit - (times * wanted.frequency_penalty + (times > 0) * wanted.presence_penalty))
    return adjusted


@given(
    st.lists(st.floats(-20, 20), min_size=4, max_size=9),
    st.lists(st.integers(0, 3), max_size=12),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.dictionaries(st.integers(0, 3), st.floats(-100, 100)),
)
@examples(40)
def test_penalties_and_biases(
    logits: list[float], drawn: list[int], presence: float, frequency: float, bias: dict[int, float]
) -> None:
    """Adjusted logits are those of the formula, and the given ones where nothing is asked; the input is kept."""
    logits_V = torch.tensor(logits, dtype=torch.float64)
    wanted = spec(presence_penalty=presence, frequency_penalty=frequency, logit_bias=bias)
    adjusted_V = adjust_logits(logits_V, wanted, Counter(drawn))
    assert torch.equal(adjusted_V, torch.tensor(naive_adjusted(logits, wanted, drawn), dtype=torch.float64))
    assert logits_V.tolist() == logits
    assert adjust_logits(logits_V, spec(), Counter(drawn)) is logits_V


@given(
    st.lists(st.floats(-20, 20), min_size=4, max_size=9),
    st.lists(st.integers(0, 3), max_size=6),
    st.lists(st.integers(0, 3), max_size=6),
    st.floats(0.1, 10),
)
@examples(40)
def test_repetition_is_penalised_as_transformers_does(
    logits: list[float], prompt: list[int], drawn: list[int], penalty: float
) -> None:
    """Bit for bit, with the tokens of the prompt and those drawn; OpenAI's penalties of the latter come after it."""
    logits_V = torch.tensor(logits, dtype=torch.float64)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)
    want_V = theirs(torch.tensor([prompt + drawn], dtype=torch.int64), logits_V[None])[0]
    wanted = spec(repetition_penalty=penalty).after(prompt)
    assert torch.equal(adjust_logits(logits_V, wanted, Counter(drawn)), want_V)
    both_V = adjust_logits(logits_V, replace(wanted, presence_penalty=0.5), Counter(drawn))
    assert torch.equal(both_V, want_V - 0.5 * torch.tensor([token in drawn for token in range(len(logits))]))


def test_a_prompt_is_noted_where_it_counts_alone() -> None:
    """Each token once, in order; a token that the model does not have is told before anything is drawn."""
    assert spec().after([3, 1, 3]) == spec()
    assert np.frombuffer(spec(repetition_penalty=2.0).after([3, 1, 3]).prompt_tokens, np.int32).tolist() == [1, 3]
    with pytest.raises(EngineError, match="the prompt names token 3; the model has tokens 0 to 1"):
        draws([1.0, 0.0], spec(repetition_penalty=2.0).after([3]), 1)


def test_a_bias_rules_out_and_decides() -> None:
    """A bias of -100 keeps the likeliest token from being drawn, 100 draws the least likely one at any temperature."""
    logits = [5.0, 0.0, -0.5]
    assert set(draws(logits, spec(logit_bias={0: -100.0}, seed=1), 50)) == {1, 2}
    for temperature in (0.0, 1.0, 2.0):
        assert draws(logits, spec(logit_bias={2: 100.0}, temperature=temperature), 3) == [2] * 3
    with pytest.raises(EngineError, match="names token 3; the model has tokens 0 to 2"):
        draws(logits, spec(logit_bias={3: 1.0}), 1)


def test_penalties_in_a_batch_are_those_of_each_sequence() -> None:
    """Every sequence is penalised for its own tokens alone."""
    logits_BV = torch.tensor([[1.0, 0.5], [1.0, 0.5]])
    greedy = [spec(temperature=0.0, frequency_penalty=0.3)] * 2
    generators = [torch.Generator(), torch.Generator()]
    assert sample(logits_BV, greedy, generators, [Counter({0: 2}), Counter({0: 1})]) == [1, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn(temperature: float) -> None:
    """However unlikely; barred ones among them only where no others are left, and none where all have no chance."""
    logits_BV, asked = torch.tensor([[0.0, 90.0, -90.0, -math.inf]]), spec(temperature=temperature, top_k=1)

    def drawn(allowed: list[bool], barred: list[int]) -> int:
        return sample(logits_BV, [asked], [generator_for(asked, 0)], None, [barred], [np.array(allowed)])[0]

    assert drawn([True, False, True, True], []) == 0
    assert drawn([True, False, True, True], [0]) == 2
    assert drawn([False, False, True, False], [1, 2]) == 2
    with pytest.raises(EngineError, match="-inf"):
        drawn([False, False, False, True], [])

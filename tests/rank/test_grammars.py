"""Answers held to a form: every one is of it, and its tokens are the same alone, beside others and after a loss."""

import json
import re
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest

from dist_attn.comm.local import LocalCommunicator
from dist_attn.generation import generate
from dist_attn.rank.executor import ModelExecutor
from dist_attn.text import ByteTokeniser
from dist_attn.text.grammars import GrammarKind, Grammars, written_grammar
from dist_attn.wire.messages import SamplingSpec
from dist_attn.wire.rank_messages import DecodeEntry, DecodeOp, Drawn, OpenOp, PrefillOp, RequestFault
from tests.support.models import small_config, small_model

END = 256
PROMPT = np.random.default_rng(3).integers(0, 250, 40).astype(np.int32)
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "colour": {"enum": ["green", "blue"]},
        "number": {"type": "integer", "minimum": -20, "maximum": 99},
        "list": {"type": "array", "items": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/none"}]}, "maxItems": 2},
    },
    "required": ["name", "colour", "number", "list"],
    "additionalProperties": False,
    "$defs": {"none": {"type": "null"}},
}
MANY = {"type": "object", "properties": {f"p{number}": {} for number in range(1000)}}
MORE = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": {5: 1.5}, "top_p": 0.98, "min_p": 1e-5}


def rank(end_tokens: tuple[int, ...] = (END,), grammars: Grammars | None = None) -> ModelExecutor:
    """A rank that no request is open on."""
    model = small_model(small_config("rfa_gate"))
    made = ModelExecutor(model, LocalCommunicator(), name="small", end_tokens=end_tokens)
    made.take_grammars(grammars or Grammars(ByteTokeniser, end_tokens))
    return made


def begin(made: ModelExecutor, request: int, spec: SamplingSpec) -> None:
    """Have the rank read the prompt but for its last token."""
    made.open(OpenOp(request, None, spec))
    made.prefill(PrefillOp(request, 0, [len(PROMPT) - 1], PROMPT[:-1].tobytes()))


def draw(made: ModelExecutor, requests: dict[int, int], most: int = 10**9) -> dict[int, list[int]]:
    """The tokens after {request: token}, drawn side by side until each has ended, or so many are there."""
    drawn: dict[int, list[int]] = {request: [] for request in requests}
    ahead = dict(requests)
    while ahead and most:
        most -= 1
        for result in made.decode(DecodeOp([DecodeEntry(*entry) for entry in ahead.items()])):
            assert isinstance(result, Drawn), result
            drawn[result.request].append(result.token)
            ahead[result.request] = result.token
        for request in [request for request, token in ahead.items() if token == END]:
            made.close(request)
            del ahead[request]
    return drawn


def answers(specs: dict[int, SamplingSpec]) -> dict[int, bytes]:
    """The texts that a rank draws for these requests side by side."""
    made = rank()
    for request, spec in specs.items():
        begin(made, request, spec)
    drawn = draw(made, dict.fromkeys(specs, int(PROMPT[-1])))
    assert all(tokens.pop() == END for tokens in drawn.values())
    return {request: bytes(tokens) for request, tokens in drawn.items()}


def spec_of(kind: GrammarKind, content: Any, **more: Any) -> SamplingSpec:
    """The specification of an answer that is held to a form."""
    return SamplingSpec(1000, grammar=written_grammar(kind, content), **{"seed": 5, **more}).after(PROMPT)


@pytest.mark.parametrize("more", [{}, MORE])
def test_every_answer_is_of_its_schema(more: dict[str, Any]) -> None:
    """Of a model that knows nothing, at temperature 1, with and without penalties; alone it has the same bits."""
    asked = spec_of("json_schema", SCHEMA, **more)
    specs = {seed: msgspec.structs.replace(asked, seed=seed) for seed in range(6)}
    drawn = answers(specs)
    for text in drawn.values():
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(drawn.values())) == len(drawn)
    assert answers({3: specs[3]})[3] == drawn[3]
    model, grammars = small_model(small_config("rfa_gate")), Grammars(ByteTokeniser, [END])
    assert bytes(generate(model, PROMPT, specs[3], end_tokens=[END], grammars=grammars)) == drawn[3]


@pytest.mark.parametrize("before", [1, 13])
def test_a_saved_answer_goes_on_bit_for_bit(before: int) -> None:
    """After a loss the saved state and the tokens that are in it are all that the grammar needs, and it needs these."""
    spec, first = spec_of("json_schema", SCHEMA, **MORE), rank()
    begin(first, 1, spec)
    drawn = draw(first, {1: int(PROMPT[-1])}, before)[1]
    saved = first.save(1)
    assert saved is not None
    second = rank()
    counts = {token: drawn[:-1].count(token) for token in drawn[:-1]}
    second.open(OpenOp(1, None, spec, saved[0], counts, drawn=np.array(drawn[:-1], np.int32).tobytes()), saved[1])
    rest = draw(first, {1: drawn[-1]})
    assert draw(second, {1: drawn[-1]}) == rest
    jsonschema.validate(json.loads(bytes(drawn + rest[1][:-1])), SCHEMA)


@pytest.mark.parametrize(
    ("kind", "content", "pattern"),
    [
        ("regex", "[ab]{2,9}c", "[ab]{2,9}c"),
        ("choice", '["yes", "no\\n", "\\u00e9\\ud83d\\ude00\\"/"]', 'yes|no\n|é😀"/'),
        ("grammar", 'start: "x" NUMBER\nNUMBER: /[0-9]{1,3}/', "x[0-9]{1,3}"),
        ("grammar", 'root ::= "a" | "(" root ")"', r"\(*a\)*"),
    ],
)
def test_other_forms(kind: GrammarKind, content: str, pattern: str) -> None:
    """Regular expressions, choices, and grammars of both kinds hold the whole text."""
    texts = answers({seed: spec_of(kind, content, seed=seed) for seed in range(4)})
    for text in texts.values():
        assert re.fullmatch(pattern, text.decode()), text


def test_the_least_number_of_tokens_ends_with_the_form() -> None:
    """Where the form allows more, `min_tokens` has them drawn; where it is over, the end token comes."""
    text = answers({1: spec_of("regex", "a{1,30}", min_tokens=20, temperature=0.0)})[1]
    assert 20 <= len(text) <= 30
    assert answers({1: spec_of("regex", "a{1,9}", min_tokens=20)})[1] == b"a" * 9


@pytest.mark.parametrize(
    ("made", "grammar", "words"),
    [
        (rank(()), written_grammar("regex", "a*"), "no end token"),
        (rank(), '{"grammars": [{"lark_grammar": "start: nothing"}]}', "unknown name"),
        (rank(), written_grammar("json_schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}), "form"),
        (rank(), written_grammar("json_schema", MANY), "max is 2000"),
    ],
)
def test_a_form_that_fails_ends_its_request_alone(made: ModelExecutor, grammar: str, words: str) -> None:
    """What only shows while it is drawn is that request's fault, as the caller's; others beside it draw on."""
    begin(made, 1, SamplingSpec(1000, seed=5, grammar=grammar))
    begin(made, 2, SamplingSpec(1000, seed=5, ignore_eos=True))
    ahead = {1: int(PROMPT[-1]), 2: int(PROMPT[-1])}
    for _ in range(100):
        results = made.decode(DecodeOp([DecodeEntry(*entry) for entry in ahead.items()]))
        faults = [result for result in results if isinstance(result, RequestFault)]
        assert 2 in [result.request for result in results if isinstance(result, Drawn)]
        if faults:
            break
        ahead = {result.request: result.token for result in results if isinstance(result, Drawn)}
    assert [(fault.request, fault.code) for fault in faults] == [(1, "invalid_value")]
    assert words in faults[0].error


def test_a_tokeniser_that_cannot_be_read_ends_no_rank() -> None:
    """Its fault is the request's."""

    def broken() -> ByteTokeniser:
        raise OSError("the folder is gone")

    made = rank(grammars=Grammars(broken, [END]))
    begin(made, 1, spec_of("regex", "a"))
    (fault,) = made.decode(DecodeOp([DecodeEntry(1, 5)]))
    assert isinstance(fault, RequestFault) and "the folder is gone" in fault.error and fault.code == "engine_failed"

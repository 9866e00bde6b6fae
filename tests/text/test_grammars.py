"""Grammars over the tokens of every kind of tokeniser: whatever is drawn of what is allowed decodes to the form."""

import json
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import jsonschema
import numpy as np
import pytest

from dist_attn.errors import EngineError, GrammarError
from dist_attn.text import ByteTokeniser, IncrementalDecoder, Tokeniser
from dist_attn.text.grammars import FollowedGrammar, GrammarKind, Grammars, written_grammar
from tests.support.tokenisers import foreign_bpe, sentence_piece, sentence_piece_bpe, small_bpe, unigram

SCHEMA = {
    "type": "object",
    "properties": {"the": {"type": "string", "maxLength": 12}, "é": {"type": "array", "items": {"type": "integer"}}},
    "required": ["the", "é"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    "load",
    [
        ByteTokeniser,
        small_bpe,
        foreign_bpe,
        lambda: foreign_bpe().padded(600),
        sentence_piece_bpe,
        unigram,
        lambda: sentence_piece("BPE", True),
    ],
)
def test_tokens_that_are_allowed_decode_to_the_form(load: Callable[[], Tokeniser]) -> None:
    """With special tokens, unused ids and bytes of their own among the tokens; none but the end is a special one."""
    tokeniser = load()
    end = tokeniser.end_token if tokeniser.end_token is not None else tokeniser.vocab_size - 1
    grammars, rng = Grammars(lambda: tokeniser, [end]), random.Random(5)
    for _ in range(5):
        form, tokens = FollowedGrammar(grammars, written_grammar("json_schema", SCHEMA)), list[int]()
        while (token := rng.choice(np.flatnonzero(form.allowed()).tolist())) != end:
            form.take(token)
            tokens.append(token)
        decoder = IncrementalDecoder(tokeniser)
        text = "".join(map(decoder.push, tokens)) + decoder.finish()
        jsonschema.validate(json.loads(text), SCHEMA)
        assert not set(tokens) & set(tokeniser.special_tokens.values())


def test_the_place_is_that_of_the_tokens_alone() -> None:
    """Begun with the tokens so far it allows what it does that was asked at each of them."""
    grammars, grammar = Grammars(ByteTokeniser, [256]), written_grammar("json_schema", SCHEMA)
    form, drawn, rng = FollowedGrammar(grammars, grammar), list[int](), random.Random(5)
    while (token := rng.choice(np.flatnonzero(form.allowed()).tolist())) != 256:
        assert np.array_equal(FollowedGrammar(grammars, grammar, drawn).allowed(), form.allowed())
        form.take(token)
        drawn.append(token)
    assert np.flatnonzero(FollowedGrammar(grammars, grammar, drawn).allowed())[-1] == 256


NAMED: dict[str, Any] = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("schema", "more"),
    [
        (NAMED, False),
        ({"type": "array", "items": {"$ref": "#/$defs/x"}, "minItems": 1, "maxItems": 1, "$defs": {"x": NAMED}}, False),
        ({"anyOf": [NAMED, NAMED]}, False),
        ({**NAMED, "additionalProperties": {"const": 2}}, True),
        ({**NAMED, "required": ["a", "b"]}, True),
        ({**NAMED, "minProperties": 2}, True),
        ({"allOf": [NAMED, {"type": "object", "properties": {"b": {}}}]}, True),
        ({"$ref": "#/$defs/x", "required": ["a", "b"], "$defs": {"x": NAMED}}, True),
        ({"anyOf": [NAMED], "minProperties": 2}, True),
        ({"oneOf": [NAMED], "additionalProperties": {"type": "integer"}}, True),
        ({"$ref": "#/$defs/x", "patternProperties": {"^b": {"const": 2}}, "$defs": {"x": NAMED}}, True),
        ({"type": "object"}, True),
    ],
)
def test_objects_have_the_properties_that_are_named(schema: dict[str, Any], more: bool) -> None:
    """A model that is unsure does not write others without end; a schema that needs or names others has them."""
    form = FollowedGrammar(Grammars(ByteTokeniser, [256]), written_grammar("json_schema", schema))
    begun = b'[{"' if schema.get("type") == "array" else b'{"'
    for token in begun + b'a":1' * (schema != {"type": "object"}):
        assert form.allowed()[token]
        form.take(token)
    assert form.allowed()[ord("," if schema != {"type": "object"} else "x")] == more


def _chain(length: int, link: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    links = {f"a{at}": link(f"#/$defs/a{at + 1}") for at in range(length)}
    return {"$ref": "#/$defs/a0", "$defs": links | {f"a{length}": {"type": "null"}}}


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        ("json_schema", {"type": "x"}, "Invalid type: x"),
        ("json_schema", {"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ("json_schema", {"enum": []}, "Unsatisfiable schema"),
        ("json_schema", {"$ref": "#/nothing"}, "does not exist"),
        ("json_schema", {"$ref": "http://localhost/x"}, "retriever does not fetch"),
        ("json_schema", {"pattern": "(", "type": "string"}, "unclosed group"),
        ("json_schema", _nested(900), "recursion"),
        ("json_schema", {"minimum": float("nan")}, "expected value"),
        ("json_schema", {"const": "\ud800"}, "surrogates"),
        ("json_schema", {"enum": [f"{number:06}" for number in range(9000)]}, "at most 32768"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", "(" * 16_000 + "a" + ")" * 16_000, "regex"),
        ("regex", "a" * 40_000, "at most 32768"),
        ("regex", "\ud800", "surrogates"),
        ("grammar", "start: nothing", "unknown name"),
        ("grammar", "start: " + "(" * 9000 + '"x"' + ")" * 9000, "too deeply nested"),
        ("grammar", "root ::= " + "(" * 9000 + '"x"' + ")" * 9000, "recursion"),
        ("grammar", "start: @other", "unknown grammar"),
        ("lark", "start: X\n%import ..secret.X", "Expected name"),
    ],
)
def test_what_no_answer_can_be_held_to(kind: GrammarKind, content: Any, words: str) -> None:
    """Each is refused in words, within the stack of a thread, and nothing is fetched or read."""
    refused = list[str]()

    def work() -> None:
        try:
            written_grammar(kind, content)
        except GrammarError as error:
            refused.append(str(error))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(refused) == 1 and words in refused[0] and len(refused[0]) <= 500


@pytest.mark.parametrize(
    "content",
    [
        _chain(600, lambda target: {"$ref": target}),
        _chain(500, lambda target: {"allOf": [{"$ref": target}]}),
        _chain(400, lambda target: {"type": "array", "items": {"$ref": target}}),
        _chain(30, lambda target: {"anyOf": [{"$ref": target}, {"$ref": target}]}),
        {"type": "array", "minItems": 10**9},
        {"type": "string", "pattern": "^(a|b|ab)*c{1,1000}(x?){1,1000}$"},
    ],
)
def test_hostile_schemas_are_bounded(content: dict[str, Any]) -> None:
    """Long chains and large counts are followed, or their fault is told where they are drawn."""
    form = FollowedGrammar(Grammars(ByteTokeniser, [256]), written_grammar("json_schema", content))
    drawn, fault = [0], ""
    while len(drawn) < 30 and drawn[-1] != 256 and not fault:
        try:
            drawn.append(int(np.flatnonzero(form.allowed())[0]))
            form.take(drawn[-1])
        except GrammarError as error:
            fault = str(error)
    assert len(drawn) > 1 or "cannot be followed" in fault


def test_bounds_leave_room_for_usual_forms() -> None:
    """For many properties that may be left out, and for a long text; one that meets its bound says so."""
    grammars = Grammars(ByteTokeniser, [256])
    many = {"type": "object", "properties": {f"p{at}": {"type": "integer"} for at in range(450)}}
    form = FollowedGrammar(grammars, written_grammar("json_schema", many))
    for token in b'{"p449":1':
        assert form.allowed()[token]
        form.take(token)
    text = b'"' + random.Random(5).randbytes(30_000).hex().encode()
    bounded = written_grammar("json_schema", {"type": "string", "maxLength": 60_000})
    form = FollowedGrammar(grammars, bounded, text)
    assert form.allowed()[ord('"')]
    longest = written_grammar("json_schema", {"type": "string", "maxLength": 600_000})
    with pytest.raises(GrammarError, match=r"cannot be followed: its bound was reached: lexer error: too many"):
        FollowedGrammar(grammars, longest, b'"' + 500_000 * b"a").allowed()


@pytest.mark.parametrize(
    ("kind", "taken", "refused"),
    [
        ("date-time", "2026-11-27T23:59:59Z", "2026-11-27T12:00:60Z"),
        ("time", "12:26:59+20:59", "12:26:60+20:59"),
        ("email", f"{'a' * 64}@b.co.uk", f"{'a' * 65}@b.co"),
        ("email", f"a@{'b' * 62}.c", f"a@{'b' * 64}.c"),
        ("hostname", "a." * 100 + "org", "a." * 130 + "org"),
    ],
)
def test_texts_of_a_format_are_those_that_validators_take(kind: str, taken: str, refused: str) -> None:
    """No second 60 within an hour, and no part that is too long, where the library alone would take them."""
    grammars, grammar = (
        Grammars(ByteTokeniser, [256]),
        written_grammar("json_schema", {"type": "string", "format": kind}),
    )
    for text, allowed in ((taken, True), (refused, False)):
        assert _allows(FollowedGrammar(grammars, grammar), [*json.dumps(text).encode(), 256]) == allowed


def _allows(form: FollowedGrammar, tokens: list[int]) -> bool:
    for token in tokens:
        if not form.allowed()[token]:
            return False
        form.take(token)
    return True


def test_an_object_of_no_properties_is_empty() -> None:
    """As one is of a tool that takes no arguments."""
    form = FollowedGrammar(
        Grammars(ByteTokeniser, [256]), written_grammar("json_schema", {"type": "object", "properties": {}}), b"{"
    )
    assert form.allowed()[ord("}")] and not form.allowed()[ord('"')]


def test_words_for_readers_take_no_room() -> None:
    """Notes are left out, though no property, definition or value that is named as one; a letter counts as one."""
    notes = {"description": "d" * 40_000, "title": "t", "examples": [1], "default": 2, "$comment": "c"}
    named = {
        "type": "object",
        "properties": {"title": {"$ref": "#/$defs/default", **notes}, "x": {"const": {"title": 1}}},
        "$defs": {"default": {"enum": ["é" * 20_000], **notes}},
    }
    for schema in ({**named, **notes}, {**named, "allOf": [{"type": "object", **notes}]}):
        grammar = written_grammar("json_schema", schema)
        assert "ddd" not in grammar
        form = FollowedGrammar(Grammars(ByteTokeniser, [256]), grammar)
        for token in '{"title":"é'.encode():
            assert form.allowed()[token]
            form.take(token)
    assert '{"const": {"title": 1}}' in grammar


def test_answers_of_one_form_have_bounds_of_their_own() -> None:
    """What one has used up of them ends no other."""
    grammars = Grammars(ByteTokeniser, [256])
    grammar = written_grammar("grammar", "start: /[a]{300000}/ | /[b]{300000}/")
    first, second = (FollowedGrammar(grammars, grammar, letter * 150_000) for letter in (b"a", b"b"))
    assert first.allowed()[ord("a")] and second.allowed()[ord("b")]


def test_a_host_without_the_library_is_not_the_form_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank tells it as its own error."""
    grammar = written_grammar("regex", "a")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(EngineError, match="llguidance, which is not installed"):
        FollowedGrammar(Grammars(ByteTokeniser, [256]), grammar).allowed()

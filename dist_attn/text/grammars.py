"""Grammars that answers follow, by the library llguidance: which tokens may come after those that were drawn."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, final

import numpy as np
from numpy.typing import NDArray

from dist_attn.errors import EngineError, GrammarError, MissingExtraError, extra_hint
from dist_attn.text.base import Tokeniser
from dist_attn.wire.specs import LONGEST_GRAMMAR

GrammarKind = Literal["json_schema", "regex", "choice", "grammar", "lark"]
# Between the parts of JSON: a line end and an indentation. A model that is unsure would write blanks without end.
BLANKS = r"\n? {0,32}"
# Any tokens that spell the text: llguidance would else force some, and take none that the model may prefer.
WHOLE = '%llguidance {"no_forcing": true}\nstart: @answer'
# Of one grammar: on one core some 30 ms for a token, and 80 MB while it is followed.
LIMITS = {
    "max_lexer_states": 250_000,
    "max_grammar_size": 200_000,
    "step_max_items": 10_000,
    "verbose_errors": False,
}
ERROR_CHARACTERS = 500
_SCHEMAS = {"items", "prefixItems", "additionalProperties", "anyOf", "oneOf"}
_OF_OBJECTS = {"properties", "patternProperties", "additionalProperties", "required", "minProperties"}
_NOTES = {"description", "title", "examples", "default", "$comment"}
# What the library takes as of these formats and validators do not: a minute's second 60, parts that are too long.
_STRICTER = {
    "date-time": ":[0-5][0-9][.Zz+-]",
    "time": ":[0-5][0-9][.Zz+-]",
    "email": r"^[^@]{1,64}@([^.]{1,62}\.){0,3}[^.]{1,62}$",
    "hostname": "^.{1,253}$",
}
_NAMED = {"properties", "patternProperties", "$defs", "definitions"}  # schemas by names


def find_library() -> Any:
    """The library llguidance. Raises: MissingExtraError."""
    try:
        import llguidance
    except ImportError:
        hint = extra_hint("structured")
        raise MissingExtraError(f"an answer is held to a form by llguidance, which is not installed: {hint}") from None
    return llguidance


class _HoldTogetherError(Exception):
    pass


def written_grammar(kind: GrammarKind, content: str | Mapping[str, Any]) -> str:
    """Write a grammar for SamplingSpec: of a JSON schema, a regular expression, a JSON list of texts, Lark or GBNF.

    Raises: GrammarError naming the fault; MissingExtraError.
    """
    library = find_library()
    if kind != "json_schema" and len(content) > LONGEST_GRAMMAR:
        raise GrammarError(f"it has {len(content)} characters; at most {LONGEST_GRAMMAR} are taken")
    try:
        if isinstance(content, Mapping):
            answer: dict[str, Any] = {"json_schema": drawn_schema(content)}
        elif kind == "regex":
            (answer,) = json.loads(library.grammar_from(kind, content))["grammars"]
        else:
            answer = {"lark_grammar": library.grammar_from(kind, content)}
        parts = [{"lark_grammar": WHOLE}, {**answer, "name": "answer"}]
        grammar = json.dumps({"grammars": parts}, ensure_ascii=False)
        grammar.encode()  # half a surrogate pair ends here
    except (ValueError, RecursionError) as error:
        raise GrammarError(_in_short(str(error))) from None
    if len(grammar) > LONGEST_GRAMMAR:
        raise GrammarError(f"it has {len(grammar)} characters as a grammar; at most {LONGEST_GRAMMAR} are taken")
    fault, words = library.LLMatcher.validate_grammar_with_warnings(grammar, limits=library.LLParserLimits(**LIMITS))
    if fault:
        raise GrammarError(_in_short(words[0]))
    return grammar


def drawn_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema by which JSON is drawn: what it allows the given one does too.

    Blanks are bounded, and where properties are named others are not drawn, unless `additionalProperties` has them: a
    model that is unsure would write either without end. A schema of several that hold together is left open.
    """
    bare, options = _bare(dict(schema)), schema.get("x-guidance")
    blanks = {"whitespace_pattern": BLANKS} | (options if isinstance(options, dict) else {})
    try:
        closed = _closed(bare)
    except _HoldTogetherError:
        closed = bare
    return {**closed, "x-guidance": blanks}


def _bare(schema: Any) -> Any:
    """Drop the words that only readers need, as a grammar has bounded room, and make formats strict."""
    if isinstance(schema, list):
        return [_bare(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: value for key, value in schema.items() if key not in _NOTES}
    kind = schema.get("format")
    if isinstance(kind, str) and kind in _STRICTER:
        made.setdefault("pattern", _STRICTER[kind])
    for key, value in made.items():
        if key in _NAMED and isinstance(value, dict):
            made[key] = {name: _bare(one) for name, one in value.items()}
        elif key in _SCHEMAS or key == "allOf":
            made[key] = _bare(value)
    return made


def _closed(schema: Any) -> Any:
    """The schema without properties that it does not name. Raises: _HoldTogetherError where several schemas do."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    named = schema.get("properties")
    beside = {"anyOf", "oneOf", "$ref"} if schema.keys() & _OF_OBJECTS else set()
    if schema.keys() & ({"allOf", "if"} | beside):
        raise _HoldTogetherError
    made = {key: _closed(value) if key in _SCHEMAS else value for key, value in schema.items()}
    for key in _NAMED & schema.keys():
        if isinstance(schema[key], dict):
            made[key] = {name: _closed(value) for name, value in schema[key].items()}
    others = {"additionalProperties", "patternProperties", "unevaluatedProperties"}
    if isinstance(named, dict) and not schema.keys() & others:
        required, least = schema.get("required", []), schema.get("minProperties", 0)
        enough = isinstance(least, int) and least <= len(named)
        if enough and isinstance(required, list) and all(str(name) in named for name in required):
            made["additionalProperties"] = False
    return made


def _in_short(words: str) -> str:
    return words.split("\n<")[0].strip()[:ERROR_CHARACTERS]


@final
class Grammars:
    """The grammars of one model's answers. Its tokens are read when the first answer is drawn, and kept then."""

    def __init__(self, load: Callable[[], Tokeniser], end_tokens: Collection[int]) -> None:
        self._load = load
        self._end_tokens = sorted(end_tokens)
        self._tokens: Any = None

    @property
    def vocab_size(self) -> int:
        """The number of the model's tokens, once a matcher is there."""
        return int(self._tokens.vocab_size)

    def matcher(self, grammar: str) -> Any:
        """A matcher of llguidance at the grammar's beginning.

        Raises: GrammarError; EngineError for a fault of this host or the model's folder, whatever the form.
        """
        try:
            library = find_library()
        except MissingExtraError as error:
            raise EngineError(str(error)) from None
        if not self._end_tokens:
            raise GrammarError("this model has no end token, so no answer of it could end where its form does")
        if self._tokens is None:
            try:
                self._tokens = library.LLTokenizer(_Table(self._load(), self._end_tokens), eos_token=self._end_tokens)
            except Exception as error:  # of the folder or the library: it must not end a rank
                raise EngineError(f"llguidance does not take this model's tokens: {error}") from error
        # One for each answer: copies share their lexer's bounds, so that one answer's states would end another.
        made = library.LLMatcher(self._tokens, grammar, log_level=0, limits=library.LLParserLimits(**LIMITS))
        _check(made)
        return made


class _Table:
    """The bytes of all tokens, as llguidance asks for them: those that a tokeniser decodes to."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokeniser: Tokeniser, end_tokens: list[int]) -> None:
        self.tokens = [tokeniser.decode([token]) for token in range(tokeniser.vocab_size)]
        for text, token in tokeniser.special_tokens.items():
            self.tokens[token] = text.encode()
        self.eos_token_id = end_tokens[0]
        self.special_token_ids = sorted({*tokeniser.special_tokens.values(), *end_tokens})

    def __call__(self, text: str) -> list[int]:
        """Refuse: llguidance tokenises what it forces, and nothing is forced (`WHOLE`)."""
        raise RuntimeError(f"a grammar forced {text[:80]!r}")


@final
class FollowedGrammar:
    """One answer's place in its grammar, which the grammar and the tokens drawn so far decide alone.

    Nothing is made before `allowed` is called: ranks that are told what was drawn never do.
    """

    def __init__(self, grammars: Grammars | None, grammar: str, drawn: Iterable[int] = ()) -> None:
        self._grammars, self._grammar = grammars, grammar
        self._ahead = list(drawn)  # that the matcher has not taken yet
        self._matcher: Any = None

    def take(self, token: int) -> None:
        """Go on after a drawn token."""
        self._ahead.append(token)

    def allowed(self) -> NDArray[np.bool_]:
        """The tokens that may come next, as a flag of each; an end token where the answer may end.

        Raises: GrammarError where the grammar goes no further.
        """
        if self._grammars is None:
            raise GrammarError("the tokens of this model are not known here, so its answers cannot be held to a form")
        if self._matcher is None:
            self._matcher = self._grammars.matcher(self._grammar)
        ahead, self._ahead = self._ahead, []
        self._matcher.consume_tokens(ahead)
        _check(self._matcher, "its bound was reached: ")  # each token was allowed
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        _check(self._matcher)  # what it allows after a fault is the end
        return np.unpackbits(bits, bitorder="little", count=self._grammars.vocab_size).astype(bool)


def _check(matcher: Any, why: str = "") -> None:
    if matcher.is_error():
        raise GrammarError(f"the answer's form cannot be followed: {why}{_in_short(matcher.get_error())}")

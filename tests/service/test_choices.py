"""Completions with several prompts and choices, with their prompts before them, with log-probabilities."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from dist_attn.text.grammars import written_grammar
from dist_attn.wire.messages import SamplingSpec
from tests.support.fake_engine import VOCAB, FakeEngine, say
from tests.support.opening import draw_of, is_completion
from tests.support.service_server import RunningService, running_service
from tests.support.waiting import eventually

ROUTE = "/v1/completions"


def by_seed(prompt: list[int], sampling: SamplingSpec) -> list[int]:
    """Other letters for every seed, after the prompt's last one."""
    start = (sampling.seed or 0) % 26
    return [prompt[-1]] + [97 + (start + k) % 26 for k in range(sampling.max_tokens - 1)]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """One service whose engine draws by the seed."""
    with running_service(tmp_path_factory.mktemp("service"), FakeEngine(reply=by_seed)) as running:
        yield running


def complete(service: RunningService, **body: Any) -> dict[str, Any]:
    """A whole completion."""
    answer = httpx.post(service.url + ROUTE, json={"prompt": "abc", "max_tokens": 4, **body}, timeout=60)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def stream(service: RunningService, **body: Any) -> tuple[dict[int, list[dict[str, Any]]], dict[str, Any] | None]:
    """The chunks of a streamed completion by choice, and its usage."""
    options = {"prompt": "abc", "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    answer = httpx.post(service.url + ROUTE, json={**options, **body}, timeout=60)
    events = [block.removeprefix("data: ") for block in answer.text.strip().split("\n\n")]
    assert events[-1] == "[DONE]", answer.text
    choices: dict[int, list[dict[str, Any]]] = {}
    usage = None
    for event in map(json.loads, events[:-1]):
        for choice in event["choices"]:
            choices.setdefault(choice["index"], []).append(choice)
        usage = event.get("usage", usage)
    return choices, usage


def seeds(service: RunningService, count: int) -> list[int | None]:
    """The seeds of the last completions that the engine was asked for."""
    opened = [draw_of(m) for m in service.engine.received if is_completion(m)]
    return [sampling.seed for sampling in opened[-count:]]


def test_every_choice_has_its_own_seed(service: RunningService) -> None:
    """The first choice draws what it draws alone, the others something else, and all the same again next time."""
    first = complete(service, seed=7, n=3)
    derived = seeds(service, 3)
    assert derived[0] == 7 and len(set(derived)) == 3
    assert complete(service, seed=7, n=3)["choices"] == first["choices"]
    assert complete(service, seed=7)["choices"][0] == first["choices"][0]
    assert len({choice["text"] for choice in first["choices"]}) == 3
    complete(service, n=2)
    assert len(set(seeds(service, 2)) - {None}) == 2


@pytest.mark.parametrize("prompts", [["ab", "cd"], [[97, 98], [99, 100]]])
def test_prompts_and_choices_are_numbered_as_openai_does(service: RunningService, prompts: Any) -> None:
    """Choice `i * n + j` is the j-th continuation of prompt i; a prompt is counted once in the usage."""
    whole = complete(service, prompt=prompts, n=2, seed=1)
    assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2, 3]
    assert [choice["text"][0] for choice in whole["choices"]] == ["b", "b", "d", "d"]
    assert whole["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 16,
        "total_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert complete(service, prompt=[prompts[1]], seed=1)["choices"][0]["text"] == whole["choices"][2]["text"]


def test_a_stream_mixes_choices_and_ends_each_once(service: RunningService) -> None:
    """Chunks name their choice, every choice has one finish chunk, and the texts are those of the whole answer."""
    body = {"prompt": ["ab", "cd"], "n": 2, "seed": 5}
    choices, usage = stream(service, **body)
    whole = complete(service, **body)
    assert sorted(choices) == [0, 1, 2, 3]
    for index, chunks in choices.items():
        assert "".join(chunk["text"] for chunk in chunks) == whole["choices"][index]["text"]
        assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert usage == whole["usage"]


@pytest.mark.parametrize("prompt", ["añ", [97, 195, 177]])
def test_echo_puts_the_prompt_before_the_text(service: RunningService, prompt: Any) -> None:
    """The text begins with the prompt, given as text or as tokens, and stop strings are not looked for in it."""
    whole = complete(service, prompt=prompt, echo=True, stop=["ñ"], max_tokens=3, seed=0)
    choices, _ = stream(service, prompt=prompt, echo=True, stop=["ñ"], max_tokens=3, seed=0)
    text = whole["choices"][0]["text"]
    assert text.startswith("añ") and len(text) > 2
    assert "".join(chunk["text"] for chunk in choices[0]) == text


def test_log_probabilities_have_openais_shape(service: RunningService) -> None:
    """Four lists of one length: tokens, their values, the likeliest with the drawn one among them, and offsets."""
    asked = [m for m in service.engine.received if is_completion(m)]
    logprobs = complete(service, prompt="xy", logprobs=2, seed=0)["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["y", "a", "b", "c"]
    assert logprobs["token_logprobs"] == [-0.5] * 4
    assert logprobs["top_logprobs"][1] == {"a": -0.5, "b": -1.5}
    assert logprobs["text_offset"] == [0, 1, 2, 3]
    opened = [m for m in service.engine.received if is_completion(m)][len(asked) :]
    assert [draw_of(m).logprobs for m in opened] == [2]
    own = complete(service, prompt="xy", logprobs=0, seed=0)["choices"][0]["logprobs"]
    assert own["top_logprobs"] is None and own["token_logprobs"] == [-0.5] * 4
    choices, _ = stream(service, prompt="xy", logprobs=2, seed=0)
    told = [chunk["logprobs"] for chunk in choices[0] if chunk["logprobs"]]
    for name in logprobs:
        assert [value for part in told for value in part[name]] == logprobs[name]


def test_log_probabilities_end_where_the_text_ends(tmp_path: Path) -> None:
    """A stop string that spans tokens is in neither, streamed or whole."""
    with running_service(tmp_path, FakeEngine(reply=say(b"one two"))) as service:
        choice = complete(service, logprobs=1, stop=" t", max_tokens=20)["choices"][0]
        assert choice["text"] == "one" and choice["logprobs"]["tokens"] == ["o", "n", "e"]
        choices, _ = stream(service, logprobs=1, stop=" t", max_tokens=20)
        told = [chunk["logprobs"] for chunk in choices[0] if chunk["logprobs"]]
        assert [token for part in told for token in part["tokens"]] == ["o", "n", "e"]


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Log-probabilities that came in pieces, as one."""
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}


@pytest.mark.parametrize("prompt", ["añb", [97, 195, 177, 98]])
def test_a_prompt_is_scored_with_echo(service: RunningService, prompt: Any) -> None:
    """With `echo` the lists begin with the prompt's tokens, the first without a value; streamed in pieces too."""
    options = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 2, "seed": 0}
    choice = complete(service, **options)["choices"][0]
    assert choice["text"] == "añbba" and choice["finish_reason"] == "length"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xb1", "b", "b", "a"]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.5, -0.5, -0.5]
    assert logprobs["top_logprobs"][0] is None
    assert logprobs["top_logprobs"][3] == {"b": -0.5, "c": -1.5}
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3, 4]
    (opened,) = [m for m in service.engine.received if is_completion(m)][-1:]
    draw = draw_of(opened)
    assert (draw.logprobs, draw.prompt_logprobs, draw.max_tokens) == (2, 2, 2)
    choices, usage = stream(service, **options)
    assert "".join(chunk["text"] for chunk in choices[0]) == choice["text"]
    assert joined([chunk["logprobs"] for chunk in choices[0] if chunk["logprobs"]]) == logprobs
    assert usage is not None and usage["completion_tokens"] == 2
    alone = complete(service, **{**options, "logprobs": 0})["choices"][0]["logprobs"]
    assert alone == {**logprobs, "top_logprobs": None}


def test_a_prompt_may_be_scored_alone(service: RunningService) -> None:
    """`max_tokens=0` draws nothing: the text is the prompt, for each prompt and choice, of a single token too."""
    whole = complete(service, prompt=["abc", "d"], n=2, echo=True, logprobs=1, max_tokens=0)
    assert [choice["text"] for choice in whole["choices"]] == ["abc", "abc", "d", "d"]
    assert {choice["finish_reason"] for choice in whole["choices"]} == {"length"}
    tokens = [choice["logprobs"]["token_logprobs"] for choice in whole["choices"]]
    assert tokens == [[None, -0.5, -0.5], [None, -0.5, -0.5], [None], [None]]
    assert whole["usage"]["completion_tokens"] == 0 and whole["usage"]["prompt_tokens"] == 4
    plain = complete(service, prompt="abc", echo=True, max_tokens=0)["choices"][0]
    assert (plain["text"], plain["logprobs"], plain["finish_reason"]) == ("abc", None, "length")
    answer = httpx.post(service.url + ROUTE, json={"prompt": "abc", "max_tokens": 0}, timeout=60)
    assert answer.status_code == 400 and "echo=true" in answer.json()["detail"]


def test_the_end_token_counts_among_the_scores(tmp_path: Path) -> None:
    """A text that ends by itself has its end token in the lists of a scored prompt: whoever wants the prompt alone can
    take off as many entries as tokens were asked for.
    """
    with running_service(tmp_path, FakeEngine(reply=say(b"x"))) as service:
        choice = complete(service, echo=True, logprobs=1, max_tokens=2)["choices"][0]
        assert choice["text"] == "abcx" and choice["finish_reason"] == "stop"
        assert choice["logprobs"]["tokens"] == ["a", "b", "c", "x", ""]
        assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3, 4]
        choices, _ = stream(service, echo=True, logprobs=1, max_tokens=2)
        assert joined([chunk["logprobs"] for chunk in choices[0] if chunk["logprobs"]]) == choice["logprobs"]


def test_too_many_scores_are_refused(service: RunningService) -> None:
    """More log-probabilities of prompts than one answer holds are refused before the engine works."""
    body = {"prompt": "ab" * 20_000, "echo": True, "logprobs": 5, "max_tokens": 0}
    answer = httpx.post(service.url + ROUTE, json=body, timeout=60)
    assert answer.status_code == 400 and "240000 log-probabilities" in answer.json()["detail"]
    assert answer.json()["error"]["param"] == "logprobs"


def test_the_official_client_reads_choices_and_log_probabilities(service: RunningService) -> None:
    """The openai package gets n choices of a list of prompts, with what was asked for about their tokens."""
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(
            model="tiny", prompt=["ab", "cd"], n=2, seed=3, max_tokens=3, logprobs=1, temperature=0.5
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
        assert answer.choices[0].logprobs is not None and answer.choices[0].logprobs.tokens[0] == "b"  # type: ignore[index]


def test_the_best_of_several_are_answered(tmp_path: Path) -> None:
    """Of each prompt's choices the likeliest per token come back, the best first, and all of them are counted."""

    def differing(prompt: list[int], sampling: SamplingSpec) -> list[int]:
        letter = 97 + (sampling.seed or 0) % 7
        return [letter] * sampling.max_tokens

    with running_service(tmp_path, FakeEngine(reply=differing, told_by_token=True)) as service:
        body = {"prompt": ["x", "y"], "max_tokens": 3, "seed": 4, "n": 5, "best_of": 5}
        every = complete(service, **body, logprobs=0)["choices"]
        best = complete(service, **body | {"n": 2})
        ranked = []
        for at in (0, 5):
            texts = [choice["text"] for choice in every[at : at + 5]]
            ranked += sorted(texts, key=lambda text: text[0], reverse=True)[:2]
        assert len({choice["text"] for choice in every}) > 2
        assert [choice["text"] for choice in best["choices"]] == ranked
        assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
        assert all(choice["logprobs"] is None for choice in best["choices"])
        assert best["usage"]["completion_tokens"] == 2 * 5 * 3
        assert complete(service, **body | {"n": 1}, logprobs=1)["choices"][0]["logprobs"]["top_logprobs"]
        scored = complete(service, **body | {"n": 1}, logprobs=0, echo=True)["choices"]
        assert [choice["text"][1:] for choice in scored] == ranked[::2]


def test_penalties_and_biases_reach_the_engine(service: RunningService) -> None:
    """What is asked is what the draw is told, for every choice."""
    complete(service, presence_penalty=0.5, frequency_penalty=-1, logit_bias={"97": -100, "3": 1.5}, n=2)
    for message in [m for m in service.engine.received if is_completion(m)][-2:]:
        told = draw_of(message)
        assert (told.presence_penalty, told.frequency_penalty) == (0.5, -1.0)
        assert told.logit_bias == {97: -100.0, 3: 1.5}


def test_a_penalty_of_repetition_goes_with_the_tokens_of_its_prompt(service: RunningService) -> None:
    """Each once and in order, of each choice its own prompt's; a draw that asks for none is told none."""
    complete(service, prompt=["baab", "c"], repetition_penalty=1.5)
    told = [draw_of(message) for message in service.engine.received if is_completion(message)][-2:]
    assert sorted(np.frombuffer(draw.prompt_tokens, np.int32).tolist() for draw in told) == [[97, 98], [99]]
    assert {draw.repetition_penalty for draw in told} == {1.5}
    complete(service, prompt="baab")
    assert draw_of([m for m in service.engine.received if is_completion(m)][-1]).prompt_tokens == b""


def test_the_form_of_an_answer_reaches_the_engine(service: RunningService) -> None:
    """Each choice is told the grammar of the schema; text of no form is told none."""
    schema = {"type": "object", "properties": {"a": {"const": 5}}}
    named = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}
    complete(service, response_format=named, n=2)
    told = [draw_of(message) for message in service.engine.received if is_completion(message)][-2:]
    assert {draw.grammar for draw in told} == {written_grammar("json_schema", schema)}
    complete(service, response_format={"type": "text"})
    assert draw_of([m for m in service.engine.received if is_completion(m)][-1]).grammar == ""


def test_without_the_library_a_form_is_refused(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    """In words that install it; text of no form is drawn as ever."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    answer = httpx.post(service.url + ROUTE, json={"prompt": "a", "response_format": {"type": "json_object"}})
    assert answer.status_code == 501 and "pip install -e '.[structured]'" in answer.json()["error"]["message"]
    complete(service, response_format={"type": "text"})


def test_one_choice_that_fails_ends_all(tmp_path: Path) -> None:
    """The others are cancelled in the engine, and the answer is the error."""
    engine = FakeEngine(fail_at=3)
    with running_service(tmp_path, engine) as service:
        engine.reply = by_seed
        answer = httpx.post(service.url + ROUTE, json={"prompt": ["ab", "abc"], "n": 2, "max_tokens": 5000})
        assert answer.status_code == 500 and "rank 1 died" in answer.text
        eventually(lambda: engine.open_count == 0, "the others to be cancelled")


def test_a_token_outside_the_vocabulary_is_the_engines_error(tmp_path: Path) -> None:
    """What the tokeniser cannot spell is no answer of 200."""
    with running_service(tmp_path, FakeEngine(reply=lambda *_: [VOCAB + 5])) as service:
        answer = httpx.post(service.url + ROUTE, json={"prompt": "a"})
        assert answer.status_code == 500 and answer.json()["error"]["code"] == "engine_failed"

"""Beginnings of prompts that were read before: only the rest is read, and the answer is the same whatever happens."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from dist_attn_service.completions.prefixes import kept_positions
from dist_attn_service.engine.metrics import PREFIX_LOOKUPS
from dist_attn_service.engine.port import EngineHealth
from hypothesis import given
from hypothesis import strategies as st

from dist_attn.model_config.figures import tokens_of_block
from dist_attn.settings import PrefixSettings, StoreSettings
from dist_attn.wire.messages import SamplingSpec, Tokens
from tests.support.fake_engine import FakeEngine
from tests.support.fake_sessions import GRID, MANIFEST
from tests.support.metrics import samples, value
from tests.support.opening import is_completion, states_at
from tests.support.service_server import RunningService, model_folder, running_service
from tests.support.snapshots import manifest
from tests.support.waiting import eventually

PATIENT = PrefixSettings(wait_s=30)  # a busy machine is no fault of the store
BOOK = "".join(chr(97 + (at * at + 7 * at) % 26) for at in range(5 * GRID))


def of_all_tokens(prompt: list[int], sampling: SamplingSpec) -> list[int]:
    """A reply that depends on every token of the prompt, and on the seed."""
    digest = hashlib.sha256(f"{prompt} {sampling.seed}".encode()).hexdigest()
    return list(digest.encode())[: sampling.max_tokens]


def engine() -> FakeEngine:
    """An engine whose replies would tell a wrong state."""
    return FakeEngine(reply=of_all_tokens)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    """A service whose store is empty."""
    with running_service(tmp_path, engine(), prefixes=PATIENT) as running:
        yield running


def states_kept(service: RunningService) -> None:
    """Wait until nobody keeps states any more."""
    eventually(lambda: not service.engine_port.tasks("prefix-keep"), "the states to be kept")


def complete(service: RunningService, prompt: Any, key: str = "", **options: Any) -> dict[str, Any]:
    """A completion that goes well, once the states of its prompt are in the store."""
    head = {"authorization": f"Bearer {key}"} if key else {}
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "seed": 1, **options}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, headers=head, timeout=60)
    assert answer.status_code == 200, answer.text
    states_kept(service)
    whole: dict[str, Any] = answer.json()
    return whole


def cached(answer: dict[str, Any]) -> int:
    """How many tokens of the prompts were not read again."""
    count: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return count


def text(answer: dict[str, Any]) -> str:
    """The text of the first choice."""
    said: str = answer["choices"][0]["text"]
    return said


def expected(prompt: str, seed: int = 1) -> str:
    """What the engine says to a prompt that it reads whole."""
    return bytes(of_all_tokens(list(prompt.encode()), SamplingSpec(12, seed=seed))).decode()


def sent(service: RunningService) -> list[int]:
    """How many tokens the engine was sent, by request."""
    counts: dict[str, int] = {}
    for message in service.engine.received:
        if isinstance(message, Tokens):
            counts[message.request_id] = counts.get(message.request_id, 0) + len(message.tokens) // 4
    return list(counts.values())


def test_a_prompt_that_comes_again_is_not_read_again(service: RunningService) -> None:
    """Only what follows the last point of the grid is sent; text and usage are the same but for `cached_tokens`."""
    first, second = complete(service, BOOK), complete(service, BOOK)
    assert text(first) == text(second) == expected(BOOK)
    # The last token is never in the state, so that of a prompt that ends on the grid is one block before its end.
    assert (cached(first), cached(second)) == (0, 4 * GRID)
    assert sent(service) == [5 * GRID, GRID]
    for answer in (first, second):
        assert answer["usage"]["prompt_tokens"] == 5 * GRID and answer["usage"]["total_tokens"] == 5 * GRID + 12
    found = samples(service)
    outcomes = {name: value(found, "dist_attn_prefix_lookups_total", outcome=name) for name in PREFIX_LOOKUPS}
    assert outcomes == {"hit": 1, "miss": 1, "failed": 0}
    assert value(found, "dist_attn_prefix_tokens_total") == 4 * GRID
    kept = len(kept_positions(5 * GRID, GRID, 512))
    assert value(found, "dist_attn_prefix_states_total", outcome="kept") == kept
    assert value(found, "dist_attn_stored_prefixes") in (0, kept)  # as it was when somebody last looked


def test_another_question_about_the_same_text_begins_with_what_they_share(service: RunningService) -> None:
    """A prompt with another end goes on from the last state before it differs, and says what it says alone."""
    complete(service, BOOK + "who?" * 60)
    other = complete(service, BOOK[: 4 * GRID + 9] + "when?" * 80)
    assert text(other) == expected(BOOK[: 4 * GRID + 9] + "when?" * 80)
    assert cached(other) == 4 * GRID
    assert cached(complete(service, "x" + BOOK)) == 0


def test_short_prompts_are_left_alone(service: RunningService) -> None:
    """A prompt without a point of the grid before its last token is neither looked up nor kept."""
    for prompt in (BOOK[:GRID], BOOK[:GRID]):
        assert cached(complete(service, prompt)) == 0
    assert cached(complete(service, BOOK[: GRID + 1])) == 0
    assert cached(complete(service, BOOK[: GRID + 1])) == GRID
    assert value(samples(service), "dist_attn_prefix_lookups_total", outcome="miss") == 1


def test_every_choice_begins_with_the_state_and_prompts_count_once(service: RunningService) -> None:
    """With several prompts, `n` and `best_of` each choice says what it says when everything is read."""
    prompts = [BOOK, BOOK[:700], "short"]
    options = {"n": 2, "seed": 5, "temperature": 1}
    whole, again = complete(service, prompts, **options), complete(service, prompts, **options)
    assert [choice["text"] for choice in whole["choices"]] == [choice["text"] for choice in again["choices"]]
    assert text(again) == expected(BOOK, 5)
    assert (cached(whole), cached(again)) == (0, 4 * GRID + GRID)
    opened = [message for message in service.engine.received if is_completion(message)]
    assert [bool(states_at(message)) for message in opened] == [True, False, True, *[False] * 9]
    best = complete(service, BOOK, best_of=3, n=1, seed=5, logprobs=1)
    assert cached(best) == 4 * GRID and len(best["choices"]) == 1
    echoed = complete(service, BOOK, echo=True)
    assert text(echoed) == BOOK + expected(BOOK) and cached(echoed) == 4 * GRID
    scored = complete(service, BOOK, echo=True, logprobs=0)
    assert text(scored) == BOOK + expected(BOOK) and cached(scored) == 0
    assert None not in scored["choices"][0]["logprobs"]["token_logprobs"][1:]


def test_a_stream_says_what_it_took_over(service: RunningService) -> None:
    """`prompt_progress.cache` counts it, `processed` begins there, and the last event has it in its usage."""
    complete(service, BOOK)
    body = {"prompt": BOOK, "stream": True, "return_progress": True, "stream_options": {"include_usage": True}}
    answer = httpx.post(f"{service.url}/v1/completions", json=body, timeout=60)
    *events, done = [line.removeprefix("data: ") for line in answer.text.strip().split("\n\n")]
    told = [json.loads(event) for event in events]
    progress = [event["prompt_progress"] for event in told if "prompt_progress" in event]
    assert done == "[DONE]" and progress
    assert {(told["total"], told["cache"]) for told in progress} == {(5 * GRID, 4 * GRID)}
    assert progress[-1]["processed"] == 5 * GRID
    assert cached(told[-1]) == 4 * GRID


def test_chats_take_over_what_was_said_before(tmp_path: Path) -> None:
    """The next turn of a chat begins with the state of the turns before it."""
    model = model_folder(tmp_path)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}")
    with running_service(tmp_path, engine(), model=model, prefixes=PATIENT) as service:
        chat = [{"role": "user", "content": BOOK}]
        for turn in range(3):
            answer = httpx.post(f"{service.url}/v1/chat/completions", json={"messages": chat}, timeout=60).json()
            assert cached(answer) == (0 if turn == 0 else 5 * GRID), turn
            states_kept(service)
            chat += [{"role": "assistant", "content": "so"}, {"role": "user", "content": f"{turn}?"}]


def test_a_caller_finds_only_its_own(tmp_path: Path) -> None:
    """What one key has read is not there for another one."""
    hashes = tuple(hashlib.sha256(key.encode()).hexdigest() for key in ("one", "two"))
    with running_service(tmp_path, engine(), api_keys=hashes, prefixes=PATIENT) as service:
        complete(service, BOOK, "one")
        assert cached(complete(service, BOOK, "two")) == 0
        assert cached(complete(service, BOOK, "one")) == cached(complete(service, BOOK, "two")) == 4 * GRID


@pytest.mark.parametrize("change", ["weights", "ranks"])
def test_another_model_or_another_way_of_computing_finds_nothing(service: RunningService, change: str) -> None:
    """States are found only where they change no bit: other weights, or another number of ranks, have their own."""
    complete(service, BOOK)
    about = {"vocab_size": 257, "mixers": ["rfa_gate"], "hidden_size": 8, "chunk_tokens": GRID}
    service.engine.manifest = manifest(**about, **({"weights": "f" * 64} if change == "weights" else {"ranks": 7}))
    assert service.engine.manifest != MANIFEST
    assert cached(complete(service, BOOK)) == 0


@pytest.mark.parametrize("refusal", ["invalid_state", "state_mismatch"])
def test_a_state_that_the_engine_does_not_take_costs_nothing_but_time(service: RunningService, refusal: str) -> None:
    """The prompt is read anew, the answer is the same, the metric says it, and the state is not offered again."""
    complete(service, BOOK)
    service.engine.prompts.refuse = refusal
    again = complete(service, BOOK)
    assert text(again) == expected(BOOK) and cached(again) == 0
    assert value(samples(service), "dist_attn_prefix_lookups_total", outcome="failed") == 1
    service.engine.prompts.refuse = None
    assert cached(complete(service, BOOK)) == 3 * GRID  # the next one before it


def test_a_state_that_another_of_several_engines_does_not_take_is_kept(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one runs another model the state is sound for the others, and is offered to them again."""
    complete(service, BOOK)
    other = FakeEngine(manifest=manifest(weights="f" * 64)).status()
    monkeypatch.setattr(service.engine_port, "engines", lambda: {"b": EngineHealth(True, "", other)})
    service.engine.prompts.refuse = "state_mismatch"
    assert text(complete(service, BOOK)) == expected(BOOK)
    service.engine.prompts.refuse = None
    assert cached(complete(service, BOOK)) == 4 * GRID


def test_an_engine_that_does_not_take_the_state_in_time_is_not_waited_for(tmp_path: Path) -> None:
    """After `wait_s` the prompt is read anew; the state was not at fault and stays."""
    with running_service(tmp_path, engine(), prefixes=PrefixSettings(wait_s=2)) as service:
        complete(service, BOOK)
        service.engine.prompts.mute = True
        again = complete(service, BOOK)
        assert text(again) == expected(BOOK) and cached(again) == 0
        service.engine.prompts.mute = False
        assert cached(complete(service, BOOK)) == 4 * GRID


def test_damaged_and_lost_bytes_in_the_store_change_no_answer(tmp_path: Path) -> None:
    """Whatever the store gives back, the prompt is answered as if it had been read whole."""
    folder = tmp_path / "states"
    store = StoreSettings(address=str(folder))
    with running_service(tmp_path, engine(), store=store, prefixes=PATIENT) as service:
        complete(service, BOOK)
        blobs = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > GRID * 4]
        blobs = [path for path in blobs if "catalogue" not in path.name]
        assert blobs
        for path in blobs:
            data = bytearray(path.read_bytes())
            data[-5] ^= 1
            path.write_bytes(data)
        again = complete(service, BOOK)
        assert text(again) == expected(BOOK) and cached(again) == 0
        for path in blobs:
            path.unlink()
        again = complete(service, BOOK)
        assert text(again) == expected(BOOK)
        assert value(samples(service), "dist_attn_prefix_lookups_total", outcome="failed") >= 2


def test_it_can_be_switched_off_and_a_full_store_only_keeps_less(tmp_path: Path) -> None:
    """Without `reuse` nothing is looked up or kept; a caller without room gets its answers all the same."""
    with running_service(tmp_path / "off", engine(), prefixes=PrefixSettings(reuse=False)) as service:
        assert [cached(complete(service, BOOK)) for _ in range(2)] == [0, 0]
        assert not any(is_completion(m) and states_at(m) for m in service.engine.received)
    store = StoreSettings(address="memory:", tenant_bytes=100)
    with running_service(tmp_path / "full", engine(), store=store, prefixes=PATIENT) as service:
        assert [cached(complete(service, BOOK)) for _ in range(2)] == [0, 0]
        assert value(samples(service), "dist_attn_prefix_states_total", outcome="no_room") == 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_prompts_of_a_few_thousand_tokens_are_kept_on_any_device(device: str) -> None:
    """Blocks of a model that writes are short enough that a prompt of 2,500 tokens leaves a state behind."""
    assert kept_positions(2500, tokens_of_block(device, writes=True), PrefixSettings().min_tokens)


@given(st.integers(1, 200_000), st.sampled_from([64, 512, 1000]), st.data())
def test_a_prompt_with_another_end_reads_little_again(tokens: int, grid: int, data: st.DataObject) -> None:
    """With all but the last n tokens in common there is a state less than 4n tokens, or two blocks, before the end."""
    kept = kept_positions(tokens, grid, 1)
    assert all(0 < position < tokens and position % grid == 0 for position in kept)
    assert len(kept) <= 2 + max(0, (tokens // grid).bit_length())
    other = data.draw(st.integers(0, tokens - 1))
    shared = max([0, *(position for position in kept if position <= tokens - other)])
    assert tokens - shared <= max(4 * other, 2 * grid)

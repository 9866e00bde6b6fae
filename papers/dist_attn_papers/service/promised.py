"""What the service promises: every promise with the bound it has, and how a measurement's result is judged by it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["PROMISES", "Promise", "HeldByTests", "Verdict"]

RECOVERY_S, NOTICED_S, LIVEZ_MS, GREW_BYTES, FORK_MS = 15.0, 5.0, 100.0, 64_000_000, 50.0
TIMES_IDLE, FIRST_TOKEN_S, READING_KEPT, ETA_OFF = 3.0, 2.0, 0.5, 0.15
# A step is under way, two have been sent, and one may begin before the next look at the status.
STEPS_AHEAD, CHUNK_TOKENS, LEFT_S = 4, 512, 1.0


@dataclass(frozen=True)
class Verdict:
    """What was found, in words with figures, and whether that is what was promised."""

    found: str
    kept: bool


@dataclass(frozen=True)
class Promise:
    """One that is measured: `judge` gets what the measurement wrote."""

    name: str
    words: str
    measurement: str
    judge: Callable[[Any], Verdict]
    others: str


@dataclass(frozen=True)
class HeldByTests:
    """One that is held by files of tests, which the measurement `tests` runs."""

    name: str
    words: str
    tests: tuple[str, ...]
    others: str
    measurement: str = "tests"

    def judge(self, result: Any) -> Verdict:
        """Kept where tests of every file passed and none failed."""
        counts = {test: result.get(test, {"passed": 0, "failed": 0, "skipped": 0}) for test in self.tests}
        found = "; ".join(
            f"`{test}`: {count['passed']} passed"
            + (f", {count['failed']} failed" if count["failed"] else "")
            + (f", {count['skipped']} skipped" if count["skipped"] else "")
            for test, count in counts.items()
        )
        return Verdict(found, all(count["passed"] and not count["failed"] for count in counts.values()))


def _all(kept: Iterable[bool]) -> bool:
    """Whether each is; of nothing measured, nothing is kept."""
    seen = list(kept)
    return bool(seen) and all(seen)


def _equal_answers(result: Any) -> Verdict:
    different, errors = len(result["answers_different"]), len(result["errors"])
    found = (
        f"{result['kills']} kills: {result['answers_equal']} answers with the SHA-256 of an undisturbed run, "
        f"{different} with another, {errors} errors; read again after a kill, all streams together: "
        f"median {result['replayed_tokens_median']:,.0f} tokens, at most {result['replayed_tokens_max']:,}"
    )
    return Verdict(found, bool(result["kills"] and result["answers_equal"]) and not (different or errors))


def _recovery(result: Any) -> Verdict:
    slowest, errors = result["seconds_to_ready_max"], len(result["errors"])
    found = f"median {result['seconds_to_ready_median']} s, at most {slowest} s; {errors} streams broke"
    return Verdict(found, slowest is not None and slowest <= RECOVERY_S and not errors)


def _stopped(result: Any) -> Verdict:
    found = (
        f"{result['named']} of {result['stops']} named, after a median of {result['noticed_s_median']} s and at most "
        f"{result['noticed_s_max']} s; ready again after {result['ready_s_median']} s; "
        f"{result['false_alarms']} false alarms; {result['answers_equal']} answers equal, "
        f"{len(result['answers_different'])} different, {len(result['errors'])} errors"
    )
    named = 0 < result["stops"] == result["named"] and result["noticed_s_max"] <= NOTICED_S
    return Verdict(found, named and not (result["false_alarms"] or result["answers_different"] or result["errors"]))


def _livez(result: Any) -> Verdict:
    rows = result["rows"]
    waits = [(row["client"], row["livez_p99_ms"], row["livez_max_ms"]) for row in rows]
    found = "; ".join(f"{client}: p99 {p99:.1f} ms, at most {most:.1f}" for client, p99, most in waits)
    return Verdict(f"{result['megabytes']:,} MiB, {found}", _all(row["livez_p99_ms"] < LIVEZ_MS for row in rows))


def _memory(result: Any) -> Verdict:
    rows = result["rows"]
    sizes = [(row["client"], row["grew_bytes"] / 1e6, result["megabytes"] / row["seconds"]) for row in rows]
    found = "; ".join(f"{client}: {grew:.1f} MB, {speed:.1f} MiB/s" for client, grew, speed in sizes)
    return Verdict(f"{result['megabytes']:,} MiB, {found}", _all(row["grew_bytes"] < GREW_BYTES for row in rows))


def _fair(result: Any) -> Verdict:
    found, kept = [], bool(result["rows"])
    for row in result["rows"]:
        times, part = row["beside_p99_ms"] / row["idle_p99_ms"], row["reading_beside"] / row["reading_alone"]
        first = row["first_token_beside_max_s"]
        found.append(
            f"{row['ranks']} rank{'s' * (row['ranks'] > 1)}: p99 {times:.1f} x idle, first token after "
            f"{row['first_token_beside_median_s']:.1f} s, at most {first:.1f}, reading keeps {part:.0%}"
        )
        kept &= times <= TIMES_IDLE and first <= FIRST_TOKEN_S and part >= READING_KEPT
    return Verdict("; ".join(found), kept)


def _left(result: Any) -> Verdict:
    # A step of drawing is a token, of all other phases a chunk.
    drawn = max((phase["most_steps"] for phase in result if phase["phase"].startswith("drawing")), default=0)
    chunks = max((phase["most_steps"] for phase in result if not phase["phase"].startswith("drawing")), default=0)
    slowest = max((phase["most_seconds"] for phase in result), default=0.0)
    found = (
        f"{sum(len(phase['each']) for phase in result)} clients left in {len(result)} phases; until the status showed "
        f"no work, at most {chunks} steps of reading or {drawn} tokens drawn, and {slowest:.2f} s, of which the "
        "status' own age is a part"
    )
    return Verdict(found, bool(result) and chunks <= STEPS_AHEAD and drawn <= CHUNK_TOKENS and slowest <= LEFT_S)


def _restored(result: Any) -> Verdict:
    restore = result["restore"]
    found = (
        f"{result['append']['tokens']:,} tokens: {restore['recomputed_tokens']} recomputed; text, log-probabilities "
        f"and state {'' if restore['same_text_and_logprobs'] and restore['same_state'] else 'not '}bit-equal"
    )
    exact = restore["bit_exact"] and restore["same_text_and_logprobs"] and restore["same_state"]
    return Verdict(found, restore["recomputed_tokens"] == 0 and exact)


def _forked(result: Any) -> Verdict:
    fork = result["fork"]
    apart = "never touch each other" if fork["apart"] else "touch each other"
    found = f"{result['append']['tokens']:,} tokens: median {fork['milliseconds_median']:.1f} ms; forks {apart}"
    return Verdict(found, fork["apart"] and fork["milliseconds_median"] < FORK_MS)


def _retried(result: Any) -> Verdict:
    retries = result["retries"]
    found = (
        f"{retries['kills']} kills of the API in {retries['attempts']} appends: {retries['equal']} states equal to one "
        f"appended in peace, {retries['different']} different"
    )
    return Verdict(found, 0 < retries["attempts"] == retries["equal"])


def _estimated(result: Any) -> Verdict:
    found = "; ".join(
        f"{one['tokens']:,} tokens{' beside another' * bool(one['beside'])}: {one['estimated_seconds']:.1f} s said, "
        f"{one['seconds']:.1f} s taken ({one['ratio'] - 1:+.0%})"
        for one in result
    )
    return Verdict(found, _all(abs(one["ratio"] - 1) <= ETA_OFF for one in result))


PROMISES: tuple[Promise | HeldByTests, ...] = (
    Promise(
        "G1",
        "`kill -9` of any rank: every open answer is bit-equal to that of an undisturbed run",
        "kills",
        _equal_answers,
        "vLLM ends all requests under way",
    ),
    Promise(
        "G2",
        "steps again within 15 s, connections stay open",
        "kills",
        _recovery,
        "torchrun alone: 0 of 4 came back",
    ),
    Promise(
        "G3",
        "a stopped rank: `/readyz` is a 503 that names it within 5 s, and no false alarms",
        "stops",
        _stopped,
        "timeouts of 300 s to 30 minutes",
    ),
    Promise(
        "G4",
        "`/livez` p99 below 100 ms while 1 GB is tokenised",
        "streaming",
        _livez,
        "still for 28.8 s (vLLM #24910)",
    ),
    Promise(
        "G5",
        "memory of the API grows by less than 64 MB while 1 GB goes through, also where the client does not read",
        "streaming",
        _memory,
        "649 MB for a JSON body of 200 MB",
    ),
    Promise(
        "G6",
        "beside a text of a million tokens: p99 between tokens at most 3 x idle, first token of a short request within "
        "2 s, reading keeps half of the machine",
        "fairness",
        _fair,
        "270 to 6.6 tokens/s; 82 s of waiting",
    ),
    Promise(
        "G7",
        "work for a client that left ends with what was sent ahead: 4 steps of reading or 512 drawn tokens, 1 s",
        "disconnects",
        _left,
        "open complaints",
    ),
    Promise(
        "G8",
        "save, new processes, restore: no token recomputed, bit-equal",
        "sessions",
        _restored,
        "llama.cpp reuses nothing of recurrent models",
    ),
    Promise(
        "G9",
        "fork of a session of a million tokens: median below 50 ms; none touches another",
        "sessions",
        _forked,
        "no",
    ),
    HeldByTests(
        "G10",
        "snapshots, uploads and messages that were tampered with: no crash, no memory over the cap, no 5xx",
        ("tests/wire/test_snapshot.py", "tests/wire/test_spoilt_messages.py", "tests/service/test_upload_parsers.py"),
        "a list of CVEs",
    ),
    HeldByTests(
        "G11",
        "no route answers 2xx without a key but `/livez`, `/readyz` and the files of the page",
        ("tests/service/test_keys.py",),
        "vLLM guards some prefixes",
    ),
    HeldByTests(
        "G12", "clients openai 1.x, 2.x and 3.x work", ("tests/system/test_openai_versions.py",), "JSONDecodeError"
    ),
    Promise("G13", "an append that is sent again with its key feeds once", "sessions", _retried, "no"),
    HeldByTests(
        "G14",
        "SIGTERM: ready is a 503 at once, sessions are stored, streams end with a cursor or go on",
        ("tests/service/test_process.py", "tests/control/test_drain.py"),
        "drain or abort",
    ),
    Promise("G15", "estimates within 15 % for more than 100,000 tokens", "eta", _estimated, "no"),
    HeldByTests(
        "G16",
        "requests made of the OpenAPI text, good and bad: no 5xx",
        ("tests/service/test_described_requests.py",),
        "good ones only",
    ),
)

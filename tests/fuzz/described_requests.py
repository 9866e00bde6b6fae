"""Requests made of the service's own OpenAPI text, as it says and otherwise: are the answers those it tells of?

`python -m tests.fuzz.described_requests --examples 200` serves a fake engine and sends, for every operation, the cases
at the edges of its description and then so many random ones of each kind (https://schemathesis.readthedocs.io):

* no 5xx, but for a deadline that the request itself has set too early;
* status, media type and body as they are described;
* what breaks the description is refused;
* what keeps to it is taken, but for what no description can say: `UNSAID` lists these refusals.
"""

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.core.failures import FailureGroup
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from dist_attn.settings import FileSettings, JobSettings, StoreSettings
from tests.support.fake_engine import FakeEngine
from tests.support.service_server import RunningService, model_folder, running_service

__all__ = ["Outcome", "examine", "served"]

SECONDS, MANY = 20.0, 10**6
UNSAID: dict[str, tuple[str, ...]] = {
    # what may stand there depends on another field
    "invalid_value": (
        "(top_logprobs|return_progress|stream_options|json_schema) needs",
        "response_format gives a form too",
        "an answer (of a form ends|that must call a tool has)",
        "(tool_choice asks for|no answer can be held to|no call can be held to)",
        "expected_position is that of a session",
        "[a-z_]+ is .* in the query and .* in the body",
        "[a-z_]+ and [a-z_]+ were given",
        "input and file_id are two documents",
        "inputs is a text too",
        "the sample has",
        "boundaries (must rise|has|and)",
        r"documents\[[0-9]+\] has",
        "two documents have the same id",
        "texts is another name",
        # on what has come before
        "[0-9]+ bytes of [0-9]+ have come",
        "(a part is named twice|there is no part)",
        "Range .* holds no byte",
        # on the model, or on a setting
        r"tokens\[[0-9]+\] is",
        r"(prompt|inputs?)(\[[0-9]+\])* is .*; token ids are",
        "dimensions=",
        "logit_bias names",
        "a stop string must have",
        "stop holds",
        "a session's life of",
        "[a-z_]+=.* is over this service's limit",
        "[a-z_]+=.* of [0-9]+ prompts makes",
        "(n|best_of|min_tokens|max_tokens|max_completion_tokens)=",
        # 1.0 is a whole number to JSON Schema, and names of a form's fields may be anything
        ".* Input should be a valid integer",
        "the multipart body cannot be read: (a field has no name|.* is no header of a field)",
        "Upload-Metadata cannot be read",
        "(mime_type|filename|name) cannot be .*: it holds control characters",
    ),
    "missing_parameter": ("(input|prompt|documents) is missing", "send "),
    "unknown_parameter": ("unknown parameter",),  # of the completion in a job
    "empty_input": (
        r"(inputs?(\[[0-9]+\])?|the body) is empty",
        "the file is empty",
        r"(documents|texts)\[[0-9]+\](\.text)? is empty",
        "query is blank",
    ),
    "unsupported_parameter": (
        "the model's chat template (does not look at|writes no calls)",
        "best_of",
    ),
    "unsupported_media_type": (
        "Content-Type is .*; (needed is application/offset|send JSON)",  # Upload-Length decides
        "(this is an? |the document cannot be read)",  # what its bytes are
    ),
    "body_too_large": ("a file may have",),
    "invalid_state": ("",),  # bytes that are no state
    "precondition_required": ("",),
    "invalid_utf8": ("",),  # halves of surrogate pairs
}
"""By code of error, how the words begin in which something is refused that keeps to the description."""


@dataclass
class Outcome:
    """How many requests were sent, what was answered to them, and what was not as it should be."""

    requests: int = 0
    answers: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    refusals: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    findings: dict[tuple[str, str], str] = field(default_factory=dict)


@schemathesis.serializer("application/offset+octet-stream")
def _as_bytes(_: schemathesis.SerializationContext, value: Any) -> Any:
    return value if isinstance(value, bytes) else str(value).encode(errors="replace")


class _Examiner:
    """One service and the schema that it gives of itself."""

    def __init__(self, url: str, outcome: Outcome, seconds: float) -> None:
        self.url, self.outcome, self.seconds = url, outcome, seconds
        self.schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
        self.http = requests.Session()
        self._turn = 0

    def check(self, case: schemathesis.Case) -> None:
        """Send one request and look at its answer; every second one names something that exists."""
        self._turn += 1
        if case.path_parameters and self._turn % 2:
            case.path_parameters = {name: self._existing(name) for name in case.path_parameters}
        label, mode = case.operation.label, case.meta.generation.mode.value
        options: dict[str, Any] = {"base_url": self.url, "session": self.http, "timeout": self.seconds}
        response = case.call(**options)
        self.outcome.requests += 1
        self.outcome.answers[label, mode, response.status_code] += 1
        excluded = [not_a_server_error] if self._deadline_passed(response) else []
        if mode == "positive" and self._unsaid(label, response):
            excluded.append(positive_data_acceptance)
        if response.status_code == 413:  # a refusal, which the check does not know
            excluded.append(negative_data_rejection)
        try:
            case.validate_response(response, excluded_checks=excluded, transport_kwargs=options)
        except FailureGroup as failures:
            for failure in failures.exceptions:
                self.outcome.findings.setdefault((label, type(failure).__name__), str(failures))

    def _existing(self, parameter: str) -> str:
        """Something new of the kind that a parameter names."""
        if parameter == "session_id":
            session: str = httpx.post(f"{self.url}/v1/sessions").raise_for_status().json()["id"]
            httpx.post(f"{self.url}/v1/sessions/{session}/append", json={"input": "some text"}).raise_for_status()
            return session
        made = {
            "file_id": lambda: httpx.post(
                f"{self.url}/v1/files", data={"purpose": "user_data"}, files={"file": b"some text"}
            ),
            "upload_id": lambda: httpx.post(f"{self.url}/v1/uploads", headers={"Upload-Length": "9"}),
            "job_id": lambda: httpx.post(
                f"{self.url}/v1/jobs", content=b"some text", headers={"content-type": "text/plain"}
            ),
        }
        if parameter == "model_id":
            return "tiny"
        identity: str = made[parameter]().raise_for_status().json()["id"]
        return identity

    def _deadline_passed(self, response: schemathesis.Response) -> bool:
        return response.status_code == 504 and _problem(response)["code"] == "deadline_exceeded"

    def _unsaid(self, label: str, response: schemathesis.Response) -> bool:
        if not 400 <= response.status_code < 500 or response.status_code == 404:
            return False  # nobody can describe which names there are
        error = _problem(response)
        words = re.sub(r"'.*?'|sess_[^ ]*|[-0-9.e+]*[0-9]", "N", error["message"])
        known = any(re.match(start, error["message"]) for start in UNSAID.get(error["code"], ()))
        self.outcome.refusals[label, error["code"], ("known: " if known else "") + words] += 1
        return known


def _problem(response: schemathesis.Response) -> dict[str, Any]:
    """The error object of an answer, empty words where it has none (HEAD)."""
    try:
        error: dict[str, Any] = json.loads(response.content)["error"]
    except (ValueError, KeyError, TypeError):
        return {"code": "", "message": ""}
    return error


@contextmanager
def served(folder: Path) -> Iterator[RunningService]:
    """A service over a fake engine, with a chat template, and room for all that is made in a long run."""
    much = {
        "jobs": JobSettings(per_caller=MANY),
        "files": FileSettings(caller_files=MANY, caller_bytes=1 << 60, all_bytes=1 << 60),
        "store": StoreSettings(address="memory:", tenant_sessions=MANY),
    }
    model = model_folder(folder)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    with running_service(folder, FakeEngine(keep=False), model=model, **much) as service:
        yield service


def examine(url: str, *, examples: int, share: int = 1, seed: int = 0, seconds: float = SECONDS) -> Outcome:
    """Send every `share`-th of the cases at the edges, and `examples` random ones of each kind, to every operation.

    A request that takes longer than `seconds` is an error.
    """
    outcome = Outcome()
    examiner = _Examiner(url, outcome, seconds)
    for found in examiner.schema.get_all_operations():
        operation = found.ok()
        for number, case in enumerate(_edges(examiner, operation)):
            if number % share == seed % share:
                examiner.check(case)
        for mode in GenerationMode if examples else ():
            run = given(operation.as_strategy(generation_mode=mode))(examiner.check)
            bounded = settings(
                max_examples=examples,
                database=None,
                deadline=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            try:
                seeded(seed)(bounded(run))()
            except Unsatisfiable:
                continue  # nothing breaks the description of an operation without options
    return outcome


def _edges(examiner: _Examiner, operation: Any) -> Iterator[schemathesis.Case]:
    config = examiner.schema.config.generation
    yield from examiner.schema.iter_coverage_cases(
        operation, generation_modes=list(GenerationMode), generation_config=config
    )


def main(arguments: list[str]) -> int:
    """The exit code: 1 where anything was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=200, help="random requests per operation and kind")
    parser.add_argument("--share", type=int, default=1, help="every so manyth case at the edges")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", action="store_true", help="print how often each status was answered")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as service:
        outcome = examine(service.url, examples=options.examples, share=options.share, seed=options.seed)
    if options.answers:
        for key, count in sorted(outcome.answers.items()):
            print(count, *key)
        for words, count in sorted(outcome.refusals.items()):
            print(count, *words)
    for (label, name), text in outcome.findings.items():
        print(f"== {label}: {name}\n{text}")
    print(f"{outcome.requests} requests, {len(outcome.findings)} findings")
    return int(bool(outcome.findings))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

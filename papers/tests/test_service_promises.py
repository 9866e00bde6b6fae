"""The page of promises: each is judged by what its measurement wrote, and of what was not measured nothing is said."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.setting import ROOT, look_around
from dist_attn_papers.service import promises as service_promises
from dist_attn_papers.service.held_by_tests import run_file
from dist_attn_papers.service.promised import PROMISES, HeldByTests, Promise
from dist_attn_papers.service.promises import (
    MEASUREMENTS,
    Measurement,
    as_markdown,
    file_measurement,
    filed_measurements,
    main,
)

KILLS = {
    "kills": 50,
    "answers_equal": 90,
    "answers_different": [],
    "errors": [],
    "seconds_to_ready_median": 9.0,
    "seconds_to_ready_max": 14.9,
    "replayed_tokens_median": 100,
    "replayed_tokens_max": 2000,
}
STOPS = {
    "stops": 10,
    "named": 10,
    "noticed_s_median": 4.0,
    "noticed_s_max": 4.9,
    "ready_s_median": 14.0,
    "answers_equal": 20,
    "answers_different": [],
    "errors": [],
    "false_alarms": 0,
}
SESSIONS = {
    "append": {"tokens": 1_000_000},
    "fork": {"milliseconds_median": 8.0, "apart": True},
    "restore": {"recomputed_tokens": 0, "bit_exact": True, "same_text_and_logprobs": True, "same_state": True},
    "retries": {"kills": 20, "attempts": 20, "equal": 20, "different": 0},
}
STREAMING = {
    "megabytes": 1024,
    "rows": [{"client": "reads", "seconds": 100.0, "grew_bytes": 9e6, "livez_p99_ms": 9.0, "livez_max_ms": 70.0}],
}
FAIRNESS = {
    "rows": [
        {
            "ranks": 1,
            "idle_p99_ms": 10.0,
            "beside_p99_ms": 29.0,
            "first_token_beside_median_s": 0.4,
            "first_token_beside_max_s": 1.9,
            "reading_alone": 1000.0,
            "reading_beside": 510.0,
        }
    ]
}
DISCONNECTS = [{"phase": "drawing", "most_seconds": 0.4, "most_steps": 2, "each": [{}]}]
ETA = [{"tokens": 105_000, "beside": 0, "estimated_seconds": 10.0, "seconds": 10.5, "ratio": 10 / 10.5}]
GOOD: dict[str, Any] = {
    "kills": KILLS,
    "stops": STOPS,
    "sessions": SESSIONS,
    "streaming": STREAMING,
    "fairness": FAIRNESS,
    "disconnects": DISCONNECTS,
    "eta": ETA,
}
MEASURED = [promise for promise in PROMISES if isinstance(promise, Promise)]


def _fairness(**changes: float) -> dict[str, Any]:
    return {"rows": [FAIRNESS["rows"][0] | changes]}


def _streaming(**changes: float) -> dict[str, Any]:
    return STREAMING | {"rows": [STREAMING["rows"][0] | changes]}  # type: ignore[index]


BROKEN: list[tuple[str, Any]] = [
    ("G1", KILLS | {"answers_different": ["text 1"]}),
    ("G1", KILLS | {"errors": ["text 1: ended"]}),
    ("G2", KILLS | {"seconds_to_ready_max": 15.1}),
    ("G3", STOPS | {"named": 9}),
    ("G3", STOPS | {"noticed_s_max": 5.1}),
    ("G3", STOPS | {"false_alarms": 1}),
    ("G4", _streaming(livez_p99_ms=101.0)),
    ("G5", _streaming(grew_bytes=65e6)),
    ("G6", _fairness(beside_p99_ms=31.0)),
    ("G6", _fairness(first_token_beside_max_s=2.1)),
    ("G6", _fairness(reading_beside=490.0)),
    ("G7", [DISCONNECTS[0] | {"most_steps": 513}]),
    ("G7", [DISCONNECTS[0] | {"phase": "reading a text", "most_steps": 5}]),
    ("G8", SESSIONS | {"restore": SESSIONS["restore"] | {"recomputed_tokens": 1}}),  # type: ignore[operator]
    ("G8", SESSIONS | {"restore": SESSIONS["restore"] | {"same_state": False}}),  # type: ignore[operator]
    ("G9", SESSIONS | {"fork": {"milliseconds_median": 51.0, "apart": True}}),
    ("G9", SESSIONS | {"fork": {"milliseconds_median": 1.0, "apart": False}}),
    ("G13", SESSIONS | {"retries": {"kills": 20, "attempts": 20, "equal": 19, "different": 1}}),
    ("G15", [ETA[0] | {"ratio": 0.84}]),
    ("G7", [DISCONNECTS[0] | {"most_seconds": 1.5}]),
    ("G2", KILLS | {"errors": ["text 1: ended"]}),
    ("G1", KILLS | {"kills": 0, "answers_equal": 0}),
    ("G2", KILLS | {"kills": 0, "seconds_to_ready_max": None}),
    ("G3", STOPS | {"stops": 0, "named": 0}),
    ("G4", STREAMING | {"rows": []}),
    ("G5", STREAMING | {"rows": []}),
    ("G6", {"rows": []}),
    ("G7", []),
    ("G13", SESSIONS | {"retries": {"kills": 0, "attempts": 0, "equal": 0, "different": 0}}),
    ("G15", []),
    ("G11", {}),
    ("G11", {"tests/service/test_keys.py": {"passed": 0, "failed": 0, "skipped": 9}}),
    ("G11", {"tests/service/test_keys.py": {"passed": 9, "failed": 1, "skipped": 0}}),
]


@pytest.mark.parametrize("promise", MEASURED, ids=lambda promise: promise.name)
def test_a_promise_is_kept_by_what_is_within_its_bound(promise: Promise) -> None:
    """A result at the bound counts as kept."""
    assert promise.judge(GOOD[promise.measurement]).kept


@pytest.mark.parametrize(("name", "result"), BROKEN)
def test_a_promise_is_broken_by_what_is_beyond_its_bound(name: str, result: Any) -> None:
    """A result beyond any of a promise's bounds counts as broken."""
    promise = next(promise for promise in PROMISES if promise.name == name)
    assert not promise.judge(result).kept


def test_every_promise_has_a_measurement_or_tests_that_are_there() -> None:
    """Promises are G1 to G16; each names a measurement, or files of tests of this repository."""
    assert [promise.name for promise in PROMISES] == [f"G{number}" for number in range(1, 17)]
    for promise in PROMISES:
        assert promise.measurement in MEASUREMENTS
        if isinstance(promise, HeldByTests):
            assert all((ROOT / test).is_file() for test in promise.tests)


def test_the_page_has_what_is_filed_and_no_more(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The result of a measurement is printed with its command; the others are not measured yet."""
    told = {
        "case": "service-kills",
        "setting": asdict(look_around()),
        "command": "dist-attn bench service-kills book.txt",
        "seconds": 90.0,
        "result": KILLS | {"seconds_to_ready_median": 9.0},
    }
    (tmp_path / "service-kills.json").write_text(json.dumps(told))
    assert main(["--report", "--results", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert page == as_markdown(filed_measurements(tmp_path)) + "\n"
    assert "median 9.0 s, at most 14.9 s; 0 streams broke | yes |" in page
    assert "| kills | `dist-attn bench service-kills book.txt` | 1.5 |" in page
    assert page.count("not measured yet") == len(PROMISES) - 2


def test_a_book_that_is_not_there_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a text nothing is started, and the words say what is needed."""
    assert main([str(tmp_path / "none.txt"), "--results", str(tmp_path)]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert main(["--results", str(tmp_path)]) == 2
    assert "no book was given" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_files_of_tests_are_counted() -> None:
    """What passed, failed and was skipped of a file is what pytest says."""
    assert run_file("tests/control/test_pace.py") == {"passed": 2, "failed": 0, "skipped": 0}


@pytest.mark.slow
def test_what_is_measured_and_filed_takes_the_place_of_what_was_filed_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file names command, exit code and setting; what writes nothing is told and takes nothing away."""
    quick = Measurement("dist_attn_papers.service.held_by_tests", ("tests/control/test_pace.py",))
    monkeypatch.setitem(service_promises.MEASUREMENTS, "tests", quick)  # type: ignore[arg-type]
    (tmp_path / "service-tests.json").write_text("{}")
    path = file_measurement("tests", tmp_path / "book.txt", tmp_path)
    assert [one.name for one in tmp_path.iterdir()] == [path.name]
    told = json.loads(path.read_text())
    assert told["command"] == "python -m dist_attn_papers.service.held_by_tests tests/control/test_pace.py"
    assert (told["exit_code"], told["case"]) == (0, "service-tests")
    monkeypatch.setitem(service_promises.MEASUREMENTS, "tests", Measurement("benchmarks.no_such", ()))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="exit code 1 and no result"):
        file_measurement("tests", tmp_path / "book.txt", tmp_path)
    assert path.exists()

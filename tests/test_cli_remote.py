"""Commands with `--url`: the same output as here, by a running service; and `dist-attn top`."""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dist_attn.commands import cli, remote
from dist_attn.settings import read_settings
from dist_attn.wire.messages import SamplingSpec
from dist_attn_client import Client, EngineStatus, Status
from tests.support.fake_engine import HIDDEN, FakeEngine
from tests.support.opening import draw_of, is_completion
from tests.support.programs import free_port
from tests.support.service_server import RunningService, running_service
from tests.support.terminal import terminal_as
from tests.text.test_documents import GOOD

BOOK = b"It was the best of times, it was the worst of times. " * 100
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningService]:
    """A service with a key."""
    keys = (hashlib.sha256(b"secret").hexdigest(),)
    with running_service(tmp_path_factory.mktemp("service"), FakeEngine(), api_keys=keys) as running:
        yield running


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """The command line in this process, in a folder with a book, with the key in the environment."""
    (tmp_path / "book.txt").write_bytes(BOOK)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DIST_ATTN_API_KEY", "secret")

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dist-attn", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def test_encode_by_a_service_writes_its_rows(run: Run, service: RunningService) -> None:
    """The file has the rows that the client gets, and the last line is a report."""
    code, out, err = run("encode", "book.txt", "--out", "x.npy", "--window", "100", "--url", service.url)
    assert (code, err) == (0, "")
    report = json.loads(out.splitlines()[-1])
    with Client(service.url, key="secret") as client:
        rows = [row.embedding for row in client.encode(BOOK, window=100)]
    np.testing.assert_array_equal(np.load("x.npy", allow_pickle=False), np.stack(rows))
    assert report["tokens"] == len(BOOK) and report["rows"] == len(rows) == len(BOOK) // 100
    assert {"seconds", "tokens_per_second", "model", "url"} <= set(report)
    assert sorted(os.listdir()) == ["book.txt", "x.npy"]


def test_rows_of_a_service_say_what_they_stand_for(run: Run, service: RunningService) -> None:
    """A file with ranges has those of the service's rows, and with --with-text the text of these bytes."""
    words = ("encode", "book.txt", "--out", "x.jsonl", "--window", "100", "--with-text", "--url", service.url)
    assert run(*words)[0] == 0
    lines = [json.loads(line) for line in Path("x.jsonl").read_text().splitlines()]
    with Client(service.url, key="secret") as client:
        rows = list(client.encode(BOOK, window=100))
    for line, row in zip(lines, rows, strict=True):
        ranges = {name: getattr(row, name) for name in ("index", "start", "stop", "byte_start", "byte_stop")}
        assert line | ranges == line and line["document"] == "book.txt"
        assert line["text"].encode() == BOOK[row.byte_start : row.byte_stop]
        assert np.array_equal(np.array(line["embedding"], np.float32), row.embedding)


def test_rows_of_a_document_tell_its_pages(run: Run, service: RunningService) -> None:
    """As where it is encoded here; its text is not at hand."""
    pytest.importorskip("kreuzberg", reason="pip install -e '.[documents]'")
    Path("book.pdf").write_bytes(GOOD["pdf"][0]())
    words = ("encode", "book.pdf", "--out", "x.jsonl", "--window", "15", "--url", service.url)
    assert run(*words)[0] == 0
    lines = [json.loads(line) for line in Path("x.jsonl").read_text().splitlines()]
    assert [line["section"] for line in lines] == ["page 1", "page 2"]
    code, _, err = run(*words, "--with-text")
    assert code == 2 and "takes out the text of book.pdf" in err


def test_generate_and_plan_by_a_service(run: Run, service: RunningService) -> None:
    """The text streams to stdout or comes as JSON, and the plan is the service's own estimate."""
    code, out, _ = run("generate", "--prompt", "abcd", "--max-tokens", "6", "--url", service.url)
    assert (code, out) == (0, "abcdab\n")
    told = json.loads(run("generate", "--prompt", "abcd", "--max-tokens", "6", "--json", "--url", service.url)[1])
    assert (told["text"], told["tokens"], told["finish_reason"], told["model"]) == ("abcdab", 6, "length", "tiny")
    drawing = ("--max-tokens", "6", "--set", "min_tokens=2", "--set", 'logit_bias={"5": 2}', "--temperature", "1")
    assert run("generate", "--prompt", "abcd", *drawing, "--url", service.url)[0] == 0
    told_by_set = SamplingSpec(6, min_tokens=2, logit_bias={5: 2.0})
    opened = [message for message in service.engine.received if is_completion(message)]
    spec = draw_of(opened[-1])
    assert spec is not None and msgspec.structs.replace(spec, seed=None) == told_by_set
    plan = json.loads(run("plan", "--tokens", "1M", "--json", "--url", service.url)[1])
    assert plan["tokens"]["value"] == 1_000_000 and plan["output_bytes"]["npy"] >= 1954 * HIDDEN * 4
    code, out, _ = run("plan", "--tokens", "1M", "--url", service.url)
    assert code == 0 and "1,000,000 tokens" in out and "\x1b" not in out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["encode", "no.txt", "--out", "x.npy"], 2, "no.txt cannot be read"),
        (["encode", "book.txt", "--out", "book.txt"], 2, "is the text itself"),
        (["encode", "book.txt", "--out", "x.npy", "--model", "another"], 2, "another"),
        (["encode", "book.txt", "--out", "x.npy", "--deterministic"], 2, "--deterministic and --url were given"),
        (["encode", "book.txt", "--out", "x.npy", "--ranks", "2"], 2, "--ranks and --url were given"),
        (["encode", "no.txt", "--out", "book.txt"], 2, "no.txt cannot be read"),
        (["plan", "--tokens", "1M", "--backend", "mpi"], 2, "--backend and --url were given"),
        (["plan", "--tokens", "1M", "--ranks", "4"], 2, "--ranks and --url were given"),
    ],
)
def test_what_cannot_be_done_is_one_line(
    run: Run, service: RunningService, arguments: list[str], code: int, words: str
) -> None:
    """Bad input is one line and code 2, and no half-written file stays."""
    ended, out, err = run(*arguments, "--url", service.url)
    assert (ended, out, err.count("\n")) == (code, "", 1)
    assert words in err
    assert os.listdir() == ["book.txt"]


def test_a_service_that_is_away_is_one_line(run: Run, service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody at the URL is code 1, no URL is code 2, and a key that is missing is asked for."""
    for command in (["top", "--once"], ["generate", "--prompt", "a"], ["encode", "book.txt", "--out", "x.npy"]):
        code, _, err = run(*command, "--url", f"http://127.0.0.1:{free_port()}")
        assert (code, err.count("\n")) == (1, 1) and "is it running" in err
    code, _, err = run("top", "--once", "--url", "nowhere")
    assert (code, err.count("\n")) == (2, 1) and "give one like" in err
    monkeypatch.delenv("DIST_ATTN_API_KEY")
    code, _, err = run("top", "--once", "--url", service.url)
    assert (code, err.count("\n")) == (2, 1) and "DIST_ATTN_API_KEY" in err


def test_a_key_is_no_setting_of_a_service() -> None:
    """DIST_ATTN_API_KEY in the environment does not keep `serve` from starting."""
    assert read_settings(environment={"DIST_ATTN_API_KEY": "x"}).settings == read_settings(environment={}).settings


def test_commands_on_a_service_never_load_torch(service: RunningService, tmp_path: Path) -> None:
    """A thin machine can encode by a service: torch is not imported for it."""
    (tmp_path / "a.txt").write_bytes(BOOK)
    code = "import sys; from dist_attn.commands.cli import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    arguments = ["encode", str(tmp_path / "a.txt"), "--out", str(tmp_path / "a.npy"), "--url", service.url]
    environment = {**os.environ, "DIST_ATTN_API_KEY": "secret"}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.splitlines()[-1] == "False", done.stderr
    assert (tmp_path / "a.npy").exists()


def test_top_is_plain_where_no_terminal_is(run: Run, service: RunningService) -> None:
    """Names and values with tabs, a line per rank, or one JSON object: what scripts read."""
    code, out, _ = run("top", "--once", "--url", service.url)
    assert code == 0 and "\x1b" not in out
    lines = [line.split("\t") for line in out.strip().splitlines()]
    facts = {line[0]: line[1] for line in lines if len(line) == 2}
    assert (facts["ready"], facts["model"], facts["backend"], facts["lost_groups"]) == ("yes", "tiny", "fake", "2")
    (rank,) = (dict(zip(line[::2], line[1::2], strict=True)) for line in lines if line[0] == "rank")
    assert (rank["rank"], rank["phase"], rank["step"]) == ("0", "idle", "0") and float(
        rank["heartbeat_age_seconds"]
    ) < 9
    told = json.loads(run("top", "--once", "--json", "--url", service.url)[1])
    assert told["ranks"][0]["phase"] == "idle" and told["ready"] is True


def test_top_tells_of_two_engines() -> None:
    """The lines of the encoder's engine stand behind those of the writer's, each with a word before it."""
    counts = dict.fromkeys(
        ("open_requests", "waiting_requests", "spool_bytes", "stored_sessions", "stored_states", "stored_bytes"), 0
    )
    encoder = EngineStatus(ready=False, reason="rank 0 is lost", model="vectors", epoch=3)
    writer: dict[str, Any] = {"ready": False, "reason": "vectors: rank 0 is lost", "model": "tiny", "epoch": 1}
    lines = remote.plain_lines(remote.Look(Status(version="1", uptime_seconds=1, encoder=encoder, **writer, **counts)))
    facts = dict(line.split("\t") for line in lines)
    assert (facts["model"], facts["epoch"]) == ("tiny", "1")
    assert (facts["encoder.model"], facts["encoder.epoch"]) == ("vectors", "3")
    assert facts["encoder.reason"] == "rank 0 is lost" and "encoder.version" not in facts


def test_top_goes_on_while_the_service_is_away(
    service: RunningService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says why there is no answer, looks again, and Ctrl-C is its normal end."""
    monkeypatch.setenv("DIST_ATTN_API_KEY", "secret")
    looks = []

    def wait(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 2:
            raise KeyboardInterrupt

    remote.top(f"http://127.0.0.1:{free_port()}", once=False, as_json=False, sleep=wait)
    blocks = capsys.readouterr().out.strip().split("\n\n")
    assert len(blocks) == len(looks) == 2
    assert all(block.startswith("ready\tno\nreason\t") for block in blocks)


@pytest.mark.parametrize("colour", [True, False])
def test_top_is_a_live_table_on_a_terminal(
    service: RunningService, monkeypatch: pytest.MonkeyPatch, colour: bool
) -> None:
    """On a terminal ranks stand in a table that is drawn anew; with NO_COLOR without colours."""
    monkeypatch.setenv("DIST_ATTN_API_KEY", "secret")
    monkeypatch.delenv("NO_COLOR", raising=False)
    if not colour:
        monkeypatch.setenv("NO_COLOR", "1")

    def end(_: float) -> None:
        raise KeyboardInterrupt

    with terminal_as("stdout", monkeypatch) as terminal:
        remote.top(service.url, once=False, as_json=False, sleep=end)
    drawn = terminal.text()
    for words in ("dist-attn at http", "ready", "heartbeat", "idle", "tokens/s", "stored sessions", "╭"):
        assert words in drawn
    assert ("\x1b[32m" in drawn or "\x1b[1;32m" in drawn) is colour


def test_help_is_plain_where_no_terminal_is(run: Run) -> None:
    """Help that goes into a pipe has no boxes and no colours, so that it can be searched."""
    for arguments in ((), ("encode",), ("config",), ("config", "show")):
        code, out, _ = run(*arguments, "--help")
        assert code == 0 and not set("╭│─\x1b") & set(out)
        assert "Example: dist-attn" in out or arguments in ((), ("config",))

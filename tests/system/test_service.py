"""`dist-attn serve` with its real engine, told by a file: keys, sockets, clients that leave, parts that are killed.

The last test kills it all.
"""

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from dist_attn.control.processes import PREFIX
from dist_attn_client import Client
from tests.support.files import begin, offset_of, patch
from tests.support.programs import free_port, running_program
from tests.support.served import READY_SECONDS, Served, served
from tests.support.sessions import SessionClient
from tests.support.slices import needs_slices, slice_of
from tests.support.source_path import SOURCE_PATH
from tests.support.waiting import eventually

KEY = "the-key"
HEADERS = {"Authorization": f"Bearer {KEY}"}
SECONDS = 120.0
LONG = np.random.default_rng(3).integers(97, 123, 24_000).astype(np.uint8).tobytes()


@dataclass(frozen=True)
class Start:
    """A service just after it got ready: what it had logged, and the rights of its data."""

    whole: Served
    logged: list[dict[str, Any]]
    modes: dict[str, int]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """A service with one rank, told by a file to ask for a key, where the umask is that of most systems."""
    folder = tmp_path_factory.mktemp("serve")
    (folder / "keys").touch(0o600)
    (folder / "keys").write_text(f"{KEY}\n")
    digest = hashlib.sha256(b"admin").hexdigest()
    text = f'[http]\napi_keys_file = "{folder}/keys"\nadmin_keys = ["{digest}"]\n[limits]\nmax_tokens = 100000\n'
    (folder / "serve.toml").write_text(text)
    (folder / "t" / f"{PREFIX}left").mkdir(parents=True)
    (folder / "t" / f"{PREFIX}left" / "state").touch()
    before = os.umask(0o022)
    try:
        with pytest.MonkeyPatch.context() as patched:
            patched.setenv("TMPDIR", str(folder / "t"))
            with served(folder, f"--config={folder}/serve.toml") as running:
                lines = [json.loads(line) for line in running.program.output.splitlines() if line.startswith("{")]
                modes = {path.name: path.stat().st_mode & 0o777 for path in [running.data, *running.data.iterdir()]}
                yield Start(running, lines, modes)
    finally:
        os.umask(before)


@pytest.fixture(scope="module")
def whole(start: Start) -> Served:
    """The service by itself."""
    return start.whole


def status(whole: Served) -> dict[str, Any]:
    """What the service tells an admin."""
    answer = httpx.get(f"{whole.url}/v1/status", headers={"Authorization": "Bearer admin"}, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def complete(whole: Served, **body: Any) -> httpx.Response:
    """A short completion."""
    given = {"prompt": "It was", "max_tokens": 5, "temperature": 0, **body}
    return httpx.post(f"{whole.url}/v1/completions", json=given, headers=HEADERS, timeout=SECONDS)


def outcomes(whole: Served) -> list[str]:
    """How the controller's requests ended."""
    lines = [json.loads(line) for line in whole.program.output.splitlines() if line.startswith("{")]
    return [line["outcome"] for line in lines if line["event"] == "request ended"]


def test_the_file_reaches_the_api(whole: Served) -> None:
    """Its keys are asked for, an admin's own routes for an admin's, and its limits hold."""
    assert httpx.get(f"{whole.url}/v1/models").status_code == 401
    assert httpx.get(f"{whole.url}/metrics", headers=HEADERS).status_code == 403
    assert complete(whole).status_code == 200
    assert complete(whole, max_tokens=100_001).status_code == 400
    assert KEY not in whole.program.output
    assert not any(KEY in word for part in whole.parts().values() for word in part.cmdline())


def test_every_listening_socket_was_printed(whole: Served) -> None:
    """With one rank only the API's socket listens on the network; it and the controller's stand in the output."""
    assert {place for _, place in whole.listening()} == {whole.url.removeprefix("http://")}
    assert f"listening on {whole.url}" in whole.program.output
    assert re.search(rf"ready after \d+\.\d s: {whole.url}  model tiny", whole.program.output)
    local = {
        connection.laddr
        for connection in whole.parts()["controller"].net_connections("unix")
        if connection.laddr and connection.laddr.startswith("/")
    }
    assert local and all(f"controller listens on ipc://{path}" in whole.program.output for path in local)


@pytest.mark.mpi
def test_nothing_listens_beyond_loopback(tmp_path: Path) -> None:
    """Two ranks exchange tensors by MPI over loopback, and nothing can be reached from other hosts."""
    with served(tmp_path, "--backend=mpi", ranks=2) as whole:
        listening = whole.listening()
        assert {"rank 1", "rank 2"} <= {role for role, _ in listening}  # or the interface was not looked at
        assert [entry for entry in listening if not entry[1].startswith("127.0.0.1:")] == []
        assert complete(whole).status_code == 200


@needs_slices
def test_ranks_have_short_slices(whole: Served) -> None:
    """Beside other load no thread of a step waits for another for milliseconds."""
    assert slice_of(whole.parts()["rank 1"].pid) == 100_000


def test_a_first_start_has_nothing_to_warn_of(start: Start) -> None:
    """Every folder of the data is its owner's alone, and no warning is logged."""
    assert [line for line in start.logged if line["level"] not in ("debug", "info")] == []
    assert start.modes == dict.fromkeys(("data", "states", "spool", "jobs", "files"), 0o700) | {"serve.lock": 0o600}


def test_a_prompt_that_comes_again_is_not_read_again(whole: Served) -> None:
    """Its state is kept beside the first answer, and the second one has the same text and log-probabilities."""
    prompt = "It was the best of times, it was the worst of times. " * 30
    first = complete(whole, prompt=prompt, logprobs=2, max_tokens=1).json()
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    last = (len(prompt) - 1) // 512 * 512

    def again() -> bool:
        answer = complete(whole, prompt=prompt, logprobs=2, max_tokens=1).json()
        assert answer["choices"] == first["choices"]
        return bool(answer["usage"]["prompt_tokens_details"]["cached_tokens"] == last)

    eventually(again, "the state to be kept", SECONDS)


def test_log_probabilities_of_a_real_model(whole: Served) -> None:
    """A greedy completion draws the likeliest token each time, and says so."""
    choice = complete(whole, logprobs=3).json()["choices"][0]["logprobs"]
    for value, top in zip(choice["token_logprobs"], choice["top_logprobs"], strict=True):
        assert value == max(top.values()) < 0 and len(top) in (2, 3)
    assert complete(whole, logprobs=3, n=2).json()["choices"][1]["logprobs"] == choice


def test_embeddings_are_the_document_rows(whole: Served) -> None:
    """An embedding is what /v1/encodings gives for the same text as one document."""
    text = "It was the best of times. " * 50
    embedding = httpx.post(f"{whole.url}/v1/embeddings", json={"input": text}, headers=HEADERS, timeout=SECONDS)
    document = httpx.post(
        f"{whole.url}/v1/encodings?granularity=document", content=text.encode(), headers=HEADERS, timeout=SECONDS
    )
    row = json.loads(document.text.splitlines()[0])
    assert embedding.json()["data"][0]["embedding"] == pytest.approx(row["embedding"], abs=1e-5)


def test_a_client_that_leaves_frees_the_engine(whole: Served) -> None:
    """In the middle of its text or of its document: the engine forgets the session."""
    before = outcomes(whole).count("cancelled")
    # Greedy: the model, which is random but always the same, then never draws its end token.
    body = {"prompt": "It was", "max_tokens": 100_000, "temperature": 0, "stream": True}
    with httpx.stream("POST", f"{whole.url}/v1/completions", json=body, headers=HEADERS, timeout=SECONDS) as answer:
        chunks = answer.iter_raw()  # kept: the connection ends with it
        next(chunks)
        eventually(lambda: status(whole)["sessions"] == 1, "the session", SECONDS)

    class Gone(Exception):
        pass

    def endless() -> Iterator[bytes]:
        while status(whole)["sessions"] == 0:
            yield b"It was the best of times. " * 1000
        raise Gone

    eventually(lambda: status(whole)["sessions"] == 0, "the completion to end", SECONDS)
    with pytest.raises(Gone):
        httpx.post(f"{whole.url}/v1/encodings", content=endless(), headers=HEADERS, timeout=SECONDS)
    eventually(lambda: status(whole)["sessions"] == status(whole)["open_requests"] == 0, "the document to end", SECONDS)
    eventually(lambda: outcomes(whole).count("cancelled") == before + 2, "both to be cancelled", SECONDS)


def test_a_request_waits_for_ranks_that_start_again(whole: Served) -> None:
    """While a killed rank is replaced, a new request is not refused; it is answered when the ranks are back."""
    epoch = status(whole)["epoch"]
    wanted = complete(whole).json()["choices"]
    whole.parts()["rank 1"].kill()
    eventually(lambda: not status(whole)["ready"], "the death to be noticed", SECONDS)
    answers: list[httpx.Response] = []
    asked = threading.Thread(target=lambda: answers.append(complete(whole)))
    asked.start()
    eventually(lambda: status(whole)["waiting_requests"] == 1, "the request to wait", SECONDS)
    asked.join(SECONDS)
    assert answers[0].status_code == 200 and answers[0].json()["choices"] == wanted
    assert status(whole)["epoch"] == epoch + 1


def test_every_way_to_the_rows_gives_the_same_bits(whole: Served) -> None:
    """Lines, npy, rows from the middle on and a job's: of a real model the same float32, bit for bit."""
    data, url = (
        b"It was a dark and stormy night; the rain fell in torrents. " * 60,
        f"{whole.url}/v1/encodings?window=50",
    )
    lines = httpx.post(url, content=data, headers=HEADERS, timeout=SECONDS).text.splitlines()
    rows = [json.loads(line) for line in lines[:-1]]
    vectors = np.array([row["embedding"] for row in rows], np.float32)
    assert (
        httpx.post(f"{url}&from_row=7", content=data, headers=HEADERS, timeout=SECONDS).text.splitlines() == lines[7:]
    )
    npy = httpx.post(f"{url}&format=npy&from_row=7", content=data, headers=HEADERS, timeout=SECONDS)
    np.testing.assert_array_equal(np.load(io.BytesIO(npy.content)), vectors[7:], strict=True)
    made = httpx.post(url, content=data, headers={**HEADERS, "Prefer": "respond-async"}, timeout=SECONDS)
    place = f"{whole.url}{made.headers['location']}"
    eventually(lambda: httpx.get(place, headers=HEADERS).json()["status"] == "succeeded", "the job to end", SECONDS)
    assert httpx.get(f"{place}/result", headers=HEADERS, timeout=SECONDS).text.splitlines() == lines


def test_rows_of_sentences_are_means_of_their_tokens(whole: Served) -> None:
    """Of a real model, sent in a stream: each sentence's row is the mean over its range of the rows of tokens."""
    data = b"It was a dark night. The rain fell in torrents, as it does! Nobody came. " * 40

    def rows(query: str) -> list[dict[str, Any]]:
        url = f"{whole.url}/v1/encodings?granularity={query}"
        pieces = (data[at : at + 700] for at in range(0, len(data), 700))
        lines = httpx.post(url, content=pieces, headers=HEADERS, timeout=SECONDS).text.splitlines()
        return [json.loads(line) for line in lines[:-1]]

    tokens, sentences = rows("token"), rows("sentence")
    vectors = np.array([row["embedding"] for row in tokens])
    assert len(sentences) == 120 and sentences[-1]["stop"] == len(tokens)
    for row in sentences:
        assert data[row["byte_start"] : row["byte_stop"]].strip()[-1:] in b".!"
        np.testing.assert_allclose(row["embedding"], vectors[row["start"] : row["stop"]].mean(0), rtol=1e-4, atol=1e-5)


def test_the_client_and_the_command_line_give_the_same_bits(whole: Served, tmp_path: Path) -> None:
    """Rows by the client and by `encode --url`, and a session that is fed, drawn from and forked, on a real engine."""
    data = b"It was a dark and stormy night; the rain fell in torrents. " * 60
    (tmp_path / "night.txt").write_bytes(data)
    answer = httpx.post(f"{whole.url}/v1/encodings?window=50", content=data, headers=HEADERS, timeout=SECONDS)
    wanted = [json.loads(line)["embedding"] for line in answer.text.splitlines()[:-1]]
    with Client(whole.url, key=KEY) as client:
        rows = [row.embedding for row in client.encode(tmp_path / "night.txt", window=50)]
        np.testing.assert_array_equal(np.stack(rows), np.array(wanted, np.float32), strict=True)
        session = client.sessions.create()
        fed = client.sessions.append(session.id, data).rest()
        drawn = client.sessions.stream(session.id, max_tokens=5, temperature=0)
        text = "".join(piece.text for piece in drawn)
        assert drawn.end.session is not None and drawn.end.session.position == fed.position + 5
        assert client.sessions.fork(session.id, position=fed.position).position == fed.position
        assert client.complete(data.decode(), max_tokens=5, temperature=0).text == text
    command = [sys.executable, "-m", "dist_attn", "encode", "night.txt", "--out", "x.npy", "--window", "50"]
    environment = {**os.environ, "DIST_ATTN_API_KEY": KEY, "PYTHONPATH": SOURCE_PATH}
    done = subprocess.run(
        [*command, "--url", whole.url], capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=SECONDS
    )
    assert done.returncode == 0, done.stderr
    np.testing.assert_array_equal(np.load(tmp_path / "x.npy", allow_pickle=False), np.array(wanted, np.float32))


def test_an_api_that_was_killed_is_started_again(whole: Served) -> None:
    """At the same address, where whoever comes meanwhile waits; what was acknowledged is there, and a job ends."""
    client = SessionClient(whole.url, KEY, SECONDS)
    session = client.make()
    said = client.append(session, "Kept on disk. ", key="append")
    upload = begin(whole.url, 20, **HEADERS)
    assert patch(upload, 0, b"of two parts", **HEADERS).status_code == 204
    job = client.post("/v1/jobs?window=128", content=LONG).json()["id"]
    for kill in range(2):
        before = whole.parts()["api"]
        before.kill()
        before.wait(SECONDS)
        assert httpx.get(f"{whole.url}/livez", timeout=SECONDS).status_code == 200
        assert whole.parts()["api"].pid != before.pid, kill
    eventually(lambda: bool(whole.status()), "the engine to be ready", SECONDS)
    assert client.get(f"/v1/sessions/{session}").json()["position"] == said.position
    assert client.append(session, "Kept on disk. ", key="append").position == said.position
    assert offset_of(upload, **HEADERS) == 12
    eventually(lambda: client.get(f"/v1/jobs/{job}").json()["status"] == "succeeded", "the job to end", SECONDS)
    assert whole.program.output.count("the API ended with exit code 137 and is started again") == 2


def test_a_second_serve_is_refused_until_the_first_has_ended(whole: Served) -> None:
    """It is refused with the first one's process and address; after kill -9 of that, which leaves no folder behind,
    it takes the data over, and a session goes on bit by bit in the fresh engine.
    """
    client, folder = SessionClient(whole.url, KEY, SECONDS), whole.data.parent
    session = client.make()
    client.append(session, LONG[:2500])
    flags = [f"--config={folder}/serve.toml", f"--model={folder}/tiny", f"--data-dir={whole.data}"]
    command = [sys.executable, "-m", "dist_attn", "serve", *flags, f"--port={free_port()}"]
    second = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    holder = f"{whole.data} is the data folder of process {whole.program.process.pid} on "
    assert (second.returncode, second.stdout, second.stderr.count("\n")) == (2, "", 1)
    assert holder in second.stderr and f"at {whole.url};" in second.stderr
    assert whole.status()
    assert list((folder / "t").glob(f"{PREFIX}*")) and not (folder / "t" / f"{PREFIX}left").exists()
    whole.program.process.kill()
    whole.program.process.wait(SECONDS)
    eventually(lambda: not list((folder / "t").glob(f"{PREFIX}*")), "the folders to go", SECONDS)
    with running_program(command, folder / "next.log") as program:
        url = program.wait_for("ready after", READY_SECONDS).split("s: ")[1].split()[0]
        client = SessionClient(url, KEY, SECONDS)
        last, other = client.append(session, LONG[2500:5000]), client.make()
        assert (last.position, last.recomputed_tokens, last.bit_exact) == (5000, 0, True)
        client.append(other, LONG[:5000])
        assert client.state(session).content == client.state(other).content
        drawn = {"max_tokens": 12, "temperature": 0.8, "seed": 5, "logit_bias": {"256": -100}, "logprobs": 0}
        said = [client.post(f"/v1/sessions/{one}/generate", json=drawn).json()["choices"] for one in (session, other)]
        assert said[0] == said[1] and len(said[0][0]["logprobs"]["tokens"]) == 12

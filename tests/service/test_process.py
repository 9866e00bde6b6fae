"""`python -m dist_attn_service` as a process of its own, with a controller on the other side of a real socket."""

import json
import re
import signal
import socket
import subprocess
import threading
from contextlib import ExitStack
from pathlib import Path

import httpx
import psutil
import pytest
from dist_attn_service.api_process import main

from tests.support.fake_engine import FakeEngine, fake_controller
from tests.support.raw_http import TEXT, Answer, head, lines_of
from tests.support.service_process import SECONDS, command, running_process
from tests.support.service_server import model_folder
from tests.support.waiting import eventually

MIB = 1 << 20


def test_a_service_by_itself(tmp_path: Path) -> None:
    """It announces itself, serves through a controller, never loads torch, and ends cleanly on SIGTERM."""
    with (
        fake_controller(FakeEngine(), f"ipc://{tmp_path}/c") as address,
        running_process(tmp_path, address, max_tokens="20") as (process, url),
    ):
        eventually(lambda: httpx.get(f"{url}/readyz").status_code == 200, "the service to be ready")
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 6})
        assert answer.json()["choices"][0]["text"] == "abcabc"
        too_many = httpx.post(f"{url}/v1/completions", json={"prompt": "abc", "max_tokens": 21})
        assert too_many.status_code == 400 and "20" in too_many.text
        assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(SECONDS) == 0
        log = (tmp_path / "log").read_text()
        assert "Warning" not in log and "Traceback" not in log


@pytest.mark.slow
def test_an_operator_is_told_of_readiness_and_of_open_keys(tmp_path: Path) -> None:
    """Until the engine is ready the service says that it loads, then that it is, with URL, model and data folder; it
    warns of the file that others may read, with its mode and the command that mends it, and of no other.
    """
    keys, admins = tmp_path / "keys.txt", tmp_path / "admins.txt"
    for file, mode in ((keys, 0o644), (admins, 0o600)):
        file.write_text("a-key\n")
        file.chmod(mode)
    engine = FakeEngine(ready=False)
    files = {"api_keys_file": str(keys), "admin_keys_file": str(admins)}
    with (
        fake_controller(engine, f"ipc://{tmp_path}/c") as address,
        running_process(tmp_path, address, **files) as (process, url),  # which has said that it loads
    ):
        assert process.stdout is not None
        assert httpx.get(f"{url}/readyz").status_code == 503
        said: list[str] = []
        reader = threading.Thread(target=lambda: said.append(process.stdout.readline()))
        reader.start()
        engine.ready = True
        reader.join(SECONDS)
        assert re.fullmatch(rf"ready after \d+\.\d s: {url}  model tiny  data in {tmp_path}/data\n", said[0])
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer a-key"}).status_code == 200
    (warning,) = [line for line in (tmp_path / "log").read_text().splitlines() if '"warning"' in line]
    assert f"others may read {keys} (mode 644); chmod 600 {keys}" in warning


@pytest.mark.slow
def test_memory_is_flat_with_a_client_that_does_not_read(tmp_path: Path) -> None:
    """While a document goes in and its rows wait for the client, the process hardly grows, and no row is lost."""
    data = b"call me ishmael " * (8 * MIB // 16)
    window = 64
    with (
        fake_controller(FakeEngine(keep=False), f"ipc://{tmp_path}/c") as address,
        running_process(tmp_path, address) as (process, url),
    ):
        eventually(lambda: httpx.get(f"{url}/readyz").status_code == 200, "the service to be ready")
        assert httpx.post(f"{url}/v1/encodings", content=b"warm up", timeout=SECONDS).status_code == 200
        resident = psutil.Process(process.pid).memory_info
        before = resident().rss
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
            connection.sendall(head(f"/v1/encodings?window={window}", TEXT, f"Content-Length: {len(data)}"))
            highest = before
            for start in range(0, len(data), 1 << 16):
                connection.sendall(data[start : start + (1 << 16)])
                highest = max(highest, resident().rss)
            answer = Answer(connection)
            assert answer.read_head() == 200
            lines = lines_of(answer.read_body())
            highest = max(highest, resident().rss)
        assert lines[-1]["rows"] == len(lines) - 1 == len(data) // window
        assert highest - before < 40 * MIB
        assert list((tmp_path / "data/spool").iterdir()) == []


@pytest.mark.slow
def test_stopping_in_the_middle_of_a_document(tmp_path: Path) -> None:
    """SIGTERM while a document is under way: an error line says where to go on, the exit is clean, the log too."""
    engine = FakeEngine()
    with (
        fake_controller(engine, f"ipc://{tmp_path}/c") as address,
        running_process(tmp_path, address, shutdown_seconds="1", spool_memory_bytes="1000") as (process, url),
    ):
        eventually(lambda: httpx.get(f"{url}/readyz").status_code == 200, "the service to be ready")
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
            connection.sendall(head("/v1/encodings?window=64", TEXT, "Content-Length: 9000000") + b"x" * 600_000)
            answer = Answer(connection)
            assert answer.read_head() == 200
            process.send_signal(signal.SIGTERM)
            lines = lines_of(answer.read_body())
            assert lines[-1]["error"]["code"] == "stopping"
            assert lines[-1]["reached"] == {"next_row": len(lines) - 1}
        assert process.wait(SECONDS) == 0
        eventually(lambda: engine.open_count == 0, "the engine to be told")
        log = (tmp_path / "log").read_text()
        assert "unexpected error" not in log and "Traceback" not in log


@pytest.mark.slow
def test_what_is_under_way_may_finish_while_readiness_says_stop(tmp_path: Path) -> None:
    """After SIGTERM nobody listens, each request that had begun to come is answered with its connection's last answer,
    /readyz with 503, and an open document gets all of its rows.
    """
    with (
        fake_controller(FakeEngine(), f"ipc://{tmp_path}/c") as address,
        running_process(tmp_path, address, shutdown_seconds=str(SECONDS)) as (process, url),
    ):
        eventually(lambda: httpx.get(f"{url}/readyz").status_code == 200, "the service to be ready")
        host, port = url.removeprefix("http://").split(":")
        requests = [head(path, method="GET") for path in ("/readyz", "/v1/status", "/livez")]
        body = b'{"prompt": "abc", "max_tokens": 6}'
        requests.append(head("/v1/completions", f"Content-Length: {len(body)}") + body)
        with ExitStack() as open_connections:

            def connect() -> socket.socket:
                return open_connections.enter_context(socket.create_connection((host, int(port)), timeout=SECONDS))

            connection, begun = connect(), [connect() for _ in requests]
            connection.sendall(head("/v1/encodings?window=8", TEXT, "Content-Length: 800") + b"x" * 400)
            answer = Answer(connection)
            assert answer.read_head() == 200
            for one, request in zip(begun, requests, strict=True):
                one.sendall(request[:10])
            assert httpx.get(f"{url}/livez").status_code == 200  # so that all of these were read
            process.send_signal(signal.SIGTERM)
            eventually(lambda: not listens(host, int(port)), "the process to listen no more")
            answers = []
            for one, request in zip(begun, requests, strict=True):
                one.sendall(request[10:])
                last = Answer(one)
                answers.append((last.read_head(), json.loads(last.read_body())))
                assert last.headers["connection"] == "close" and last.at_end()
            assert [status for status, _ in answers] == [503, 200, 200, 200]
            unready, state, _, completion = (body for _, body in answers)
            assert unready["error"]["code"] == "stopping" and unready["detail"].startswith("draining")
            assert (state["ready"], state["open_requests"]) == (False, 1) and "draining" in state["reason"]
            assert completion["choices"][0]["text"] == "abcabc"
            connection.sendall(b"x" * 400)
            assert lines_of(answer.read_body())[-1]["rows"] == 100
        assert process.wait(SECONDS) == 0


def listens(host: str, port: int) -> bool:
    """Whether a connection is accepted there."""
    try:
        socket.create_connection((host, port)).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.slow
def test_a_kill_leaves_nothing_behind(tmp_path: Path) -> None:
    """kill -9 with bytes in the spools: no file stays, and the port can be used again."""
    engine = FakeEngine(paused=True)
    with fake_controller(engine, f"ipc://{tmp_path}/c") as address:
        engine.paused = False
        with running_process(tmp_path, address, spool_memory_bytes="1000") as (process, url):
            eventually(lambda: httpx.get(f"{url}/readyz").status_code == 200, "the service to be ready")
            engine.paused = True
            host, port = url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port)), timeout=SECONDS) as connection:
                connection.sendall(head("/v1/encodings", TEXT, "Content-Length: 9000000") + b"x" * 2_000_000)
                process.kill()
                process.wait(SECONDS)
            assert list((tmp_path / "data/spool").iterdir()) == []
            socket.create_server((host, int(port))).close()


@pytest.mark.slow
def test_a_start_that_cannot_work_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A taken port, a host that is no name, a missing model folder or a bad setting: exit code 2, one line."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = command(tmp_path, "ipc:///x", "--port", port)
        ended = subprocess.run(line, capture_output=True, text=True, timeout=SECONDS)
        assert (ended.returncode, port in ended.stderr, ended.stderr.count("\n")) == (2, True, 1)
    for arguments, word in (
        (command(tmp_path, "ipc:///x", "--model", str(tmp_path / "nothing"))[3:], "nothing"),
        (command(tmp_path, "ipc:///x", "--port", "70000")[3:], "port"),
        (command(tmp_path, "ipc:///x", "--host", "h" * 64)[3:], "h" * 64),
        (command(tmp_path, "nowhere")[3:], "nowhere"),
        (["--model", str(model_folder(tmp_path))], "api_address"),
    ):
        assert main(arguments) == 2
        said = capsys.readouterr().err
        assert word in said and said.count("\n") == 1

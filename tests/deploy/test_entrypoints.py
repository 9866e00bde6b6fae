"""The entry points of the images, run with the images' own arguments and environment: they serve, and stop cleanly."""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml

from dist_attn.wire.curve import make_keys
from tests.support.api_image import make_image_environment
from tests.support.dockerfile import read_dockerfile, with_flags
from tests.support.models import write_small_folder
from tests.support.programs import Program, free_port, running_program
from tests.support.source_path import SOURCE_PATH
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[2]
API, ENGINE = (read_dockerfile(ROOT / f"deploy/Dockerfile.{name}") for name in ("api", "engine"))
START_SECONDS = 90.0
FORMS = ["image", "compose"]


def local(command: list[str], python: Path | str, **flags: str) -> list[str]:
    """An image's command on this machine: another interpreter, the scripts of the repository, other places."""
    scripts = "/opt/dist-attn/"
    words = [word.replace(scripts, f"{ROOT}/deploy/entrypoints/") for word in command[1:]]
    return with_flags([str(python), *words], **flags)


def command_of(service: str, form: str) -> list[str]:
    """What the image starts by itself, or with the flags that the compose file gives it."""
    image = {"api": API, "engine": ENGINE}[service]
    if form == "image":
        return image.command
    entry = [word for word in image.command if not word.startswith("--")]
    return [*entry, *compose_service(service)["command"]]


def compose_service(name: str) -> dict[str, Any]:
    """A service of the compose file where no variable is set but ENCODER, to nothing: one engine does all."""
    text = (ROOT / "docker-compose.yml").read_text().replace("${ENCODER-minilm-stream}", "")
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)
    service: dict[str, Any] = yaml.safe_load(text)["services"][name]
    return service


@contextmanager
def container(folder: Path, name: str, environment: dict[str, str], command: list[str]) -> Iterator[Program]:
    """The command with an empty folder as its home and place, and a folder for temporary files."""
    home, temporary = folder / f"{name}-home", folder / f"{name}-tmp"
    home.mkdir()
    temporary.mkdir()
    env = {**environment, "HOME": str(home), "TMPDIR": str(temporary)}
    with running_program(command, folder / f"{name}.log", env=env, cwd=home) as program:
        yield program


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model."""
    return write_small_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_serve_and_stop(form: str, model: Path, tmp_path: Path) -> None:
    """Both pass their health checks, serve, leave files in their data folder alone, and end with 0 on SIGTERM."""
    address, port = f"tcp://127.0.0.1:{free_port()}", str(free_port())
    places = {"model": str(model), "data_dir": str(tmp_path / "data")}
    api_python = make_image_environment(tmp_path / "venv")
    make_keys(tmp_path / "keys")
    keys = {"DIST_ATTN_ENGINE__KEYS_DIR": str(tmp_path / "keys")}
    # What the images install is on the path; where a script lies is not (PYTHONSAFEPATH).
    engine_env = {**ENGINE.environment, **keys, "PYTHONPATH": SOURCE_PATH}
    everywhere = address.replace("127.0.0.1", "0.0.0.0")
    shipped = command_of("engine", form)
    ranks = 1 if form == "image" else 2  # of the four that the compose file has: each loads torch
    engine = local(shipped, sys.executable, **places, api_address=everywhere, ranks=str(ranks))
    api = local(command_of("api", form), api_python, **places, api_address=address, port=port)
    variables = compose_service("api")["environment"] if form == "compose" else {}
    variables = {name: value or "" for name, value in variables.items()}
    with (
        container(tmp_path, "engine", engine_env, engine) as controller,
        container(tmp_path, "api", {**API.environment, **keys, **variables, "PYTHONPATH": ""}, api) as server,
    ):
        server.wait_for("listening on", START_SECONDS)
        alive = [*local(API.health_command, api_python), f"http://127.0.0.1:{port}/livez"]
        assert subprocess.run(alive, timeout=60).returncode == 0
        url = f"http://127.0.0.1:{port}"
        eventually(lambda: httpx.get(f"{url}/readyz").status_code == 200, "the engine to be ready", START_SECONDS)
        ready = [*local(ENGINE.health_command, sys.executable), address]
        assert subprocess.run(ready, timeout=60, env={**keys, "PYTHONPATH": SOURCE_PATH}).returncode == 0
        assert httpx.get(f"{url}/readyz").json()["ranks"] == ranks
        answer = httpx.post(f"{url}/v1/encodings", params={"granularity": "document"}, content=b"x" * 5000, timeout=60)
        assert '"tokens":5000' in answer.text
        below = controller.family()[1:]
        assert server.stop() == 0, server.output
        assert controller.stop() == 0, controller.output
        assert psutil.wait_procs(below, 20)[1] == []
    assert [*(tmp_path / "api-home").iterdir(), *(tmp_path / "engine-home").iterdir()] == []
    assert [*(tmp_path / "api-tmp").iterdir(), *(tmp_path / "engine-tmp").iterdir()] == []


def test_an_unknown_model_is_refused_in_one_line(tmp_path: Path) -> None:
    """A model that is nowhere ends the start with exit code 2 and one line that names it."""
    command = with_flags([sys.executable, *API.command[1:]], model="nowhere")
    command[1] = str(ROOT / "deploy/entrypoints/start.py")
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, cwd=tmp_path, env={"PYTHONPATH": SOURCE_PATH}
    )
    assert done.returncode == 2
    assert "nowhere" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_settings_name_the_model_where_no_flag_does(tmp_path: Path) -> None:
    """Without --model the environment's or the file's model is taken, not silently the default one."""
    start = [sys.executable, str(ROOT / "deploy/entrypoints/start.py"), "engine", "--api-address=ipc:///x"]
    (tmp_path / "engine.toml").write_text('model = "of-the-file"\n')
    for flags, variables, word in (
        ([], {"DIST_ATTN_MODEL": "of-the-environment"}, "of-the-environment"),
        (["--config", str(tmp_path / "engine.toml")], {}, "of-the-file"),
        ([], {"DIST_ATTN_ENGINE__RANK": "2"}, "DIST_ATTN_ENGINE__RANK"),
    ):
        env = {"PYTHONPATH": SOURCE_PATH, **variables}
        done = subprocess.run([*start, *flags], capture_output=True, text=True, timeout=60, env=env)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert word in done.stderr


def test_health_checks_fail_when_nobody_answers(tmp_path: Path) -> None:
    """Without a process behind it, each check ends with exit code 1 in time and says what it asked."""
    port = free_port()
    for script, place in (
        ("api_alive.py", f"http://127.0.0.1:{port}/livez"),
        ("engine_ready.py", f"tcp://127.0.0.1:{port}"),
    ):
        command = [sys.executable, str(ROOT / "deploy/entrypoints" / script), place]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": SOURCE_PATH})
        assert done.returncode == 1
        assert place in done.stderr
        assert done.stderr.count("\n") == 1

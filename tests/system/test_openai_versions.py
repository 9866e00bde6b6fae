"""The official client, versions 1, 2 and 3, does what its users do; each in an environment with nothing else in it."""

import hashlib
from pathlib import Path

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.service_server import running_service
from tests.system.openai_clients import VERSIONS, CannotInstall, make_environment, run_client

KEY = "a-key"


@pytest.mark.parametrize("version", VERSIONS)
def test_a_version_of_the_official_client(version: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Models, completions, streams over pings, embeddings and errors, with a key, over connections that are kept."""
    if not any("openai" in argument for argument in pytestconfig.args):
        pytest.skip(f"installs packages, so only when named: make test-all ARGS=tests/system/{Path(__file__).name}")
    try:
        python = make_environment(tmp_path / "venv", version)
    except CannotInstall as error:
        pytest.skip(f"pip cannot install it here: {error}")
    engine = FakeEngine(draw_seconds=0.05)
    keys = (hashlib.sha256(KEY.encode()).hexdigest(),)
    with running_service(tmp_path, engine, ping_seconds=0.02, api_keys=keys) as service:
        done = run_client(python, service.url, KEY)
    assert done.returncode == 0, done.stderr
    assert "as they should be" in done.stdout

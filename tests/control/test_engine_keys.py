"""A real controller, agent and ranks on network addresses, with keys: all of them speak encrypted, nobody else does."""

import numpy as np
import psutil
import pytest

from dist_attn.control.launch import start_engine
from dist_attn.control.settings import ControlSettings
from dist_attn.errors import ConfigError
from dist_attn.wire.curve import make_keys
from dist_attn.wire.messages import GetStatus
from tests.support.controller_client import ControllerClient
from tests.support.engines import QUICK, marked_processes, rank_processes, running_engine
from tests.support.programs import free_port


def test_an_engine_with_keys_works_and_others_hear_nothing(tmp_path):
    """Requests run, a lost rank is replaced, a client without keys gets no answer, no key stands in a command line."""
    make_keys(tmp_path)
    places = {name: f"tcp://127.0.0.1:{free_port()}" for name in ("api_address", "rank_address")}
    with running_engine(ranks=2, keys_dir=str(tmp_path), **places) as (handle, client, mark):
        assert client.encode("a", np.arange(900)).done.rows == 2
        with ControllerClient(handle.api_address) as stranger:
            stranger.send(GetStatus())
            assert not stranger.pump(0.3)
        keys = [path.read_text().strip() for path in tmp_path.iterdir()]
        assert not any(key in command for command in marked_processes(mark).values() for key in keys)
        psutil.Process(rank_processes(mark)[1]).kill()
        client.wait_for_status(lambda status: status.ready and status.epoch == 2)
        assert client.encode("b", np.arange(900)).done.rows == 2


@pytest.mark.parametrize("field", ["api_address", "rank_address"])
def test_a_controller_on_a_network_does_not_start_without_keys(field):
    """The refusal names the address and what to set; with an explicit word the same settings are accepted."""
    settings = {**QUICK, "api_address": "ipc:///tmp/none", field: "tcp://0.0.0.0:5555"}
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:5555 can be reached.*engine\.keys_dir"):
        start_engine(**settings)
    assert getattr(ControlSettings(**settings, insecure_network=True), field) == "tcp://0.0.0.0:5555"

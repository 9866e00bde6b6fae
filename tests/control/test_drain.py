"""A controller that is asked to stop lets open requests finish for a while, and hands over what is left."""

import time

import numpy as np

from dist_attn.wire.messages import RowSpec
from tests.support.engines import running_engine

TOKENS = np.arange(3_000) % 900


def test_open_requests_finish_and_new_ones_are_refused():
    """Until the last one is done the controller is not ready, says why, and takes nothing on; then it ends."""
    with running_engine(drain_s=60.0) as (handle, client, _):
        client.open_encoding("open", RowSpec("window", 300))
        client.feed("open", TOKENS[:1000], final=False)
        handle.process.terminate()
        status = client.wait_for_status(lambda status: not status.ready)
        assert "stopping" in status.reason
        client.open_encoding("late", RowSpec())
        client.wait_until(lambda: client.requests["late"].ended)
        assert client.requests["late"].failed.code == "engine_not_ready"
        client.feed("open", TOKENS[1000:], start=1000)
        assert client.finish("open").done.rows == 10
        assert handle.process.wait(60) == 0


def test_what_is_left_goes_to_the_next_controller():
    """At the end of the time, or at once when it is asked a second time, requests end as ones that another may do."""
    with running_engine(drain_s=60.0) as (handle, client, _):
        client.open_encoding("open", RowSpec("window", 300))
        client.feed("open", TOKENS[:1000], final=False)
        handle.process.terminate()
        client.wait_for_status(lambda status: not status.ready)
        time.sleep(0.1)
        handle.process.terminate()
        client.wait_until(lambda: client.requests["open"].ended)
        assert client.requests["open"].failed.code == "stopping"
        assert handle.process.wait(60) == 0

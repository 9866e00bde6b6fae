"""The account of the steps under way: what it keeps, and for how long."""

from dist_attn.control.open_requests import OpenRequests
from dist_attn.control.scheduler import StepPlan
from dist_attn.control.settings import ControlSettings
from dist_attn.control.states import States
from dist_attn.control.steps import RATE_WINDOW_S, StepBook
from dist_attn.wire.rank_messages import StepDone
from dist_attn.wire.sockets import Sent
from tests.support.states import MemoryStates

SETTINGS = ControlSettings(api_address="ipc:///none", model="m")


def test_the_rate_is_forgotten_without_anybody_asking():
    """An engine that nobody asks for its status keeps the rates of the last seconds and no others."""
    keeper, book = MemoryStates(), StepBook(ranks=1)
    requests = OpenRequests(SETTINGS, lambda *_: Sent.DONE, keeper)
    states = States(requests, SETTINGS, keeper)
    book.begin_epoch(1)
    for k in range(1, 1001):
        book.compose(StepPlan((), (), ((),), ()), requests, states, now=float(k))
        book.finish(StepDone(1, k, 0, 0.0, [], []))
    assert len(book._rate) <= RATE_WINDOW_S + 1

"""What holds for every test: one thread per process, repeatable random cases, and what is skipped says why."""

import gc
import os
import signal
import ssl
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from functools import cache
from pathlib import Path

# Before torch is imported anywhere: two test processes share the cores, and rank processes inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What somebody measured here must not change which exchange is tested.
os.environ["XDG_CACHE_HOME"] = os.path.join(tempfile.gettempdir(), "dist-attn-tests-cache")
# Without a GPU, kernels run in Triton's interpreter; it looks when triton is first imported, and torch may do that.
if not os.path.exists("/dev/nvidiactl"):
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

from tests.support.mpi import why_no_mpi

# No deadline per example: a busy machine is not a failure. Derandomised: what is red once is red again.
# `make test` tries some examples of each property, `make test-all` (--hypothesis-profile full) many.
for profile, count in (("some", 20), ("full", 100)):
    settings.register_profile(profile, max_examples=count, deadline=None, derandomize=True, database=None)
settings.load_profile("some")

SYSTEM = Path(__file__).parent / "system"

# Every client of httpx reads a hundred certificates for itself, which takes longer than most requests of the tests.
ssl.create_default_context = cache(ssl.create_default_context)

# In the background of a shell Ctrl-C is ignored, and programs that are started here would ignore it too.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """How long the soak test runs, and whether packages of gigabytes may be fetched."""
    parser.addoption(
        "--soak-seconds",
        type=float,
        default=10.0,
        metavar="N",
        help="seconds of mixed work in tests/system/test_soak.py (default 10; `make soak` takes 600)",
    )
    parser.addoption(
        "--stand-in",
        action="store_true",
        help="run both calls of `make gpu` in an environment like that of a GPU machine: fetches 2.5 GB, takes minutes",
    )


@pytest.fixture
def running_sum(monkeypatch: pytest.MonkeyPatch) -> str:
    """The kind of a small mixer that takes no packed texts."""
    from tests.support.running_sum import register_running_sum

    return register_running_sum(monkeypatch)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage in what is loaded to collect the tests, of which nothing is: a sixth of the time.

    In the tests look for it less often than usual: a tenth of the time of those that serve went there.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


@cache
def has_cuda() -> bool:
    """Whether tests marked gpu can run; asked only if there are any."""
    import torch

    return torch.cuda.is_available()


def pytest_runtest_setup() -> None:
    """Let every test draw the same random numbers, whichever ran before it."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)  # before it is chosen by marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Skip what needs a GPU or an MPI launcher that is not here; what starts launchers, browsers or systems is slow.

    Files with slow tests come first.
    """
    for item in items:
        if item.get_closest_marker("gpu") and not has_cuda():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and there is none"))
        if item.get_closest_marker("mpi") and (lack := why_no_mpi()):
            item.add_marker(pytest.mark.skip(reason=lack))
        if item.get_closest_marker("mpi") or "browser" in item.fixturenames or SYSTEM in item.path.parents:
            item.add_marker("slow")
        if item.path == SYSTEM / "test_soak.py":
            # Before and after its work it waits as others do.
            limit = float(config.getini("timeout")) + float(config.getoption("soak_seconds"))
            item.add_marker(pytest.mark.timeout(limit))
    # Files with the most slow tests first: a long one that began last would leave the other worker without work.
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])

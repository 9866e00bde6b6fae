"""What holds for every test here: the same random numbers each time, and a busy machine is not a failure."""

import os
import sys
import tempfile

from hypothesis import settings

# As tests/conftest.py has it, which is not above these tests: what somebody measured here changes nothing, and C
# kernels are compiled once for both; no deadline per example, and what is red is red again.
os.environ["XDG_CACHE_HOME"] = os.path.join(tempfile.gettempdir(), "dist-attn-tests-cache")
settings.register_profile("papers", deadline=None, derandomize=True, database=None)
settings.load_profile("papers")


def pytest_runtest_setup() -> None:
    """Let every test draw the same random numbers, whichever ran before it in its process."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)

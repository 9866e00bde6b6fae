"""Messages between processes that were spoilt on their way: a short run of the program that feeds millions."""

import pytest

from dist_attn.errors import WireError
from dist_attn.wire.messages import Cancel, encode
from tests.fuzz.wire_messages import read_or_refuse, run


def test_spoilt_messages_are_refused_or_read() -> None:
    """Each of thousands of messages with bytes changed, lost, doubled or from elsewhere is refused, or is read."""
    outcomes = run(5000, seed=3)
    assert sum(outcomes.values()) == 5000
    assert outcomes["read"] > 100 and len(outcomes) > 8


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xdf\xff\xff\xff\xff", b"\xdd\x7f\xff\xff\xff", b"\x81" * 10_000])
def test_sizes_that_are_only_claimed_are_refused(data: bytes) -> None:
    """Nothing at all, a claim of billions of entries and a nesting of thousands are refused, not believed."""
    assert isinstance(read_or_refuse(data), WireError)
    assert read_or_refuse(encode(Cancel("a"))) is None

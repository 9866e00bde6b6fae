"""The words in which ranks hear how their values differ."""

import pytest

from dist_attn.comm.call import difference, differences, host_name


@pytest.mark.parametrize(
    ("zero", "other", "words"),
    [
        ("a=1,2 b=3", "a=1,4 b=5", "a[1] is 2 on rank 0 and 4 on rank 2"),
        ("a=1 b=3", "a=1 b=5", "b is 3 on rank 0 and 5 on rank 2"),
        ("a=1,2", "a=1,2,3", "a has 2 entries on rank 0 and 3 on rank 2, equal as far as both go"),
        ("a=1,2", "a=7", "a[0] is 1 on rank 0 and 7 on rank 2 (of 2 and 1 entries)"),
        ("a=1", "b=1", "rank 0 has 'a=1' and rank 2 has 'b=1'"),
        ("one", "two", "rank 0 has 'one' and rank 2 has 'two'"),
        ("a=1", "a=1 b=2", "rank 0 has 'a=1' and rank 2 has 'a=1 b=2'"),
    ],
)
def test_the_first_difference_is_named(zero, other, words):
    """A field, and the entry of it, that differs first is named with both values; other text is quoted."""
    assert difference(zero, other, 2) == words


def test_many_ranks_are_named_briefly():
    """Of many ranks that differ the first few are described, and values of any length stay short."""
    said = differences(["x" * 1000, *("y" * 1000 for _ in range(9))])
    assert said.count("on rank") + said.count("and rank") == 4
    assert said.endswith("; …")
    assert len(said) < 1000
    assert differences(["same", "same"]) == ""


def test_agents_of_torchrun_are_hosts() -> None:
    """Two agents on one machine are two hosts, processes without an agent are on one."""
    names = [host_name({"GROUP_RANK": "0"}), host_name({"GROUP_RANK": "1"}), host_name({})]
    assert len(set(names)) == 3
    assert host_name({"GROUP_RANK": "0", "RANK": "3"}) == names[0]

"""On which host a rank counts itself."""

from dist_attn.comm.host_name import host_name


def test_agents_of_torchrun_are_hosts() -> None:
    """Two agents on one machine are two hosts, processes without an agent are on one."""
    names = [host_name({"GROUP_RANK": "0"}), host_name({"GROUP_RANK": "1"}), host_name({})]
    assert len(set(names)) == 3
    assert host_name({"GROUP_RANK": "0", "RANK": "3"}) == names[0]

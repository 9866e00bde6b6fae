"""Where other hosts reach this one: its address, the network interface that has it, a free port of it."""

import fcntl
import socket
import struct

__all__ = ["address_towards", "free_port", "interface_of"]

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
LOOPBACK = "127.0.0.1"


def address_towards(address: str) -> str:
    """This host's own address on the way to a ZeroMQ address; empty while the way is not known."""
    scheme, _, place = address.partition("://")
    if scheme != "tcp":
        return LOOPBACK
    host, _, port = place.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, int(port)))  # nothing is sent: the kernel only looks up the way
            return str(probe.getsockname()[0])
        except OSError:
            return ""


def interface_of(address: str) -> str:
    """The network interface with an IPv4 address of this host; empty where that cannot be found out."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue  # an interface without an address
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def free_port(address: str) -> int:
    """A port of an address of this host that nobody listens on now.

    Raises: OSError where the address is none of this host's.
    """
    with socket.create_server((address, 0)) as listener:
        return int(listener.getsockname()[1])

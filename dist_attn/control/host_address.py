"""Where other hosts reach this one: its address, the network interface that has it, a socket that listens there."""

import fcntl
import socket
import struct
import sys

__all__ = ["LOOPBACK_INTERFACE", "address_towards", "interface_of", "listen_on"]

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
LOOPBACK = "127.0.0.1"
LOOPBACK_INTERFACE = "lo0" if sys.platform == "darwin" else "lo"


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


def listen_on(address: str) -> socket.socket:
    """A socket that listens on this address of this host alone, at a port that was free.

    Raises: OSError where the address is not known, none of this host's, or a name that only this host resolves so.
    """
    found = socket.gethostbyname(address) if address else ""
    named_loopback = found.startswith("127.") and found != address  # as in Debian's /etc/hosts
    if found in ("", "0.0.0.0") or named_loopback:
        raise OSError(
            f"the address of this host is {address!r}{f', which is {found} here' if named_loopback else ''}: "
            "set engine.host_address to one that other hosts reach"
        )
    return socket.create_server((found, 0))

"""Two hosts on one machine: network namespaces that see each other over a virtual cable, and nothing else."""

import ctypes
import os
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Host:
    """One namespace: its name and its address for the other one."""

    name: str
    address: str

    @property
    def prefix(self) -> list[str]:
        """What a command begins with that is to run there."""
        return ["ip", "netns", "exec", self.name]

    @property
    def settings(self) -> Path:
        """Files that `ip netns exec` shows there in place of those in /etc."""
        return Path("/etc/netns") / self.name

    def processes(self) -> list[psutil.Process]:
        """What runs there now."""
        listed = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True)
        return [psutil.Process(int(pid)) for pid in listed.stdout.split() if psutil.pid_exists(int(pid))]

    def listening(self) -> list[str]:
        """HOST:PORT of every TCP socket that listens there."""
        command = [*self.prefix, "ss", "-H", "-l", "-t", "-n"]
        listed = subprocess.run(command, capture_output=True, text=True, check=True)
        return [line.split()[3] for line in listed.stdout.splitlines()]

    def switch_off(self) -> None:
        """Kill everything that runs there, at once."""
        for process in self.processes():
            process.kill()

    def connect(self, port: int, timeout_s: float) -> socket.socket:
        """A connection to a port of its loopback address; a socket stays where it was made."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open("/proc/self/ns/net") as home, open(f"/run/netns/{self.name}") as there:
            if libc.setns(there.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"namespace {self.name}")
            try:
                return socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
            finally:
                libc.setns(home.fileno(), CLONE_NEWNET)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Both, up and empty; skips the test where namespaces cannot be made. All that runs there is killed at the end."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and iproute2 for network namespaces")
    mark = secrets.token_hex(3)
    hosts = tuple(Host(f"dist-attn-{mark}-{n}", f"10.123.45.{n}") for n in (1, 2))
    cables = [f"da{mark}{n}" for n in (1, 2)]
    made: list[Host] = []
    try:
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
                made.append(host)
            _ip(
                "link",
                "add",
                cables[0],
                "netns",
                hosts[0].name,
                "type",
                "veth",
                "peer",
                cables[1],
                "netns",
                hosts[1].name,
            )
            for host in hosts:
                # Instead of the machine's name server, which nobody reaches from there: torch asks for names.
                host.settings.mkdir(parents=True)
                names = [f"{other.address} {other.name}" for other in hosts]
                (host.settings / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
            for host, cable in zip(hosts, cables, strict=True):
                _ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", cable)
                for device in (cable, "lo"):
                    _ip("-n", host.name, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
        yield hosts[0], hosts[1]
    finally:
        for host in made:
            host.switch_off()
            _ip("netns", "delete", host.name)
            shutil.rmtree(host.settings, ignore_errors=True)

"""Keys between processes: who is admitted, who is not, and what is refused before anything listens."""

import contextlib
import stat

import pytest
import zmq

from dist_attn.errors import ConfigError, WireError
from dist_attn.wire.curve import ClientKeys, ServerKeys, admit_listed, check_exposure, make_keys
from dist_attn.wire.messages import Cancel
from dist_attn.wire.rank_messages import Ping
from dist_attn.wire.sockets import Dealer, Router, Sent
from tests.support.programs import free_port
from tests.support.waiting import eventually


@pytest.fixture
def folder(tmp_path):
    """Fresh keys of all three."""
    make_keys(tmp_path / "keys")
    return tmp_path / "keys"


@contextlib.contextmanager
def listening(folder, role="api"):
    """A context and a router that admits a role: (context, router, address)."""
    address = f"tcp://127.0.0.1:{free_port()}"
    context = zmq.Context(1)
    try:
        keys = ServerKeys.find(str(folder), role, address)
        with admit_listed(context, str(folder)), Router(context, address, keys) as router:
            yield context, router, address
    finally:
        context.destroy(linger=0)


def arrives(context, router, address, keys, seconds=60.0):
    """Whether a message of a client with these keys comes through, and the answer back."""
    with Dealer(context, address, "me", keys) as dealer:
        try:
            dealer.send(Cancel("a"), seconds)
        except WireError:
            return False  # the connection was refused before this process came to send
        if not router.socket.poll(int(seconds * 1000)):
            return False
        assert router.receive() == (b"me", Cancel("a"))
        assert router.send(b"me", Ping()) is Sent.DONE
        return dealer.receive(60.0) == Ping()


def test_a_listed_client_is_let_in_and_others_are_not(folder, tmp_path):
    """Messages go both ways between holders of the keys that were made together; of no keys, unknown keys, keys of the
    other socket, and with a controller other than the pinned one nothing arrives.
    """
    make_keys(tmp_path / "other")
    with listening(folder) as (context, router, address):
        known = ClientKeys.find(str(folder), "api", address)
        foreign = ClientKeys.find(str(tmp_path / "other"), "api", address)
        others = {
            "nobody": None,
            "stranger": ClientKeys(foreign.public, foreign.secret, known.controller),
            "agent": ClientKeys.find(str(folder), "agent", address),
            "other controller": ClientKeys(known.public, known.secret, foreign.controller),
        }
        assert arrives(context, router, address, known)
        for who, keys in others.items():
            assert not arrives(context, router, address, keys, 0.3), who
        assert arrives(context, router, address, known) and not router.socket.poll(300)


def test_what_follows_a_refusal_is_an_error(folder, tmp_path):
    """Once a connection is refused a message has no place to wait in, and the words say that keys may be why."""
    make_keys(tmp_path / "other")
    with listening(folder) as (context, _, address):
        known, foreign = (ClientKeys.find(str(place), "api", address) for place in (folder, tmp_path / "other"))
        stranger = ClientKeys(foreign.public, foreign.secret, known.controller)
        with Dealer(context, address, "me", stranger) as dealer:
            eventually(lambda: not dealer.socket.poll(0, zmq.POLLOUT), "the refusal")
            with pytest.raises(WireError, match="refused the connection for its keys"):
                dealer.send(Cancel("a"), 0.1)


def test_a_client_is_listed_and_struck_off_while_the_controller_runs(folder, tmp_path):
    """Another host's public key may be added to the folder at any time, and taken away again."""
    make_keys(tmp_path / "other")
    with listening(folder) as (context, router, address):
        foreign = ClientKeys.find(str(tmp_path / "other"), "api", address)
        controller = ClientKeys.find(str(folder), "api", address).controller
        second = ClientKeys(foreign.public, foreign.secret, controller)
        (folder / "api-second.public").write_bytes(foreign.public + b"\n")
        assert arrives(context, router, address, second)
        (folder / "api-second.public").unlink()
        assert not arrives(context, router, address, second, 0.3)


def test_secrets_are_for_their_owner_alone(folder):
    """They are written so, and one that others can read is refused with the command that mends it."""
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.secret")} == {0o600}
    secret = folder / "api.secret"
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        ClientKeys.find(str(folder), "api", "tcp://127.0.0.1:1")
    assert secret.read_text().strip() not in repr(ServerKeys.find(str(folder), "api", "tcp://127.0.0.1:1"))


def test_keys_that_are_there_stay(folder):
    """A second call writes nothing; one half of a pair is not paired with a new one."""
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert make_keys(folder) == []
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    (folder / "api.public").unlink()
    with pytest.raises(ConfigError, match="one half"):
        make_keys(folder)


@pytest.mark.parametrize("content", [b"", b"too short", b"\xff" * 40, b"x" * 41])
def test_a_file_without_a_key_is_refused(folder, content):
    """The error names the file and the way to make it."""
    (folder / "controller.public").write_bytes(content)
    with pytest.raises(ConfigError, match=r"controller\.public holds no key.*dist-attn keys"):
        ClientKeys.find(str(folder), "api", "tcp://127.0.0.1:1")


@pytest.mark.parametrize(
    ("address", "exposed"),
    [
        ("ipc:///tmp/a", False),
        ("tcp://127.0.0.1:5555", False),
        ("tcp://127.9.9.9:5555", False),
        ("tcp://localhost:5555", False),
        ("tcp://[::1]:5555", False),
        ("tcp://0.0.0.0:5555", True),
        ("tcp://*:5555", True),
        ("tcp://[::]:5555", True),
        ("tcp://10.0.0.1:5555", True),
        ("tcp://engine:5555", True),
        ("tcp://eth0:5555", True),
    ],
)
def test_a_network_needs_keys_or_a_word_that_it_does_not(address, exposed):
    """Without either, an address that others can reach is refused, saying what to set."""
    check_exposure(address, "folder", insecure=False)
    check_exposure(address, "", insecure=True)
    if exposed:
        with pytest.raises(ConfigError, match=r"engine\.keys_dir.*engine\.insecure_network"):
            check_exposure(address, "", insecure=False)
    else:
        check_exposure(address, "", insecure=False)
        assert not exposed

"""What `dist-attn serve` does when a part of it dies: a new one at the same address, or the end."""

import threading

import pytest

from dist_attn.commands import serve
from dist_attn.control.processes import held
from dist_attn.errors import ConfigError
from dist_attn.settings import DataFolder
from tests.support.models import write_small_folder
from tests.support.programs import free_port


class _Part:
    """A process that dies as often as it is told, then asks for the end."""

    def __init__(self, deaths, stopped, code=-9):
        self.restarts, self._deaths, self._stopped, self._code = 0, deaths, stopped, code

    def exit_code(self):
        if self.restarts < self._deaths:
            return self._code
        self._stopped.set()
        return None

    def restart(self):
        self.restarts += 1


class _Sound:
    def exit_code(self):
        return None


@pytest.fixture
def stopped(monkeypatch):
    """What asks for the end; nobody waits long."""
    monkeypatch.setattr(serve, "POLL_S", 0.001)
    monkeypatch.setattr(serve, "RESTART_S", 0.001)
    return threading.Event()


@pytest.mark.parametrize("name", ["API", "controller"])
@pytest.mark.parametrize("code", [-9, 0, 1])
def test_a_part_that_dies_is_started_again(stopped, name, code):
    """Some deaths of any kind are got over, and the end that was asked for is a clean one."""
    part = _Part(serve.DEATHS_TO_END - 1, stopped, code)
    assert serve._watch({name: part, "other": _Sound()}, stopped) == (0, "")
    assert part.restarts == serve.DEATHS_TO_END - 1


@pytest.mark.parametrize(("code", "end"), [(-9, 137), (0, 1), (3, 3)])
def test_a_part_that_dies_again_and_again_ends_the_service(stopped, code, end):
    """Its exit code, as a shell has it, becomes the service's, and the last words say what happened."""
    part = _Part(100, stopped, code)
    found, words = serve._watch({"API": part}, stopped)
    assert (found, part.restarts) == (end, serve.DEATHS_TO_END - 1)
    assert words == f"the API ended with exit code {137 if code == -9 else code}, the 4th time in a minute; " + (
        "the service ends with it"
    )


def test_deaths_that_lie_apart_do_not_add_up(stopped, monkeypatch):
    """A part that dies once in a while is started again however often that was."""
    monkeypatch.setattr(serve, "DEATHS_WITHIN_S", 0.0)
    part = _Part(5 * serve.DEATHS_TO_END, stopped)
    assert serve._watch({"API": part}, stopped) == (0, "")
    assert part.restarts == 5 * serve.DEATHS_TO_END


def test_a_part_that_refuses_to_start_is_not_started_again(stopped):
    """Exit code 2 is the answer to what it was started with, which another start would not change."""
    part = _Part(100, stopped, serve.REFUSED)
    assert serve._watch({"API": part}, stopped)[0] == 2
    assert part.restarts == 0


def test_a_data_folder_has_one_service(tmp_path):
    """While another one has it nothing is started, and the refusal names the other's process and address."""
    lock = tmp_path / DataFolder.LOCK
    flags = {"model": str(write_small_folder(tmp_path / "tiny")), "data_dir": str(tmp_path), "http.port": free_port()}
    with (
        held(lock, "process 7 on h at http://127.0.0.1:8000", ""),
        pytest.raises(ConfigError, match=r"is the data folder of process 7 on h at http://127\.0\.0\.1:8000; stop"),
    ):
        serve.serve(None, flags)
    assert {path.name for path in tmp_path.iterdir()} == {"tiny", DataFolder.LOCK}
    with held(lock, "the next", ""):
        assert lock.read_text() == "the next\n"


def test_a_lock_is_waited_for_as_long_as_asked(tmp_path):
    """One that is let go within the time is taken; the words of the one before are no longer there."""
    taken, let_go = threading.Event(), threading.Event()

    def hold():
        with held(tmp_path / "lock", "a process with many words", ""):
            taken.set()
            let_go.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    assert taken.wait(60)
    with (
        pytest.raises(ConfigError, match="not now: a process with many words"),
        held(tmp_path / "lock", "", "not now: {}"),
    ):
        pass
    threading.Timer(0.1, let_go.set).start()
    with held(tmp_path / "lock", "b", "", patience_s=60.0):
        assert (tmp_path / "lock").read_text() == "b\n"
    thread.join(60)


def test_a_link_is_no_lock(tmp_path):
    """What another user puts in the lock's place is not written to."""
    (tmp_path / "precious").write_text("stays")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError), held(tmp_path / "lock", "b", ""):
        pass
    assert (tmp_path / "precious").read_text() == "stays"

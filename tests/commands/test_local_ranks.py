"""`--ranks N` of a command: what listens, what it gives, how it ends, and inside whose ranks it is refused."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np
import psutil
import pytest

from dist_attn.commands.local_ranks import LastWords, _reason, run_over_ranks
from dist_attn.control.processes import PREFIX
from dist_attn.errors import InputError
from tests.support.command_line import DEADLINE_S, finish, run_here, start_command
from tests.support.models import write_small_folder
from tests.support.tokenisers import PROSE
from tests.support.waiting import eventually

TEXT = 3 * PROSE.encode()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with a small model, a text, and a pipe that a test writes a text into."""
    write_small_folder(tmp_path / "tiny")
    (tmp_path / "book.txt").write_bytes(TEXT)
    os.mkfifo(tmp_path / "slow.txt")
    return tmp_path


def command(*arguments: str, ranks: int = 2) -> list[str]:
    """`dist-attn` with a small model over ranks."""
    return ["dist_attn", *arguments, "--model", "tiny", "--ranks", str(ranks)]


@contextlib.contextmanager
def encoding_of_a_slow_text(place: Path) -> Iterator[tuple[subprocess.Popen[str], list[psutil.Process], IO[bytes]]]:
    """The command and its ranks, in order, which have met and wait for the rest of the text, and where it goes."""
    process = start_command(
        command("encode", "slow.txt", "--out", "rows.npy", "--window", "300", "--deterministic"), place
    )
    try:
        with (place / "slow.txt").open("wb", buffering=0) as text:
            text.write(TEXT[:10])
            eventually(lambda: bool(list(place.glob(".rows.npy.*.writing"))), "the ranks to meet", DEADLINE_S)
            ranks = sorted(psutil.Process(process.pid).children(), key=lambda rank: int(rank.environ()["RANK"]))
            assert len(ranks) == 2
            yield process, ranks, text
    finally:
        process.kill()
        process.communicate()


def alive(ranks: list[psutil.Process]) -> list[psutil.Process]:
    """Those that run."""
    return [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_nothing_listens_beyond_loopback_and_rows_are_those_of_one_rank(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes of `encode --ranks 2` listen on loopback alone, and write and report what one rank does."""
    with encoding_of_a_slow_text(place) as (process, ranks, text):
        family = [psutil.Process(process.pid), *ranks]
        listening = {c.laddr.ip for one in family for c in one.net_connections("inet") if c.status == "LISTEN"}
        meeting = Path(ranks[0].environ()["DIST_ATTN_MEETING"].removeprefix("file://")).parent
        assert listening == {"127.0.0.1"}
        assert meeting.stat().st_mode & 0o777 == 0o700 and meeting.name.startswith(PREFIX)
        text.write(TEXT[10:])
        text.close()
        code, out, err = finish(process)
    report = json.loads(out)
    assert (code, report["ranks"], report["backend"], err.count("\n")) == (0, 2, "gloo", 1), err
    assert meeting.parent == Path(tempfile.gettempdir()) and not meeting.exists()
    words = ["encode", "book.txt", "--model", "tiny", "--out", "one.npy", "--window", "300", "--deterministic"]
    assert run_here(monkeypatch, place, *words) == 0
    assert (place / "rows.npy").read_bytes() == (place / "one.npy").read_bytes()


@pytest.mark.slow
def test_every_command_gives_over_ranks_what_it_gives_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`logits` and `evaluate` over two ranks print one report and give the numbers of one."""
    np.save(place / "tokens.npy", np.arange(700) % 50)
    scores = [["logits", "--tokens", "tokens.npy", "--out", f"{ranks}.npy"] for ranks in (1, 2)]
    started = [start_command(command(*words), place) for words in (scores[1], ["evaluate", "book.txt"])]
    alone = []
    for words in (scores[0], ["evaluate", "book.txt"]):
        assert run_here(monkeypatch, place, *words, "--model", "tiny") == 0
        alone.append(capsys.readouterr())
    together = [finish(process) for process in started]
    for code, out, err in ((0, *alone[0]), together[0]):
        assert code == 0 and len(out.splitlines()) == 1 and len(err.splitlines()) == 1, err
    np.testing.assert_allclose(np.load(place / "2.npy"), np.load(place / "1.npy"), rtol=1e-4, atol=1e-4)
    one, two = json.loads(alone[1].out), json.loads(together[1][1])
    assert two["bits_per_byte"] == pytest.approx(one["bits_per_byte"], rel=1e-4)
    assert [two[name] for name in ("tokens", "bytes")] == [one[name] for name in ("tokens", "bytes")]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_killed_rank_ends_all_and_is_named_once(place: Path, killed: int) -> None:
    """Whichever rank is killed, one line names it, the exit code is 1, and no process is left."""
    with encoding_of_a_slow_text(place) as (process, ranks, _):
        ranks[killed].kill()
        _, out, err = finish(process)
        said = [line for line in err.splitlines() if line.startswith("dist-attn: ")]
        assert (process.returncode, out, len(said)) == (1, "", 1), err
        assert said[0].startswith(f"dist-attn: rank {killed} of 2 was ended by SIGKILL")
        assert alive(ranks) == []
    assert not (place / "rows.npy").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGINT, ["dist-attn: stopped by Ctrl-C; rows.npy was not written"]), (signal.SIGTERM, [])],
)
def test_a_signal_ends_all_ranks(place: Path, number: signal.Signals, words: list[str]) -> None:
    """Ctrl-C and SIGTERM end every rank with the code and the words of one process, and leave nothing behind."""
    with encoding_of_a_slow_text(place) as (process, ranks, _):
        process.send_signal(number)
        assert process.wait(DEADLINE_S) == 128 + number
        out, err = process.communicate()
        assert out == "" and [line for line in err.splitlines() if not line.startswith("device")] == words
        assert alive(ranks) == [] and not list(place.glob("*rows.npy*"))


@pytest.mark.slow
def test_ranks_do_not_outlive_the_command(place: Path) -> None:
    """When the command is killed outright, its ranks end as well."""
    with encoding_of_a_slow_text(place) as (process, ranks, _):
        assert alive(ranks)
        process.kill()
        eventually(lambda: not alive(ranks), "the ranks to end")


@pytest.mark.slow
def test_bad_input_is_said_once_by_all_ranks(place: Path) -> None:
    """A model that is not there is one line and exit code 2, as from one process."""
    words = ["dist_attn", "encode", "book.txt", "--out", "rows.npy", "--model", "nowhere", "--ranks", "3"]
    code, out, err = finish(start_command(words, place))
    assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("dist-attn: no model at 'nowhere'")


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"RANK": "0", "WORLD_SIZE": "2"}, "torchrun has started 2 processes"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "mpiexec has started 4 processes"),
        ({"PMIX_RANK": "0"}, "mpiexec has started several processes"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "srun has started 8 processes"),
        ({"PMIX_RANK": "1", "SLURM_STEP_NUM_TASKS": "8"}, "srun has started 8 processes"),
    ],
)
def test_it_is_refused_inside_the_ranks_of_a_launcher(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], says: str
) -> None:
    """Under torchrun, mpiexec and srun one line says what has started how many, and what to do."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=f"--ranks 2 was given, and {says} already: leave --ranks out"):
        run_over_ranks(2, ["encode"])


def test_the_rank_that_failed_by_itself_is_the_reason() -> None:
    """A rank whose exchange failed because of another one is only named when no other reason is known."""
    lost, full = LastWords("an exchange failed", 1, of_others=True), LastWords("the disk is full", 2)
    assert _reason([lost, full, lost]) == full
    assert _reason([lost, lost]) == lost

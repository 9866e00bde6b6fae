"""The rank loop against a controller played by the test: order of steps, reports, heartbeats, and how it ends."""

import subprocess
import sys
import time

import numpy as np
import pytest
import zmq

from dist_attn.control.ranks import child_environment
from dist_attn.errors import ConfigError
from dist_attn.rank_link.rank_settings import RankSettings, rank_from_environment
from dist_attn.wire.messages import RowSpec, SamplingSpec
from dist_attn.wire.rank_messages import (
    CloseOp,
    DecodeEntry,
    DecodeOp,
    GuardCounts,
    Heartbeat,
    OpenOp,
    Ping,
    PrefillOp,
    RankFailed,
    RankHello,
    SaveOp,
    Shutdown,
    Step,
    StepDone,
)
from dist_attn.wire.sockets import Router, beat_identity, rank_identity
from tests.support.fake_rank import FAULT, RAISE, fake_hidden, fake_next

EPOCH = 3
RANK, BEAT = rank_identity(EPOCH, 0, "e1"), beat_identity(EPOCH, 0, "e1")


class Stage:
    """The controller's end of one rank."""

    def __init__(self, router, process):
        self.router, self.process = router, process
        self.beats = []

    def send(self, message):
        self.router.send(RANK, message)

    def next(self, kind, timeout_s=60.0):
        """The next message of this kind from the main thread; heartbeats are answered meanwhile."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.router.socket.poll(50)
            while (received := self.router.receive()) is not None:
                identity, message = received
                if isinstance(message, Heartbeat):
                    assert identity == BEAT
                    self.beats.append(message)
                    self.router.send(identity, Ping())
                elif isinstance(message, kind):
                    assert identity == RANK
                    return message
        raise TimeoutError(f"no {kind.__name__} within {timeout_s:g} s")


@pytest.fixture
def stage(request, tmp_path):
    """A fake rank that has just been started, and after how many seconds it takes the controller for dead."""
    context = zmq.Context(1)
    address = f"ipc://{tmp_path}/ranks"
    flags = [f"--controller={address}", f"--epoch={EPOCH}", "--engine=e1", "--ranks=1", "--model=fake"]
    flags += ["--heartbeat-s=0.05", f"--silence-deadline-s={getattr(request, 'param', 60)}"]
    with Router(context, address) as router:
        process = subprocess.Popen([sys.executable, "-m", "tests.support.fake_rank", *flags], env=child_environment())
        yield Stage(router, process)
        process.kill()
        process.wait(60)
    context.destroy(0)


def test_a_rank_says_hello_takes_steps_and_ends_when_told(stage):
    """Rows and drawn tokens come back with the number of their step; Shutdown ends it with code 0."""
    hello = stage.next(RankHello)
    assert (hello.epoch, hello.rank, hello.size, hello.model.name, hello.pid) == (
        EPOCH,
        0,
        1,
        "fake",
        stage.process.pid,
    )
    tokens = np.arange(700) % 900
    payload = tokens.astype("<i4").tobytes()
    stage.send(
        Step(EPOCH, 1, [OpenOp(1, RowSpec()), PrefillOp(1, 0, [700], payload), OpenOp(2, None, SamplingSpec(5))])
    )
    done = stage.next(StepDone)
    assert (done.epoch, done.k, done.rank, done.drawn) == (EPOCH, 1, 0, [])
    assert done.guards == GuardCounts(700, [[700]])
    assert (done.pieces[0].starts, done.pieces[0].stops) == ([0, 512], [512, 700])
    vectors = np.frombuffer(done.pieces[0].vectors, dtype="<f4").reshape(2, -1)
    np.testing.assert_array_equal(vectors[0], fake_hidden(tokens[:512], 0).sum(0))
    stage.send(Step(EPOCH, 2, [DecodeOp([DecodeEntry(2, 11)]), CloseOp(1)]))
    stage.send(Step(EPOCH, 3, [DecodeOp([DecodeEntry(2)])]))
    drawn = [stage.next(StepDone).drawn[0].token for _ in range(2)]
    assert drawn == [fake_next(11), fake_next(fake_next(11))]
    stage.send(Step(EPOCH, 4, []))
    assert stage.next(StepDone).k == 4
    stage.send(Shutdown(EPOCH))
    assert stage.process.wait(60) == 0


def test_what_a_request_raises_ends_it_alone(stage):
    """The step is answered with a fault in words, what follows of the request is passed over, and others go on."""
    stage.next(RankHello)
    bad, good = (np.array([token, 5], dtype="<i4").tobytes() for token in (FAULT, 4))
    ops = [OpenOp(n, RowSpec()) for n in (1, 2)]
    stage.send(Step(EPOCH, 1, [*ops, PrefillOp(1, 0, [2], bad), PrefillOp(2, 0, [2], good)]))
    done = stage.next(StepDone)
    assert [fault.request for fault in done.faults] == [1] and "asked to fail at a request" in done.faults[0].error
    assert [pieces.request for pieces in done.pieces] == [2]
    stage.send(Step(EPOCH, 2, [PrefillOp(1, 2, [2], good), SaveOp(1, 1), PrefillOp(2, 2, [2], good), CloseOp(1)]))
    done = stage.next(StepDone)
    assert (done.faults, done.saved, [pieces.request for pieces in done.pieces]) == ([], [], [2])
    stage.send(Step(EPOCH, 3, [OpenOp(1, RowSpec()), PrefillOp(1, 0, [2], good)]))
    assert [pieces.request for pieces in stage.next(StepDone).pieces] == [1]


@pytest.mark.parametrize(
    "message", [Step(EPOCH, 2, []), Step(EPOCH, 0, []), Step(EPOCH - 1, 1, []), Step(EPOCH + 1, 1, []), Ping()], ids=str
)
def test_a_rank_refuses_what_is_not_the_step_that_is_due(stage, message):
    """After a gap, a repetition or a step of another epoch its state would be wrong, so it reports and ends."""
    stage.next(RankHello)
    stage.send(message)
    assert stage.next(RankFailed).error.startswith("WireError")
    assert stage.process.wait(60) == 1


def test_an_exception_is_reported_with_its_step(stage):
    """The controller learns what happened before the process ends."""
    stage.next(RankHello)
    stage.send(Step(EPOCH, 1, []))
    payload = np.array([RAISE], dtype="<i4").tobytes()
    stage.send(Step(EPOCH, 2, [OpenOp(1, RowSpec()), PrefillOp(1, 0, [1], payload)]))
    failed = stage.next(RankFailed)
    assert (failed.k, failed.error) == (2, "RuntimeError: the fake rank was asked to fail")
    assert stage.process.wait(60) == 1


def test_a_model_that_is_not_there_is_one_line(tmp_path):
    """What a rank says about a bad model folder has no traceback around it; the controller hears the same words."""
    flags = [
        f"--controller=ipc://{tmp_path}/ranks",
        f"--epoch={EPOCH}",
        "--engine=e1",
        "--ranks=1",
        f"--model={tmp_path}/none",
    ]
    command = [sys.executable, "-m", "dist_attn.rank", *flags, "--backend=local"]
    context = zmq.Context(1)
    with (
        Router(context, f"ipc://{tmp_path}/ranks") as router,
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=child_environment()) as process,
    ):
        failed = Stage(router, process).next(RankFailed, 60.0)
        _, err = process.communicate(timeout=60)
    context.destroy(0)
    assert failed.error.startswith("ModelFolderError: no model at ")
    assert err == f"rank 0: {failed.error}\n"
    assert process.returncode == 1


def test_heartbeats_carry_phase_and_progress(stage):
    """They tell how far the rank is, and that it grows."""
    stage.next(RankHello)
    stage.send(Step(EPOCH, 1, [OpenOp(1, RowSpec()), CloseOp(1)]))
    stage.next(StepDone)
    deadline = time.monotonic() + 60
    while not stage.beats or stage.beats[-1].step_done != 1:
        assert time.monotonic() < deadline
        with pytest.raises(TimeoutError):
            stage.next(StepDone, 0.1)
    beat = stage.beats[-1]
    assert (beat.epoch, beat.rank, beat.phase, beat.progress) == (EPOCH, 0, "idle", 2)
    assert beat.peak_rss_bytes > 1 << 20


@pytest.mark.parametrize("stage", [1], indirect=True)
def test_a_rank_that_hears_nothing_ends_by_itself(stage):
    """Without an answer to its heartbeats it exits, though its main thread waits for a step."""
    stage.next(RankHello)
    assert stage.process.wait(60) == 3


@pytest.mark.parametrize(
    ("environ", "ranks", "rank"),
    [
        ({}, 1, 0),
        ({"RANK": "2", "WORLD_SIZE": "4"}, 4, 2),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, 2, 1),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, 2, 1),
        ({"PMIX_RANK": "1"}, 2, 1),
        ({"RANK": "2", "WORLD_SIZE": "4", "PMI_RANK": "0", "PMI_SIZE": "1"}, 4, 2),
    ],
)
def test_a_rank_learns_its_number_from_its_launcher(environ, ranks, rank):
    """torchrun, MPICH, Open MPI and PMIx each have a way to say it; torchrun under mpiexec counts."""
    assert rank_from_environment(environ, ranks) == rank


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [({}, 2), ({"RANK": "0", "WORLD_SIZE": "3"}, 2), ({"RANK": "2", "WORLD_SIZE": "2"}, 2), ({"RANK": "x"}, 1)],
)
def test_a_launcher_that_does_not_fit_is_refused(environ, ranks):
    """A group of another size than the controller expects never starts to work."""
    with pytest.raises(ConfigError):
        rank_from_environment(environ, ranks)


def test_bad_flags_exit_with_code_2(capsys):
    """A rank that is started by hand says what it needs."""
    with pytest.raises(SystemExit) as ended:
        RankSettings.from_flags(["--epoch=x"])
    assert ended.value.code == 2
    assert "dist_attn.rank: error" in capsys.readouterr().err

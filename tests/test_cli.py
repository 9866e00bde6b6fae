"""The command line: what it prints, where, and with which exit code; bad input is one line and never a traceback."""

import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dist_attn import __version__
from dist_attn.checkpoints import load_model
from dist_attn.commands import cli
from dist_attn.devices import ON_CPU
from dist_attn.errors import CommError
from tests.support.command_line import DEADLINE_S, SAFE_TORCHRUN, finish, run_here, start_command
from tests.support.models import write_small_folder
from tests.support.tokenisers import PROSE
from tests.support.training import small_run, write_toml

FIRST_LINE = f"{ON_CPU.sentence()}\n"
REPORT_FIELDS = [
    "tokens",
    "rows",
    "seconds",
    "tokens_per_second",
    "ranks",
    "backend",
    "peak_rss_mib",
    "carry_bytes_per_rank",
    "compute_seconds",
    "exchange_seconds",
    "text_seconds",
    "handing_seconds",
    "model",
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model, a text and a training configuration."""
    folder = tmp_path_factory.mktemp("cli")
    write_small_folder(folder / "tiny")
    (folder / "book.txt").write_bytes(3 * PROSE.encode())
    write_toml(small_run(folder), folder / "train.toml")
    return folder


@pytest.fixture
def run(place, monkeypatch, capsys):
    """The command line in this process: exit code, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        return (run_here(monkeypatch, place, *arguments), *capsys.readouterr())

    return call


def test_encode_says_what_to_do_with_a_pdf(run, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where none can be read, before a model is loaded, in one line; from a pipe its bytes are read as they are."""
    monkeypatch.setattr("dist_attn.text.documents.LIBRARY", "no_such_library")
    (place / "book.pdf").write_bytes(b"%PDF-1.7 " + b"x" * 100)
    (place / "page.txt").write_bytes(b"<html><p>It was</html>")
    for name, command in (("book.pdf", "pdftotext book.pdf book.txt"), ("page.txt", "pandoc -f html")):
        code, out, err = run("encode", name, "--model", "nowhere", "--out", "x.npy")
        assert (code, out, err.count("\n")) == (2, "", 1) and command in err and name in err
        os.mkfifo(pipe := place / f"{name}.pipe")
        writer = threading.Thread(target=pipe.write_bytes, args=((place / name).read_bytes(),))
        writer.start()
        assert run("encode", pipe.name, "--model", "tiny", "--out", "rows.npy")[0] == 0
        writer.join()


@contextlib.contextmanager
def _bounded(process: subprocess.Popen[str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is read from bit by bit, and killed at the deadline or at the end."""
    watchdog = threading.Timer(DEADLINE_S, process.kill)
    watchdog.start()
    with process:
        try:
            yield process
        finally:
            watchdog.cancel()
            process.kill()


@pytest.mark.slow
def test_ranks_of_torchrun_give_the_rows_of_one(place, run):
    """Two processes under torchrun write the rows of one process, and one report, with every field of the contract."""
    torchrun = [*SAFE_TORCHRUN, "--nproc-per-node", "2", "-m", "dist_attn"]
    arguments = ["encode", "book.txt", "--model", "tiny", "--window", "300", "--out"]
    started = start_command([*torchrun, *arguments, "two.npy", "--exchange", "log_step"], place)
    code, out, _ = run(*arguments, "one.npy")
    one = json.loads(out.splitlines()[-1])
    two_code, two_out, two_err = finish(started)
    assert (code, two_code) == (0, 0), two_err
    two = json.loads(two_out.splitlines()[-1])
    assert len(two_out.splitlines()) == 1
    assert list(one) == list(two) == REPORT_FIELDS
    assert (one["ranks"], one["backend"], two["ranks"], two["backend"]) == (1, "local", 2, "gloo")
    assert (two["tokens"], two["rows"], two["model"]) == (one["tokens"], one["rows"], "tiny")
    assert len(two["peak_rss_mib"]) == 2
    assert two["carry_bytes_per_rank"] > one["carry_bytes_per_rank"] == 0
    rows = [np.load(place / f"{name}.npy", allow_pickle=False) for name in ("one", "two")]
    assert rows[0].shape == (one["rows"], 16)
    np.testing.assert_allclose(rows[1], rows[0], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_missing_file_is_said_once_under_torchrun(place):
    """One rank of two says it in one line, and all end."""
    arguments = ["dist_attn", "encode", "nope.txt", "--out", "no.npy", "--model", "tiny"]
    code, out, err = finish(start_command([*SAFE_TORCHRUN, "--nproc-per-node", "2", "-m", *arguments], place))
    line = "dist-attn: nope.txt cannot be read: No such file or directory"
    assert code != 0
    assert out == ""
    assert [said for said in err.splitlines() if said.startswith("dist-attn: ")] == [line]
    assert not list(place.glob("*no.npy*"))


@pytest.mark.slow
def test_an_encoding_that_is_asked_to_end_leaves_nothing_behind(place):
    """SIGTERM, which torchrun sends to the ranks that are left, ends the work without half-written rows."""
    os.mkfifo(place / "endless")
    before = sorted(place.rglob("*"))
    command = ["dist_attn", "encode", "endless", "--out", "rows.npy", "--model", "tiny"]
    with _bounded(start_command(command, place)) as process, (place / "endless").open("wb", buffering=0) as text:
        text.write(b"It was the best of times")
        deadline = time.monotonic() + DEADLINE_S
        while not list(place.glob(".rows.npy.*.writing")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.terminate()
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
        assert process.stderr.read() in ("", FIRST_LINE)
    assert sorted(place.rglob("*")) == before
    (place / "endless").unlink()


@pytest.mark.slow
def test_a_reader_that_goes_away_is_no_error(place):
    """A stream that is cut off by its reader, as by `| head`, ends quietly with code 0."""
    command = ["dist_attn", "generate", "--model", "tiny", "--prompt", "It", "--max-tokens", "100000"]
    with _bounded(start_command([*command, "--temperature", "1.5", "--seed", "1"], place)) as process:
        assert process.stdout.read(10)
        process.stdout.close()
        assert process.wait(DEADLINE_S) == 0
        assert process.stderr.read() == FIRST_LINE


def test_generated_text_is_streamed_or_one_object(place, run):
    """The same seed gives the same text as a stream and as JSON, from a prompt or from a file with it."""
    (place / "prompt.txt").write_text("It was")
    drawing = ["--model", "tiny", "--max-tokens", "12", "--temperature", "1.2", "--seed", "7"]
    code, streamed, err = run("generate", "--prompt", "It was", *drawing)
    assert (code, err) == (0, FIRST_LINE)
    code, out, err = run("generate", "--prompt-file", "prompt.txt", "--json", *drawing)
    assert (code, err) == (0, FIRST_LINE)
    report = json.loads(out)
    told = ["text", "tokens", "finish_reason", "seconds", "tokens_per_second", "model", "weights", "weights_bytes"]
    assert list(report) == told
    assert streamed == report["text"] + "\n"
    assert report["tokens"] <= 12


def test_weights_are_held_as_asked(place, run):
    """`--weights` of generate and evaluate is heeded and told, and takes fewer bytes; other words are refused."""
    drawing = ["--model", "tiny", "--max-tokens", "4", "--seed", "7", "--prompt", "It was", "--json"]
    reports = [json.loads(run("generate", *drawing, "--weights", kind)[1]) for kind in ("float32", "bfloat16", "int8")]
    assert [report["weights"] for report in reports] == ["float32", "bfloat16", "int8"]
    assert len({report["weights_bytes"] for report in reports}) == 3
    scores = [json.loads(run("evaluate", "book.txt", "--model", "tiny", *w)[1]) for w in ((), ("--weights", "int8"))]
    assert [score["weights"] for score in scores] == ["float32", "int8"]
    assert scores[0]["bits_per_byte"] == pytest.approx(scores[1]["bits_per_byte"], rel=0.02)
    code, out, err = run("generate", *drawing, "--weights", "int4")
    assert (code, out, err.count("\n")) == (2, "", 1)


@pytest.mark.skipif(sys.platform != "linux", reason="asks GNU's OpenMP, which torch carries on Linux")
def test_threads_of_a_command_sleep_while_they_wait(tmp_path: Path) -> None:
    """OpenMP loads with passive waiting and the threads of the user, and a missing folder is said in one line."""
    tokens = tmp_path / "tokens.npy"
    np.save(tokens, np.arange(3))
    words = ["logits", "--model", str(tmp_path / "none"), "--tokens", str(tokens), "--out", str(tmp_path / "out.npy")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    environment |= {"OMP_DISPLAY_ENV": "verbose", "OMP_NUM_THREADS": "3"}
    done = subprocess.run(
        [sys.executable, "-m", "dist_attn", *words],
        capture_output=True,
        text=True,
        env=environment,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 2, done.stderr
    assert "GOMP_SPINCOUNT = '0'" in done.stderr and "OMP_NUM_THREADS = '3'" in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("dist-attn: ")]) == 1, done.stderr


def test_an_average_reports_what_it_found(place, run):
    """`average` makes a folder that generates."""
    code, out, err = run("average", "tiny", "--out", "averaged")
    assert (code, err, json.loads(out)["average_of"]) == (0, "", ["tiny"])
    code, text, err = run("generate", "--model", "averaged", "--prompt", "It was", "--max-tokens", "5")
    assert (code, err, bool(text)) == (0, FIRST_LINE, True)


def test_an_evaluation_is_one_line_of_json(run):
    """`evaluate` prints the fields of the contract."""
    code, out, err = run("evaluate", "book.txt", "--model", "tiny")
    assert (code, err) == (0, FIRST_LINE)
    report = json.loads(out)
    assert {"bits_per_byte", "tokens", "bytes", "seconds"} <= report.keys()
    assert 0 <= report["guarded_share"] <= 1
    assert report["bytes"] == 3 * len(PROSE.encode())
    assert report["context"] is None
    windows = json.loads(run("evaluate", "book.txt", "--context", "32", "--model", "tiny")[1])
    assert windows["context"] == 32
    assert windows["bits_per_byte"] != report["bits_per_byte"]


@pytest.mark.slow
def test_a_killed_training_goes_on(place, run):
    """A training that is killed with SIGKILL goes on with --resume, and leaves a model that loads."""
    sets = ("folder=killed", "steps=200", "log_every=1", "checkpoint_every=5")
    arguments = ["train", "train.toml", *(word for key in sets for word in ("--set", f"run.{key}"))]
    with _bounded(start_command(["dist_attn", *arguments], place)) as process:
        # First what it computes on; each step is a line, and so is the evaluation after step 4; step 6 comes after the
        # first checkpoint.
        lines = [process.stdout.readline() for _ in range(8)]
        process.send_signal(signal.SIGKILL)
        assert process.wait(DEADLINE_S) == -signal.SIGKILL
    assert lines[7].startswith("step 6  steps 200  loss ")
    assert list((place / "killed" / "checkpoints").glob("step-*"))
    assert not (place / "killed" / "model").exists()
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert "killed holds a run already; give --resume" in err
    code, out, err = run(*arguments, "--resume")
    assert (code, err) == (0, "")
    assert int(out.splitlines()[1].split()[1]) > 5
    assert load_model(place / "killed" / "model").config.hidden_size == 16


BAD = {
    "no command": ([], "which command?"),
    "unknown command": (["frobnicate"], "No such command 'frobnicate'"),
    "unknown option": (["encode", "book.txt", "--out", "x.npy", "--windo", "3"], "No such option: --windo"),
    "missing argument": (["encode", "--out", "x.npy"], "Missing argument"),
    "missing option": (["encode", "book.txt"], "Missing option '--out'"),
    "window 0": (["encode", "book.txt", "--out", "x.npy", "--window", "0"], "greater than or equal to 1"),
    "window too large": (["encode", "book.txt", "--out", "x.npy", "--window", "9" * 20], "less than or equal to"),
    "a name too long": (["encode", "n" * 300, "--out", "x.npy", "--model", "tiny"], "File name too long"),
    "rows over the text": (["encode", "book.txt", "--out", "book.txt", "--model", "tiny"], "is the text itself"),
    "granularity": (["encode", "book.txt", "--out", "x.npy", "--granularity", "word"], "'word' is not one of"),
    "missing file": (["encode", "nope.txt", "--out", "x.npy", "--model", "tiny"], "nope.txt cannot be read"),
    "empty file": (["encode", "/dev/null", "--out", "x.npy", "--model", "tiny"], "/dev/null is empty"),
    "a device": (["encode", "book.txt", "--out", "/dev/null", "--model", "tiny"], "/dev/null is a folder or a device"),
    "unknown model": (["encode", "book.txt", "--out", "x.npy", "--model", "nix"], "no model at 'nix'"),
    "no prompt": (["generate", "--model", "tiny"], "either --prompt TEXT or --prompt-file FILE"),
    "two prompts": (["generate", "--prompt", "a", "--prompt-file", "book.txt"], "either --prompt TEXT or"),
    "empty prompt": (["generate", "--prompt", "", "--model", "tiny"], "the prompt is empty"),
    "missing prompt file": (["generate", "--prompt-file", "nope.txt"], "nope.txt cannot be read"),
    "no tokens wanted": (["generate", "--prompt", "a", "--max-tokens", "0"], "max_tokens is 0"),
    "option without a name": (["generate", "--prompt", "a", "--set", "top=1"], "'top' is no option of drawing"),
    "option out of range": (["generate", "--prompt", "a", "--set", "presence_penalty=7"], "presence_penalty=7 cannot"),
    "cold": (["generate", "--prompt", "a", "--temperature", "-1"], "temperature is -1"),
    "average over itself": (["average", "tiny", "--out", "tiny"], "tiny is there already"),
    "seed in words": (["generate", "--prompt", "a", "--seed", "x"], "Invalid value for '--seed'"),
    "nothing to score": (["evaluate", "/dev/null", "--model", "tiny"], "/dev/null is empty"),
    "too short a context": (["evaluate", "book.txt", "--context", "1", "--model", "tiny"], "a context of 1 tokens"),
    "no text to score": (["evaluate", "nope.txt"], "nope.txt cannot be read"),
    "no config": (["train", "nope.toml"], "nope.toml cannot be read"),
    "config is a folder": (["train", "tiny"], "tiny cannot be read: Is a directory"),
    "bad --set": (["train", "train.toml", "--set", "run.steps"], "needs the form section.key=value"),
    "unknown key in --set": (
        ["train", "train.toml", "--set", "run.stepz=1"],
        "run.stepz: there is no such key; did you mean steps?",
    ),
    "no number of tokens": (["plan", "--tokens", "2X", "--model", "tiny"], "'2X' is not a number of tokens"),
    "a plan for nothing": (["plan", "--tokens", "0", "--model", "tiny"], "at least 1"),
    "heads that do not divide": (["mixers", "--num-heads", "3"], "must be a multiple of num_heads 3"),
    "a plan without tokens": (["plan"], "Missing option '--tokens'"),
}


@pytest.mark.parametrize("how", BAD)
def test_bad_input_is_one_line_and_code_2(place, run, how):
    """Whatever is wrong with the input, stderr has one line that says it, stdout no result, and no file appears."""
    arguments, words = BAD[how]
    before = sorted(place.rglob("*"))
    code, out, err = run(*arguments)
    assert code == 2
    assert out == "" or how == "no command"
    assert err.startswith("dist-attn: ")
    assert err.count("\n") == 1
    assert words in err
    assert sorted(place.rglob("*")) == before


def test_a_failure_of_the_work_is_one_line_and_code_1(place, run):
    """A training that blows up ends with code 1 and one line that names the step; the run can be looked at."""
    wild = ["--set", "run.folder=wild", "--set", "optimiser.learning_rate=1e25", "--set", "optimiser.kind=adamw"]
    code, _, err = run("train", "train.toml", *wild, "--set", "run.steps=20")
    assert code == 1
    assert err.startswith("dist-attn: the ")
    assert " at step " in err
    assert err.count("\n") == 1
    assert (place / "wild" / "metrics.jsonl").exists()


def test_too_little_memory_is_one_line_and_code_1(run):
    """A model that no memory holds ends with one line that says so, and no traceback."""
    huge = ["--set", "run.folder=huge", "--set", "model.mixer.num_random=1000000000000"]
    code, out, err = run("train", "train.toml", *huge)
    assert (code, out) == (1, "")
    assert err.startswith("dist-attn: there is not enough memory")
    assert err.count("\n") == 1


def test_help_names_every_command(run):
    """`--help` lists the commands with code 0, and each command explains itself with an example."""
    code, out, _ = run("--help")
    assert code == 0
    for command in (
        "encode",
        "generate",
        "evaluate",
        "train",
        "average",
        "convert",
        "serve",
        "plan",
        "top",
        "mixers",
        "doctor",
        "bench",
        "models",
        "config",
    ):
        assert command in out
        code, own, _ = run(command, "--help")
        assert code == 0
        assert f"dist-attn {command}" in own


def test_the_version_is_told(run):
    """`--version` prints the version of the package."""
    assert run("--version") == (0, f"dist-attn {__version__}\n", "")


def test_models_are_listed_with_what_they_are_for(run, tmp_path, monkeypatch):
    """`models` tells name, kind, size and purpose of what ships, the default first, or of folders."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))  # nobody has added a model there
    code, out, err = run("models", "--json")
    shipped = json.loads(out)["data"]
    assert (code, err) == (0, "")
    assert [model["name"] for model in shipped] == ["writer-12m", "books-6m", "minilm-stream"]
    assert [model["default"] for model in shipped] == [True, False, False]
    assert all(model["bytes"] > 1 << 20 and model["purpose"] for model in shipped)
    lines = run("models")[1].splitlines()
    assert lines[0].startswith("writer-12m  language_model, ") and shipped[0]["purpose"] in lines[1]
    code, out, _ = run("models", "tiny")
    assert code == 0 and out.startswith("tiny  language_model, ")
    assert run("models", "nix")[0] == 2


@pytest.mark.slow
def test_benchmarks_are_listed():
    """`bench` without a name lists benchmarks and experiments with what each asks, and runs none."""
    done = finish(start_command(["dist_attn", "bench"], Path(cli.__file__).parents[1]))
    names = [line.split(":")[0] for line in done[1].splitlines()]
    assert done[0] == 0
    assert {"forward", "backward", "mixers", "million-tokens"} <= set(names)


def test_a_plan_says_how_busy_the_machine_is(run):
    """Its times hold where nothing else runs, so the load of the last minute stands beside them."""
    notes = run("plan", "--tokens", "1000", "--model", "tiny")[1].splitlines()
    assert re.fullmatch(r"Times are for a machine that does nothing else; .* \d+\.\d processes .*", notes[-1])


def test_a_full_disk_is_one_line_with_the_path(place, run):
    """Rows that the disk has no room for end with code 2 and the file's name, and leave nothing behind."""
    before, limits = sorted(place.rglob("*")), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # a write over it fails as on a full disk
    try:
        said = run("encode", "book.txt", "--out", "x.npy", "--model", "tiny", "--granularity", "token")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    words = "File too large; make room there, or name a file elsewhere"
    assert said == (2, "", f"{FIRST_LINE}dist-attn: x.npy cannot be written: {words}\n")
    assert sorted(place.rglob("*")) == before


def test_ctrl_c_says_a_word(run, monkeypatch):
    """Work that a person interrupts ends with code 130 and one line."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("dist_attn.commands.encode_file.encode_file", interrupted)
    said = run("encode", "book.txt", "--model", "tiny", "--out", "no.npy")
    assert said == (130, "", "dist-attn: stopped by Ctrl-C; no.npy was not written\n")


def test_the_help_is_searched(run):
    """`help` finds commands, options and settings by words, a line each with tabs, and says so when nothing fits."""
    assert run("help", "no-such-word")[:2] == (2, "")
    assert "\nsetting engine.backend\t" in run("help", "gpu")[1]
    assert run("help", "How", "do", "I", "encrypt")[1] == run("help", "encrypt")[1]
    assert run("help", "encrypt")[1].startswith("dist-attn keys\t")
    _, out, _ = run("help", "Window", "tokens")
    assert "\ndist-attn encode --window\t" in f"\n{out}"
    code, out, _ = run("help", "checkpoint")
    names = [line.split("\t")[0] for line in out.splitlines()]
    assert code == 0 and names.index("dist-attn average") < names.index("dist-attn train --resume")
    assert names[-1].startswith("setting ")
    _, out, _ = run("help", "config", "show")
    assert "\tdist-attn config show --config serve.toml\n" in out


MPIEXEC = (("PMI_SIZE", "2"), ("PMI_RANK", "1"))
TORCHRUN = (("WORLD_SIZE", "2"), ("RANK", "1"))


@pytest.mark.parametrize(("size", "rank"), [TORCHRUN, MPIEXEC])
def test_work_that_is_not_shared_is_done_once(monkeypatch, capsys, size, rank):
    """Under a launcher only rank 0 generates and averages."""
    monkeypatch.setenv(*size)
    monkeypatch.setenv(*rank)
    for arguments in (["generate", "--prompt", "x"], ["average", "nowhere", "--out", "x"]):
        monkeypatch.setattr("sys.argv", ["dist-attn", *arguments])
        with pytest.raises(SystemExit) as done:
            cli.main()
        assert done.value.code == 0
        assert capsys.readouterr() == ("", "")


def test_a_lost_rank_is_reported_by_whoever_is_left(run, monkeypatch):
    """A rank other than 0 whose exchange fails says so when rank 0, which would have ended all, does not."""

    def fails(*_, **__):
        raise CommError("waited 30 s for rank 0")

    monkeypatch.setattr("dist_attn.commands.encode_file.encode_file", fails)
    monkeypatch.setattr(cli, "PATIENCE_S", 0.0)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    said = run("encode", "book.txt", "--model", "tiny", "--out", "no.npy")
    assert said == (1, "", "dist-attn: waited 30 s for rank 0\n")


def test_mpiexec_without_mpi4py_is_one_line(run, monkeypatch, place):
    """Ranks of mpiexec that find no mpi4py end with code 1 and one line that names what to install."""
    monkeypatch.setenv("PMI_SIZE", "2")
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    code, out, err = run("encode", "book.txt", "--model", "tiny", "--out", "no.npy")
    assert (code, out) == (1, "")
    assert err.count("\n") == 1
    assert err.startswith("dist-attn: back end mpi needs mpi4py")
    assert err.endswith("in the checkout, run .venv/bin/pip install -e '.[mpi]'\n")
    assert not list(place.glob("*no.npy*"))

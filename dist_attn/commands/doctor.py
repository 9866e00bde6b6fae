"""The trials of `dist-attn doctor`, each with a deadline, that tell whether the service would work on this machine."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.text import Text

from dist_attn.commands import machine
from dist_attn.commands.calibrate import calibrate
from dist_attn.commands.machine import MachineFinding, broken, unknown
from dist_attn.commands.probe import ADVICE, OPTIONAL, ProbeSettings, findings_in
from dist_attn.commands.serve import beside_default
from dist_attn.commands.tables import byte_size, stdout_console
from dist_attn.commands.trial_ranks import last_line, started, trial_command
from dist_attn.control.memory import rank_bytes, why_killed
from dist_attn.control.preflight import CHECK_S, check_engine
from dist_attn.control.settings import ControlSettings
from dist_attn.costs import read_any_costs
from dist_attn.errors import ConfigError, DistAttnError, ModelFolderError
from dist_attn.host_limits import oom_kills
from dist_attn.launchers import find_mpiexec
from dist_attn.settings import EngineSettings, Settings, read_settings
from dist_attn.shipped import origin, resolve_model_folder
from dist_attn.wire.choices import WeightPrecision

__all__ = ["doctor", "examine", "probe", "probe_mpi"]

PROBE = "dist_attn.commands.probe"
PROBE_DEADLINE_S = 60.0  # torch alone takes 20 s to load beside other work
TELL_S = 10.0  # between two words on what is waited for
QUIETER = "the machine is slow or busy: run it again when it is quieter"
USUAL_MESSAGE_BYTES = 1 << 17
STYLES = {"ok": "green", "missing": "yellow", "broken": "bold red", "unknown": "yellow"}


def doctor(config: Path | None, flags: Mapping[str, Any], *, as_json: bool, exchanges: bool = False) -> int:
    """Print what was found, one line each; 0 when `dist-attn serve` with these settings would work.

    1 when it would not, or when something that it needs did not answer in time.

    `config` and `flags` are those of `serve`, and so is the environment. With `exchanges` the
    exchanges between ranks are timed too, and ranks choose by these times from then on.
    Raises: ConfigError for settings that do not fit.
    """
    findings = examine(beside_default(read_settings(config, environment=os.environ, flags=flags)))
    if exchanges:
        findings += calibrate()
    blocking = [finding.name for finding in findings if finding.blocks]
    untold = [finding.name for finding in findings if finding.needed and finding.status == "unknown"]
    works = None if untold and not blocking else not blocking
    if as_json:
        items = [msgspec.to_builtins(finding) for finding in findings]
        print(json.dumps({"object": "doctor", "serve_works": works, "findings": items}))
    else:
        _print(findings, blocking, untold)
    return 0 if works else 1


def examine(settings: Settings, *, deadline_s: float = PROBE_DEADLINE_S) -> list[MachineFinding]:
    """Everything that was looked at, in the order in which it matters."""
    ranks = settings.engine.ranks
    problems: list[MachineFinding] = []
    folder: Path | None = None
    try:
        folder = resolve_model_folder(settings.model)
    except ModelFolderError as error:
        problems.append(broken("model", str(error), "name another with --model DIR"))
    rank_bytes, message_bytes = _needs(folder, ranks, settings.engine.weights)
    encoder, encoder_ranks, encoder_bytes = _encoder(settings) if settings.encoder.model else ([], 0, 0)
    problems += encoder
    at_once = [
        machine.check_python(),
        machine.check_libraries(),
        machine.check_cores(ranks // settings.engine.agents + encoder_ranks),
        machine.check_memory(rank_bytes, ranks, encoder_bytes),
        machine.check_disk(settings.data_dir),
        machine.check_port(settings.http.host, settings.http.port),
    ]
    # transformers looks at a downloaded folder, which has a deadline of its own.
    more_s = CHECK_S if folder is not None and origin(folder) == "downloaded" else 0.0
    tried = probe(folder, message_bytes, deadline_s + more_s)
    findings = [*at_once, *tried, *problems, probe_mpi(message_bytes, deadline_s), *machine.check_extras()]
    needed = _needed_by(settings.engine)
    findings = [_as_asked(finding, settings.engine) for finding in findings]
    return [msgspec.structs.replace(f, needed=True) if f.name in needed else f for f in findings]


def _as_asked(found: MachineFinding, engine: EngineSettings) -> MachineFinding:
    """GPUs do not work for who asks for a precision that one of them does not compute in."""
    asked = found.name == "cuda" and engine.dtype == "bfloat16" and engine.device != "cpu"
    if not asked or found.measured.get("devices") == found.measured.get("bfloat16"):
        return found
    return broken("cuda", f"{found.detail}: engine.dtype is bfloat16, which not all compute in", "take --dtype float32")


def _encoder(settings: Settings) -> tuple[list[MachineFinding], int, int]:
    """The findings on the second model, the number of its ranks, and the bytes they need beside those of the first."""
    own = settings.encoder
    try:
        folder = resolve_model_folder(own.model)
        engine = ControlSettings.of_encoder(settings)
        check_engine(folder, engine, "encoder")
    except DistAttnError as error:
        return [broken("encoder", str(error), "name another with encoder.model")], 0, 0
    rank_bytes, _ = _needs(folder, engine.ranks, engine.weights)
    takes = f", each of about {byte_size(rank_bytes)}" if rank_bytes else ""
    found = machine.ok("encoder", f"{folder}; ranks of its own: {engine.ranks}{takes}")
    return [found], engine.ranks, engine.ranks * rank_bytes


def _needed_by(engine: EngineSettings) -> tuple[str, ...]:
    """The names of the optional checks that an engine with these settings needs to pass."""
    if engine.backend == "nccl":
        return "cuda", "nccl"
    return (*(["cuda"] if engine.device.startswith("cuda") else []), *(["mpi"] if engine.backend == "mpi" else []))


def probe(folder: Path | None, message_bytes: int, deadline_s: float) -> list[MachineFinding]:
    """Try torch, gloo, speed and the model in two processes, and return their findings.

    What they did not get to is unknown where the time was over, and broken where they ended before.
    """
    with tempfile.TemporaryDirectory(prefix="dist-attn-doctor-") as private:
        ranks = [
            ProbeSettings(
                rank=rank,
                folder=private,
                model="" if folder is None else str(folder.resolve()),
                message_bytes=message_bytes,
                timeout_s=deadline_s / 2,  # so that a partner who does not come is still reported
            )
            for rank in (0, 1)
        ]
        ended, late, memory = _run(
            [trial_command(PROBE, settings) for settings in reversed(ranks)],
            Path(private),
            deadline_s,
            tell=lambda: _tell_what_is_waited_for(ranks[0]),
        )
        findings = [_with_memory(finding, memory) for finding in findings_in(ranks[0])]
    known = {finding.name for finding in findings}
    waiting = [name for name in ranks[0].checks if name not in known]
    failed = unknown if late else broken
    for name in waiting[:1]:
        advice = QUIETER if late else ADVICE.get(name, "")
        findings.append(_with_memory(failed(name, ended, advice, needed=name not in OPTIONAL), memory))
    for name in waiting[1:]:
        findings.append(failed(name, f"not tried, {waiting[0]} came first", "", needed=name not in OPTIONAL))
    return findings


def probe_mpi(message_bytes: int, deadline_s: float) -> MachineFinding:
    """MPI with a timed exchange between two ranks of mpiexec, or what it lacks."""
    finding, mpiexec = machine.check_mpi(), find_mpiexec()
    if finding.status != "ok" or mpiexec is None:
        return finding
    with tempfile.TemporaryDirectory(prefix="dist-attn-doctor-") as private:
        settings = ProbeSettings(
            rank=0, folder=private, message_bytes=message_bytes, timeout_s=deadline_s / 2, backend="mpi"
        )
        ended, late, memory = _run([[mpiexec, "-n", "2", *trial_command(PROBE, settings)]], Path(private), deadline_s)
        for exchange in findings_in(settings):
            return msgspec.structs.replace(exchange, detail=f"{finding.detail}: {exchange.detail}")
    failed, advice = (unknown, QUIETER) if late else (broken, ADVICE["mpi"])
    return _with_memory(failed("mpi", f"{finding.detail}: {ended}", advice, needed=False), memory)


def _tell_what_is_waited_for(settings: ProbeSettings) -> None:
    known = {finding.name for finding in findings_in(settings)}
    for name in [name for name in settings.checks if name not in known][:1]:
        print(f"doctor: still trying {name}", file=sys.stderr, flush=True)


def _run(
    commands: list[list[str]], private: Path, deadline_s: float, tell: Callable[[], None] = lambda: None
) -> tuple[str, bool, str]:
    """Run these until the last one in the list ends or the time is over; in words how it ended, and if it was late.

    Last what memory had to do with the end of any of them. While it lasts `tell` is called now and then.
    """
    kills_before = oom_kills()
    words = private / "stderr"
    end = time.monotonic() + deadline_s
    with started(commands, words) as processes:
        while True:
            left = end - time.monotonic()
            try:
                code = processes[-1].wait(max(0.0, min(TELL_S, left)))
                break
            except subprocess.TimeoutExpired:
                if left <= TELL_S:
                    return f"no answer within {deadline_s:g} s", True, ""
                tell()
        failed = next((process.returncode for process in processes if process.poll()), None)
        memory = why_killed(failed, kills_before, lambda: 0)
    said = last_line(words)
    return f"the process that tried it ended with code {code}" + (f": {said}" if said else ""), False, memory


def _with_memory(finding: MachineFinding, memory: str) -> MachineFinding:
    """The finding, with `memory` as its advice where it is broken and a process has ended for want of memory."""
    return msgspec.structs.replace(finding, advice=memory) if memory and finding.status == "broken" else finding


def _needs(folder: Path | None, ranks: int, weights: WeightPrecision) -> tuple[int, int]:
    """Bytes of memory a rank needs and of the state it sends; usual figures for a model without formulas."""
    if folder is not None:
        with contextlib.suppress(ConfigError):
            model = read_any_costs(folder, weights)
            return rank_bytes(folder, ranks, weights), model.carry_bytes or USUAL_MESSAGE_BYTES
    return 0, USUAL_MESSAGE_BYTES


def _print(findings: list[MachineFinding], blocking: list[str], untold: list[str]) -> None:
    console = stdout_console()
    for finding in findings:
        line = Text(finding.line())
        line.stylize(STYLES[finding.status], 0, len(finding.status))
        console.print(line, soft_wrap=True)
    if blocking:
        console.print(f"`dist-attn serve` would not work because of: {', '.join(blocking)}", soft_wrap=True)
    elif untold:
        names = ", ".join(untold)
        console.print(f"not known whether `dist-attn serve` would work: no answer in time of {names}", soft_wrap=True)
    else:
        console.print("`dist-attn serve` would work", soft_wrap=True)

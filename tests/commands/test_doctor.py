"""doctor as a whole: real processes that meet over gloo, and processes that break or never answer."""

import dataclasses
import json
import socket
import sys
from pathlib import Path

import msgspec
import pytest

from dist_attn.commands import doctor as doctor_module
from dist_attn.commands import machine, options
from dist_attn.commands.doctor import doctor, examine, probe, probe_mpi
from dist_attn.commands.machine import MachineFinding
from dist_attn.commands.probe import ProbeSettings, findings_in, run
from dist_attn.errors import ConfigError
from dist_attn.settings import Settings, read_settings
from tests.support.models import write_small_folder
from tests.support.mpi import why_no_mpi

pytestmark = pytest.mark.slow

DEADLINE_S = 90.0  # two processes that load torch, on a machine that runs other tests


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model folder."""
    return write_small_folder(tmp_path_factory.mktemp("doctor") / "tiny")


def _free_port() -> int:
    with socket.socket() as probe_socket:
        probe_socket.bind(("127.0.0.1", 0))
        return int(probe_socket.getsockname()[1])


def _settings(model: str, port: int, data_dir: Path) -> Settings:
    """What `serve` would be told."""
    flags = {"model": model, "http.port": port, "data_dir": data_dir}
    return read_settings(environment={}, flags=flags).settings


def _by_name(findings: list[MachineFinding]) -> dict[str, MachineFinding]:
    return {finding.name: finding for finding in findings}


def test_a_machine_that_works(folder: Path, tmp_path: Path) -> None:
    """Here everything that is needed is ok, with a timed exchange of the model's own state and a measured rate."""
    findings = examine(_settings(str(folder), _free_port(), tmp_path), deadline_s=DEADLINE_S)
    found = _by_name(findings)
    assert len(found) == len(findings)
    assert [f.line() for f in findings if f.blocks] == []
    assert {
        "python",
        "libraries",
        "cpu",
        "memory",
        "disk",
        "port",
        "torch",
        "gloo",
        "speed",
        "model",
        "kernels",
    } <= found.keys()
    assert {"cuda", "nccl", "mpi", "gpu", "arrow", "redis", "otel"} <= found.keys()
    assert found["gloo"].measured["message_bytes"] == 4 * 2 * (16 * (8 + 1) + 2)
    assert 0 < found["gloo"].measured["all_gather_seconds"] < 5
    assert found["speed"].measured["matmul_gflops"] > 0.1
    if why_no_mpi() is None:
        assert found["mpi"].status == "ok", found["mpi"]
        assert found["mpi"].measured.keys() == found["gloo"].measured.keys()
        assert 0 < found["mpi"].measured["all_gather_seconds"] < 5
    assert "manifest right" in found["model"].detail


def test_a_damaged_model(folder: Path, tmp_path: Path) -> None:
    """A model whose weights are not those of its manifest is broken, says so, and leaves the other checks alone."""
    damaged = write_small_folder(tmp_path / "damaged", seed=1)
    (damaged / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    settings = ProbeSettings(rank=0, ranks=1, folder=str(tmp_path), model=str(damaged), message_bytes=8)
    run(settings)  # what rank 0 does, here
    found = _by_name(findings_in(settings))
    assert {found[name].status for name in ("gloo", "speed", "kernels")} == {"ok"}
    assert found["model"].blocks
    assert "manifest" in found["model"].detail


def test_a_process_that_never_answers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """When nothing comes back in time nothing is known: neither the first check nor those after it are broken."""
    monkeypatch.setattr(sys, "executable", _program(tmp_path, "exec sleep 600"))
    found = probe(tmp_path, 8, 0.3)
    assert [finding.name for finding in found] == ["torch", "cuda", "nccl", "gloo", "model", "speed", "kernels"]
    assert {finding.status for finding in found} == {"unknown"}
    assert "no answer within 0.3 s" in found[0].detail
    assert "slow or busy" in found[0].advice
    assert found[1].detail == "not tried, torch came first"
    assert [finding.name for finding in found if finding.blocks] == []
    assert [finding.name for finding in found if finding.needed] == ["torch", "gloo", "model"]


def test_a_busy_machine_is_no_reason_to_say_that_serve_would_not_work(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What did not answer in time is named as not known, with code 1 and null in JSON; `serve` may work."""
    monkeypatch.setattr(sys, "executable", _program(tmp_path, "exec sleep 600"))
    monkeypatch.setattr(doctor_module, "probe_mpi", lambda *_: machine.check_mpi())
    monkeypatch.setattr(doctor_module, "probe", lambda folder, size, _: probe(folder, size, 0.3))
    flags = {"model": str(folder), "http.port": _free_port(), "data_dir": tmp_path / "data"}
    assert doctor(None, flags, as_json=False) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "not known whether `dist-attn serve` would work: no answer in time of torch, gloo, model"
    assert doctor(None, flags, as_json=True) == 1
    assert json.loads(capsys.readouterr().out)["serve_works"] is None


def test_a_process_that_dies(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """When the process dies the finding carries its exit code and its last words."""
    monkeypatch.setattr(sys, "executable", _program(tmp_path, "echo first >&2; echo 'no room' >&2; exit 3"))
    found = probe(None, 8, 30.0)
    assert found[0].detail == "the process that tried it ended with code 3: no room"
    assert "model" not in _by_name(found)


def test_a_process_that_is_killed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A process that ends by SIGKILL has memory for its advice, not the installation of torch."""
    monkeypatch.setattr(sys, "executable", _program(tmp_path, "kill -9 $$"))
    found = probe(None, 8, 30.0)
    assert found[0].detail == "the process that tried it ended with code -9"
    assert "out of memory" in found[0].advice and "install" not in found[0].advice


@pytest.mark.mpi
def test_an_mpi_that_does_not_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An mpiexec that fails is broken with its last words, and does not keep the service from starting."""
    monkeypatch.setattr(doctor_module, "find_mpiexec", lambda: _program(tmp_path, "echo 'no such fabric' >&2; exit 3"))
    finding = probe_mpi(8, 30.0)
    assert (finding.name, finding.status, finding.blocks) == ("mpi", "broken", False)
    assert "ended with code 3: no such fabric" in finding.detail
    assert "use gloo" in finding.advice


def test_half_a_report(tmp_path: Path) -> None:
    """A report that was cut off in a line is read up to the last whole one."""
    settings = ProbeSettings(rank=0, folder=str(tmp_path))
    assert findings_in(settings) == []
    whole = msgspec.json.encode(MachineFinding(name="torch", status="ok", detail="fine"))
    settings.report.write_bytes(whole + b"\n" + whole[:9])
    assert [finding.name for finding in findings_in(settings)] == ["torch"]


@pytest.fixture
def without_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """doctor without its two processes, as if all they try were ok."""
    names = ("torch", "nccl", "gloo", "speed", "model")
    fine = [MachineFinding(name=name, status="ok", detail="fine", needed=name != "nccl") for name in names]
    monkeypatch.setattr(doctor_module, "probe", lambda folder, *_: fine if folder else fine[:-1])
    monkeypatch.setattr(doctor_module, "probe_mpi", lambda *_: machine.check_mpi())


@pytest.mark.usefixtures("without_processes")
def test_code_0_and_one_line_each(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where serve would work the code is 0, every finding one plain line, and the last line says so."""
    flags = {"model": str(folder), "http.port": _free_port(), "data_dir": tmp_path}
    code = doctor(None, flags, as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert lines[-1] == "`dist-attn serve` would work"
    assert all(line.split()[0] in ("ok", "missing", "broken", "unknown") for line in lines[:-1])


@pytest.mark.usefixtures("without_processes")
def test_code_1_names_what_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the model and with a taken port the code is 1 and both are named, in JSON as in text."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        flags = {"model": "no such model", "http.port": listener.getsockname()[1], "data_dir": tmp_path}
        assert doctor(None, flags, as_json=False) == 1
        text = capsys.readouterr().out
        assert doctor(None, flags, as_json=True) == 1
        report = json.loads(capsys.readouterr().out)
    assert text.splitlines()[-1] == "`dist-attn serve` would not work because of: port, model"
    assert (report["object"], report["serve_works"]) == ("doctor", False)
    assert [f["name"] for f in report["findings"] if f["status"] == "broken"] == ["port", "model"]


@pytest.mark.usefixtures("without_processes")
def test_the_settings_of_serve_are_those_of_doctor(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """File, environment and flags count as for `serve`: model, place, port, ranks and back end."""
    (tmp_path / "serve.toml").write_text(f'model = "{folder}"\n[engine]\nranks = 100000\n')
    with pytest.raises(ConfigError, match=r"engine\.ranks"):
        doctor(tmp_path / "serve.toml", {}, as_json=True)
    (tmp_path / "serve.toml").write_text(f'model = "{folder}"\n[engine]\nranks = 3\nbackend = "nccl"\n')
    monkeypatch.setenv("DIST_ATTN_DATA_DIR", str(tmp_path / "of the environment"))
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert doctor(tmp_path / "serve.toml", {"http.port": port}, as_json=True) == 1
    found = {f["name"]: f for f in json.loads(capsys.readouterr().out)["findings"]}
    assert found["model"]["status"] == "ok"
    assert "each of 3 ranks needs" in found["memory"]["detail"]
    assert "of the environment" in found["disk"]["detail"]
    assert str(port) in found["port"]["detail"]
    assert found["nccl"]["needed"]


@pytest.mark.usefixtures("without_processes")
def test_a_second_model_is_looked_at_too(folder: Path, tmp_path: Path) -> None:
    """The encoder's folder is checked as `serve` would, and one that is not there is named."""
    for name, status in ((str(folder), "ok"), ("no such model", "broken")):
        flags = {"model": str(folder), "data_dir": tmp_path, "http.port": _free_port(), "encoder.model": name}
        found = _by_name(examine(read_settings(environment={}, flags=flags).settings))
        assert (found["encoder"].status, found["encoder"].blocks) == (status, status == "broken")
        assert name in found["encoder"].detail
        assert ("those of the encoder need" in found["memory"].detail) == (status == "ok")


@pytest.mark.parametrize(
    "flags", [{}, {"engine.dtype": "bfloat16"}, {"engine.dtype": "bfloat16", "engine.device": "cpu"}]
)
@pytest.mark.usefixtures("without_processes")
def test_a_gpu_without_the_precision_that_is_asked_for(
    flags: dict[str, str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 by name is refused before `serve` is started where a GPU does not compute in it; auto never is."""
    old = machine.ok("cuda", "an old GPU", devices=1, bfloat16=0)
    monkeypatch.setattr(doctor_module, "probe", lambda *_: [old])
    flags = {"model": str(folder), "data_dir": str(tmp_path), "http.port": str(_free_port()), **flags}
    found = _by_name(examine(read_settings(environment={}, flags=flags).settings))["cuda"]
    assert found.status == ("broken" if found.blocks else "ok")
    assert found.blocks == (flags.get("engine.dtype") == "bfloat16" and "engine.device" not in flags)


def test_what_takes_a_device_takes_a_precision() -> None:
    """Every command with --device has --dtype, which is auto unless it is given."""
    kinds = [kind for kind in vars(options).values() if dataclasses.is_dataclass(kind)]
    with_device = [kind for kind in kinds if "device" in {field.name for field in dataclasses.fields(kind)}]
    assert len(with_device) > 4
    for kind in with_device:
        (dtype,) = (field for field in dataclasses.fields(kind) if field.name == "dtype")
        assert dtype.default in ("auto", None), kind  # None: as the settings have it
    assert Settings().engine.dtype == "auto"


@pytest.mark.usefixtures("without_processes")
def test_a_model_without_formulas_is_still_tried(tmp_path: Path) -> None:
    """A model whose costs are not known is tried all the same, without a figure for its memory."""
    (tmp_path / "config.json").write_text("{}")
    found = _by_name(examine(_settings(str(tmp_path), _free_port(), tmp_path)))
    assert found["model"].status == "ok"
    assert "needs" not in found["memory"].detail


def _program(folder: Path, script: str) -> str:
    """A program that ignores its arguments and runs this shell script."""
    path = folder / "program"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)

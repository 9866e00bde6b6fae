"""What keeps a service from working is found before anything is started."""

import json
import re
import socket
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from dist_attn.control import preflight
from dist_attn.control.preflight import check_api, check_before_start
from dist_attn.errors import ConfigError, MissingExtraError, ModelFolderError
from dist_attn.settings import EngineSettings, Settings
from dist_attn.wire.curve import make_keys
from tests.support.models import write_small_folder


@pytest.fixture
def fields(tmp_path):
    """Arguments that are in order; the port is free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    folder = write_small_folder(tmp_path / "tiny")
    return {
        "folder": folder,
        "host": "127.0.0.1",
        "port": port,
        "data_dir": tmp_path / "new" / "data",
        "engine": EngineSettings(),
    }


def test_what_is_in_order_passes(fields):
    """Nothing is raised, the data folder exists afterwards, is its owner's alone, and is empty."""
    check_before_start(**fields)
    assert [path.stat().st_mode & 0o777 for path in (fields["data_dir"], fields["data_dir"].parent)] == [0o700, 0o700]
    assert list(fields["data_dir"].iterdir()) == []


def test_a_port_that_is_taken(fields):
    """The address and what to do are named."""
    with socket.create_server(("127.0.0.1", fields["port"])), pytest.raises(ConfigError, match="in use; choose"):
        check_before_start(**fields)


@pytest.mark.parametrize("host", ["300.1.1.1", "h" * 64])
def test_a_host_that_is_not_there(fields, host):
    """An address that cannot be listened on is named, also where it can be no address at all."""
    with pytest.raises(ConfigError, match=f"cannot listen on {re.escape(host)}:"):
        check_before_start(**{**fields, "host": host})


def test_a_back_end_that_is_not_installed(fields, monkeypatch):
    """Without mpi4py the extra that brings it is named; gloo does not ask for it."""
    monkeypatch.setattr(preflight, "lacks_for_mpi", lambda: ["mpi4py", "mpiexec"])
    check_before_start(**fields | {"engine": EngineSettings(backend="gloo")})
    with pytest.raises(
        MissingExtraError, match=r"needs mpi4py and mpiexec: in the checkout, run .venv/bin/pip install -e '\.\[mpi\]'"
    ):
        check_before_start(**fields | {"engine": EngineSettings(backend="mpi")})


@pytest.mark.parametrize("place", ["file", "file/below", "/proc/nowhere", "zero\0byte"])
def test_a_data_folder_that_cannot_be_written_to(fields, tmp_path, place):
    """The folder and what to do are named."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot hold data: .*; choose a folder"):
        check_before_start(**{**fields, "data_dir": tmp_path / place})


@pytest.mark.parametrize("setting", ["api_keys_file", "admin_keys_file"])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read: No such file"),
        ("# none yet", "holds no key; write one"),
        ("two words", "key 1 in .* holds a space"),
    ],
)
def test_a_file_of_keys_that_cannot_be_used(tmp_path, setting, text, words):
    """The file is named before anything is started; one that can be used is no obstacle."""
    file = tmp_path / "keys"
    settings = Settings(http={setting: file})
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        check_api(settings)
    file.write_text("one\n# a comment\ntwo\n")
    check_api(settings)


@pytest.mark.parametrize("role", ["api", "agent"])
def test_keys_between_processes_that_are_not_there(tmp_path, role):
    """The file that the controller's socket needs is named before the controller is started."""
    address = {"api": "api_address", "agent": "rank_address"}[role]
    settings = Settings(engine={"keys_dir": str(tmp_path), address: "tcp://127.0.0.1:9"})
    with pytest.raises(ConfigError, match=rf"has no {role}\*.public, so nobody could connect"):
        check_api(settings)
    make_keys(tmp_path)
    check_api(settings)


@pytest.mark.parametrize("place", ["store.address", "store.blobs", "jobs.address", "files.catalogue"])
def test_a_package_for_redis_that_is_not_installed(place, monkeypatch):
    """The extra that brings it is named before anything is started; with it, no server is asked."""
    section, name = place.split(".")
    settings = Settings(**{section: {name: "redis://user:secret@127.0.0.1:9/0"}})
    check_api(settings)
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(MissingExtraError, match=r"needs redis-py: .*\[redis\]") as refused:
        check_api(settings)
    assert "secret" not in str(refused.value)


def test_packages_for_spans_that_are_not_installed(monkeypatch):
    """The extra that brings them is named before anything is started."""
    settings = Settings(tracing={"endpoint": "http://127.0.0.1:9/v1/traces"})
    check_api(settings)
    monkeypatch.setattr(preflight, "SPANS", ("opentelemetry.sdk", "opentelemetry.no.such.part"))
    with pytest.raises(MissingExtraError, match=r"tracing\.endpoint is set.*\[otel\]"):
        check_api(settings)


def test_a_place_that_no_store_can_be_at():
    """An address of no known kind is named."""
    with pytest.raises(ConfigError, match="'ftp://here' was given to keep data at"):
        check_api(Settings(store={"address": "ftp://here"}))


def _spoil_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, "num_layers": 3}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "model.safetensors").write_bytes(b"short"), "safetensors has sha256 .* damaged"),
        (lambda folder: (folder / "model.safetensors").unlink(), "has no model.safetensors"),
        (lambda folder: (folder / "tokenizer.json").write_text("{"), "tokenizer.json is not JSON"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "is not a manifest"),
        (_spoil_config, "config.json has sha256 .* mixed or damaged"),
    ],
)
def test_a_model_folder_that_is_damaged(fields, spoil, words):
    """The file is named."""
    spoil(fields["folder"])
    with pytest.raises(ModelFolderError, match=words):
        check_before_start(**fields)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_layers": None}, r"config.json: num_layers: "),
        ({"num_layers": 0}, r"config.json: num_layers: "),
        ({"vocab_size": "many"}, r"config.json: vocab_size: "),
        ({"n_layer": 2}, r"config.json: n_layer: there is no such key"),
        ({"mixer": {"kind": "rfa_gates"}}, r"config.json.*rfa_gates"),
    ],
)
def test_a_configuration_that_describes_no_model(fields, changes, words):
    """The file and the key are named before anything is started."""
    path = fields["folder"] / "config.json"
    path.write_text(json.dumps(json.loads(path.read_bytes()) | changes))
    (fields["folder"] / "manifest.json").unlink()
    with pytest.raises(ConfigError, match=words):
        check_before_start(**fields)


@pytest.mark.parametrize("kind", ["text_encoder", "million"])
def test_weights_in_a_precision_that_the_kind_of_model_does_not_have(fields, kind):
    """The setting, the folder and its kind are named before anything is started; float32 is no obstacle."""
    config = json.loads((fields["folder"] / "config.json").read_bytes())
    (fields["folder"] / "config.json").write_text(json.dumps({**config, "kind": kind}))
    (fields["folder"] / "manifest.json").unlink()
    check_before_start(**fields | {"engine": EngineSettings(weights="float32")})
    with pytest.raises(ConfigError, match=f"engine.weights is int8, and .* holds a {kind}; .* set it to float32"):
        check_before_start(**fields | {"engine": EngineSettings(weights="int8")})


def test_a_language_model_may_hold_its_weights_in_fewer_bits(fields):
    """Nothing is raised."""
    check_before_start(**fields | {"engine": EngineSettings(weights="int8")})


@pytest.mark.parametrize(
    ("gpus", "asked", "says"),
    [
        (0, {}, None),
        (0, {"device": "cuda"}, "engine.device is cuda, and this machine shows no driver"),
        (0, {"backend": "nccl"}, "engine.backend is nccl, and this machine shows no driver"),
        (1, {"device": "cpu", "backend": "nccl"}, "which is for GPUs, and engine.device is cpu"),
        (0, {"ranks": 4}, None),
        (2, {"device": "cuda", "ranks": 2}, None),
        (2, {"device": "cuda", "ranks": 4}, "engine.ranks is 4, and there are 2 GPUs: take as many ranks"),
        (1, {"device": "cuda:0", "ranks": 4}, None),
    ],
)
def test_gpus_that_are_not_there_are_refused(gpus, asked, says, tmp_path, monkeypatch):
    """Before anything is started, and without loading torch."""
    driver = tmp_path / "nvidiactl"
    if gpus:
        driver.touch()
    monkeypatch.setattr(preflight, "GPU_DRIVERS", (driver,))
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(gpus)))}
    with nullcontext() if says is None else pytest.raises(ConfigError, match=says):
        preflight.check_gpus(EngineSettings(**asked), visible)

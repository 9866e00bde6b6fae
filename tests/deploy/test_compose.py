"""docker-compose.yml: valid, and as closed as docs/how-to/compose.md and docs/how-to/secure.md say."""

import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from dist_attn.shipped import DEFAULT_ENCODER, resolve_model_folder
from tests.support.dockerfile import Image, read_dockerfile
from tests.support.stores import started_redis, why_no_redis
from tests.support.waiting import eventually

if TYPE_CHECKING:
    import redis

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker-compose.yml"
COMPOSE: dict[str, Any] = yaml.safe_load(FILE.read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
BUILT = [name for name, service in SERVICES.items() if "build" in service]
OWN = [name for name in BUILT if name != "keys"]


def image_of(service: str) -> Image:
    """The image that a service of ours is built from."""
    return read_dockerfile(ROOT / SERVICES[service]["build"]["dockerfile"])


def test_the_schema_accepts_it() -> None:
    """It is a compose file by the schema of the compose specification."""
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(FILE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_parts_are_there() -> None:
    """API, engine with four ranks, its like on GPUs and for vectors, their keys, Redis, Prometheus and Grafana."""
    assert set(SERVICES) == {"keys", "api", "encoder", "engine", "engine-gpu", "redis", "prometheus", "grafana"}
    assert "--ranks=${RANKS:-4}" in SERVICES["engine"]["command"]


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_closed(name: str) -> None:
    """Read-only root, no capabilities, no new privileges, a pinned image, a health check, bounded logs."""
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "privileged" not in service
    assert service["logging"]["options"]["max-size"]
    if name in BUILT:
        assert image_of(name).health_command
    else:
        assert re.search(r":v?\d+\.\d+\.\d+", service["image"])
        assert service["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("name", SERVICES)
def test_every_volume_is_declared_or_in_the_repository(name: str) -> None:
    """A mount is a named volume, or a file of the repository that can only be read."""
    for mount in SERVICES[name].get("volumes", []):
        source = mount.split(":")[0]
        if source.startswith("."):
            assert (ROOT / source).exists(), mount
            assert mount.endswith(":ro"), mount
        else:
            assert source in COMPOSE["volumes"], mount


@pytest.mark.parametrize("name", SERVICES)
def test_ports_are_open_on_this_machine_only(name: str) -> None:
    """A published port is bound to the loopback address."""
    assert all(port.startswith("127.0.0.1:") for port in SERVICES[name].get("ports", []))


def test_engine_and_redis_cannot_be_reached_from_outside() -> None:
    """Neither publishes a port, and each is only on networks without a way out."""
    for name in ("encoder", "engine", "engine-gpu", "redis"):
        assert "ports" not in SERVICES[name]
        assert all(COMPOSE["networks"][network].get("internal") for network in SERVICES[name]["networks"])


def test_addresses_fit_together() -> None:
    """The API asks for the engine where it listens, on a network that both are on, with the same model."""
    flags = {name: dict(word.split("=", 1) for word in SERVICES[name]["command"]) for name in OWN}
    host, port = flags["api"]["--api-address"].removeprefix("tcp://${ENGINE:-").split("}:")
    for engine in (host, "engine-gpu"):
        assert flags[engine]["--api-address"] == f"tcp://0.0.0.0:{port}"
        assert set(SERVICES[engine]["networks"]) & set(SERVICES["api"]["networks"])
        assert flags[engine]["--model"] == flags["api"]["--model"]
    values = SERVICES["api"]["environment"]
    encoder = values["DIST_ATTN_ENCODER__MODEL"].removeprefix("${ENCODER-").removesuffix("}")
    assert values["DIST_ATTN_ENCODER__API_ADDRESS"] == f"tcp://encoder:{port}"
    assert flags["encoder"]["--api-address"] == f"tcp://0.0.0.0:{port}"
    assert flags["encoder"]["--model"] == f"${{ENCODER:-{encoder}}}" and resolve_model_folder(encoder).is_dir()
    assert encoder == DEFAULT_ENCODER and set(SERVICES["encoder"]["networks"]) & set(SERVICES["api"]["networks"])
    assert set(SERVICES["redis"]["networks"]) & set(SERVICES["api"]["networks"])
    assert "DIST_ATTN_STORE__ADDRESS" in SERVICES["api"]["environment"]


def test_engine_and_api_have_one_store() -> None:
    """The states of sessions lie in the API's volume, or in the Redis that it uses too; both networks lead there."""
    api, engine = SERVICES["api"], SERVICES["engine"]
    named, folder = engine["environment"]["DIST_ATTN_STORE__ADDRESS"].split(":-")
    assert api["environment"]["DIST_ATTN_STORE__ADDRESS"].split(":-")[0] == named
    assert "api-data:/data" in api["volumes"] and "--data-dir=/data" in api["command"]
    assert folder == "/shared/states}" and "api-data:/shared" in engine["volumes"]
    assert "state" in engine["networks"]
    encoder = SERVICES["encoder"]  # keeps none, and reaches none
    assert not encoder["environment"] and encoder["networks"] == ["engine"] and "/shared" not in str(encoder["volumes"])
    for image in ("engine", "engine-gpu"):
        assert "/shared" in image_of(image).last("RUN")


def test_the_engine_on_gpus_is_the_engine_with_devices() -> None:
    """It starts when it is asked for, has the host's GPUs and room for NCCL, and is else what the one on CPUs is."""
    cpu, gpu = SERVICES["engine"], SERVICES["engine-gpu"]
    (devices,) = gpu["deploy"]["resources"]["reservations"]["devices"]
    assert (devices["driver"], devices["capabilities"]) == ("nvidia", ["gpu"])
    assert gpu["profiles"] == ["gpu"] and "profiles" not in cpu
    own = {"profiles", "image", "build", "command", "shm_size", "deploy"}
    assert {key: value for key, value in gpu.items() if key not in own} == {
        key: value for key, value in cpu.items() if key not in own
    }


def test_redis_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    """With the flags of the compose file, what Redis has answered is there after a kill, and every write is synced."""
    if problem := why_no_redis():
        pytest.skip(problem)
    import redis

    _, *flags = SERVICES["redis"]["command"]
    place = str(tmp_path)  # of the volume
    command = [*(place if flag == "/data" else flag for flag in flags), "--dir", place]
    with started_redis(*command) as (address, process), redis.Redis.from_url(address) as client:
        client.set("session", "position 7")
        process.kill()
        process.wait()
    with started_redis(*command) as (address, _), redis.Redis.from_url(address) as client:
        eventually(lambda: answers(client), "the log to be read", 60)
        assert client.get("session") == b"position 7"
    assert flags[flags.index("--appendfsync") + 1] == "always"
    assert flags[flags.index("--dir") + 1] == "/data" and "redis-data:/data" in SERVICES["redis"]["volumes"]


def answers(client: "redis.Redis") -> bool:
    """Whether Redis has read its log."""
    import redis

    try:
        return bool(client.ping())
    except redis.BusyLoadingError:
        return False


@pytest.mark.parametrize("name", OWN)
def test_the_commands_are_those_of_the_images(name: str) -> None:
    """A service gives the flags that its image gives, so that what is tested of one holds for the other."""
    given = [word.split("=")[0] for word in SERVICES[name]["command"]]
    assert given == [word.split("=")[0] for word in image_of(name).command if word.startswith("--")]


def test_api_and_engine_wait_for_their_keys() -> None:
    """One container without a network writes them once where both images look for them; both may only read them."""
    maker = SERVICES["keys"]
    assert (maker["network_mode"], maker["restart"], maker["command"]) == ("none", "no", ["/keys"])
    for name in OWN:
        assert SERVICES[name]["depends_on"]["keys"] == {"condition": "service_completed_successfully"}
        assert "keys:/keys:ro" in SERVICES[name]["volumes"]
        assert image_of(name).environment["DIST_ATTN_ENGINE__KEYS_DIR"] == "/keys"

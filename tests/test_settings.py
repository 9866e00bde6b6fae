"""The settings tree: which source wins, what is refused and how it is said, and that the parts are fed from it."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from dist_attn_service.app import FAREWELL_SECONDS
from dist_attn_service.base.settings import Settings as ServiceSettings
from pydantic import ValidationError

from dist_attn.commands.serve import api_stop_deadline_s
from dist_attn.control.settings import ControlSettings
from dist_attn.errors import ConfigError
from dist_attn.settings import (
    FileSettings,
    Resolved,
    Settings,
    StoreSettings,
    WaitSettings,
    read_settings,
    settings_keys,
    settings_words,
    user_data_folder,
)
from dist_attn.store import StoreLimits

HASH = "ab" * 32


def read(folder: Path, toml: str = "", flags: dict[str, Any] | None = None, **environment: str) -> Resolved:
    """The settings from a file with this text, these variables and flags."""
    file = folder / "serve.toml"
    file.write_text(toml)
    return read_settings(file, environment=environment, flags=flags)


def origins(resolved: Resolved) -> dict[str, tuple[Any, str]]:
    """Value and origin of every setting that is not a default."""
    return {key: (value, origin) for key, value, origin in resolved.rows() if origin != "default"}


def test_the_later_source_wins_and_is_named(tmp_path: Path) -> None:
    """A flag beats the environment, which beats the file, which beats the default; each value knows its source."""
    toml = 'model = "a"\n[http]\nport = 1\nhost = "x"\n[waits]\nping_seconds = 2\n'
    resolved = read(
        tmp_path, toml, {"http.port": 3, "model": None}, DIST_ATTN_HTTP__PORT="2", DIST_ATTN_WAITS__PING_SECONDS="4.5"
    )
    assert origins(resolved) == {
        "model": ("a", f"file {tmp_path / 'serve.toml'}"),
        "http.host": ("x", f"file {tmp_path / 'serve.toml'}"),
        "http.port": (3, "flag --port"),
        "waits.ping_seconds": (4.5, "environment DIST_ATTN_WAITS__PING_SECONDS"),
    }
    assert resolved.settings.http.port == 3
    assert resolved.settings.limits == Settings().limits


@pytest.mark.parametrize(
    ("platform", "environment", "folder"),
    [
        ("linux", {"HOME": "/home/ann"}, "/home/ann/.local/share/dist-attn"),
        ("linux", {"HOME": "/home/ann", "XDG_DATA_HOME": "/big"}, "/big/dist-attn"),
        ("darwin", {"HOME": "/Users/ann"}, "/Users/ann/Library/Application Support/dist-attn"),
        ("linux", {"HOME": "nowhere"}, "data"),
    ],
)
def test_data_is_kept_with_the_users_other_data(platform: str, environment: dict[str, str], folder: str) -> None:
    """The default data folder is the same wherever the command is started, as each system has it."""
    assert user_data_folder(environment, platform) == Path(folder)


def test_the_default_data_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no source sets is looked up when the settings are read."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    if sys.platform != "darwin":
        assert read_settings(environment={}).settings.data_dir == tmp_path / "dist-attn"


def test_a_variable_may_name_the_file(tmp_path: Path) -> None:
    """DIST_ATTN_CONFIG is read when no file is given by flag, and only then."""
    (tmp_path / "a.toml").write_text("[engine]\nranks = 4\n")
    (tmp_path / "b.toml").write_text("[engine]\nranks = 2\n")
    environment = {"DIST_ATTN_CONFIG": str(tmp_path / "a.toml")}
    assert read_settings(environment=environment).settings.engine.ranks == 4
    assert read_settings(tmp_path / "b.toml", environment=environment).settings.engine.ranks == 2
    assert read_settings(environment={}).settings == Settings()


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[http]\nprot = 1\n", ["http.prot", "serve.toml", "http.port"]),
        ("ranks = 2\n", ["ranks", "engine.ranks"]),
        ("[htp]\n", ["[htp]", "http"]),
        ("http = 3\n", ["http", "no setting"]),
        ("[http.tls]\nport = 1\n", ["http.tls"]),
        ("[http\n", ["TOML", "line 1"]),
        ("[http]\nport = 99999\n", ["http.port", "file", "99999", "65535"]),
        ('[http]\nport = "many"\n', ["http.port", "'many'", "integer"]),
        ("[waits]\nping_seconds = nan\n", ["waits.ping_seconds", "nan"]),
        ('[engine]\nbackend = "carrier-pigeon"\n', ["engine.backend", "carrier-pigeon", "gloo"]),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, toml: str, words: list[str]) -> None:
    """Unknown keys and sections, broken TOML and values out of range are refused with key, file and what would do."""
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, toml)
    assert all(word in str(refused.value) for word in words), refused.value
    assert "\n" not in str(refused.value)


def test_a_misspelt_variable_is_refused(tmp_path: Path) -> None:
    """Every DIST_ATTN_ variable must be a setting, but for those that Kubernetes puts beside its services."""
    for name in ("DIST_ATTN_HTTP__PROT", "DIST_ATTN_RANKS", "DIST_ATTN_SERVICE_MAX_TOKENS"):
        with pytest.raises(ConfigError, match=name):
            read(tmp_path, "", **{name: "1"})
    links = {
        "DIST_ATTN_API_SERVICE_HOST": "10.0.0.1",
        "DIST_ATTN_API_SERVICE_PORT_HTTP": "8000",
        "DIST_ATTN_PORT": "tcp://10.0.0.1:8000",
        "DIST_ATTN_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert origins(read(tmp_path, "", **links)) == {}


def test_keys_are_hashes_and_never_shown(tmp_path: Path) -> None:
    """A key that stands there by itself is refused without being repeated; of hashes only the number is shown."""
    with pytest.raises(ConfigError, match="sha256sum") as refused:
        read(tmp_path, '[http]\napi_keys = ["hunter2"]\n')
    assert "hunter2" not in str(refused.value)
    resolved = read(tmp_path, "", DIST_ATTN_HTTP__API_KEYS=f"{HASH}, {HASH.upper()}")
    assert resolved.settings.http.api_keys == (HASH, HASH)
    assert origins(resolved)["http.api_keys"][0] == "2 keys"
    assert HASH not in repr(resolved)


def test_a_missing_file_is_said(tmp_path: Path) -> None:
    """A configuration that cannot be read is named with the reason."""
    with pytest.raises(ConfigError, match=r"nope\.toml cannot be read: No such file"):
        read_settings(tmp_path / "nope.toml", environment={})


def test_the_tree_is_frozen() -> None:
    """No value of the tree can be set once it is read."""
    with pytest.raises(ValidationError, match="frozen"):
        Settings().http.port = 5  # type: ignore[misc]


def test_every_key_is_described() -> None:
    """No key of the tree is without words, which `config show`, `help` and the reference print."""
    assert settings_words() and all(settings_words().values())


def test_weights_are_held_in_a_precision_that_there_is(tmp_path: Path) -> None:
    """A flag of `serve` wins over the file, the controller gets it, and another word is refused with what there is."""
    settings = read(tmp_path, '[engine]\nweights = "bfloat16"\n', {"engine.weights": "int8"}).settings
    assert settings.engine.weights == "int8"
    assert (
        read(tmp_path, '[engine]\nweights = "bfloat16"\n', {"engine.weights": None}).settings.engine.weights
        == "bfloat16"
    )
    assert ControlSettings.of(settings, model="m").weights == "int8"
    with pytest.raises(
        ConfigError, match=r"engine.weights .* is 'int4': input should be 'float32', 'bfloat16' or 'int8'"
    ):
        read(tmp_path, '[engine]\nweights = "int4"\n')


def test_the_encoders_controller_is_on_this_host(tmp_path: Path) -> None:
    """It has ranks, weights and a folder of its own and no other hosts; all else is as in [engine]."""
    engine = 'ranks = 4\nagents = 2\nrank_address = "tcp://127.0.0.1:1"\nweights = "int8"\nblock_tokens = 1024\n'
    toml = f'[engine]\n{engine}[encoder]\nmodel = "minilm-stream"\nranks = 2\n'
    tree = read(tmp_path, toml, {"data_dir": "d"}).settings
    own, shared = ControlSettings.of_encoder(tree), ControlSettings.of(tree, model="m")
    assert (Path(own.model).name, own.ranks, own.weights, own.data_dir) == (
        "minilm-stream", 2, "float32", str(Path("d/encoder")),
    )  # fmt: skip
    assert (own.agents, own.local_agent, own.rank_address, own.api_address) == (1, True, "", "")
    assert own.store_address == shared.store_address == str(Path("d/states"))
    others = ("model", "ranks", "weights", "data_dir", "agents", "local_agent", "rank_address", "api_address", "store")
    assert own.model_dump(exclude=set(others)) == shared.model_dump(exclude=set(others))


def test_the_store_gets_its_part() -> None:
    """The [store] section has the names and defaults of the store's limits, so neither can drift; "" is a folder."""
    limits = {field.name: field.default for field in msgspec.structs.fields(StoreLimits)}
    store = {name: field.default for name, field in StoreSettings.model_fields.items()}
    assert (store.pop("address"), store.pop("blobs"), store.pop("upkeep_s")) == ("", "", 60)
    assert {**store, "grace_s": WaitSettings().expired_seconds} == limits
    own = ServiceSettings(api_address="ipc:///x", model=Path("m"), data_dir=Path("d"))
    assert own.store_address == "d/states" and own.store_limits == StoreLimits()
    there = ServiceSettings.of(Settings(model="m", engine={"api_address": "x"}, store={"address": "redis://h"}))
    assert there.store_address == "redis://h"


def test_a_password_of_the_store_is_not_shown(tmp_path: Path) -> None:
    """What `config show` prints of the store's addresses is without the password that may stand in them."""
    toml = '[store]\naddress = "redis://me:word@host/0"\nblobs = "redis://me:word@host/1"'
    shown = {key: value for key, value, _ in read(tmp_path, toml).rows()}
    assert (shown["store.address"], shown["store.blobs"]) == ("redis://…@host/0", "redis://…@host/1")


def test_the_api_gets_its_part(tmp_path: Path) -> None:
    """But for sections that it takes whole every key of the tree is its own, and so is the controller."""
    toml = 'model = "m"\n[engine]\napi_address = "ipc:///x"\n[http]\nport = 9\n[limits]\nmax_tokens = 7\n'
    settings = ServiceSettings.of(read(tmp_path, toml).settings)
    assert (settings.port, settings.max_tokens, settings.api_address, settings.model) == (9, 7, "ipc:///x", Path("m"))
    nested = ("engine.", "encoder.", "store.", "prefixes.", "tracing.", "jobs.", "files.")
    names = {key.rpartition(".")[2] for key in settings_keys() if not key.startswith(nested)}
    own = {"api_address", "keys_dir", "insecure_network", "encoder", "store", "prefixes", "tracing", "jobs", "files"}
    assert set(ServiceSettings.model_fields) == names | own
    assert ServiceSettings.of(Settings(model="m", engine={"api_address": "x"}, jobs={"at_once": 7})).jobs.at_once == 7
    with pytest.raises(ConfigError, match="--api-address"):
        ServiceSettings.of(Settings(model="m"))


def test_serve_waits_as_long_as_the_api_may_take_to_stop(tmp_path: Path) -> None:
    """Whatever waits.shutdown_seconds says, `serve` gives the API that time and its farewell before it kills it."""
    for seconds in (1, 10, 600):
        settings = read(tmp_path, f"[waits]\nshutdown_seconds = {seconds}\n").settings
        assert api_stop_deadline_s(settings) > seconds + FAREWELL_SECONDS


def test_the_folder_of_files_is_in_the_data(tmp_path: Path) -> None:
    """Files lie in data_dir unless [files] names a folder, and a password in its catalogue's address is not shown."""
    toml = 'model = "m"\n[engine]\napi_address = "x"\n[files]\ncatalogue = "redis://me:word@host/0"\nfile_s = 0\n'
    read_tree = read(tmp_path, toml)
    own = ServiceSettings.of(read_tree.settings)
    assert own.files_folder == own.data_dir / "files" and own.files.file_s == 0
    elsewhere = own.model_copy(update={"files": FileSettings(folder="/srv/files")})
    assert elsewhere.files_folder == Path("/srv/files")
    assert {key: value for key, value, _ in read_tree.rows()}["files.catalogue"] == "redis://…@host/0"

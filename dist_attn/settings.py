"""Every value an operator may set, as one frozen tree: defaults, a TOML file, the environment, flags; the later win.

    model, data_dir, log_level, log_format
    [http]     where the API listens, and the keys it asks for
    [limits]   how much one request, and all of them together, may take
    [work]     how work is cut
    [waits]    how long the API waits for whom
    [files]    where files that clients upload are kept, and how much of them
    [engine]   the ranks, and what the controller takes on
    [store]    where states of sessions are kept, and how much of them
    [prefixes] whether states of prompts are kept there too, so that the same beginning is read once
    [tracing]  where spans of OpenTelemetry are sent
    [jobs]     work that outlives its connection, and when work becomes that

In the environment `http.port` is DIST_ATTN_HTTP__PORT. A key that is not of the tree is refused, wherever it stands.
"""

import difflib
import os
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from dist_attn.errors import ConfigError
from dist_attn.log_lines import LogFormat
from dist_attn.wire.weights import WeightPrecision

__all__ = [
    "EngineSettings",
    "FileSettings",
    "HttpSettings",
    "JobSettings",
    "LimitSettings",
    "PrefixSettings",
    "Resolved",
    "Settings",
    "StoreSettings",
    "WaitSettings",
    "WorkSettings",
    "read_settings",
    "settings_keys",
    "settings_words",
    "user_data_folder",
]

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PREFIX = "DIST_ATTN_"
CONFIG_VARIABLE = "DIST_ATTN_CONFIG"
CLIENT_VARIABLES = {"DIST_ATTN_API_KEY"}  # what commands with --url send; no setting of a service
# Kubernetes puts such names into every container beside a Service that is called dist-attn-something.
_SERVICE_LINK = re.compile(r".*(_SERVICE_HOST|_SERVICE_PORT(_[A-Z0-9_]+)?|_PORT(_\d+_(TCP|UDP)(_[A-Z]+)?)?)")


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _words(value: Any) -> Any:
    """In the environment a list is its items with commas between them."""
    return [word.strip() for word in value.split(",") if word.strip()] if isinstance(value, str) else value


def _is_hash(value: str) -> str:
    if not re.fullmatch(r"[0-9a-f]{64}", value.lower()):
        raise ValueError("a key is given by its SHA-256 in hex: printf %s YOUR-KEY | sha256sum")
    return value.lower()


KeyHashes = Annotated[tuple[Annotated[str, AfterValidator(_is_hash)], ...], BeforeValidator(_words)]
Names = Annotated[
    tuple[Annotated[str, Field(min_length=1, max_length=256, pattern=r"^[\x21-\x7e]*$")], ...], BeforeValidator(_words)
]
Bytes = Annotated[int, Field(gt=0)]
Number = Annotated[int, Field(gt=0)]
Seconds = Annotated[float, Field(gt=0)]


class HttpSettings(_Section):
    """Where the API listens, and the keys it asks for; without any key it is open to whoever reaches it."""

    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 takes any free one")
    api_keys: KeyHashes = Field(default=(), repr=False, description="SHA-256 in hex of each bearer key")
    api_keys_file: Path | None = Field(default=None, description="file with one key per line, as clients send it")
    admin_keys: KeyHashes = Field(default=(), repr=False, description="likewise, of those that may see everything")
    admin_keys_file: Path | None = Field(default=None, description="file with one admin key per line")
    allowed_hosts: Names = Field(
        default=(),
        description="names that requests may have in Host while no key is asked for, beside addresses, localhost, "
        "http.host and this machine's name",
    )
    served_model_name: Names = Field(
        default=(), description="names that the model answers to in place of its folder's; the first stands in answers"
    )


class LimitSettings(_Section):
    """How much one request may take, and all of them together. Units: `*_bytes` in bytes."""

    request_head_bytes: Bytes = 64 * KIB
    json_body_bytes: Bytes = 8 * MIB
    json_memory_bytes: Bytes = Field(
        default=64 * MIB,
        description="JSON bodies of all requests under way together; several bodies of one caller may hold half of "
        "what those of others leave",
    )
    body_bytes: Bytes = Field(default=8 * GIB, description="a document that is streamed")
    row_spool_bytes: Bytes = Field(default=4 * GIB, description="rows that the client has not read yet, on disk")
    npy_tokens: Number = Field(
        default=1 << 28, description="of a document whose rows are sent as npy: its tokens wait on disk to be counted"
    )
    spool_memory_bytes: Bytes = Field(default=1 * MIB, description="per spool, before the disk is used")
    max_tokens: Number = Field(default=65_536, description="highest max_tokens of a completion")
    max_choices: Number = Field(default=32, description="choices of one completion: its prompts times n")
    max_logprobs: int = Field(default=20, ge=0, le=100, description="highest logprobs of a completion")
    stop_strings: Number = 16
    stop_characters: Number = Field(default=256, description="longest stop string")
    embedding_inputs: Number = Field(default=2048, description="inputs of one embeddings request")
    open_requests: Number = Field(
        default=256, description="requests under way at once; a caller may hold half of what others leave"
    )
    waiting_requests: Number = Field(default=64, description="of these, how many may wait for an engine that restarts")
    embeddings_at_once: Number = Field(default=32, description="inputs of all embeddings requests in the engine")
    disk_bytes: Bytes = Field(default=16 * GIB, description="all spools together")


class WorkSettings(_Section):
    """How work is cut."""

    threads: Number = Field(default=2, description="threads that tokenise and format rows")
    piece_bytes: int = Field(default=64 * KIB, gt=64, description="bytes tokenised at a time")
    message_tokens: Number = Field(default=16_384, description="tokens per message to the controller")
    resend_bytes: int = Field(
        default=16 * MIB, ge=0, description="tokens kept of all open requests, for a controller that is started again"
    )
    inbox_soft_bytes: Bytes = Field(default=16 * MIB, description="rows waiting to be written: stop feeding")
    inbox_hard_bytes: Bytes = Field(default=256 * MIB, description="rows waiting to be written: give up")
    checkpoint_tokens: Number = Field(default=65_536, description="tokens of an append between two stored states")


class WaitSettings(_Section):
    """How long the API waits for whom. Units: seconds."""

    request_head_seconds: Seconds = 30
    body_idle_seconds: Seconds = Field(default=300, description="a body that sends nothing")
    client_stall_seconds: Seconds = Field(default=300, description="a client that neither sends nor reads")
    engine_ready_seconds: float = Field(
        default=30, ge=0, description="a new request waits so long for an engine that restarts"
    )
    admission_seconds: Seconds = Field(default=10, description="the controller's answer to a new request")
    engine_silence_seconds: Seconds = Field(default=300, description="no progress of a request that has its input")
    status_seconds: float = Field(default=0.4, gt=0, le=0.5, description="between two looks at the engine")
    status_stale_seconds: Seconds = Field(default=2, description="older than this means: not ready")
    ping_seconds: Seconds = Field(default=15, description="between keep-alive comments of an event stream")
    keep_alive_seconds: Number = 5
    detached_seconds: Seconds = Field(default=60, description="work on a session whose client has left")
    shutdown_seconds: Number = Field(default=10, description="open streams may finish within this time")
    expired_seconds: float = Field(
        default=3600, ge=0, description="what has expired is hidden at once, and deleted after so long of an even clock"
    )


class FileSettings(_Section):
    """Where files that clients upload are kept, and how much of them. Units: `*_bytes` in bytes, `*_s` in seconds.

    Several API processes may share the folder. Those on one machine share the catalogue in it too; those on several
    machines need one in Redis.
    """

    folder: str = Field(default="", description="where their bytes lie; empty: a folder of data_dir")
    catalogue: str = Field(
        default="", description="redis://HOST:PORT/DB for machines that share the folder; empty: in it"
    )
    file_bytes: Bytes = Field(default=8 * GIB, description="one file")
    part_bytes: Bytes = Field(default=64 * MIB, description="one part of an upload")
    upload_parts: int = Field(default=1024, gt=0, le=10_000, description="parts of one upload")
    caller_bytes: Bytes = Field(default=32 * GIB, description="all of one caller, with what open uploads announced")
    caller_files: Number = Field(default=10_000, description="files and uploads of one caller")
    all_bytes: Bytes = Field(default=64 * GIB, description="of all callers")
    upload_s: Seconds = Field(default=86_400.0, description="an upload ends so long after it began or went on")
    file_s: float = Field(default=30 * 86_400.0, ge=0, description="a file without an end of its own; 0: for ever")
    feed_ahead_bytes: Bytes = Field(default=64 * MIB, description="an upload may be so far ahead of what it feeds")
    sync_bytes: Bytes = Field(default=32 * MIB, description="a power cut costs a stream at most so much")
    upkeep_s: Seconds = Field(default=60.0, description="between two rounds that remove what has expired")


class EngineSettings(_Section):
    """The ranks, and what the controller takes on. Units: `*_s` in seconds, `*_tokens` in tokens per rank.

    The values of the same names in control.settings, which explains and checks them; `""` for api_address means a
    private socket of this machine.
    """

    api_address: str = Field(default="", description="ZeroMQ address between API and controller; empty: a private one")
    ranks: int = Field(default=1, ge=1, le=1024, description="processes that share each document")
    backend: Literal["local", "gloo", "nccl", "mpi"] = Field(
        default="gloo", description="how ranks talk to each other: gloo or mpi on CPUs, nccl on GPUs"
    )
    rank_address: str = Field(
        default="", description="ZeroMQ address where agents and ranks of other hosts connect; empty: a private one"
    )
    agents: int = Field(default=1, ge=1, le=1024, description="hosts that share the ranks, each with an agent")
    local_agent: bool = Field(default=True, description="whether the controller's own host has ranks")
    agent_name: str = Field(default="", description="this host's name among the agents; empty: its host name")
    host_address: str = Field(default="", description="where other hosts reach this one's ranks; empty: found out")
    keys_dir: str = Field(default="", description="folder with the keys for tcp:// addresses, see `dist-attn keys`")
    insecure_network: bool = Field(
        default=False, description="listen on and connect to networks without keys: only where nobody else is on them"
    )
    weights: WeightPrecision = Field(
        default="float32",
        description="how the model's weights lie in memory: bfloat16 and int8 take less of it; drawing for few "
        "sessions may be faster",
    )
    check_finite: bool = Field(
        default=False, description="for debugging: ranks name the operation and token of the first NaN or infinity"
    )
    block_tokens: Number = 2048
    beside_decode_tokens: Number = 512
    chunk_tokens: Number = 512
    save_tokens: Number = 8192
    save_draws: Number = 256
    save_s: Seconds = 0.5
    steps_in_flight: Number = 2
    blocks_of_credit: Number = 4
    step_s: Seconds = 0.25
    patience_s: Seconds = 0.05
    max_open: Number = 512
    max_waiting_tokens: Number = 1 << 26
    max_active: Number = 128
    tokens_deadline_s: Seconds = 600.0
    ready_deadline_s: Seconds = 120.0
    reader_deadline_s: Seconds = 120.0
    start_deadline_s: Seconds = 180.0
    heartbeat_s: Seconds = 0.5
    heartbeat_deadline_s: Seconds = 4.0
    stall_limit_s: Seconds = 20.0
    exchange_deadline_s: Seconds = 30.0
    silence_deadline_s: Seconds = 10.0
    drain_s: float = Field(
        default=0.0, ge=0, description="for open requests to finish when the controller is asked to stop"
    )
    stop_deadline_s: Seconds = 5.0
    backoff_s: Seconds = 0.25
    backoff_max_s: Seconds = 15.0
    stable_s: Seconds = 60.0
    crashes_to_open: Number = 5
    cool_down_s: Seconds = 30.0
    losses_to_fail: Number = 8


class StoreSettings(_Section):
    """Where states of sessions are kept, and how much of them. Units: `*_bytes` in bytes, `*_s` in seconds.

    The values of the same names in dist_attn.store.StoreLimits, which explains them; `""` for address means a folder
    `states` of data_dir.
    """

    address: str = Field(default="", description="a folder, redis://HOST:PORT/DB, or memory:; empty: a folder of ours")
    snapshot_bytes: Bytes = 1 * GIB
    store_bytes: Bytes = 64 * GIB
    tenant_bytes: Bytes = Field(default=16 * GIB, description="of one caller")
    tenant_sessions: Number = Field(default=1024, description="of one caller")
    tenant_prefixes: Number = 4096
    session_checkpoints: Number = Field(default=64, description="of one session; older ones go")
    session_appends: Number = Field(default=64, description="idempotency keys that a session remembers")
    session_ttl_s: Seconds = Field(default=7 * 86_400.0, description="a session that is not used ends after so long")
    longest_ttl_s: Seconds = 90 * 86_400.0
    hold_s: Seconds = Field(default=300.0, description="a state that nobody refers to yet")
    orphan_s: Seconds = 3600.0
    writer_s: Seconds = Field(default=60.0, description="a writer that says nothing for so long is taken for dead")
    writers: Number = Field(default=8, description="states that are written at once")
    upkeep_s: Seconds = Field(default=60.0, description="between two rounds that remove what has expired")


class PrefixSettings(_Section):
    """Whether completions go on from stored states of the beginnings of their prompts. Units: `*_s` in seconds.

    How many are kept, and for how long, is the store's: `store.tenant_prefixes` and its bytes, least used first.
    """

    reuse: bool = Field(default=True, description="keep states of prompts, and begin with them")
    min_tokens: Number = Field(default=512, description="shorter beginnings are neither kept nor looked for")
    wait_s: Seconds = Field(default=1.0, description="a state that is not there by then: the prompt is read anew")
    keep_s: Seconds = Field(default=60.0, description="a state that is not kept by then is let go")
    at_once: Number = Field(default=4, description="states that one API process puts into the store at a time")


class JobSettings(_Section):
    """Work that outlives its connection. Units: `*_bytes` in bytes, `*_s` in seconds.

    Inputs and results are in the folder `jobs` of data_dir, which API processes that serve one address share.
    """

    address: str = Field(default="", description="the catalogue: redis://HOST:PORT/DB; empty: a file")
    disk_bytes: Bytes = Field(default=16 * GIB, description="inputs and results of all jobs")
    per_caller: Number = Field(default=64, description="jobs of one caller, ended ones too")
    at_once: Number = Field(default=2, description="jobs that one API process works on")
    keep_s: Seconds = Field(default=86_400.0, description="a job that has ended, with its results")
    life_s: Seconds = Field(default=7 * 86_400.0, description="a job that has not ended")
    lease_s: Seconds = Field(default=15.0, description="a process that says nothing for so long is taken for dead")
    look_s: Seconds = Field(default=0.5, description="between two looks at what others have changed")
    save_s: Seconds = Field(default=1.0, description="between two times that progress is made safe")
    queue_s: Seconds = Field(default=120.0, description="work that would wait for longer is refused, or becomes a job")
    when_busy: Literal["refuse", "job"] = Field(default="refuse", description="then, where the client does not say")


class TracingSettings(_Section):
    """Spans of OpenTelemetry (extra `otel`): off without an endpoint."""

    endpoint: str = Field(default="", description="where spans go, by OTLP over HTTP: http://HOST:4318/v1/traces")
    sample: float = Field(
        default=1.0, ge=0, le=1, description="the part of requests that is traced, unless the caller says"
    )


def user_data_folder(environment: Mapping[str, str], platform: str = sys.platform) -> Path:
    """dist-attn in the folder where a user's programs keep data; for a user without a home, `data` where we are.

    That folder is $XDG_DATA_HOME or ~/.local/share, on macOS ~/Library/Application Support.
    """
    home = Path(environment.get("HOME") or os.path.expanduser("~"))
    base = Path(environment.get("XDG_DATA_HOME") or home / ".local/share")
    if platform == "darwin":
        base = home / "Library/Application Support"
    return base / "dist-attn" if base.is_absolute() else Path("data")


class Settings(_Section):
    """The whole tree."""

    model: str | None = Field(default=None, description="a model folder, or the name of a shipped model")
    data_dir: Path = Field(
        default_factory=lambda: user_data_folder(os.environ),
        description="where uploads, spools and states are kept; by default dist-attn in the user's data folder: "
        "$XDG_DATA_HOME or ~/.local/share, on macOS ~/Library/Application Support",
    )
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: LogFormat = Field(default="auto", description="auto: words on a terminal, JSON lines elsewhere")
    http: HttpSettings = HttpSettings()
    limits: LimitSettings = LimitSettings()
    work: WorkSettings = WorkSettings()
    waits: WaitSettings = WaitSettings()
    files: FileSettings = FileSettings()
    engine: EngineSettings = EngineSettings()
    store: StoreSettings = StoreSettings()
    prefixes: PrefixSettings = PrefixSettings()
    tracing: TracingSettings = TracingSettings()
    jobs: JobSettings = JobSettings()


@dataclass(frozen=True)
class Resolved:
    """The settings, and where each of them comes from: "default", "file …", "environment …" or "flag …"."""

    settings: Settings
    origins: Mapping[str, str]

    def rows(self) -> Iterator[tuple[str, Any, str]]:
        """Key, value and origin of every setting, in the order of the tree; of keys only their number is told."""
        for key in settings_keys():
            value: Any = self.settings
            for name in key.split("."):
                value = getattr(value, name)
            yield key, _plain(key, value), self.origins.get(key, "default")


_SECTIONS: dict[str, type[_Section]] = {
    name: kind
    for name, field in Settings.model_fields.items()
    if isinstance(kind := field.annotation, type) and issubclass(kind, _Section)
}


def settings_words() -> dict[str, str]:
    """What each key of the tree is, in the order of the tree."""
    found: dict[str, str] = {}
    for name, field in Settings.model_fields.items():
        inner = _SECTIONS[name].model_fields if name in _SECTIONS else None
        about = {f"{name}.{key}": one for key, one in inner.items()} if inner else {name: field}
        found |= {key: one.description or "" for key, one in about.items()}
    return found


@cache
def settings_keys() -> tuple[str, ...]:
    """Every key of the tree, as `http.port`."""
    names = {name: _SECTIONS[name].model_fields if name in _SECTIONS else None for name in Settings.model_fields}
    return tuple(key for name, inner in names.items() for key in ([f"{name}.{i}" for i in inner] if inner else [name]))


def read_settings(
    file: Path | None = None, *, environment: Mapping[str, str], flags: Mapping[str, Any] | None = None
) -> Resolved:
    """The settings of a start: the file's over the defaults, the environment's over both, flags over all.

    `flags` are values by key; those that are None were not given. Without `file` DIST_ATTN_CONFIG may name one.
    Raises: ConfigError for a file that cannot be read, an unknown key or a value that is not accepted.
    """
    if file is None and environment.get(CONFIG_VARIABLE):
        file = Path(environment[CONFIG_VARIABLE])
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    sources = [_from_file(file)] if file is not None else []
    sources += [_from_environment(environment), _from_flags(flags or {})]
    for source in sources:
        for key, (value, origin) in source.items():
            values[key], origins[key] = value, origin
    tree: dict[str, Any] = {}
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    try:
        return Resolved(Settings.model_validate(tree), origins)
    except ValidationError as error:
        raise _refused(error, origins) from None


_Source = dict[str, tuple[Any, str]]


def _from_file(path: Path) -> _Source:
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the configuration {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration {path} is not TOML: {error}") from None
    found: _Source = {}
    for name, value in tree.items():
        if value == {} and name not in _SECTIONS:
            raise ConfigError(f"[{name}] in {path} is no section of the settings; there are {', '.join(_SECTIONS)}")
        entries = {f"{name}.{key}": item for key, item in value.items()} if isinstance(value, dict) else {name: value}
        for key, item in entries.items():
            found[_known(key, f"{key} in {path}")] = (item, f"file {path}")
    return found


def _from_environment(environment: Mapping[str, str]) -> _Source:
    found: _Source = {}
    for name, value in environment.items():
        if not name.startswith(PREFIX) or name == CONFIG_VARIABLE or name in CLIENT_VARIABLES:
            continue
        key = name.removeprefix(PREFIX).lower().replace("__", ".")
        if key not in settings_keys() and _SERVICE_LINK.fullmatch(name):
            continue
        found[_known(key, f"{name} in the environment")] = (value, f"environment {name}")
    return found


def _from_flags(flags: Mapping[str, Any]) -> _Source:
    given = {key: value for key, value in flags.items() if value is not None}
    return {key: (value, f"flag --{key.rpartition('.')[2].replace('_', '-')}") for key, value in given.items()}


def _known(key: str, where: str) -> str:
    keys = settings_keys()
    if key in keys:
        return key
    by_name = [known for known in keys if known.rpartition(".")[2] == key.rpartition(".")[2]]
    near = by_name or difflib.get_close_matches(key, keys, n=1)
    hint = f"did you mean {near[0]}" if near else "`dist-attn config show` lists all"
    raise ConfigError(f"{where} is no setting; {hint}")


def _refused(error: ValidationError, origins: Mapping[str, str]) -> ConfigError:
    first = error.errors(include_url=False, include_context=False)[0]
    path = [str(part) for part in first["loc"]]
    key = next((".".join(path[:n]) for n in (2, 1) if ".".join(path[:n]) in settings_keys()), ".".join(path))
    given = "a value that is not shown" if _is_secret(key) else repr(first["input"])[:80]
    words = first["msg"].removeprefix("Value error, ")
    return ConfigError(f"{key} ({origins.get(key, 'given')}) is {given}: {words[:1].lower()}{words[1:]}")


def _is_secret(key: str) -> bool:
    return key in ("http.api_keys", "http.admin_keys")


def _plain(key: str, value: Any) -> Any:
    """A value as JSON and people read it."""
    if _is_secret(key):
        return f"{len(value)} keys"
    if key in ("store.address", "jobs.address", "files.catalogue"):
        return re.sub(r"//[^/]*@", "//…@", value)
    return str(value) if isinstance(value, Path) else value

"""Every value an operator may set, as one frozen tree: defaults, a TOML file, the environment, flags; the later win.

    model, data_dir, log_level, log_format
    [http]     the address of the API, and the keys it asks for
    [limits]   the bounds of one request, and of all of them together
    [work]     the API's threads, and the sizes in which it takes texts, tokens and rows
    [waits]    timeouts of the API
    [files]    the place of files that clients upload, and the bounds on them
    [engine]   the ranks, and the work that the controller takes on
    [encoder]  a second model with ranks of its own, for encodings
    [store]    the place of sessions' states, and the bounds on them
    [prefixes] the reuse of states of prompts, which are in the store too, so that the same beginning is read once
    [tracing]  the spans of OpenTelemetry
    [jobs]     work that outlives its connection, and when work becomes that

In the environment `http.port` is DIST_ATTN_HTTP__PORT. A key that is not of the tree is refused, wherever it stands.
"""

import os
import re
import sys
from collections.abc import Mapping
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from dist_attn.log_lines import LogFormat
from dist_attn.wire.choices import Backend, LogLevel, Precision, WeightPrecision, check_device

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Section(BaseModel):
    """A group of values that belong together; frozen, and a key that is not declared is refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def _words(value: Any) -> Any:
    """Split a list of the environment, whose items stand between commas."""
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


class HttpSettings(Section):
    """The address of the API, and the keys it asks for; without any key it is open to all who reach it."""

    host: str = Field(default="127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(default=8000, ge=0, le=65535, description="port to listen on; 0 takes any free one")
    api_keys: KeyHashes = Field(default=(), repr=False, description="SHA-256 in hex of each bearer key")
    api_keys_file: Path | None = Field(default=None, description="file with one key per line, as clients send it")
    admin_keys: KeyHashes = Field(default=(), repr=False, description="likewise, of those that may see everything")
    admin_keys_file: Path | None = Field(default=None, description="file with one admin key per line")
    allowed_hosts: Names = Field(
        default=(),
        description="names that requests may have in Host while no key is asked for, beside addresses, "
        "names without a dot, http.host and this machine's name",
    )
    served_model_name: Names = Field(
        default=(), description="names that the model answers to in place of its folder's; the first stands in answers"
    )


class LimitSettings(Section):
    """The bounds of one request, and of all of them together. Units: `*_bytes` in bytes."""

    request_head_bytes: Bytes = Field(default=64 * KIB, description="request line and headers of one request")
    json_body_bytes: Bytes = Field(default=8 * MIB, description="one JSON body")
    json_memory_bytes: Bytes = Field(
        default=64 * MIB,
        description="JSON bodies of all requests under way together; several bodies of one caller may hold half of "
        "what those of others leave",
    )
    search_memory_bytes: Bytes = Field(
        default=128 * MIB,
        description="texts and rows of all searches and rerankings under way together, shared likewise; what is known "
        "of their words takes two to five times as much",
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
    stop_strings: Number = Field(default=16, description="stop strings of one completion")
    stop_characters: Number = Field(default=256, description="longest stop string")
    embedding_inputs: Number = Field(default=2048, description="inputs of one embeddings request")
    open_requests: Number = Field(
        default=256, description="requests under way at once; a caller may hold half of what others leave"
    )
    waiting_requests: Number = Field(default=64, description="of these, how many may wait for an engine that restarts")
    embeddings_at_once: Number = Field(default=128, description="inputs of all embeddings requests in the engine")
    disk_bytes: Bytes = Field(default=16 * GIB, description="all spools together")


class WorkSettings(Section):
    """The API's threads, and the sizes in which it takes texts, tokens and rows."""

    threads: Number = Field(default=2, description="threads that tokenise and format rows")
    piece_bytes: int = Field(default=64 * KIB, gt=64, description="bytes tokenised at a time")
    message_tokens: Number = Field(default=16_384, description="tokens per message to the controller")
    resend_bytes: int = Field(
        default=16 * MIB, ge=0, description="tokens kept of all open requests, for a controller that is started again"
    )
    inbox_soft_bytes: Bytes = Field(default=16 * MIB, description="rows waiting to be written: stop feeding")
    inbox_hard_bytes: Bytes = Field(default=256 * MIB, description="rows waiting to be written: give up")
    checkpoint_tokens: Number = Field(default=65_536, description="tokens of an append between two stored states")


class WaitSettings(Section):
    """Timeouts of the API. Units: seconds."""

    request_head_seconds: Seconds = Field(default=30, description="a request's line and headers")
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
    keep_alive_seconds: Number = Field(default=5, description="an open connection without a request")
    detached_seconds: Seconds = Field(default=60, description="work on a session whose client has left")
    shutdown_seconds: Number = Field(default=10, description="open streams may finish within this time")
    expired_seconds: float = Field(
        default=3600, ge=0, description="what has expired is hidden at once, and deleted after so long of an even clock"
    )


class FileSettings(Section):
    """The place of files that clients upload, and the bounds on them. Units: `*_bytes` in bytes, `*_s` in seconds.

    Several API processes may share the folder. Those on one machine share the catalogue in it too; those on several
    machines need one in Redis.
    """

    folder: str = Field(default="", description="where their bytes lie; empty: a folder of data_dir")
    catalogue: str = Field(
        default="", description="redis://HOST:PORT/DB for machines that share the folder; empty: in it"
    )
    file_bytes: Bytes = Field(default=8 * GIB, description="one file")
    caller_bytes: Bytes = Field(default=32 * GIB, description="all of one caller, with what open uploads announced")
    caller_files: Number = Field(default=10_000, description="files and uploads of one caller")
    all_bytes: Bytes = Field(default=64 * GIB, description="of all callers")
    upload_s: Seconds = Field(default=86_400.0, description="an upload ends so long after it began or went on")
    file_s: float = Field(default=30 * 86_400.0, ge=0, description="a file without an end of its own; 0: for ever")
    feed_ahead_bytes: Bytes = Field(default=64 * MIB, description="an upload may be so far ahead of what it feeds")
    sync_bytes: Bytes = Field(default=32 * MIB, description="a power cut costs a stream at most so much")
    upkeep_s: Seconds = Field(default=60.0, description="between two rounds that remove what has expired")


class RankTerms(Section):
    """The engine's settings that every rank is started with."""

    ranks: int = Field(default=1, ge=1, le=1024, description="processes that share each document")
    device: Annotated[str, AfterValidator(check_device)] = Field(
        default="auto",
        description="what ranks compute on: cuda is a GPU of each rank's own, cuda:N the N-th for all of a host, "
        "auto takes cuda where torch finds a GPU",
    )
    dtype: Precision = Field(
        default="auto",
        description="in which precision ranks compute products; states stay float32. auto: bfloat16 on GPUs, and "
        "of encoders on CPUs that have it; else float32",
    )
    backend: Backend = Field(
        default="auto",
        description="how ranks talk to each other: gloo or mpi on CPUs, nccl between GPUs; auto is nccl where each "
        "rank has a GPU, else gloo",
    )
    keys_dir: str = Field(default="", description="folder with the keys for tcp:// addresses, see `dist-attn keys`")
    weights: WeightPrecision = Field(
        default="float32",
        description="how the model's weights lie in memory: bfloat16 and int8 take less of it; drawing for few "
        "sessions may be faster",
    )
    weights_over_ranks: bool = Field(
        default=False,
        description="each rank holds the weights of a part of the layers: for a downloaded model that is larger than "
        "one rank's memory; all ranks take part in every token",
    )
    check_finite: bool = Field(
        default=False, description="for debugging: ranks name the operation and token of the first NaN or infinity"
    )
    state_bytes: Bytes = Field(
        default=8 * GIB,
        description="of states in a rank at once, where they grow with the text (softmax); what takes more is refused. "
        "Where decode steps are captured (GPUs), slots for keys and values take as much again at most",
    )
    chunk_tokens: int = Field(
        default=0,
        ge=0,
        description="every text is cut into blocks of so many, always the same; 0: 512 on CPUs, on GPUs 2048 where the "
        "model writes and 32768 where it makes vectors alone",
    )
    start_deadline_s: Seconds = Field(
        default=180.0,
        description="for all ranks to start and load the model; one that is silent for a quarter of it is lost",
    )
    heartbeat_s: Seconds = Field(default=0.5, description="between two signs of life of a rank")
    exchange_deadline_s: Seconds = Field(default=30.0, description="of every exchange between ranks")
    silence_deadline_s: Seconds = Field(
        default=10.0, description="ranks and agents that hear nothing from the controller for so long exit"
    )


class EngineSettings(RankTerms):
    """The ranks, and the work that the controller takes on. Units: `*_s` in seconds, `*_tokens` in tokens per rank."""

    api_address: str = Field(
        default="",
        description="ZeroMQ address between API and controller; of an API several, between commas, where engines share "
        "its work; empty: a private one",
    )
    rank_address: str = Field(
        default="", description="ZeroMQ address where agents and ranks of other hosts connect; empty: a private one"
    )
    agents: int = Field(default=1, ge=1, le=1024, description="hosts that share the ranks, each with an agent")
    local_agent: bool = Field(default=True, description="whether the controller's own host has ranks")
    agent_name: str = Field(default="", description="this host's name among the agents; empty: its host name")
    host_address: str = Field(default="", description="where other hosts reach this one's ranks; empty: found out")
    insecure_network: bool = Field(
        default=False, description="listen on and connect to networks without keys: only where nobody else is on them"
    )
    block_tokens: Number = Field(
        default=2048, description="of a document in one step, at most; less than a block is raised to one"
    )
    beside_decode_tokens: Number = Field(default=512, description="likewise, beside requests that draw tokens")
    save_tokens: Number = Field(
        default=8192, description="between two saved states: so much is read again at most after a loss of ranks"
    )
    save_draws: Number = Field(default=256, description="likewise, tokens that are drawn between two saved states")
    save_s: Seconds = Field(
        default=0.5, description="or after so long, where the states of all requests are few enough bytes for that"
    )
    steps_in_flight: Number = Field(default=2, description="steps that ranks are sent before they answer the first")
    blocks_of_credit: Number = Field(default=4, description="blocks of a request that the controller takes ahead")
    step_s: Seconds = Field(
        default=0.25, description="how long a step reads at most, as far as a chunk allows: new work waits for its end"
    )
    max_open: Number = Field(default=512, description="open requests of a class of priority and those before it")
    max_waiting_tokens: Number = Field(default=1 << 26, description="likewise, tokens of these to be read or drawn")
    max_active: Number = Field(default=128, description="requests that have a state in the ranks at once")
    tokens_deadline_s: Seconds = Field(default=600.0, description="for the next tokens of a request")
    ready_deadline_s: Seconds = Field(default=120.0, description="of a new request for ranks that are not ready")
    reader_deadline_s: Seconds = Field(
        default=120.0, description="for an API process that does not read, and for a store that is slow with a state"
    )
    heartbeat_deadline_s: Seconds = Field(default=4.0, description="a rank without a sign of life for so long is lost")
    stall_limit_s: Seconds = Field(default=20.0, description="a rank that makes no progress in a step is lost then")
    drain_s: float = Field(
        default=0.0, ge=0, description="for open requests to finish when the controller is asked to stop"
    )
    stop_deadline_s: Seconds = Field(default=5.0, description="for agent and ranks to exit when they are asked to")
    backoff_s: Seconds = Field(default=0.25, description="before ranks that were lost are started again; then doubled")
    backoff_max_s: Seconds = Field(default=15.0, description="the longest of these waits")
    stable_s: Seconds = Field(default=60.0, description="a group of ranks that ran for so long has recovered")
    crashes_to_open: Number = Field(default=5, description="losses within stable_s after which ranks have a long pause")
    cool_down_s: Seconds = Field(default=30.0, description="this pause")
    # Eight, as one life in three is too short to get further in where ranks are killed every other second.
    losses_to_fail: Number = Field(
        default=8, description="a request in work at so many losses in a row, and no further since, fails"
    )


class EncoderSettings(Section):
    """A second model beside the first: encodings and embeddings use it where a request names no model.

    It has a controller, an agent and ranks of its own, all on this host; what is not set here is as in `[engine]`.
    """

    model: str = Field(
        default="",
        description="a model folder, or the name of a shipped model; where neither it nor `model` is named, `serve` "
        "takes the encoder that ships; empty: one model does everything",
    )
    served_model_name: Names = Field(default=(), description="names that it answers to in place of its folder's")
    ranks: int | None = Field(
        default=None, ge=1, le=1024, description="processes that share each of its documents; not set: engine.ranks"
    )
    weights: WeightPrecision = Field(default="float32", description="how its weights lie in memory")
    api_address: str = Field(
        default="", description="ZeroMQ address between API and its controller; empty: a private one"
    )


class StoreSettings(Section):
    """The place of sessions' states, and the bounds on them. Units: `*_bytes` in bytes, `*_s` in seconds.

    The values of the same names in dist_attn.store.StoreLimits, which explains them; `""` for address means a folder
    `states` of data_dir.
    """

    address: str = Field(
        default="",
        description="a folder, redis://HOST:PORT/DB, or memory:; empty: a folder of ours. The same for the engine",
    )
    blobs: str = Field(
        default="", description="such an address or s3://BUCKET (gs, az) for states alone; empty: with their catalogue"
    )
    snapshot_bytes: Bytes = Field(default=1 * GIB, description="one state")
    store_bytes: Bytes = Field(default=64 * GIB, description="all states of all callers")
    tenant_bytes: Bytes = Field(default=16 * GIB, description="of one caller")
    tenant_sessions: Number = Field(default=1024, description="of one caller")
    tenant_prefixes: Number = Field(default=4096, description="states of prompts of one caller; the least used go")
    session_checkpoints: Number = Field(default=64, description="of one session; older ones go")
    session_appends: Number = Field(default=64, description="idempotency keys that a session remembers")
    session_ttl_s: Seconds = Field(
        default=7 * 86_400.0, description="a session that is not written to ends after so long"
    )
    longest_ttl_s: Seconds = Field(default=90 * 86_400.0, description="the longest that a caller may ask for")
    hold_s: Seconds = Field(default=300.0, description="a state that nobody refers to yet")
    orphan_s: Seconds = Field(default=3600.0, description="bytes without a record, left by a writer that died")
    writer_s: Seconds = Field(default=60.0, description="a writer that says nothing for so long is taken for dead")
    writers: Number = Field(default=8, description="states that are written at once")
    upkeep_s: Seconds = Field(default=60.0, description="between two rounds that remove what has expired")


class PrefixSettings(Section):
    """The reuse of stored states of the beginnings of prompts by completions. Units: `*_s` in seconds.

    Their number and bytes are bounded by the store: `store.tenant_prefixes` and its bytes, least used first.
    """

    reuse: bool = Field(default=True, description="keep states of prompts, and begin with them")
    min_tokens: Number = Field(default=512, description="shorter beginnings are neither kept nor looked for")
    wait_s: Seconds = Field(default=1.0, description="a state that is not there by then: the prompt is read anew")
    keep_s: Seconds = Field(default=60.0, description="a state that is not kept by then is let go")
    at_once: Number = Field(default=4, description="states that one API process puts into the store at a time")


class JobSettings(Section):
    """The jobs, which outlive their connections. Units: `*_bytes` in bytes, `*_s` in seconds.

    Inputs and results are in the folder `jobs` of data_dir, which API processes that serve one address share.
    """

    address: str = Field(default="", description="the catalogue: redis://HOST:PORT/DB; empty: a file")
    disk_bytes: Bytes = Field(default=16 * GIB, description="inputs and results of all jobs")
    per_caller: Number = Field(default=64, description="jobs of one caller, ended ones too")
    at_once: Number = Field(default=2, description="jobs of each model that one API process works on")
    keep_s: Seconds = Field(default=86_400.0, description="a job that has ended, with its results")
    life_s: Seconds = Field(default=7 * 86_400.0, description="a job that has not ended")
    lease_s: Seconds = Field(default=15.0, description="a process that says nothing for so long is taken for dead")
    look_s: Seconds = Field(default=0.5, description="between two looks at what others have changed")
    save_s: Seconds = Field(default=1.0, description="between two times that progress is made safe")
    queue_s: Seconds = Field(default=120.0, description="work that would wait for longer is refused, or becomes a job")
    when_busy: Literal["refuse", "job"] = Field(default="refuse", description="then, where the client does not say")


class TracingSettings(Section):
    """The spans of OpenTelemetry (extra `otel`): off without an endpoint."""

    endpoint: str = Field(default="", description="where spans go, by OTLP over HTTP: http://HOST:4318/v1/traces")
    sample: float = Field(
        default=1.0, ge=0, le=1, description="the part of requests that is traced, unless the caller says"
    )


class DataFolder(StrEnum):
    """The names in `data_dir`: a folder with anything else in it is not a service's alone."""

    STATES = "states"
    JOBS = "jobs"
    FILES = "files"
    SPOOL = "spool"
    ENCODER = "encoder"
    LOCK = "serve.lock"


def user_data_folder(environment: Mapping[str, str], platform: str = sys.platform) -> Path:
    """dist-attn in the folder where a user's programs keep data; for a user without a home, `data` where we are.

    That folder is $XDG_DATA_HOME or ~/.local/share, on macOS ~/Library/Application Support.
    """
    home = Path(environment.get("HOME") or os.path.expanduser("~"))
    base = Path(environment.get("XDG_DATA_HOME") or home / ".local/share")
    if platform == "darwin":
        base = home / "Library/Application Support"
    return base / "dist-attn" if base.is_absolute() else Path("data")


class Settings(Section):
    """The whole tree of settings."""

    model: str | None = Field(default=None, description="a model folder, or the name of a shipped model")
    data_dir: Path = Field(
        default_factory=lambda: user_data_folder(os.environ),
        description="where uploads, spools and states are kept; by default dist-attn in the user's data folder: "
        "$XDG_DATA_HOME or ~/.local/share, on macOS ~/Library/Application Support",
    )
    log_level: LogLevel = Field(default="info", description="the least severe lines that are logged")
    log_format: LogFormat = Field(default="auto", description="auto: words on a terminal, JSON lines elsewhere")
    http: HttpSettings = HttpSettings()
    limits: LimitSettings = LimitSettings()
    work: WorkSettings = WorkSettings()
    waits: WaitSettings = WaitSettings()
    files: FileSettings = FileSettings()
    engine: EngineSettings = EngineSettings()
    encoder: EncoderSettings = EncoderSettings()
    store: StoreSettings = StoreSettings()
    prefixes: PrefixSettings = PrefixSettings()
    tracing: TracingSettings = TracingSettings()
    jobs: JobSettings = JobSettings()


SECTIONS: dict[str, type[Section]] = {
    name: kind
    for name, field in Settings.model_fields.items()
    if isinstance(kind := field.annotation, type) and issubclass(kind, Section)
}


def settings_words() -> dict[str, str]:
    """The keys of the tree, as `http.port`, with their descriptions; in the order of the tree."""
    words: dict[str, str] = {}
    for name, field in Settings.model_fields.items():
        inner = {f"{name}.{key}": one for key, one in SECTIONS[name].model_fields.items()} if name in SECTIONS else {}
        words |= {key: one.description or "" for key, one in (inner or {name: field}).items()}
    return words


@cache
def settings_keys() -> tuple[str, ...]:
    """The keys of the tree, as `http.port`."""
    return tuple(settings_words())

"""The metrics for Prometheus: counters of requests and tokens, and gauges that are read when it asks."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from dist_attn.store import Usage
from dist_attn.wire.messages import Status
from dist_attn.wire.rank_messages import GuardCounts
from dist_attn_api.types import CompletionUsage
from dist_attn_service.base.errors import Code
from dist_attn_service.engine.port import EngineHealth

__all__ = [
    "OUTCOMES",
    "PREFIX_LOOKUPS",
    "PREFIX_STATES",
    "TOKEN_KINDS",
    "UNROUTED",
    "DrawingTimes",
    "Gauges",
    "Metrics",
]

UNROUTED = "none"
OUTCOMES = frozenset({"finished", "client_gone", *map(str, Code)})
TOKEN_KINDS = ("prompt", "completion", "encoding", "embedding")
PREFIX_LOOKUPS = ("hit", "miss", "failed")
"""`failed`: the store did not answer in time, or the state that it had could not be used; the prompt was read anew."""
PREFIX_STATES = ("kept", "no_room", "failed")
SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 1800)
LABELS = ("model", "engine")
LENGTHS = tuple(4.0**power for power in range(12))
DRAWING = {
    "request_queue_time_seconds": ("Time until a part of a prompt was read", SECONDS),
    "time_to_first_token_seconds": ("Time until a first token was drawn", SECONDS),
    "time_per_output_token_seconds": ("Mean time of a text's tokens after its first", tuple(s / 10 for s in SECONDS)),
    "request_prompt_tokens": ("Tokens of a request's prompts", LENGTHS),
    "request_generation_tokens": ("Tokens drawn for a request", LENGTHS),
}
"""Histograms by the names of vLLM and of OpenTelemetry's `gen_ai.server`, which dashboards look for."""


@dataclass(frozen=True)
class Gauges:
    """The gauges of one moment; `engines` has the health of each engine, by the model's name and its address.

    The address is left out where each model has one engine.
    """

    engines: Mapping[tuple[str, ...], EngineHealth]
    open_requests: int
    waiting_requests: int
    spool_bytes: int
    stored: Usage = field(default_factory=Usage)
    file_bytes: int = 0
    files: int = 0


class Metrics:
    """The metrics of one app, in a registry of their own; every label's values come from a closed set."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        own = self._registry
        self._requests = Counter("dist_attn_requests", "Requests that ended", ["route", "outcome"], registry=own)
        self._tokens = Counter("dist_attn_tokens", "Tokens read and drawn", ["kind"], registry=own)
        self._bytes = Counter("dist_attn_body_bytes", "Bytes of bodies", ["direction"], registry=own)
        self._seconds = Histogram(
            "dist_attn_request_seconds", "Time of a request to its end", ["route"], buckets=SECONDS, registry=own
        )
        self.drawing = {
            name: Histogram(f"dist_attn_{name}", words, buckets=buckets, registry=own)
            for name, (words, buckets) in DRAWING.items()
        }
        self._jobs = Counter("dist_attn_jobs", "Jobs that ended", ["kind", "state"], registry=own)
        for kind in ("encoding", "completion"):
            for state in ("succeeded", "failed", "cancelled"):
                self._jobs.labels(kind, state)
        for kind in TOKEN_KINDS:
            self._tokens.labels(kind)
        words = "Prompts whose beginning was looked for among stored states"
        self._prefix_lookups = Counter("dist_attn_prefix_lookups", words, ["outcome"], registry=own)
        words = "Tokens of prompts that were in a stored state and not read again"
        self._prefix_tokens = Counter("dist_attn_prefix_tokens", words, registry=own)
        words = "States of the beginnings of prompts that were to be kept"
        self._prefix_states = Counter("dist_attn_prefix_states", words, ["outcome"], registry=own)
        for outcome in PREFIX_LOOKUPS:
            self._prefix_lookups.labels(outcome)
        for outcome in PREFIX_STATES:
            self._prefix_states.labels(outcome)

    def watch(self, gauges: Callable[[], Gauges], *, version: str) -> None:
        """Look at `gauges` whenever the metrics are asked for."""
        self._registry.register(_GaugeCollector(gauges, version))

    def tokens(self, kind: str, count: int) -> None:
        """Count tokens of one of TOKEN_KINDS."""
        self._tokens.labels(kind).inc(count)

    def completion(self, usage: CompletionUsage) -> None:
        """Count the tokens of a completion, however it ended."""
        self.tokens("prompt", usage.prompt_tokens)
        self.tokens("completion", usage.completion_tokens)
        self.drawing["request_prompt_tokens"].observe(usage.prompt_tokens)
        self.drawing["request_generation_tokens"].observe(usage.completion_tokens)

    def prefix_lookup(self, outcome: str) -> None:
        """Count a prompt under one of PREFIX_LOOKUPS."""
        self._prefix_lookups.labels(outcome).inc()

    def prefix_tokens(self, count: int) -> None:
        """Count tokens of a choice's prompt that were not read."""
        self._prefix_tokens.inc(count)

    def prefix_state(self, outcome: str) -> None:
        """Count a state under one of PREFIX_STATES."""
        self._prefix_states.labels(outcome).inc()

    def job_ended(self, kind: str, state: str) -> None:
        """Count a job: kinds are encoding and completion, states succeeded, failed and cancelled."""
        self._jobs.labels(kind, state).inc()

    def ended(self, route: str, outcome: str, seconds: float, *, received: int, sent: int) -> None:
        """Count a request. `route` is a path of the app as it is declared, or UNROUTED."""
        self._requests.labels(route, outcome if outcome in OUTCOMES else str(Code.INTERNAL_ERROR)).inc()
        self._seconds.labels(route).observe(seconds)
        self._bytes.labels("in").inc(received)
        self._bytes.labels("out").inc(sent)

    def render(self, accept: str) -> tuple[bytes, str]:
        """The metrics as text and their media type, as the `Accept` header prefers."""
        encoder, media_type = choose_encoder(accept)
        return encoder(self._registry), media_type


class DrawingTimes:
    """The times of one text that is drawn, which count from the making of this value."""

    def __init__(self, metrics: Metrics) -> None:
        self._drawing = metrics.drawing
        self._began = time.monotonic()
        self._read_at = self._first_at = 0.0
        self._after_first = 0

    def read(self) -> None:
        """Note that the engine has done a part of the work."""
        if not self._read_at:
            self._read_at = time.monotonic()
            self._drawing["request_queue_time_seconds"].observe(self._read_at - self._began)

    def drawn(self, tokens: int, *, ended: bool) -> None:
        """Note so many further tokens."""
        self.read()
        now = time.monotonic()
        if self._first_at:
            self._after_first += tokens
        elif tokens:
            self._first_at = now
            self._drawing["time_to_first_token_seconds"].observe(now - self._began)
        if ended and self._after_first:
            self._drawing["time_per_output_token_seconds"].observe((now - self._first_at) / self._after_first)


class _GaugeCollector(Collector):
    def __init__(self, gauges: Callable[[], Gauges], version: str) -> None:
        self._gauges = gauges
        self._version = version

    def collect(self) -> Iterable[Metric]:
        """The gauges of this moment; those of an engine only while it is heard."""
        now = self._gauges()
        info = GaugeMetricFamily("dist_attn_info", "What runs here; always 1", labels=["version", "model"])
        for model in dict.fromkeys(which[0] for which in now.engines):
            info.add_metric([self._version, model], 1)
        yield info
        for name, words, value in (
            ("dist_attn_open_requests", "Requests that hold engine work or spools", now.open_requests),
            ("dist_attn_waiting_requests", "Requests that wait for the engine", now.waiting_requests),
            ("dist_attn_spool_bytes", "Bytes of disk that spools hold", now.spool_bytes),
            ("dist_attn_stored_sessions", "Sessions that the store keeps", now.stored.sessions),
            ("dist_attn_stored_states", "States that the store keeps", now.stored.snapshots),
            ("dist_attn_stored_prefixes", "Beginnings of prompts whose states it keeps", now.stored.prefixes),
            ("dist_attn_stored_bytes", "Their bytes", now.stored.bytes),
            ("dist_attn_file_bytes", "Bytes of files, and those that open uploads announced", now.file_bytes),
            ("dist_attn_files", "Files and uploads of all callers", now.files),
        ):
            yield GaugeMetricFamily(name, words, value=value)
        labels = LABELS[: max(map(len, now.engines), default=1)]
        ready = GaugeMetricFamily("dist_attn_engine_ready", "1 while the engine takes work", labels=labels)
        for which, health in now.engines.items():
            ready.add_metric(which, health.ready)
        yield ready
        yield from _engine_metrics(now.engines, labels)


def _engine_metrics(engines: Mapping[tuple[str, ...], EngineHealth], labels: Sequence[str]) -> Iterable[Metric]:
    """The latest status of each engine as metrics, under the name of its model and its address."""
    heard = {which: (health.status, health.age) for which, health in engines.items() if health.status is not None}
    gauge, counter = GaugeMetricFamily, CounterMetricFamily
    again = "Tokens that were read or drawn a second time after a loss"
    for family, name, words, figure in (
        (gauge, "dist_attn_engine_epoch", "How often a group of ranks was started", "epoch"),
        (gauge, "dist_attn_engine_step", "Steps sent to the ranks in this epoch", "step"),
        (gauge, "dist_attn_engine_queued", "Requests that no rank has begun", "queued"),
        (gauge, "dist_attn_engine_active", "Requests that ranks hold a state for", "active"),
        (gauge, "dist_attn_engine_tokens_per_second", "Tokens prefilled and drawn, lately", "tokens_per_second"),
        (counter, "dist_attn_lost_groups", "Times that the ranks were lost and started again", "lost_groups"),
        (counter, "dist_attn_replayed_tokens", again, "replayed_tokens"),
    ):
        metric = family(name, words, labels=labels)
        for which, (status, _) in heard.items():
            metric.add_metric(which, getattr(status, figure))
        yield metric
    yield from _rank_metrics(heard, [*labels, "rank"])
    guards = {which: status.guards for which, (status, _) in heard.items() if status.guards}
    yield from _guard_counters(guards, labels)


def _rank_metrics(heard: Mapping[tuple[str, ...], tuple[Status, float]], labels: Sequence[str]) -> Iterable[Metric]:
    ages = GaugeMetricFamily("dist_attn_rank_heartbeat_age_seconds", "Since a rank was heard", labels=labels)
    idle = GaugeMetricFamily("dist_attn_rank_progress_age_seconds", "Since a rank moved on", labels=labels)
    memory = GaugeMetricFamily("dist_attn_rank_peak_rss_bytes", "Most memory a rank has held", labels=labels)
    words = "Time of a rank's steps, waiting for others in them included"
    busy = CounterMetricFamily("dist_attn_rank_busy_seconds", words, labels=labels)
    for engine, (status, age) in heard.items():
        for rank in status.ranks:
            which = [*engine, str(rank.rank)]
            ages.add_metric(which, rank.heartbeat_age + age)
            idle.add_metric(which, rank.progress_age + age)
            memory.add_metric(which, rank.peak_rss_bytes)
            busy.add_metric(which, rank.busy)
    yield from (ages, idle, memory, busy)


def _guard_counters(counts: Mapping[tuple[str, ...], GuardCounts], labels: Sequence[str]) -> Iterable[Metric]:
    """Label values are those of the models: one series for each of their heads."""
    words = "Denominators that kernel attention formed"
    formed = CounterMetricFamily("dist_attn_attention_denominators", words, labels=labels)
    words = "Of these, the ones that the floor replaced"
    guarded = CounterMetricFamily("dist_attn_guarded_denominators", words, labels=[*labels, "layer", "head"])
    for engine, of_engine in counts.items():
        formed.add_metric(engine, of_engine.denominators)
        for layer, heads in enumerate(of_engine.guarded):
            for head, count in enumerate(heads):
                guarded.add_metric([*engine, str(layer), str(head)], count)
    yield from (formed, guarded)

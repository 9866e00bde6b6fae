"""Prometheus and Grafana: what they read exists, in the compose file and among the API's metrics; alerts fire."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from dist_attn_service.engine.metrics import OUTCOMES, Gauges, Metrics
from dist_attn_service.engine.port import EngineHealth
from prometheus_client.parser import text_string_to_metric_families

from dist_attn.settings import LimitSettings, settings_keys
from dist_attn.wire.messages import RankStatus, Status
from dist_attn.wire.rank_messages import GuardCounts

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
LISTED = [line for line in (DEPLOY / "grafana/metrics.txt").read_text().splitlines() if not line.startswith("#")]
DASHBOARDS = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
ALERTS = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]


def queries(dashboard: dict[str, Any]) -> list[str]:
    """Every expression of a dashboard."""
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def selectors(query: str) -> list[promql_parser.VectorSelector]:
    """Every series that an expression reads; raises where it is no PromQL. Grafana's variables are given a value."""
    found: list[promql_parser.VectorSelector] = []

    def look(node: promql_parser.Expr) -> None:
        if isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)
        elif isinstance(node, promql_parser.VectorSelector):
            found.append(node)

    promql_parser.walk(promql_parser.parse(query.replace("$__rate_interval", "5m")), look)
    return found


def names_in(query: str) -> set[str]:
    """The metrics of an expression, without the one that Prometheus makes itself."""
    return {str(selector.name) for selector in selectors(query)} - {"up"}


def alert(name: str) -> dict[str, Any]:
    """One rule."""
    (rule,) = [rule for rule in ALERTS if rule["alert"] == name]
    return rule


def exported() -> set[str]:
    """The names of all series that the API tells of once something has happened."""
    rank = RankStatus(0, 1, "idle", 0, 0.0, 0.0)
    status = Status(True, "", "tiny", 1, 1, "local", 1, 1, 0, 0, 0.0, [rank], GuardCounts(4, [[1]]))
    metrics = Metrics()
    metrics.watch(lambda: Gauges({("tiny",): EngineHealth(True, "", status)}, 0, 0, 0), version="0")
    metrics.ended("/v1/encodings", "finished", 1.0, received=1, sent=1)
    text = metrics.render("")[0].decode()
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def mounted(service: str, inside: str) -> Path:
    """The file or folder of the repository that a container sees at a path."""
    (mount,) = [m for m in SERVICES[service]["volumes"] if m.split(":")[1] == inside]
    return ROOT / mount.split(":")[0]


def test_prometheus_reads_the_api() -> None:
    """The one job asks the API's container, on its port, for /metrics."""
    flags = dict(flag.split("=") for flag in SERVICES["prometheus"]["command"])
    config = yaml.safe_load(mounted("prometheus", flags["--config.file"]).read_text())
    assert set(config) == {"global", "rule_files", "scrape_configs"}
    assert mounted("prometheus", *config["rule_files"]) == DEPLOY / "prometheus/alerts.yml"
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert f"--port={port}" in SERVICES[host]["command"]
    assert set(SERVICES[host]["networks"]) & set(SERVICES["prometheus"]["networks"])
    assert host in SERVICES[host]["environment"]["DIST_ATTN_HTTP__ALLOWED_HOSTS"].split(",")  # without keys too


def test_grafana_finds_prometheus_and_the_dashboards() -> None:
    """The provisioned source is the compose file's Prometheus, and the dashboards lie where they are looked for."""
    folder = mounted("grafana", "/etc/grafana/provisioning/datasources")
    (source,) = yaml.safe_load((folder / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert source["uid"] == "prometheus"
    folder = mounted("grafana", "/etc/grafana/provisioning/dashboards")
    (provider,) = yaml.safe_load((folder / "dist-attn.yml").read_text())["providers"]
    assert mounted("grafana", provider["options"]["path"]) == DASHBOARDS[0].parent
    home = Path(SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"])
    assert mounted("grafana", str(home.parent)) / home.name in DASHBOARDS


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_a_dashboard_is_whole(path: Path) -> None:
    """Panels have their own ids and places, ask the provisioned source, and read listed metrics only."""
    dashboard = json.loads(path.read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for at in (panel["gridPos"] for panel in panels)
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len(set(cells)) == len(cells), "panels overlap"
    assert max(x for x, _ in cells) < 24
    assert all(target["datasource"]["uid"] == "prometheus" for panel in panels for target in panel["targets"])
    for query in queries(dashboard):
        assert names_in(query), query
        assert names_in(query) <= set(LISTED), query


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_is_whole(rule: dict[str, Any]) -> None:
    """Its expression is PromQL over listed metrics; it says how urgent it is, what happened and what to do."""
    assert names_in(rule["expr"]) <= set(LISTED)
    assert selectors(rule["expr"])
    assert rule["labels"]["severity"] in {"page", "ticket"}
    assert set(rule["annotations"]) == {"summary", "action"}
    named = {word for text in rule["annotations"].values() for word in re.findall(r"\b(?:limits|engine)\.\w+", text)}
    assert named <= set(settings_keys())


def test_outcomes_that_are_asked_for_exist() -> None:
    """Outcomes in the matchers of dashboards and alerts are those that the API counts by."""
    asked = [query for path in DASHBOARDS for query in queries(json.loads(path.read_text()))]
    words = set()
    for selector in (s for query in [*asked, *(rule["expr"] for rule in ALERTS)] for s in selectors(query)):
        words |= {w for m in selector.matchers.matchers if m.name == "outcome" for w in m.value.split("|")}
    assert "engine_failed" in words
    assert words <= OUTCOMES


def test_alerts_come_before_the_limits() -> None:
    """The thresholds of waiting requests and spools lie below the default limits, and not far below."""
    limits = LimitSettings()
    for name, limit in (("DistAttnWaiting", limits.waiting_requests), ("DistAttnSpoolsFill", limits.disk_bytes)):
        threshold = float(alert(name)["expr"].rpartition(">")[2])
        assert 0.7 * limit < threshold < 0.85 * limit, name


def test_alerts_fire_when_they_should() -> None:
    """Prometheus' own tool accepts configuration and rules, and finds the rules firing in the cases beside them."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("needs promtool: apt-get install prometheus")
    folder = DEPLOY / "prometheus"
    for words in (["check", "config", "--syntax-only", "prometheus.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run([tool, *words], cwd=folder, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_list_is_what_is_read_and_the_api_tells() -> None:
    """Every listed metric is read by a dashboard or an alert and exported by the API under that very name."""
    asked = [query for path in DASHBOARDS for query in queries(json.loads(path.read_text()))]
    read = set().union(*(names_in(query) for query in [*asked, *(rule["expr"] for rule in ALERTS)]))
    assert set(LISTED) == read
    assert sorted(LISTED) == LISTED
    missing = set(LISTED) - exported()
    if sys.platform != "linux":  # where there is no /proc, the process tells nothing of itself
        missing = {name for name in missing if not name.startswith("process_")}
    assert not missing, missing

"""Prometheus and Grafana: what they are told to read exists, in the compose file and among the API's metrics."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from dist_attn.wire.messages import GuardCounts, RankStatus, Status
from service.engine_port import EngineHealth
from service.metrics import Gauges, Metrics

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
SERVICES = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
LISTED = [line for line in (DEPLOY / "grafana/metrics.txt").read_text().splitlines() if not line.startswith("#")]
DASHBOARDS = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))


def queries(dashboard: dict[str, Any]) -> list[str]:
    """Every expression of a dashboard."""
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def exported() -> set[str]:
    """The names of all series that the API tells of once something has happened."""
    rank = RankStatus(0, 1, "idle", 0, 0.0, 0.0)
    status = Status(True, "", "tiny", 1, 1, "local", 1, 1, 0, 0, 0.0, [rank], GuardCounts(4, [[1]]))
    metrics = Metrics()
    metrics.watch(lambda: Gauges(EngineHealth(True, "", status), 0, 0, 0), version="0", model="tiny")
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
    assert set(config) == {"global", "scrape_configs"}
    (job,) = config["scrape_configs"]
    assert job["metrics_path"] == "/metrics"
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert f"--port={port}" in SERVICES[host]["command"]
    assert set(SERVICES[host]["networks"]) & set(SERVICES["prometheus"]["networks"])


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
        names = re.findall(r"\b(?:dist_attn|process|python)_\w+", query)
        assert names, query
        assert set(names) <= set(LISTED), query
        assert query.count("(") == query.count(")"), query


def test_the_list_is_what_dashboards_read_and_the_api_tells() -> None:
    """Every listed metric is read by a dashboard and exported by the API under that very name."""
    asked = " ".join(query for path in DASHBOARDS for query in queries(json.loads(path.read_text())))
    assert [name for name in LISTED if not re.search(rf"\b{name}\b", asked)] == []
    assert sorted(LISTED) == LISTED
    missing = set(LISTED) - exported()
    if sys.platform != "linux":  # where there is no /proc, the process tells nothing of itself
        missing = {name for name in missing if not name.startswith("process_")}
    assert not missing, missing

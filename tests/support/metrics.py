"""What a running service tells Prometheus, as a test reads it."""

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.support.service_server import RunningService

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(service: RunningService) -> Samples:
    """Every sample by name and labels."""
    answer = httpx.get(f"{service.url}/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain; version=")
    families = text_string_to_metric_families(answer.text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def value(found: Samples, name: str, **labels: str) -> float:
    """One sample, 0 when it is not there yet."""
    return found.get((name, tuple(sorted(labels.items()))), 0.0)

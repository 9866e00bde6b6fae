"""The example of docs/adding-a-mixer.md as an installed package: judged, trained, planned and served."""

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from dist_attn.commands.cli import app
from dist_attn.errors import ConfigError
from dist_attn.model_config.mixer import MIXERS
from tests.support.served import served
from tests.support.training import small_run, write_toml

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/adding-a-mixer.md").read_text()
MIXER, JUDGED = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
(OFFERS,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
KIND = "gated_convolution"


def _install(place: Path, name: str, source: str, offers: str = OFFERS) -> None:
    """A distribution as pip would leave it: a module, and a dist-info with the entry points of a pyproject.toml."""
    (place / f"{name}.py").write_text(source)
    info = place / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    ((group, points),) = tomllib.loads(offers)["project"]["entry-points"].items()
    lines = [f"[{group}]", *(f"{kind} = {module}" for kind, module in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines))
    invalidate_caches()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of packages that this process and those started from here find, and forget when the test ends."""
    place = tmp_path / "site"
    place.mkdir()
    monkeypatch.setenv("PYTHONPATH", ":".join([str(place), *(p for p in sys.path if p.startswith(str(ROOT)))]))
    MIXERS.load_offered()
    monkeypatch.setattr(MIXERS, "_entries", MIXERS.loaded())
    monkeypatch.setattr(MIXERS, "_places", dict(MIXERS._places))
    monkeypatch.syspath_prepend(place)
    yield place
    for name in [path.stem for path in place.glob("*.py")]:
        sys.modules.pop(name, None)


def _offer(kind: str, module: str) -> str:
    return OFFERS.replace(f'{KIND} = "{KIND}"', f'{kind} = "{module}"')


def _command(*words: str) -> str:
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.slow
def test_the_example_keeps_the_contract(site: Path) -> None:
    """The page's test of the page's mixer passes."""
    _install(site, KIND, MIXER)
    page: dict[str, Any] = {}
    exec(JUDGED, page)
    page["test_the_mixer_keeps_the_contract"]()
    assert KIND in MIXERS.loaded()


@pytest.mark.slow
def test_a_package_with_a_mixer_is_trained_planned_and_served(site: Path, tmp_path: Path) -> None:
    """Through its entry point alone the kind is listed, trained, planned and served over two ranks."""
    _install(site, KIND, MIXER)
    assert KIND in {one["kind"] for one in json.loads(_command("mixers", "--json"))["mixers"]}
    toml = write_toml(small_run(tmp_path), tmp_path / "train.toml")
    text = toml.read_text()
    start, end = text.index("[model.mixer]"), text.index("[model.block]")
    size = json.loads(re.search(r"hidden_size = (\d+)", text)[1])
    toml.write_text(f'{text[:start]}[model.mixer]\nkind = "{KIND}"\nhidden_size = {size}\ntaps = 5\n{text[end:]}')
    _command("train", str(toml))
    folder = tmp_path / "run/model"
    planned = json.loads(_command("plan", "--tokens", "1M", "--ranks", "2", "--model", str(folder), "--json"))
    assert planned["parameters"] == json.loads((folder / "manifest.json").read_text())["parameters"]
    assert planned["halo_message_bytes"] == 4 * 4 * size
    with served(tmp_path, ranks=2, model=folder) as whole:
        body = {"model": "model", "prompt": "It was a cold morning", "max_tokens": 5, "temperature": 0}
        answer = httpx.post(f"{whole.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 5


def test_kinds_that_cannot_be_had_are_refused(site: Path) -> None:
    """A kind that nobody offers, two packages offer, or is built in, and a module that fails, are refused by name."""
    with pytest.raises(ConfigError, match=f"there is no mixer of kind '{KIND}'; there are bidirectional, convolution"):
        MIXERS.find(KIND)
    _install(site, "first", MIXER, _offer(KIND, "first"))
    _install(site, "second", MIXER, _offer(KIND, "second"))
    with pytest.raises(ConfigError, match=r"is a mixer of kind 'gated_convolution', which .* is already"):
        MIXERS.find(KIND)
    (site / "second-1.0.dist-info/entry_points.txt").unlink()
    _install(site, "third", MIXER.replace('"gated_convolution"', '"rfa"'), _offer("rfa", "third"))
    words = "third.GatedConvolutionConfig is a mixer of kind 'rfa', which dist_attn.model_config"
    with pytest.raises(ConfigError, match=words):
        MIXERS.load_offered()
    _install(site, "broken", "import nothing_of_this_name", _offer("abacus", "broken"))
    words = "the mixer 'abacus' of the package broken cannot be loaded from broken: ModuleNotFound"
    with pytest.raises(ConfigError, match=words):
        MIXERS.find("abacus")
    _install(site, "empty", "", _offer("ledger", "empty"))
    words = "the package empty offers the mixer 'ledger', but empty does not register that kind"
    with pytest.raises(ConfigError, match=words):
        MIXERS.find("ledger")


def test_a_configuration_without_costs_is_refused(site: Path) -> None:
    """A class that lacks what a mixer must say, or names no kind, is refused where it is registered."""
    without = re.sub(r"    def state_bytes.*?(?=    def traffic)", "", MIXER, count=1, flags=re.DOTALL)
    _install(site, KIND, without)
    with pytest.raises(ConfigError, match="lacks state_bytes; a mixer says what it costs"):
        MIXERS.find(KIND)
    _install(
        site, "unnamed", MIXER.replace('kind: Literal["gated_convolution"]', "kind: str"), _offer("any", "unnamed")
    )
    with pytest.raises(ConfigError, match="names no kind"):
        MIXERS.find("any")


def test_the_example_is_short() -> None:
    """The whole mixer, configuration, costs and state included, has fewer than 90 lines of code."""
    lines = [line for line in MIXER.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert 40 < len(lines) < 90


def test_the_page_names_what_exists() -> None:
    """Every file that the page names is in the repository."""
    paths = set(re.findall(r"`((?:dist_attn|tests|docs)/[\w./]+)`", PAGE))
    assert len(paths) > 5
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []

"""What programs that measure a service share: their options, the service in processes of its own, its sizes."""

import json
import os
import tempfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dist_attn_papers.service.instant_engine import InstantEngine
from tests.support.whole_service import ServiceProcess

__all__ = ["START_S", "instant_service", "own_service", "parser_of", "sizes_of"]

START_S = 400.0


def parser_of(name: str, about: str | None, *, model: str = "books-6m", ranks: int | None = None) -> ArgumentParser:
    """Of the program `dist-attn bench NAME`: `--model`, `--json`, and with a default of them `--ranks`."""
    prog = f"dist-attn bench {name}"
    parser = ArgumentParser(prog=prog, description=about, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=model, help="a folder, or a model that ships; default: %(default)s")
    parser.add_argument(
        "--json", type=Path, default=Path(os.devnull), metavar="FILE", help="write the result there too"
    )
    if ranks is not None:
        parser.add_argument("--ranks", type=int, default=ranks, help="default: %(default)s")
    return parser


@contextmanager
def own_service(model: str, ranks: int, *flags: str) -> Iterator[ServiceProcess]:
    """A service that is ready, in processes of its own, until the block ends; `flags` are more of `serve`.

    Raises: RuntimeError where it does not start, TimeoutError where its engine is not ready within `START_S`.
    """
    with (
        tempfile.TemporaryDirectory() as folder,
        ServiceProcess(Path(folder), ranks=ranks, model=model, flags=flags) as service,
    ):
        service.wait_until_ready(START_S)
        yield service


@contextmanager
def instant_service(model: Path, engine: InstantEngine) -> Iterator[ServiceProcess]:
    """The API alone, ready, before an engine that answers at once; the model's folder is that of its tokeniser."""
    with tempfile.TemporaryDirectory() as folder:
        behind = f"ipc://{folder}/api"
        if engine.sessions is not None:
            engine.sessions.store.address = str(Path(folder) / "data" / "states")
        with (
            engine.behind(behind),
            ServiceProcess(Path(folder), ranks=0, model=str(model), api_address=behind) as service,
        ):
            service.wait_until_ready(START_S)
            yield service


def sizes_of(model: Path) -> tuple[int, int]:
    """`hidden_size` and `vocab_size` of a model's folder."""
    config = json.loads((model / "config.json").read_text())
    return config["hidden_size"], config["vocab_size"]

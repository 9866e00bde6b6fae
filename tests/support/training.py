"""A training configuration small enough for a test: seconds, one file of prose, bytes as tokens."""

import json
from pathlib import Path
from typing import Any

from dist_attn.text import ByteTokeniser
from dist_attn.training import TrainingConfig
from tests.support.models import small_config
from tests.support.tokenisers import PROSE


def small_run(place: Path, **run: Any) -> TrainingConfig:
    """A run in `place`/run over `place`/prose.txt, which is written if it is missing; `run` overrides its section."""
    text = place / "prose.txt"
    if not text.exists():
        text.write_bytes(4 * PROSE.encode())
    ByteTokeniser().save(place / "tokeniser")
    values = {
        "model": small_config().model_dump(),
        "data": {
            "folder": place,
            "train": ["prose.txt"],
            "validation": "prose.txt",
            "validation_bytes": 300,
            "tokeniser": place / "tokeniser",
            "batch": 2,
            "segment": 24,
        },
        "optimiser": {"kind": "muon", "learning_rate": 1e-2, "matrix_learning_rate": 1e-2, "warmup_steps": 2},
        "run": {
            "folder": place / "run",
            "steps": 6,
            "log_every": 2,
            "evaluate_every": 4,
            "checkpoint_every": 3,
            "tensorboard": False,
            "plot": False,
            **run,
        },
    }
    return TrainingConfig.model_validate(values)


def write_toml(config: TrainingConfig | dict[str, Any], path: Path) -> Path:
    """The configuration as a TOML file; JSON's numbers, strings, lists and booleans are TOML's too."""

    def table(name: str, values: dict[str, Any]) -> str:
        plain = {k: v for k, v in values.items() if not isinstance(v, dict) and v is not None}
        inner = {k: v for k, v in values.items() if isinstance(v, dict)}
        lines = [f"[{name}]", *(f"{k} = {json.dumps(v)}" for k, v in plain.items())]
        return "\n".join(lines) + "\n" + "".join(table(f"{name}.{k}", v) for k, v in inner.items())

    sections = config if isinstance(config, dict) else config.model_dump(mode="json", exclude_none=True)
    path.write_text("".join(table(name, values) for name, values in sections.items()))
    return path

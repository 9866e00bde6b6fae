"""Time and memory of one layer of every mixer against the length, and of one more token."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.memory import peak_bytes
from benchmarks.timing import interleaved
from dist_attn.mixers import MixerConfig, TokenMixer, build_mixer
from dist_attn.ops import LocalSequenceOps
from dist_attn_papers.tables.experiment import Budget, Job, Scores, Watch
from dist_attn_papers.tables.mixer_arms import LAYERS_ALONE, layer_config

__all__ = ["LENGTHS", "SPEED", "speed_jobs"]

SPEED = "speed"
LENGTHS = (1024, 4096, 16_384)
WIDTH, HEADS, ROUNDS, STEPS = 64, 2, 3, 16


def speed_jobs(budget: Budget) -> list[Job]:
    """One job for each length, in which all mixers take turns."""
    jobs = []
    for length in (64, 128) if budget.smoke else LENGTHS:
        layers = {arm: layer_config(options, WIDTH, HEADS, length) for arm, options in LAYERS_ALONE.items()}
        rounds = budget.steps(ROUNDS, smoke=1)
        settings = {"task": SPEED, "length": length, "rounds": rounds, "layers": layers}
        jobs.append(Job(f"{SPEED}-{length}", 0, settings, partial(_measure, settings)))
    return jobs


def _measure(settings: Mapping[str, Any], folder: Path, watch: Watch) -> Scores:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mixers = {}
    for arm, values in settings["layers"].items():
        config = MixerConfig.model_validate(values)
        mixers[arm] = build_mixer(config)
    works = {arm: _pass(mixer, settings["length"]) for arm, mixer in mixers.items()}
    watch.tell(f"{len(works)} layers forward and backward over {settings['length']:,} tokens")
    scores = {f"{arm}:training": times.fastest for arm, times in interleaved(works, settings["rounds"]).items()}
    forward = {arm: _forward(mixer, settings["length"]) for arm, mixer in mixers.items()}
    scores |= {f"{arm}:forward": times.fastest for arm, times in interleaved(forward, settings["rounds"]).items()}
    watch.tell("one more token, and memory")
    steps = {
        arm: _steps(mixers[arm], settings["length"]) for arm, values in LAYERS_ALONE.items() if _streams(mixers[arm])
    }
    scores |= {f"{arm}:step": times.fastest / STEPS for arm, times in interleaved(steps, settings["rounds"]).items()}
    scores |= {f"{arm}:training_bytes": float(peak_bytes(work)) for arm, work in works.items()}
    return scores | {f"{arm}:forward_bytes": float(peak_bytes(work)) for arm, work in forward.items()}


def _pass(mixer: TokenMixer, length: int) -> Callable[[], object]:
    x_BLD = torch.randn(1, length, WIDTH, requires_grad=True)

    def work() -> None:
        mixer.zero_grad()
        y_BLD, _ = mixer(x_BLD, LocalSequenceOps())
        y_BLD.sum().backward()

    return work


def _forward(mixer: TokenMixer, length: int) -> Callable[[], object]:
    x_BLD = torch.randn(1, length, WIDTH)

    def work() -> object:
        with torch.inference_mode():
            return mixer(x_BLD, LocalSequenceOps())

    return work


def _steps(mixer: TokenMixer, length: int) -> Callable[[], object]:
    """Some tokens behind `length` others."""
    with torch.inference_mode():
        _, first = mixer(torch.randn(1, length, WIDTH), LocalSequenceOps())
        x_BD = torch.randn(1, WIDTH)

    def work() -> None:
        state = first
        with torch.inference_mode():
            for _ in range(STEPS):
                _, state = mixer.step(x_BD, state)

    return work


def _streams(mixer: TokenMixer) -> bool:
    return bool(getattr(mixer.config, "streams", False))

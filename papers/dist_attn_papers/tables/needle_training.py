"""Trainings on needles in noise, one for each stage of a curriculum, each of which begins with the model before it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dist_attn.training.config import TrainingConfig
from dist_attn.training.loop import train
from dist_attn.training.run_folder import read_metrics
from dist_attn_papers.tables.experiment import Interrupted, Job, Scores, Watch

__all__ = ["COPIES", "NOISE", "SYMBOLS", "Stage", "needles_job", "needles_run"]

NOISE, SYMBOLS, COPIES = 64, 4, 4


@dataclass(frozen=True)
class Stage:
    """One length of the curriculum, of both models alike, and how the sparse one's Selector learns there."""

    length: int
    batch: int
    steps: int
    learning_rate: float
    selector: dict[str, Any] = field(default_factory=dict)


def needles_job(arm: str, seed: int, sections: Sequence[Mapping[str, Any]], stages: Sequence[Stage]) -> Job:
    """One training for each stage, of the sections of a training file; scores by length, and by step what is kept."""

    def work(folder: Path, watch: Watch) -> Scores:
        scores: dict[str, float] = {}
        begin_from: Path | None = None
        steps = 0
        for number, (values, stage) in enumerate(zip(sections, stages, strict=True)):
            place = folder / f"stage-{number}"
            run = {**values["run"], "folder": place, "begin_from": begin_from}
            config = TrainingConfig.model_validate({**values, "run": run})

            def report(metrics: Mapping[str, Any], stage: Stage = stage) -> None:
                watch.tell(f"length {stage.length}: " + ", ".join(f"{k} {v}" for k, v in metrics.items()))

            final = train(config, resume=(place / "config.json").exists(), report=report, stop=watch.stop)
            if final.get("stopped"):
                raise Interrupted
            held = [record for record in read_metrics(place) if "accuracy" in record]
            last, length = held[-1], stage.length
            scores |= {f"accuracy_{length}": last["accuracy"], f"loss_{length}": last["validation_loss"]}
            if "kept_share" in last:
                scores |= {f"kept_{length}": last["kept_share"], f"dropped_{length}": last["dropped_share"]}
                scores |= {f"kept_at_step_{steps + record['step']}": record["kept_share"] for record in held}
                scores |= {f"accuracy_at_step_{steps + record['step']}": record["accuracy"] for record in held}
            steps += stage.steps
            begin_from = place / "model"
        return scores

    return Job(arm, seed, {"stages": sections}, work)


def needles_run(
    model: Mapping[str, Any], seed: int, number: int, stage: Stage, held_out: int, looks: int
) -> dict[str, Any]:
    """The sections of stage `number`; the held-out sequences are looked at so many times along the way."""
    return {
        "model": dict(model),
        "data": {
            "kind": "needles",
            # Other sequences in every stage and for every seed; both models read the same ones.
            "seed": 100 * seed + number,
            "length": stage.length,
            "noise": NOISE,
            "symbols": SYMBOLS,
            "copies": COPIES,
            "examples": stage.batch * stage.steps,
            "validation_examples": held_out,
            "batch": stage.batch,
        },
        "optimiser": {
            "learning_rate": stage.learning_rate,
            "warmup_steps": min(30, stage.steps // 3),
            "weight_decay": 0.01,
        },
        "run": {
            "seed": seed,
            "steps": stage.steps,
            "dtype": "float32",
            "tensorboard": False,
            "plot": False,
            "log_every": max(1, stage.steps // 4),
            "evaluate_every": max(1, stage.steps // looks),
            "checkpoint_every": max(1, stage.steps // 4),
        },
    }

"""Two tasks that need memory: the value that came with a key, and a text again, after noise of growing length."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_attn.models import LanguageModel, LanguageModelConfig
from dist_attn_papers.tables.experiment import Interrupted, Job, Scores, Watch

__all__ = ["TASKS", "VOCABULARY", "accuracy_at", "draw_copy", "draw_recall", "recall_job"]

# Keys and values, both of them symbols of a copy; noise; and the token that asks for the copy.
KEYS, VALUES, NOISE, ASK = range(16), range(16, 32), range(32, 48), 48
VOCABULARY, ITEMS, NOTHING = 49, 8, -100
EVERY = 50


def draw_recall(batch: int, distance: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Eight pairs of key and value, noise, and the keys in another order: of each its value is asked.

    Shapes: tokens and targets, [batch, 3 * 8 + distance]; a target of -100 asks nothing.
    Reference: Arora et al. 2023 (multi-query associative recall).
    """
    order = torch.rand(batch, len(KEYS), generator=generator).argsort(dim=1)
    keys, asked = order[:, :ITEMS], torch.rand(batch, ITEMS, generator=generator).argsort(dim=1)
    values = torch.randint(VALUES.start, VALUES.stop, (batch, ITEMS), generator=generator)
    pairs = torch.stack([keys, values], dim=2).flatten(1)
    tokens = torch.cat([pairs, _noise(batch, distance, generator), keys.gather(1, asked)], dim=1)
    targets = torch.full_like(tokens, NOTHING)
    targets[:, -ITEMS:] = values.gather(1, asked)
    return tokens, targets


def draw_copy(batch: int, distance: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Eight different symbols, noise, and the symbols again, each asked after the one before it.

    Shapes: tokens and targets, [batch, 2 * 8 + distance]; a target of -100 asks nothing.
    """
    symbols = torch.rand(batch, VALUES.stop, generator=generator).argsort(dim=1)[:, :ITEMS]
    ask = torch.full((batch, 1), ASK)
    tokens = torch.cat([symbols, _noise(batch, distance, generator), ask, symbols[:, :-1]], dim=1)
    targets = torch.full_like(tokens, NOTHING)
    targets[:, -ITEMS:] = symbols
    return tokens, targets


def _noise(batch: int, distance: int, generator: torch.Generator) -> Tensor:
    return torch.randint(NOISE.start, NOISE.stop, (batch, distance), generator=generator)


Draw = Callable[[int, int, torch.Generator], tuple[Tensor, Tensor]]
TASKS: Mapping[str, Draw] = {"recall": draw_recall, "copy": draw_copy}


def accuracy_at(distance: int) -> str:
    """The name of the score: the share of right answers after so much noise."""
    return f"accuracy_at_{distance}"


def recall_job(task: str, arm: str, seed: int, settings: Mapping[str, Any]) -> Job:
    """Train a small language model on noise of up to `longest` tokens, and ask it after each of `distances`.

    `settings`: model, steps, batch, longest, distances, asked (sequences of each distance), learning_rate.
    """
    return Job(f"{task}-{arm}", seed, {"task": task, **settings}, partial(_work, task, seed, settings))


def _work(task: str, seed: int, settings: Mapping[str, Any], folder: Path, watch: Watch) -> Scores:
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = LanguageModel(LanguageModelConfig.model_validate(settings["model"]))
    flushed = torch.set_flush_denormal(True)
    try:
        nats = _train(model, TASKS[task], seed, settings, watch)
        scores = {"nats": nats, "parameters": float(sum(p.numel() for p in model.parameters()))}
        for distance in settings["distances"]:
            scores[accuracy_at(distance)] = _accuracy(model.eval(), TASKS[task], distance, settings["asked"])
    finally:
        if flushed:
            torch.set_flush_denormal(False)
    return scores


def _train(model: LanguageModel, draw: Draw, seed: int, settings: Mapping[str, Any], watch: Watch) -> float:
    """The loss of the last steps."""
    generator, steps = torch.Generator().manual_seed(seed), settings["steps"]
    optimiser = torch.optim.AdamW(
        model.parameters(), lr=settings["learning_rate"], betas=(0.9, 0.98), weight_decay=0.01
    )
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimiser, lambda step: min((step + 1) / warm, 0.05 + 0.95 * (0.5 + 0.5 * math.cos(math.pi * step / steps)))
    )
    recent: list[float] = []
    for step in range(steps):
        if watch.stop():
            raise Interrupted
        # As many short distances as long ones.
        distance = round(math.exp(torch.rand((), generator=generator).item() * math.log(settings["longest"])))
        tokens, targets = draw(settings["batch"], distance, generator)
        h_BTD, _ = model.hidden(tokens)
        asked = targets != NOTHING
        loss = F.cross_entropy(model.readout(h_BTD[asked]), targets[asked])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
        recent = [*recent[1 - EVERY :], loss.item()]
        if (step + 1) % EVERY == 0:
            watch.tell(f"step {step + 1} of {steps}: {sum(recent) / len(recent):.3f} nats per answer")
    return sum(recent) / len(recent)


@torch.inference_mode()
def _accuracy(model: LanguageModel, draw: Draw, distance: int, sequences: int) -> float:
    """Of sequences that no training draws, the same for all arms; a few at a time."""
    generator, right = torch.Generator().manual_seed(10**6 + distance), 0
    for _ in range(sequences // 8):
        tokens, targets = draw(8, distance, generator)
        h_BTD, _ = model.hidden(tokens)
        asked = targets != NOTHING
        right += int((model.readout(h_BTD[asked]).argmax(-1) == targets[asked]).sum())
    return right / (sequences // 8 * 8 * ITEMS)

"""Train the long encoder: `python -m dist_attn_research long-encoder FOLDER`; a second call goes on where it stands.

FOLDER gets the tokens of all texts and, in `runs`, checkpoints. The teacher is the model that `dist-attn models add
minilm` adds; `--books` is a folder of novels, and other texts are fetched by name.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from dist_attn.checkpoints import load_text_encoder, resolve_model_folder, save_model
from dist_attn.models import LanguageModel
from dist_attn.text import Tokeniser, load_tokeniser
from dist_attn_research.long_encoder.distil import distillation_loss
from dist_attn_research.long_encoder.student import begin_student
from dist_attn_research.retrieval.texts import brown_documents, glosses, novels, speeches

TEACHER = "minilm"
STEP_TOKENS = 2048
LENGTHS, SHARES = (0, 128, 512, 1024), (0.3, 0.2, 0.3, 0.2)  # 0: short texts, each as long as it is
LONGEST_SHORT = 48
MOST_SHORT, FEWEST_SHORT = 96, 64  # of short texts in a batch, and of texts of one length, for it to be drawn
MIXER_RATE, OTHER_RATE = 5e-4, 2e-4
WARMUP_STEPS, MAX_NORM = 50, 1.0
SAVE_EVERY_S = 240.0
CHECKPOINT = "checkpoint.safetensors"
ADAM = ("step", "exp_avg", "exp_avg_sq")


class Batches:
    """Tokens of a step, a pure function of seed and step: windows of long texts, or short texts of one length."""

    def __init__(self, books: Path, tokeniser: Tokeniser, seed: int, cache: Path) -> None:
        self._seed = seed
        if not cache.is_file():
            long = [text for _, text in novels(books, held_out=False)]
            long += [text for _, text in speeches(held_out=False)]
            long += [text for _, text in brown_documents(held_out=False)]
            short = [gloss for _, gloss in glosses(held_out=False)]
            short += sorted({word for words, _ in glosses(held_out=False) for word in words})
            ids = [tokeniser.encode(text.encode()) for text in short]
            np.savez(
                cache,
                long=np.concatenate([tokeniser.encode(text.encode()) for text in long]),
                short=np.concatenate(ids),
                ends=np.cumsum([len(i) for i in ids]),
            )
        stored = np.load(cache)
        self._long, self._short, ends = stored["long"], stored["short"], stored["ends"]
        starts = np.concatenate([[0], ends[:-1]])
        lengths = ends - starts
        some = [length for length in range(1, LONGEST_SHORT) if (lengths == length).sum() >= FEWEST_SHORT]
        self._short_by_length = {length: starts[lengths == length] for length in some}
        counts = np.array([len(each) for each in self._short_by_length.values()], dtype=np.float64)
        self._short_shares = np.sqrt(counts) / np.sqrt(counts).sum()

    @property
    def tokens(self) -> int:
        """Of all long texts."""
        return len(self._long)

    def step(self, step: int) -> Tensor:
        """Shapes: [B, L] int64 with B L of about STEP_TOKENS, fewer for short texts."""
        draw = np.random.default_rng((self._seed, step))
        length = int(draw.choice(LENGTHS, p=SHARES))
        if length:
            starts = draw.integers(0, len(self._long) - length, STEP_TOKENS // length)
            return _cut(self._long, starts, length)
        # All texts of a batch have one length: a batch of very short ones holds fewer tokens.
        length = int(draw.choice(list(self._short_by_length), p=self._short_shares))
        places = self._short_by_length[length]
        return _cut(self._short, draw.choice(places, min(len(places), MOST_SHORT)), length)


def _cut(tokens: NDArray[np.int32], starts: NDArray[np.int64], length: int) -> Tensor:
    return torch.from_numpy(np.stack([tokens[start : start + length] for start in starts]).astype(np.int64))


def train(folder: Path, name: str, books: Path, steps: int, decay_steps: int) -> None:
    """Go on from the last checkpoint until `steps` are done; the learning rate falls to 0 over the last ones."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    run = folder / "runs" / name
    run.mkdir(parents=True, exist_ok=True)
    teacher = load_text_encoder(TEACHER)
    tokeniser = load_tokeniser(resolve_model_folder(TEACHER))
    torch.manual_seed(0)
    student = begin_student(teacher)
    batches = Batches(books, tokeniser, 0, folder / "tokens.npz")
    optimiser = torch.optim.AdamW(_groups(student), betas=(0.9, 0.98), weight_decay=0.01)
    rates = [group["lr"] for group in optimiser.param_groups]
    first = _resume(run, student, optimiser)
    began = saved = time.monotonic()
    print(json.dumps({"begins_at": first, "long_tokens": batches.tokens}), flush=True)
    for step in range(first, steps):
        factor = min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / max(1, decay_steps))
        for group, rate in zip(optimiser.param_groups, rates, strict=True):
            group["lr"] = rate * factor
        tokens_BL = batches.step(step)
        loss, parts = distillation_loss(student, teacher, tokens_BL)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(student.parameters(), MAX_NORM))
        optimiser.step()
        now = time.monotonic()
        numbers = {"loss": float(loss.detach()), **parts, "norm": norm, "s": now - began}
        line = {"step": step + 1, "shape": list(tokens_BL.shape)} | {n: round(v, 4) for n, v in numbers.items()}
        with (run / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        if now - saved > SAVE_EVERY_S or step + 1 == steps:
            _save(run, student, optimiser, step + 1)
            save_model(student, run / "model", tokeniser=tokeniser, half=True, facts={"steps": step + 1})
            saved = now


def _groups(student: LanguageModel) -> list[dict[str, Any]]:
    """Mixers, which have the most to learn, take larger steps than what stays the teacher's."""
    mixers = [parameter for name, parameter in student.named_parameters() if ".mixer." in name]
    others = [parameter for name, parameter in student.named_parameters() if ".mixer." not in name]
    return [{"params": mixers, "lr": MIXER_RATE}, {"params": others, "lr": OTHER_RATE}]


def _resume(run: Path, student: LanguageModel, optimiser: torch.optim.Optimizer) -> int:
    """The step at which the last checkpoint stands; 0 without one."""
    path = run / CHECKPOINT
    if not path.is_file():
        return 0
    stored = load_file(path)
    student.load_state_dict({name: stored[f"student.{name}"] for name in student.state_dict()})
    for number, parameter in enumerate(_parameters(optimiser)):
        optimiser.state[parameter] = {name: stored[f"optimiser.{number}.{name}"] for name in ADAM}
    return int(stored["step"])


def _save(run: Path, student: LanguageModel, optimiser: torch.optim.Optimizer, step: int) -> None:
    tensors = {f"student.{name}": tensor.contiguous() for name, tensor in student.state_dict().items()}
    for number, parameter in enumerate(_parameters(optimiser)):
        tensors |= {f"optimiser.{number}.{name}": optimiser.state[parameter][name].contiguous() for name in ADAM}
    part = run / f"{CHECKPOINT}.part"
    save_file(tensors | {"step": torch.tensor(step)}, part)
    part.replace(run / CHECKPOINT)


def _parameters(optimiser: torch.optim.Optimizer) -> Iterator[Tensor]:
    return (parameter for group in optimiser.param_groups for parameter in group["params"])


def main(arguments: Sequence[str]) -> int:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(prog="long-encoder", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--name", default="first", help="of the run")
    parser.add_argument("--books", type=Path, default=Path("data/books"))
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--decay-steps", type=int, default=4_000)
    chosen = parser.parse_args(arguments)
    train(chosen.folder, chosen.name, chosen.books, chosen.steps, chosen.decay_steps)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

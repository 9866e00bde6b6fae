"""A few steps of transformers' Trainer or TRL's SFTTrainer, alone or over ranks with the variables that torchrun sets.

All that ranks import is imported once: each is a process forked from this one. Without slices, ranks are those of the
Trainer itself, which have other texts each.
"""

import json
import multiprocessing
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments, default_data_collator

from tests.adapters.test_context_parallel import TOTAL, made
from tests.support.foreign_models import VOCABULARY
from tests.support.programs import free_port

TEXTS = [torch.randint(3, VOCABULARY, (TOTAL,), generator=torch.Generator().manual_seed(n)) for n in range(16)]


@dataclass(frozen=True)
class Run:
    """A type of model, with which trainer, over how many ranks, and how many of these share a text."""

    kind: str
    ranks: int = 1
    slices: int | None = None
    sft: bool = False


def losses(folder: Path, run: Run) -> list[float]:
    """The losses of four steps of two texts on each row of ranks."""
    common: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 1e-3,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
        "lr_scheduler_type": "constant", "seed": 5, "prediction_loss_only": True,
    }  # fmt: skip
    base: Any = Trainer
    given: dict[str, Any] = {"data_collator": default_data_collator}
    if run.sft:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        words = Tokenizer(WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0"))
        named = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2", unk_token="0")
        base, given = SFTTrainer, {"processing_class": named}
        args = SFTConfig(**common, bf16=False, gradient_checkpointing=False, max_length=None)
        texts: Any = Dataset.from_list([{"input_ids": text.tolist()} for text in TEXTS])
    else:
        args, texts = TrainingArguments(**common), [{"input_ids": text, "labels": text} for text in TEXTS]
    if run.slices is not None:
        from dist_attn.adapters.trainer import TrainOverRanks

        given["slices"] = run.slices
        base = type("OverRanks", (TrainOverRanks, base), {})
    trainer = base(model=made(run.kind), args=args, train_dataset=texts, **given)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _on_rank(rank: int, port: int, folder: Path, run: Run) -> None:
    """The life of one rank; the first one prints."""
    if run.ranks > 1:
        found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": run.ranks, "LOCAL_WORLD_SIZE": run.ranks}
        os.environ |= {name: str(number) for name, number in found.items()}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    found_losses = losses(folder, run)
    if rank == 0:
        print(json.dumps(found_losses), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def _over_ranks(folder: Path, run: Run) -> None:
    """Start the ranks of a run and wait for them; where one fails the others end."""
    context, port = multiprocessing.get_context("fork"), free_port()
    ranks = [context.Process(target=_on_rank, args=(n, port, folder, run), daemon=True) for n in range(run.ranks)]
    for process in ranks:
        process.start()
    left = {process.sentinel: process for process in ranks}
    while left:
        for ended in [left.pop(sentinel) for sentinel in wait(list(left))]:
            if ended.exitcode:
                sys.exit(f"a rank of {run} ended with {ended.exitcode}")  # daemons end with this process


def write_losses(folder: Path, runs: Sequence[Run], log: Path) -> None:
    """Carry out runs in this process's place; what they print, with a line of JSON for each, goes to a file."""
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    warnings.simplefilter("ignore")
    for number, run in enumerate(runs):
        _over_ranks(folder / str(number), run)

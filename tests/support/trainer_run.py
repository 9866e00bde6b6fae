"""A few steps of transformers' Trainer or TRL's SFTTrainer, alone or over ranks that torchrun has started.

    python -m tests.support.trainer_run KIND FOLDER [--sft] [--slices N]

Prints the losses as JSON. Without --slices over ranks it is the Trainer itself, whose ranks have other texts each.
"""

import argparse
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments, default_data_collator

from tests.adapters.test_context_parallel import TOTAL, made
from tests.support.foreign_models import VOCABULARY

TEXTS = [torch.randint(3, VOCABULARY, (TOTAL,), generator=torch.Generator().manual_seed(n)) for n in range(16)]


def run(kind: str, folder: Path, sft: bool, slices: int | None) -> list[float]:
    """The losses of four steps of two texts on each row of ranks."""
    common: dict[str, Any] = {
        "output_dir": str(folder), "per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 1e-3,
        "logging_steps": 1, "report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True,
        "lr_scheduler_type": "constant", "seed": 5, "prediction_loss_only": True,
    }  # fmt: skip
    base: Any = Trainer
    given: dict[str, Any] = {"data_collator": default_data_collator}
    if sft:
        from datasets import Dataset
        from trl import SFTConfig, SFTTrainer

        words = Tokenizer(WordLevel({str(n): n for n in range(VOCABULARY)}, unk_token="0"))
        named = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="0", eos_token="2", unk_token="0")
        base, given = SFTTrainer, {"processing_class": named}
        args = SFTConfig(**common, bf16=False, gradient_checkpointing=False, max_length=None)
        texts: Any = Dataset.from_list([{"input_ids": text.tolist()} for text in TEXTS])
    else:
        args, texts = TrainingArguments(**common), [{"input_ids": text, "labels": text} for text in TEXTS]
    if slices is not None:
        from dist_attn.adapters.trainer import TrainOverRanks

        given["slices"] = slices
        base = type("OverRanks", (TrainOverRanks, base), {})
    trainer = base(model=made(kind), args=args, train_dataset=texts, **given)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--sft", action="store_true")
    parser.add_argument("--slices", type=int)
    warnings.simplefilter("ignore")
    losses = run(**vars(parser.parse_args()))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(losses))
    if dist.is_initialized():
        dist.destroy_process_group()

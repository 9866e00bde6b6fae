"""Train the layer of the encoder that ships: `dist-attn bench long-encoder FOLDER --books NOVELS`.

MiniLM, which `dist-attn models add minilm` adds, reads the documents once; FOLDER keeps what it makes of them. Then the
layer behind it is trained, and FOLDER gets the model with it. The curve is `log.jsonl` there.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from dist_attn.checkpoints import load_text_encoder, resolve_model_folder, save_model
from dist_attn.conversion import begin_stream_encoder
from dist_attn.models import ContextConfig, StreamEncoder
from dist_attn.models.blocks import stream_through
from dist_attn.ops import LocalSequenceOps
from dist_attn.text import load_tokeniser
from dist_attn_research.long_encoder.documents import read_documents
from dist_attn_research.long_encoder.objective import ALONE, WEIGHTS, draw_batch, losses

__all__ = ["begin", "main"]

TEACHER, BLOCK = "minilm", 256
CONTEXT = {
    "num_layers": 1,
    "mlp_size": 768,
    "mixer": {"kind": "gla", "hidden_size": 384, "num_heads": 6, "key_size": 32},
}
# Of the logits of decays, over a head's keys: they begin with memories of 50 to 6,500 tokens.
DECAY_BIASES = (1.0, 6.0)
RATE, WARMUP_STEPS, DECAY_SHARE, MAX_NORM = 1e-3, 20, 0.3, 1.0


def begin() -> StreamEncoder:
    """MiniLM with a layer that adds nothing yet."""
    model = begin_stream_encoder(load_text_encoder(TEACHER), BLOCK, ContextConfig.model_validate(CONTEXT))
    with torch.no_grad():
        for name, parameter in model.context.named_parameters():
            if name.endswith("decay.bias_O"):
                parameter.copy_(torch.linspace(*DECAY_BIASES, len(parameter))[torch.randperm(len(parameter))])
    return model


def train(folder: Path, books: Path, tokens: int, steps: int) -> None:
    """Read documents of so many tokens, take so many steps, and write `folder`/model."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(0)
    model, tokeniser = begin(), load_tokeniser(resolve_model_folder(TEACHER))
    documents = read_documents(model, tokeniser, books, tokens, folder / "hidden", lambda line: print(line, flush=True))
    parameters = list(model.context.parameters())
    optimiser = torch.optim.AdamW(parameters, lr=RATE, weight_decay=0.01, betas=(0.9, 0.98))
    began = time.monotonic()
    with (folder / "log.jsonl").open("w") as log:
        for step in range(steps):
            optimiser.param_groups[0]["lr"] = RATE * min(
                1.0, (step + 1) / WARMUP_STEPS, (steps - step) / (DECAY_SHARE * steps)
            )
            batch = draw_batch(documents, step)
            with torch.autocast("cpu", torch.bfloat16):
                streamed_BTD = _context(model, batch.hidden_BTD)
                alone_BTD = _context(model, batch.hidden_BTD.reshape(-1, ALONE, model.hidden_size))
                sentence_SMD = _context(model, batch.sentence_SMD)
            parts = losses(batch, streamed_BTD, alone_BTD.reshape_as(streamed_BTD), sentence_SMD)
            loss = torch.stack([weight * parts[name] for name, weight in WEIGHTS.items()]).sum()
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, MAX_NORM)
            optimiser.step()
            numbers = {"loss": float(loss.detach()), **{name: float(part.detach()) for name, part in parts.items()}}
            line = {"step": step + 1, **numbers, "seconds": time.monotonic() - began}
            log.write(json.dumps({name: round(value, 4) for name, value in line.items()}) + "\n")
            log.flush()
    facts = {"steps": steps, "tokens_read": sum(len(document.label_L) for document in documents)}
    save_model(model.eval(), folder / "model", tokeniser=tokeniser, half=True, facts=facts)


def _context(model: StreamEncoder, h_BTD: Tensor) -> Tensor:
    state = model.initial_state(len(h_BTD))
    out_BTD, _ = stream_through(cast(nn.ModuleList, model.context), h_BTD, LocalSequenceOps(), state.layers)
    return out_BTD.float()


def main(arguments: Sequence[str]) -> int:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(prog="long-encoder", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--books", type=Path, default=Path("data/books"), help="a folder of novels")
    parser.add_argument("--tokens", type=int, default=1_300_000, help="of the documents, about")
    parser.add_argument("--steps", type=int, default=700)
    chosen = parser.parse_args(arguments)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    train(chosen.folder, chosen.books, chosen.tokens, chosen.steps)
    return 0

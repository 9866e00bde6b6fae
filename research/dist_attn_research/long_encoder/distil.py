"""Losses of a student against its teacher, over spans of tokens.

Letters: B sequences, L tokens of each, S spans of a sequence, N vectors that are compared, D model width.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dist_attn.models import LanguageModel, TextEncoder
from dist_attn.ops import LocalSequenceOps

__all__ = ["all_layers", "distillation_loss", "read_teacher", "span_means"]

SPAN, COMPARED, WINDOW = 32, 128, 512
TEMPERATURE = 0.05
WEIGHTS = {"whole": 1.0, "spans": 0.5, "tokens": 0.5, "contrast": 0.5}


def all_layers(blocks: nn.ModuleList, compute: Callable[[], Any]) -> tuple[Any, list[Tensor]]:
    """What `compute` returns, and the tokens behind each block while it ran, [B, L, D] each."""
    kept: list[Tensor] = []
    hooks = [block.register_forward_hook(lambda _m, _i, out: kept.append(out[0])) for block in blocks]
    try:
        return compute(), kept
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def read_teacher(teacher: TextEncoder, tokens_BL: Tensor) -> list[Tensor]:
    """The tokens behind each of the teacher's blocks, [B, L, D], read in framed pieces of as much as it takes.

    L is a multiple of such a piece, or shorter than one.
    """
    batch, length = tokens_BL.shape
    # Halves of a window of 512 are 256 tokens of text; with the frame that is two more than the teacher was trained
    # with, and within its learned positions.
    piece = min(length, WINDOW // 2)
    framed = teacher.frame(tokens_BL.reshape(-1, piece))
    x_BLD = teacher.embedding(framed)
    if teacher.type_embedding is not None:
        x_BLD = x_BLD + teacher.type_embedding.weight[0]
    _, layers = all_layers(teacher.encoder.blocks, lambda: teacher.encoder(x_BLD, LocalSequenceOps()))
    before = len(teacher.config.prefix)
    return [layer[:, before : before + piece].reshape(batch, length, -1) for layer in layers]


def span_means(h_BLD: Tensor, span: int) -> Tensor:
    """Mean of each span's tokens, of length 1: [B, L, D] -> [B, S, D]; the last tokens count where they fill one."""
    count = h_BLD.shape[1] // span
    return F.normalize(h_BLD[:, : count * span].unflatten(1, (count, span)).mean(2), dim=-1)


def distillation_loss(
    student: LanguageModel, teacher: TextEncoder, tokens_BL: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Cosine distance to the teacher of windows, spans and tokens of each layer, and of who is near to whom.

    A window's target is the mean of its halves' unit vectors.
    """
    theirs = read_teacher(teacher, tokens_BL)
    (h_BLD, _), ours = all_layers(student.blocks, lambda: student.hidden(tokens_BL))
    window, half, span, compared = (min(tokens_BL.shape[1], size) for size in (WINDOW, WINDOW // 2, SPAN, COMPARED))
    target_BSD = span_means(span_means(theirs[-1], half), window // half)
    parts = {
        "whole": _distance(span_means(h_BLD, window), target_BSD),
        "spans": _distance(span_means(h_BLD, span), span_means(theirs[-1], span)),
        "tokens": torch.stack([_distance(*pair) for pair in zip(ours, theirs, strict=True)]).mean(),
        "contrast": nearness_loss(*(span_means(h, compared).flatten(0, 1) for h in (h_BLD, theirs[-1]))),
    }
    loss = torch.stack([weight * parts[name] for name, weight in WEIGHTS.items()]).sum()
    return loss, {name: float(part.detach()) for name, part in parts.items()}


def _distance(own: Tensor, target: Tensor) -> Tensor:
    return 1 - F.cosine_similarity(own, target, dim=-1).mean()


def nearness_loss(own_ND: Tensor, target_ND: Tensor) -> Tensor:
    """Divergence from the teacher's distribution over the batch's other vectors, given each; unit vectors [N, D]."""
    itself_NN = torch.eye(len(own_ND), dtype=torch.bool, device=own_ND.device)
    ours, theirs = (
        F.log_softmax((v @ v.T / TEMPERATURE).masked_fill(itself_NN, -1e4), dim=-1) for v in (own_ND, target_ND)
    )
    return F.kl_div(ours, theirs, log_target=True, reduction="batchmean")

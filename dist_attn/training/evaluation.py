"""The cost of tokens to a language model: its loss in training, and bits per byte of a text, in a stream or windows.

Letters: N scored tokens, P of a piece, B windows, L tokens of a window on this rank, D model width, V vocabulary.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dist_attn.checkpoints import load_model_and_tokeniser, resolve_model_folder
from dist_attn.comm import Communicator
from dist_attn.devices import ON_CPU, Compute
from dist_attn.errors import InputError
from dist_attn.models import CausalModel, weight_precision_of
from dist_attn.ops import Watch, watching
from dist_attn.ops.device import send
from dist_attn.training.classification import cross_entropy
from dist_attn.training.mesh import Share
from dist_attn.wire.choices import WeightPrecision

__all__ = ["Score", "evaluate_file", "score_tokens"]

_BLOCK_TOKENS = 4096


# Tokens whose logits exist at the same time: on a CPU as stay in its caches, on a GPU as fill it.
LOSS_PIECE, GPU_LOSS_PIECE = 512, 4_096


def token_loss(readout: Callable[[Tensor], Tensor], h_ND: Tensor, targets_N: Tensor) -> Tensor:
    """Sum cross entropies, in pieces recomputed backward: whole logits do not fit caches and are 2 x slower.

    Half-precision logits go through the softmax in float32; an autocast around the call holds in the recomputation.

    Shapes: h [N, D], targets [N] int64 -> scalar.
    """

    def piece(h_PD: Tensor, targets_P: Tensor) -> Tensor:
        return cross_entropy(readout(h_PD), targets_P)

    tokens = LOSS_PIECE if h_ND.device.type == "cpu" else GPU_LOSS_PIECE
    pieces = zip(h_ND.split(tokens), targets_N.split(tokens), strict=True)
    losses = [checkpoint(piece, h, targets, use_reentrant=False) for h, targets in pieces]
    return torch.stack(losses).sum()


@dataclass(frozen=True)
class Score:
    """The cost of a text to a model; the first token is scored without context as 1 / vocabulary."""

    bits: float
    num_tokens: int
    num_bytes: int

    @property
    def bits_per_byte(self) -> float:
        """The bits per byte of the original text."""
        return self.bits / self.num_bytes


@torch.inference_mode()
def score_tokens(
    model: CausalModel, tokens: np.ndarray, num_bytes: int, context: int | None = None, share: Share | None = None
) -> Score:
    """Score `tokens`, which spell `num_bytes` bytes, each given all the tokens before it, or those of one window.

    With a `context` of N, windows of N tokens that begin with the empty state are read every N/2 tokens. The first
    scores all its tokens, every other one those that no window before it has scored: each token is scored once, given
    N/2 to N tokens (fewer where the text begins). So models whose state carries far and models that see a window are
    compared at equal sight, and softmax stays at the positions that it was trained on.

    The ranks of a `share` read every block and every window together, a slice each; all of them call this.

    Cost: one pass over the text; two with a context.
    Raises: InputError for an empty text, or a context of less than 2 tokens.
    """
    if not len(tokens) or not num_bytes:
        raise InputError("the text is empty; scoring needs at least one byte")
    _check_context(context)
    stream = torch.from_numpy(tokens.astype(np.int64))
    share = (Share() if share is None else share).lengthwise()
    nats = _carried_nats(model, stream, share) if context is None else _windowed_nats(model, stream, context, share)
    total = float(share.sum(torch.tensor(nats, dtype=torch.float64, device="cpu")))
    total += math.log(model.vocab_size)  # the first token
    return Score(bits=total / math.log(2), num_tokens=len(tokens), num_bytes=num_bytes)


def _check_context(context: int | None) -> None:
    if context is not None and context < 2:
        raise InputError(f"a context of {context} tokens was given; windows that overlap by half need at least 2")


def _carried_nats(model: CausalModel, stream: torch.Tensor, share: Share) -> float:
    """Sum the nats of this share of all tokens but the first, in one pass with the state carried between blocks."""
    nats, state = 0.0, model.initial_state(1)
    for start in range(0, len(stream) - 1, _BLOCK_TOKENS):
        inputs = stream[None, start : min(start + _BLOCK_TOKENS, len(stream) - 1)]
        own = share.tokens(inputs.shape[1])
        ops = share.ops(inputs.shape[1])
        h_BLD, state = model.hidden(inputs[:, own], ops, state)
        nats += _nats(model, h_BLD[0], stream[start + 1 : start + 1 + inputs.shape[1]][own])
    return nats


def _windowed_nats(model: CausalModel, stream: torch.Tensor, context: int, share: Share) -> float:
    """Sum the nats of this share of all tokens but the first, each in the window of `context` inputs that scores it."""
    total, stride = len(stream) - 1, context // 2
    first = min(context, total)
    if not first:
        return 0.0

    def windows_end_at(stops: Sequence[int], length: int, owed: int) -> float:
        """Sum the nats of the last `owed` tokens of windows of one length."""
        own = share.tokens(length)
        inputs_BL = torch.stack([stream[stop - length : stop] for stop in stops])[:, own]
        h_BLD, _ = model.hidden(inputs_BL, share.ops(length))
        scored = slice(max(0, length - owed - own.start), None)
        # The input at position t predicts the token after it.
        targets_BL = torch.stack([stream[stop - length + 1 : stop + 1] for stop in stops])[:, own]
        return _nats(model, h_BLD[:, scored].flatten(0, 1), targets_BL[:, scored].flatten())

    nats = windows_end_at([first], first, first)
    # A window that ends before `stop` owes the last `stride`.
    stops = range(context + stride, total + 1, stride)
    at_once = max(1, _BLOCK_TOKENS // context)
    for begin in range(0, len(stops), at_once):
        nats += windows_end_at(stops[begin : begin + at_once], context, stride)
    done = stops[-1] if stops else first
    if done < total:
        nats += windows_end_at([total], context, total - done)
    return nats


def _nats(model: CausalModel, h_LD: torch.Tensor, targets_L: torch.Tensor) -> float:
    targets_L = send(targets_L, h_LD.device)
    pieces = zip(h_LD.split(_BLOCK_TOKENS), targets_L.split(_BLOCK_TOKENS), strict=True)  # logits of all would be large
    # The tokens go in as slices of one sequence: [B, D] would be a step of as many sequences.
    logits = ((model.readout(h_LD[None])[0], targets_L) for h_LD, targets_L in pieces)
    return sum(float(cross_entropy(l_LV, t_L)) for l_LV, t_L in logits)


def evaluate_file(
    name: Path,
    data: bytes,
    model_name: str | None,
    context: int | None = None,
    *,
    weights: WeightPrecision = "float32",
    compute: Compute = ON_CPU,
    tell: Callable[[str], None] | None = None,
    comm: Communicator | None = None,
) -> dict[str, float | int | str | None]:
    """Measure the bits per byte of a file's bytes under a model folder or shipped model; returns plain values.

    `guarded_share` is the share of kernel attention's denominators that a guard changed before division, None if none.

    `weights` is how the model's lie in memory, `compute` where it works, which `tell` gets in words. The ranks of
    `comm` read every block together; all of them call this and get the same.

    Raises: InputError for an empty file or a context below 2, ModelFolderError for an unusable model.
    """
    started = time.perf_counter()
    if not data:
        raise InputError(f"{name} is empty; scoring needs at least one byte")
    _check_context(context)
    folder = resolve_model_folder(model_name)
    model, tokeniser = load_model_and_tokeniser(folder, weights=weights)
    if tell is not None:
        tell(compute.sentence(comm, weights))
    watch, share = Watch(), Share(compute.device, comm)
    with compute.autocast(), watching(watch):
        score = score_tokens(model.to(compute.device), tokeniser.encode(data), len(data), context, share)
    counts = torch.tensor([sum(map(sum, watch.guarded)), watch.denominators], device="cpu")
    guarded, divided = share.sum(send(counts, share.device)).tolist()
    return {
        "bits_per_byte": round(score.bits_per_byte, 5),
        "tokens": score.num_tokens,
        "bytes": score.num_bytes,
        "context": context,
        "guarded_share": guarded / divided if divided else None,
        "seconds": round(time.perf_counter() - started, 3),
        "model": folder.name,
        "weights": weight_precision_of(model),
    }

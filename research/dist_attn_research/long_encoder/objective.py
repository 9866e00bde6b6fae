"""What the layer behind MiniLM learns: stay near to MiniLM, be near to rows of one's chapter and to one's sentences.

Letters: B rows of a batch, T tokens, N windows, S sentences, M tokens of the longest sentence, D width.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dist_attn_research.long_encoder.documents import ReadDocument

__all__ = ["Batch", "draw_batch", "losses"]

WINDOW = 256
ALONE = 512  # tokens that are read with no text before them
BATCH_TOKENS = 8_192
LENGTHS = (1_024, 2_048, 4_096)
SENTENCES = 8  # of each row
CHAPTER_TEMPERATURE, SENTENCE_TEMPERATURE = 0.1, 0.05
NONE = -1
WEIGHTS = {"anchor": 1.0, "chapter": 0.2, "sentence": 0.3}


@dataclass(frozen=True)
class Batch:
    """Parts of documents and sentences of theirs.

    Shapes: hidden [B, T, D]; label [N] of windows, `NONE` where a window has several or lies behind the end; there [N]
    whether it has text; sentences [S, M, D] behind which zeros stand, and their sizes [S]; `place` (row, start, stop)
    of each sentence in the batch.
    """

    hidden_BTD: Tensor
    label_N: Tensor
    there_N: Tensor
    sentence_SMD: Tensor
    size_S: Tensor
    places: tuple[tuple[int, int, int], ...]

    @property
    def window_S(self) -> Tensor:
        """The window that each sentence lies in."""
        each = self.hidden_BTD.shape[1] // WINDOW
        return torch.tensor([row * each + start // WINDOW for row, start, _ in self.places])


def draw_batch(documents: Sequence[ReadDocument], step: int, seed: int = 0) -> Batch:
    """A pure function of documents, step and seed; long documents are drawn as often as they have tokens."""
    draw = random.Random(seed * 1_000_003 + step)
    length = draw.choice(LENGTHS)
    sizes = [len(document.label_L) for document in documents]
    hidden, labels, sentences, places = [], [], [], list[tuple[int, int, int]]()
    for row in range(BATCH_TOKENS // length):
        document = draw.choices(documents, sizes)[0]
        count = min(length, len(document.label_L) // WINDOW * WINDOW)
        first = WINDOW * draw.randrange((len(document.label_L) - count) // WINDOW + 1)
        some = slice(first, first + count)
        missing = length - count
        hidden.append(np.pad(document.hidden_LD[some], ((0, missing), (0, 0))))
        labels.append(np.pad(document.label_L[some], (0, missing), constant_values=NONE))
        inside = [
            number
            for number, (start, stop) in enumerate(document.span_S2.tolist())
            if first <= start and stop <= first + count and start // WINDOW == (stop - 1) // WINDOW
        ]
        for number in draw.sample(inside, min(len(inside), SENTENCES)):
            start, stop = document.span_S2[number].tolist()
            sentences.append(torch.from_numpy(document.sentence(number)).float())
            places.append((row, start - first, stop - first))
    label_NW = torch.from_numpy(np.stack(labels)).reshape(-1, WINDOW)
    same_N = label_NW[:, 0] == label_NW[:, -1]
    return Batch(
        torch.from_numpy(np.stack(hidden)).float(),
        torch.where(same_N, label_NW[:, 0], NONE),
        label_NW[:, -1] != NONE,
        torch.nn.utils.rnn.pad_sequence(sentences, batch_first=True),
        torch.tensor([len(sentence) for sentence in sentences]),
        tuple(places),
    )


def losses(batch: Batch, streamed_BTD: Tensor, alone_BTD: Tensor, sentence_SMD: Tensor) -> dict[str, Tensor]:
    """The parts of the loss, from what the layer makes of the text in one stream, in parts alone, and of sentences."""
    own_ND, alone_ND, theirs_ND = (_windows(h) for h in (streamed_BTD, alone_BTD, batch.hidden_BTD))
    own_SD, theirs_SD = (_means(h, batch.size_S) for h in (sentence_SMD, batch.sentence_SMD))
    there_N = batch.there_N
    pairs = ((own_ND[there_N], theirs_ND[there_N]), (alone_ND[there_N], theirs_ND[there_N]), (own_SD, theirs_SD))
    return {
        "anchor": torch.stack([1 - F.cosine_similarity(own, theirs).mean() for own, theirs in pairs]).sum(),
        "chapter": (_chapter_loss(batch, own_ND) + _chapter_loss(batch, alone_ND)) / 2,
        "sentence": _sentence_loss(batch, streamed_BTD, own_ND, own_SD),
    }


def _windows(h_BTD: Tensor) -> Tensor:
    return h_BTD.reshape(-1, WINDOW, h_BTD.shape[-1]).mean(1)


def _means(h_SMD: Tensor, size_S: Tensor) -> Tensor:
    there_SM = torch.arange(h_SMD.shape[1]) < size_S[:, None]
    return (h_SMD * there_SM[..., None]).sum(1) / size_S[:, None]


def _chapter_loss(batch: Batch, rows_ND: Tensor) -> Tensor:
    """Each window against all others but its neighbours: those of its chapter are right.

    Reference: Khosla et al. 2020, Supervised Contrastive Learning, Eq. 2.
    """
    number_N = torch.arange(len(rows_ND))
    near_NN = (number_N[:, None] - number_N).abs() <= 1
    counts_NN = batch.there_N & ~near_NN
    right_NN = counts_NN & (batch.label_N[:, None] == batch.label_N) & (batch.label_N != NONE)[:, None]
    unit_ND = F.normalize(rows_ND, dim=-1)
    shares_NN = F.log_softmax((unit_ND @ unit_ND.T / CHAPTER_TEMPERATURE).masked_fill(~counts_NN, -1e4), dim=1)
    asked_N = right_NN.any(1)
    if not asked_N.any():
        return rows_ND.sum() * 0
    return -((shares_NN * right_NN).sum(1)[asked_N] / right_NN.sum(1)[asked_N]).mean()


def _sentence_loss(batch: Batch, streamed_BTD: Tensor, rows_ND: Tensor, own_SD: Tensor) -> Tensor:
    """Each sentence, read alone, against all windows; for every second one its own window is what is left without it.

    Reference: Lee et al. 2019, Latent Retrieval, Sec. 4 (the inverse cloze task).
    """
    window_S = batch.window_S
    sentence_SD, unit_ND = F.normalize(own_SD, dim=-1), F.normalize(rows_ND, dim=-1)
    scores_SN = (sentence_SD @ unit_ND.T).masked_fill(~batch.there_N, -1e4)
    left_out = []
    for number, (row, start, stop) in enumerate(batch.places):
        rest_D = rows_ND[window_S[number]] * WINDOW - streamed_BTD[row, start:stop].sum(0)
        left_out.append(F.normalize(rest_D, dim=-1) if number % 2 else unit_ND[window_S[number]])
    own_S = (sentence_SD * torch.stack(left_out)).sum(-1)
    scores_SN = scores_SN.scatter(1, window_S[:, None], own_S[:, None])
    return F.cross_entropy(scores_SN / SENTENCE_TEMPERATURE, window_S)

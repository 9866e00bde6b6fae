"""Windows of a text as single rows, and which other row is the nearest: what encodings are trained and judged by."""

import numpy as np
import torch
from numpy.typing import NDArray

from dist_attn.models import LanguageModel
from dist_attn.training.chapters import Chapter

__all__ = ["chapters_of_windows", "nearest_rows", "window_rows"]

_BLOCK_TOKENS = 4096


@torch.inference_mode()
def window_rows(model: LanguageModel, tokens: NDArray[np.int32], window: int, *, carried: bool) -> NDArray[np.float32]:
    """A window's mean hidden state: of one stream, as `dist-attn encode` gives it, or with every window read alone.

    Shapes: tokens [T] -> [T // window, D]; what follows the last whole window is left out.
    """
    count = len(tokens) // window
    windows_WL = torch.from_numpy(tokens[: count * window].astype(np.int64)).reshape(count, window)
    parts, state = [torch.empty(0, model.config.hidden_size)], model.initial_state(1)
    for block_BL in windows_WL.split(max(1, _BLOCK_TOKENS // window)):
        if carried:
            h_BLD, state = model.hidden(block_BL.reshape(1, -1), state=state)
        else:
            h_BLD = model.encode(block_BL)
        parts.append(h_BLD.reshape(-1, window, h_BLD.shape[-1]).mean(1).cpu().float())
    rows: NDArray[np.float32] = torch.cat(parts).numpy()
    return rows


def chapters_of_windows(chapters: tuple[Chapter, ...], count: int, window: int) -> NDArray[np.int64]:
    """The number of the chapter that each of `count` windows lies in with all its tokens.

    -1 where it lies in no single one, or where its chapter has no second window to be found.
    """
    chapter_W = np.full(count, -1, dtype=np.int64)
    for number, chapter in enumerate(chapters):
        first, last = -(-chapter.start // window), min(chapter.stop // window, count)
        if last - first >= 2:
            chapter_W[first:last] = number
    return chapter_W


def nearest_rows(rows_ND: NDArray[np.floating]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The other row that is nearest to each by cosine, and all cosines, with -inf for a row and itself.

    Shapes: rows [N, D] -> [N], [N, N].
    """
    unit_ND = rows_ND.astype(np.float64)
    unit_ND /= np.linalg.norm(unit_ND, axis=1, keepdims=True)
    cosine_NN = unit_ND @ unit_ND.T
    np.fill_diagonal(cosine_NN, -np.inf)
    return cosine_NN.argmax(1), cosine_NN

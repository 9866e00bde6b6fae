"""Classifiers of long texts that only count: what a table's accuracies are worth is seen beside them."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from dist_attn.checkpoints import load_any_model, save_model
from dist_attn.models import TextClassifier, TextClassifierConfig
from dist_attn.text import load_tokeniser
from dist_attn_papers.made_up import ListOps
from dist_attn_papers.tables.made_once import make_once

__all__ = [
    "byte_histogram_accuracy",
    "first_operator_accuracy",
    "logistic_accuracy",
    "pair_histogram_accuracy",
    "towers_of",
]


def first_operator_accuracy(expressions: ListOps, train: range, held_out: range) -> tuple[float, float]:
    """How often the commonest value is right, and how often the commonest one under the same outermost operator."""
    values: Counter[int] = Counter()
    under: defaultdict[int, Counter[int]] = defaultdict(Counter)
    for index in train:
        tokens, value = expressions(index)
        values[value] += 1
        under[int(tokens[0])][value] += 1
    commonest = values.most_common(1)[0][0]
    right_alone = right_under = 0
    for index in held_out:
        tokens, value = expressions(index)
        known = under.get(int(tokens[0]), values)
        right_alone += value == commonest
        right_under += value == known.most_common(1)[0][0]
    return right_alone / len(held_out), right_under / len(held_out)


def byte_histogram_accuracy(
    train: Sequence[str], train_labels: Sequence[int], held_out: Sequence[str], held_out_labels: Sequence[int]
) -> float:
    """The accuracy of a logistic regression on how often each byte occurs."""
    features = [_histograms(texts) for texts in (train, held_out)]
    return logistic_accuracy(features[0], train_labels, features[1], held_out_labels)


def pair_histogram_accuracy(
    train: Sequence[tuple[str, str]],
    train_labels: Sequence[int],
    held_out: Sequence[tuple[str, str]],
    held_out_labels: Sequence[int],
) -> float:
    """The accuracy of a logistic regression on the products and distances of two texts' byte counts."""
    first_NF = _histograms([text for text, _ in train])
    mean_F, deviation_F = first_NF.mean(0), first_NF.std(0) + 1e-3

    def features(pairs: Sequence[tuple[str, str]]) -> NDArray[np.float32]:
        both = [(_histograms([pair[side] for pair in pairs]) - mean_F) / deviation_F for side in (0, 1)]
        return np.concatenate([both[0] * both[1], np.abs(both[0] - both[1])], axis=1)

    return logistic_accuracy(features(train), train_labels, features(held_out), held_out_labels, decay=1e-2)


def logistic_accuracy(
    train_NF: NDArray[np.float32],
    train_labels: Sequence[int],
    held_out_NF: NDArray[np.float32],
    held_out_labels: Sequence[int],
    decay: float = 1e-3,
) -> float:
    """The held-out accuracy of a linear map of the features, which are brought to mean 0 and deviation 1."""
    mean_F, deviation_F = train_NF.mean(0), train_NF.std(0) + 1e-3
    x_NF, y_N = torch.from_numpy((train_NF - mean_F) / deviation_F), torch.tensor(train_labels)
    weight_FC = torch.zeros(x_NF.shape[1], int(y_N.max()) + 1, requires_grad=True)
    bias_C = torch.zeros(weight_FC.shape[1], requires_grad=True)
    optimiser = torch.optim.LBFGS([weight_FC, bias_C], max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimiser.zero_grad()
        value = F.cross_entropy(x_NF @ weight_FC + bias_C, y_N) + decay * weight_FC.square().sum()
        value.backward()
        return value

    optimiser.step(loss)
    held_out = torch.from_numpy((held_out_NF - mean_F) / deviation_F)
    right = (held_out @ weight_FC + bias_C).argmax(1) == torch.tensor(held_out_labels)
    return float(right.float().mean())


def _histograms(texts: Sequence[str]) -> NDArray[np.float32]:
    """Logarithms of how often each byte occurs in 1,000 of the text, [N, 256]."""
    counts = [np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=256) / len(text.encode()) for text in texts]
    return np.log1p(1000 * np.stack(counts)).astype(np.float32)


def towers_of(authors: Path, model: Mapping[str, Any], seed: int, folder: Path) -> Path:
    """The model folder, made once, of the classifier `model`: embedding and encoder of `authors`, and a fresh head."""

    def make(beside: Path) -> None:
        trained = load_any_model(authors)
        assert isinstance(trained, TextClassifier)  # what the job of the authors trains
        torch.manual_seed(seed)
        pairs = TextClassifier(TextClassifierConfig.model_validate(model))
        pairs.embedding.load_state_dict(trained.embedding.state_dict())
        pairs.encoder.load_state_dict(trained.encoder.state_dict())
        save_model(pairs, beside, tokeniser=load_tokeniser(authors))

    return make_once(folder, make)

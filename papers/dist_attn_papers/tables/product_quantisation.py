"""Product quantisation of a linear map: parts of a vector become the nearest of a few prototypes.

A vector of D numbers is cut into S parts. Each part has C prototypes, learnt by k-means from vectors seen first. What
the map makes of every prototype is computed once; of a new vector only the S nearest are found, and their S rows added.
"""

import warnings

import torch
import torch.nn.functional as F
from scipy.cluster.vq import kmeans2
from torch import Tensor, nn

from dist_attn.errors import ConfigError, ShapeError

__all__ = ["QuantisedLinear", "learn_prototypes", "nearest", "quantised_linear_naive"]

ITERATIONS = 10


def learn_prototypes(x_LD: Tensor, parts: int, prototypes: int, seed: int) -> Tensor:
    """Centres of the parts of the vectors, by k-means from k-means++: [S, C, D / S].

    Raises: ConfigError for parts that do not divide D, or more prototypes than vectors.
    """
    count, size = x_LD.shape
    if size % parts:
        raise ConfigError(f"{parts} parts do not divide vectors of {size} numbers; take a divisor")
    if prototypes > count:
        raise ConfigError(f"{prototypes} prototypes were asked for from {count} vectors; show it more")
    return torch.stack([_centres(part_LK, prototypes, seed + n) for n, part_LK in enumerate(x_LD.chunk(parts, dim=1))])


def _centres(part_LK: Tensor, prototypes: int, seed: int) -> Tensor:
    distinct: Tensor = part_LK.float().unique(dim=0)
    if len(distinct) <= prototypes:
        # Every value is a prototype; k-means++ would look for others that are not there.
        return distinct[torch.arange(prototypes) % len(distinct)]
    with warnings.catch_warnings():
        # A centre that has lost all its vectors stays where it is.
        warnings.simplefilter("ignore", UserWarning)
        found, _ = kmeans2(part_LK.float().numpy(), prototypes, iter=ITERATIONS, minit="++", seed=seed)
    return torch.from_numpy(found)


def nearest(x_LD: Tensor, prototypes_SCK: Tensor) -> Tensor:
    """Which prototype each part is nearest to; of equally near ones the first. [L, D] -> [L, S].

    Cost: 2 D C operations for each vector.
    Raises: ShapeError for vectors of another size.
    """
    parts, _, size = prototypes_SCK.shape
    if x_LD.dim() != 2 or x_LD.shape[1] != parts * size:
        raise ShapeError(
            f"x has shape {tuple(x_LD.shape)}; prototypes of {parts} parts of {size} need [L, {parts * size}]"
        )
    half_S1C = 0.5 * prototypes_SCK.square().sum(2)[:, None]
    x_SLK = x_LD.view(-1, parts, size).transpose(0, 1)
    return torch.baddbmm(half_S1C, x_SLK, prototypes_SCK.transpose(1, 2), alpha=-1.0).argmin(2).T


class QuantisedLinear(nn.Module):
    """`linear` of the nearest prototypes, by lookup: [..., D] -> [..., N].

    Cost: 2 D C + S N operations for each vector, where the map has 2 D N; a table of S C N numbers.
    Reference: A Unified View of Long-Sequence Models, Sec. 7.4; Jegou et al. 2011; Blalock and Guttag 2021 (MADDNESS).
    """

    prototypes_SCK: Tensor
    table_RN: Tensor
    first_S: Tensor

    def __init__(self, linear: nn.Linear, prototypes_SCK: Tensor) -> None:
        super().__init__()
        parts, count, size = prototypes_SCK.shape
        weight_SKN = linear.weight.detach().T.reshape(parts, size, -1)
        self.register_buffer("prototypes_SCK", prototypes_SCK)
        self.register_buffer("table_RN", (prototypes_SCK @ weight_SKN).flatten(0, 1))
        self.register_buffer("first_S", count * torch.arange(parts))
        self.bias = linear.bias

    def forward(self, x: Tensor) -> Tensor:
        rows_LS = nearest(x.flatten(0, -2), self.prototypes_SCK) + self.first_S
        y_LN = F.embedding_bag(rows_LS, self.table_RN, mode="sum")
        if self.bias is not None:
            y_LN = y_LN + self.bias
        return y_LN.view(*x.shape[:-1], -1)


def quantised_linear_naive(
    x_LD: Tensor, prototypes_SCK: Tensor, weight_ND: Tensor, bias_N: Tensor | None
) -> tuple[Tensor, Tensor]:
    """By the definition, vector by vector: every part is replaced by its nearest prototype, then the map is applied.

    Shapes: x [L, D], prototypes [S, C, D / S], weight [N, D] -> y [L, N], and the prototypes' numbers [L, S].
    """
    outputs, codes = [], []
    for x_D in x_LD:
        chosen, numbers = [], []
        for part_K, centres_CK in zip(x_D.chunk(len(prototypes_SCK)), prototypes_SCK, strict=True):
            number = int((centres_CK - part_K).square().sum(1).argmin())
            chosen.append(centres_CK[number])
            numbers.append(number)
        y_N = weight_ND @ torch.cat(chosen)
        outputs.append(y_N if bias_N is None else y_N + bias_N)
        codes.append(numbers)
    return torch.stack(outputs), torch.tensor(codes)

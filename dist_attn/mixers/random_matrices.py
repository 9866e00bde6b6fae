"""Random vectors of feature maps, a set per head: Gaussian or orthogonal, fixed or of a pool at every step."""

import numpy as np
import torch
from torch import nn

from dist_attn.feature_maps import ArcCosine, Gaussian
from dist_attn.mixers.heads import log_key_weights
from dist_attn.model_config.mixers.heads import FeaturesConfig, MatricesConfig
from dist_attn.ops import FeatureMap
from dist_attn.ops.device import send


def matrices_at_test(config: MatricesConfig) -> torch.Tensor:
    """One fixed matrix per head, [H, D, K]: the first ones of the pool, where there is one."""
    heads, num_random, size = config.num_heads, config.num_random, config.head_size
    if config.pool:
        return _from_pool(config, list(range(heads)))
    generator = torch.Generator().manual_seed(config.seed)
    if config.orthogonal:
        return torch.stack([orthogonal_rows(num_random, size, generator) for _ in range(heads)])
    return torch.randn(heads, num_random, size, generator=generator, device="cpu")


def matrices_of_step(config: MatricesConfig, step: int) -> torch.Tensor:
    """The pool's matrices that the heads take at a training step, [H, D, K]."""
    return _from_pool(config, draw_from_pool(config.seed, step, config.num_heads, config.pool))


def pool_matrix(seed: int, index: int, num_random: int, size: int, *, orthogonal: bool) -> torch.Tensor:
    """Matrix `index` of the pool of `seed`, [D, K]: a function of the two, so that no pool has to be held."""
    generator = _generator(seed, 0, index)
    if orthogonal:
        return orthogonal_rows(num_random, size, generator)
    return torch.randn(num_random, size, generator=generator, device="cpu")


def draw_from_pool(seed: int, step: int, heads: int, pool: int) -> list[int]:
    """Draw the matrices that heads take at a training step: all different, a function of seed and step alone.

    Reference: Random Feature Attention, Sec. 3 (a pool drawn before training, a draw per head and step).
    """
    order = torch.randperm(pool, generator=_generator(seed, 1, step), device="cpu")
    return [int(index) for index in order[:heads]]


def orthogonal_rows(num_random: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """[D, K] whose rows are orthogonal within every K of them and as long as Gaussian vectors.

    Each row by itself is still N(0, I), so estimates stay unbiased; their variance is smaller.

    Reference: Yu et al. 2016, Orthogonal Random Features.
    """
    blocks = []
    for start in range(0, num_random, size):
        q_KK, r_KK = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64, device="cpu"))
        # Uniform over all rotations only with the signs of R's diagonal.
        blocks.append((q_KK * r_KK.diagonal().sign()).T[: num_random - start])
    normal_DK = torch.randn(num_random, size, generator=generator, dtype=torch.float64, device="cpu")
    lengths_D1 = normal_DK.norm(dim=1, keepdim=True)
    w_DK: torch.Tensor = torch.cat(blocks) * lengths_D1
    return w_DK.float()


def _from_pool(config: MatricesConfig, indices: list[int]) -> torch.Tensor:
    sizes = (config.num_random, config.head_size)
    return torch.stack([pool_matrix(config.seed, i, *sizes, orthogonal=config.orthogonal) for i in indices])


def _generator(*key: int) -> torch.Generator:
    (mixed,) = np.random.SeedSequence([part % (1 << 64) for part in key]).generate_state(1, np.uint32)
    return torch.Generator().manual_seed(int(mixed))


class RandomMatrices(nn.Module):
    """A module with random features: it has a matrix per head, at a training step one of a pool."""

    config: MatricesConfig
    w_HDK: torch.Tensor
    # The pool's matrices of this training step; None at test, and without a pool.
    _drawn_HDK: torch.Tensor | None = None

    def hold_matrices(self) -> None:
        """Take the matrices at test as a buffer."""
        self.register_buffer("w_HDK", matrices_at_test(self.config))

    def matrices(self) -> torch.Tensor:
        """The matrices of this call, [H, D, K]."""
        return self._drawn_HDK if self.training and self._drawn_HDK is not None else self.w_HDK

    def redraw(self, step: int) -> bool:
        """Take the pool's matrices of a training step; True if there is a pool, so that older states are of no use."""
        if not self.config.pool:
            return False
        self._drawn_HDK = send(matrices_of_step(self.config, step).to(self.w_HDK.dtype), self.w_HDK.device)
        return True


class RandomFeatures(RandomMatrices):
    """Random features with a learned sigma per head, beside the attention that reads them.

    Queries and keys are scaled to unit norm, or neither is and keys have weights by their norms.

    Reference: Random Feature Attention, Eq. 5, 8 and 12 (`weighting = "norm"`).
    """

    config: FeaturesConfig

    def hold_features(self) -> None:
        """Make sigma a parameter, and take the matrices at test as a buffer."""
        config = self.config
        self.sigma_H1K = nn.Parameter(torch.full((config.num_heads, 1, config.head_size), config.first_sigma))
        self.hold_matrices()

    def feature_map(self) -> FeatureMap:
        """phi of the Gaussian or the arc-cosine kernel, with sigma multiplied in (RFA Eq. 8); float32 always."""
        w_HDK = self.sigma_H1K * self.matrices()
        if self.config.feature == "gaussian":
            return Gaussian(w_HDK, unit_norm=self.config.weighting == "unit_norm")
        return ArcCosine(w_HDK, unit_norm=True)

    def log_key_weights(self, k_BHSK: torch.Tensor) -> torch.Tensor | None:
        """The logs of the keys' weights, [..., S], or None where all keys weigh the same."""
        return log_key_weights(k_BHSK, self.sigma_H1K) if self.config.weighting == "norm" else None


def redraw_pools(model: nn.Module, step: int) -> bool:
    """Give the mixers with a pool its matrices of a step; whether there is any, and so states of other features.

    A state from before is then one of other features: begin with the initial one.

    Reference: Random Feature Attention, Sec. 3.
    """
    mixers = [module for module in model.modules() if isinstance(module, RandomMatrices)]
    redrawn = [mixer.redraw(step) for mixer in mixers]  # all of them, not up to the first
    return any(redrawn)

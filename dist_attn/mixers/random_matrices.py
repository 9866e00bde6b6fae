"""Random vectors of feature maps: Gaussian or orthogonal, one set per head, or drawn from a pool at every step."""

import numpy as np
import torch

__all__ = ["draw_from_pool", "orthogonal_rows", "pool_matrix"]


def pool_matrix(seed: int, index: int, num_random: int, size: int, *, orthogonal: bool) -> torch.Tensor:
    """Matrix `index` of the pool of `seed`, [D, K]: a function of the two, so that no pool has to be held."""
    generator = _generator(seed, 0, index)
    if orthogonal:
        return orthogonal_rows(num_random, size, generator)
    return torch.randn(num_random, size, generator=generator)


def draw_from_pool(seed: int, step: int, heads: int, pool: int) -> list[int]:
    """Which matrices the heads take at a training step: all different, a function of seed and step alone.

    Reference: Random Feature Attention, Sec. 3 (a pool drawn before training, a draw per head and step).
    """
    order = torch.randperm(pool, generator=_generator(seed, 1, step))
    return [int(index) for index in order[:heads]]


def orthogonal_rows(num_random: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """[D, K] whose rows are orthogonal within every K of them and as long as Gaussian vectors.

    Each row by itself is still N(0, I), so estimates stay unbiased; their variance is smaller.

    Reference: Yu et al. 2016, Orthogonal Random Features.
    """
    blocks = []
    for start in range(0, num_random, size):
        q_KK, r_KK = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
        # Uniform over all rotations only with the signs of R's diagonal.
        blocks.append((q_KK * r_KK.diagonal().sign()).T[: num_random - start])
    lengths_D1 = torch.randn(num_random, size, generator=generator, dtype=torch.float64).norm(dim=1, keepdim=True)
    w_DK: torch.Tensor = torch.cat(blocks) * lengths_D1
    return w_DK.float()


def _generator(*key: int) -> torch.Generator:
    (mixed,) = np.random.SeedSequence([part % (1 << 64) for part in key]).generate_state(1, np.uint32)
    return torch.Generator().manual_seed(int(mixed))

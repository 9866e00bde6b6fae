"""Tile sizes of the GPU kernels: what holds for any size, and what was fastest on this GPU by its record.

Shape letters: B batch, H heads, L tokens, K head size, V values.
"""

from dataclasses import dataclass, replace

import torch

from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.gpu_record import record_of


@dataclass(frozen=True)
class Tiles:
    """How one call is cut. Sizes are powers of two, 16 at least: what matrix units take.

    chunk           tokens that attend to each other directly; states are stored once a chunk.
    block_d         projections of a tile of features (twice as many features of a Gaussian map).
    block_k         columns of q and k that enter a projection at once.
    block_v         values of a tile of outputs or states.
    warps, stages   of 32 threads; of the pipeline of loads.
    """

    chunk: int = 64
    block_d: int = 32
    block_k: int = 64
    block_v: int = 64
    warps: int = 8
    stages: int = 2

    def fitted(self, head_size: int, projections: int, values: int) -> "Tiles":
        """No tile larger than what it covers."""
        return replace(
            self,
            block_d=min(self.block_d, _power(projections)),
            block_k=min(self.block_k, _power(head_size)),
            block_v=min(self.block_v, _power(values)),
        )

    def of_features_gradient(self) -> "Tiles":
        """Smaller ones for the kernel that holds most at a time: with these it spills no register."""
        return replace(
            self,
            block_d=max(16, self.block_d // 2),
            block_k=min(32, self.block_k),
            block_v=min(32, self.block_v),
            stages=1,
        )

    def fitted_inputs(self, head_size: int) -> int:
        """One tile for all columns of q or k, for gradients that are summed over projections."""
        return _power(head_size)


def default_tiles(head_size: int, projections: int, values: int, dtype: torch.dtype) -> Tiles:
    """Small ones, for registers: with 128 of each size outputs spill none on an H200."""
    # Products of float32 tiles take three times the registers; see `dist-attn bench kernel-registers`.
    tiles = Tiles() if dtype == torch.bfloat16 else Tiles(chunk=32, block_d=16, block_k=32, block_v=32, stages=1)
    return tiles.fitted(head_size, projections, values)


def tiles_for(q_BHLK: torch.Tensor, v_BHLV: torch.Tensor, feature_map: FeatureMap | None) -> Tiles:
    """What was measured for such tensors on this GPU, if it was; else the tiles that fit any."""
    sizes = (q_BHLK.shape[3], _projections(q_BHLK, feature_map), v_BHLV.shape[3])
    record = record_of(q_BHLK.device)
    measured = None if record is None else record.tiles.get(tiles_key(q_BHLK, v_BHLV, feature_map))
    if measured is not None:
        return Tiles(**measured).fitted(*sizes)
    return default_tiles(*sizes, v_BHLV.dtype)


def tiles_key(q_BHLK: torch.Tensor, v_BHLV: torch.Tensor, feature_map: FeatureMap | None) -> str:
    """What a measurement holds for besides the GPU: the type, the map, the sizes of heads, projections and values."""
    sizes = (q_BHLK.shape[3], _projections(q_BHLK, feature_map), v_BHLV.shape[3])
    dtype = str(q_BHLK.dtype).removeprefix("torch.")
    return f"{dtype} {type(feature_map).__name__} {'x'.join(map(str, sizes))}"


def _projections(q_BHLK: torch.Tensor, feature_map: FeatureMap | None) -> int:
    tensors = () if feature_map is None else feature_map.tensors()
    return tensors[0].shape[1] if tensors else q_BHLK.shape[3]


def candidates(head_size: int, projections: int, values: int, dtype: torch.dtype) -> list[Tiles]:
    """What a measurement may choose from, without doubles."""
    tried = [
        Tiles(chunk, block_d, 64, block_v, warps, stages)
        for chunk in (64, 128)
        for block_d in (32, 64)
        for block_v in (64, 128)
        for warps in (4, 8)
        for stages in (1, 2, 3)
        if chunk == 64 or warps == 8
    ]
    return list(dict.fromkeys(tiles.fitted(head_size, projections, values) for tiles in tried))


def _power(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())

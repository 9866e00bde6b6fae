"""Tile sizes of the GPU kernels: what holds for any size, and what was fastest on this GPU by its record.

Shape letters: B batch, H heads, L tokens, K head size, V values.
"""

from dataclasses import dataclass, replace

import torch

from dist_attn.ops.feature_map import FeatureMap
from dist_attn.ops.gpu_record import record_of
from dist_attn.ops.kernel_target import kernel_target


@dataclass(frozen=True)
class Tiles:
    """The tiles that one call is cut into. Sizes are powers of two, 16 at least: what matrix units take.

    chunk           tokens that attend to each other directly; states are stored once a chunk.
    block_d         projections of a tile of features (twice as many features of a Gaussian map).
    block_v         values of a tile of outputs; features are made once for each such block.
    sum_d, sum_v    likewise of a tile of states: 64 projections fill the rows of a Hopper GPU's products.
    warps, stages   of 32 threads; of the pipeline of loads. Four warps of a Hopper GPU share products of 64 rows, so
                    more of them than one for 16 tokens of a chunk would cut its columns into narrow products.
    gradient_stages of the gradients of features, which hold whole rows of q, k, v and dO: with one there, two programs
                    of a Hopper GPU lie beside each other at sizes of 128 (72 of 228 KiB, with two 120).
    """

    chunk: int = 64
    block_d: int = 32
    block_v: int = 128
    sum_d: int = 64
    sum_v: int = 128
    warps: int = 4
    stages: int = 2
    gradient_stages: int = 1

    def fitted(self, projections: int, values: int) -> "Tiles":
        """No tile larger than what it covers."""
        d, v = power_tile(projections), power_tile(values)
        return replace(
            self,
            block_d=min(self.block_d, d),
            block_v=min(self.block_v, v),
            sum_d=min(self.sum_d, d),
            sum_v=min(self.sum_v, v),
        )

    def of_features_gradient(self, values: int, *, projects: bool) -> "Tiles":
        """All values of a chunk at once: its gradients of projections need the whole of dO v^T.

        A map that `projects` nothing has two stages: with one an H100 read outside of shared memory at sizes of 64
        (ptxas 12.8).
        """
        stages = self.gradient_stages if projects else max(2, self.gradient_stages)
        return replace(self, block_v=power_tile(values), stages=stages)


def default_tiles(head_size: int, projections: int, values: int, dtype: torch.dtype, generation: int = 9) -> Tiles:
    """The tiles with which no kernel spills registers at sizes of 128, on a GPU of compute capability `generation`.x.

    `dist-attn bench kernel-registers` has the table of them.
    """
    if dtype != torch.bfloat16:  # float32 tiles take two registers for one, and their products three times as many
        stages = 1 if dtype == torch.float32 and generation > 9 else 2
        tiles = Tiles(chunk=32, block_d=16, block_v=32, sum_v=32, stages=stages, gradient_stages=stages)
    elif generation < 9:  # matrix units read their operands out of registers
        tiles = Tiles(block_d=16, block_v=64, sum_v=32, gradient_stages=2)
    elif generation == 9:
        tiles = Tiles()
    else:  # on Blackwell results of products lie outside the registers and come into them whole
        tiles = Tiles(block_d=16, sum_v=32, gradient_stages=2)
    if max(head_size, values) > 128:  # whole rows of q, k, v and dO lie in shared memory
        v = min(64, tiles.block_v)
        tiles = replace(tiles, block_d=16, block_v=v, sum_v=v, stages=1, gradient_stages=1)
    return tiles.fitted(projections, values)


def generation_of(device: torch.device) -> int:
    """The first number of the compute capability; that of Hopper for what is no GPU."""
    if (target := kernel_target()) is not None:
        return target.capability // 10
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else 9


def tiles_for(q_BHLK: torch.Tensor, v_BHLV: torch.Tensor, feature_map: FeatureMap | None) -> Tiles:
    """The tiles measured for such tensors on this GPU, if any were; else those that fit any."""
    sizes = (q_BHLK.shape[3], _projections(q_BHLK, feature_map), v_BHLV.shape[3])
    record = record_of(q_BHLK.device)
    measured = None if record is None else record.tiles.get(tiles_key(q_BHLK, v_BHLV, feature_map))
    if measured is not None:
        return Tiles(**measured).fitted(*sizes[1:])
    return default_tiles(*sizes, v_BHLV.dtype, generation_of(v_BHLV.device))


def tiles_key(q_BHLK: torch.Tensor, v_BHLV: torch.Tensor, feature_map: FeatureMap | None) -> str:
    """The key of a measurement on one GPU: the type, the map, the sizes of heads, projections and values."""
    sizes = (q_BHLK.shape[3], _projections(q_BHLK, feature_map), v_BHLV.shape[3])
    dtype = str(q_BHLK.dtype).removeprefix("torch.")
    return f"{dtype} {type(feature_map).__name__} {'x'.join(map(str, sizes))}"


def _projections(q_BHLK: torch.Tensor, feature_map: FeatureMap | None) -> int:
    tensors = () if feature_map is None else feature_map.tensors()
    return tensors[0].shape[1] if tensors else q_BHLK.shape[3]


def candidates(projections: int, values: int) -> list[Tiles]:
    """The tiles that a measurement may choose from, without doubles."""
    tried = [
        Tiles(chunk, block_d, block_v, sum_d, sum_v, warps, stages, gradient_stages)
        for chunk, warps, sum_d, sum_v in ((64, 4, 64, 128), (128, 8, 128, 64))
        for block_d in (32, 64)
        for block_v in (64, 128)
        for stages, gradient_stages in ((1, 1), (2, 1), (2, 2))
    ]
    return list(dict.fromkeys(tiles.fitted(projections, values) for tiles in tried))


def power_tile(size: int) -> int:
    """The smallest tile that covers so much."""
    return max(16, 1 << (size - 1).bit_length())

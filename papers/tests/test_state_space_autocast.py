"""State spaces under autocast: what is made of their parameters keeps the precision that these have."""

import pytest
import torch

from dist_attn.comm import run_simulated
from dist_attn.layout import SequenceLayout
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn.sharded import ShardedSequenceOps
from dist_attn_papers.ops.dense_space import columns_of_powers, dense_scan, matrix_power, rows_of_powers
from dist_attn_papers.ops.state_space import diagonal_kernel, dplr_kernel

CHANNELS, MODES, LENGTH = 3, 4, 150


def _real(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def _complex(factor: float) -> torch.Tensor:
    return factor * torch.view_as_complex(_real(CHANNELS, MODES, 2))


def _decaying() -> torch.Tensor:
    return torch.complex(-_real(CHANNELS, MODES).abs() - 0.5, _real(CHANNELS, MODES))


def _transition(size: int) -> torch.Tensor:
    return 0.9 * torch.linalg.qr(_real(CHANNELS, size, size))[0]


def _dplr() -> torch.Tensor:
    size = 2 * MODES
    left_over_DNN = torch.eye(size) - matrix_power(_transition(size), LENGTH)
    dt_D = torch.linspace(0.01, 0.1, CHANNELS)
    return dplr_kernel(_decaying(), _complex(0.5), _complex(1.0), _complex(0.7), dt_D, left_over_DNN, LENGTH)


MADE = {
    "diagonal kernel": lambda: diagonal_kernel(_decaying().exp(), _complex(1.0), _complex(0.5), LENGTH),
    "low-rank kernel": _dplr,
    "columns of powers": lambda: columns_of_powers(_transition(MODES), _real(CHANNELS, MODES), 9),
    "rows of powers": lambda: rows_of_powers(_real(CHANNELS, 2, MODES), _transition(MODES), 9),
    "matrix power": lambda: matrix_power(_transition(MODES), 13),
}


@pytest.mark.parametrize("name", MADE)
def test_autocast_leaves_powers_and_kernels_as_they_are(name):
    """Kernels and powers are the same numbers in the same type under bf16 autocast as without it."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = MADE[name]()
    assert got.dtype == torch.float32
    assert torch.equal(got, MADE[name]())


@pytest.mark.parametrize("lengths", [(LENGTH,), (70, 0, 80)])
def test_autocast_leaves_the_scan_as_it_is(lengths):
    """The scan with a full matrix gives the same numbers under bf16 autocast, on one rank and over several."""
    layout = SequenceLayout.from_lengths(lengths)
    u_BLD, a_DNN = _real(2, LENGTH, CHANNELS), _transition(MODES)
    b_DN, c_DMN = _real(CHANNELS, MODES), _real(CHANNELS, 2, MODES)

    def walk(ops: SequenceOps, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        return dense_scan(u_BLD[:, start:stop], a_DNN, b_DN, c_DMN, ops=ops)

    def both(comm) -> None:
        ops = LocalSequenceOps() if comm.size == 1 else ShardedSequenceOps(comm, layout)
        want = walk(ops, *layout.range(comm.rank))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = walk(ops, *layout.range(comm.rank))
        assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))

    assert run_simulated(both, len(lengths)) == [None] * len(lengths)

"""Language models of the papers' mixers: on `meta`, over ranks, stored and restored, and what they cost."""

from pathlib import Path

import pytest
import torch

from dist_attn.costs import read_model_costs
from dist_attn_papers.mixers import state_space_configs
from dist_attn_papers.ops import diagonal
from dist_attn_papers.ops import legs as legs_module
from papers.tests.support.model_cases import PAPERS_CASES
from tests.costs import test_estimate as estimates
from tests.costs import test_models as costs_of
from tests.costs.test_models import _count
from tests.generation import test_state_snapshot as snapshots
from tests.models import test_kernel_language_models as kernels
from tests.models import test_meta_device as on_meta
from tests.models import test_weight_precision as narrow
from tests.support.model_cases import kinds_of, small_model, write_config
from tests.support.native import computed_by

__all__ = ["computed_by"]

DENSE_CASES = [name for name in PAPERS_CASES if kinds_of(name) & {"hippo", "lssl", "s4"}]


@pytest.mark.parametrize("case", PAPERS_CASES)
def test_prefill_decode_and_backward_wait_for_nothing(case: str) -> None:
    """Blocks and steps leave states as on the CPU, so a snapshot holds the same arrays; gradients arrive."""
    on_meta.test_prefill_decode_and_backward(case)


@pytest.mark.parametrize("case", {tuple(sorted(kinds_of(case))): case for case in reversed(PAPERS_CASES)}.values())
def test_ranks_exchange_carries(case: str) -> None:
    """Three simulated ranks, one of them empty, read two blocks and go back through one; each has the whole state."""
    on_meta.test_ranks_exchange_carries(case)


@pytest.mark.parametrize("case", PAPERS_CASES)
def test_every_kind_of_state_goes_on_bit_for_bit(case: str) -> None:
    """Logits after a restore have the bits of a run that was never interrupted."""
    snapshots.test_every_kind_of_state_goes_on_bit_for_bit(case)


@pytest.mark.parametrize("case", PAPERS_CASES)
def test_numbers_held(case: str, tmp_path: Path) -> None:
    """Parameters, the bytes of weights and those of the state are those of the model, exactly."""
    costs, model = read_model_costs(write_config(case, tmp_path)), small_model(case)
    tensors = [*model.parameters(), *model.buffers()]
    assert costs.parameters == sum(p.numel() for p in model.parameters())
    assert costs.weights_bytes == sum(t.numel() * t.element_size() for t in tensors)
    with torch.inference_mode():
        _, state = model.hidden(torch.zeros(3, 70, dtype=torch.int64))
    assert costs.state_bytes(70, 3) == state.num_bytes()


@pytest.mark.parametrize("case", DENSE_CASES)
def test_operations_of_full_matrices(case: str, tmp_path: Path) -> None:
    """What a longer sequence adds in matrix products is the formula's, beside the powers that every call takes."""
    costs, model = read_model_costs(write_config(case, tmp_path)), small_model(case)
    short, long = (_count(lambda n=n: model.encode(torch.zeros(1, n, dtype=torch.int64))) for n in (1024, 2048))
    flops = costs.prefill_flops(1024)
    assert long - short == pytest.approx(1024 * (flops.total + flops.scores), rel=1e-12)


def test_the_counted_blocks_are_the_forms() -> None:
    """Chunks and blocks by which the formulas count are those by which the operations work."""
    assert (state_space_configs.CHUNK_TOKENS, state_space_configs.STATE_BLOCK_CHUNKS) == (
        diagonal.CHUNK_TOKENS,
        diagonal.BLOCK_CHUNKS,
    )
    legs = (state_space_configs.LEGS_CHUNK_TOKENS, state_space_configs.BLOCK_CHUNKS, state_space_configs.BLOCK_WEIGHTS)
    assert legs == (legs_module.CHUNK_TOKENS, legs_module.BLOCK_CHUNKS, legs_module.BLOCK_WEIGHTS)
    assert state_space_configs.BLOCK_COEFFICIENTS == legs_module.BLOCK_COEFFICIENTS


KERNELS = [name for name in PAPERS_CASES if kinds_of(name) <= {"scaleformer", "performer", "efficient"}]


@pytest.mark.parametrize("case", KERNELS)
def test_costs_of_kernels(case: str, tmp_path: Path) -> None:
    """Operations and bytes between ranks are those of the formulas."""
    for name in ("operations", "steps", "traffic"):
        (tmp_path / name).mkdir()
    costs_of.test_prefill_operations(case, tmp_path / "operations")
    costs_of.test_decoding_operations(case, tmp_path / "steps")
    estimates.test_bytes_between_ranks(case, tmp_path / "traffic")


@pytest.mark.parametrize("case", KERNELS)
def test_peak_of_kernels(case: str, tmp_path: Path, computed_by: str) -> None:
    """The peak of temporary tensors is that of the formulas."""
    for size in ((512, "float32"), (4096, "float32"), (64, "int8"), (2048, "bfloat16")):
        costs_of.test_peak_of_activations(case, size, tmp_path, computed_by)


@pytest.mark.parametrize("case", KERNELS)
def test_weights_in_fewer_bits(case: str, tmp_path: Path) -> None:
    """Models read and write as their rounded weights say, and hold the bytes that the formula says."""
    for precision in narrow.NARROW:
        narrow.test_every_model_reads_and_writes_as_its_rounded_weights_say(case, precision)
        narrow.test_fast_products_change_a_model_by_their_rounding_alone(case, precision)
    narrow.test_bytes_are_those_of_the_tensors_and_of_the_formula(case, tmp_path)


GREEDY = {
    "static kernel": {"kind": "static_kernel"},
    "efficient": {"kind": "efficient"},
    "performer": {"kind": "performer", "num_random": 12},
}
kernels.MIXERS.update(GREEDY)


@pytest.mark.parametrize("name", GREEDY)
def test_blocks_on_ranks_equal_the_whole_on_one(name: str) -> None:
    """A sequence in blocks, each cut over ranks, some of them empty, gives the logits of one call on one rank."""
    kernels.test_blocks_on_ranks_equal_the_whole_on_one(name)


@pytest.mark.parametrize("name", GREEDY)
def test_generated_tokens_are_the_likeliest(name: str) -> None:
    """Each greedy token is the likeliest one after all tokens before it, fed at once without a state."""
    kernels.test_generated_tokens_are_the_likeliest(name)

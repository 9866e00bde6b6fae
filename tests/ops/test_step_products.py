"""Products of decode steps are those of their definition, and no row of them knows of the others."""

import pytest
import torch

from dist_attn.ops.step_products import step_products, step_products_naive, takes_step_products
from tests.support.closeness import assert_close

needs_kernels = pytest.mark.skipif(
    not takes_step_products(torch.zeros(1), torch.zeros(1)), reason="no C compiler, or a processor without vectors"
)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@needs_kernels
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 21])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (48, 64), (50, 77)])
def test_they_are_those_of_their_definition(rows: int, outputs: int, inputs: int) -> None:
    """For any number of rows, outputs and inputs."""
    x_NI, w_OI = random(rows, inputs), random(outputs, inputs)
    assert_close(step_products(x_NI, w_OI), step_products_naive(x_NI, w_OI))


@needs_kernels
@pytest.mark.parametrize("rows", [1, 19])
def test_each_row_takes_the_weights_chosen_for_it(rows: int) -> None:
    """Several for each row, the same for many rows or for none."""
    x_NI, w_EOI = random(rows, 24), random(7, 10, 24)
    chosen_NC = torch.stack([torch.randperm(6)[:3] for _ in range(rows)])
    assert_close(step_products(x_NI, w_EOI, chosen_NC), step_products_naive(x_NI, w_EOI, chosen_NC))


@needs_kernels
def test_a_row_has_the_bits_of_one_alone() -> None:
    """Whatever rows are beside it, with any number of threads, and wherever numbers begin in memory."""
    x_NI, w_OI = random(21, 77), random(101, 77)
    alone = torch.cat([step_products(x_1I, w_OI) for x_1I in x_NI.split(1)])
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for rows in (1, 2, 3, 4, 5, 8, 21):
                assert torch.equal(step_products(x_NI[:rows], w_OI), alone[:rows])
    finally:
        torch.set_num_threads(before)
    moved_OI = torch.cat([torch.zeros(1), w_OI.flatten()])[1:].view_as(w_OI)
    assert torch.equal(step_products(x_NI, moved_OI), alone)


@needs_kernels
def test_what_kernels_cannot_take_is_told() -> None:
    """Other types of numbers, and gradients that are asked for."""
    x_NI, w_OI = random(2, 8), random(4, 8)
    assert takes_step_products(x_NI, w_OI)
    assert not takes_step_products(x_NI.bfloat16(), w_OI) and not takes_step_products(x_NI, w_OI.T)
    assert not takes_step_products(x_NI, w_OI.requires_grad_())
    with torch.no_grad():
        assert takes_step_products(x_NI, w_OI)

"""The record of what ran on which GPU: how it is written, and what "auto" makes of it."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dist_attn.ops import gpu_record
from dist_attn.ops.gpu_record import FILE, GpuRecord, keep_record, record_of, why_not_right, why_wrong
from dist_attn.ops.linear_attention import LinearCall, choose
from dist_attn.ops.linear_attention.implementation import kernels_taken
from dist_attn.ops.linear_attention.triton_tiles import Tiles
from tests.support.machines import Machine

H100 = Machine((9, 0), "3.7.1")
RAN = GpuRecord(
    driver="570.1", torch="2.13", triton="3.7", commit="abc", kernels={"linear causal": 1e-3, "another full": 2e-3}
)


def test_the_record_of_the_tree_is_one() -> None:
    """The file that ships can be read, and its tiles are tiles."""
    for record in gpu_record._records(FILE).values():
        assert all(Tiles(**tiles) for tiles in record.tiles.values())


def test_a_record_comes_back_and_grows(tmp_path: Path) -> None:
    """Runs of parts of the check add to each other, device by device; a torch later, only times are left."""
    file = tmp_path / "record.json"
    of_tiles = replace(RAN, kernels={}, tiles={"float32": {"chunk": 32}}, ratios={"forward": {"ours_ms": 2.0}})
    keep_record("A", RAN, file)
    keep_record("B", replace(RAN, captured_steps=True), file)
    keep_record("A", replace(of_tiles, kernels={"linear of another name": "wrong"}), file)
    found = gpu_record._records(file)
    assert found["B"] == replace(RAN, captured_steps=True)
    assert found["A"].kernels == {"linear of another name": "wrong", "another full": 2e-3}
    assert (found["A"].tiles, found["A"].ratios) == (of_tiles.tiles, of_tiles.ratios)
    keep_record("B", of_tiles, file)
    assert gpu_record._records(file)["B"].captured_steps is True
    keep_record("A", GpuRecord(driver="570.1", torch="2.14", triton="3.7", commit="abc"), file)
    later = gpu_record._records(file)["A"]
    assert (later.kernels, later.tiles, later.ratios) == ({}, of_tiles.tiles, of_tiles.ratios)


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (None, "have not run on X yet: `make gpu`"),
        (replace(RAN, kernels={"another full": 1e-3}), "have not run on X yet"),
        (replace(RAN, kernels={**RAN.kernels, "linear step": "errors of 2"}), r"not come out right on X \(linear step"),
    ],
)
def test_kernels_that_are_not_known_to_be_right_are_not_taken(record: GpuRecord | None, words: str) -> None:
    """Where no case of an operation ran on such a device, or one came out wrong, the reason says so."""
    reason = why_not_right("linear", "X", record)
    assert reason is not None
    assert re.search(words, reason)


def test_each_operation_has_its_own_cases() -> None:
    """Kernels are right where all cases of their operation are, whatever another's came to."""
    wrong = replace(RAN, kernels={**RAN.kernels, "another full": "out of memory"})
    assert why_not_right("linear", "X", wrong) is None
    assert why_not_right("another", "X", wrong) is not None


def test_a_case_that_is_known_to_be_wrong_counts_for_its_triton() -> None:
    """With this Triton such calls are not tried; with another one, of another form, type or map they are."""
    case = "linear causal features float32 1x1"
    wrong = replace(RAN, triton="3.7.1", kernels={**RAN.kernels, case: "errors of 2"})
    for machine, known in ((H100, True), (replace(H100, triton="3.7.2"), False)):
        with machine.entered(record=wrong):
            x = torch.zeros(1, 2, 3, 4, device="cuda")
            choice = choose(LinearCall(x, x, x))
            words = f"did not come out right on a GPU ({case}: errors of 2)"
            assert (choice.implementation == "streaming", words in choice.reason) == (known, known)
            assert choose(LinearCall(x, x, x, causal=False)).implementation == "triton"
            assert why_wrong("linear causal features bfloat16", machine.device, machine.triton) is None
            assert (words in kernels_taken(machine.device)) == known


def test_what_is_no_gpu_has_no_record(computed_by: str) -> None:
    """Tensors of a CPU have no record, and a command can say what computes them."""
    assert record_of(torch.device("cpu")) is None
    assert kernels_taken(torch.device("cpu")).startswith(
        {"native": "C's", "streaming": "torch's operations"}[computed_by]
    )

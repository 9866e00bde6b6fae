"""Which device and precision a process computes in, and what is said of a GPU that is not there."""

import pytest
import torch

from dist_attn.checkpoints import fuses_on_cpus
from dist_attn.comm.local import LocalCommunicator
from dist_attn.devices import ON_CPU, choose_compute, choose_device
from dist_attn.errors import ConfigError
from dist_attn.ops.fused_encoder import takes_encoder


@pytest.fixture
def gpus(monkeypatch):
    """As if torch found so many GPUs."""

    def found(count):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)

    return found


@pytest.mark.parametrize(
    ("count", "name", "environ", "device"),
    [
        (0, "auto", {}, "cpu"),
        (0, "auto", {"LOCAL_RANK": "3"}, "cpu"),
        (4, "cpu", {"LOCAL_RANK": "3"}, "cpu"),
        (4, "auto", {}, "cuda:0"),
        (4, "cuda", {"LOCAL_RANK": "3"}, "cuda:3"),
        (4, "auto", {"MPI_LOCALRANKID": "2"}, "cuda:2"),
        (4, "cuda:1", {"LOCAL_RANK": "3"}, "cuda:1"),
        (1, "cuda", {"LOCAL_RANK": "3", "CUDA_VISIBLE_DEVICES": "3"}, "cuda:0"),
        (1, "cuda", {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4", "CUDA_VISIBLE_DEVICES": "0"}, "cuda:0"),
    ],
)
def test_a_rank_takes_the_gpu_of_its_number(gpus, count, name, environ, device):
    """Unless another one is named, or its launcher shows it one alone."""
    gpus(count)
    assert choose_device(name, environ) == torch.device(device)


@pytest.mark.parametrize(
    ("count", "name", "environ", "says"),
    [
        (0, "cuda", {}, "device is cuda, but .*: take --device cpu"),
        (0, "tpu", {}, "device is 'tpu'; needed is auto, cpu, cuda or cuda:N"),
        (2, "auto", {"LOCAL_RANK": "2"}, "torch finds 2 GPUs for 3 ranks of this host: start at most 2 here"),
        (
            1,
            "cuda",
            {"LOCAL_RANK": "1"},
            "finds 1 GPU for 2 ranks of this host: .* let all share one with --device cuda:0",
        ),
        (2, "auto", {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, "torch finds 2 GPUs for 4 ranks of this host"),
        (2, "auto", {"PMI_RANK": "0", "PMI_SIZE": "4"}, "torch finds 2 GPUs for 4 ranks of this host"),
        (2, "cuda:2", {}, "device is cuda:2: torch finds 2 here"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused(gpus, count, name, environ, says):
    """In words, with what to do."""
    gpus(count)
    with pytest.raises(ConfigError, match=says):
        choose_device(name, environ)


def test_precision_follows_the_device(gpus):
    """`auto` is bfloat16 on a GPU and of encoders where a CPU has it, float32 on a CPU; either may be asked for."""
    assert choose_compute() == ON_CPU
    assert choose_compute(fused=True).dtype == torch.bfloat16
    assert choose_compute("cpu", "float32", fused=True) == ON_CPU
    assert fuses_on_cpus("minilm-stream") == takes_encoder()
    assert not fuses_on_cpus("writer-12m")
    assert choose_compute("cpu", "bfloat16").dtype == torch.bfloat16
    gpus(1)
    assert [choose_compute("cuda", name).dtype for name in ("auto", "float32")] == [torch.bfloat16, torch.float32]


def test_products_are_in_the_precision_and_the_first_line_says_it():
    """The line is that of every command."""
    compute = choose_compute("cpu", "bfloat16")
    a = torch.ones(2, 2)
    with compute.autocast():
        assert (a @ a).dtype == torch.bfloat16
    assert compute.sentence(LocalCommunicator()).startswith("device cpu, bfloat16, 1 rank, kernels: ")
    assert compute.sentence(weights="int8").startswith("device cpu, bfloat16, weights in int8, 1 rank, kernels: ")

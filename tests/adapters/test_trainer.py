"""transformers' Trainer, TRL's SFTTrainer and peft over ranks, from their own packages: losses as without slices."""

import json
import re
from importlib.util import find_spec

import pytest
import torch

from dist_attn import context_parallel
from dist_attn.comm import Communicator, run_simulated
from tests.adapters.test_context_parallel import LENGTHS, Gradients, assert_same, gradients, ids, made
from tests.support.ranks import forkserver
from tests.support.trainer_run import Run, write_losses

pytestmark = pytest.mark.slow


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip where one of these is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"pip install {' '.join(missing)}")


TRL = ("accelerate", "trl", "datasets")
SIDES = {
    "ranks": (Run("qwen3_next"), Run("qwen3_next", ranks=2, slices=2)),
    "rows": (Run("mamba2", ranks=2), Run("mamba2", ranks=4, slices=2)),
    "trl": (Run("llama", sft=True), Run("llama", sft=True, ranks=2, slices=2)),
}
"""Two runs each that are to have the same losses."""


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[float]]]:
    """The losses of `SIDES`, in one process that has loaded transformers, which takes longest."""
    sides = {name: runs for name, runs in SIDES.items() if name != "trl" or all(map(find_spec, TRL))}
    folder, every = tmp_path_factory.mktemp("runs"), [run for runs in sides.values() for run in runs]
    process = forkserver().Process(target=write_losses, args=(folder, every, folder / "log"))
    process.start()
    try:
        process.join(300)
    finally:
        process.kill()
        process.join()
    said = (folder / "log").read_text()
    assert process.exitcode == 0, said
    found = [json.loads(line) for line in re.findall(r"^\[[\d., ]+\]$", said, re.MULTILINE)]
    assert len(found) == len(every), said
    return {name: found[2 * n : 2 * n + 2] for n, name in enumerate(sides)}


@needs("accelerate")
def test_a_trainer_over_two_ranks(losses: dict[str, list[list[float]]]) -> None:
    """Two ranks of one text have the losses of one process."""
    want, got = losses["ranks"]
    assert got == pytest.approx(want, rel=1e-5)


@needs("accelerate")
def test_a_trainer_over_rows_and_slices(losses: dict[str, list[list[float]]]) -> None:
    """Two rows of two ranks have the losses of two processes that divide texts among them."""
    want, got = losses["rows"]
    assert got == pytest.approx(want, rel=1e-5)


@needs(*TRL)
def test_a_trainer_of_trl(losses: dict[str, list[list[float]]]) -> None:
    """TRL's SFTTrainer over two ranks has the losses of one process."""
    want, got = losses["trl"]
    assert got == pytest.approx(want, rel=1e-5)


@needs("peft")
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2"])
def test_adapters_of_peft(kind: str) -> None:
    """Low-rank adapters over frozen weights have the gradients of one process, also with layers computed again."""
    from peft import LoraConfig, get_peft_model

    def adapted() -> torch.nn.Module:
        names = ["q_proj", "v_proj", "in_proj_qkvz", "in_proj"]
        model = get_peft_model(made(kind), LoraConfig(r=4, target_modules=names, lora_dropout=0.0)).train()
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.data.normal_(std=0.1, generator=generator)
        return model

    alone = adapted()
    loss = alone(input_ids=ids(), labels=ids(), use_cache=False).loss
    loss.backward()
    models = [adapted() for _ in LENGTHS]

    def on_rank(comm: Communicator) -> tuple[float, Gradients]:
        model = models[comm.rank]
        model.gradient_checkpointing_enable({"use_reentrant": False})
        parallel = context_parallel(model, comm)
        loss = model(**parallel.shard({"input_ids": ids(), "labels": ids()}, LENGTHS)).loss
        loss.backward()
        parallel.sum_gradients()
        return loss.item(), gradients(model)

    for got in run_simulated(on_rank, len(LENGTHS), timeout_s=60.0):
        assert_same(got, (loss.item(), gradients(alone)))

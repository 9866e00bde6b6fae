"""A stack of several kinds of mixers in a run: its states are carried and resumed, and its model exported."""

from pathlib import Path

import pytest
import torch

from dist_attn.checkpoints import load_model
from dist_attn.training import train
from dist_attn.training.language_task import SegmentStream
from tests.support.models import SIZE, small_config
from tests.support.training import small_run

PATTERN = [
    {"kind": "rfa_gate", "hidden_size": SIZE, "num_heads": 2, "num_random": 8},
    {"kind": "mamba", "hidden_size": SIZE, "state_size": 6},
    {"kind": "softmax", "hidden_size": SIZE, "num_heads": 2},
]


class Killed(BaseException):
    """Stands for SIGKILL: nothing of ours catches it."""


def test_a_killed_run_of_a_hybrid_ends_like_an_undisturbed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With states of three kinds carried from segment to segment, a resumed run exports the weights of a whole one."""
    model = small_config(mixer={"kind": "hybrid", "pattern": PATTERN}, num_layers=3)
    runs = []
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
        runs.append(small_run(tmp_path / name).model_copy(update={"model": model}))
    last = train(runs[0])
    assert last["bits_per_byte"] < 8
    with monkeypatch.context() as patched, pytest.raises(Killed):
        read = SegmentStream.__call__

        def stream(self: SegmentStream, at: int) -> tuple[torch.Tensor, torch.Tensor]:
            if at == 5:
                raise Killed
            return read(self, at)

        patched.setattr(SegmentStream, "__call__", stream)
        train(runs[1])
    train(runs[1], resume=True)
    whole, resumed = (load_model(run.run.folder / "model") for run in runs)
    assert whole.config == resumed.config == model
    weights = resumed.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in whole.state_dict().items())

"""The models that ship: every folder is whole, small, described, and found by its name."""

import json

import numpy as np
import pytest
import torch

from dist_attn.checkpoints import load_reader_and_tokeniser
from dist_attn.models import CausalModel, StreamingModel
from dist_attn.shipped import SHIPPED, resolve_model_folder
from dist_attn.training.chapters import window_rows

NAMES = sorted(path.parent.name for path in SHIPPED.glob("*/config.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_model_is_whole_and_small(name):
    """Its name finds it, its files are those of its manifest, its size and provenance are told, and it reads on."""
    folder = resolve_model_folder(name)
    assert folder == SHIPPED / name
    assert (folder / "model.safetensors").stat().st_size <= 64_000_000
    manifest = json.loads((folder / "manifest.json").read_text())
    if "converted_from" not in manifest:
        assert {"trained_on", "tokens_seen", "steps", "training", "last"} <= manifest.keys()
        assert "war_and_peace.txt" not in manifest["trained_on"]
    readme = (folder / "README.md").read_text()
    assert readme.startswith(f"# {name}\n")
    assert f"{manifest['parameters']:,}" in readme
    model, tokeniser = load_reader_and_tokeniser(name)
    tokens = tokeniser.encode(b"It was the best of times, it was the worst of times.")
    assert isinstance(model, StreamingModel)
    with torch.inference_mode():
        assert bool(model.encode(torch.from_numpy(tokens).long()[None]).isfinite().all())
    if not isinstance(model, CausalModel):
        return
    assert np.isfinite(window_rows(model, tokens, len(tokens), carried=True)).all()
    with torch.inference_mode():
        logits_BV, _ = model.step(torch.tensor([int(tokens[0])]), model.initial_state(1))
    assert bool(logits_BV.isfinite().all())

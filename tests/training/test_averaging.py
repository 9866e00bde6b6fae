"""The average of checkpoints: the mean of every parameter, in a model folder; what is not of one run is refused."""

import json

import pytest
import torch
from safetensors.torch import load_file

from dist_attn.checkpoints import load_model, load_model_and_tokeniser
from dist_attn.errors import ConfigError, InputError, ModelFolderError
from dist_attn.training import train
from dist_attn.training.averaging import average_folders, average_models
from tests.support.closeness import assert_close
from tests.support.models import small_config, small_model, write_small_folder
from tests.support.training import small_run


def test_the_average_is_the_mean_of_every_parameter():
    """Each parameter is the mean of the models' ones, random vectors stay as they were, and one model is itself."""
    models = [small_model(seed=seed) for seed in range(3)]
    averaged = average_models(models)
    for name, parameter in averaged.named_parameters():
        assert_close(parameter, sum(dict(m.named_parameters())[name] for m in models) / 3, what=name)
    assert torch.equal(averaged.blocks[0].mixer.w_HDK, models[0].blocks[0].mixer.w_HDK)
    tokens = torch.arange(9)[None]
    assert torch.equal(average_models(models[:1]).logits(tokens), models[0].logits(tokens))


def test_checkpoints_of_a_run_become_a_model_folder(tmp_path):
    """As many checkpoints as were asked for are kept; their average loads with the tokeniser and says what it is of."""
    train(small_run(tmp_path, steps=8, checkpoint_every=2, keep_checkpoints=3))
    checkpoints = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert [path.name for path in checkpoints] == ["step-000004", "step-000006", "step-000008"]
    average_folders(checkpoints, tmp_path / "averaged")
    model, tokeniser = load_model_and_tokeniser(tmp_path / "averaged")
    stored = [load_file(path / "model.safetensors")["norm.weight"] for path in checkpoints]
    assert_close(model.norm.weight, torch.stack(stored).mean(0))
    assert tokeniser.vocab_size == 257
    manifest = json.loads((tmp_path / "averaged" / "manifest.json").read_text())
    assert manifest["average_of"] == [path.name for path in checkpoints]


def test_model_folders_are_averaged_too(tmp_path):
    """Two model folders give the mean of their weights."""
    folders = [write_small_folder(tmp_path / str(seed), seed=seed) for seed in range(2)]
    average_folders(folders, tmp_path / "mean")
    biases = [load_model(folder).norm.bias for folder in folders]
    assert_close(load_model(tmp_path / "mean").norm.bias, (biases[0] + biases[1]) / 2)


def test_what_does_not_belong_together_is_refused(tmp_path):
    """No models, other configurations, other random vectors, a used name and a stray folder are named in words."""
    one, other = small_model(), small_model(small_config(mlp_size=64))
    with pytest.raises(InputError, match="nothing to average"):
        average_models([])
    with pytest.raises(InputError, match="different configurations"):
        average_models([one, other])
    strange = small_model()
    strange.blocks[1].mixer.w_HDK += 1
    with pytest.raises(InputError, match=r"blocks\.1\.mixer\.w_HDK, which is not learned"):
        average_models([one, strange])
    folder = write_small_folder(tmp_path / "model")
    with pytest.raises(ConfigError, match="there already"):
        average_folders([folder], folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="neither a model folder nor a checkpoint"):
        average_folders([folder, tmp_path / "empty"], tmp_path / "out")
    (folder / "model.safetensors").write_bytes(b"x")
    with pytest.raises(ModelFolderError, match="has 1 bytes"):
        average_folders([folder], tmp_path / "out")
    assert not (tmp_path / "out").exists()

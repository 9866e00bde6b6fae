"""Every task of the papers is trained by a file: it learns, goes on where it was killed, over ranks too."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dist_attn.checkpoints import load_any_model
from dist_attn.errors import ConfigError
from dist_attn.text import ByteTokeniser, load_tokeniser
from dist_attn.training import parallel, train
from dist_attn.training.averaging import average_folders
from dist_attn.training.loop import build_task
from dist_attn.training.mesh import Share
from papers.tests.support.tasks import PAPERS_RUNS, small_task
from tests.models import test_meta_device as on_meta
from tests.support.tokenisers import small_bpe
from tests.training import test_tasks as core

core.LEARNT.update(
    {
        "million": ({"run": {"steps": 30}, "optimiser": {"learning_rate": 2e-2}, "data": {"examples": 6}}, "loss", 0.5),
        # The value of nested lists takes hours to learn: six of them are learnt by heart.
        "listops": ({"run": {"steps": 60}, "optimiser": {"learning_rate": 2e-2}, "data": {"examples": 6}}, "loss", 0.2),
        "vision": ({"run": {"steps": 40}, "optimiser": {"learning_rate": 2e-2}}, "accuracy", 0.9),
        "autoencoder": ({"run": {"steps": 80}}, "validation_loss", 0.8),
        "translation": ({"run": {"steps": 60}, "optimiser": {"learning_rate": 2e-2}}, "token_accuracy", 0.75),
    }
)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PAPERS_RUNS)
def test_a_run_learns_and_leaves_a_model(tmp_path: Path, kind: str) -> None:
    """The loss falls, the metric gets good, and the folder at the end loads with the model that was asked for."""
    core.test_a_run_learns_and_leaves_a_model(tmp_path, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", PAPERS_RUNS)
def test_a_killed_run_ends_like_an_undisturbed_one(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in its fifth step and resumed, a run has the weights and the metrics of one that was not, bit for bit."""
    core.test_a_killed_run_ends_like_an_undisturbed_one(tmp_path, kind, monkeypatch)


@pytest.mark.parametrize("kind", PAPERS_RUNS)
def test_ranks_change_nothing(tmp_path: Path, kind: str) -> None:
    """Shares of loss (under dropout), gradients and validation on a mesh of ranks add up to those of one process."""
    core.test_ranks_change_nothing(tmp_path, kind)


def test_every_rank_counts_but_one_writes_translations(tmp_path: Path) -> None:
    """A validation over ranks leaves the file of translations that one process writes, a line for each source."""
    config = small_task("translation", tmp_path, data={"batch": 5})
    task = core._doubled(build_task(config, Share()))
    task.model.eval()
    with torch.no_grad():
        task.validate()
    written = (config.run.folder / "translations.txt").read_bytes()
    assert written.count(b"\n") == 5
    core.test_ranks_change_nothing(tmp_path, "translation")
    assert (config.run.folder / "translations.txt").read_bytes() == written


@pytest.mark.parametrize("kind", sorted(PAPERS_RUNS.keys() - {"million"}))
def test_steps_on_a_device_without_numbers(kind: str, tmp_path: Path) -> None:
    """Loss, backward pass, clipping and update of a task, on its own batches, wait for nothing."""
    # Of a million-scale model the host must know how many tokens the Selector keeps.
    on_meta.test_training_steps(kind, tmp_path)


def test_the_folder_says_how_pixels_are_scaled(tmp_path: Path) -> None:
    """Names of labels and how pixels are scaled stand in the manifest of the model folder."""
    train(small_task("vision", tmp_path, run={"steps": 1}))
    manifest = json.loads((tmp_path / "run" / "model" / "manifest.json").read_text())
    assert manifest["labels"] == ["down", "up"]
    assert 90 < manifest["pixel_mean"][0] < 110
    assert manifest["pixel_deviation"][0] > 50


@pytest.mark.parametrize(
    ("kind", "sections", "words"),
    [
        ("listops", {"model": {"vocab_size": 16}}, "ListOps has 15 tokens and 10 classes"),
        ("listops", {"data": {"min_length": 100, "max_length": 101}}, "none has 100 to 101 tokens"),
        ("listops", {"model": {"texts": 2}}, r"model\.texts is 2 and the examples of \[data\] have 1"),
        ("vision", {"data": {"batch": 41}}, "there are 40 images; a batch needs 41"),
        ("vision", {"data": {"labels_key": "classes"}}, r"train\.npz has no array 'classes', only images, labels"),
        ("autoencoder", {"data": {"train": "no.npz"}}, r"no\.npz cannot be read"),
        ("translation", {"data": {"batch": 81}}, "has 80 pairs"),
    ],
)
def test_data_that_does_not_fit_is_named(tmp_path: Path, kind: str, sections: dict[str, Any], words: str) -> None:
    """What does not fit the model, or is too little for a batch, is refused in one line before anything is written."""
    core.test_data_that_does_not_fit_is_named(tmp_path, kind, sections, words)


def test_source_and_target_may_have_vocabularies_of_their_own(tmp_path: Path) -> None:
    """Each side is read by its own tokeniser, and both stand in the model folder, which an average keeps."""
    place = tmp_path / "run"
    config = small_task("translation", tmp_path)
    small_bpe().save(tmp_path / "bpe")
    model = {"vocab_size": small_bpe().vocab_size, "source_vocab_size": 257}
    config = small_task("translation", tmp_path, model=model, data={"target_tokeniser": tmp_path / "bpe"})
    train(config)
    average_folders([place / "checkpoints" / f"step-00000{step}" for step in (3, 6)], tmp_path / "averaged")
    for folder in (place / "model", tmp_path / "averaged"):
        assert load_tokeniser(folder).digest == small_bpe().digest
        assert load_tokeniser(folder / "source").digest == ByteTokeniser().digest
        assert load_any_model(folder).config == config.model
    with pytest.raises(ConfigError, match="say that source and target have vocabularies of their own; give both"):
        build_task(small_task("translation", tmp_path, data={"target_tokeniser": tmp_path / "bpe"}), Share())
    with pytest.raises(ConfigError, match=r"has 257 tokens, model\.source_vocab_size is 300"):
        wrong = {"model": model | {"source_vocab_size": 300}, "data": {"target_tokeniser": tmp_path / "bpe"}}
        build_task(small_task("translation", tmp_path, **wrong), Share())


def test_a_classifier_begins_from_a_masked_autoencoder(tmp_path: Path) -> None:
    """It has the auto-encoder's projection and encoder bit for bit, and one of another encoder is refused by name."""
    encoder = small_task("vision", tmp_path).model.model_dump()["encoder"]
    train(small_task("autoencoder", tmp_path / "first", model={"encoder": encoder}, run={"steps": 2}))
    begin = {"begin_from": tmp_path / "first" / "run" / "model"}
    task = build_task(small_task("vision", tmp_path, model={"encoder": encoder}, run=begin), Share())
    want, got = load_any_model(begin["begin_from"]).state_dict(), task.model.state_dict()
    taken = [name for name in got if name.startswith(("projection.", "encoder."))]
    assert len(taken) > 5
    assert all(torch.equal(got[name], want[name]) for name in taken)
    other = small_task("vision", tmp_path, model={"encoder": encoder | {"mlp_size": 8}}, run=begin)
    with pytest.raises(ConfigError, match=r"has another model\.encoder; a classifier that begins from it needs"):
        build_task(other, Share())


def test_layers_that_are_sharded_do_not_lie_in_each_other(tmp_path: Path) -> None:
    """A decoder's layer gathers its parameters by itself, those of the block inside it too, and none lies in two."""
    model = build_task(small_task("translation", tmp_path), Share()).model
    layers = parallel._layers(model)
    assert layers == [*model.encoder.blocks, *model.blocks]
    owned = [id(parameter) for layer in layers for parameter in layer.parameters()]
    assert len(owned) == len(set(owned))

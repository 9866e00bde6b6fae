"""The training files of the papers' models: every example, and what does not fit named."""

from pathlib import Path

import pytest

from dist_attn.training.config import read_config
from papers.tests.support.tasks import small_task
from tests.support.training import write_toml
from tests.training import test_config as core

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("train-*.toml"))


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.stem)
def test_every_example_is_a_configuration(file):
    """Each example of a training file is accepted, and model and data of it are built for each other."""
    config = read_config(file)
    model = config.model
    sizes = {
        "listops": lambda: (model.vocab_size, model.num_classes) == (15, 10),
        "needles": lambda: model.vocab_size == config.data.noise + model.num_classes + 1,
        "images": lambda: model.encoder.max_length > model.image.num_patches,
    }
    assert sizes.get(config.data.kind, lambda: True)()


def test_the_examples_show_every_kind_of_model():
    """There is an example for each of the papers' kinds of models and for each of their kinds of data."""
    configs = [read_config(file) for file in EXAMPLES]
    kinds = {"million", "text_classifier", "vision_classifier", "masked_autoencoder", "encoder_decoder"}
    assert {config.model.kind for config in configs} == kinds
    assert {config.data.kind for config in configs} == {"listops", "needles", "images", "parallel_text"}


@pytest.mark.parametrize(
    ("kind", "override", "words"),
    [
        ("vision", "data.kind=text", "data.train: "),
        ("vision", "data.kind=pictures", "data: there is no data set of kind 'pictures'; there are"),
        ("vision", "data.batches=3", r"train\.toml: data\.batches: there is no such key; did you mean batch\?"),
        ("vision", "model.colour=3", r"train\.toml: model\.colour: there is no such key"),
        ("vision", "objective.hidden_share=0.5", "objective.hidden_share has no meaning for a vision_classifier"),
        ("listops", "data.min_length=500", "data: min_length 500 is above max_length 12"),
        ("autoencoder", "objective.label_smoothing=0.1", "objective.label_smoothing has no meaning for a masked_auto"),
        ("translation", "run.shard_parameters=true", "data.translations goes token by token"),
    ],
)
def test_sections_that_do_not_fit_each_other_are_named(tmp_path, kind, override, words):
    """Keys of another kind of model or data, and options that mean nothing for this one, are refused in one line."""
    core.test_sections_that_do_not_fit_each_other_are_named(tmp_path, kind, override, words)


def test_a_word_without_quotes_is_a_path(tmp_path):
    """An override with a plain word sets the file of the validation's sources."""
    file = write_toml(small_task("translation", tmp_path), tmp_path / "train.toml")
    assert read_config(file, ["data.validation_source=no"]).data.validation_source == Path("no")

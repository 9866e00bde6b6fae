"""The training configuration: what is read, what `--set` changes, and what is refused with file and key."""

from pathlib import Path

import pytest

from dist_attn.errors import ConfigError
from dist_attn.models import build_model
from dist_attn.text import load_tokeniser
from dist_attn.training.config import RunConfig, read_config
from tests.support.tasks import small_task
from tests.support.training import small_run, write_toml

EXAMPLES = Path(__file__).parents[2] / "examples"
SHIPPED_RECIPE = EXAMPLES / "train-books.toml"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_toml(small_run(tmp_path), tmp_path / "train.toml")


def test_a_file_gives_the_configuration(file, tmp_path):
    """A TOML file is read into the value it was written from."""
    assert read_config(file) == small_run(tmp_path)


def test_the_shipped_recipe_is_accepted():
    """The example that reproduces the shipped model is a valid configuration."""
    assert read_config(SHIPPED_RECIPE).model.vocab_size == 4096


@pytest.mark.parametrize("recipe", ["train-books", "train-books-chapters", "train-books-softmax"])
def test_the_recipes_work_from_any_folder(recipe, tmp_path, monkeypatch):
    """The tokeniser and the model to begin from are found by their shipped names, wherever the command is started."""
    monkeypatch.chdir(tmp_path)
    config = read_config(EXAMPLES / f"{recipe}.toml")
    assert load_tokeniser(config.data.tokeniser).vocab_size == config.model.vocab_size == 4096
    assert config.run.begin_from is None or (config.run.begin_from / "model.safetensors").is_file()


def test_the_softmax_twin_differs_only_in_its_mixer():
    """The twin of the shipped recipe has as many parameters to 0.1 %, the same texts, batches, steps and optimiser."""
    ours, twin = read_config(SHIPPED_RECIPE), read_config(EXAMPLES / "train-books-softmax.toml")
    sizes = [sum(p.numel() for p in build_model(config.model).parameters()) for config in (ours, twin)]
    assert abs(sizes[1] - sizes[0]) < 1e-3 * sizes[0]
    assert twin.optimiser == ours.optimiser
    assert twin.data == ours.data.model_copy(update={"stateful": False})
    assert twin.run == ours.run.model_copy(update={"folder": twin.run.folder})


def test_overrides_replace_single_keys(file):
    """Overrides take TOML values and plain words, and change nothing else."""
    before = read_config(file)
    after = read_config(
        file, ["run.steps=99", "run.folder=else/where", "run.dtype=float32", "optimiser.betas=[0.5, 0.6]"]
    )
    assert after.run.steps == 99
    assert after.run.folder == Path("else/where")
    assert after.run.dtype == "float32"
    assert after.optimiser.betas == (0.5, 0.6)
    assert (after.model, after.data) == (before.model, before.data)


@pytest.mark.parametrize(("bf16", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_configurations_that_say_bf16_are_read(bf16, dtype):
    """As a precision; earlier runs wrote it, and go on."""
    assert RunConfig.model_validate({"folder": "x", "steps": 1, "bf16": bf16}).dtype == dtype


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("run.steps", "needs the form section.key=value"),
        ("=3", "needs the form section.key=value"),
        ("run.steps=many", "run.steps: Input should be a valid integer"),
        ("run.steps=0", "run.steps: Input should be greater than or equal to 1"),
        ("run.stepz=3", r"run\.stepz: there is no such key; did you mean steps\?$"),
        ("runs.steps=3", r"runs: there is no such key; did you mean run\?$"),
        (
            "model.mixer.num_randm=3",
            r"toml: model\.mixer\.num_randm: there is no such key; did you mean num_random\?$",
        ),
        ("data.text=3", r"toml: data\.text: there is no such key"),
        ("model.mixer.num_heads=3", r"toml: model\.mixer: hidden_size 16 must be a multiple of num_heads 3$"),
        ("optimiser.zzz=3", r"optimiser\.zzz: there is no such key$"),
        ("run.steps.more=3", "'steps' is not a section"),
        ("run=3", "run: Input should be a valid dictionary"),
        ("optimiser.kind=sgd", "optimiser.kind: Input should be 'adamw' or 'muon'"),
        ("optimiser.betas=[0.9, 1.5]", "optimiser.betas.1: Input should be less than 1"),
        ("optimiser.learning_rate=inf", "optimiser.learning_rate: Input should be a finite number"),
        ("model.hidden_size=32", "model: .*the mixer's hidden_size 16 must equal the model's 32"),
        ("data.train=[]", "data.train: "),
        ("run.steps=-5", "run.steps: Input should be greater than or equal to 1; given is -5"),
        ("run.seed=-1", "run.seed: Input should be greater than or equal to 0; given is -1"),
        ("run.seed=100000000000000000000", "run.seed: Input should be less than"),
        ("run.threads=100000", "run.threads: Input should be less than or equal to 1024; given is 100000"),
        ("model.num_layers=100000000000", "model.num_layers: Input should be less than"),
        ("model.mixer.num_heads=0", "toml: model.mixer.num_heads: Input should be greater"),
        ("model.mixer.num=1", "toml: model.mixer.num: there is no such key"),
        ("model.positions=learned", "toml: model.positions: .*LearnedPositions; given is 'learned'"),
        ("model.positions={kind='learned'}", "toml: model.positions.length: it is missing"),
    ],
)
def test_bad_values_are_named(file, override, words):
    """A key that is unknown, or a value of the wrong type or size, is refused in one line with its key."""
    with pytest.raises(ConfigError, match=words) as caught:
        read_config(file, [override])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (None, "cannot be read: No such file"),
        (b"[run\n", "is not TOML"),
        (b"\xff\xfe", "is not TOML"),
        (b"", r'model: it is missing; for example: \[model\] with the line preset = "tiny"'),
    ],
)
def test_files_that_are_no_configuration_are_named(tmp_path, contents, words):
    """A file that is missing, is not TOML, or lacks a section is refused with its name."""
    path = tmp_path / "train.toml"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(ConfigError, match=words) as caught:
        read_config(path)
    assert "train.toml" in str(caught.value)


def test_a_slip_of_the_pen_is_seen_before_the_key_that_it_hides(file):
    """A needed key that is written wrongly is asked for by the name that was written, not as missing."""
    file.write_text(file.read_text().replace("\nsteps = ", "\nstepz = "))
    with pytest.raises(ConfigError, match=r"run\.stepz: there is no such key; did you mean steps\?$"):
        read_config(file)


@pytest.mark.parametrize("file", sorted(SHIPPED_RECIPE.parent.glob("train-*.toml")), ids=lambda file: file.stem)
def test_every_example_is_a_configuration(file):
    """Each example of a training file is accepted."""
    read_config(file)


def test_the_examples_show_every_kind_of_model():
    """There is an example for each kind of model and of data that is built in."""
    configs = [read_config(file) for file in SHIPPED_RECIPE.parent.glob("train-*.toml")]
    assert {config.model.kind for config in configs} == {"language_model", "text_classifier"}
    assert {config.data.kind for config in configs} == {"text", "labelled_text"}


@pytest.mark.parametrize(
    ("kind", "override", "words"),
    [
        ("labelled_text", "data.kind=pictures", "data: there is no data set of kind 'pictures'; there are"),
        ("labelled_text", "data.batches=3", r"train\.toml: data\.batches: there is no such key; did you mean batch\?"),
        ("labelled_text", "model.colour=3", r"train\.toml: model\.colour: there is no such key"),
        ("labelled_text", "objective.hidden_share=0.5", "objective.hidden_share has no meaning for a text_classifier"),
    ],
)
def test_sections_that_do_not_fit_each_other_are_named(tmp_path, kind, override, words):
    """Keys of another kind of model or data, and options that mean nothing for this one, are refused in one line."""
    file = write_toml(small_task(kind, tmp_path), tmp_path / "train.toml")
    with pytest.raises(ConfigError, match=words) as caught:
        read_config(file, [override])
    assert "\n" not in str(caught.value)


def test_a_kind_of_model_trains_on_its_kind_of_data(tmp_path):
    """A language model with labelled texts is told what it trains on, and a classifier with plain ones."""
    file = write_toml(small_task("labelled_text", tmp_path), tmp_path / "train.toml")
    other = write_toml(small_run(tmp_path), tmp_path / "other.toml")
    mixed = tmp_path / "mixed.toml"
    (language, plain), (classifier, labelled) = (one.read_text().split("[data]") for one in (other, file))
    mixed.write_text(f"{language}[data]{labelled}")
    with pytest.raises(ConfigError, match=r"language_model trains on data\.kind text; given is labelled_text"):
        read_config(mixed)
    mixed.write_text(f"{classifier}[data]{plain}")
    with pytest.raises(ConfigError, match=r"text_classifier trains on data\.kind labelled_text; given is text"):
        read_config(mixed)

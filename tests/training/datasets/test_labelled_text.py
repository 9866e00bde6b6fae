"""Labelled texts from .jsonl: tokens and labels of every line, from a cache, and what is wrong named by its line."""

import gzip
import json
import os

import pytest

from dist_attn.errors import ConfigError, StorageError
from dist_attn.text import ByteTokeniser
from dist_attn.training.datasets import labelled_text
from dist_attn.training.datasets.examples import LabelNames
from dist_attn.training.datasets.labelled_text import read_labelled_texts
from dist_attn.training.datasets.text_sources import expand
from dist_attn.training.datasets.token_cache import nothing_shown
from tests.support.tokenisers import small_bpe

EXAMPLES = [("good", "wonderful — what a film"), ("bad", "no"), ("good", "yes"), ("mixed", "well…")]


def _write(path, examples, text="text", label="label"):
    lines = "".join(json.dumps({text: t, label: name, "more": 1}) + "\n" for name, t in examples)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


def _read(paths, cache, tokeniser=None, max_length=1000, **fields):
    names = {"text_fields": ("text",), "label_field": "label", **fields}
    return read_labelled_texts(
        paths, tokeniser or ByteTokeniser(), cache, **names, max_length=max_length, progress=nothing_shown
    )


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_every_line_is_an_example(tmp_path, name):
    """Texts come back from their tokens, cut to the length asked for, and labels are numbered by the alphabet."""
    path = _write(tmp_path / name, EXAMPLES, text="words", label="verdict")
    for tokeniser in (ByteTokeniser(), small_bpe()):
        got = _read([path], tmp_path / "c", tokeniser, text_fields=("words",), label_field="verdict")
        assert [tokeniser.decode(got.texts[i]).decode() for i in range(4)] == [text for _, text in EXAMPLES]
    names = LabelNames.of(got.labels)
    assert names.names == ("bad", "good", "mixed")
    assert got.classes(names).tolist() == [1, 0, 1, 2]
    short = _read([path], tmp_path / "c", max_length=5, text_fields=("words",), label_field="verdict")
    assert short.texts.lengths.tolist() == [5, 2, 3, 5]


def test_an_example_may_be_a_pair(tmp_path):
    """Each text of a pair comes back by itself; a line with one of them only is refused with what it lacks."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "other": "bb", "label": 1}\n{"text": "ccc", "other": "d", "label": 0}\n')
    got = _read([path], tmp_path / "c", text_fields=("text", "other"))
    assert len(got) == 2 and got.labels == (1, 0)
    texts = [[ByteTokeniser().decode(text) for text in got.texts_of(number)] for number in range(2)]
    assert texts == [[b"a", b"bb"], [b"ccc", b"d"]]
    path.write_text('{"text": "a", "label": 1}\n')
    with pytest.raises(ConfigError, match=r"line 1 has no field 'other'"):
        _read([path], tmp_path / "c", text_fields=("text", "other"))


def test_labels_may_be_numbers(tmp_path):
    """Whole numbers are ordered by size, whichever come first, and need not begin at 0."""
    got = _read([_write(tmp_path / "a.jsonl", [(10, "x"), (9, "y"), (10, "z")])], tmp_path / "c")
    names = LabelNames.of(got.labels)
    assert names.names == (9, 10)
    assert got.classes(names).tolist() == [1, 0, 1]
    with pytest.raises(ConfigError, match=r"have 2 labels, 9, 10; model\.num_classes is 3"):
        names.check(3)


def test_the_cache_is_used_until_something_changes(tmp_path, monkeypatch):
    """A second reading tokenises nothing; another text, field or length is read anew."""
    path = _write(tmp_path / "a.jsonl", EXAMPLES)
    first = _read([path], tmp_path / "c")
    with monkeypatch.context() as patched:
        patched.setattr(labelled_text, "records", lambda *_: pytest.fail("the cache was not used"))
        again = _read([path], tmp_path / "c")
        assert again.labels == first.labels
        assert again.texts.tokens.tolist() == first.texts.tokens.tolist()
    assert _read([path], tmp_path / "c", label_field="text").labels != first.labels
    _write(path, EXAMPLES[:2])
    assert len(_read([path], tmp_path / "c")) == 2
    assert not list((tmp_path / "c").glob(".*"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 3 is not JSON"),
        ("[" * 100_000, "line 3 is not JSON"),
        ("[1]", "line 3 is list; needed is one JSON object per line"),
        ('{"label": "bad"}', "line 3 has no field 'text', only 'label'; name the field"),
        ('{"text": 3, "label": "bad"}', "line 3: 'text' is int; needed is str"),
        ('{"text": "a", "label": true}', "line 3: 'label' is bool; needed is str or int"),
        ('{"text": "", "label": "bad"}', "line 3: the text is empty"),
        ('{"text": "\\xff", "label": "bad"}', "line 3 is not JSON"),
    ],
)
def test_lines_that_are_no_examples_are_named(tmp_path, line, words):
    """What is not an example is refused with file and line, blank ones counted, and leaves no cache."""
    path = _write(tmp_path / "a.jsonl", EXAMPLES[:1])
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=rf"a\.jsonl, {words}") as caught:
        _read([path], tmp_path / "c")
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "c").iterdir())


@pytest.mark.parametrize("ending", ["tokens", "offsets.npy"])
@pytest.mark.parametrize("left", [0, 10, None])
def test_a_damaged_cache_is_made_again(tmp_path, ending, left):
    """Where a file of the cache is empty, cut off or gone the texts are tokenised again, and are the same."""
    path = _write(tmp_path / "a.jsonl", EXAMPLES)
    first = _read([path], tmp_path / "c").texts.tokens.tolist()
    (damaged,) = (tmp_path / "c").glob(f"*.{ending}")
    contents = damaged.read_bytes()
    damaged.unlink()
    if left is not None:
        damaged.write_bytes(contents[:left])
    assert _read([path], tmp_path / "c").texts.tokens.tolist() == first


def test_a_cache_that_cannot_be_written_is_named(tmp_path):
    """A full disk, or a file in the place of the cache's folder, is said with the folder's name."""
    path = _write(tmp_path / "a.jsonl", EXAMPLES)
    (tmp_path / "c").write_text("")
    with pytest.raises(StorageError, match=r"tokens of the texts could not be written into .*c: File exists"):
        _read([path], tmp_path / "c")


def test_a_pipe_is_no_training_text(tmp_path):
    """A pipe, which could be read only once, is refused in place of a wait for its other end."""
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(ConfigError, match=r"pipe\.txt is no file"):
        expand([tmp_path / "pipe.txt"])


def test_files_that_hold_no_examples_are_named(tmp_path):
    """A file that is missing, empty, damaged or of another kind is refused with its name."""
    (tmp_path / "empty.jsonl").write_bytes(b"\n")
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b"{}" * 999)[:20])
    (tmp_path / "no.jsonl.gz").write_bytes(b"{}")
    for name, words in [
        ("missing.jsonl", "cannot be read: No such file"),
        ("empty.jsonl", "has no examples"),
        ("cut.jsonl.gz", "cannot be read: Compressed file ended"),
        ("no.jsonl.gz", "cannot be read: Not a gzipped file"),
        ("text.txt", "is not .jsonl"),
    ]:
        with pytest.raises(ConfigError, match=rf"{name} {words}"):
            _read([tmp_path / name], tmp_path / "c")


def test_labels_of_the_validation_set_are_those_of_the_training_set(tmp_path):
    """A label that no training example has is refused with the example that has it."""
    train = _read([_write(tmp_path / "a.jsonl", EXAMPLES)], tmp_path / "c")
    held_out = _read([_write(tmp_path / "b.jsonl", [("good", "a"), ("odd", "b")])], tmp_path / "c")
    with pytest.raises(ConfigError, match=r"b\.jsonl, example 2: label 'odd' is not one of .*'bad', 'good', 'mixed'"):
        held_out.classes(LabelNames.of(train.labels))

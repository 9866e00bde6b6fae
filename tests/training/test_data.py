"""Training segments: contiguous streams that depend on the step alone, and a token cache keyed by content."""

import gzip
import json

import numpy as np
import pytest
import torch

from dist_attn.errors import ConfigError
from dist_attn.text import ByteTokeniser
from dist_attn.training import language_task
from dist_attn.training.datasets import text_sources, token_cache
from dist_attn.training.language_task import SegmentStream, digests_of, tokenise_files


def test_streams_are_contiguous_and_targets_are_the_next_tokens():
    """Stream i of a step goes on where it stopped in the step before, and each target is the token after its input."""
    tokens = np.arange(1000, dtype=np.int32)
    stream = SegmentStream(tokens, batch=4, segment=7)
    before_inputs, before_targets = stream(0)
    assert before_inputs[:, 0].tolist() == [0, 250, 500, 750]
    for step in range(1, 200):
        inputs, targets = stream(step)
        assert inputs.shape == targets.shape == (4, 7)
        assert inputs.dtype == targets.dtype == torch.int64
        assert torch.equal(inputs[:, 0], before_targets[:, -1])
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        before_inputs, before_targets = inputs, targets


def test_every_token_is_read():
    """One pass over the corpus reads each token once, whatever remains at the end."""
    stream = SegmentStream(np.arange(120, dtype=np.int32), batch=3, segment=8)
    seen = torch.cat([stream(step)[0].flatten() for step in range(5)])
    assert sorted(seen.tolist()) == list(range(120))


def test_a_step_depends_on_nothing_but_its_number():
    """The same step of a fresh stream gives the same batch, in any order of asking: what a resumed run needs."""
    tokens = np.random.default_rng(0).integers(0, 99, 333).astype(np.int32)
    asked = SegmentStream(tokens, 5, 13)
    want = [asked(step) for step in range(20)]
    fresh = SegmentStream(tokens, 5, 13)
    for step in (19, 0, 7):
        assert all(torch.equal(a, b) for a, b in zip(fresh(step), want[step], strict=True))


def test_a_corpus_shorter_than_a_batch_is_refused():
    """A corpus that cannot fill one batch is refused with both numbers and what to change."""
    with pytest.raises(ConfigError, match=r"has 39 tokens; .* needs 40\. Give more text, or a smaller data\.batch"):
        SegmentStream(np.zeros(39, dtype=np.int32), batch=4, segment=9)
    SegmentStream(np.zeros(40, dtype=np.int32), batch=4, segment=9)


def test_digests_are_those_of_sha256sum(tmp_path):
    """A file's digest is that of its bytes, a folder's changes with its texts, and equal names are told apart."""
    folder = tmp_path / "more"
    folder.mkdir()
    (tmp_path / "a.txt").write_bytes(b"abc")
    (folder / "b.txt").write_bytes(b"d")
    before = digests_of([tmp_path / "a.txt", folder])
    assert before["a.txt"] == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (folder / "b.txt").write_bytes(b"e")
    after = digests_of([tmp_path / "a.txt", folder])
    assert after["a.txt"] == before["a.txt"]
    assert after["more"] != before["more"]
    (folder / "a.txt").write_bytes(b"f")
    assert set(digests_of([tmp_path / "a.txt", folder / "a.txt"])) == {"a.txt", "more/a.txt"}


def test_files_become_one_stream_with_an_end_token_after_each(tmp_path, monkeypatch):
    """Tokens of all files in order, each file ended, the same however small the pieces that are read."""
    monkeypatch.setattr(text_sources, "PIECE_BYTES", 3)
    tokeniser = ByteTokeniser()
    (tmp_path / "a").write_text("héllo")
    (tmp_path / "b").write_text("world")
    got = tokenise_files((tmp_path / "a", tmp_path / "b"), tokeniser, tmp_path / "cache")
    end = [tokeniser.end_token]
    want = [*tokeniser.encode("héllo".encode()), *end, *tokeniser.encode(b"world"), *end]
    assert got.tolist() == want


def test_the_cache_is_used_until_a_file_changes(tmp_path, monkeypatch):
    """A second call tokenises nothing; a changed file is tokenised again."""
    path = tmp_path / "a"
    path.write_text("one")
    first = tokenise_files((path,), ByteTokeniser(), tmp_path / "cache")
    with monkeypatch.context() as patched:
        patched.setattr(language_task, "documents", lambda *_: pytest.fail("the cache was not used"))
        assert np.array_equal(tokenise_files((path,), ByteTokeniser(), tmp_path / "cache"), first)
    path.write_text("two")
    assert not np.array_equal(tokenise_files((path,), ByteTokeniser(), tmp_path / "cache"), first)
    assert not list((tmp_path / "cache").glob("*writing*"))


@pytest.mark.parametrize(("contents", "words"), [(None, "cannot be read: No such file"), (b"", "is empty")])
def test_missing_and_empty_texts_are_named(tmp_path, contents, words):
    """A training text that is missing or empty is refused with its name, and no cache is left."""
    path = tmp_path / "text.txt"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(ConfigError, match=f"text.txt {words}"):
        tokenise_files((path,), ByteTokeniser(), tmp_path / "cache")
    assert not list(tmp_path.glob("cache/*"))


def test_folders_stand_for_their_texts(tmp_path):
    """A folder is all *.txt in it and below, in the order of their paths, whatever else lies there."""
    (tmp_path / "books" / "b").mkdir(parents=True)
    for name, text in [("z.txt", "last"), ("a.txt", "first"), ("b/c.txt", "middle"), ("notes.md", "no")]:
        (tmp_path / "books" / name).write_text(text)
    files = tuple(tmp_path / "books" / name for name in ("a.txt", "b/c.txt", "z.txt"))
    got = tokenise_files((tmp_path / "books",), ByteTokeniser(), tmp_path / "cache")
    assert got.tolist() == tokenise_files(files, ByteTokeniser(), tmp_path / "other").tolist()
    (tmp_path / "none").mkdir()
    with pytest.raises(ConfigError, match=r"none has no \*\.txt"):
        tokenise_files((tmp_path / "none",), ByteTokeniser(), tmp_path / "cache")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_every_line_of_a_jsonl_file_is_a_document(tmp_path, name):
    """The texts of all lines come in order, an end token after each, from the field that was named."""
    lines = "".join(json.dumps({"words": words, "id": i}) + "\n" for i, words in enumerate(["héllo", "", "world"]))
    path = tmp_path / name
    path.write_bytes(gzip.compress(lines.encode()) if name.endswith("gz") else lines.encode())
    tokeniser = ByteTokeniser()
    got = tokenise_files((path,), tokeniser, tmp_path / "cache", text_field="words")
    end = [tokeniser.end_token]
    assert got.tolist() == [*"héllo".encode(), *end, *b"world", *end]
    with pytest.raises(ConfigError, match=rf"{name}, line 1 has no field 'text', only 'words', 'id'"):
        tokenise_files((path,), tokeniser, tmp_path / "cache")
    path.rename(tmp_path / "b.txt.gz" if name.endswith("gz") else tmp_path / "b.txt")
    other = tokenise_files(tuple(tmp_path.glob("b.*")), tokeniser, tmp_path / "cache", text_field="words")
    assert other.tolist() == [*lines.encode(), *end]


def test_progress_is_told_while_text_is_read(tmp_path, monkeypatch):
    """What is told never falls and ends at the size of all files; a text from the cache says nothing."""
    monkeypatch.setattr(token_cache, "_TELL_EVERY_S", 0.0)
    (tmp_path / "a.txt").write_text("héllo\n" * 100)
    (tmp_path / "b.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    told = []
    paths = (tmp_path / "a.txt", tmp_path / "b.jsonl")
    for _ in range(2):
        tokenise_files(paths, ByteTokeniser(), tmp_path / "cache", progress=lambda *values: told.append(values))
        assert told[-1] == ("tokenising", 732, 732)
        assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert len(told) == 3

"""Parallel text: pairs line by line, batches whose sources have one length, and every pair once an epoch."""

import gzip
from collections import Counter

import numpy as np
import pytest
import torch

from dist_attn.errors import ConfigError
from dist_attn.text import ByteTokeniser
from dist_attn.training.datasets.token_cache import nothing_shown
from dist_attn_papers.translation.parallel_text import NO_TOKEN, PairBatches, read_parallel_texts
from tests.support.tokenisers import small_bpe

BYTES = ByteTokeniser()
PAIRS = [("a" * (1 + i % 4), "é" * (1 + i % 3) + "!" * (i % 5)) for i in range(50)]


def _write(folder, pairs=PAIRS, suffix=""):
    paths = folder / f"s{suffix}", folder / f"t{suffix}"
    for path, side in zip(paths, zip(*pairs, strict=True), strict=True):
        text = "".join(f"{line}\n" for line in side).encode()
        path.write_bytes(gzip.compress(text) if suffix else text)
    return paths


def _read(folder, pairs=PAIRS, tokenisers=(BYTES, BYTES), max_length=100, suffix=""):
    paths = _write(folder, pairs, suffix)
    return read_parallel_texts(paths, tokenisers, folder / "c", max_length=max_length, progress=nothing_shown)


def _batches(folder, batch=4, seed=0, **more):
    return PairBatches(_read(folder, **more), batch, seed, (BYTES.end_token, BYTES.end_token))


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_pairs_are_read_line_by_line(tmp_path, suffix):
    """Each side comes back from its tokens, with a tokeniser of its own; pairs with a long side are left out."""
    bpe = small_bpe()
    got = _read(tmp_path, tokenisers=(BYTES, bpe), suffix=suffix)
    read = [(BYTES.decode(s).decode(), bpe.decode(t).decode()) for s, t in zip(got.sources, got.targets, strict=True)]
    assert read == PAIRS
    short = _read(tmp_path, max_length=3, suffix=suffix)
    kept = [i for i, (s, t) in enumerate(PAIRS) if len(s.encode()) <= 3 and len(t.encode()) <= 3]
    assert short.kept.tolist() == kept
    assert short.left_out == 50 - len(kept)


def test_batches_hold_sources_of_one_length_and_all_pairs_once_an_epoch(tmp_path):
    """Over an epoch each pair is a row that counts once; every row is its pair's, begun and ended; none is padded."""
    batches = _batches(tmp_path)
    for epoch in range(2):
        seen = Counter()
        for step in range(epoch * batches.per_epoch, (epoch + 1) * batches.per_epoch):
            batch, numbers = batches(step), batches.pair_numbers(step)
            assert batches.pairs_before(step) == 50 * epoch + sum(seen.values())
            assert len(batch.source_BS) == len(batch.target_BL) == len(batch.next_BL) == 4
            for row, number in enumerate(numbers):
                source, target = (list(text.encode()) for text in PAIRS[number])
                assert batch.source_BS[row].tolist() == [*source, 256]
                end = len(target) + 1
                assert batch.target_BL[row, :end].tolist() == [256, *target]
                assert batch.next_BL[row, :end].tolist() == [*target, 256]
                assert (batch.next_BL[row, end:] == NO_TOKEN).all()
            assert (batch.next_BL[len(numbers) :] == NO_TOKEN).all()
            assert batch.num_targets == sum(len(PAIRS[number][1].encode()) + 1 for number in numbers)
            assert batch.rows(1, 3).target_BL.tolist() == batch.target_BL[1:3].tolist()
            seen.update(numbers.tolist())
        assert seen == Counter(range(50))


def test_a_step_depends_on_nothing_but_its_number(tmp_path):
    """A fresh reader gives the same batch for the same step, in any order of asking; epochs and seeds differ."""
    want = [_batches(tmp_path).pair_numbers(step).tolist() for step in range(40)]
    fresh, other = _batches(tmp_path), _batches(tmp_path, seed=1)
    assert [fresh.pair_numbers(step).tolist() for step in (33, 0, 12)] == [want[33], want[0], want[12]]
    assert torch.equal(fresh(7).source_BS, _batches(tmp_path)(7).source_BS)
    assert want[: fresh.per_epoch] != want[fresh.per_epoch : 2 * fresh.per_epoch]
    assert [other.pair_numbers(step).tolist() for step in range(40)] != want
    assert np.all([len(numbers) <= 4 for numbers in want])


@pytest.mark.parametrize(
    ("pairs", "words"),
    [
        ([("a", "b"), ("", "c")], r"s, line 2 is empty; take the pair out of both files"),
        ([("a", "b"), ("c", "  ")], r"t, line 2 is empty"),
        ([("a", "b"), ("c", "d")], r"has 2 pairs \(and 0 that are too long\); a batch needs 4"),
        ([("a" * 101, "b")], r"no pair of .* fits in data\.max_length = 100"),
    ],
)
def test_pairs_that_are_none_are_named(tmp_path, pairs, words):
    """Empty lines, too few pairs and pairs that are all too long are refused with file, line and what to do."""
    with pytest.raises(ConfigError, match=words):
        _batches(tmp_path, pairs=pairs)


def test_files_that_are_not_parallel_are_named(tmp_path):
    """Files of different lengths, or none at all, are refused with both numbers or the name."""
    source, target = _write(tmp_path)
    target.write_text("one\n")
    with pytest.raises(ConfigError, match=r"s has 50 lines and .*t has 1; line n of one must be line n"):
        read_parallel_texts((source, target), (BYTES, BYTES), tmp_path, max_length=9, progress=nothing_shown)
    with pytest.raises(ConfigError, match=r"nowhere cannot be read: No such file.*--set data"):
        read_parallel_texts(
            (source, tmp_path / "nowhere"), (BYTES, BYTES), tmp_path, max_length=9, progress=nothing_shown
        )
    for path in (source, target):
        path.write_text("")
    with pytest.raises(ConfigError, match=r"s is empty; give at least one pair"):
        read_parallel_texts((source, target), (BYTES, BYTES), tmp_path, max_length=9, progress=nothing_shown)

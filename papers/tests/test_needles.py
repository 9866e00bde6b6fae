"""Needles in noise: what a sequence holds, that it depends on its number alone, and what does not fit."""

import numpy as np
import pytest
from pydantic import ValidationError

from dist_attn.errors import ConfigError
from dist_attn.training.datasets.labelled_text import ReaderSizes, read_text_sets
from dist_attn_papers.made_up import Needles, NeedlesConfig


def test_the_class_is_the_sum_of_the_two_needles():
    """Every sequence has its copies of one symbol of either alphabet, and their sum is its class."""
    needles = Needles(seed=3, length=50, noise=10, symbols=5, copies=3)
    classes = set()
    for index in range(150):
        tokens, label = needles(index)
        first, second = (tokens[(tokens >= 10) & (tokens < 15)] - 10, tokens[tokens >= 15] - 15)
        assert len(tokens) == 50 and len(first) == len(second) == 3
        assert len(set(first.tolist())) == len(set(second.tolist())) == 1
        assert label == first[0] + second[0]
        classes.add(label)
    assert classes == set(range(needles.classes)) and needles.vocab_size == 20


def test_a_sequence_is_a_function_of_seed_and_number():
    """The same number gives the same sequence, another number or seed another one."""
    tokens, label = Needles(0, 64)(7)
    again, same = Needles(0, 64)(7)
    assert np.array_equal(tokens, again) and label == same
    assert not np.array_equal(tokens, Needles(0, 64)(8)[0])
    assert not np.array_equal(tokens, Needles(1, 64)(7)[0])


def test_validation_has_other_sequences(tmp_path):
    """Held-out sequences are those behind the training ones, and a model of other sizes is refused."""
    data = NeedlesConfig(length=20, noise=8, symbols=3, examples=5, validation_examples=2)
    sets = read_text_sets(data, ReaderSizes(14, 5), tmp_path, lambda *_: None)
    assert sets.validation is not None and (len(sets.train), len(sets.validation)) == (5, 2)
    assert sets.validation[0][0][0].tolist() == Needles(0, 20, 8, 3)(5)[0].tolist()
    with pytest.raises(ConfigError, match="has 14 tokens and 5 classes"):
        read_text_sets(data, ReaderSizes(15, 5), tmp_path, lambda *_: None)


def test_more_needles_than_places_are_refused():
    """A sequence needs a place for every needle."""
    with pytest.raises(ValidationError, match="more needles than length 7 has places"):
        NeedlesConfig(length=7, copies=4)

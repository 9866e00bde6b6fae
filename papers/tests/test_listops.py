"""ListOps: expressions of the grammar, of the lengths asked for, whose value an evaluator written apart agrees with."""

from statistics import median

import numpy as np
import pytest

from dist_attn.errors import ConfigError
from dist_attn_papers.made_up import NUM_CLASSES, TOKEN_NAMES, VOCAB_SIZE, ListOps

SMALL = ListOps(seed=3, min_length=5, max_length=60, max_depth=5, max_args=4)


def evaluate(words: list[str]) -> tuple[int, int]:
    """Value and depth of an expression by the plainest way: a stack of open lists."""
    functions = {
        "[MIN": min,
        "[MAX": max,
        "[MED": lambda values: int(median(values)),
        "[SM": lambda values: sum(values) % 10,
    }
    open_lists: list[list] = [[]]
    deepest = 0
    for word in words:
        if word in functions:
            open_lists.append([functions[word]])
            deepest = max(deepest, len(open_lists) - 1)
        elif word == "]":
            function, *values = open_lists.pop()
            assert len(values) >= 2
            open_lists[-1].append(function(values))
        else:
            open_lists[-1].append(int(word))
    ((value,),) = open_lists
    return value, deepest


def test_values_are_those_of_an_evaluator_written_apart():
    """Value, length, depth and number of arguments of many expressions are what was asked for, and all tokens occur."""
    seen, values, depths = set(), set(), set()
    for index in range(300):
        tokens, value = SMALL(index)
        words = [TOKEN_NAMES[token] for token in tokens]
        got, depth = evaluate(words)
        assert got == value
        assert 5 <= len(tokens) <= 60
        assert depth < SMALL.max_depth
        seen.update(tokens.tolist())
        values.add(value)
        depths.add(depth)
    assert seen == set(range(VOCAB_SIZE))
    assert values == set(range(NUM_CLASSES))
    assert depths == {1, 2, 3, 4}


def test_an_expression_depends_on_seed_and_index_alone():
    """The same index gives the same expression in any order of asking; other indices and seeds give others."""
    assert [TOKEN_NAMES[token] for token in SMALL(0)[0]] == ["[MIN", "6", "[MAX", "9", "0", "0", "]", "1", "]"]
    before = [SMALL(index)[0].tolist() for index in range(30)]
    fresh = ListOps(seed=3, min_length=5, max_length=60, max_depth=5, max_args=4)
    assert [fresh(index)[0].tolist() for index in reversed(range(30))] == before[::-1]
    other = ListOps(seed=4, min_length=5, max_length=60, max_depth=5, max_args=4)
    assert [other(index)[0].tolist() for index in range(30)] != before
    assert len({tuple(tokens) for tokens in before}) > 25


def test_lengths_of_the_benchmark():
    """With the defaults expressions have 500 to 2,000 tokens, in the middle about 1,000."""
    lengths = [len(ListOps(seed=0)(index)[0]) for index in range(60)]
    assert 500 <= min(lengths) < 800
    assert 1200 < max(lengths) <= 2000
    assert 800 < np.mean(lengths) < 1300


def test_lengths_that_there_are_not_are_refused():
    """A grammar too shallow for the length is refused in words in place of a search without end."""
    with pytest.raises(ConfigError, match=r"none has 50 to 60 tokens; widen data\.min_length"):
        ListOps(seed=0, min_length=50, max_length=60, max_depth=2, max_args=3)(0)

"""Combinations of parameters for tests that need not try all of them."""

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

__all__ = ["each_pair"]


def each_pair(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Few combinations, in which each value of a parameter meets each value of every other one."""
    values = [list(parameter) for parameter in parameters]
    numbers = [range(len(some)) for some in values]
    left = {
        ((i, a), (j, b)) for i, j in combinations(range(len(values)), 2) for a, b in product(numbers[i], numbers[j])
    }
    found = []
    while left:
        fixed = dict(min(left))
        rows = product(*([fixed[i]] if i in fixed else some for i, some in enumerate(numbers)))
        best = max(rows, key=lambda row: len(left.intersection(combinations(enumerate(row), 2))))
        left.difference_update(combinations(enumerate(best), 2))
        found.append(tuple(some[number] for some, number in zip(values, best, strict=True)))
    return found

"""Fixtures that say what computes linear attention on a CPU."""

from tests.support.interpreter import look_once
from tests.support.native import computed_by, kernel_calls

__all__ = ["computed_by", "kernel_calls"]

look_once()

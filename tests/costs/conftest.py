"""Fixtures that say what computes linear attention on a CPU."""

from tests.support.native import computed_by

__all__ = ["computed_by"]

"""Triton's interpreter in tests of several simulated ranks."""

import ast
from threading import Lock
from typing import Any

import pytest

__all__ = ["one_at_a_time"]


def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated ranks are threads, and the interpreter knows one kernel at a time.

    It reads a kernel's source at its first launch, which one thread must do alone: CPython 3.11 counts how deep it is
    in a syntax tree for all threads together ("AST constructor recursion depth mismatch").
    """
    from triton.runtime.interpreter import GridExecutor

    lock, reading, launch, parse = Lock(), Lock(), GridExecutor.__call__, ast.parse

    def alone(self: GridExecutor, *args: Any, **kwargs: Any) -> Any:
        with lock:
            return launch(self, *args, **kwargs)

    def parse_alone(*args: Any, **kwargs: Any) -> Any:
        with reading:
            return parse(*args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", alone)
    monkeypatch.setattr(ast, "parse", parse_alone)

"""Triton's interpreter in tests: faster, and for several simulated ranks."""

import ast
import os
from functools import cache
from importlib.util import find_spec
from threading import Lock
from typing import Any

import pytest

__all__ = ["look_once", "one_at_a_time"]


def look_once() -> None:
    """Keep the interpreter from searching its whole language anew wherever a kernel calls a function.

    What it puts in the place of the language's functions stays there until the launch ends. The searches take two
    fifths of the time of a small kernel.
    """
    if os.environ.get("TRITON_INTERPRET") != "1" or find_spec("triton") is None:
        return
    import triton.language as tl
    from triton.runtime import interpreter

    search, in_place = interpreter._patch_lang, set[str]()
    if search.__module__ == __name__:
        return

    class Scope(interpreter._LangPatchScope):
        def restore(self) -> None:
            super().restore()
            in_place.clear()

    @cache
    def languages(fn: Any) -> set[str]:
        return {value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core}

    def search_once(fn: Any) -> Any:
        if languages(fn) and languages(fn) <= in_place:
            return None
        scope = search(fn)
        scope.__class__ = Scope
        in_place.update(languages(fn))
        return scope

    interpreter._patch_lang = search_once


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

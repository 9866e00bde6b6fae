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
    fifths of the time of a small kernel, and making types anew a third of the rest.
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
    _keep_types()


def _keep_types() -> None:
    """Work out once what a block of a type and shape is, for which the interpreter makes objects at every operation."""
    from triton.language import core
    from triton.runtime import interpreter

    make_block, make_tensor, find_numpy_type = core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def block(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = vars(self).copy()
        vars(self).update(blocks[key])

    def tensor(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in shapes:
            make_tensor(self, handle, type)
            shapes[key] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = shapes[key]

    def numpy_type(tt_dtype: Any) -> Any:
        if tt_dtype.name not in numpy_types:
            numpy_types[tt_dtype.name] = find_numpy_type(tt_dtype)
        return numpy_types[tt_dtype.name]

    core.block_type.__init__, core.tensor.__init__, interpreter._get_np_dtype = block, tensor, numpy_type


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

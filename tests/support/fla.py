"""flash-linear-attention in tests: its kernels in Triton's interpreter, and its plain form in their place."""

import sys
import warnings
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from dist_attn.ops.fla_known import surroundings_of

__all__ = ["fla_adapter", "plain_fla"]

APART = Path(sys.prefix) / ".fla"  # where `make setup` puts it
_IMPORTED: dict[str, ModuleType] = {}  # kept from other tests: transformers takes what it finds


class _Index(int):
    """A number of a loop of a kernel, which without a compiler has no `to`."""

    def to(self, dtype: object) -> "_Index":
        return self


@pytest.fixture(scope="module")
def fla_adapter() -> Iterator[ModuleType]:
    """The module that calls flash-linear-attention, whose kernels are interpreted where there is no GPU."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        if find_spec("fla") is None:
            patch.setattr(sys, "path", [*sys.path, str(APART)])
        sys.modules.update(_IMPORTED)
        if find_spec("fla") is None or find_spec("triton") is None:
            pytest.skip("needs flash-linear-attention: `make setup`, or pip install -e '.[fla]'")
        surroundings_of.cache_clear()  # the version is found by the path
        warnings.simplefilter("ignore")  # it warns of a machine without a GPU when it is imported
        adapter = import_module("dist_attn.ops.linear_attention.fla")
        import_module("dist_attn.ops.affine.fla")
        if not torch.cuda.is_available():
            _interpret(patch)
        yield adapter
    surroundings_of.cache_clear()
    _IMPORTED.update({name: sys.modules.pop(name) for name in [*sys.modules] if name.partition(".")[0] == "fla"})


def _interpret(patch: pytest.MonkeyPatch) -> None:
    """Have the interpreter run the kernels.

    It has no clock to choose tiles by, loops over Python's numbers, and knows no functions of the language but as
    members of its module.
    """
    import triton.language as tl
    from triton.runtime.autotuner import Autotuner

    gather = tl.gather
    for module in [module for name, module in sys.modules.items() if name.startswith("fla.ops.")]:
        if "tl" in vars(module):
            patch.setattr(module, "range", lambda *edges: map(_Index, range(*edges)), raising=False)
        if vars(module).get("gather") is gather:
            patch.setattr(module, "gather", lambda *arguments, **named: tl.gather(*arguments, **named))
        for kernel in list(vars(module).values()):
            while kernel is not None and not isinstance(kernel, Autotuner):
                kernel = getattr(kernel, "fn", None)
            if kernel is not None:
                patch.setattr(kernel, "configs", kernel.configs[:1])


@pytest.fixture
def plain_fla(fla_adapter: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-linear-attention's own plain form in the place of its kernels: the interpreter has no bfloat16."""
    from fla.ops.simple_gla.naive import naive_recurrent_simple_gla

    def plain(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor | None, **options: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        found: tuple[torch.Tensor, torch.Tensor] = naive_recurrent_simple_gla(
            q, k, v, torch.zeros(q.shape[:3]) if g is None else g, **options
        )
        return found

    for name in ("chunk_simple_gla", "fused_recurrent_simple_gla"):
        monkeypatch.setattr(fla_adapter, name, plain)

"""A decode step of a whole model in one call of a C kernel: its operations, one after the other, with nothing between.

A token of a model of 30 small layers (135M parameters, bfloat16) took 69 ms of a core operation by operation, and
takes 23 so, of which 22 are the memory's. Weights are read as they are stored, inputs of products stay float32, and a
row's bits depend neither on other rows nor on the number of threads.

Shape letters: N rows, W columns of working memory, R rotated numbers of a head, C channels, T taps, H heads, K size of
keys, V of values, D random vectors, E experts, O outputs, I inputs.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import torch

from dist_attn.ops.c_call import ints, pointers
from dist_attn.ops.c_library import NoLibraryError, load_library
from dist_attn.ops.softmax_attention.cache import KeyValueCache
from dist_attn.ops.state import writes_in_place

__all__ = [
    "ACTIVATIONS", "ADD", "BLOCKS", "GROUP", "Attention", "Before", "Convolution", "DecodeStep", "Experts",
    "FourierAttention", "HeadRecurrence", "Operation", "Operations", "Product", "WeightMatrix", "cache_addresses",
    "has_decode_step", "takes",
]  # fmt: skip

GROUP: Final = 32
BLOCKS: Final = {
    "Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "Q4_K": (256, 144),
    "Q5_K": (256, 176), "Q6_K": (256, 210),
}  # fmt: skip
"""How many weights a block of a GGUF file has, and how many bytes."""
FORMATS: Final = ("float32", "bfloat16", "int8", *BLOCKS)
"""How weights may be stored, as in csrc/stored_weights.h."""
ACTIVATIONS: Final = {"silu": 2, "gelu_pytorch_tanh": 3}
MOST_SIZE: Final = 512
MOST_CHOSEN: Final = 64
STORE, ADD = 0, 1
_SUMMED: Final = 16  # numbers of a norm, side by side


@dataclass(frozen=True)
class WeightMatrix:
    """Weights [O, I], or blocks [O, bytes of a row]; with scales [O] bfloat16 of int8; `out`: columns of outputs.

    Of experts they are [E, O, I].
    """

    weight: torch.Tensor
    out: int
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    form: str = ""

    @property
    def stored_as(self) -> str:
        """One of `FORMATS`, or the name of another of torch's types."""
        return self.form or str(self.weight.dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Product:
    """Columns from `begin` on, perhaps normed, times up to three matrices; `then` says what becomes of outputs.

    They are stored, added (1), or the first matrix's pass an activation and are multiplied by the second's, if any. A
    norm is of all inputs, or of so many neighbours; it is a layer norm where it has a bias, else by the root mean
    square. `gate` is a column whose sigmoid multiplies inputs, or 0.
    """

    begin: int
    inputs: int
    matrices: tuple[WeightMatrix, ...]
    norm: torch.Tensor | None = None
    eps: float = 0.0
    then: int = STORE
    normed_together: int = 0
    gate: int = 0
    norm_bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Experts:
    """Gated layers of which each row adds `chosen`, by the softmax of its columns `router` [E], perhaps summing to 1.

    Normed columns from `begin` on are multiplied by the first two matrices; what the activation `then` makes of these
    goes through the third. Working memory: `ordered` [I], and columns of the first matrix for each choice.
    """

    begin: int
    inputs: int
    matrices: tuple[WeightMatrix, ...]
    norm: torch.Tensor
    eps: float
    then: int
    router: int
    experts: int
    chosen: int
    renormed: bool
    ordered: int


@dataclass(frozen=True)
class Attention:
    """Queries, keys and values of heads in these columns, over the keys so far; `norms` are of queries and of keys.

    Queries may be `query_step` columns apart, and have what gates their output `gate` columns behind them.
    """

    query: int
    key: int
    value: int
    out: int
    heads: int
    groups: int
    size: int
    values: int
    scale: float
    norms: tuple[torch.Tensor, torch.Tensor] | None = None
    eps: float = 0.0
    query_step: int = 0
    gate: int = 0


@dataclass(frozen=True)
class Convolution:
    """Channels in columns [C], each with taps [T, C], the oldest token's first, and perhaps biases [C]; then `then`.

    With a norm, as a product has it, columns are consecutive, and normed first. Taps may be `newest_first`.
    """

    columns: torch.Tensor
    out: int
    weights: torch.Tensor
    bias: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    eps: float = 0.0
    norm_bias: torch.Tensor | None = None
    then: int = ACTIVATIONS["silu"]
    newest_first: bool = False


@dataclass(frozen=True)
class HeadRecurrence:
    """S = exp(-rate step) S + w k v^T and (q^T S + skip v) silu(gate), with step = softplus(x + bias) between limits.

    `places` [H, 6] int64 are columns of q, k, v, gate, x and of what the sigmoid makes w of in the gated delta rule,
    which takes k^T exp(-rate step) S from v; it is -1 where w is the step. `norms` [K] are of queries and keys,
    `out_norm` [V] of a head's output before the gate; logs of rates, biases and skips [H], all float32.
    """

    places: torch.Tensor
    out: int
    size: int
    values: int
    log_rates: torch.Tensor
    step_bias: torch.Tensor
    least: float = 0.0
    most: float = float("inf")
    skip: torch.Tensor | None = None
    norms: tuple[torch.Tensor, torch.Tensor] | None = None
    eps: float = 0.0
    out_norm: torch.Tensor | None = None
    out_eps: float = 0.0


@dataclass(frozen=True)
class FourierAttention:
    """phi(q) S / max(phi(q) z, least m) of S = g S + (1 - g) phi(k) v^T, and likewise z of phi(k) and m of 1.

    phi(x) = (sin, cos)(w sigma x / |x|) / sqrt(D) with `weights` w [H, D, K] and sigma [H, K]. The H columns from
    `gate` on are logits of g; with 0 there are no gates: S = S + phi(k) v^T. The H columns from `guarded` on become 1
    where `least` m was the larger, else 0.
    """

    query: int
    key: int
    value: int
    out: int
    size: int
    values: int
    weights: torch.Tensor
    sigma: torch.Tensor
    least: float
    guarded: int
    gate: int = 0


Operation = Product | Attention | Convolution | HeadRecurrence | Experts | FourierAttention
Before = torch.Tensor | Sequence[KeyValueCache | None]
"""The states of rows before a step: inputs [N, T - 1, C], sums [N, H, K, V], or caches, each of one row or of all.

Of Fourier attention they are S [N, H, 2 D, V], z [N, H, 2 D], m and the log of all gates [N, H].
"""
_KINDS: Final = (Product, Attention, Convolution, HeadRecurrence, Experts, FourierAttention)


class _Matrix(ctypes.Structure):
    _fields_ = [*pointers("at scale bias"), *ints("outputs format out each")]


class _Operation(ctypes.Structure):
    _fields_ = [
        *ints("kind begin inputs matrices then"),
        *pointers("norm key_norm norm_bias"),
        ("eps", ctypes.c_double),
        *ints("normed_together"),
        ("of", _Matrix * 3),
        *ints("query key value out heads groups size values rotated state query_step gate guarded"),
        *ints("experts chosen renormed router ordered"),
        ("scale", ctypes.c_double),
        *pointers("columns places weights bias"),
        *ints("newest_first"),
        *pointers("sigma log_rates step_bias skip out_norm"),
        *((name, ctypes.c_double) for name in ("out_eps", "least", "most")),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *pointers("operations"),
        *ints("count rows width threads widest half"),
        *pointers("memory inputs caches cosine sine"),
    ]


class Operations:
    """Operations of a model made ready for kernels; they keep their weights alive."""

    def __init__(self, operations: Sequence[Operation], rotated: int, dtype: torch.dtype) -> None:
        """Of each head `rotated` numbers are turned; caches are of `dtype`."""
        self._rotated, self._dtype = rotated, dtype
        self._operations = (_Operation * len(operations))()
        self._widest, self._likes = 0, list[tuple[torch.Tensor, ...]]()
        self._kept: list[torch.Tensor] = []
        for place, operation in zip(self._operations, operations, strict=True):
            place.kind, place.rotated, place.state = _KINDS.index(type(operation)), rotated, len(self._likes)
            for name, value in vars(operation).items():
                if name == "norms":
                    place.norm, place.key_norm = map(self._at, value or (None, None))
                elif name != "matrices":
                    setattr(place, name, self._at(value) if isinstance(value, torch.Tensor) else value)
            self._fill(place, operation)

    def _fill(self, place: _Operation, operation: Operation) -> None:
        """Fill in what follows from sizes, and note what states are like."""
        if isinstance(operation, Product | Experts):
            self._fill_matrices(place, operation)
        elif isinstance(operation, Attention):
            place.query_step = operation.query_step or operation.size
            sizes = (operation.size, operation.values)
            self._likes.append(tuple(_like(1, operation.groups, 1, size, dtype=self._dtype) for size in sizes))
        elif isinstance(operation, Convolution):
            place.size, place.inputs = operation.weights.shape
            self._widest = max(self._widest, place.inputs)
            self._likes.append((_like(1, place.size - 1, place.inputs, dtype=self._dtype),))
        elif isinstance(operation, FourierAttention):
            place.heads, place.inputs, _ = operation.weights.shape
            heads, features = (1, place.heads), 2 * place.inputs
            shapes = (*heads, features, operation.values), (*heads, features), heads, heads
            self._likes += [(_like(*shape),) for shape in shapes]
        else:
            place.heads = len(operation.places)
            self._likes.append((_like(1, place.heads, operation.size, operation.values),))

    def _fill_matrices(self, place: _Operation, one: "Product | Experts") -> None:
        place.matrices, place.normed_together = len(one.matrices), place.normed_together or one.inputs
        inner = one.matrices[0].weight.shape[-2] if isinstance(one, Experts) else 0
        self._widest = max(self._widest, one.inputs, inner)
        for own, matrix in zip(place.of, one.matrices, strict=False):
            own.at, own.scale, own.bias = self._at(matrix.weight), self._at(matrix.scale), self._at(matrix.bias)
            own.outputs, own.out = matrix.weight.shape[-2], matrix.out
            own.each = matrix.weight.stride(0) * matrix.weight.element_size()
            own.format = FORMATS.index(matrix.stored_as)

    def _at(self, tensor: torch.Tensor | None) -> int | None:
        if tensor is None:
            return None
        self._kept.append(tensor)
        return tensor.data_ptr()


class DecodeStep(Operations):
    """The operations of a model's step."""

    def __init__(self, operations: Sequence[Operation], width: int, rotated: int, dtype: torch.dtype) -> None:
        """`width` columns of working memory, and as `Operations`."""
        super().__init__(operations, rotated, dtype)
        self._width = width
        self._wanted = [(like[0].shape[1:], like[0].dtype) for like in self._likes]

    def fits(self, states: Sequence[Before], rows: int) -> bool:
        """Return whether these states are of so many rows of this model; caches tell by themselves."""
        return len(states) == len(self._likes) and all(
            s.shape[1:] == shape and len(s) == rows and s.dtype == dtype and s.is_cpu
            for s, (shape, dtype) in zip(states, self._wanted, strict=True)
            if isinstance(s, torch.Tensor)
        )

    def run(
        self, x_ND: torch.Tensor, states: Sequence[Before], turns: tuple[torch.Tensor, ...], count: int | None = None
    ) -> tuple[torch.Tensor, list[Any]]:
        """The working memory [N, W] after a step of rows whose vectors are its first columns, and states behind it.

        `states` are those of operations that have some, in order, as `fits` wants them, written over where
        `writes_in_place`; `turns` are cosines and sines [N, R] in float32. Where only the first `count` rows are asked
        for, others have zeros and the states that they had.
        """
        count = len(x_ND) if count is None else max(0, min(count, len(x_ND)))
        memory_NW = torch.empty((len(x_ND), self._width), dtype=torch.float32, device="cpu")
        memory_NW[:, : x_ND.shape[1]], memory_NW[count:] = x_ND, 0.0
        before = [s.contiguous() if isinstance(s, torch.Tensor) else s for s in states]
        copied = None if writes_in_place() else count
        after = [_places(*each, copied) for each in zip(before, self._likes, strict=True)]
        rows = [row for old, new in zip(before, after, strict=True) for row in _rows(old, new, count)]
        numbers = [number for row in rows for number in row]
        places = (ctypes.c_int64 * len(numbers))(*numbers)
        threads = torch.get_num_threads()
        inputs = torch.empty((threads, count + 1, self._widest), dtype=torch.float32, device="cpu")
        cosine, sine = (t.contiguous() for t in turns)
        step = _Step(
            operations=ctypes.addressof(self._operations), count=len(self._operations), rows=count, width=self._width,
            threads=threads, widest=self._widest, half=self._dtype == torch.bfloat16, memory=memory_NW.data_ptr(),
            inputs=inputs.data_ptr(), caches=ctypes.addressof(places), cosine=cosine.data_ptr(), sine=sine.data_ptr(),
        )  # fmt: skip
        kernel = _kernel()
        assert kernel is not None
        kernel(ctypes.byref(step))
        return memory_NW, after


def takes(operations: Sequence[Operation]) -> bool:
    """Return whether the kernel takes operations of these sizes and these weights."""
    takes_one: tuple[Any, ...] = (
        _takes_product, _takes_attention, _takes_convolution, _takes_recurrence, _takes_experts, _takes_features,
    )  # fmt: skip
    return has_decode_step() and all(
        takes_one[_KINDS.index(type(one))](one) and all(map(_takes_vector, _vectors(one))) for one in operations
    )


def has_decode_step() -> bool:
    """Return whether there is a kernel on this machine."""
    return _kernel() is not None


def _vectors(one: Operation) -> list[torch.Tensor]:
    """All that is read besides matrices."""
    biases = [matrix.bias for matrix in one.matrices] if isinstance(one, Product | Experts) else []
    norms = getattr(one, "norms", None) or ()
    return [value for value in (*vars(one).values(), *biases, *norms) if isinstance(value, torch.Tensor)]


def _takes_vector(x: torch.Tensor) -> bool:
    return x.dtype in (torch.float32, torch.int64) and x.is_contiguous() and x.is_cpu


def _takes_product(one: Product) -> bool:
    norms = (one.norm, one.norm_bias)
    return (
        _takes_matrices(one)
        and all(norm is None or norm.shape == (one.inputs,) for norm in norms)
        and one.normed_together % _SUMMED == 0
        and all(m.weight.is_contiguous() for m in one.matrices)
        and all(m.stored_as in BLOCKS or m.weight.shape[1] == one.inputs for m in one.matrices)
        and (one.then in (STORE, ADD) or one.matrices[0].weight.shape[0] % 16 == 0)
    )


def _takes_matrices(one: Product | Experts) -> bool:
    formats = {matrix.stored_as for matrix in one.matrices}
    return (
        formats <= {*FORMATS}
        and (formats == {"bfloat16"} or "bfloat16" not in formats)  # which take inputs in another order
        and one.inputs % GROUP == 0
        and all(m.bias is None or len(m.bias) == m.weight.shape[-2] for m in one.matrices)
        and all((m.scale is not None) == (m.stored_as == "int8") for m in one.matrices)
        and all(m.weight.device.type == "cpu" for m in one.matrices)
    )


def _takes_experts(one: Experts) -> bool:
    return (
        one.chosen <= MOST_CHOSEN
        and _takes_matrices(one)
        and all(m.bias is m.scale is None and m.weight.dim() == 3 and m.weight[0].is_contiguous() for m in one.matrices)
        and one.matrices[0].weight.shape[-2] % GROUP == 0
    )


def _takes_attention(one: Attention) -> bool:
    return one.size % GROUP == one.values % GROUP == 0 and max(one.size, one.values) <= MOST_SIZE


def _takes_convolution(one: Convolution) -> bool:
    channels = one.weights.shape[1:]
    same = all(x is None or x.shape == channels for x in (one.columns, one.bias, one.norm, one.norm_bias))
    return same and (one.norm is None or len(one.columns) % _SUMMED == 0)


def _takes_features(one: FourierAttention) -> bool:
    heads, random, size = one.weights.shape
    fits = size == one.size and one.sigma.numel() == heads * size
    return fits and random % _SUMMED == 0 and max(2 * random, size, one.values) <= MOST_SIZE


def _takes_recurrence(one: HeadRecurrence) -> bool:
    normed = (one.size if one.norms else 0, one.values if one.out_norm is not None else 0)
    of_heads, of_keys, of_values = (one.log_rates, one.step_bias, one.skip), one.norms or (), (one.out_norm,)
    for length, vectors in ((len(one.places), of_heads), (one.size, of_keys), (one.values, of_values)):
        if any(vector is not None and vector.shape != (length,) for vector in vectors):
            return False
    return max(one.size, one.values) <= MOST_SIZE and not any(size % _SUMMED for size in normed)


def _like(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cpu")


def _places(before: Before, like: tuple[torch.Tensor, ...], copied: int | None) -> Any:
    """States with room for what comes behind a token of `copied` rows; None: of tensors it is written over them."""
    if isinstance(before, torch.Tensor):
        if copied is None:
            return before
        return torch.empty_like(before) if copied == len(before) else before.clone()
    return [None if cache is None else cache.with_places(*like) for cache in before]


def _rows(before: Before, after: Any, count: int) -> list[tuple[int, ...]]:
    """The addresses of the states of the first rows, as the kernel reads them."""
    if not isinstance(before, torch.Tensor):
        return [row for cache in after for row in cache_addresses(cache)][:count]
    old, new, step = before.data_ptr(), after.data_ptr(), before.stride(0) * before.element_size()
    return [(old + n * step, new + n * step, 0, 0, 1) for n in range(count)]


def cache_addresses(cache: KeyValueCache | None) -> list[tuple[int, ...]]:
    """Addresses, steps from group to group and tokens of each row of a cache, as the kernel reads them."""
    if cache is None:
        return [(0,) * 5]
    k, v = cache.k_BGSK, cache.v_BGSV
    (k_row, k_group, _, _), (v_row, v_group, _, _), (rows, _, tokens, _) = k.stride(), v.stride(), k.shape
    k_at, v_at, nbytes = k.data_ptr(), v.data_ptr(), k.element_size()
    return [(k_at + n * k_row * nbytes, v_at + n * v_row * nbytes, k_group, v_group, tokens) for n in range(rows)]


@lru_cache(maxsize=1)
def _kernel() -> "ctypes._NamedFuncPointer | None":
    try:
        library = load_library(Path(__file__).parent / "csrc" / "decode_step.c")
    except NoLibraryError:
        return None
    kernel = library.dist_attn_decode_step
    kernel.argtypes, kernel.restype = [ctypes.c_void_p], None
    return kernel

"""A call of softmax attention as one value: its tensors, where they stand in the sequence, and how far apart.

Shape letters: B batch, H query heads, G key heads, L queries, S keys, K head size, V values, R rows of a table of
relative positions.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from dist_attn.errors import InputError, ShapeError
from dist_attn.ops.device import send
from dist_attn.ops.linear_attention.call import check_prefix
from dist_attn.ops.sequence_call import SequenceCall


@dataclass(frozen=True)
class QueryPlacement:
    """Positions of queries [L] and keys [S] in the sequence and, with packed documents, the document of each.

    A query sees the keys of its own document; when causal, those at its own position or before it. Positions are
    int64, no two of keys equal, and lie on the CPU, since they decide which tiles are computed at all; documents are
    numbered in order. Masks are made where the scores are, from a copy there (`on`).

    Raises: ShapeError for documents of the queries without those of the keys, or the other way round.
    """

    queries_L: torch.Tensor
    keys_S: torch.Tensor
    query_documents_L: torch.Tensor | None = None
    key_documents_S: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.query_documents_L is None) != (self.key_documents_S is None):
            raise ShapeError("documents were given for queries or for keys alone; give both, or neither")

    @classmethod
    def in_order(cls, queries: int, keys: int) -> "QueryPlacement":
        """All tokens of a sequence, aligned at the top left."""
        return cls(torch.arange(queries, device="cpu"), torch.arange(keys, device="cpu"))

    def on(self, device: torch.device) -> "QueryPlacement":
        """A copy there, to make masks from."""
        parts = (self.queries_L, self.keys_S, self.query_documents_L, self.key_documents_S)
        return QueryPlacement(*(None if t is None else send(t, device) for t in parts))  # type: ignore[arg-type]

    def check(self, queries: int, keys: int) -> None:
        """Raises: ShapeError for positions or documents of another number of tokens."""
        tensors = [self.queries_L, self.keys_S, self.query_documents_L, self.key_documents_S]
        for what, tensor, length in zip(("queries", "keys") * 2, tensors, (queries, keys) * 2, strict=True):
            if tensor is not None and tensor.shape != (length,):
                raise ShapeError(f"positions or documents of shape {list(tensor.shape)} for {length} {what}; one each")

    def hidden(
        self, *, causal: bool, window: int | None = None, rows: slice = slice(None), columns: slice = slice(None)
    ) -> torch.Tensor:
        """Mark the keys that queries do not see, [rows, columns]; with a window, also those out of its reach."""
        queries_L, keys_S = self.queries_L[rows], self.keys_S[columns]
        hidden_LS = torch.zeros(len(queries_L), len(keys_S), dtype=torch.bool, device=keys_S.device)
        if causal:
            hidden_LS |= keys_S > queries_L[:, None]
        if window is not None:
            hidden_LS |= keys_S <= queries_L[:, None] - window
        if self.query_documents_L is not None and self.key_documents_S is not None:
            hidden_LS |= self.query_documents_L[rows, None] != self.key_documents_S[columns]
        return hidden_LS

    def relative_rows(self, reach: int, rows: slice = slice(None), columns: slice = slice(None)) -> torch.Tensor:
        """The row of each pair in a table of relative positions: clip(key - query, -reach, reach) + reach."""
        return (self.keys_S[columns] - self.queries_L[rows, None]).clamp(-reach, reach) + reach


@dataclass(frozen=True, eq=False)
class RelativePositions:
    """Shaw's relative positions: keys become k_j + keys[n] and values v_j + values[n] for a query at i.

    n = clip(j - i, -reach, reach).

    Shapes: keys [H, R, K] and values [H, R, V] or None, R = 2 reach + 1; row r stands for n = r - reach, so the first
        row for keys at least `reach` tokens before the query. H is the number of query heads, or 1: shared by all.
    Reference: Shaw et al. 2018, Self-Attention with Relative Position Representations, Eq. 3 and 4.
    """

    keys_HRK: torch.Tensor
    values_HRV: torch.Tensor | None = None

    @property
    def reach(self) -> int:
        """The distance from which on all are alike."""
        return self.keys_HRK.shape[1] // 2

    def of_heads(self, start: int, stop: int) -> "RelativePositions":
        """The rows of query heads [start, stop)."""
        values_HRV = self.values_HRV
        return RelativePositions(
            self.keys_HRK if len(self.keys_HRK) == 1 else self.keys_HRK[start:stop],
            values_HRV if values_HRV is None or len(values_HRV) == 1 else values_HRV[start:stop],
        )

    def check(self, heads: int, size: int, values: int) -> None:
        """Raises: ShapeError for rows that do not fit queries of so many heads and sizes."""
        for name, rows, width in (("keys", self.keys_HRK, size), ("values", self.values_HRV, values)):
            if rows is None:
                continue
            fits = rows.dim() == 3 and rows.shape[0] in (1, heads) and rows.shape[2] == width
            if not fits or not rows.shape[1] % 2 or rows.shape[1] != self.keys_HRK.shape[1]:
                raise ShapeError(
                    f"relative {name} of shape {tuple(rows.shape)} were given for {heads} heads; needed is "
                    f"[{heads} or 1, 2 reach + 1, {width}], with as many rows for keys as for values"
                )


@dataclass(frozen=True, eq=False)
class SoftmaxOptions:
    """The options of softmax attention in one layer, beside softmax(q k^T / sqrt(K)) v.

    `scale`: what scores are multiplied by, K^-1/2 by default. `window`: a token sees itself and the window - 1 tokens
    before it. `softcap`: a score s becomes softcap tanh(s / softcap). `sinks_H`: for each query head a score that
    counts in the denominator and has no value. `relative`: positions that keys and values depend on.

    Raises: InputError for a window of no token, or a cap that is not positive.
    Reference: Gemma 2 (soft caps), gpt-oss (sinks), Mistral 7B (windows).
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    sinks_H: torch.Tensor | None = None
    relative: RelativePositions | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise InputError(f"a window of {self.window} tokens was given; a token sees itself, so give 1 or more")
        if self.softcap is not None and not self.softcap > 0:
            raise InputError(f"a softcap of {self.softcap} was given; give a positive one, or None for no cap")

    def of_heads(self, start: int, stop: int) -> "SoftmaxOptions":
        """The options of query heads [start, stop)."""
        sinks_H = None if self.sinks_H is None else self.sinks_H[start:stop]
        return replace(self, sinks_H=sinks_H, relative=self.relative and self.relative.of_heads(start, stop))

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """The tensors that may have gradients, by name."""
        near = (None, None) if self.relative is None else (self.relative.keys_HRK, self.relative.values_HRV)
        return {"sinks": self.sinks_H, "relative_keys": near[0], "relative_values": near[1]}

    def settings(self) -> dict[str, torch.Tensor | float | int | None]:
        """The settings that ranks that attend together must have in common, by name."""
        return {"scale": self.scale, "window": self.window, "softcap": self.softcap, **self.tensors()}

    def check(self, heads: int, size: int, values: int) -> None:
        """Raises: ShapeError for tensors that do not fit queries of so many heads and sizes."""
        if self.relative is not None:
            self.relative.check(heads, size, values)
        if self.sinks_H is not None and self.sinks_H.shape != (heads,):
            raise ShapeError(f"sinks of shape {list(self.sinks_H.shape)} were given for {heads} query heads; one each")


PLAIN = SoftmaxOptions()


@dataclass(frozen=True)
class SoftmaxCall(SequenceCall[torch.Tensor]):
    """The arguments of `softmax_attention`, which explains them."""

    q_BHLK: torch.Tensor
    k_BGSK: torch.Tensor
    v_BGSV: torch.Tensor
    causal: bool
    options: SoftmaxOptions = PLAIN
    placement: QueryPlacement | None = None
    prefix: int = 0

    operation: ClassVar[str] = "softmax_attention"
    along: ClassVar[tuple[str, ...]] = ("q_BHLK",)
    along_memory: ClassVar[tuple[str, ...]] = ("k_BGSK", "v_BGSV")
    dim: ClassVar[int] = 2

    @property
    def queries(self) -> int:
        """L."""
        return self.q_BHLK.shape[2]

    @property
    def keys(self) -> int:
        """S."""
        return self.k_BGSK.shape[2]

    @property
    def qkv(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values."""
        return self.q_BHLK, self.k_BGSK, self.v_BGSV

    @property
    def score_scale(self) -> float:
        """The factor of scores: the scale of the options, or K^-1/2."""
        scale = self.options.scale
        return float(self.q_BHLK.shape[3] ** -0.5) if scale is None else scale

    @property
    def needs_tiles(self) -> bool:
        """Return whether torch's fused kernels, which hold no score matrix, cannot express this call."""
        options = self.options
        narrow = options.window is not None and options.window < self.keys
        special = (options.softcap, options.sinks_H, options.relative)
        return self.placement is not None or narrow or any(option is not None for option in special)

    @property
    def output_shape(self) -> tuple[int, int, int, int]:
        """[B, H, L, V]."""
        batch, heads, queries, _ = self.q_BHLK.shape
        return batch, heads, queries, self.v_BGSV.shape[3]

    def with_qkv(self, q_BHLK: torch.Tensor, k_BGSK: torch.Tensor, v_BGSV: torch.Tensor) -> "SoftmaxCall":
        """Return this call with other queries, keys and values."""
        return replace(self, q_BHLK=q_BHLK, k_BGSK=k_BGSK, v_BGSV=v_BGSV)

    def over(self, k_BGSK: torch.Tensor, v_BGSV: torch.Tensor, placement: QueryPlacement | None) -> "SoftmaxCall":
        """Return this call's queries over other keys and values."""
        return replace(self, k_BGSK=k_BGSK, v_BGSV=v_BGSV, placement=placement)

    def tokens(self, start: int, stop: int) -> "SoftmaxCall":
        """The call of queries and keys from `start` to before `stop`; no placement, no prefix."""
        q, k, v = (t[:, :, start:stop] for t in self.qkv)
        return replace(self.with_qkv(q, k, v), placement=None, prefix=0)

    def check(self) -> None:
        """Raises: ShapeError unless all tensors fit together, as nothing is broadcast; InputError for a prefix that
        means nothing."""
        q, k, v = self.qkv
        shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        if not q.dim() == k.dim() == v.dim() == 4:
            raise ShapeError(f"{shapes}: all three need four dimensions [batch, heads, length, size]")
        heads, groups = q.shape[1], k.shape[1]
        if k.shape[:3] != v.shape[:3] or not groups or heads % groups:
            raise ShapeError(
                f"{shapes}: k and v need equal batch, heads and length, and their heads must divide the query heads"
            )
        if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
            raise ShapeError(f"{shapes}: q and k need equal batch and equal size per head")
        check_prefix(self.prefix, causal=self.causal, documents=self.placement is not None)
        if self.placement is not None:
            self.placement.check(self.queries, self.keys)
        self.options.check(heads, q.shape[3], v.shape[3])

"""Where the queries and the keys of one call stand, when they are slices of a sequence that lie in any order."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dist_attn.errors import ShapeError

__all__ = ["Placement", "Tile", "visible_tiles"]


@dataclass(frozen=True)
class Placement:
    """Positions of queries [L] and keys [S] in the sequence and, with packed documents, the document of each.

    A query sees the keys of its own document; when causal, those at its own position or before it. Positions are
    int64 and stay on the CPU, since they decide which tiles are computed at all; documents are numbered in order.

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
    def in_order(cls, queries: int, keys: int) -> "Placement":
        """All tokens of a sequence, aligned at the top left."""
        return cls(torch.arange(queries), torch.arange(keys))

    def check(self, queries: int, keys: int) -> None:
        """Raises: ShapeError for positions or documents of another number of tokens."""
        given = [self.queries_L, self.keys_S, self.query_documents_L, self.key_documents_S]
        for what, tensor, length in zip(("queries", "keys") * 2, given, (queries, keys) * 2, strict=True):
            if tensor is not None and tensor.shape != (length,):
                raise ShapeError(f"positions or documents of shape {list(tensor.shape)} for {length} {what}; one each")

    def hidden(self, *, causal: bool, rows: slice = slice(None), columns: slice = slice(None)) -> torch.Tensor:
        """Which keys the queries do not see, [rows, columns]."""
        queries_L, keys_S = self.queries_L[rows], self.keys_S[columns]
        hidden_LS = torch.zeros(len(queries_L), len(keys_S), dtype=torch.bool)
        if causal:
            hidden_LS |= keys_S > queries_L[:, None]
        if self.query_documents_L is not None and self.key_documents_S is not None:
            hidden_LS |= self.query_documents_L[rows, None] != self.key_documents_S[columns]
        return hidden_LS

    def relative_rows(
        self, reach: int, rows: slice = slice(None), columns: slice = slice(None)
    ) -> "torch.Tensor | int":
        """Row clip(key - query, -reach, reach) + reach of a table of relative positions, for each pair [rows, columns].

        One number where it is the same for all pairs, as it is of tokens further apart than the reach.
        """
        queries_L, keys_S = self.queries_L[rows], self.keys_S[columns]
        if len(queries_L) and len(keys_S):
            if int(keys_S.max()) - int(queries_L.min()) <= -reach:
                return 0
            if int(keys_S.min()) - int(queries_L.max()) >= reach:
                return 2 * reach
        return (keys_S - queries_L[:, None]).clamp(-reach, reach) + reach


@dataclass(frozen=True)
class Tile:
    """Keys that some query of a tile sees; `hidden_LS` is None where every query sees all of them."""

    keys: slice
    hidden_LS: torch.Tensor | None


@dataclass(frozen=True)
class _Span:
    """Some tokens in a row and between which positions, and which documents, they lie."""

    part: slice
    first: int
    last: int
    first_document: int
    last_document: int


def visible_tiles(
    placement: Placement, *, causal: bool, tile_queries: int, tile_keys: int
) -> Iterator[tuple[slice, Iterator[Tile]]]:
    """For every tile of queries the tiles of keys that it sees something of; masks are made one at a time."""
    columns = _spans(placement.keys_S, placement.key_documents_S, tile_keys)
    for row in _spans(placement.queries_L, placement.query_documents_L, tile_queries):
        yield row.part, _seen_from(row, columns, placement, causal)


def _seen_from(row: _Span, columns: list[_Span], placement: Placement, causal: bool) -> Iterator[Tile]:
    for column in columns:
        apart = column.last_document < row.first_document or row.last_document < column.first_document
        if apart or (causal and column.first > row.last):
            continue
        one_document = row.first_document == row.last_document == column.first_document == column.last_document
        if one_document and not (causal and column.last > row.first):
            yield Tile(column.part, None)
        else:
            yield Tile(column.part, placement.hidden(causal=causal, rows=row.part, columns=column.part))


def _spans(positions: torch.Tensor, documents: torch.Tensor | None, size: int) -> list[_Span]:
    spans = []
    for start in range(0, len(positions), size):
        part = slice(start, min(start + size, len(positions)))
        first, last = (int(edge) for edge in positions[part].aminmax())
        of_document = (0, 0) if documents is None else tuple(int(edge) for edge in documents[part].aminmax())
        spans.append(_Span(part, first, last, of_document[0], of_document[1]))
    return spans

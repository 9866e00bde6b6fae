"""`dist-attn search`: the passages of a folder of rows that answer a question, by their words and their vectors.

All rows are read, part after part; what is kept of each is a few numbers.

Letters: N rows of all parts, D model width.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from dist_attn.commands.corpus_inputs import Location
from dist_attn.commands.corpus_parts import CorpusSettings, batches_of, vectors_of
from dist_attn.commands.corpus_run import MANIFEST, check_manifest, parts_of, read_manifest
from dist_attn.errors import DistAttnError, InputError
from dist_attn.shipped import resolve_model_folder
from dist_attn.text.ranking import WordCounts, bm25, directions, fused, ranks, words_of


def search_corpus(folder: str, question: str, model: str | None, top: int) -> list[dict[str, Any]]:
    """The `top` rows that answer a question best: document, row, bytes, section, text and score, the best first.

    Where rows have no text it is by vectors alone.

    Raises: InputError for a folder without rows or of another model than `model`, and a question without tokens.
    """
    place = Location.of(folder)
    manifest = read_manifest(place)
    parts = parts_of(place)
    if manifest is None or not parts:
        raise InputError(f"{place.name} has no rows; dist-attn encode-corpus IN... {place.name} writes them")
    if not words_of(question):
        raise InputError(f"the question {question[:80]!r} has no words; ask for something")
    settings = _settings(place, manifest, model)
    query_D = _vector_of(question, settings)
    words = frozenset(words_of(question))
    counts, total_D, total = list[WordCounts](), np.zeros(len(query_D)), 0
    for batch in _rows(parts, ["text", "embedding", "scale"]):
        total_D += vectors_of(batch).sum(0, dtype=np.float64)
        if settings.with_text:
            texts = [[text] for text in batch.column("text").to_pylist()]
            counts.append(WordCounts.of(texts, total).only(words))
        total += len(batch)
    mean_D = total_D / total if total > 1 else np.zeros(len(query_D))
    direction_D = directions(query_D - mean_D)
    cosines = [directions(vectors_of(batch) - mean_D) @ direction_D for batch in _rows(parts, ["embedding", "scale"])]
    _, shares_N = bm25(question, counts, total)
    scores_N = fused(np.concatenate(cosines), shares_N)
    ranks_N = ranks(scores_N, np.ones(total, dtype=np.bool_))
    found, first = dict[int, dict[str, Any]](), 0
    for batch in _rows(parts, ["doc", "row", "byte_start", "byte_stop", "section", "text"]):
        for at in np.flatnonzero(ranks_N[first : first + len(batch)] <= top).tolist():
            values = batch.slice(at, 1).to_pylist()[0]
            found[int(ranks_N[first + at])] = {**values, "score": round(float(scores_N[first + at]), 6)}
        first += len(batch)
    return [found[rank] for rank in sorted(found)]


def _rows(parts: Sequence[Location], columns: Sequence[str]) -> Iterator[Any]:
    for part in parts:
        yield from batches_of(part, columns)


def _settings(out: Location, manifest: dict[str, Any], model: str | None) -> CorpusSettings:
    """The settings of the rows. Raises: InputError for a manifest without them, or a model that is not theirs."""
    try:
        settings = msgspec.convert(manifest | {"out": "", "device": "auto"}, CorpusSettings)
    except msgspec.ValidationError as error:
        raise InputError(f"{out.name}/{MANIFEST} is none of encode-corpus: {error}") from None
    try:
        folder = resolve_model_folder(model or settings.model).resolve()
    except DistAttnError as error:
        hint = "" if model else "; name the folder of these rows' model by --model"
        raise InputError(f"{error}{hint}") from None
    settings = msgspec.structs.replace(settings, model=str(folder))
    check_manifest(out, settings)
    return settings


def _vector_of(question: str, settings: CorpusSettings) -> npt.NDArray[np.float32]:
    """The question's vector, [D], read as a passage is."""
    from dist_attn.commands.corpus_encode import CorpusEncoder

    alone = msgspec.structs.replace(settings, granularity="window", window=None)
    vector_D: npt.NDArray[np.float32] = CorpusEncoder(msgspec.json.encode(alone)).rows_of(question).vectors_ND[0]
    return vector_D

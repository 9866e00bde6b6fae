"""`dist-attn bench retrieval`: words, a sentence encoder, models of this project and both fused, over all cases.

Data are fetched by name into the cache; `--books` is a folder of novels. A case whose data cannot be had is left out
and says why. `--model` names models beside MiniLM, which `dist-attn models add minilm` adds.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.measured import Measured, Panel, Table
from benchmarks.setting import Setting, look_around
from dist_attn.checkpoints import load_reader_and_tokeniser, resolve_model_folder
from dist_attn.errors import ConfigError, ModelFolderError
from dist_attn.models import StreamingModel, TextEncoder
from dist_attn.text import Tokeniser
from dist_attn.text.ranking import fused
from dist_attn_papers.retrieval.cases import CASES, Case
from dist_attn_papers.retrieval.ranking import Floats, bm25, cosines, hits, interval, reciprocal_ranks, tf_idf

__all__ = ["main"]

NAME = "retrieval"
QUESTION = "Do words, MiniLM and our models find chapters, speeches, words and verses?"
NOTES = (
    "Share of queries whose right candidate is the nearest, or among the nearest where the case says so; intervals "
    "draw whole groups of queries. MRR is the mean of one over the rank of the first right candidate.",
    "One stream: candidates are rows of one reading of their whole text, queries are read alone. + words: the score of "
    "hybrid search. + tf-idf: the mean of both cosines, as of unit vectors side by side.",
)
TEACHER = "minilm"
Rows = NDArray[np.float32]


def rows_of(model: StreamingModel | TextEncoder, tokeniser: Tokeniser, texts: Sequence[str]) -> Rows:
    """A vector of each text read alone, [N, D]: of an encoder the mean of those of parts that it can read."""
    rows = []
    for text in texts:
        tokens_1L = torch.from_numpy(tokeniser.encode(text.encode()).astype(np.int64))[None]
        if isinstance(model, TextEncoder):
            parts = tokens_1L.chunk(-(-tokens_1L.shape[1] // model.config.text_tokens), dim=1)
            rows.append(torch.cat([model.encode(part) for part in parts]).mean(0))
        else:
            rows.append(model.encode(tokens_1L)[0].mean(0))
    return torch.stack(rows).numpy()


def rows_of_streams(model: StreamingModel, tokeniser: Tokeniser, case: Case) -> Rows:
    """A vector of each candidate, [N, D], of a reading of its text from the beginning."""
    rows = []
    for stream in case.streams:
        tokens = [
            torch.from_numpy(tokeniser.encode(text.encode()).astype(np.int64)) for text in case.candidates[stream]
        ]
        h_LD = model.hidden(torch.cat(tokens)[None])[0][0]
        rows += [part_LD.mean(0) for part_LD in h_LD.split([len(some) for some in tokens])]
    return torch.stack(rows).numpy()


@torch.inference_mode()
def scores_of(case: Case, models: dict[str, tuple[StreamingModel | TextEncoder, Tokeniser]]) -> dict[str, Floats]:
    """Every way to rank the candidates of a case, [Q, N] each; -inf where there is no candidate."""

    def among(scores_QN: Floats) -> Floats:
        return np.where(case.out_QN, -np.inf, scores_QN)

    words_QN, shares_QN = bm25(case.queries, case.candidates)
    counted_QN = tf_idf(case.queries, case.candidates)
    scores = {
        "tf-idf": among(counted_QN),
        "BM25": among(np.where(words_QN > 0, words_QN, -np.inf)),
    }
    for name, (model, tokeniser) in models.items():
        candidates = rows_of(model, tokeniser, case.candidates)
        queries = candidates if case.queries == case.candidates else rows_of(model, tokeniser, case.queries)
        scores[name] = among(cosines(queries, candidates))
        scores[f"{name}, mean off"] = among(cosines(queries, candidates, centred=True))
        scores[f"{name}, mean off + words"] = fused(scores[f"{name}, mean off"], shares_QN)
        scores[f"{name}, mean off + tf-idf"] = (scores[f"{name}, mean off"] + counted_QN) / 2
        if case.streams and not isinstance(model, TextEncoder):
            stream = rows_of_streams(model, tokeniser, case)
            asked = stream if queries is candidates else queries
            scores[f"{name}, one stream"] = among(cosines(asked, stream, centred=True))
            scores[f"{name}, one stream + words"] = fused(scores[f"{name}, one stream"], shares_QN)
            scores[f"{name}, one stream + tf-idf"] = (scores[f"{name}, one stream"] + counted_QN) / 2
    return scores


def _judged(
    case: Case, models: dict[str, tuple[StreamingModel | TextEncoder, Tokeniser]]
) -> dict[str, dict[str, float]]:
    """Of each way the share of queries that are answered, and its interval."""
    asked_Q = case.right_QN.any(1)
    judged = {}
    for way, scores_QN in scores_of(case, models).items():
        hit_Q = hits(scores_QN, case.right_QN, case.most)[asked_Q]
        low, high = interval(hit_Q, case.group_Q[asked_Q])
        mrr = float(reciprocal_ranks(scores_QN, case.right_QN)[asked_Q].mean())
        judged[way] = {"share": float(hit_Q.mean()), "low": low, "high": high, "mrr": mrr, "queries": len(hit_Q)}
    return judged


def finding(cases: Mapping[str, Mapping[str, Mapping[str, float]]], setting: Setting) -> Measured:
    """What was judged, by case and way, as a table for each case."""
    tables, curves = [], dict[str, dict[float, float]]()
    for number, (name, judged) in enumerate(cases.items(), 1):
        rows = [
            (way, f"{one['share']:.1%}", f"{one['low']:.1%} to {one['high']:.1%}", f"{one['mrr']:.2f}")
            for way, one in judged.items()
        ]
        title = f"{name}: {CASES[name][0]}; {judged['BM25']['queries']:.0f} queries"
        tables.append(Table(title, ("way", "share", "95 %", "MRR"), tuple(rows)))
        for way, one in judged.items():
            curves.setdefault(way, {})[float(number)] = one["share"]
    numbers = {f"{name}, {way}, MRR": one["mrr"] for name, judged in cases.items() for way, one in judged.items()}
    panel = Panel("right, by case in the order of the tables", "case", "share of queries", curves)
    return Measured(tuple(tables), {}, numbers, (panel,), NOTES, case=NAME, question=QUESTION, setting=setting)


def main(arguments: Sequence[str]) -> int:
    """Judge, print each table, and write the finding where that is wanted."""
    parser = argparse.ArgumentParser(prog="retrieval", description=__doc__)
    parser.add_argument("--books", type=Path, default=Path("data/books"))
    parser.add_argument("--model", action="append", default=[], help="a model folder or name; repeatable")
    parser.add_argument("--most", type=int, default=1000, help="texts of a case, about")
    parser.add_argument("--case", action="append", choices=list(CASES), help="only these; repeatable")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    models = {}
    for name in [TEACHER, *chosen.model]:
        try:
            model, tokeniser = load_reader_and_tokeniser(resolve_model_folder(name))
        except ModelFolderError as error:
            print(f"{name} was left out: {error}")
            continue
        assert isinstance(model, StreamingModel | TextEncoder)
        models[name if name not in models else f"{name} again"] = (model, tokeniser)
    results, setting = dict[str, dict[str, dict[str, float]]](), look_around()
    for name in chosen.case or CASES:
        try:
            case = CASES[name][1](chosen.books, chosen.most)
        except ConfigError as error:
            print(f"\n{name} was left out: {error}")
            continue
        results[name] = _judged(case, models)
        found = finding(results, setting)
        print(f"\n{found.tables[-1].as_markdown()}", flush=True)
        if chosen.json is not None:
            chosen.json.write_text(found.as_json())
    return 0

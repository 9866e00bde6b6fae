"""The study of chapters: neighbours and pairs are counted as they are said to be, and what is filed can be read."""

import json

import numpy as np
import pytest

from benchmarks import run
from benchmarks.setting import look_around
from dist_attn.errors import ConfigError
from dist_attn_papers.studies import STUDIES
from dist_attn_papers.studies import chapter_retrieval as study
from dist_attn_papers.studies.chapter_retrieval import Book, ChapterRetrieval, rank_rows
from tests.support.tokenisers import PROSE


def _books(*chapters: list[int]) -> list[Book]:
    empty = np.empty(0, dtype=np.int32)
    return [Book(f"book {n}", empty, np.array(own)) for n, own in enumerate(chapters)]


def test_neighbours_are_counted_by_definition():
    """Scores of random rows are those of plain loops over windows and pairs; windows of no chapter take no part."""
    draw = np.random.default_rng(0)
    books = _books([0, 0, -1, 1, 1, 1], [0, 0, 1, 1, -1])
    rows = [draw.standard_normal((len(book.chapter_W), 4)).astype(np.float32) for book in books]
    places = [(b, int(c), rows[b][w]) for b, book in enumerate(books) for w, c in enumerate(book.chapter_W) if c >= 0]
    for centred in (False, True):
        middle = np.mean([row for *_, row in places], axis=0) if centred else 0.0
        unit = [(row - middle) / np.linalg.norm(row - middle) for *_, row in places]
        found = rank_rows(rows, books, centred=centred)
        for b, book in enumerate(books):
            same_book, same_chapter, order = [], [], []
            for i, (own, chapter, _) in enumerate(places):
                if own != b:
                    continue
                cosine = {j: float(unit[i] @ unit[j]) for j in range(len(places)) if j != i}
                near = places[max(cosine, key=cosine.__getitem__)]
                same_book.append(near[0] == own)
                same_chapter.append(near[:2] == (own, chapter))
                pairs = [
                    cosine[j] > cosine[k]
                    for j in cosine
                    if places[j][:2] == (own, chapter)
                    for k in cosine
                    if places[k][0] != own
                ]
                order.append(np.mean(pairs))
            scores = found[book.name]
            assert scores.same_book == pytest.approx(np.mean(same_book))
            assert scores.same_chapter == pytest.approx(np.mean(same_chapter))
            assert scores.pairs_in_order == pytest.approx(np.mean(order))


def test_chance_is_that_of_a_random_neighbour():
    """Of seven windows, a random other one is of the same chapter as often as the formula says."""
    chance = study._chance(_books([0, 0, 1, 1, 1], [0, 0]))
    assert chance["book 0"].same_chapter == pytest.approx((2 * 1 + 3 * 2) / 5 / 6)
    assert chance["book 1"].same_book == pytest.approx(1 / 6)


def test_the_study_reads_books_and_files_what_it_found(tmp_path, monkeypatch):
    """Books with chapters give a line per model and reading, a table, JSON and a figure; a missing one is named."""
    monkeypatch.setattr(study, "ROOT", tmp_path)
    monkeypatch.setattr(study, "WINDOW", 16)
    with pytest.raises(ConfigError, match=r"war_and_peace\.txt cannot be read"):
        study.compare(["books-6m"], 640, look_around())
    (tmp_path / study.FOLDER).mkdir(parents=True)
    for number, name in enumerate(study.BOOKS):
        chapters = [b"CHAPTER %d\n" % n + PROSE.encode()[50 * (number + n) :][:400] for n in range(4)]
        (tmp_path / study.FOLDER / name).write_bytes(b"\n".join(chapters))
    finding = study.compare(["books-6m"], 640, look_around())
    assert isinstance(finding, ChapterRetrieval)
    assert [line.rows for line in finding.lines] == ["word counts (tf-idf)"] + 4 * ["books-6m"]
    assert all(count >= 8 for count in finding.windows.values())
    assert set(finding.chapters.values()) == {4}
    assert finding.as_markdown().count("| books-6m |") == 4
    assert json.loads(finding.as_json())["lines"][0]["mean"]["same_book"] <= 1
    finding.draw(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_study_without_its_texts_is_left_out(tmp_path, monkeypatch, capsys):
    """Without the books the study is named in one line, the exit code says so, and nothing is filed."""
    monkeypatch.setattr(study, "ROOT", tmp_path)
    monkeypatch.setattr(run, "why_red", lambda _: "")
    assert run.main(["chapter-retrieval", "--smoke"], STUDIES) == 2
    book = tmp_path / "data/books/war_and_peace.txt"
    assert f"chapter-retrieval was left out: {book} cannot be read" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

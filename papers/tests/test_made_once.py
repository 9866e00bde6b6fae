"""What several jobs share is made once, and is there whole or not at all."""

import json
from pathlib import Path

import pytest

from dist_attn.errors import ConfigError
from dist_attn_papers.tables.made_once import make_once
from dist_attn_papers.tables.novels import NOVELS, find_novel
from dist_attn_papers.tables.passages import AUTHORS


def _folder(text: str, path: Path) -> None:
    path.mkdir()
    (path / "text.json").write_text(json.dumps(text))


def test_what_is_there_is_left_alone(tmp_path: Path) -> None:
    """The second call makes nothing; folders above are made where they are missing."""
    calls: list[Path] = []

    def make(path: Path) -> None:
        calls.append(path)
        _folder("first", path)

    made = make_once(tmp_path / "of/all", make)
    assert make_once(made, make) == made == tmp_path / "of/all"
    assert len(calls) == 1 and [path.name for path in made.iterdir()] == ["text.json"]


def test_a_failure_leaves_nothing_in_its_place(tmp_path: Path) -> None:
    """After a failure half way nothing stands under the name, and the next call makes it from the beginning."""

    def fail(path: Path) -> None:
        _folder("half", path)
        raise ArithmeticError("half way")

    with pytest.raises(ArithmeticError, match="half way"):
        make_once(tmp_path / "made", fail)
    assert not (tmp_path / "made").exists()
    make_once(tmp_path / "made", lambda path: _folder("whole", path))
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
    assert (tmp_path / "made/text.json").read_text() == '"whole"'


def test_the_faster_of_two_stays(tmp_path: Path) -> None:
    """A folder that another process has made meanwhile stays, and nothing is left beside it."""

    def slow(path: Path) -> None:
        _folder("slower", path)
        _folder("faster", tmp_path / "made")

    assert make_once(tmp_path / "made", slow).is_dir()
    assert (tmp_path / "made/text.json").read_text() == '"faster"'
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_every_novel_has_its_author(tmp_path: Path) -> None:
    """The novels of the authors are those that there are; one that is missing is named with where it should be."""
    assert sorted(f"{book}.txt" for books in AUTHORS.values() for book in books) == list(NOVELS)
    with pytest.raises(ConfigError, match=r"emma\.txt is not there; put the novels into"):
        find_novel("emma.txt", tmp_path)

"""Files of rows: every ending that is taken holds the same rows, and every other one is refused before any work."""

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dist_attn.comm import Communicator, run_simulated
from dist_attn.commands.encode_file import Encoding, encode_file
from dist_attn.commands.encode_output import file_of
from dist_attn.commands.row_files import ENDINGS, GROUP_BYTES, About, FileRows, open_rows
from dist_attn.text import ByteTokeniser
from dist_attn.wire.messages import RowSpec
from tests.support.command_line import run_here
from tests.support.models import small_model
from tests.support.tokenisers import PROSE

NAMES = ["document", "index", "start", "stop", "byte_start", "byte_stop", "text", "embedding"]


def rows_of(file: Path) -> list[dict[str, Any]]:
    """The rows of a file that says what they stand for."""
    if file.suffix == ".jsonl":
        return [json.loads(line) for line in file.read_text().splitlines()]
    if file.suffix == ".parquet":
        return pytest.importorskip("pyarrow.parquet").read_table(file).to_pylist()
    return pytest.importorskip("pyarrow.ipc", reason="pip install -e '.[arrow]'").open_file(file).read_all().to_pylist()


@pytest.mark.parametrize("spec", [RowSpec("window", 300), RowSpec("sentence"), RowSpec("document"), RowSpec("token")])
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_format_has_the_same_rows_and_what_they_stand_for(tmp_path: Path, spec: RowSpec, ranks: int) -> None:
    """Vectors are those of .npy, ranges cover the text without a gap, and each row's text is that of its bytes."""
    text = ("Wörter — " + 2 * PROSE).encode()
    (tmp_path / "book.txt").write_bytes(text)
    for ending in ENDINGS:
        with_text = ending != ".npy"
        encoding = Encoding(tmp_path / "book.txt", tmp_path / f"rows{ending}", spec, with_text=with_text, model="tiny")

        def work(comm: Communicator, encoding: Encoding = encoding) -> object:
            return encode_file(comm, small_model(), ByteTokeniser(), encoding)

        run_simulated(work, ranks)
    vectors = np.load(tmp_path / "rows.npy")
    for ending in ENDINGS[1:]:
        rows = rows_of(tmp_path / f"rows{ending}")
        assert list(rows[0]) == NAMES
        assert np.array_equal(np.array([row["embedding"] for row in rows], np.float32), vectors)
        assert [row["index"] for row in rows] == list(range(len(vectors)))
        assert {row["document"] for row in rows} == {str(tmp_path / "book.txt")}
        for unit in ("", "byte_"):  # a byte is a token here
            edges = [rows[0][f"{unit}start"], *(row[f"{unit}stop"] for row in rows)]
            assert edges[0] == 0 and edges[-1] == len(text)
            assert [row[f"{unit}start"] for row in rows] == edges[:-1]
        assert [row["text"] for row in rows] == [
            text[row["byte_start"] : row["byte_stop"]].decode(errors="replace") for row in rows
        ]
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["book.txt", *(f"rows{e}" for e in ENDINGS)])


@pytest.mark.parametrize("ending", [".arrow", ".parquet"])
def test_columns_wait_in_groups_of_bounded_size(tmp_path: Path, ending: str) -> None:
    """Rows that come one by one are written in groups of some MiB, and no more of them are held."""
    pytest.importorskip("pyarrow", reason="pip install -e '.[arrow]'")
    dim, count, held = 1 << 14, 3 * GROUP_BYTES // (4 << 14), []
    target = tmp_path / f"x{ending}"
    with file_of(target, tmp_path / "t", partial(open_rows, target, About("t"))) as out:
        for row in range(count):
            out.write(FileRows(np.full((1, 4), row), np.full((1, dim), row, np.float32)))
            held.append(len(out._waiting))  # type: ignore[attr-defined]
        out.finish()
    assert max(held) == GROUP_BYTES // (4 * dim) - 1
    assert [row["start"] for row in rows_of(target)] == list(range(count))


@pytest.mark.parametrize("ending", ENDINGS[1:])
def test_a_text_without_rows_gives_a_file_without_rows(tmp_path: Path, ending: str) -> None:
    """As one of blanks, of which a text encoder makes no token."""
    target = tmp_path / f"x{ending}"
    with file_of(target, tmp_path / "t", partial(open_rows, target, About("t"))) as out:
        out.finish()
    assert rows_of(target) == []


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_that_is_not_finished_leaves_nothing(tmp_path: Path, ending: str) -> None:
    """Work that fails half-way leaves no file of any format, and no words of a library's either."""
    target = tmp_path / f"x{ending}"
    with (
        pytest.raises(KeyboardInterrupt),
        file_of(target, tmp_path / "t", lambda f: open_rows(target, About("t"), f)) as out,
    ):
        out.write(FileRows(np.zeros((2, 4), np.int64), np.zeros((2, GROUP_BYTES // 4), np.float32)))
        raise KeyboardInterrupt
    del out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["rows.npz"], "take one of .npy, .jsonl, .arrow, .parquet; of NumPy's formats that is .npy"),
        (["rows.csv"], "take one of .npy"),
        (["rows"], "take one of .npy"),
        (["rows.npy", "--with-text"], "rows.npy has room for vectors only"),
    ],
)
def test_other_endings_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    """One line says which endings there are, with exit code 2, before a model is looked for or a file is made."""
    (tmp_path / "book.txt").write_text("It was")
    assert run_here(monkeypatch, tmp_path, "encode", "book.txt", "--model", "nowhere", "--out", *words) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), len(list(tmp_path.iterdir()))) == ("", 1, 1) and says in err


@pytest.mark.parametrize("name", ["rows.parquet", "rows.ARROW"])
def test_what_pyarrow_is_needed_for_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Without pyarrow one line names the extra that brings it, before any work."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "book.txt").write_text("It was")
    assert run_here(monkeypatch, tmp_path, "encode", "book.txt", "--model", "nowhere", "--out", name) == 1
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and f"{name} needs pyarrow" in err and ".[arrow]" in err

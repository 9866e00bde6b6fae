"""Corpora: every document's rows once and as `encode` gives them, whatever dies, and found again by a question."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from dist_attn.commands import corpus_encode, corpus_engines
from dist_attn.commands.corpus_encode import CorpusEncoder
from dist_attn.commands.corpus_engines import LocalEngine, LostError, RayEngine
from dist_attn.commands.corpus_inputs import Document, Location, documents_of, find_files
from dist_attn.commands.corpus_parts import CorpusSettings, Unit, UnitReport, WorkerAnswer
from dist_attn.commands.corpus_run import encode_corpus, units_of
from dist_attn.commands.corpus_search import search_corpus
from dist_attn.errors import ConfigError, EngineError, InputError
from tests.docs.blocks import ROOT, blocks_of
from tests.support.command_line import finish, start_command
from tests.support.models import write_small_folder
from tests.support.programs import free_port

pyarrow = pytest.importorskip("pyarrow.dataset") and pytest.importorskip("pyarrow", reason="pip install -e '.[arrow]'")
parquet = pytest.importorskip("pyarrow.parquet")

PROSE = "The goose was found by Peterson. It held the blue stone of the Countess. "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model."""
    return write_small_folder(tmp_path_factory.mktemp("model") / "small")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Seven documents of 1 to 3,400 bytes, an empty one, one that is no text, and a table."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(7):
        (folder / f"{number}.txt").write_text((f"Document {number}. " + 60 * PROSE)[: 1 + number**4 + 300 * number])
    (folder / "empty.txt").touch()
    (folder / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(99))
    (folder / ".hidden").write_text("never read")
    (folder / "table.jsonl").write_text(
        '{"text": "A goose."}\n{"text": 1}\nnone\n[]\n{"text": "A stone.", "id": "b"}\n'
    )
    return folder


class Here:
    """One worker in this process; `dies` says of a document's name whether it would end one, `told` gets progress."""

    size = 1

    def __init__(
        self,
        settings: CorpusSettings,
        dies: Callable[[str], bool] = lambda _: False,
        told: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._encoder, self._dies, self.units = CorpusEncoder(msgspec.json.encode(settings)), dies, list[Unit]()
        self._told = told

    def submit(self, unit: Unit) -> None:
        self.units.append(unit)

    def wait(self) -> tuple[Unit, WorkerAnswer | LostError]:
        unit = self.units[-1]
        if any(self._dies(one.name) for one in unit.documents):
            return unit, LostError("its worker ended")
        report = self._encoder.encode(msgspec.json.encode(unit), self._told)
        return unit, WorkerAnswer(report=msgspec.json.decode(report, type=UnitReport))

    def close(self) -> None:
        pass


def settings_of(model: Path, out: Path, **changes: Any) -> CorpusSettings:
    """The settings of a job."""
    plain = CorpusSettings(str(out), str(model), "window", 100, None, "text", "", True, "float32", "cpu", "auto")
    return msgspec.structs.replace(plain, **changes)


def encode(
    corpus: Path, settings: CorpusSettings, engine: Callable[[CorpusSettings], Any] | None = None
) -> dict[str, Any]:
    """A job over a folder, in parts of 2,000 bytes."""
    files = find_files([str(corpus)])
    documents = documents_of(files, "text", "")
    return encode_corpus(files, documents, settings, engine or Here, 2000)


def rows_in(out: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """The rows by document and number; each is there once. The folder itself is a data set of Arrow's."""
    rows = pyarrow.dataset.dataset(out, format="parquet", exclude_invalid_files=True).to_table().to_pylist()
    found = {(row["doc"].removeprefix(f"{out.parent}/in/"), row["row"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def failed_in(out: Path) -> dict[str, str]:
    """Why documents failed, by their names without the folder."""
    rows = parquet.read_table(out / "_failed.parquet").to_pylist()
    return {row["doc"].rpartition("/")[2]: row["reason"] for row in rows}


def test_rows_are_those_of_encode(
    corpus: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each document's vectors, ranges and texts are `encode`'s, and what cannot be read is told with the reason."""
    from dist_attn.commands.cli import main

    out = tmp_path / "out"
    report = encode(corpus, settings_of(model, out))
    rows = rows_in(out)
    assert (report["documents"], report["rows"], report["failed"]) == (9, len(rows), 5)
    for number in (0, 3, 6):
        single = tmp_path / "one.parquet"
        arguments = ["encode", str(corpus / f"{number}.txt"), "--out", str(single), "--with-text", "--window", "100"]
        monkeypatch.setattr(sys, "argv", ["dist-attn", *arguments, "--model", str(model), "--device", "cpu"])
        with pytest.raises(SystemExit, match="0"):
            main()
        for want in parquet.read_table(single).to_pylist():
            row = rows[f"{number}.txt", want["index"]]
            assert row["embedding"] == want["embedding"] and row["tokens"] == want["stop"] - want["start"]
            assert all(row[name] == want[name] for name in ("byte_start", "byte_stop", "text"))
    assert rows["table.jsonl#4", 0]["text"] == "A stone."
    reasons = failed_in(out)
    assert reasons.keys() == {"empty.txt", "image.png", "table.jsonl#1", "table.jsonl#2", "table.jsonl#3"}
    assert "is empty" in reasons["empty.txt"] and "an image" in reasons["image.png"]
    assert "no text in 'text'" in reasons["table.jsonl#1"] and "no JSON" in reasons["table.jsonl#2"]


def test_a_job_goes_on_with_what_is_missing(corpus: Path, model: Path, tmp_path: Path) -> None:
    """Without a part, with half a file and with a new document it gives the same bytes, and each row once."""
    out, settings = tmp_path / "out", settings_of(model, tmp_path / "out")
    encode(corpus, settings)
    before = {path.name: path.read_bytes() for path in out.glob("part-*")}
    assert len(before) > 3
    lost = sorted(before)[1]
    (out / lost).unlink()
    (out / f".{lost}.1.writing").write_bytes(b"half")
    report = encode(corpus, settings)
    assert report["documents"] > 0 and {path.name: path.read_bytes() for path in out.glob("part-*")} == before
    assert not list(out.glob(".*.writing"))
    (corpus / "0a.txt").write_text("One more.")
    assert encode(corpus, settings)["documents"] == 1
    assert rows_in(out)["0a.txt", 0]["text"] == "One more."


def test_other_settings_are_refused(corpus: Path, model: Path, tmp_path: Path) -> None:
    """A folder holds rows of one model and one choice of rows, and is written by one job at a time."""
    out = tmp_path / "out"

    def busy(_: CorpusSettings) -> Any:
        with pytest.raises(ConfigError, match=f"is being written by process {os.getpid()}"):
            encode(corpus, settings_of(model, out))
        raise EngineError("seen")

    with pytest.raises(EngineError, match="seen"):
        encode(corpus, settings_of(model, out), busy)
    with pytest.raises(InputError, match="window 100 there, 50 now"):
        encode(corpus, settings_of(model, out, window=50))


def test_what_auto_has_come_to_is_compared(corpus: Path, model: Path, tmp_path: Path) -> None:
    """A job by auto goes on by that name or by auto, in the precision of the rows that are there, and by no other."""
    out, seen = tmp_path / "out", list[str]()

    def noting(own: CorpusSettings) -> Here:
        seen.append(own.dtype)
        return Here(own)

    encode(corpus, settings_of(model, out), noting)
    (corpus / "more.txt").write_text("One more.")
    assert encode(corpus, settings_of(model, out), noting)["documents"] == 1
    assert encode(corpus, settings_of(model, out, dtype="float32"), noting)["there_before"] == 10
    assert seen == ["auto", "float32", "float32"]
    with pytest.raises(InputError, match="dtype auto there, bfloat16 now"):
        encode(corpus, settings_of(model, out, dtype="bfloat16"))


def test_a_name_that_comes_again_is_told(model: Path, tmp_path: Path) -> None:
    """Files that two inputs have are read once; of documents with one id the first is, the others are in the table."""
    table, out = tmp_path / "in.jsonl", tmp_path / "out"
    table.write_text("".join(f'{{"text": "Text {n}.", "key": "k{n % 3}"}}\n' for n in range(5)))
    files = find_files([str(table), str(tmp_path / "*.jsonl")])
    assert len(files) == 1
    settings = settings_of(model, out)
    for _ in range(2):
        report = encode_corpus(files, documents_of(files, "text", "key"), settings, Here, 2000)
        assert report["failed"] == 2 and failed_in(out).keys() == {"k0", "k1"}
    assert {name: row["text"] for (name, _), row in rows_in(out).items()} == {f"k{n}": f"Text {n}." for n in range(3)}


def test_rows_behind_a_link_are_known(tmp_path: Path) -> None:
    """A folder of rows that lies in the input by another name is told from documents."""
    (tmp_path / "in" / "rows").mkdir(parents=True)
    (tmp_path / "in" / "rows" / "part-0.parquet").touch()
    (tmp_path / "link").symlink_to(tmp_path / "in")
    ((place, _),) = find_files([str(tmp_path / "link")])
    assert place.real.startswith(f"{Location.of(str(tmp_path / 'in' / 'rows')).real}/") and "/link/" in place.name


def test_a_document_that_ends_workers_is_found_and_left_out(corpus: Path, model: Path, tmp_path: Path) -> None:
    """A unit is given out again, then halved, until the document that ends its worker is alone."""
    settings = settings_of(model, tmp_path / "out")
    encode(corpus, settings, lambda own: Here(own, lambda name: name.endswith("2.txt")))
    assert "its worker ended, and again" in failed_in(tmp_path / "out")["2.txt"]
    assert len({name for name, _ in rows_in(tmp_path / "out")}) == 8


def test_a_dead_worker_costs_its_unit_alone(corpus: Path, model: Path, tmp_path: Path) -> None:
    """A worker killed at its first document or while it waits costs its unit, and another takes the next one; a worker
    that cannot start ends the job.
    """
    os.mkfifo(tmp_path / "never")
    settings = settings_of(model, tmp_path)
    engine = LocalEngine(settings, 1, 0)
    try:
        engine.submit(Unit("part-0", [Document("a", 1, uri=str(tmp_path / "never"))]))
        assert engine.wait()[1] == WorkerAnswer()
        (worker,) = (key.data[0] for key in engine._busy.get_map().values())
        os.kill(worker.pid, signal.SIGKILL)
        lost = engine.wait()[1]
        assert isinstance(lost, LostError) and "its worker ended (-9)" in str(lost)
        engine.submit(Unit("part-1", []))
        while not engine._free:
            engine.wait()
        os.kill(engine._free[0].pid, signal.SIGKILL)
        engine._free[0].wait()
        engine.submit(Unit("part-2", [Document("b", 1, text=PROSE)]))
        assert isinstance(engine.wait()[1], LostError)
    finally:
        engine.close()
    refused = LocalEngine(msgspec.structs.replace(settings, model=str(corpus)), 1, 0)
    refused.submit(Unit("part-1", []))
    with pytest.raises(EngineError, match=r"config\.json"):
        refused.wait()
    refused.close()


def test_ranks_read_a_long_document(model: Path, tmp_path: Path) -> None:
    """Its rows are those of one worker, but for the last bits of sums; progress is told; one without a file fails."""
    documents = [Document("a", 9, text=f"Long. {1000 * PROSE}"), Document("b", 9, uri=str(tmp_path / "missing.txt"))]
    documents.append(Document("c", 8, text=PROSE))
    encode_corpus([], documents, settings_of(model, tmp_path / "one"), Here, 2000)
    shared, told = settings_of(model, tmp_path / "out", long_bytes=9, long_ranks=2), list[int]()
    encode_corpus([], documents, shared, lambda own: Here(own, told=told.append), 2000)
    assert "missing.txt" in failed_in(tmp_path / "out")["b"]
    assert told[0] == 1 << 16 < told[1] == len(documents[0].text or "")
    wanted, rows = rows_in(tmp_path / "one"), rows_in(tmp_path / "out")
    assert rows.keys() == wanted.keys() and {key[0] for key in rows} == {"a", "c"}
    for key, row in rows.items():
        np.testing.assert_allclose(row.pop("embedding"), wanted[key].pop("embedding"), rtol=1e-4, atol=1e-5)
        assert row == wanted[key]


def test_ranks_that_stand_still_cost_their_document_alone(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While they take no more of the text, and when they have it all; what comes next is encoded."""
    monkeypatch.setattr(corpus_encode, "STALLED_S", 0.0)
    documents = [Document("long", 9, text=2000 * PROSE), Document("all", 9, text=PROSE), Document("c", 8, text=PROSE)]
    settings = settings_of(model, tmp_path / "out", long_bytes=9, long_ranks=2)
    assert encode_corpus([], documents, settings, Here, 2000)["documents"] == 1
    assert failed_in(tmp_path / "out") == dict.fromkeys(("long", "all"), "its ranks made no progress for 0 s")


@pytest.mark.slow
def test_actors_tell_how_far_they_are(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a long document is read; one that stands still is given up, as a worker that died is."""
    pytest.importorskip("ray", reason="needs pip install ray")
    monkeypatch.setattr(corpus_engines, "ASK_S", 0.02)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    os.mkfifo(tmp_path / "never")
    engine = RayEngine(settings_of(model, tmp_path), 1, None)
    try:
        engine.submit(Unit("part-0", [Document("a", 9_000_000, text=120_000 * PROSE)]))
        told = list[int]()
        while not isinstance(answer := engine.wait()[1], LostError) and answer.report is None:
            told.append(answer.done)
        assert len(told) > 1 and told == sorted(set(told))
        monkeypatch.setattr(corpus_engines, "SILENT_S", 0.1)
        engine.submit(Unit("part-1", [Document("a", 1, uri=str(tmp_path / "never"))]))
        assert "was silent for 0.1 s" in str(engine.wait()[1])
    finally:
        engine.close()


@pytest.mark.slow
def test_a_document_of_several_machines_joins_a_corpus(
    corpus: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torchrun on two nodes makes of it is, as the page says, a part: known to the next job, and searched."""
    big, out, settings = corpus / "big.txt", tmp_path / "rows", settings_of(model, tmp_path / "rows")
    encode(corpus, settings)
    big.write_text(f"{30 * PROSE}Nobody but the zephyr knows the harpsichord. {30 * PROSE}")
    options = [str(big), "--out", "big.parquet", "--with-text", "--window", "100", "--model", str(model)]
    nodes = ["torch.distributed.run", "--nnodes=2", "--nproc-per-node=1", "--master-addr=127.0.0.1"]
    nodes.append(f"--master-port={free_port()}")
    started = [
        start_command([*nodes, f"--node-rank={n}", "-m", "dist_attn", "encode", *options], tmp_path) for n in (1, 0)
    ]
    assert [finish(node)[0] for node in started] == [0, 0]
    monkeypatch.chdir(tmp_path)
    exec(blocks_of(ROOT / "docs/how-to/corpora.md")[1].code, {"pyarrow": pyarrow, "parquet": parquet})
    assert encode(corpus, settings)["documents"] == 0
    (best,) = search_corpus(str(out), "the harpsichord of the zephyr", str(model), 1)
    assert best["doc"] == str(big) and "zephyr" in best["text"]
    encode(corpus, whole := settings_of(model, tmp_path / "whole"))
    wanted, rows = rows_in(Path(whole.out)), rows_in(out)
    assert rows.keys() == wanted.keys()
    for key, row in rows.items():
        np.testing.assert_allclose(row.pop("embedding"), wanted[key].pop("embedding"), rtol=1e-4, atol=1e-5)
        assert row == wanted[key]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["local", "ray"])
def test_a_killed_job_goes_on(engine: str, model: Path, tmp_path: Path) -> None:
    """After `kill -9` of the command in the middle, the same command completes the folder: each row once."""
    if engine == "ray":
        pytest.importorskip("ray", reason="needs pip install ray")
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02}.txt").write_text(f"{number} {200 * PROSE}")
    command = ["dist_attn", "encode-corpus", str(folder), str(out), "--engine", engine]
    command += ["--set", "part_mib=0.03", "--ranks", "2", "--model", str(model), "--device", "cpu"]
    job = start_command(command, tmp_path)
    while not list(out.glob("part-*")):
        assert job.poll() is None
        time.sleep(0.05)
    job.kill()
    finish(job)
    code, said, _ = finish(start_command(command, tmp_path))
    assert code == 0 and json.loads(said.splitlines()[-1])["there_before"] > 0
    assert len({name for name, _ in rows_in(out)}) == 40


def test_units_do_not_depend_on_what_is_done() -> None:
    """The same documents make the same parts, less what is done."""

    def documents() -> Iterator[Document]:
        yield from (Document(f"d{number}", 10) for number in range(9))

    skipped: list[int] = []
    whole = list(units_of(documents(), (), 30, skipped.append))
    assert [[one.name for one in unit.documents] for unit in whole] == [
        ["d0", "d1", "d2"], ["d3", "d4", "d5"], ["d6", "d7", "d8"],
    ]  # fmt: skip
    from dist_attn.commands.corpus_run import _key

    skipped.clear()
    left = list(units_of(documents(), {_key(f"d{number}") for number in (0, 1, 2, 4)}, 30, skipped.append))
    assert left[1] == whole[2] and [one.name for one in left[0].documents] == ["d3", "d5"]
    assert skipped == [30, 10, 0]


def test_tables_give_their_columns(tmp_path: Path) -> None:
    """Names and texts come of the columns that are named, in JSONL, compressed too, and in Parquet; patterns fit."""
    table = pyarrow.table({"body": ["one", None], "key": [7, 8]})
    parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.CompressedOutputStream(str(tmp_path / "b.jsonl.gz"), "gzip") as file:
        file.write(b'{"body": "two", "key": "k"}\n\n{"body": "three"}\n')
    documents = list(documents_of(find_files([str(tmp_path / "[ab].*")]), "body", "key"))
    assert [(one.name, one.text) for one in documents if not one.refusal] == [("7", "one"), ("k", "two")]
    assert [one.name.rpartition("/")[2] for one in documents if one.refusal] == ["8", "b.jsonl.gz#1"]
    (tmp_path / "c.parquet").write_bytes(b"PAR1")
    (broken,) = documents_of(find_files([str(tmp_path / "c.parquet")]), "body", "")
    assert "cannot be read further" in broken.refusal
    with pytest.raises(InputError, match="no file, and no folder or pattern with files"):
        find_files([str(tmp_path / "*.none")])


def test_files_are_found_once_whatever_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Links to folders are not followed, names in buckets are quoted in URIs, and OUT is no input."""
    from dist_attn.commands.cli import main

    folder = tmp_path / "a b"
    folder.mkdir()
    (folder / "up").symlink_to(folder)
    (folder / "gone").symlink_to(tmp_path / "none")
    (folder / "what?\n%20.txt").write_text("A goose.")
    for given in (str(folder), folder.as_uri()):
        ((place, size),) = find_files([given])
        assert (place.path, size) == (f"{folder}/what?\n%20.txt", 8)
        assert Location.of(place.uri).path == place.path
    bucket = Location.of("s3://bucket/a%20b%3F%25%23.txt?region=us-east-1")
    assert bucket.path == "bucket/a b?%#.txt" and Location.of(bucket.uri) == bucket
    (folder / os.fsdecode(b"\xff")).touch()
    with pytest.raises(InputError, match="cannot be listed"):
        find_files([str(folder)])
    (folder / os.fsdecode(b"\xff")).unlink()
    monkeypatch.setattr(sys, "argv", ["dist-attn", "encode-corpus", str(folder), str(folder)])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert not (folder / "_manifest.json").exists()


@pytest.mark.parametrize("embedding", ["float32", "float16", "int8"])
def test_a_question_finds_its_passage(corpus: Path, model: Path, tmp_path: Path, embedding: str) -> None:
    """By words and vectors, whatever numbers these are written as, with the place and the text of each passage."""
    (corpus / "rare.txt").write_text("Nobody but the zephyr knows the harpsichord.")
    settings = settings_of(model, tmp_path / "out", embedding=embedding)
    encode(corpus, settings)
    best, second = search_corpus(str(tmp_path / "out"), "the harpsichord of the zephyr", str(model), 2)
    assert best["doc"].endswith("rare.txt") and (best["byte_start"], best["byte_stop"]) == (0, 44)
    assert best["text"].startswith("Nobody but") and best["score"] > second["score"]
    exact = CorpusEncoder(msgspec.json.encode(settings)).rows_of(best["text"]).vectors_ND[0]
    row = rows_in(tmp_path / "out")["rare.txt", 0]
    np.testing.assert_allclose(np.array(row["embedding"]) * row.get("scale", 1), exact, atol=np.abs(exact).max() / 100)
    with pytest.raises(InputError, match=r"no model at 'small'.*by --model"):
        search_corpus(str(tmp_path / "out"), "anything", None, 2)
    (tmp_path / "out" / "_manifest.json").write_text("{}")
    with pytest.raises(InputError, match="is none of encode-corpus"):
        search_corpus(str(tmp_path / "out"), "anything", str(model), 2)
    with pytest.raises(InputError, match="has no rows"):
        search_corpus(str(tmp_path), "anything", str(model), 2)

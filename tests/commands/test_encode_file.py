"""Encoding a file: rows as a naive computation gives them, on any number of ranks, whole or not at all."""

import hashlib
import os
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.commands import encode_file as module
from dist_attn.commands.encode_blocks import StreamReader
from dist_attn.commands.encode_file import EncodeReport, Encoding, block_tokens, encode_file
from dist_attn.errors import InputError, StorageError
from dist_attn.model_config.figures import BLOCK_TOKENS, GPU_TOKENS
from dist_attn.text import ByteTokeniser
from dist_attn.text.cuts import CutFinder, marked_ends
from dist_attn.wire.messages import RowSpec
from tests.support.closeness import assert_close
from tests.support.models import SIZE, small_config, small_model
from tests.support.tokenisers import PROSE, small_bpe

# More than two blocks of one rank, and the end is on no grid.
TEXT = (5 * PROSE.encode())[: 2 * BLOCK_TOKENS + 1003]
SPECS = {
    "token": RowSpec("token"),
    "window": RowSpec("window", 512),
    # Straddles pieces, slices of ranks and blocks, and ends off the grid.
    "odd window": RowSpec("window", 700),
    "one token windows": RowSpec("window", 1),
    "wide window": RowSpec("window", 3000),
    "last of window": RowSpec("window", 300, "last"),
    "sentence": RowSpec("sentence"),
    "document": RowSpec("document"),
    "last of document": RowSpec("document", pooling="last"),
}


@pytest.fixture(scope="module")
def hidden_LD() -> torch.Tensor:
    """Every token's hidden state in one pass over the whole text."""
    tokens = torch.from_numpy(ByteTokeniser().encode(TEXT).astype(np.int64))
    with torch.no_grad():
        return small_model().encode(tokens[None])[0]


def test_a_block_has_as_many_tokens_as_the_device_wants() -> None:
    """Ranks on GPUs get several times the tokens of a block on CPUs."""

    def rank(comm: Communicator) -> list[int]:
        devices = ("cpu", "meta")
        return [block_tokens(comm, StreamReader(comm, small_model().to(d), RowSpec("token"))) for d in devices]

    assert run_simulated(rank, 2) == [[2 * BLOCK_TOKENS, 2 * GPU_TOKENS]] * 2


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_bytes(TEXT)
    return path


def _naive_rows(hidden_LD: torch.Tensor, spec: RowSpec) -> torch.Tensor:
    length: int | list[int] = {"token": 1, "window": spec.window}.get(spec.granularity, len(hidden_LD))
    if spec.marked:
        finder, tokens = CutFinder(spec.granularity), ByteTokeniser().encode(TEXT)
        finder.push(TEXT, final=True)
        ends = marked_ends(finder.mark(tokens, np.ones(len(tokens), np.int64), final=True)[0])
        length = np.diff([0, *ends, len(TEXT)]).tolist()
        assert len(length) > 20
    runs = hidden_LD.double().split(length)
    return torch.stack([run[-1] if spec.pooling == "last" else run.mean(0) for run in runs]).float()


def _encode(
    ranks: int,
    source: Path,
    target: Path,
    spec: RowSpec,
    *,
    deterministic: bool = False,
    exchange: str = "auto",
    **progress: object,
) -> EncodeReport | None:
    def body(comm: Communicator) -> EncodeReport | None:
        encoding = Encoding(source, target, spec, deterministic, exchange)
        return encode_file(comm, small_model(), ByteTokeniser(), encoding, **progress)

    first, *others = run_simulated(body, ranks)
    assert others == [None] * (ranks - 1)
    return first


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("name", SPECS)
def test_rows_are_the_naive_ones_on_any_number_of_ranks(source, tmp_path, hidden_LD, name, ranks):
    """Rows of every kind equal the pooled hidden states of one pass, wherever blocks and ranks are cut."""
    spec, target = SPECS[name], tmp_path / "rows.npy"
    report = _encode(ranks, source, target, spec)
    rows, want = np.load(target, allow_pickle=False), _naive_rows(hidden_LD, spec)
    assert rows.dtype == np.float32
    assert rows.flags.c_contiguous
    assert_close(torch.from_numpy(rows), want)
    assert (report.tokens, report.rows, report.ranks) == (len(TEXT), len(want), ranks)
    assert len(report.peak_rss_mib) == ranks
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.npy", "text.txt"]


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_softmax_model_over_ranks_gives_the_rows_of_one_pass(source, tmp_path, ranks):
    """With exact attention, whose keys stay on the ranks that read them, rows over several blocks are those of one."""
    model = small_model(small_config("softmax"))
    tokens = torch.from_numpy(ByteTokeniser().encode(TEXT).astype(np.int64))
    with torch.no_grad():
        want = _naive_rows(model.encode(tokens[None])[0], SPECS["odd window"])

    def body(comm: Communicator) -> EncodeReport | None:
        return encode_file(comm, model, ByteTokeniser(), Encoding(source, tmp_path / "rows.npy", SPECS["odd window"]))

    run_simulated(body, ranks)
    assert_close(torch.from_numpy(np.load(tmp_path / "rows.npy")), want)


def test_the_carry_does_not_grow_with_the_text(tmp_path):
    """What a rank sends for the carry of a block is the size of the states, whatever the length; alone, nothing."""
    sent = []
    for name, length in (("short", 1500), ("long", len(TEXT))):
        (tmp_path / name).write_bytes(TEXT[:length])
        for ranks, exchange in ((2, "auto"), (4, "log_step")):
            report = _encode(ranks, tmp_path / name, tmp_path / "x.npy", RowSpec(), exchange=exchange)
            sent.append(report.carry_bytes_per_rank)
    # 2 layers x 2 heads x (16 features x (8 values + 1) + 2) float32
    assert sent == [2 * 2 * (16 * 9 + 2) * 4] * 4
    assert _encode(1, tmp_path / "long", tmp_path / "x.npy", RowSpec()).carry_bytes_per_rank == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_report_says_where_the_time_went(source, tmp_path, ranks):
    """The four parts of rank 0's time are not negative, follow each other, and so come to no more than all of it."""
    report = _encode(ranks, source, tmp_path / "rows.npy", RowSpec())
    parts = (report.compute_seconds, report.exchange_seconds, report.text_seconds, report.handing_seconds)
    assert min(parts) >= 0
    assert sum(parts) <= report.seconds + 5 * 0.0005  # each is rounded to a millisecond


def test_deterministic_files_do_not_depend_on_the_ranks(source, tmp_path, hidden_LD):
    """Deterministic, the file has the same bytes from 1, 2, 3 and 4 ranks, and its rows are the usual ones."""
    spec = RowSpec("window", 700)
    digests, carried = [], []
    for ranks in (1, 2, 3, 4):
        report = _encode(ranks, source, tmp_path / "rows.npy", spec, deterministic=True)
        digests.append(hashlib.sha256((tmp_path / "rows.npy").read_bytes()).hexdigest())
        carried.append(report.carry_bytes_per_rank)
    assert len(set(digests)) == 1
    assert carried == [0, *[2 * 2 * (16 * 9 + 2) * 4] * 3]
    assert_close(torch.from_numpy(np.load(tmp_path / "rows.npy")), _naive_rows(hidden_LD, spec))


def test_a_model_that_cannot_be_deterministic(source, tmp_path):
    """Exact attention says that it cannot promise the same bits, and no file is left."""

    def body(comm: Communicator) -> None:
        model = small_model(small_config("softmax"))
        encoding = Encoding(source, tmp_path / "rows.npy", RowSpec(), deterministic=True)
        encode_file(comm, model, ByteTokeniser(), encoding)

    with pytest.raises(InputError, match="cannot promise the same bits"):
        run_simulated(body, 2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text.txt"]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("length", [1, 511, 512, 513])
def test_texts_shorter_than_the_ranks_can_share(tmp_path, hidden_LD, length, ranks):
    """A text of a single byte, or of one grain, is encoded though most ranks have nothing to do."""
    (tmp_path / "text.txt").write_bytes(TEXT[:length])
    _encode(ranks, tmp_path / "text.txt", tmp_path / "rows.npy", RowSpec("window", 100))
    rows = torch.from_numpy(np.load(tmp_path / "rows.npy"))
    assert_close(rows, _naive_rows(hidden_LD[:length], RowSpec("window", 100)))


def test_pieces_of_reading_change_nothing(source, tmp_path, monkeypatch):
    """With a BPE tokeniser the rows are bitwise the same, however small the pieces in which the file is read."""
    rows = []
    for size in (7, 1 << 18):
        monkeypatch.setattr(module, "_READ_BYTES", size)
        model = small_model(small_config(vocab_size=small_bpe().vocab_size))
        (report,) = run_simulated(
            lambda comm, model=model: encode_file(
                comm, model, small_bpe(), Encoding(source, tmp_path / "rows.npy", RowSpec("token"))
            ),
            1,
        )
        assert report.tokens == len(small_bpe().encode(TEXT))
        rows.append(np.load(tmp_path / "rows.npy"))
    assert np.array_equal(*rows)


def test_progress_counts_the_bytes_read(source, tmp_path):
    """Progress never falls and ends at the size of the file."""
    seen: list[int] = []
    _encode(1, source, tmp_path / "rows.npy", RowSpec(), on_progress=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == len(TEXT)
    assert len(seen) == 3


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(
    ("source_name", "target_name", "words"),
    [
        ("missing.txt", "rows.npy", "missing.txt cannot be read: No such file"),
        ("empty.txt", "rows.npy", "empty.txt is empty; encoding needs at least one byte"),
        ("", "rows.npy", "cannot be read: Is a directory"),
        ("text.txt", "nowhere/rows.npy", "rows.npy cannot be written: No such file .* its folder must exist"),
        ("text.txt", "", "is a folder or a device; give the name of a file"),
        ("text.txt", "/", "is a folder or a device; give the name of a file"),
        ("text.txt", "pipe", "is a folder or a device; give the name of a file"),
        ("text.txt", "text.txt", "is the text itself, which the rows would replace"),
        ("text.txt", "n" * 300, "cannot be written: File name too long"),
    ],
)
def test_what_cannot_be_opened_is_refused_on_every_rank(source, tmp_path, source_name, target_name, words, ranks):
    """A missing or empty text, or a target that cannot be written, raises on all ranks and leaves nothing behind."""
    (tmp_path / "empty.txt").touch()
    os.mkfifo(tmp_path / "pipe")
    before = sorted(tmp_path.rglob("*"))

    def body(comm: Communicator) -> bool:
        with pytest.raises(InputError, match=words):
            encoding = Encoding(tmp_path / source_name, tmp_path / target_name, RowSpec())
            encode_file(comm, small_model(), ByteTokeniser(), encoding)
        return True

    assert run_simulated(body, ranks) == [True] * ranks
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failure_in_the_middle_leaves_the_old_rows(source, tmp_path):
    """When the work breaks off, rows of an earlier encoding stay whole and nothing half-written lies beside them."""
    target = tmp_path / "rows.npy"
    target.write_bytes(b"earlier")

    def give_up(_: int) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match=f"{target} cannot be written: No space left on device"):
        _encode(1, source, target, RowSpec(), on_progress=give_up)
    assert target.read_bytes() == b"earlier"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.npy", "text.txt"]


def test_a_pipe_is_a_file_too(tmp_path, hidden_LD):
    """A text that can be read only once, such as a named pipe, is encoded whole."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(TEXT))
    writer.start()
    report = _encode(1, pipe, tmp_path / "rows.npy", RowSpec())
    writer.join(60)
    assert report.tokens == len(TEXT)
    assert np.load(tmp_path / "rows.npy").shape == (len(TEXT) // 512 + 1, SIZE)
    assert_close(torch.from_numpy(np.load(tmp_path / "rows.npy")), _naive_rows(hidden_LD, RowSpec()))

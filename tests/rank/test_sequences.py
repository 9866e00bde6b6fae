"""Text encoders in the engine: sequences on any rank and in any block give the rows of one process."""

import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.commands.encode_file import Encoding, encode_file
from dist_attn.control.intake import misfit
from dist_attn.control.scheduler import Limits, RequestView, SchedulerView, plan, split
from dist_attn.devices import ON_CPU
from dist_attn.errors import EngineError, InputError, NotFiniteError
from dist_attn.models import TextEncoder, TextEncoderConfig, build_model
from dist_attn.ops import FiniteCheck
from dist_attn.rank.sequence_executor import SequenceExecutor
from dist_attn.rank_link.rows import RowAssembler, sequence_length
from dist_attn.text import ByteTokeniser
from dist_attn.wire.messages import OpenWork, RowSpec, SamplingSpec
from dist_attn.wire.rank_messages import DecodeOp, LoadedModel, OpenOp, PrefillOp, SavedState
from dist_attn.wire.specs import RowChoiceError, SequenceReading, choose_rows
from tests.support.closeness import assert_close

TEXT_TOKENS, DIM = 14, 16
CONFIG = TextEncoderConfig.model_validate(
    {
        "vocab_size": 257,
        "max_tokens": TEXT_TOKENS + 2,
        "prefix": [1],
        "suffix": [2],
        "normalise": True,
        "encoder": {
            "hidden_size": DIM,
            "num_layers": 2,
            "mlp_size": 24,
            "positions": "learned",
            "max_length": TEXT_TOKENS + 2,
            "block": {"norm_placement": "post"},
            "mixer": {"kind": "bidirectional", "attention": "rfa", "hidden_size": DIM, "num_heads": 2, "num_random": 8},
        },
    }
)
SPECS = [RowSpec("window", TEXT_TOKENS, "model"), RowSpec("window", 3, "model"), RowSpec("token", pooling="model")]
TOKENS = np.random.default_rng(1).integers(0, 256, 603).astype("<i4")


def small_encoder() -> TextEncoder:
    """A model whose every parameter is random and large enough to matter."""
    model, generator = build_model(CONFIG), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def wanted(model: TextEncoder, spec: RowSpec) -> torch.Tensor:
    """The rows by the plainest loop: each sequence framed and read alone."""
    rows, size = [], sequence_length(spec, TEXT_TOKENS)
    with torch.inference_mode():
        for text in torch.from_numpy(TOKENS.astype(np.int64)).split(size):
            framed = torch.cat([torch.tensor([1]), text, torch.tensor([2])])[None]
            rows.append(model.hidden(framed)[0, 1:-1] if spec.granularity == "token" else model(framed))
    return torch.cat(rows)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("ranks", [1, 3])
def test_blocks_over_ranks_give_the_rows_of_each_sequence(spec: RowSpec, ranks: int) -> None:
    """What the ranks send for blocks cut by the scheduler is put together to the rows of every sequence by itself."""
    model, grid = small_encoder(), sequence_length(spec, TEXT_TOKENS)
    executors = [SequenceExecutor(model, rank, name="small") for rank in range(ranks)]
    for executor in executors:
        executor.open(OpenOp(1, spec))
    assembler, rows, start = RowAssembler(spec, DIM), [], 0
    for stop in (10 * grid, 11 * grid, 40 * grid, len(TOKENS)):
        lengths = split(start, stop - start, ranks, grid, home=ranks - 1)
        assert sum(lengths) == stop - start
        before = start
        for rank, length in enumerate(lengths):
            op = PrefillOp(1, start, list(lengths), TOKENS[before : before + length].tobytes())
            pieces = executors[rank].prefill(op)
            before += length
            if pieces is not None:
                rows += assembler.add(pieces, len(TOKENS))
        start = stop
    rows += assembler.finish(len(TOKENS))
    got = torch.from_numpy(np.concatenate([batch.vectors for batch in rows]))
    assert_close(got, wanted(model, spec))
    guards = [executor.take_guards() for executor in executors]
    framed = len(TOKENS) + 2 * -(-len(TOKENS) // grid)
    assert sum(counts.denominators for counts in guards if counts) == 2 * 2 * framed


def test_marked_rows_over_ranks() -> None:
    """A row that ends where a token is marked is a sequence, or the mean of those that the model's length cuts it into,
    by their tokens; on any number of ranks.
    """
    model, spec, total = small_encoder(), RowSpec("sentence", pooling="model"), 100
    ends, tokens = [3, 14, 20, 50], TOKENS[:total].astype("<i4").copy()
    tokens[[end - 1 for end in ends]] = ~tokens[[end - 1 for end in ends]]
    expected = []
    with torch.inference_mode():
        for start, stop in pairwise([0, *ends, total]):
            cuts = [start, *(at for at in range(0, total, TEXT_TOKENS) if start < at < stop), stop]
            texts = [torch.from_numpy(TOKENS[a:b].astype(np.int64))[None] for a, b in pairwise(cuts)]
            expected.append(sum(model.encode(text)[0] * text.shape[1] for text in texts) / (stop - start))
    for ranks in (1, 3):
        assembler, rows, before = RowAssembler(spec, DIM), [], 0
        lengths = split(0, total, ranks, TEXT_TOKENS)
        for rank, length in enumerate(lengths):
            executor = SequenceExecutor(model, rank, name="small")
            executor.open(OpenOp(1, spec))
            pieces = executor.prefill(PrefillOp(1, 0, list(lengths), tokens[before : before + length].tobytes()))
            before += length
            rows += [] if pieces is None else assembler.add(pieces, total)
        assert np.concatenate([batch.stops for batch in rows]).tolist() == [*ends, total]
        assert_close(torch.from_numpy(np.concatenate([batch.vectors for batch in rows])), torch.stack(expected))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("spec", [*SPECS, RowSpec("sentence", pooling="model")])
def test_a_number_that_is_wrong_is_named_by_its_token(spec: RowSpec, ranks: int) -> None:
    """Where the text goes on from a saved place, in rows of whatever length, it is the token's place in the text."""
    model, wrong = small_encoder(), 200
    with torch.no_grad():
        model.embedding.weight[wrong] = torch.nan
    start, total = 42 * 8, 170
    ends = [start + at for at in (3, 14, 17, 50, 61, 64, 120, 131)]
    lengths = split(start, total, ranks, sequence_length(spec, TEXT_TOKENS))
    for at in (start, start + 15, start + 62, start + 130, start + 169):
        tokens = np.where(wrong == TOKENS, 0, TOKENS)[: start + total]
        tokens[at] = wrong
        if spec.marked:
            tokens[[end - 1 for end in ends]] = ~tokens[[end - 1 for end in ends]]
        errors, before = [], start
        for rank, length in enumerate(lengths):
            executor = SequenceExecutor(model, rank, name="small", finite=FiniteCheck(rank))
            executor.open(OpenOp(1, spec, None, SavedState(1, start, 0, 0)))
            try:
                executor.prefill(PrefillOp(1, start, list(lengths), tokens[before : before + length].tobytes()))
            except NotFiniteError as error:
                errors.append(str(error))
            before += length
        assert len(errors) == 1 and f"at token {at} " in errors[0]


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("spec", SPECS)
def test_a_file_over_ranks(spec: RowSpec, ranks: int, tmp_path: Path) -> None:
    """`encode_file` writes the same rows on any number of ranks, blocks ending where sequences do."""
    source, target = tmp_path / "text", tmp_path / "rows.npy"
    source.write_bytes(bytes(TOKENS.tolist()) * 4)
    model, lock = small_encoder(), threading.Lock()

    def body(comm: Communicator) -> object:
        with lock:
            own = small_encoder()
        return encode_file(comm, own, ByteTokeniser(), Encoding(source, target, spec))

    report = next(result for result in run_simulated(body, ranks) if result is not None)
    rows = np.load(target)
    count = len(rows[: len(wanted(model, spec)) // 2])
    assert_close(torch.from_numpy(rows[:count]), wanted(model, spec)[:count])
    assert report.rows == len(rows)  # type: ignore[attr-defined]


def test_sequences_are_never_cut() -> None:
    """Blocks end at whole sequences, short texts go to the rank of their own number, and a long sequence has room."""
    limits = Limits(ranks=2, block_tokens=512, beside_decode_tokens=256)
    stream = RequestView(1, available=1023, grid=TEXT_TOKENS, chunk=36 * TEXT_TOKENS)
    first, second = plan(SchedulerView(limits, (replace(stream, available=1020),))).blocks
    assert (first.tokens, second.tokens) == (36 * TEXT_TOKENS, 36 * TEXT_TOKENS)
    (block,) = plan(SchedulerView(limits, (replace(stream, available=1000),))).blocks
    assert block.tokens % TEXT_TOKENS == 0 and block.lengths[0] % TEXT_TOKENS == 0 and min(block.lengths) > 0
    shorts = tuple(
        RequestView(n, opened=False, available=9, final=True, grid=TEXT_TOKENS, chunk=504, home=n) for n in range(4)
    )
    assert [block.lengths for block in plan(SchedulerView(limits, shorts)).blocks] == [(9, 0), (0, 9), (9, 0), (0, 9)]
    long = RequestView(1, opened=False, available=3000, final=True, grid=4096, chunk=4096)
    assert [block.tokens for block in plan(SchedulerView(limits, (long,))).blocks] == [3000]
    waiting = RequestView(1, available=TEXT_TOKENS - 1, grid=TEXT_TOKENS, chunk=504)
    assert plan(SchedulerView(limits, (waiting,))).empty


def test_work_that_does_not_fit_is_refused() -> None:
    """Completions, blocks out of order and slices inside a sequence are errors in place of wrong rows."""
    executor = SequenceExecutor(small_encoder(), 0, name="small")
    with pytest.raises(EngineError, match="makes vectors only"):
        executor.open(OpenOp(1, None, SamplingSpec(1)))
    with pytest.raises(EngineError, match="not open"):
        executor.prefill(PrefillOp(1, 0, [3], TOKENS[:3].tobytes()))
    executor.open(OpenOp(1, SPECS[0]))
    with pytest.raises(EngineError, match="due is 0"):
        executor.prefill(PrefillOp(1, 28, [3], TOKENS[:3].tobytes()))
    executor.prefill(PrefillOp(1, 0, [3], TOKENS[:3].tobytes()))
    with pytest.raises(EngineError, match="starts at 3, inside a sequence of 14"):
        executor.prefill(PrefillOp(1, 3, [3], TOKENS[:3].tobytes()))
    with pytest.raises(EngineError, match="draws no tokens"):
        executor.decode(DecodeOp([]))
    executor.close(1)
    with pytest.raises(EngineError, match="not open"):
        executor.prefill(PrefillOp(1, 3, [3], TOKENS[:3].tobytes()))
    with pytest.raises(InputError, match="cannot be deterministic"):
        run_simulated(
            lambda comm: encode_file(
                comm, small_encoder(), ByteTokeniser(), Encoding(Path("a"), Path("b"), SPECS[0], deterministic=True)
            ),
            1,
        )


@pytest.mark.parametrize(
    ("text_tokens", "rows", "received", "message"),
    [
        (None, RowSpec(), 9, ""),
        (None, RowSpec(pooling="model"), 9, "has no pooling of its own"),
        (14, None, 9, "cannot write any"),
        (14, RowSpec("window", 14, "model"), 999, ""),
        (14, RowSpec("token"), 999, ""),
        (14, RowSpec("window", 15, "model"), 0, "a window of 15 tokens is over the 14"),
        (14, RowSpec("window", 14, "mean"), 0, "pooling must be 'model'"),
        (14, RowSpec("document", pooling="model"), 14, ""),
        (14, RowSpec("document", pooling="model"), 15, "a text of 15 tokens or more is over the 14"),
    ],
)
def test_the_controller_refuses_what_ranks_could_not_do(
    text_tokens: int | None, rows: RowSpec | None, received: int, message: str
) -> None:
    """Before a rank is given work, the model is asked whether it reads that much and pools that way."""
    model = LoadedModel("m", DIM, 257, (), text_tokens, writes=text_tokens is None)
    said = misfit(model, OpenWork("r", rows=rows, draw=None if rows else SamplingSpec(1)), received)
    assert message in said and bool(said) == bool(message)


def test_rows_that_are_left_to_the_model() -> None:
    """Without options a window is what the model reads; a language model has the defaults that it always had."""
    reading = SequenceReading(14, "first")
    assert choose_rows("window", None, None, None) == RowSpec("window", 512, "mean")
    assert choose_rows("document", 7, "last", None) == RowSpec("document", 7, "last")
    assert choose_rows("window", None, "first", reading) == RowSpec("window", 14, "model")
    with pytest.raises(RowChoiceError, match="reads 14 tokens at once"):
        choose_rows("document", None, None, reading)


@pytest.mark.parametrize("spec", [RowSpec("document", pooling="model"), RowSpec("token", pooling="model")])
@pytest.mark.parametrize("ranks", [1, 2])
def test_short_texts_are_read_together(spec: RowSpec, ranks: int) -> None:
    """The blocks of a step give the rows that each text has alone, whichever others lie on the same rank."""
    model, lengths = small_encoder(), [1, TEXT_TOKENS, 5, 5, 30, 9]
    for rank in range(ranks):
        made, alone = SequenceExecutor(model, rank, name="small"), SequenceExecutor(model, rank, name="small")
        ops = []
        for number, length in enumerate(lengths):
            own = split(0, length, ranks, TEXT_TOKENS, home=number % ranks)
            ops.append(PrefillOp(number, 0, list(own), TOKENS[number : number + own[rank]].tobytes()))
            for executor in (made, alone):
                executor.open(OpenOp(number, spec))
        made.read_ahead(ops)
        for op in ops:
            got, want = made.prefill(op), alone.prefill(op)
            assert (got is None) == (want is None) == (not op.lengths[rank])
            if got is not None and want is not None:
                assert (got.starts, got.stops) == (want.starts, want.stops)
                vectors = [torch.from_numpy(np.frombuffer(one.vectors, "<f4").copy()) for one in (got, want)]
                assert_close(vectors[0], vectors[1])


def test_a_model_that_takes_no_packed_texts_reads_each_alone(running_sum: str) -> None:
    """Short texts of a step have their rows in turn where the mixer refuses to read them together."""
    values = CONFIG.model_dump()
    values["encoder"]["mixer"] = {"kind": running_sum, "hidden_size": DIM}
    made = SequenceExecutor(build_model(TextEncoderConfig.model_validate(values)).eval(), 0, name="small")
    ops = [PrefillOp(number, 0, [5], TOKENS[number : number + 5].tobytes()) for number in range(3)]
    for op in ops:
        made.open(OpenOp(op.request, RowSpec("token", pooling="model")))
    made.read_ahead(ops)
    assert [pieces and pieces.starts for pieces in map(made.prefill, ops)] == [[0, 1, 2, 3, 4]] * 3


@pytest.mark.parametrize(("device", "tokens"), [("cpu", 6), ("meta", TEXT_TOKENS)])
def test_it_warms_up_with_texts_as_requests_bring_them(device: str, tokens: int, monkeypatch) -> None:
    """Before any request the kernels of a device see whole texts alone, side by side and packed, and then no others."""
    model = small_encoder().to(device)
    seen: list[object] = []
    monkeypatch.setattr(model, "encode", lambda text_BT: seen.append([*text_BT.shape]))
    monkeypatch.setattr(model, "hidden_together", lambda texts: seen.append([len(text_T) for text_T in texts]))
    monkeypatch.setattr("dist_attn.rank.sequence_executor.present_compute", lambda device: ON_CPU)
    monkeypatch.setattr("dist_attn.rank.sequence_executor.end_trials", lambda: ["ended"])
    made = SequenceExecutor(model, 0, name="small")
    assert seen == [[1, tokens], [2, tokens], [tokens, tokens]]
    assert made.end_trials() == ["ended"]

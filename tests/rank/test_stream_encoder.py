"""A stream encoder in the engine: rows over ranks are those of the text in one go; saved states go on bit for bit."""

import random

import numpy as np
import pytest
import torch

from dist_attn.checkpoints import load_stream_encoder
from dist_attn.comm import run_simulated
from dist_attn.comm.local import LocalCommunicator
from dist_attn.control.intake import misfit
from dist_attn.control.scheduler import split
from dist_attn.conversion import begin_stream_encoder, convert_folder, convert_sentence_encoder
from dist_attn.errors import EngineError, NotFiniteError
from dist_attn.generation import computation_of, identity_of
from dist_attn.ops import FiniteCheck
from dist_attn.rank.executor import ModelExecutor
from dist_attn.wire.manifest import Manifest
from dist_attn.wire.messages import Failed, Keep, OpenWork, RowSpec, SamplingSpec, Tokens
from dist_attn.wire.rank_messages import DecodeOp, OpenOp, PrefillOp
from tests.models.test_stream_encoder import BLOCK, DIM, GATED_DELTA, PAIR, VOCABULARY, context, small, teacher
from tests.support import simulated_engine
from tests.support.closeness import assert_close
from tests.support.over_ranks import randomised
from tests.support.sentence_encoders import VOCABULARY as WORDS
from tests.support.sentence_encoders import write_sentence_encoder
from tests.support.simulated_engine import Engine

TOKENS = np.random.default_rng(1).integers(3, VOCABULARY, 1500).astype("<i4")
ROWS = RowSpec("window", 12)  # edges of rows lie inside blocks


def executor(comm=None):
    """An executor of a small model, the same one each time."""
    return ModelExecutor(small().float(), comm or LocalCommunicator(), name="small")


def prefill(made, start, stop, ranks=1, rank=0):
    """Feed tokens [start, stop) the way a step does; the pieces of this rank's rows."""
    lengths = split(start, stop - start, ranks)
    before = start + sum(lengths[:rank])
    return made.prefill(PrefillOp(1, start, list(lengths), TOKENS[before : before + lengths[rank]].tobytes()))


@pytest.fixture(scope="module")
def wanted_LD():
    """The hidden states of the whole text."""
    with torch.inference_mode():
        return small().float().encode(torch.from_numpy(TOKENS.astype(np.int64))[None])[0]


@pytest.mark.parametrize("ranks", [1, 3])
def test_blocks_over_ranks_give_the_rows_of_the_whole_text(ranks, wanted_LD):
    """Pieces of all ranks and blocks are the sums of the hidden states of the text in one go."""

    def rank_work(comm):
        made = executor(comm)
        made.open(OpenOp(1, ROWS))
        return [prefill(made, a, b, ranks, comm.rank) for a, b in ((0, 1024), (1024, 1088), (1088, 1500))]

    pieces = [piece for results in run_simulated(rank_work, ranks) for piece in results if piece is not None]
    ranges = sorted((a, b) for piece in pieces for a, b in zip(piece.starts, piece.stops, strict=True))
    assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])] and ranges[-1][1] == len(TOKENS)
    for piece in pieces:
        vectors_ND = np.frombuffer(piece.vectors, dtype="<f4").reshape(-1, DIM)
        for start, stop, vector_D in zip(piece.starts, piece.stops, vectors_ND, strict=True):
            assert_close(torch.from_numpy(vector_D.copy()), wanted_LD[start:stop].sum(0))


@pytest.mark.parametrize("snapshot", [False, True])
def test_a_saved_state_goes_on_bit_for_bit(snapshot, tmp_path):
    """Between ranks and as a snapshot, through a model folder that was converted and written."""
    write_sentence_encoder(tmp_path / "theirs")
    convert_folder(tmp_path / "theirs", tmp_path / "minilm")
    convert_sentence_encoder(tmp_path / "minilm", tmp_path / "stream", 32, context(GATED_DELTA | {"hidden_size": 32}))

    def made():
        model = load_stream_encoder(tmp_path / "stream")
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.context.parameters():
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
        computed = computation_of(model, chunk_tokens=512, decode_slots=8, ranks=1)
        manifest = Manifest(identity_of(model, tmp_path / "stream"), computed)
        return ModelExecutor(model, LocalCommunicator(), name="stream", manifest=manifest)

    first, second = made(), made()
    assert first.loaded.vocab_size == WORDS
    first.open(OpenOp(1, ROWS))
    prefill(first, 0, 1088)
    saved, state = first.save(1, snapshot)
    assert (saved.position, saved.snapshot) == (1088, snapshot)
    second.open(OpenOp(1, ROWS, None, saved), state)
    assert prefill(second, 1088, 1500) == prefill(first, 1088, 1500)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("at", [1024, 1024 + 3 * BLOCK + 2, 1499])
def test_a_number_that_is_wrong_is_named_by_its_token(at, ranks):
    """In a block of a text that goes on from a saved state, on the rank that reads it; also without context."""
    tokens = np.where(VOCABULARY - 1 == TOKENS, 3, TOKENS).astype("<i4")
    tokens[at] = VOCABULARY - 1

    def rank_work(comm):
        model = randomised(begin_stream_encoder(teacher(), BLOCK, None)).float()
        with torch.no_grad():
            model.sentence.embedding.weight[-1] = torch.nan
        made = ModelExecutor(model, comm, name="small", finite=FiniteCheck(comm.rank))
        made.open(OpenOp(1, ROWS))
        lengths = split(0, 1024, ranks)
        before = sum(lengths[: comm.rank])
        made.prefill(PrefillOp(1, 0, list(lengths), tokens[before : before + lengths[comm.rank]].tobytes()))
        saved, state = made.save(1)
        made.open(OpenOp(2, ROWS, None, saved), state)
        lengths = split(1024, 476, ranks, home=ranks - 1)
        before = 1024 + sum(lengths[: comm.rank])
        try:
            made.prefill(PrefillOp(2, 1024, list(lengths), tokens[before : before + lengths[comm.rank]].tobytes()))
        except NotFiniteError as error:
            return str(error)
        return ""

    *others, words = run_simulated(rank_work, ranks)
    assert f"on rank {ranks - 1}: " in words and f"at token {at} " in words and not any(others)


@pytest.mark.parametrize("ranks", [1, 2])
def test_short_texts_are_read_together(ranks):
    """A step gives the rows that each text has alone; what fills a pair of blocks is left to itself."""
    lengths = [1, 5, PAIR, 5, PAIR + 3, BLOCK + 3]

    def rank_work(comm):
        found = []
        for together in (True, False):
            made, ops = executor(comm), []
            for number, length in enumerate(lengths):
                own = split(0, length, ranks, home=number % ranks)
                part = TOKENS[number : number + own[comm.rank]].tobytes()
                made.open(OpenOp(number, RowSpec("document")))
                ops.append(PrefillOp(number, 0, list(own), part))
            if together:
                made.read_ahead(ops)
                # One alone is not read before its turn.
                here = {number for number in (0, 1, 3, 5) if number % ranks == comm.rank}
                assert set(made._ahead) == (here if len(here) > 1 else set())
            found.append([made.prefill(op) for op in ops])
            made.close(0)
        return found

    for got, want in (pair for found in run_simulated(rank_work, ranks) for pair in zip(*found, strict=True)):
        assert (got is None) == (want is None)
        if got is not None:
            vectors = [torch.from_numpy(np.frombuffer(one.vectors, "<f4").copy()) for one in (got, want)]
            assert_close(*vectors)


def test_denominators_of_short_texts_are_counted():
    """Texts that are read together have the denominators that they have one by one, in the same layers and heads."""
    mixer = {"kind": "bidirectional", "hidden_size": DIM, "num_heads": 2, "attention": "rfa", "num_random": 8}
    values = teacher().config.encoder.model_dump() | {"mixer": mixer}
    model = randomised(begin_stream_encoder(teacher(encoder=values), BLOCK, context(GATED_DELTA))).float()
    counts = []
    for together in (True, False):
        made = ModelExecutor(model, LocalCommunicator(), name="small")
        made.take_guards()
        ops = [PrefillOp(number, 0, [5], TOKENS[number : number + 5].tobytes()) for number in range(3)]
        for op in ops:
            made.open(OpenOp(op.request, RowSpec("document")))
        if together:
            made.read_ahead(ops)
        for op in ops:
            made.prefill(op)
        counts.append(made.take_guards())
    assert counts[0] == counts[1] and counts[0].denominators == 3 * 7 * 2 * 2


def test_blocks_of_a_mixer_that_takes_no_packed_texts_are_read_in_turn(running_sum):
    """Texts of a step have the rows that each has alone where the sentence encoder refuses to read them together."""
    values = teacher().config.encoder.model_dump() | {"mixer": {"kind": running_sum, "hidden_size": DIM}}
    model = randomised(begin_stream_encoder(teacher(encoder=values), BLOCK, context(GATED_DELTA))).float()
    made = ModelExecutor(model, LocalCommunicator(), name="small")
    ops = [PrefillOp(number, 0, [5], TOKENS[number : number + 5].tobytes()) for number in range(3)]
    for op in ops:
        made.open(OpenOp(op.request, RowSpec("document")))
    made.read_ahead(ops)
    for op in ops:
        with torch.inference_mode():
            own_1L = torch.from_numpy(TOKENS[op.request : op.request + 5].astype(np.int64))[None]
            want_D = model.encode(own_1L)[0].sum(0)
        vectors = np.frombuffer(made.prefill(op).vectors, "<f4").copy()
        assert_close(torch.from_numpy(vectors), want_D)


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_warms_up_with_short_texts_too(ranks):
    """Before any request kernels see a short text alone and several packed, as one rank reads them, behind a block."""
    seen = []

    def rank_work(comm):
        model = small().float()
        hidden, short_hidden = model.hidden, model.short_hidden

        def noted(tokens_BL, *ops):
            seen.append((comm.rank, len(ops), [*tokens_BL.shape]))
            return hidden(tokens_BL, *ops)

        def noted_texts(texts):
            seen.append((comm.rank, "packed", [len(text_T) for text_T in texts]))
            return short_hidden(texts)

        model.hidden, model.short_hidden = noted, noted_texts
        ModelExecutor(model, comm, name="small")

    run_simulated(rank_work, ranks)
    for rank in range(ranks):
        (_, _, block), *short = (one for one in seen if one[0] == rank)
        assert block[1] % PAIR == 0
        assert short[:2] == [(rank, 0, [1, PAIR - 1]), (rank, "packed", [PAIR - 1, PAIR - 1])]


def test_a_model_that_writes_nothing_refuses_to():
    """Completions and draws are errors, as they are of a text encoder."""
    made = executor()
    assert not made.loaded.writes
    with pytest.raises(EngineError, match="makes vectors only"):
        made.open(OpenOp(1, None, SamplingSpec(1)))
    with pytest.raises(EngineError, match="draws no tokens"):
        made.decode(DecodeOp([]))


class OneRank(Engine):
    """A controller and one rank with a stream encoder, in one thread; each epoch has a model of its own."""

    pauses = 0

    def __init__(self):
        super().__init__(simulated_engine.SETTINGS.replace(ranks=1))

    def make_rank(self, epoch, rank):
        """The same model each time."""
        return executor()


def read_in_pieces(seed=None, pieces=(5, 100, 411, 30, 70, 284, 600)):
    """Rows of a text that comes in pieces, each after the last one was worked off; with a seed the rank is lost."""
    engine, chance, at = OneRank(), random.Random(seed), 0
    engine.api(OpenWork("e", rows=ROWS))
    for piece in pieces:
        engine.api(Tokens("e", at, TOKENS[at : at + piece].tobytes(), at + piece == len(TOKENS)))
        at += piece
        for _ in range(4):
            engine.turn()
            engine.work_off()
        if seed is not None and chance.random() < 0.5:
            engine.kill(0)
    engine.to_the_end(["e"])
    assert not [m for m in engine.of("e") if isinstance(m, Failed)]
    return engine.rows("e", DIM)


def test_a_slow_text_has_the_bits_of_a_quick_one(wanted_LD):
    """Whatever pieces it comes in, rows are the same to the bit."""
    starts, vectors = read_in_pieces()
    assert starts == list(range(0, len(TOKENS), 12))
    np.testing.assert_array_equal(vectors, read_in_pieces(pieces=(len(TOKENS),))[1])
    assert_close(torch.from_numpy(vectors), torch.stack([part_LD.mean(0) for part_LD in wanted_LD.split(12)]))


@pytest.mark.parametrize("seed", range(3))
def test_a_lost_rank_changes_no_row(seed):
    """The rows are those of a run that is not disturbed, to the bit."""
    np.testing.assert_array_equal(read_in_pieces(seed)[1], read_in_pieces()[1])


@pytest.mark.parametrize("asked", [{"draw": SamplingSpec(1)}, {"rows": ROWS, "keep": Keep(end=True)}])
def test_the_controller_refuses_what_needs_a_writer(asked):
    """Completions and sessions are refused in words before a rank is given them; encodings of any length are not."""
    engine = OneRank()
    engine.turn()
    model = engine.hello_of(0).model
    assert "cannot write any" in misfit(model, OpenWork("w", **asked), 3)
    assert not misfit(model, OpenWork("e", rows=RowSpec("document")), 10**9)

"""The executor: blocks on any number of ranks give what the whole text gives, and decoding keeps to its slots."""

import gc

import numpy as np
import pytest
import torch

from dist_attn.comm import run_simulated
from dist_attn.comm.local import LocalCommunicator
from dist_attn.control.scheduler import split
from dist_attn.errors import EngineError
from dist_attn.generation import StateShapes, generate
from dist_attn.model_config.figures import SLOTS, tokens_of_block
from dist_attn.models import ModelState
from dist_attn.rank.decode_slots import DecodeSlots
from dist_attn.rank.executor import ModelExecutor
from dist_attn.rank.state_bytes import read_state, write_state
from dist_attn.rank_link.rows import SCORE_ROWS, RowAssembler, score_width
from dist_attn.text import ByteTokeniser
from dist_attn.text.grammars import Grammars, written_grammar
from dist_attn.wire.messages import RowSpec, SamplingSpec
from dist_attn.wire.rank_messages import DecodeEntry, DecodeOp, Drawn, OpenOp, PrefillOp, RequestFault
from dist_attn.wire.specs import tokens_with_room
from tests.support.closeness import assert_close
from tests.support.models import small_config, small_model

GRAMMARS = Grammars(ByteTokeniser, [256])
TOKENS = np.random.default_rng(1).integers(0, 250, 3000).astype("<i4")


def executor(comm=None, kind="rfa_gate"):
    """An executor of a small model."""
    model = small_model(small_config(kind))
    made = ModelExecutor(model, comm or LocalCommunicator(), name="small", end_tokens=[256])
    made.take_grammars(GRAMMARS)
    return made


def prefill(made, request, tokens, start=0, ranks=1, rank=0, following=None):
    """Feed one block the way a step does; the pieces of this rank. `following` is the token after the block."""
    lengths = split(start, len(tokens), ranks)
    before = sum(lengths[:rank])
    own = tokens[before : before + lengths[rank]]
    after = following if before + len(own) == len(tokens) else int(tokens[before + len(own)])
    return made.prefill(PrefillOp(request, start, list(lengths), own.tobytes(), None if following is None else after))


def complete(made, requests, count):
    """Draw `count` tokens for requests {number: prompt}, side by side; the drawn ones by request."""
    drawn = {number: [] for number in requests}
    for step in range(count):
        entries = [DecodeEntry(n, int(prompt[-1]) if step == 0 else None) for n, prompt in requests.items()]
        for result in made.decode(DecodeOp(entries)):
            drawn[result.request].append(result.token)
    return drawn


@pytest.mark.parametrize("ranks", [1, 3])
def test_denominators_are_counted_once(ranks):
    """Prefill on all ranks and decoding count every token, head and layer once; empty slots do not count."""

    def rank_work(comm):
        made = executor(comm)
        assert made.take_guards() is None
        for number in (1, 2):
            made.open(OpenOp(number, None, SamplingSpec(3)))
        prefill(made, 1, TOKENS[:700], 0, ranks, comm.rank)
        prefilled = made.take_guards()
        assert made.take_guards() is None
        made.decode(DecodeOp([DecodeEntry(1, 5), DecodeEntry(2, 6)]))
        return prefilled, made.take_guards()

    counted = run_simulated(rank_work, ranks)
    heads_and_layers = 2 * 2
    assert sum(before.denominators for before, _ in counted if before) == 700 * heads_and_layers
    assert all(after.denominators == 2 * heads_and_layers for _, after in counted)
    assert [len(layer) for layer in counted[0][0].guarded] == [2, 2]


@pytest.mark.parametrize("kind", ["rfa_gate", "softmax"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_blocks_over_ranks_give_the_rows_of_the_whole_text(ranks, kind):
    """Pieces of all ranks and blocks, put together, are the sums of the hidden states of the text in one go."""
    with torch.inference_mode():
        wanted_LD = small_model(small_config(kind)).encode(torch.from_numpy(TOKENS.astype(np.int64))[None])[0]

    def rank_work(comm):
        made = executor(comm, kind)
        made.open(OpenOp(1, RowSpec("window", 500)))
        blocks = [(0, 2048), (2048, 2560), (2560, 3000)]
        return [prefill(made, 1, TOKENS[a:b], a, ranks, comm.rank) for a, b in blocks]

    pieces = [piece for results in run_simulated(rank_work, ranks) for piece in results if piece is not None]
    ranges = sorted((a, b) for piece in pieces for a, b in zip(piece.starts, piece.stops, strict=True))
    assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])]
    for piece in pieces:
        vectors_ND = np.frombuffer(piece.vectors, dtype="<f4").reshape(len(piece.starts), -1)
        for start, stop, vector_D in zip(piece.starts, piece.stops, vectors_ND, strict=True):
            assert_close(torch.from_numpy(vector_D.copy()) / (stop - start), wanted_LD[start:stop].mean(0))


PENALISED = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "repetition_penalty": 1.2, "logit_bias": {5: 1.5}}
FOLLOWING = {**PENALISED, "grammar": written_grammar("regex", "([a-f]{3}|[0-9 ]){30}")}


@pytest.mark.parametrize("kind", ["rfa_gate", "rfa", "softmax"])
@pytest.mark.parametrize(("temperature", "more"), [(0.0, {}), (0.9, {}), (0.9, PENALISED), (0.9, FOLLOWING)])
def test_a_completion_draws_what_the_model_alone_draws(kind, temperature, more):
    """Prefill in blocks, then the slots: the same tokens as `generate` on the whole prompt, penalised or not, held to a
    grammar or not.
    """
    made, sampling = executor(kind=kind), SamplingSpec(20, temperature=temperature, seed=7, **more)
    prompt = TOKENS[:600]
    made.open(OpenOp(1, None, sampling.after(prompt)))
    prefill(made, 1, prompt[:512])
    prefill(made, 1, prompt[512:-1], 512)
    assert complete(made, {1: prompt}, 20)[1] == generate(
        small_model(small_config(kind)), prompt, sampling, grammars=GRAMMARS
    )


@pytest.mark.parametrize("kind", ["rfa_gate", "softmax"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_a_prompt_is_scored_as_the_model_alone_scores_it(ranks, kind):
    """Each token's log-probability given all before it, and the likeliest tokens there, are those of one forward pass,
    over the edges of blocks and of the slices of ranks; a request that does not ask for scores gets none.
    """
    prompt, count = TOKENS[:2600], 3
    with torch.inference_mode():
        logits_LV = small_model(small_config(kind)).logits(torch.from_numpy(prompt.astype(np.int64))[None])[0]
    wanted_LV = logits_LV.double().log_softmax(1)[:-1]

    def rank_work(comm):
        made = executor(comm, kind)
        made.open(OpenOp(1, None, SamplingSpec(0, prompt_logprobs=count)))
        made.open(OpenOp(2, None, SamplingSpec(1)))
        assert prefill(made, 2, prompt[:600], 0, comm.size, comm.rank) is None
        cuts = [(0, 2048), (2048, 2568), (2568, 2599)]
        return [prefill(made, 1, prompt[a:b], a, comm.size, comm.rank, int(prompt[b])) for a, b in cuts]

    assembler, rows = RowAssembler(SCORE_ROWS, score_width(count)), []
    for pieces in [piece for of_rank in zip(*run_simulated(rank_work, ranks), strict=True) for piece in of_rank]:
        rows += [] if pieces is None else [batch.vectors for batch in assembler.add(pieces, None)]
    scores = torch.from_numpy(np.concatenate(rows))
    assert scores.shape == (2599, 7)
    targets = torch.from_numpy(prompt[1:].astype(np.int64))
    assert_close(scores[:, 0], wanted_LV.gather(1, targets[:, None])[:, 0].float())
    likely_LK = scores[:, 1:4].long()
    assert_close(scores[:, 4:], wanted_LV.gather(1, likely_LK).float())
    assert_close(scores[:, 4:], wanted_LV.topk(3).values.float())


def test_the_end_token_waits_for_the_least_number_of_tokens():
    """With `min_tokens` the end token is not drawn before so many others, however likely; `ignore_eos` changes none."""
    for least, ignore, end_at in ((0, False, 0), (6, False, 6), (6, True, 0)):
        spec = SamplingSpec(8, temperature=0.0, logit_bias={256: 100}, min_tokens=least, ignore_eos=ignore)
        made = executor()
        made.open(OpenOp(1, None, spec))
        assert complete(made, {1: TOKENS[:1]}, 8)[1].index(256) == end_at


@pytest.mark.parametrize("kind", ["rfa_gate", "softmax"])
def test_every_rank_can_own_a_session_after_prefill(kind):
    """The state after sharded blocks of a prompt is the same on all ranks, so any of them may go on with it."""

    def rank_work(comm):
        made = executor(comm, kind)
        made.open(OpenOp(1, None, SamplingSpec(8, temperature=0.0)))
        prefill(made, 1, TOKENS[:1024], 0, comm.size, comm.rank)
        prefill(made, 1, TOKENS[1024:1500], 1024, comm.size, comm.rank)
        return complete(made, {1: TOKENS[1500:1501]}, 8)[1]

    results = run_simulated(rank_work, 3)
    assert results[0] == results[1] == results[2] == executor_draws(TOKENS[:1501], 8, kind)


def test_an_encoding_keeps_each_key_once():
    """With softmax attention the ranks share the keys of a document; all of a prompt's are on every rank."""

    def rank_work(comm):
        made, held = executor(comm, "softmax"), []
        for request, asked in ((1, (RowSpec(), None)), (2, (None, SamplingSpec(8)))):
            made.open(OpenOp(request, *asked))
            prefill(made, request, TOKENS[:1536], 0, comm.size, comm.rank)
            prefill(made, request, TOKENS[1536:2500], 1536, comm.size, comm.rank)
            caches = [layer.cache for layer in made._prefilling[request].state.layers]
            held.append({cache.k_BGSK.shape[2] for cache in caches})
        return held

    encoding, prompt = zip(*run_simulated(rank_work, 3), strict=True)
    assert sum(sum(held) for held in encoding) == 2500
    assert prompt == ({2500},) * 3


def executor_draws(prompt, count, kind="rfa_gate"):
    """What one rank draws greedily after a prompt."""
    made = executor(kind=kind)
    made.open(OpenOp(1, None, SamplingSpec(count, temperature=0.0)))
    prefill(made, 1, prompt[:-1])
    return complete(made, {1: prompt}, count)[1]


def test_a_session_draws_the_same_bits_in_any_company():
    """Batches have one fixed shape: alone, among many, with others coming and going, the state is bit-equal."""
    model = small_model()

    def final_state(companions):
        slots = DecodeSlots(model)
        with torch.inference_mode():
            for n in range(companions + 1):
                _, state = model.hidden(torch.from_numpy(TOKENS[n : n + 50].astype(np.int64))[None])
                slots.take_in(n, state, SamplingSpec(40, seed=n))
            order = [*range(1, companions + 1), 0]
            tokens = []
            for step in range(12):
                entries = [DecodeEntry(n, 5 if step == 0 else None) for n in order]
                tokens += [r.token for r in slots.draw(entries) if r.request == 0]
                if step in (3, 7) and len(order) > 2:
                    slots.forget(order.pop(0))
            batch = next(b for b in slots._batches if 0 in b.requests)
            return tokens, batch.state.select(batch.requests.index(0))

    tokens, state = final_state(0)
    for companions in (1, 7, 8, 11, 20):
        others, other_state = final_state(companions)
        assert others == tokens
        for layer, other_layer in zip(state.layers, other_state.layers, strict=True):
            for tensor, other in zip(layer.tensors(), other_layer.tensors(), strict=True):
                assert torch.equal(tensor, other)


@pytest.mark.parametrize("kind", ["softmax", "hybrid"])
@torch.inference_mode()
def test_requests_of_any_lengths_share_a_batch(kind):
    """With key-value caches too: tokens and states are bit for bit those of each alone, others come and go or not, and
    saved and restored on the way.
    """
    model, lengths = small_model(small_config(kind)), [50, 0, 63, 7, 120]
    shapes = StateShapes.of(model)

    def drawn(requests):
        slots, tokens = DecodeSlots(model), {n: [] for n in requests}
        for step in range(14):
            for n in requests:
                if step == n:
                    state = model.initial_state(1)
                    if lengths[n]:
                        _, state = model.hidden(torch.from_numpy(TOKENS[None, n : n + lengths[n]].astype(np.int64)))
                    slots.take_in(n, state, SamplingSpec(40, seed=n))
                elif step == 9 and n == 2:
                    state, draws, _ = slots.state_of(n)
                    saved = write_state(state)
                    slots.forget(n)
                    slots.take_in(n, read_state(saved, shapes), SamplingSpec(40, seed=n), draws=draws)
            here = [n for n in requests if n in slots and (step, n) != (7, 4)]
            for result in slots.draw(DecodeEntry(n, tokens[n][-1] if tokens[n] else 5) for n in here):
                tokens[result.request].append(result.token)
            assert len(slots._batches) == bool(here)
        return {n: (tokens[n], write_state(slots.state_of(n)[0])) for n in requests}

    together = drawn(range(len(lengths)))
    for n in together:
        assert drawn([n])[n] == together[n]


@torch.inference_mode()
def test_a_batch_copies_no_cache():
    """Keys and values of a batch are those of its requests, and empty slots have none; what the states were before is
    what they stay, and drawing takes the room that is planned for.
    """
    model = small_model(small_config("softmax"))
    states = [model.hidden(torch.from_numpy(TOKENS[None, :n].astype(np.int64)))[1] for n in (90, 9)]
    batch = ModelState.beside(states, SLOTS)
    for index, layer in enumerate(batch.layers):
        assert all(row is state.layers[index].cache for row, state in zip(layer.caches, states, strict=False))
        assert layer.caches[2:] == (None,) * (SLOTS - 2)
    assert all(a.cache is b.cache for a, b in zip(batch.select(1).layers, states[1].layers, strict=True))
    token_B = torch.full((SLOTS,), 7)
    _, once = model.step(token_B, batch)
    (first_BV, _), (again_BV, _) = model.step(token_B, once), model.step(token_B, once)
    assert torch.equal(first_BV[:2], again_BV[:2])

    slots, shapes = DecodeSlots(model), StateShapes.of(model)
    slots.take_in(1, states[0], SamplingSpec(400, seed=1))
    for drawn in range(1, 300):
        slots.draw([DecodeEntry(1, 5)])
        caches = [layer.cache for layer in slots.state_of(1)[0].layers]
        held = sum(t.untyped_storage().nbytes() for cache in caches for t in (cache.k_BGSK, cache.v_BGSV))
        assert held <= shapes.token_bytes * tokens_with_room(90 + drawn)


def test_sessions_that_rest_do_not_move():
    """A request that is not in a step keeps its state, though others of its batch go on."""
    made = executor()
    alone = dict.fromkeys((1, 2))
    for n in alone:
        made.open(OpenOp(n, None, SamplingSpec(9, temperature=0.0)))
        prefill(made, n, TOKENS[n * 100 : n * 100 + 40])
        alone[n] = executor_draws(np.append(TOKENS[n * 100 : n * 100 + 40], TOKENS[n]), 6)
    drawn = complete(made, {n: TOKENS[n : n + 1] for n in alone}, 2)
    for _ in range(4):
        drawn[1] += [result.token for result in made.decode(DecodeOp([DecodeEntry(1)]))]
    for _ in range(4):
        drawn[2] += [result.token for result in made.decode(DecodeOp([DecodeEntry(2)]))]
    assert drawn == alone


def test_a_broken_session_fails_alone():
    """Logits that allow no draw end their request; the others of the batch draw on."""
    made = executor()
    for n in (1, 2):
        made.open(OpenOp(n, None, SamplingSpec(9, temperature=0.0)))
        prefill(made, n, TOKENS[:40])
    state = made._prefilling[1].state
    broken = tuple(layer.replace(tuple(t * float("nan") for t in layer.tensors())) for layer in state.layers)
    made._prefilling[1].state = ModelState(broken, state.position_B)
    results = made.decode(DecodeOp([DecodeEntry(1, 3), DecodeEntry(2, 3)]))
    assert [type(result) for result in results] == [RequestFault, Drawn]
    assert results[1].token == executor_draws(np.append(TOKENS[:40], np.int32(3)), 1)[0]


def test_closing_drops_the_state():
    """Nothing of a closed request stays, whether it was prefilling or decoding; unknown ones are ignored."""
    made = executor()
    gc.collect()
    before = sum(type(thing) is ModelState for thing in gc.get_objects())
    for n in range(SLOTS + 2):
        made.open(OpenOp(n, None, SamplingSpec(9)))
        prefill(made, n, TOKENS[:40])
    made.decode(DecodeOp([DecodeEntry(n, 1) for n in range(SLOTS)]))
    for n in range(SLOTS + 5):
        made.close(n)
    gc.collect()
    assert sum(type(thing) is ModelState for thing in gc.get_objects()) == before


def test_work_out_of_order_is_refused():
    """A block that does not follow, or a request that is not open, is an error instead of a wrong result."""
    made = executor()
    made.open(OpenOp(1, RowSpec()))
    with pytest.raises(EngineError, match="due is 0"):
        prefill(made, 1, TOKENS[:10], 512)
    with pytest.raises(EngineError, match="not open"):
        prefill(made, 2, TOKENS[:10])
    with pytest.raises(EngineError, match="cannot decode"):
        made.decode(DecodeOp([DecodeEntry(1, 3)]))


@pytest.mark.parametrize(
    ("device", "positions", "tokens"),
    [("cpu", None, 8), ("meta", None, tokens_of_block("meta", writes=True)), ("meta", 300, 300)],
)
def test_it_warms_up_with_a_block_on_a_device(device, positions, tokens, monkeypatch):
    """Before any request the kernels of a device see as many tokens as a block has, or as the model has positions."""

    def hidden(tokens_BL, *_):
        raise InterruptedError(f"{tokens_BL.shape[1]} tokens")

    model = small_model(small_config("gated_delta")).to(device)
    monkeypatch.setattr(type(model), "learned_positions", positions)
    monkeypatch.setattr(model, "hidden", hidden)
    with pytest.raises(InterruptedError, match=f"^{tokens} tokens$"):
        ModelExecutor(model, LocalCommunicator(), name="small")


def test_it_warms_up_with_a_token_of_a_text_that_it_writes(monkeypatch):
    """The kernels of a decode step are compiled and tried before any request too."""
    model, fed = small_model(small_config("rfa_gate")), []
    step = model.step
    monkeypatch.setattr(model, "step", lambda token_B, state: fed.append(len(token_B)) or step(token_B, state))
    ModelExecutor(model, LocalCommunicator(), name="small")
    assert fed == [1]

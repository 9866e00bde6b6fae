"""Models of transformers over ranks: loss and every gradient are those of one process."""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, BertConfig, BertLMHeadModel

from dist_attn import context_parallel, costs
from dist_attn.adapters.binding import _FUNCTIONS
from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import ConfigError, InputError, MismatchError
from tests.support.foreign_models import TYPES, VOCABULARY, auto_class

LENGTHS = (17, 0, 44)
TOTAL, STARTS = sum(LENGTHS), (0, 20, 33)
TOLERANCE = 1e-4  # of a gradient's largest number; decays of delta rules are sums over all tokens that nearly cancel
FAST = ("qwen3_next", "mamba2", "gemma3_text")
KINDS = [pytest.param(kind, marks=() if kind in FAST else pytest.mark.slow) for kind in TYPES]

Gradients = dict[str, Tensor]
Prepare = Callable[[Any], object]


def made(kind: str, *, seed: int = 3, **options: Any) -> Any:
    """transformers' own model of this type with random weights, the same in every call."""
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](**TYPES[kind] | options)
    return auto_class(config).from_config(config, attn_implementation="eager").train()


def ids(rows: int = 1) -> Tensor:
    """Tokens [B, L]."""
    return torch.randint(3, VOCABULARY, (rows, TOTAL), generator=torch.Generator().manual_seed(1))


def gradients(model: Any) -> Gradients:
    """The gradient of every parameter, zeros where it has none."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}


def over_ranks(
    kind: str,
    batches: Sequence[Mapping[str, Any]],
    prepare: Prepare = lambda _: None,
    lengths: tuple[int, ...] = LENGTHS,
    **options: Any,
) -> tuple[float, Gradients]:
    """The sum of the losses of these batches, and the ranks' gradients added up."""
    models = [made(kind, **options) for _ in lengths]

    def on_rank(comm: Communicator) -> tuple[float, Gradients]:
        model = models[comm.rank]
        prepare(model)
        parallel = context_parallel(model, comm)
        loss = torch.stack([model(**parallel.shard(batch, lengths)).loss for batch in batches]).sum()
        loss.backward()
        return loss.item(), gradients(model)

    ranks = run_simulated(on_rank, len(lengths), timeout_s=60.0)
    assert len({loss for loss, _ in ranks}) == 1  # every rank knows the loss of all
    return ranks[0][0], {name: torch.stack([g[name] for _, g in ranks]).sum(0) for name in ranks[0][1]}


def errors(got: Gradients, want: Gradients) -> dict[str, float]:
    """The largest difference of each gradient, relative to its largest number."""
    return {n: float((got[n] - g).abs().max() / (g.abs().max() + 1e-4)) for n, g in want.items()}


def assert_same(got: tuple[float, Gradients], want: tuple[float, Gradients]) -> None:
    """Losses and all gradients agree."""
    assert got[0] == pytest.approx(want[0], rel=1e-5)
    assert not {n: e for n, e in errors(got[1], want[1]).items() if not e < TOLERANCE}


@cache
def alone(kind: str, prepare: Prepare = lambda _: None, **options: Any) -> tuple[float, Gradients]:
    """The loss and gradients of one process of transformers."""
    model = made(kind, **options)
    prepare(model)
    loss = model(input_ids=ids(), labels=ids(), use_cache=False).loss
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize("kind", KINDS)
def test_uneven_and_empty_slices(kind: str) -> None:
    """A text that is cut unevenly over three ranks, one of them empty, gives what one process of transformers gives."""
    assert_same(over_ranks(kind, [{"input_ids": ids(), "labels": ids()}]), alone(kind))


def computed_again(model: Any) -> None:
    """Let layers be computed again in the backward pass."""
    model.activation_checkpointing_enable({"use_reentrant": False})


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_activations(kind: str) -> None:
    """Layers that are computed again in the backward pass find the ranks and their states again."""
    assert_same(over_ranks(kind, [{"input_ids": ids(), "labels": ids()}], computed_again), alone(kind))


@pytest.mark.parametrize("kind", ["mamba2", "qwen3_next"])
def test_bytes_between_ranks(kind: str) -> None:
    """A step sends edges of convolutions, states in turn, heads and a loss, to the byte; backward the same turned."""
    lengths = (31, 30)
    models = [made(kind) for _ in lengths]

    def step(comm: Communicator) -> list[Counter[str]]:
        parallel, sent = context_parallel(models[comm.rank], comm), [Counter[str](), Counter[str]()]
        loss = models[comm.rank](**parallel.shard({"input_ids": ids(), "labels": ids()}, lengths)).loss
        for counts in sent:
            for event in comm.traffic.events:
                counts[event.label.split()[0]] += event.bytes_sent
            comm.traffic.clear()
            if counts is sent[0]:
                loss.backward()
        return sent

    heads, size, layers = {"mamba2": (8, (16, 8), 3), "qwen3_next": (4, (16, 16), 2)}[kind]
    state, halo = costs.ScanMessage(heads, size[0] * size[1], heads=heads), layers * costs.halo_bytes(1, 128, 4, 2)
    # At each of 2 key heads 2 queries, a key and a value of 8 numbers; back as many outputs as queries.
    heads_of = {rank: costs.reshuffle_bytes(lengths, 2, 4 * (16 + 8 + 8), rank) for rank in (0, 1)}
    back_of = {rank: costs.reshuffle_back_bytes(lengths, 2, 4 * 16, rank) for rank in (0, 1)}
    for rank, (forward, backward) in enumerate(run_simulated(step, 2, timeout_s=60.0)):
        carry = layers * costs.scan_cost("in_turn", state, 2, rank).bytes_sent
        # Backward the first rank is the last, and what all were given is summed up at its source.
        carry_back = layers * (rank + 1) * state.state_bytes
        attention = heads_of[rank] + back_of[rank] if kind == "qwen3_next" else 0
        attention_back = heads_of[1 - rank] + back_of[1 - rank] if kind == "qwen3_next" else 0
        want = {"halo": halo, "carry": carry, "heads": attention, "loss": 4}
        assert {name: forward[name] for name in want} == want
        assert backward == Counter({"halo": halo, "carry": carry_back, "heads": attention_back})


def packed() -> dict[str, Tensor]:
    """Documents in one row, as transformers' collator without padding writes them."""
    labels, edges = ids(), (*STARTS, TOTAL)
    labels[0, list(STARTS[1:])] = -100
    positions_L = torch.cat([torch.arange(stop - start) for start, stop in pairwise(edges)])
    return {"input_ids": ids(), "labels": labels, "position_ids": positions_L[None]}


def one_by_one(kind: str) -> tuple[float, Gradients]:
    """The loss and gradients of one process of transformers on each of the packed documents by itself."""
    model, parts = made(kind), [ids()[:, a:b] for a, b in pairwise((*STARTS, TOTAL))]
    losses = [model(input_ids=x, labels=x, use_cache=False).loss * (x.shape[1] - 1) for x in parts]
    loss = torch.stack(losses).sum() / (TOTAL - len(STARTS))
    loss.backward()
    return loss.item(), gradients(model)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents(kind: str) -> None:
    """Documents in one row, over cuts and inside slices, give what they give one by one."""
    assert_same(over_ranks(kind, [packed()]), one_by_one(kind))


def of_the_middle_document(kind: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Absolute gradients of the second document's loss with respect to its own tokens, and to those of others."""
    models, batch = [made(kind).to(dtype) for _ in LENGTHS], packed()
    embeds_BLD = models[0].get_input_embeddings()(batch.pop("input_ids")).detach()
    batch["labels"][:, : STARTS[1]] = batch["labels"][:, STARTS[2] :] = -100

    def on_rank(comm: Communicator) -> Tensor:
        mine = embeds_BLD.clone().requires_grad_()
        parallel = context_parallel(models[comm.rank], comm)
        models[comm.rank](**parallel.shard({"inputs_embeds": mine, **batch}, LENGTHS)).loss.backward()
        assert mine.grad is not None
        return mine.grad

    by_token_L = torch.stack(run_simulated(on_rank, len(LENGTHS), timeout_s=60.0)).sum(0).abs().sum((0, 2))
    own = slice(STARTS[1], STARTS[2] - 1)
    return by_token_L[own], torch.cat([by_token_L[: own.start], by_token_L[own.stop :]])


@pytest.mark.parametrize("kind", KINDS)
def test_documents_do_not_touch(kind: str) -> None:
    """The gradient of a document's loss with respect to the tokens of every other one is exactly 0."""
    own_L, others_L = of_the_middle_document(kind)
    assert bool((own_L > 0).all())
    assert not others_L.any()


MIDDLE = 40


def labels_of_segments() -> Tensor:
    """The tokens without what the last one of the first segment would be followed by."""
    labels = ids()
    labels[0, MIDDLE] = -100
    return labels


def unsegmented(kind: str) -> tuple[float, Gradients]:
    """The loss and gradients of one process of transformers on both segments as one text."""
    model = made(kind)
    loss = model(input_ids=ids(), labels=labels_of_segments(), use_cache=False).loss
    loss.backward()
    return loss.item(), gradients(model)


def in_segments(kind: str, detach: bool) -> tuple[float, Gradients]:
    """The loss of two segments, the second from the state of the first, and the gradients of two ranks added up."""
    models, labels = [made(kind) for _ in range(2)], labels_of_segments()

    def on_rank(comm: Communicator) -> tuple[float, Gradients]:
        parallel = context_parallel(models[comm.rank], comm)
        with parallel.carry(detach=detach):
            parts = [slice(0, MIDDLE), slice(MIDDLE, TOTAL)]
            batches = [
                {"input_ids": ids()[:, p], "labels": labels[:, p], "num_items_in_batch": TOTAL - 2} for p in parts
            ]
            loss = torch.stack([models[comm.rank](**parallel.shard(batch)).loss for batch in batches]).sum()
        loss.backward()
        return loss.item(), gradients(models[comm.rank])

    (loss, first), (_, second) = run_simulated(on_rank, 2, timeout_s=60.0)
    return loss, {name: first[name] + second[name] for name in first}


@pytest.mark.parametrize("kind", ["qwen3_next", "mamba2", "falcon_h1", "recurrent_gemma", "xlstm", "mistral"])
def test_a_text_in_segments(kind: str) -> None:
    """Segments that go on from each other's states, gradients included, are one text; detached, the loss is."""
    want = unsegmented(kind)
    assert_same(in_segments(kind, detach=False), want)
    assert in_segments(kind, detach=True)[0] == pytest.approx(want[0], rel=1e-5)


@pytest.mark.parametrize("kind", ["qwen3_next", "jamba"])
def test_experts_are_balanced_over_the_whole_text(kind: str) -> None:
    """The router's loss counts the tokens of all ranks."""
    options = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    model = made(kind, **options)
    out = model(input_ids=ids(), labels=ids(), use_cache=False)
    out.loss.backward()
    assert_same(
        over_ranks(kind, [{"input_ids": ids(), "labels": ids()}], **options), (out.loss.item(), gradients(model))
    )


def test_rows_of_other_lengths() -> None:
    """Rows that are padded on the right, with a mask, give what one process of transformers gives."""
    mask_BL = torch.ones(2, TOTAL, dtype=torch.int64)
    mask_BL[1, 40:] = 0
    labels = ids(2).masked_fill(mask_BL == 0, -100)
    batch = {"input_ids": ids(2), "labels": labels, "attention_mask": mask_BL}
    for kind in ("qwen3_next", "llama"):
        model = made(kind)
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        assert_same(over_ranks(kind, [batch]), (loss.item(), gradients(model)))


def in_bfloat16(model: Any) -> None:
    """Let weights and activations be of 16 bits."""
    model.bfloat16()


def flat(steps: Iterable[tuple[float, Gradients]]) -> Tensor:
    """All gradients of these steps in one tensor."""
    return torch.cat([grad.float().flatten() for _, gradients in steps for grad in gradients.values()])


def of_rounding(kind: str) -> tuple[float, float, float]:
    """How far gradients in bfloat16 are apart: ours from transformers', ours and transformers' from those in float32.

    Each is the norm of the difference of all gradients of three models, relative to that of these gradients.
    """
    seeds, text = (3, 4, 5), [{"input_ids": ids(), "labels": ids()}]
    exact, theirs = flat(alone(kind, seed=n) for n in seeds), flat(alone(kind, in_bfloat16, seed=n) for n in seeds)
    ours = flat(over_ranks(kind, text, in_bfloat16, seed=n) for n in seeds)
    pairs = [(ours, theirs), (ours, exact), (theirs, exact)]
    ours_theirs, ours_exact, theirs_exact = (float((got - want).norm() / want.norm()) for got, want in pairs)
    return ours_theirs, ours_exact, theirs_exact


@pytest.mark.parametrize("kind", FAST)
def test_weights_in_bfloat16(kind: str) -> None:
    """Gradients in bfloat16 are about as far from float32 as transformers', and no document touches another one."""
    apart, ours, theirs = of_rounding(kind)
    assert ours < 1.2 * theirs
    assert apart < ours + theirs
    assert not of_the_middle_document(kind, torch.bfloat16)[1].any()


@pytest.mark.parametrize("kind", ["qwen3_next", "llama", "mamba2"])
def test_under_autocast(kind: str) -> None:
    """Under autocast the loss over ranks is that of one process to rounding, and gradients are finite."""
    model = made(kind)
    with torch.autocast("cpu", torch.bfloat16):
        want = model(input_ids=ids(), labels=ids(), use_cache=False).loss.item()
    models = [made(kind) for _ in LENGTHS]

    def on_rank(comm: Communicator) -> float:
        parallel = context_parallel(models[comm.rank], comm)
        with torch.autocast("cpu", torch.bfloat16):
            loss = models[comm.rank](**parallel.shard({"input_ids": ids(), "labels": ids()}, LENGTHS)).loss
        loss.backward()
        assert all(bool(g.isfinite().all()) for g in gradients(models[comm.rank]).values())
        return loss.item()

    assert run_simulated(on_rank, len(LENGTHS), timeout_s=60.0) == pytest.approx([want] * 3, rel=2e-3)


def test_ranks_with_other_batches_are_found_out() -> None:
    """Ranks that were given other texts, as by a sampler that deals them out, are told in the first call."""

    def on_rank(comm: Communicator) -> None:
        context_parallel(made("llama"), comm).shard({"input_ids": ids() + comm.rank})

    with pytest.raises(MismatchError, match="batch of the first call"):
        run_simulated(on_rank, 2)


def test_gradients_that_are_averaged() -> None:
    """For wrappers that average over ranks each rank's gradient is so many times its share; the loss stays."""
    models = [made("llama") for _ in range(2)]

    def on_rank(comm: Communicator) -> tuple[float, Gradients]:
        parallel = context_parallel(models[comm.rank], comm, reduction="mean")
        out = models[comm.rank](**parallel.shard({"input_ids": ids(), "labels": ids()}))
        out.loss.backward()
        return out.loss.item(), gradients(models[comm.rank])

    (loss, first), (_, second) = run_simulated(on_rank, 2, timeout_s=60.0)
    assert_same((loss, {n: (first[n] + second[n]) / 2 for n in first}), alone("llama"))


@pytest.mark.parametrize("kind", ["qwen3_next", "falcon_h1", "xlstm", "recurrent_gemma"])
def test_the_model_stays_itself(kind: str, tmp_path: Any) -> None:
    """Logits, generated text, names and saved files are the model's own beside training and once it is given back."""
    model = made(kind).eval()
    names, text = list(model.state_dict()), {"max_new_tokens": 5, "do_sample": False}
    experts = model.get_experts_implementation()
    want, logits = model.generate(ids()[:, :9], **text), model(ids()).logits
    model.save_pretrained(tmp_path / "before")

    def on_rank(comm: Communicator) -> None:
        parallel = context_parallel(model.train(), comm)
        model(**parallel.shard({"input_ids": ids(), "labels": ids()})).loss.backward()
        model.eval()
        assert torch.equal(model.generate(ids()[:, :9], **text), want)
        assert list(model.state_dict()) == names
        model.save_pretrained(tmp_path / "after")
        parallel.release()
        assert model.get_experts_implementation() == experts
        torch.testing.assert_close(model(ids()).logits, logits, rtol=0, atol=0)
        assert model(input_ids=ids(), labels=ids()).loss.item() == pytest.approx(alone(kind)[0])

    run_simulated(on_rank, 1)
    before, after = ((tmp_path / name / "config.json").read_text() for name in ("before", "after"))
    assert before == after


@pytest.mark.parametrize("kind", ["mamba", "mamba2", "falcon_h1"])
def test_fused_functions_do_not_go_round_the_ranks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where mamba_ssm is installed, training asks a convolution and scan in one first; over ranks it has no answer."""
    want, model = alone(kind), made(kind)
    for file in {sys.modules[type(module).__module__] for module in model.modules()}:
        for name in ("mamba2_split_conv1d_scan_combined", "mamba_inner_fn"):
            if hasattr(file, name):
                monkeypatch.setattr(file, name, lambda *_, **__: torch.zeros(()))
    assert_same(over_ranks(kind, [{"input_ids": ids(), "labels": ids()}]), want)


PIECES = {  # of decode steps with transformers' own cache, which no pass has, or called by what is bound
    "causal_conv1d_update", "mamba2_selective_state_update", "mamba_selective_state_update",
    "recurrent_kimi_delta_attention", "torch_recurrent_gated_delta_rule",
}  # fmt: skip


@pytest.mark.parametrize("kind", TYPES)
def test_every_function_of_a_hub_is_bound_or_known(kind: str) -> None:
    """What transformers may take from another package in the place of its own is bound, or never called in a pass."""
    file = Path(sys.modules[type(made(kind)).__module__].__file__)
    found = set(re.findall(r"@use_kernel_func_from_hub\w*\(.*?\)\n(?:@.*\n)*def (\w+)", file.read_text()))
    assert found <= {*_FUNCTIONS, *PIECES}


MASK = torch.ones(1, TOTAL, dtype=torch.int64)
MASK[0, :3] = 0


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        ({"token_type_ids": ids()}, "the batch has token_type_ids"),
        ({"attention_mask": MASK}, "pad on the right"),
        ({"position_ids": torch.arange(TOTAL)[None] + 1}, "count up from 0"),
        ({"position_ids": torch.zeros(3, 1, TOTAL)}, r"position_ids has shape \[3, 1, 61\]"),
        ({"cu_seq_lens_q": torch.tensor([0, 50])}, "must begin at 0, never fall and end at 61"),
        ({"cu_seq_lens_q": torch.tensor([0, 30, 20, 61])}, "never fall"),
    ],
)
def test_what_cannot_be_cut_is_refused(batch: dict[str, Tensor], words: str) -> None:
    """A batch that would come out wrong is refused by the name of what is wrong, before any exchange."""

    def on_rank(comm: Communicator) -> None:
        with pytest.raises(InputError, match=words):
            context_parallel(made("llama"), comm).shard({"input_ids": ids()} | batch)

    run_simulated(on_rank, 1)


def test_models_that_cannot_be_bound_are_refused() -> None:
    """A type that is not supported, dropout in attention, and a call without a part are refused in words."""

    def on_rank(comm: Communicator) -> None:
        with pytest.raises(ConfigError, match="type 'bert'"):
            context_parallel(BertLMHeadModel(BertConfig(num_hidden_layers=1, is_decoder=True)), comm)
        with pytest.raises(ConfigError, match=r"attention_dropout is 0\.1"):
            context_parallel(made("llama", attention_dropout=0.1), comm)
        rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
        with pytest.raises(ConfigError, match="dynamic"):
            context_parallel(made("llama", rope_parameters=rope), comm)
        model = made("llama")
        parallel = context_parallel(model, comm)
        with pytest.raises(InputError, match="shard"):
            model(input_ids=ids(), labels=ids())
        with pytest.raises(InputError, match="with logits_to_keep beside"):
            model(**parallel.shard({"input_ids": ids()}), logits_to_keep=5)
        with pytest.raises(ConfigError, match="release"):
            context_parallel(model, comm)
        with parallel.carry(detach=False), pytest.raises(InputError, match="carry"):
            parallel.shard({"input_ids": ids(), "position_ids": torch.arange(TOTAL)[None]})
        model.activation_checkpointing_enable({"use_reentrant": True})
        with parallel.carry(detach=False), pytest.raises(ConfigError, match="use_reentrant=False"):
            model(**parallel.shard({"input_ids": ids()}))
        model.get_submodule("model.layers.0").compile(backend="eager")
        with pytest.raises(ConfigError, match="compiled and computed again"):
            model(**parallel.shard({"input_ids": ids()}))
        experts = context_parallel(made("qwen3_next", output_router_logits=True), comm)
        with pytest.raises(InputError, match="balance of experts"):
            experts.shard({"input_ids": ids(), "attention_mask": MASK.flip(1)})
        with pytest.raises(ConfigError, match="type str was given"):
            context_parallel(made("llama"), "gloo")

    run_simulated(on_rank, 1)

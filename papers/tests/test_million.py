"""The million-scale model: over ranks as on one, what it keeps and drops, how its gates learn, what it refuses."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from dist_attn.checkpoints import load_any_model, load_model, save_model
from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import InputError, ModelFolderError, TokenError
from dist_attn.generation import generate
from dist_attn.layout import SequenceLayout
from dist_attn.models import build_model
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.wire.messages import SamplingSpec
from dist_attn_papers.million.config import MillionConfig, RouterConfig
from dist_attn_papers.million.experts import Expert, ExpertLayer, uniform_at
from dist_attn_papers.million.model import MillionModel
from tests.support.closeness import assert_close
from tests.support.over_ranks import assert_ranks_change_nothing, randomised

VOCAB, SIZE, TOTAL = 40, 6, 13
SMALL: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": SIZE, "num_heads": 2, "mlp_size": 8, "num_classes": 3}
EXPERTS = {"num_experts": 3, "capacity_factor": 0.7, "balance_weight": 0.5}
# Every gate, one and two choices, one and two layers, either pooling, with and without what is optional.
CASES: dict[str, dict[str, Any]] = {
    "straight_through": {"selector": {"gate": "straight_through"}, "router": EXPERTS, "num_layers": 2},
    "soft": {"selector": {"gate": "soft", "hidden_size": 4}, "router": {**EXPERTS, "choices": 2}, "pooling": "all"},
    "gumbel": {"selector": {"gate": "gumbel"}, "router": EXPERTS, "context": 3, "pooling": "all"},
    "hard_concrete": {"selector": {"gate": "hard_concrete", "temperature": 0.7}, "router": {**EXPERTS, "choices": 2}},
    "top_k": {
        "selector": {"gate": "top_k", "rate": 0.4},
        "router": EXPERTS,
        "pooling": "all",
        "upsampling": {"kind": "knn", "neighbours": 2},
    },
    "limited": {
        "selector": {"gate": "soft", "most_tokens": 4},
        "router": {**EXPERTS, "num_experts": 2, "most_tokens": 2},
        "positions": "none",
        "global_mixing": False,
    },
}
LAYOUTS = {2: (5, 8), 3: (9, 0, 4), 4: (0, 12, 1, 0)}


def _model(training: bool = True, **changes: Any) -> MillionModel:
    model = randomised(build_model(MillionConfig.model_validate({**SMALL, **changes})))
    with torch.no_grad():
        for layer in model.layers:
            layer.router_norm.bias.zero_()  # or one expert would be chosen by all tokens
    return model.train(training)


def _tokens(batch: int = 2, length: int = TOTAL) -> Tensor:
    """Different tokens in a row: no two scores are equal."""
    generator = torch.Generator().manual_seed(4)
    return torch.stack([torch.randperm(VOCAB, generator=generator)[:length] for _ in range(batch)])


def _loss(model: MillionModel, comm: Communicator | None, lengths: tuple[int, ...]) -> Tensor:
    """The whole loss of two sequences, or this rank's share of it."""
    layout = SequenceLayout.from_lengths(lengths)
    own = slice(None) if comm is None else slice(*layout.range(comm.rank))
    ops = LocalSequenceOps() if comm is None else ShardedSequenceOps(comm, layout)
    readings = [model.read(tokens[own], ops, draw) for draw, tokens in enumerate(_tokens())]
    logits = torch.stack([model.classify(reading, ops) for reading in readings])
    loss = F.cross_entropy(logits, torch.tensor([0, 2])) + sum(model.side_loss(reading) for reading in readings)
    return loss / (1 if comm is None else comm.size)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_over_ranks_as_on_one(case: str, ranks: int) -> None:
    """Loss and gradients of every parameter are those of one process, with uneven and empty slices."""
    lengths = LAYOUTS[ranks]
    assert_ranks_change_nothing(
        lambda: _model(**CASES[case]), lambda model, comm: _loss(model, comm, lengths), len(lengths)
    )
    assert sum(lengths) == TOTAL


def _encoded(comm: Communicator) -> tuple[Tensor, Tensor]:
    layout = SequenceLayout.from_lengths((9, 0, 4))
    model = _model(training=False, **CASES["soft"])
    own = _tokens()[:, slice(*layout.range(comm.rank))]
    with torch.no_grad():
        ops = ShardedSequenceOps(comm, layout)
        return model.hidden(own, ops), model.vectors(own, ops)


def test_encodings_over_ranks_are_those_of_one() -> None:
    """Vectors of all positions and of whole sequences are those of one process."""
    model = _model(training=False, **CASES["soft"])
    ranks = run_simulated(_encoded, 3)
    assert_close(torch.cat([hidden for hidden, _ in ranks], dim=1), model.hidden(_tokens()))
    for _, vectors in ranks:
        assert_close(vectors, model.vectors(_tokens()))


def test_what_a_rank_does_stays_as_ranks_and_length_grow() -> None:
    """With an expert and equally many tokens for each rank, kept tokens, rows of experts and bytes sent are bounded."""
    each, rows = 32, 8  # tokens of a rank, and those of them that are kept

    def run(comm: Communicator) -> tuple[int, int, int]:
        experts = {"num_experts": comm.size, "capacity_factor": 1.25}
        model = _model(selector={"gate": "top_k", "rate": rows / each}, router=experts, vocab_size=200)
        layout = SequenceLayout.even(each * comm.size, comm.size)
        tokens = torch.randperm(200, generator=torch.Generator().manual_seed(0))[: layout.total]
        ops = ShardedSequenceOps(comm, layout)
        comm.traffic.clear()
        reading = model.read(tokens[slice(*layout.range(comm.rank))], ops)
        sent = sum(e.bytes_sent for e in comm.traffic.events if e.label.startswith(("to experts", "from experts")))
        return len(reading.z_ND), model.layers[0].capacity(reading.tally.kept), sent

    for ranks in (1, 2, 4):
        for kept, capacity, sent in run_simulated(run, ranks):
            assert kept == rows and capacity == 10
            # There at most the rank's own rows with their weights, back at most what an expert has room for.
            assert sent <= 8 * (rows * (SIZE + 1) + capacity * SIZE)


@pytest.mark.parametrize("case", CASES)
def test_a_sequence_does_not_depend_on_its_batch(case: str) -> None:
    """Logits of a batch are those of each sequence alone, at test and with the noise of training."""
    for training in (False, True):
        model = _model(training, **CASES[case])
        together = model(_tokens(3), draws=[7, 8, 9])
        alone = [model(row[None], draws=[7 + n]) for n, row in enumerate(_tokens(3))]
        assert_close(together, torch.cat(alone), kind="exact")


def test_gradients_are_those_of_the_loss() -> None:
    """Where gates are soft the loss is smooth, and its gradients are those of finite differences."""
    model = _model(**{**CASES["soft"], "router": {**EXPERTS, "num_experts": 1}})
    names = [name for name, _ in model.named_parameters() if "score" in name or "qkv" in name or "context" in name]

    def loss(*values: Tensor) -> Tensor:
        parameters = dict(zip(names, values, strict=True))
        reading = torch.func.functional_call(_Readers(model), {f"model.{n}": v for n, v in parameters.items()}, ())
        return reading

    leaves = [dict(model.named_parameters())[name].detach().clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(loss, leaves, fast_mode=True)


class _Readers(torch.nn.Module):
    """A model's loss as a module, whose parameters can be exchanged."""

    def __init__(self, model: MillionModel) -> None:
        super().__init__()
        self.model = model

    def forward(self) -> Tensor:
        return _loss(self.model, None, (TOTAL,))


def test_an_expert_attends_by_weights() -> None:
    """An expert's attention is a softmax over scores plus the logarithms of weights, written out."""
    expert = randomised(Expert(SIZE, 2, 8))
    x = torch.randn(5, SIZE, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    weight = torch.tensor([1.0, 0.5, 1e-3, 0.9, 0.2], dtype=torch.float64)
    q, k, v = expert.qkv(expert.norm(x)).chunk(3, dim=-1)
    heads = []
    for own in (slice(0, 3), slice(3, 6)):
        scores = q[:, own] @ k[:, own].T / 3**0.5 + weight.log()
        heads.append(torch.softmax(scores, dim=-1) @ v[:, own])
    mixed = expert.out(torch.cat(heads, dim=-1))
    inner = F.gelu(expert.mlp_in(expert.mlp_norm(x + mixed)), approximate="tanh")
    assert_close(expert(x, weight), mixed + expert.mlp_out(inner))


def test_an_expert_over_capacity_leaves_tokens_as_they_are() -> None:
    """Tokens that find no room go on unchanged and are counted; with room for all, none does."""
    x = torch.randn(9, SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    changed = {}
    for factor in (1.0, 4.0):
        layer = randomised(ExpertLayer(RouterConfig(num_experts=4, capacity_factor=factor), SIZE, 2, 8))
        z, _, dropped = layer(x, torch.ones(9, dtype=torch.float64), LocalSequenceOps())
        changed[factor] = int((z != x).any(dim=1).sum())
        assert dropped == 9 - changed[factor]
    assert changed[1.0] < changed[4.0] == 9


@pytest.mark.parametrize("gate", ["straight_through", "soft", "gumbel", "hard_concrete"])
def test_a_threshold_that_drops_everything_keeps_the_best_token(gate: str) -> None:
    """At test a threshold above every score keeps one token, the one with the highest score."""
    model = _model(training=False, selector={"gate": gate, "threshold": 1 - 1e-12})
    (tokens,) = _tokens(1)
    reading = model.read(tokens, LocalSequenceOps())
    scores = model.selector(model.embedding(tokens), torch.arange(TOTAL), TOTAL, 0).score_L
    assert (reading.tally.kept, reading.tally.tokens) == (1, TOTAL)
    assert reading.selected.position_N.tolist() == [int(scores.argmax())]
    assert_close(model.hidden(tokens[None])[0], reading.z_ND.expand(TOTAL, -1))


def test_the_shares_that_are_kept() -> None:
    """`top_k` keeps its share, rounded up; `most_tokens` is never passed; at test gates are the threshold alone."""
    kept = {}
    for name, selector in (
        ("top_k", {"gate": "top_k", "rate": 0.3}),
        ("most", {"gate": "soft", "most_tokens": 2}),
        ("test", {"gate": "gumbel"}),
    ):
        model = _model(training=name != "test", selector=selector)
        kept[name] = model.read(_tokens(1)[0], LocalSequenceOps())
    assert [kept["top_k"].tally.kept, kept["most"].tally.kept] == [4, 2]
    model = _model(training=False, selector={"gate": "gumbel"})
    passing = torch.sigmoid(model.selector._logits(model.embedding(_tokens(1)[0]))) >= 0.5
    assert kept["test"].selected.position_N.tolist() == passing.nonzero()[:, 0].tolist()


def test_temperature_is_annealed() -> None:
    """The temperature falls geometrically from the first to the last over its steps, and stays there."""
    model = _model(selector={"temperature": 1.0, "final_temperature": 0.01, "anneal_steps": 100})
    found = []
    for step in (0, 50, 100, 1000):
        model.prepare(step)
        found.append(model.selector.temperature)
    assert found == pytest.approx([1.0, 0.1, 0.01, 0.01])


def test_the_rate_term() -> None:
    """It is the squared distance of the open share from the rate, on both sides or only above it."""
    share = torch.tensor([0.05, 0.3])
    for penalty, wanted in (("around", [0.02 * 0.05**2 / 0.01, 0.08]), ("above", [0.0, 0.08])):
        model = _model(selector={"rate": 0.1, "rate_weight": 2.0, "rate_penalty": penalty})
        got = [float(model.selector.rate_loss(one)) for one in share]
        assert got == pytest.approx(wanted), penalty
    model = _model(selector={"rate": 0.1, "rate_warmup": 100})
    model.prepare(25)
    assert float(model.selector.rate_loss(share[1])) == pytest.approx(0.25 * 0.04)


def test_the_adversarial_selector_learns_against_the_rest() -> None:
    """Its gradient is the opposite of the likelihood's without a rate term, the rest's is the same but for scores."""
    gradients = {}
    for objective in ("likelihood", "adversarial"):
        model = _model(objective=objective, selector={"rate_weight": 0.0}, router={"balance_weight": 0.0})
        _loss(model, None, (TOTAL,)).backward()
        gradients[objective] = {name: p.grad for name, p in model.named_parameters()}
    for name, wanted in gradients["likelihood"].items():
        if name.startswith("selector."):
            assert wanted.any()
            assert_close(gradients["adversarial"][name], -wanted, kind="gradient", what=name)
        elif name.startswith(("layers.0.experts", "head")):
            assert_close(gradients["adversarial"][name], wanted, kind="gradient", what=name)


def test_a_frozen_selector_learns_nothing() -> None:
    """With `frozen` the Selector's parameters get no gradient, and the rest does."""
    model = _model(selector={"frozen": True})
    _loss(model, None, (TOTAL,)).backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == {name for name, _ in model.named_parameters() if name.startswith("selector.")}


def test_noise_belongs_to_positions() -> None:
    """Numbers at positions are uniform, differ by seed, and are the same in any slice."""
    numbers = uniform_at(torch.arange(20_000), (0, 5))
    assert 0.0 < float(numbers.min()) < float(numbers.max()) < 1.0
    deciles = torch.histc(numbers, bins=10, min=0.0, max=1.0) / 20_000
    assert float((deciles - 0.1).abs().max()) < 0.01
    assert abs(float(torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1])) < 0.03
    assert_close(uniform_at(torch.arange(700, 900), (0, 5)), numbers[700:900], kind="exact")
    assert not bool((uniform_at(torch.arange(20_000), (0, 6)) == numbers).any())


def test_a_saved_model_is_the_same(tmp_path: Path) -> None:
    """A folder gives back configuration and outputs, and where a language model is needed it says what it holds."""
    model = build_model(MillionConfig.model_validate({**SMALL, **CASES["straight_through"]})).eval()
    save_model(model, tmp_path / "sparse")
    back = load_any_model(tmp_path / "sparse")
    assert back.config == model.config
    assert_close(back(_tokens()), model(_tokens()), kind="exact")
    with pytest.raises(ModelFolderError, match="holds a million; needed here is a language model, which can write"):
        load_model(tmp_path / "sparse")


def test_what_it_cannot_do_is_refused() -> None:
    """Generation, classes without a head, no tokens, too many and unknown ones are refused with what to do."""
    model = _model(training=False, max_tokens=TOTAL)
    spec = SamplingSpec(max_tokens=3, temperature=0.0, top_k=0, top_p=1.0, seed=0)
    with pytest.raises(InputError, match="take a language model to generate"):
        generate(model, [1, 2], spec)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="build it with num_classes"):
        _model(num_classes=None)(_tokens())
    for length in (0, TOTAL + 1):
        with pytest.raises(InputError, match=f"has {length} tokens; this model reads 1 to {TOTAL} of them"):
            model(_tokens(1, length))
    with pytest.raises(TokenError, match=f"this model knows 0 to {VOCAB - 1}"):
        model(torch.full((1, 3), VOCAB))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"router": {"num_experts": 1, "choices": 2}}, "choices 2 is over num_experts 1"),
        ({"num_heads": 4}, "hidden_size 6 must be a multiple of num_heads 4"),
        ({"selector": {"threshold": 1.0}}, "less than 1"),
        ({"selector": {"most_token": 3}}, "Extra inputs are not permitted"),
    ],
)
def test_configurations_that_cannot_be(changes: dict[str, Any], words: str) -> None:
    """Sizes that do not fit, thresholds outside (0, 1) and unknown keys are refused."""
    with pytest.raises(ValidationError, match=words):
        MillionConfig.model_validate({**SMALL, **changes})

"""Stacks of several kinds of mixers: one function in every mode and over ranks; what is saved, and what is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from dist_attn.checkpoints import load_model, save_model
from dist_attn.comm import Communicator, run_simulated
from dist_attn.errors import ConfigError, InputError
from dist_attn.generation import generate
from dist_attn.layout import SequenceLayout
from dist_attn.model_config.language_model import expand_preset
from dist_attn.models import EncoderConfig, LanguageModel, LanguageModelConfig, TextClassifierConfig, build_model
from dist_attn.ops import LocalSequenceOps
from dist_attn.sharded import ShardedSequenceOps
from dist_attn.text import ByteTokeniser
from dist_attn.wire.messages import SamplingSpec
from tests.support.closeness import assert_close
from tests.support.models import SIZE, small_config, small_model
from tests.support.over_ranks import assert_ranks_change_nothing

KINDS: list[dict[str, Any]] = [
    {"kind": "rfa_gate", "num_heads": 2, "num_random": 8},
    {"kind": "softmax", "num_heads": 4},
    {"kind": "mamba", "state_size": 4},
    {"kind": "elu", "num_heads": 2},
    {"kind": "convolution", "taps": 5},
    {"kind": "rg_lru", "num_heads": 2},
]


def _hybrid(*mixers: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "hybrid", "pattern": [{"hidden_size": SIZE, **mixer} for mixer in mixers]}


def _model(num_layers: int = len(KINDS)) -> LanguageModel:
    return small_model(small_config(mixer=_hybrid(*KINDS[:num_layers]), num_layers=num_layers)).double()


def _tokens(length: int, batch: int = 2) -> torch.Tensor:
    return torch.randint(0, 257, (batch, length), generator=torch.Generator().manual_seed(3))


def test_parallel_equals_streamed_equals_stepwise() -> None:
    """With a layer of every kind that has a state, pieces and single steps give the logits and states of one call."""
    model, tokens = _model(), _tokens(40)
    want, end = model(tokens)
    streamed, state = [], None
    for piece in tokens.split([1, 0, 30, 9], dim=1):
        logits, state = model(piece, None, state)
        streamed.append(logits)
    assert_close(torch.cat(streamed, 1), want)
    stepped, step_state = [], model.initial_state(2)
    for t in range(40):
        logits, step_state = model.step(tokens[:, t], step_state)
        stepped.append(logits)
    assert_close(torch.stack(stepped, 1), want)
    assert state is not None
    for got in (state, step_state.select([0, 1])):
        for mine, theirs in zip(got.layers, end.layers, strict=True):
            for a, b in zip(mine.tensors(), theirs.tensors(), strict=True):
                assert_close(a, b, kind="state")


def test_ranks_change_nothing() -> None:
    """Loss and gradients of all parameters of all kinds are those of one rank, over uneven and empty slices."""
    tokens, layout = _tokens(31), SequenceLayout.from_lengths((12, 0, 19))

    def share(model: torch.nn.Module, comm: Communicator | None) -> torch.Tensor:
        ops = LocalSequenceOps() if comm is None else ShardedSequenceOps(comm, layout)
        start, stop = (0, 31) if comm is None else layout.range(comm.rank)
        logits, _ = model(tokens[:, start:stop], ops)
        weights = torch.randn(logits.shape[2], generator=torch.Generator().manual_seed(5), dtype=torch.float64)
        return (logits.log_softmax(2) * weights).sum()

    assert_ranks_change_nothing(_model, share, 3)


def test_blocks_over_ranks_go_on_from_states_of_all_kinds() -> None:
    """Block after block over ranks, each layer's state carried in its own way, hidden states are those of one call."""
    model, tokens, layout = _model(), _tokens(46), SequenceLayout.from_lengths((9, 14))

    def body(comm: Communicator) -> list[torch.Tensor]:
        state, parts = None, []
        for block in tokens.split(23, dim=1):
            h, state = model.hidden(block[:, slice(*layout.range(comm.rank))], ShardedSequenceOps(comm, layout), state)
            parts.append(h.detach())
        return parts

    ranks = run_simulated(body, 2)
    got = torch.cat([torch.cat([parts[block] for parts in ranks], 1) for block in range(2)], 1)
    assert_close(got, model.encode(tokens))


def test_a_pattern_repeats_and_a_list_names_every_layer() -> None:
    """Layer i has mixer i of the pattern, counted around; random features differ between all layers."""
    model = small_model(small_config(mixer=_hybrid(KINDS[0], KINDS[1]), num_layers=5))
    assert [block.mixer.config.kind for block in model._blocks()] == ["rfa_gate", "softmax"] * 2 + ["rfa_gate"]
    vectors = [block.mixer.w_HDK for block in model._blocks() if block.mixer.config.kind == "rfa_gate"]
    assert not torch.equal(vectors[0], vectors[1]) and not torch.equal(vectors[1], vectors[2])


def test_a_folder_keeps_the_stack(tmp_path: Path) -> None:
    """A saved stack is read back with its pattern and weights, and generates the same text."""
    model = _model(3).float()
    save_model(model, tmp_path / "model", tokeniser=ByteTokeniser())
    again = load_model(tmp_path / "model")
    assert again.config == model.config
    assert [m["kind"] for m in json.loads((tmp_path / "model/config.json").read_text())["mixer"]["pattern"]] == [
        mixer["kind"] for mixer in KINDS[:3]
    ]
    drawn = [generate(m, np.arange(60, 70), SamplingSpec(max_tokens=8, temperature=0.0)) for m in (model, again)]
    assert drawn[0] == drawn[1] and len(drawn[0]) == 8


@pytest.mark.parametrize(
    ("mixer", "words"),
    [
        (
            _hybrid(KINDS[0], {"kind": "convolution", "centred": True}),
            "kind convolution as configured in entry 1 of the pattern takes a sequence whole",
        ),
        (
            _hybrid(KINDS[0], {"kind": "bidirectional", "num_heads": 2, "attention": "elu"}),
            "kind bidirectional as configured in entry 1 of the pattern takes a sequence whole",
        ),
        (_hybrid(*KINDS[:3]), "pattern has 3 entries for 2 layers; it needs one for each, or fewer"),
        (_hybrid(), "pattern"),
        (
            _hybrid(KINDS[4], {"kind": "convolution", "hidden_size": 8}),
            r"hidden_size \[16, 8\]; they must have the same",
        ),
        (_hybrid({"kind": "convolution", "hidden_size": 8}), "hidden_size 8 must equal the model's 16"),
        (_hybrid({"kind": "hybrid", "pattern": []}), "hybrid"),
    ],
)
def test_stacks_that_cannot_be_are_refused(mixer: dict[str, Any], words: str) -> None:
    """A mixer without a state in a model that generates, superfluous entries and other widths are refused in words."""
    with pytest.raises(ValidationError, match=words):
        small_config(mixer=mixer)


def test_a_stack_without_steps_says_so() -> None:
    """A mixer that takes a sequence whole has no step: who asks for one is told to take a causal mixer."""
    encoder = EncoderConfig.model_validate(
        {
            "hidden_size": SIZE,
            "num_layers": 2,
            "mlp_size": 8,
            "mixer": _hybrid(KINDS[0], {"kind": "convolution", "centred": True}),
        }
    )
    blocks = build_model(TextClassifierConfig(vocab_size=9, num_classes=2, encoder=encoder)).encoder.blocks
    with pytest.raises(InputError, match="has no step; take a causal mixer to decode"):
        blocks[1].step(torch.zeros(1, SIZE), blocks[1].mixer.initial_state(1))


def test_presets_of_stacks() -> None:
    """A preset fills width and heads into every mixer of a pattern, whose entries may be just names."""
    values = {"preset": "tiny", "vocab_size": 300, "mixer": {"kind": "hybrid"}}
    config = LanguageModelConfig.model_validate(expand_preset(values))
    assert [mixer.kind for mixer in config.mixer.pattern] == ["rfa_gate"] * 3 + ["softmax"]
    values["mixer"] = {"pattern": ["convolution", {"kind": "softmax", "short_convolution": 0}, {"num_random": 8}]}
    pattern = LanguageModelConfig.model_validate(expand_preset(values)).mixer.pattern
    assert [(mixer.kind, mixer.hidden_size) for mixer in pattern] == [
        ("convolution", 128), ("softmax", 128), ("rfa_gate", 128)
    ]  # fmt: skip
    assert [getattr(mixer, "num_heads", None) for mixer in pattern] == [None, 4, 4]
    with pytest.raises(ConfigError, match="a pattern is a list of mixers"):
        expand_preset({**values, "mixer": {"pattern": "softmax"}})

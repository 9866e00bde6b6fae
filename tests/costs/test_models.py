"""The formulas of models against the models themselves: numbers held, state, operations, memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from dist_attn.costs import LanguageModelCosts, read_model_costs
from dist_attn.costs.models import StreamEncoderCosts
from dist_attn.errors import ConfigError
from dist_attn.mixers import RandomFeatureConfig, linear_layers
from dist_attn.model_config.mixers import attention, kernels, recurrent, scans
from dist_attn.models import LanguageModel, StreamingModel, hold_weights_as
from dist_attn.models.fused_step import FusedLayers
from dist_attn.ops.affine import implementation as affine_implementation
from dist_attn.ops.affine import streaming as affine_streaming
from dist_attn.ops.linear_attention import implementation, streaming
from dist_attn.ops.selective_scan import BLOCK_BYTES, BLOCK_TOKENS, CHUNK_TOKENS
from dist_attn.ops.softmax_attention import tiled
from dist_attn.wire.choices import WeightPrecision
from tests.models.test_stream_encoder import MIXERS, small
from tests.support.model_cases import MODEL_CASES, kinds_of, small_model, write_config
from tests.support.pairs import each_pair

KERNEL_CASES = [name for name in MODEL_CASES if "softmax" not in kinds_of(name)]


@pytest.fixture(params=MODEL_CASES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[LanguageModelCosts, LanguageModel]:
    """The costs that a folder's config.json gives, and the model it describes."""
    return read_model_costs(write_config(request.param, tmp_path)), small_model(request.param)


def test_numbers_held(pair: tuple[LanguageModelCosts, LanguageModel]) -> None:
    """Parameters and the bytes of all weights are those of the model, exactly."""
    costs, model = pair
    tensors = [*model.parameters(), *model.buffers()]
    assert costs.parameters == sum(p.numel() for p in model.parameters())
    assert costs.weights_bytes == sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize(("tokens", "batch"), [(0, 1), (70, 3)])
def test_state_bytes(pair: tuple[LanguageModelCosts, LanguageModel], tokens: int, batch: int) -> None:
    """The state after any number of tokens has exactly the bytes that the formula says."""
    costs, model = pair
    with torch.inference_mode():
        _, state = model.hidden(torch.zeros(batch, tokens, dtype=torch.int64))
    assert costs.state_bytes(tokens, batch) == state.num_bytes()


def test_a_state_keeps_nothing_else_alive(pair: tuple[LanguageModelCosts, LanguageModel]) -> None:
    """The memory behind a state's tensors is the state's and not the block's that they were cut from."""
    costs, model = pair
    with torch.inference_mode():
        _, state = model.hidden(torch.zeros(1, 300, dtype=torch.int64))
    storages = [tensor.untyped_storage() for layer in state.layers for tensor in layer.tensors()]
    assert sum({s.data_ptr(): s.nbytes() for s in storages}.values()) <= costs.state_bytes(300)


@pytest.mark.parametrize("case", KERNEL_CASES)
def test_prefill_operations(case: str, tmp_path: Path) -> None:
    """Matrix products in prefill are those that torch counts, which holds the upper half of the scores too."""
    costs, model = read_model_costs(write_config(case, tmp_path)), small_model(case)
    tokens = 1024
    counted = _count(lambda: model.encode(torch.zeros(1, tokens, dtype=torch.int64)))
    flops = costs.prefill_flops(tokens)
    assert counted == pytest.approx(tokens * (flops.total + flops.scores), rel=1e-12)


@pytest.mark.parametrize("case", KERNEL_CASES)
def test_decoding_operations(case: str, tmp_path: Path) -> None:
    """Matrix products of one decoding step are those that torch counts, which adds to the state without a product."""
    costs, model = read_model_costs(write_config(case, tmp_path)), small_model(case)
    state = model.initial_state(1)
    counted = _count(lambda: model.step(torch.zeros(1, dtype=torch.int64), state))
    flops = costs.decode_flops(7)
    # torch sees S^T phi and z.phi as products; phi v^T is an outer product by broadcasting.
    assert flops.total - flops.state <= counted <= flops.total


def test_softmax_operations(tmp_path: Path) -> None:
    """Exact attention costs D operations per pair of tokens and product, and half of all pairs in prefill."""
    costs = read_model_costs(write_config("softmax", tmp_path))
    size, layers = costs.hidden_size, costs.config.num_layers
    assert costs.prefill_flops(1000).scores == layers * 2 * (2 * size * 1000) / 2
    assert costs.decode_flops(1000).scores == layers * 2 * (2 * size * 1000)


@pytest.mark.parametrize(
    ("case", "computed_by", "size"),
    each_pair(
        MODEL_CASES,
        ("native", "streaming"),
        ((512, "float32"), (4096, "float32"), (64, "int8"), (2048, "bfloat16")),
    ),
    indirect=["computed_by"],
)
def test_peak_of_activations(case: str, size: tuple[int, WeightPrecision], tmp_path: Path, computed_by: str) -> None:
    """A block's temporary tensors stay below the formula; torch's own come to half of it, few tokens' to a third."""
    # C kernels of linear attention make none of the features that the formula counts.
    tokens, weights = size
    costs, model = read_model_costs(write_config(case, tmp_path), weights), small_model(case)
    hold_weights_as(model, weights)
    formula = costs.activation_bytes(tokens) + costs.state_bytes(0)  # encoding begins by making an empty state
    peak = _peak_bytes(model, tokens)
    assert peak <= formula
    assert computed_by == "native" or formula <= (2 if tokens >= 512 else 3) * peak


@pytest.mark.parametrize("tokens", [512, 2048])
def test_a_stream_encoder(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers, state, operations and the peak of one that reads blocks with a frame, and context behind them."""
    for one in (implementation, affine_implementation):
        monkeypatch.setattr(one, "why_no_library", lambda: "the formula is of torch's operations")
    model = small(MIXERS["rfa_gate"]).float()
    costs, tokens_BL = StreamEncoderCosts(model.config), torch.zeros(1, tokens, dtype=torch.int64)
    tensors = [*model.parameters(), *model.buffers()]
    assert costs.parameters == sum(p.numel() for p in model.parameters())
    assert costs.weights_bytes == sum(t.numel() * t.element_size() for t in tensors)
    with torch.inference_mode():
        assert costs.state_bytes(tokens) == model.hidden(tokens_BL)[1].num_bytes()
    flops = costs.prefill_flops(tokens)
    alone = replace(costs, config=model.config.model_copy(update={"context": None})).prefill_flops(tokens)
    # torch counts both halves of the context's scores, and none of the sentence encoder's, by a fused kernel.
    assert _count(lambda: model.hidden(tokens_BL)) == pytest.approx(
        tokens * (flops.total + flops.scores - 2 * alone.scores), rel=1e-12
    )
    peak, formula = _peak_bytes(model, tokens), costs.activation_bytes(tokens) + costs.state_bytes(0)
    assert peak <= formula <= 3 * peak


def test_constants_are_those_of_the_kernel() -> None:
    """Chunk, block and tile sizes in the formulas are those that the blocked and the tiled forms use."""
    assert kernels.CHUNK_TOKENS == streaming.CHUNK_TOKENS
    assert kernels.BLOCK_GROUP_TOKENS == streaming.BLOCK_GROUP_TOKENS
    tiles = (attention.TILE_QUERIES, attention.TILE_KEYS, attention.TILE_ELEMENTS)
    assert tiles == (tiled.TILE_QUERIES, tiled.TILE_KEYS, tiled.TILE_ELEMENTS)
    assert (
        affine_streaming.CHUNK_TOKENS,
        affine_streaming.BLOCK_CHUNKS["cpu"],
    ) == (recurrent.CHUNK_TOKENS, recurrent.BLOCK_CHUNKS)
    assert (CHUNK_TOKENS, BLOCK_TOKENS, BLOCK_BYTES["cpu"]) == (
        scans.CHUNK_TOKENS,
        scans.BLOCK_TOKENS,
        scans.BLOCK_BYTES,
    )


def test_second_pass_of_several_ranks() -> None:
    """With several ranks a token's keys are read twice: once more through the feature map, once more into a state."""
    mixer = RandomFeatureConfig(kind="rfa", hidden_size=64, num_heads=4, num_random=16)
    one, several = mixer.prefill_flops(1, ranks=1), mixer.prefill_flops(1, ranks=5)
    assert (several.features, several.state) == (1.5 * one.features, 1.5 * one.state)
    assert (several.projections, several.scores) == (one.projections, one.scores)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "is not JSON"),
        ("[]", "holds no JSON object"),
        ('{"kind": "language_model"}', "vocab_size"),
        ('{"kind": "classifier", SIZES, "mixer": MIXER}', "'classifier'"),
        ('{"kind": "language_model", SIZES, "mixer": {"kind": "abacus"}}', "no mixer of kind 'abacus'"),
        (
            '{"kind": "language_model", SIZES, "mixer": {"kind": "convolution", "hidden_size": 2, "centred": true}}',
            "takes a sequence whole",
        ),
    ],
)
def test_refuses_what_it_has_no_formula_for(text: str, says: str, tmp_path: Path) -> None:
    """A config.json that is broken, incomplete or of an unknown kind is refused with the file and the reason."""
    sizes = '"vocab_size": 1, "hidden_size": 2, "num_layers": 1, "mlp_size": 1'
    mixer = '{"kind": "rfa", "hidden_size": 2, "num_heads": 2}'
    (tmp_path / "config.json").write_text(text.replace("SIZES", sizes).replace("MIXER", mixer))
    with pytest.raises(ConfigError) as caught:
        read_model_costs(tmp_path)
    assert says in str(caught.value) and str(tmp_path) in str(caught.value)


def test_refuses_a_folder_without_a_model(tmp_path: Path) -> None:
    """A folder without config.json is refused by name."""
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        read_model_costs(tmp_path)


def _count(run: object) -> int:
    """The operations that torch counts, which sees none of C kernels and of oneDNN: without these."""
    assert callable(run)
    solves = {torch.ops.aten.linalg_solve_triangular: _solve_flops}
    with pytest.MonkeyPatch.context() as patch:
        for one in (implementation, affine_implementation):
            patch.setattr(one, "why_no_library", lambda: "torch counts its own operations")
        for takes in ("takes_step_products", "takes_onednn_linear"):
            patch.setattr(linear_layers, takes, lambda x, w: False)
        patch.setattr(FusedLayers, "of", lambda *_: None)
        with torch.inference_mode(), FlopCounterMode(display=False, custom_mapping=solves) as counter:
            run()
    return counter.get_total_flops()


def _solve_flops(square: torch.Size, columns: torch.Size, **_: object) -> int:
    """Of both triangles, as of products; torch itself counts none."""
    return 2 * columns.numel() * square[-1]


def _peak_bytes(model: StreamingModel, tokens: int) -> int:
    """The most bytes that tensors made during the call held at once."""
    tokens_BL = torch.zeros(1, tokens, dtype=torch.int64)
    with torch.inference_mode(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watch:
        model.hidden(tokens_BL)
    assert watch.profiler is not None and watch.profiler.kineto_results is not None
    events = [e for e in watch.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak

"""Linear attention: the streaming form and the step against the oracle, the golden vectors, and their promises."""

import resource

import pytest
import torch

from dist_attn import feature_maps
from dist_attn.errors import ConfigError, ShapeError
from dist_attn.ops import (
    Denominator,
    LinearState,
    absorb_keys,
    linear_attention,
    linear_attention_read,
    linear_attention_step,
)
from dist_attn.ops.linear_attention import linear_attention_naive
from dist_attn.ops.linear_attention.block import AttentionBlock, BlockCarry, BlockTokens
from dist_attn.ops.linear_attention.streaming import block_ranges
from dist_attn.ops.state import steps_in_place
from tests.support.attention import Inputs, weighted_sum
from tests.support.closeness import assert_close
from tests.support.golden import golden

EXACT = Denominator("exact")
CASES = [
    # queries, keys, causal, gate, scale, state
    (1, 1, True, False, False, False),
    (63, 63, True, False, False, True),
    (130, 130, True, True, True, True),
    (600, 600, True, True, False, True),
    (577, 577, True, False, True, False),
    (70, 200, True, True, True, True),
    (200, 70, True, True, True, True),
    (50, 90, False, True, True, True),
    (90, 50, False, False, False, False),
    (0, 5, True, False, False, True),
    (5, 0, True, True, True, True),
]


@pytest.mark.parametrize(("queries", "keys", "causal", "gate", "scale", "state"), CASES)
def test_streaming_equals_oracle(queries, keys, causal, gate, scale, state):
    """Output, final state and every gradient of the streaming form equal the oracle's for any lengths and options."""
    inputs = Inputs.random(queries, keys, gate=gate, scale=scale, state=state)
    results = []
    for attention in (linear_attention_naive, linear_attention):
        leaves = inputs.leaves()
        args, kwargs = leaves.arguments()
        out, after = attention(*args, **kwargs, causal=causal)
        weighted_sum(out, *after.tensors()[:4]).backward()
        results.append((out, after, leaves.gradients()))
    (want, want_state, want_grads), (got, got_state, got_grads) = results
    assert_close(got, want)
    for got_field, want_field in zip(got_state.tensors(), want_state.tensors(), strict=True):
        assert_close(got_field, want_field, kind="state")
    for name, gradient in want_grads.items():
        assert_close(got_grads[name], gradient, kind="gradient", what=name)


@pytest.mark.parametrize("used", ["output", "state"])
@pytest.mark.parametrize("tokens", [40, 130])
def test_gradients_where_only_one_result_is_used(tokens, used):
    """With a loss of the output or of the state alone the gradients are the oracle's, and a second pass adds them."""
    inputs = Inputs.random(tokens, tokens, gate=True, scale=True, state=True)
    found = []
    for attention in (linear_attention_naive, linear_attention):
        leaves = inputs.leaves()
        args, kwargs = leaves.arguments()
        out, after = attention(*args, **kwargs)
        loss = weighted_sum(*([out] if used == "output" else after.tensors()[:4]))
        loss.backward(retain_graph=True)
        loss.backward()
        found.append(leaves.gradients())
    want, got = found
    for name, gradient in want.items():
        assert_close(got[name], gradient, kind="gradient", what=name)


@pytest.mark.parametrize("kind", ["floor", "exact", "clamp", "sign_clamp", "abs_clamp"])
def test_every_denominator_policy_is_the_same_function_on_every_path(kind):
    """Each denominator policy gives the same outputs in the oracle, the streaming form and the step."""
    inputs = Inputs.random(150, 150, gate=True, scale=True, state=False)
    args, kwargs = inputs.arguments()
    policy = Denominator(kind, 0.3)
    want, _ = linear_attention_naive(*args, **kwargs, denominator=policy)
    got, after = linear_attention(*args, **kwargs, denominator=policy)
    assert_close(got, want)
    state = LinearState.identity(2, 3, 12, 4, dtype=torch.float64)
    outs = []
    for t in range(150):
        out, state = linear_attention_step(
            *(a[:, :, t] for a in args),
            state,
            feature_map=kwargs["feature_map"],
            log_gate_BH=kwargs["log_gate_BHS"][:, :, t],
            key_scale_BH=kwargs["key_scale_BHS"][:, :, t],
            denominator=policy,
        )
        outs.append(out)
    assert_close(torch.stack(outs, 2), want)
    assert_close(state.s_BHMV, after.s_BHMV, kind="state")


def test_blocks_are_as_large_as_their_device_wants_them():
    """On a CPU a block fits into its cache, on a GPU there are few; together they are all tokens, in order."""
    shape = (1, 16, 131_100, 64)
    for device, count in (("cpu", 512), ("cuda", 32)):
        ranges = block_ranges(shape, torch.device(device))
        assert len(ranges) == count + 1  # and the tail
        assert [a for a, _ in ranges] == [0, *(b for _, b in ranges[:-1])]
        assert ranges[-1][1] == 131_100
    assert block_ranges((64, 16, 128, 8), torch.device("cuda")) == [(0, 64), (64, 128)]


@pytest.mark.parametrize(("gate", "scale"), [(False, False), (False, True), (True, False), (True, True)])
def test_chunks_of_a_block_may_be_scanned_at_once(gate, scale):
    """The scan that GPUs take gives a block's sums, masses, carry and gradients as the one from chunk to chunk."""
    found = []
    for at_once in (False, True):
        leaves = Inputs.random(320, 320, gate=gate, scale=scale, state=True).leaves()
        (q, k, v), kwargs = leaves.arguments()
        state, feature_map = kwargs["state"], kwargs["feature_map"]
        carry = BlockCarry(torch.cat([state.s_BHMV, state.z_BHM[..., None]], -1), state.mass_BH, state.log_decay_BH)
        tokens = BlockTokens(q, k, v, kwargs["log_gate_BHS"], kwargs["key_scale_BHS"], None)
        block = AttentionBlock(feature_map, EXACT, 64, torch.float64, at_once)
        num_BHTW, mass_BHT, after = block.sums(tokens, carry, feature_map.tensors())
        weighted_sum(num_BHTW, mass_BHT, *after).backward()
        found.append(((num_BHTW, mass_BHT, *after), leaves.gradients()))
    for got, want in zip(found[1][0], found[0][0], strict=True):
        assert_close(got, want, kind="state")
    for name, gradient in found[0][1].items():
        assert_close(found[1][1][name], gradient, kind="gradient", what=name)


@pytest.mark.parametrize("gated", [False, True])
def test_a_step_in_place_has_the_same_bits(gated):
    """Inside `steps_in_place`, and there without gradients alone, the state is written over; the bits do not change."""
    inputs = Inputs.random(1, 1, gate=gated, scale=gated, state=True)
    args, kwargs = inputs.arguments()
    gates = {f"{name}_BH": kwargs[f"{name}_BHS"][:, :, 0] for name in ("log_gate", "key_scale") if gated}

    def step(state):
        one = [a[:, :, 0] for a in args]
        return linear_attention_step(*one, state, feature_map=kwargs["feature_map"], **gates)

    state = kwargs["state"]
    given = [t.clone() for t in state.tensors()]
    want, after = step(state)
    with steps_in_place():
        step(state)
        assert all(torch.equal(a, b) for a, b in zip(given, state.tensors(), strict=True))
        with torch.no_grad():
            out, now = step(state)
    assert now.s_BHMV is state.s_BHMV
    assert torch.equal(out, want)
    assert all(torch.equal(a, b) for a, b in zip(now.tensors(), after.tensors(), strict=True))
    with torch.no_grad():
        assert step(state)[1].s_BHMV is not state.s_BHMV


@pytest.mark.parametrize("queries", [1, 3])
def test_a_read_out_is_attention_without_new_keys(queries):
    """Queries that see a state as it is get the oracle's outputs and gradients."""
    inputs = Inputs.random(queries, 0, gate=False, scale=False, state=True)
    found = []
    for read in (False, True):
        leaves = inputs.leaves()
        (q, k, v), kwargs = leaves.arguments()
        if read:
            out = linear_attention_read(q, kwargs["state"], feature_map=kwargs["feature_map"])
        else:
            out, _ = linear_attention_naive(q, k, v, **kwargs, causal=False)
        weighted_sum(out).backward()
        found.append((out, leaves.gradients()))
    (want, want_grads), (got, got_grads) = found
    assert_close(got, want)
    for name, gradient in want_grads.items():
        assert_close(got_grads[name], gradient, kind="gradient", what=name)


@pytest.mark.parametrize("feature", ["gaussian", "arccos"])
@pytest.mark.parametrize("case", ["causal", "noncausal", "cross", "gated"])
def test_golden_rfa(feature, case):
    """The golden vectors of RFA come out, with the feature map applied inside: outputs, states and gradients."""
    g = golden(f"rfa_{feature}_{case}")
    kind = feature_maps.Gaussian if feature == "gaussian" else feature_maps.ArcCosine
    sigma = g["sigma"].clone().requires_grad_()
    phi = kind(g["W"] * sigma[:, None, :], unit_norm=True)
    q, k, v = (g[name].clone().requires_grad_() for name in "qkv")
    gates = {}
    if case == "gated":
        gates = {"log_gate_BHS": g["g"].log(), "key_scale_BHS": 1 - g["g"]}
    causal = case in ("causal", "gated")
    out, state = linear_attention(q, k, v, feature_map=phi, causal=causal, denominator=EXACT, **gates)
    assert_close(out, g["out"], kind="golden")
    if causal:
        assert_close(state.s_BHMV, g["S"][:, :, -1], kind="golden")
        assert_close(state.z_BHM, g["z"][:, :, -1], kind="golden")
        (out[0, 0] * g["G"]).sum().backward()
        for leaf, name in ((q, "grad_q"), (k, "grad_k"), (v, "grad_v"), (sigma, "grad_sigma")):
            gradient = leaf.grad[0] if name == "grad_sigma" else leaf.grad[0, 0]
            assert_close(gradient, g[name], kind="golden", what=name)
    if case == "cross":
        assert_close(state.s_BHMV, g["S"], kind="golden")
        masked, _ = linear_attention(
            q,
            k,
            v,
            feature_map=phi,
            causal=False,
            denominator=EXACT,
            key_scale_BHS=g["keep"].double()[:, None].expand(2, 2, 8),
        )
        assert_close(masked, g["out_masked"], kind="golden")


@pytest.mark.parametrize("feature", ["gaussian", "arccos"])
@pytest.mark.parametrize("gated", [False, True])
def test_golden_stateful_segments(feature, gated):
    """Segments with the state passed on equal the golden unsegmented run; with the state dropped, the reset one."""
    g = golden(f"rfa_{feature}_stateful")
    kind = feature_maps.Gaussian if feature == "gaussian" else feature_maps.ArcCosine
    phi = kind(g["W"] * g["sigma"][:, None, :], unit_norm=True)
    name = "gated" if gated else "plain"
    for carry in (True, False):
        outs, state = [], None
        for number, (a, b) in enumerate(zip(g["seg"][:-1].tolist(), g["seg"][1:].tolist(), strict=True)):
            gate = g["g"][:, :, a:b]
            gates = {"log_gate_BHS": gate.log(), "key_scale_BHS": 1 - gate} if gated else {}
            out, state = linear_attention(
                *(g[x][:, :, a:b] for x in "qkv"), feature_map=phi, state=state, denominator=EXACT, **gates
            )
            outs.append(out)
            if carry:
                assert_close(state.s_BHMV, g[f"S_{name}"][:, :, number], kind="golden")
                assert_close(state.z_BHM, g[f"z_{name}"][:, :, number], kind="golden")
            else:
                state = None
        assert_close(torch.cat(outs, 2), g[f"out_{name}" if carry else f"reset_{name}"], kind="golden")


@pytest.mark.parametrize("causal", [False, True])
def test_golden_eq12_key_weights(causal):
    """Eq. 12's weighting of keys by exp(|k|^2 / 2 tau^2) is a key scale, and gives the golden vectors."""
    g = golden("rfa_eq12")
    q, k, v = (g[name][None, None] for name in "qkv")
    weights = (k.square().sum(-1) / (2 * g["tau2"])).exp()
    phi = feature_maps.Gaussian(g["W"][None])
    out, _ = linear_attention(q, k, v, feature_map=phi, key_scale_BHS=weights, causal=causal, denominator=EXACT)
    assert_close(out[0, 0], g["out_causal" if causal else "out_noncausal"], kind="golden")


def test_absorbed_keys_are_the_state_of_attention():
    """The state from the keys alone equals the one that attention over them returns."""
    args, kwargs = Inputs.random(333, 333, gate=True, scale=True, state=True).arguments()
    _, want = linear_attention(*args, **kwargs)
    got = absorb_keys(*args[1:], **kwargs)
    for got_field, want_field in zip(got.tensors(), want.tensors(), strict=True):
        assert_close(got_field, want_field, kind="state")


def test_future_tokens_change_nothing_before_them():
    """Replacing a token leaves every earlier output bitwise the same, and later ones not."""
    args, kwargs = Inputs.random(200, 200, gate=True, scale=True, state=False).arguments()
    before, _ = linear_attention(*args, **kwargs)
    q, k, v = (a.clone() for a in args)
    k[:, :, 137], v[:, :, 137] = 1.0, -3.0
    after, _ = linear_attention(q, k, v, **kwargs)
    assert torch.equal(before[:, :, :137], after[:, :, :137])
    assert not torch.equal(before[:, :, 137:], after[:, :, 137:])


@pytest.mark.usefixtures("computed_by")
def test_half_precision_inputs_keep_a_float32_state():
    """bf16 inputs give bf16 outputs near the float64 ones, from a float32 state that 4,000 tokens do not wear out."""
    args, kwargs = Inputs.random(4000, 4000, gate=False, scale=False, state=False).arguments()
    want, _ = linear_attention(*args, **kwargs)
    rounded = tuple(a.bfloat16() for a in args)
    exact_of_rounded, _ = linear_attention(*(a.double() for a in rounded), **kwargs)
    w_HDK = kwargs["feature_map"].w_HDK.float()
    got, state = linear_attention(*rounded, feature_map=feature_maps.Gaussian(w_HDK, unit_norm=True))
    assert got.dtype == torch.bfloat16
    assert state.s_BHMV.dtype == torch.float32
    assert_close(got, exact_of_rounded.bfloat16())
    assert float((got.double() - want).abs().mean()) < 0.05


def test_an_empty_batch_has_empty_outputs():
    """No sequences in, no outputs out, forward and backward, with gates and without."""
    for gate in (False, True):
        inputs = Inputs.random(70, 70, gate=gate, scale=gate, state=False)
        nobody = {name: tensor[:0] for name, tensor in inputs.sequence.items()}
        (q, k, v), kwargs = Inputs(nobody, inputs.replicated).leaves().arguments()
        out, state = linear_attention(q, k, v, **kwargs)
        out.sum().backward()
        assert out.shape == (0, 3, 70, 4)
        assert state.s_BHMV.shape == (0, 3, 12, 4)
        assert q.grad is not None


@pytest.mark.usefixtures("computed_by")
def test_autocast_does_not_reach_into_attention():
    """Under bf16 autocast, the streaming form and the step keep the bits they have without: sums stay in float32."""
    inputs = Inputs.random(70, 70, gate=True, scale=True, state=True, dtype=torch.float32)
    (q, k, v), kwargs = inputs.arguments()
    gates = {"log_gate_BH": kwargs["log_gate_BHS"][:, :, 0], "key_scale_BH": kwargs["key_scale_BHS"][:, :, 0]}
    one = {"state": kwargs["state"], "feature_map": kwargs["feature_map"], **gates}
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            whole, after = linear_attention(q, k, v, **kwargs)
            step, _ = linear_attention_step(q[:, :, 0], k[:, :, 0], v[:, :, 0], **one)
        results.append((whole, after.s_BHMV, step))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.usefixtures("computed_by")
def test_gated_outputs_stay_bounded_where_sigma_is_large():
    """With sigma 3, where half of all denominators are not positive, the default keeps outputs and gradients finite."""
    generator = torch.Generator().manual_seed(0)
    w = 3.0 * torch.randn(2, 64, 64, generator=generator)
    q, k, v = (torch.randn(1, 2, 400, 64, generator=generator, requires_grad=True) for _ in range(3))
    gate = torch.full((1, 2, 400), 0.5)
    phi = feature_maps.Gaussian(w, unit_norm=True)
    out, _ = linear_attention(q, k, v, feature_map=phi, log_gate_BHS=gate.log(), key_scale_BHS=1 - gate)
    out.sum().backward()
    assert float(out.detach().abs().max()) < 100
    assert all(bool(torch.isfinite(t.grad).all()) for t in (q, k, v))


@pytest.mark.usefixtures("computed_by")
def test_memory_does_not_grow_with_the_length():
    """Forward and backward over 65,536 tokens need at most 64 MiB above inputs, outputs and gradients."""
    generator = torch.Generator().manual_seed(0)
    w = torch.randn(2, 32, 32, generator=generator)

    def peak_mib(length: int) -> float:
        q, k, v = (torch.randn(1, 2, length, 32, generator=generator, requires_grad=True) for _ in range(3))
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        out, _ = linear_attention(q, k, v, feature_map=feature_maps.Gaussian(w))
        out.backward(torch.ones_like(out))
        own = 2 * 4 * q.numel() * q.element_size() / 2**20
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024 - own

    peak_mib(2048)
    assert peak_mib(65_536) < 64


@pytest.mark.usefixtures("computed_by")
def test_nothing_seen_gives_zero():
    """Attention over no keys is zero under the default policy, not NaN."""
    q, kv = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 0, 4)
    out, state = linear_attention(q, kv, kv, causal=False)
    assert torch.equal(out, torch.zeros(1, 1, 3, 4))
    assert float(state.mass_BH.sum()) == 0.0


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        (((1, 2, 3, 4), (1, 2, 3, 5), (1, 2, 3, 4)), "size 4 per head and k 5"),
        (((1, 2, 3, 4), (1, 3, 3, 4), (1, 2, 3, 4)), "batch and heads must be equal"),
        (((1, 2, 3, 4), (1, 2, 3, 4), (1, 2, 4, 4)), "length equal in k and v"),
        (((2, 3, 4), (1, 2, 3, 4), (1, 2, 3, 4)), "four dimensions"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes, words):
    """Inputs that do not fit together raise a ShapeError that says what was given and what is needed."""
    with pytest.raises(ShapeError, match=words):
        linear_attention(*(torch.zeros(shape) for shape in shapes))


def test_bad_gates_states_and_policies_are_named():
    """A gate, a state or a policy that cannot be right is refused in words."""
    x = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ShapeError, match="log_gate has shape"):
        linear_attention(x, x, x, log_gate_BHS=torch.zeros(1, 2, 4))
    for heads, features in ((3, 4), (2, 5)):
        with pytest.raises(ShapeError, match="the state is"):
            linear_attention(x, x, x, state=LinearState.identity(1, heads, features, 4))
    with pytest.raises(ShapeError, match="float32 or float64"):
        LinearState.identity(1, 1, 1, 1, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match="'floorr' is unknown"):
        Denominator("floorr")
    with pytest.raises(ConfigError, match="finite number"):
        Denominator(eps=float("nan"))

"""Operations of a decode step in C are those of their definitions, and no row of them knows of the others."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from dist_attn.feature_maps import Gaussian
from dist_attn.ops import Denominator, KeyValueCache, LinearState, Watch, linear_attention_step, watching
from dist_attn.ops.affine import AffineState
from dist_attn.ops.affine.recurrence import affine_recurrence_naive, gated_delta_rule_naive
from dist_attn.ops.convolution import convolve_naive
from dist_attn.ops.decode_step import (
    ADD,
    BLOCKS,
    Attention,
    Convolution,
    DecodeStep,
    Experts,
    FourierAttention,
    HeadRecurrence,
    Operation,
    Product,
    WeightMatrix,
    has_decode_step,
    takes,
)  # fmt: skip
from dist_attn.ops.state import steps_in_place
from tests.support.closeness import assert_close

pytestmark = pytest.mark.skipif(not has_decode_step(), reason="no C compiler, or a processor without vectors")
INPUTS, OUTPUTS, HEADS, GROUPS, SIZE = 256, 80, 6, 2, 32
SCALES = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}
"""Where the numbers in float16 of a block begin."""


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def stored(form: str, out: int, shape: tuple[int, ...] = (OUTPUTS, INPUTS)) -> tuple[WeightMatrix, torch.Tensor]:
    """Weights in this form, with a bias, and what they stand for, [O, I]."""
    w_OI, bias_O = random(*shape), random(OUTPUTS)
    if form == "int8":
        q_OI, scale_O = w_OI.mul(30).to(torch.int8), (random(OUTPUTS) / 100).bfloat16()
        return WeightMatrix(q_OI, out, bias_O, scale_O), q_OI * scale_O[:, None].float()
    if form in BLOCKS:
        quants = pytest.importorskip("gguf.quants", reason="needs pip install gguf")
        kind = pytest.importorskip("gguf", reason="needs pip install gguf").GGMLQuantizationType[form]
        if form in SCALES:  # no library of Python makes these: any bytes do, with small scales
            blocks = random(OUTPUTS, BLOCKS[form][1]).mul(99).to(torch.int8).view(torch.uint8).numpy()
            for at in SCALES[form]:
                blocks[:, at : at + 2] = (random(OUTPUTS, 1) / 100).half().view(torch.uint8).numpy()
        else:
            blocks = quants.quantize(w_OI.numpy(), kind)
        return WeightMatrix(torch.from_numpy(blocks), out, bias_O, form=form), torch.from_numpy(
            quants.dequantize(blocks, kind)
        )
    w_OI = w_OI.to(getattr(torch, form))
    return WeightMatrix(w_OI, out, bias_O), w_OI.float()


def run(operations: list[Operation], x_NW: torch.Tensor, width: int) -> torch.Tensor:
    """The working memory behind them, without attention."""
    assert takes(operations)
    return DecodeStep(operations, width, 0, torch.float32).run(x_NW, [], (torch.empty(0), torch.empty(0)))[0]


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", *BLOCKS])
def test_products_are_those_of_weights_as_they_are_stored(form: str, threads: int) -> None:
    """Behind a norm, stored, added and gated; of any number of rows with the bits that each has alone."""
    (first, w_OI), norm_I, x_NI = stored(form, INPUTS), random(INPUTS), random(21, INPUTS)
    second, bias_O = WeightMatrix(first.weight, INPUTS + OUTPUTS, None, first.scale, first.form), random(OUTPUTS)
    width = INPUTS + 2 * OUTPUTS
    normed_NI = x_NI * (x_NI.square().mean(1, keepdim=True) + 1e-5).rsqrt() * norm_I
    for then, want in (
        (0, normed_NI @ w_OI.T + bias_O),
        (ADD, normed_NI @ w_OI.T + bias_O + 1),
        (2, torch.nn.functional.silu(normed_NI @ w_OI.T + bias_O) * (normed_NI @ w_OI.T)),
        (3, torch.nn.functional.gelu(normed_NI @ w_OI.T + bias_O, approximate="tanh") * (normed_NI @ w_OI.T)),
    ):
        x_NW = torch.cat([x_NI, torch.ones(21, 2 * OUTPUTS)], 1)
        matrices = (first,) if then == ADD else (first, second)
        operations: list[Operation] = [Product(0, INPUTS, matrices, norm_I, 1e-5, then)]
        got_NW = run(operations, x_NW, width)
        if form in BLOCKS:  # to the bit
            plain = tuple(WeightMatrix(w_OI, matrix.out, matrix.bias) for matrix in matrices)
            assert torch.equal(got_NW, run([Product(0, INPUTS, plain, norm_I, 1e-5, then)], x_NW, width))
        assert_close(got_NW[:, INPUTS : INPUTS + OUTPUTS], want)
        for rows in (1, 2, 3, 5, 8, 12):
            assert torch.equal(run(operations, x_NW[:rows], width), got_NW[:rows])


def test_a_column_may_gate_what_a_product_takes() -> None:
    """A row's inputs are multiplied by the sigmoid of a column."""
    matrix, w_OI = stored("float32", INPUTS + 1)
    x_NW = torch.cat([random(3, INPUTS + 1), torch.zeros(3, OUTPUTS)], 1)
    got_NW = run([Product(0, INPUTS, (replace(matrix, bias=None),), gate=INPUTS)], x_NW, x_NW.shape[1])
    assert_close(got_NW[:, INPUTS + 1 :], x_NW[:, INPUTS : INPUTS + 1].sigmoid() * (x_NW[:, :INPUTS] @ w_OI.T))


@pytest.mark.parametrize("then", [0, ADD, 2, 3])
def test_a_product_of_a_layer_norm_may_activate_alone(then: int, threads: int) -> None:
    """Inputs have their mean taken off, outputs pass an activation without another matrix's."""
    (matrix, w_OI), norm_I, bias_I, x_NI = (
        stored("float32", INPUTS),
        random(INPUTS),
        random(INPUTS) + 1,
        random(9, INPUTS),
    )
    x_NW = torch.cat([5 + x_NI, torch.ones(9, OUTPUTS)], 1)
    product = Product(0, INPUTS, (matrix,), norm_I, 1e-2, then, norm_bias=bias_I)
    got_NW = run([product], x_NW, x_NW.shape[1])
    want_NO = torch.nn.functional.layer_norm(5 + x_NI, (INPUTS,), norm_I, bias_I, 1e-2) @ w_OI.T + matrix.bias
    activations = (lambda x: x, lambda x: x + 1, torch.nn.functional.silu, torch.nn.GELU("tanh"))
    assert_close(got_NW[:, INPUTS:], activations[then](want_NO))
    assert torch.equal(run([product], x_NW[4:5], x_NW.shape[1]), got_NW[4:5])


@pytest.mark.parametrize("renormed", [True, False])
@pytest.mark.parametrize("form", ["float32", "bfloat16", "Q8_0"])
def test_experts_are_the_likeliest_ones(form: str, renormed: bool, threads: int) -> None:
    """By logits that are close too; of any number of rows and threads with the bits that each has alone."""
    rows, experts, chosen, inner, norm_I = 40, 5, 3, 96, random(INPUTS)
    router = INPUTS
    inside = router + experts
    ordered = inside + chosen * inner
    shapes = (experts, inner, INPUTS), (experts, inner, INPUTS), (experts, INPUTS, inner)
    found = [stored(form, out, shape) for out, shape in zip((inside, inside, 0), shapes, strict=True)]
    matrices = tuple(replace(matrix, bias=None) for matrix, _ in found)
    gate_EOI, up_EOI, down_EIO = (w_EOI / 16 for _, w_EOI in found)
    x_NW = random(rows, ordered + INPUTS)
    x_NW[1, router:inside] = 1e-6 * torch.arange(experts)
    x_NW[2, router] = torch.nan
    one = Experts(0, INPUTS, matrices, norm_I / 16, 1e-5, 2, router, experts, chosen, renormed, ordered)
    got_NW = run([one], x_NW, x_NW.shape[1])
    x_NI = x_NW[:, :INPUTS]
    normed_NI = x_NI * (x_NI.square().mean(1, keepdim=True) + 1e-5).rsqrt() * norm_I
    weight_NC, expert_NC = x_NW[:, router:inside].softmax(1).topk(chosen)
    if renormed:
        weight_NC = weight_NC / weight_NC.sum(1, keepdim=True)
    inner_NCO = torch.nn.functional.silu(torch.einsum("ni,ncoi->nco", normed_NI, gate_EOI[expert_NC]))
    inner_NCO = inner_NCO * torch.einsum("ni,ncoi->nco", normed_NI, up_EOI[expert_NC])
    want_NI = x_NI + 16 * torch.einsum("nc,nco,ncio->ni", weight_NC, inner_NCO, down_EIO[expert_NC])
    finite = torch.arange(rows) != 2
    assert_close(got_NW[finite, :INPUTS], want_NI[finite])
    assert got_NW[2, :INPUTS].isnan().all() and want_NI[2].isnan().all()
    for count in (1, 2, 5, 17):
        assert torch.equal(run([one], x_NW[3 : 3 + count], x_NW.shape[1]), got_NW[3 : 3 + count])
    torch.set_num_threads(5 - threads)
    assert torch.equal(run([one], x_NW[3:], x_NW.shape[1])[:, :INPUTS], got_NW[3:, :INPUTS])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_that_of_its_definition(dtype: torch.dtype, threads: int) -> None:
    """Of rows with any numbers of keys, or of no sequence; its norms and turns before, and the token kept."""
    norms, x_NW = (random(SIZE), 2 + random(SIZE)), random(4, (2 * HEADS + 2 * GROUPS) * SIZE)
    key, value, out = HEADS * SIZE, (HEADS + GROUPS) * SIZE, (HEADS + 2 * GROUPS) * SIZE
    attention = Attention(0, key, value, out, HEADS, GROUPS, SIZE, SIZE, 0.3, norms, 1e-5)
    assert takes([attention])
    past = [
        (random(1, GROUPS, n, SIZE).to(dtype), random(1, GROUPS, n + 1, SIZE)[:, :, 1:].to(dtype)) for n in (0, 5, 99)
    ]
    angles_NR = random(4, SIZE // 2).repeat(1, 2)
    turns = (angles_NR.cos(), angles_NR.sin())
    step = DecodeStep([attention], x_NW.shape[1], SIZE, dtype)
    with torch.inference_mode():
        got_NW, [after] = step.run(x_NW, [[KeyValueCache(k, v) for k, v in past] + [None]], turns)
        for row, (k, v) in enumerate(past):
            alone_1W, _ = step.run(x_NW[row : row + 1], [[KeyValueCache(k, v)]], tuple(t[row : row + 1] for t in turns))
            assert torch.equal(alone_1W[0], got_NW[row])
    for row, (k, v) in enumerate(past):
        q, new_k = (_placed(x_NW[row, begin:end], norm, *(t[row] for t in turns)) for begin, end, norm in (
            (0, key, norms[0]), (key, value, norms[1])))  # fmt: skip
        k = torch.cat([k, new_k[None, :, None].to(dtype)], 2)
        v = torch.cat([v, x_NW[row, value:out].view(1, GROUPS, 1, SIZE).to(dtype)], 2)
        want = torch.nn.functional.scaled_dot_product_attention(
            q[None, :, None], k.float(), v.float(), scale=0.3, enable_gqa=True
        )
        assert_close(got_NW[row, out:], want.flatten())
        kept = after[row]
        assert kept is not None
        assert_close(kept.k_BGSK, k)
        assert torch.equal(kept.v_BGSV, v)
    assert not got_NW[3, out:].any() and after[3] is None


def _placed(x: torch.Tensor, norm: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    x_HK = x.view(-1, SIZE)
    x_HK = x_HK * (x_HK.square().mean(1, keepdim=True) + 1e-5).rsqrt() * norm
    first, second = x_HK.chunk(2, 1)
    return x_HK * cosine + torch.cat([-second, first], 1) * sine


def stepped(operation: Operation, x_NW: torch.Tensor, before: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Working memory and states behind a step, a row each: of rows that have the same bits alone and in place."""
    assert takes([operation])
    step, nothing = DecodeStep([operation], x_NW.shape[1], 0, dtype), (torch.empty(0), torch.empty(0))
    with torch.inference_mode():
        memory_NW, [after] = step.run(x_NW, [before], nothing)
        for row in range(len(x_NW)):
            alone_1W, [own] = step.run(x_NW[row : row + 1], [before[row : row + 1]], nothing)
            assert torch.equal(alone_1W[0], memory_NW[row]) and torch.equal(own[0], after[row])
        with steps_in_place():
            again_NW, [written] = step.run(x_NW, [place := before.clone()], nothing)
        assert torch.equal(again_NW, memory_NW) and torch.equal(place, after) and written.data_ptr() == place.data_ptr()
    return torch.cat([memory_NW, after.flatten(1).float()], 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("taps", [1, 4])
def test_convolution_is_that_of_its_definition(taps: int, dtype: torch.dtype, threads: int) -> None:
    """Over channels in any order, with inputs that are kept as they enter."""
    channels = 300
    x_NW, w_TC, bias_C = random(3, 2 * channels), random(taps, channels), random(channels)
    tail_NTC, columns_C = random(3, taps - 1, channels).to(dtype), torch.randperm(channels)
    got_NX = stepped(Convolution(columns_C, channels, w_TC, bias_C), x_NW, tail_NTC, dtype)
    inputs_NTC = torch.cat([tail_NTC, x_NW[:, None, columns_C].to(dtype)], 1).float()
    want_NC = torch.nn.functional.silu(convolve_naive(inputs_NTC, w_TC.flip(0))[:, -1] + bias_C)
    assert_close(got_NX[:, channels:], torch.cat([want_NC, inputs_NTC[:, 1:].flatten(1)], 1))


def test_a_convolution_may_norm_its_inputs_and_not_activate(threads: int) -> None:
    """What is kept of a token is what was normed."""
    channels, taps = 272, 4
    x_NW, w_TC, tail_NTC = random(3, 2 * channels), random(taps, channels), random(3, taps - 1, channels)
    norm_C, bias_C, columns_C = random(channels), random(channels), torch.arange(channels)
    one = Convolution(columns_C, channels, w_TC, None, norm_C, 1e-2, bias_C, then=0, newest_first=True)
    normed_NC = torch.nn.functional.layer_norm(x_NW[:, :channels], (channels,), norm_C, bias_C, 1e-2)
    inputs_NTC = torch.cat([tail_NTC, normed_NC[:, None]], 1)
    want_NC = convolve_naive(inputs_NTC, w_TC)[:, -1]
    got_NX = stepped(one, x_NW, tail_NTC, torch.float32)
    assert_close(got_NX[:, channels:], torch.cat([want_NC, inputs_NTC[:, 1:].flatten(1)], 1))
    assert not takes([replace(one, columns=columns_C[:264])])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("size", "values", "vectors"), [(24, 40, 32), (64, 64, 64)])
def test_fourier_attention_is_that_of_its_definition(
    size: int, values: int, vectors: int, gated: bool, threads: int
) -> None:
    """With gates near 0 and 1, a query of zeros, and denominators that are replaced."""
    heads, rows, least = 3, 5, 0.4
    sizes = [heads * each for each in (size, size, values, 1, 1, values)]
    query, key, value, gate, guarded, out = (sum(sizes[:n]) for n in range(6))
    x_NW, w_HDK, sigma_H1K = random(rows, sum(sizes)), random(heads, vectors, size), random(heads, 1, size)
    x_NW[0, :size], x_NW[1, gate : gate + heads] = 0, torch.tensor([-40.0, 0, 40])
    state = LinearState.identity(rows, heads, 2 * vectors, values)
    state = replace(
        state, s_BHMV=random(*state.s_BHMV.shape), z_BHM=random(*state.z_BHM.shape), mass_BH=state.mass_BH + 2
    )
    one = FourierAttention(query, key, value, out, size, values, w_HDK, sigma_H1K, least, guarded, gate if gated else 0)
    assert takes([one]) and not takes([replace(one, weights=w_HDK[:, :24].contiguous())])
    step, nothing = DecodeStep([one], x_NW.shape[1], 0, torch.float32), (torch.empty(0), torch.empty(0))
    before = [*state.tensors()[:4]]
    with torch.no_grad():
        memory_NW, after = step.run(x_NW, before, nothing)
        alone_1W, own = step.run(x_NW[2:3], [tensor[2:3] for tensor in before], nothing)
    assert torch.equal(alone_1W[0], memory_NW[2]) and all(map(torch.equal, own, [tensor[2:3] for tensor in after]))
    q, k, v, logit = (part.unflatten(1, (heads, -1)) for part in x_NW.split(sizes, 1)[:4])
    watch = Watch()
    with watching(watch):
        want_NHV, want = linear_attention_step(
            q, k, v, state, feature_map=Gaussian(sigma_H1K * w_HDK, unit_norm=True),
            denominator=Denominator("floor", least),
            log_gate_BH=torch.nn.functional.logsigmoid(logit[..., 0]) if gated else None,
            key_scale_BH=torch.sigmoid(-logit[..., 0]) if gated else None,
        )  # fmt: skip
    assert_close(memory_NW[:, out:], want_NHV.flatten(1))
    for got, tensor in zip(after, want.tensors(), strict=False):
        assert_close(got, tensor)
    counted = memory_NW[:, guarded:out].sum(0).int()
    assert tuple(counted.tolist()) == watch.guarded[0] and 0 < counted.sum() < rows * heads


@pytest.mark.parametrize(("size", "values", "delta"), [(24, 40, False), (16, 200, False), (48, 80, True)])
def test_recurrence_is_that_of_its_definition(size: int, values: int, delta: bool, threads: int) -> None:
    """With a skip and limits of steps, or as the gated delta rule of unit keys with normed outputs."""
    heads, (begin, width) = 3, (0, 3 * (2 * size + 2 * values + 2))
    widths, columns = (size, size, values, values, 1, 1), []
    for each in widths:
        columns.append(begin + each * torch.arange(heads))
        begin += heads * each
    x_NW, before = random(4, width + heads * values), random(4, heads, size, values)
    log_rates, step_bias, skip, norm_V = random(heads), random(heads) + 1, random(heads), random(values)
    norms = (random(size), 2 + random(size)) if delta else None
    if not delta:
        columns[5] = torch.full((heads,), -1)
    most, own_norm = (9.0, norm_V) if delta else (0.8, None)
    recurrence = HeadRecurrence(
        torch.stack(columns, 1), width, size, values, log_rates, step_bias, 0.2, most, skip, norms, 1e-3, own_norm, 1e-2
    )
    got_NX = stepped(recurrence, x_NW, before, torch.float32)
    parts = x_NW[:, :width].split([heads * each for each in widths], 1)
    q, k, v, gate = (part.unflatten(1, (heads, -1))[:, :, None] for part in parts[:4])
    step_NH1 = torch.nn.functional.softplus(parts[4] + step_bias).clamp(0.2, most)[..., None]
    decay = (-log_rates.exp()[:, None] * step_NH1)[..., None]
    if norms is None:
        out, after = affine_recurrence_naive(
            q, k, v * step_NH1[..., None], log_decay_BHLK=decay, state=AffineState(before)
        )
        out = out + skip[:, None, None] * v
    else:
        q, k = (torch.nn.functional.rms_norm(x, (size,), w, 1e-3) for x, w in zip((q, k), norms, strict=True))
        out, after = gated_delta_rule_naive(
            q, k, v, beta_BHL=parts[5].sigmoid()[..., None], log_decay_BHLK=decay, state=AffineState(before)
        )
        out = torch.nn.functional.rms_norm(out + skip[:, None, None] * v, (values,), norm_V, 1e-2)
    out = out * torch.nn.functional.silu(gate)
    assert_close(got_NX[:, width:], torch.cat([out.flatten(1), after.s_BHKV.flatten(1)], 1))


def test_sizes_that_the_kernel_does_not_take_are_told() -> None:
    """Inputs and heads of odd sizes, matrices in two orders of inputs, vectors of other types, lengths or strides."""
    whole, odd = WeightMatrix(random(8, 64), 64), WeightMatrix(random(8, 40), 64)
    assert takes([Product(0, 64, (whole,))]) and not takes([Product(0, 40, (odd,))])
    assert not takes([Product(0, 32, (whole,))]) and not takes([Product(0, 64, (replace(whole, bias=random(7)),))])
    for norm in (random(32), random(64).double(), random(128)[::2], random(64).to("meta")):
        assert not takes([Product(0, 64, (whole,), norm)])
        assert not takes([Product(0, 64, (whole,), random(64), norm_bias=norm)])
    assert not takes([Product(0, 64, (whole, WeightMatrix(whole.weight.bfloat16(), 72)))])
    assert not takes([Product(0, 64, (WeightMatrix(whole.weight.half(), 64),))])
    assert not takes([Product(0, 64, (WeightMatrix(whole.weight.to(torch.int8), 64),))])  # without scales
    assert not takes([Attention(0, 8, 16, 24, 1, 1, 8, 8, 1.0)])
    of = tuple(WeightMatrix(random(2, 64, 64), 64) for _ in range(3))
    experts = Experts(0, 64, of, random(64), 0.0, 2, 200, 2, 1, True, 264)
    assert takes([experts]) and not takes([replace(experts, chosen=65)])
    assert not takes([replace(experts, matrices=(of[0], of[1], replace(of[2], bias=random(2, 64))))])

"""Relative attention: the windowed form and the step against the oracle and the golden vectors."""

import pytest
import torch

from dist_attn.errors import InputError, ShapeError
from dist_attn.feature_maps import elu_plus_one
from dist_attn_papers.ops.relative_attention import (
    RelativeState,
    WindowState,
    relative_attention,
    relative_attention_naive,
    relative_attention_step,
    relative_attention_streaming,
)
from dist_attn_papers.ops.relative_attention.numerators import numerators_around, numerators_of_all
from tests.support.closeness import assert_close
from tests.support.golden import golden


def _inputs(queries: int, keys: int, reach: int) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)

    def positive(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=g, dtype=torch.float64) + 0.1

    v = torch.randn(2, 3, keys, 4, generator=g, dtype=torch.float64)
    return [positive(2, 3, queries, 5), positive(2, 3, keys, 5), v, positive(3, 2 * reach + 1, 5)]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "reach"),
    [
        *[
            (7, 7, 2),
            (130, 130, 3),
            (600, 600, 16),
            (50, 90, 0),
            (90, 50, 4),
            (200, 70, 100),
            (33, 33, 1),
            (64, 130, 70),
        ],
        # More keys than any window holds, a window of just a chunk and of one more, nothing on either side.
        *[(70, 700, 16), (200, 203, 65), (200, 203, 66), (1, 1, 2), (1, 5, 30), (0, 9, 2), (9, 0, 2), (0, 0, 0)],
    ],
)
def test_windowed_equals_oracle(queries, keys, reach, causal):
    """Output and every gradient equal the oracle's for any lengths and any k, 0 and longer than the sequence too."""
    results = []
    for attention in (relative_attention_naive, relative_attention):
        leaves = [x.clone().requires_grad_() for x in _inputs(queries, keys, reach)]
        out = attention(*leaves, causal=causal)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        (out * weights).sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for got, want in zip(results[1], results[0], strict=True):
        assert_close(got, want, kind="gradient")


@pytest.mark.parametrize("attention", [relative_attention, relative_attention_naive])
def test_golden_scaleformer(attention):
    """All golden cases of Scaleformer come out, masked and not, with the sign clip(j - i)."""
    g = golden("scaleformer_eq9")
    for case in range(len(g["cases"])):
        q, k, v, rp = (g[f"c{case}_{name}"][None, None] for name in ("Q", "K", "V", "RP"))
        for masked in (0, 1):
            features = [elu_plus_one(x) for x in (q, k)]
            out = attention(*features, v, elu_plus_one(rp[0]), causal=bool(masked))
            assert_close(out[0, 0], g[f"c{case}_m{masked}_out"], kind="golden", what=f"case {case} masked {masked}")


@pytest.mark.parametrize("reach", [0, 1, 5, 40])
def test_steps_equal_the_whole(reach):
    """One token at a time, with the state passed on, gives the outputs of the whole sequence."""
    q, k, v, rp = _inputs(33, 33, reach)
    state = RelativeState.identity(2, 3, 5, 4, reach, dtype=torch.float64)
    outs = []
    for t in range(33):
        out, state = relative_attention_step(q[:, :, t], k[:, :, t], v[:, :, t], rp, state)
        outs.append(out)
    assert_close(torch.stack(outs, 2), relative_attention(q, k, v, rp, causal=True))


@pytest.mark.parametrize("reach", [0, 1, 5, 200])
@pytest.mark.parametrize("cuts", [(150,), (1, 149), (64, 0, 80, 6)])
def test_a_stream_equals_the_whole(cuts, reach):
    """Blocks of any size with the state passed on give the outputs and all gradients of the whole sequence."""
    results = []
    for streamed in (False, True):
        leaves = [x.clone().requires_grad_() for x in _inputs(150, 150, reach)]
        q, k, v, rp = leaves
        if streamed:
            state, outs = None, []
            for part in zip(*(t.split(cuts, dim=2) for t in (q, k, v)), strict=True):
                out, state = relative_attention_streaming(*part, rp, state)
                outs.append(out)
            out = torch.cat(outs, 2)
        else:
            out = relative_attention(q, k, v, rp, causal=True)
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        (out * weights).sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves)])
    for got, want in zip(results[1], results[0], strict=True):
        assert_close(got, want, kind="gradient")


@pytest.mark.parametrize("reach", [0, 1, 5])
def test_steps_continue_a_stream(reach):
    """After a block, single steps go on where it ended, and the states agree."""
    q, k, v, rp = _inputs(90, 90, reach)
    want, final = relative_attention_streaming(q, k, v, rp)
    _, state = relative_attention_streaming(*(t[:, :, :80] for t in (q, k, v)), rp)
    for t in range(80, 90):
        out, state = relative_attention_step(q[:, :, t], k[:, :, t], v[:, :, t], rp, state)
        assert_close(out, want[:, :, t])
    assert state.window.length == final.window.length == 90
    for got, field in [(state.sz_BHMW, final.sz_BHMW), (state.window.far_BHW, final.window.far_BHW)]:
        assert_close(got, field, kind="state")
    assert torch.equal(state.window.near_BHTW, final.window.near_BHTW)


@pytest.mark.parametrize("form", ["windowed", "naive"])
@pytest.mark.parametrize("causal", [False, True])
def test_no_weight_on_any_key_gives_zeros(form, causal):
    """Queries that see no key, or whose features are all 0, have the output 0 and finite gradients, in both forms."""
    q, k, v, rp = _inputs(5, 0, 2)
    out = relative_attention(q, k, v, rp, causal=causal, form=form)
    assert torch.equal(out, torch.zeros(2, 3, 5, 4, dtype=torch.float64))
    q, k, v, rp = (t.requires_grad_() for t in _inputs(5, 5, 2))
    silent = torch.ones_like(q)
    silent[:, :, 2] = 0
    out = relative_attention(q * silent, k, v, rp, causal=causal, form=form)
    assert torch.equal(out[:, :, 2], torch.zeros(2, 3, 4, dtype=torch.float64))
    out.sum().backward()
    assert all(bool(t.grad.isfinite().all()) for t in (q, k, v, rp))
    state = RelativeState.identity(2, 3, 5, 4, 2, dtype=torch.float64)
    step, _ = relative_attention_step(q[:, :, 0] * 0, k[:, :, 0], v[:, :, 0], rp, state)
    assert torch.equal(step, torch.zeros_like(step))


def test_the_naive_form_can_be_chosen():
    """The quadratic form is one word away, gives the same, and other words are refused."""
    q, k, v, rp = _inputs(30, 40, 3)
    assert_close(*(relative_attention(q, k, v, rp, causal=True, form=form) for form in ("naive", "windowed")))
    with pytest.raises(InputError, match="'windowed' and 'naive'"):
        relative_attention(q, k, v, rp, causal=True, form="linear")


def test_a_step_keeps_its_precision_under_autocast():
    """Under bf16 autocast a step keeps the bits it has without."""
    q, k, v, rp = (t.float() for t in _inputs(2, 2, 5))
    state = RelativeState.identity(2, 3, 5, 4, 5)
    outs = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            outs.append(relative_attention_step(q[:, :, 0], k[:, :, 0], v[:, :, 0], rp, state)[0])
    assert torch.equal(*outs)


def test_windows_combine_like_the_stretches_they_describe():
    """The window after two stretches is the combination of their windows, in any grouping, short stretches included."""
    v1 = torch.randn(1, 2, 20, 3, dtype=torch.float64)
    for cuts in ([3, 1, 16], [0, 20, 0], [9, 9, 2]):
        a, b, c = (WindowState.of(part, 6) for part in v1.split(cuts, dim=2))
        for combined in (a.combine(b).combine(c), a.combine(b.combine(c))):
            want = WindowState.of(v1, 6)
            assert_close(combined.far_BHW, want.far_BHW)
            assert torch.equal(combined.near_BHTW, want.near_BHTW)
            assert combined.length == 20


@pytest.mark.parametrize("reach", [0, 1, 3, 40, 100])
@pytest.mark.parametrize("cuts", [(80, 64, 56), (3, 130, 67), (0, 200, 0), (199, 1, 0)])
def test_a_stretch_between_two_windows(cuts, reach):
    """A stretch with the windows on its two sides has the numerators it has in the whole, and their gradients."""
    results = []
    for cut in (False, True):
        leaves = [x.clone().requires_grad_() for x in _inputs(200, 200, reach)]
        q, k, v, rp = leaves
        if cut:
            left, mid, right = v.split(cuts, dim=2)
            windows = [WindowState.of(part, max(reach - 1, 0)) for part in (left, right.flip(2))]
            sums = k.transpose(-1, -2) @ v
            num = numerators_around(q.split(cuts, dim=2)[1], mid, rp, sums, *windows)
        else:
            num = numerators_of_all(q, k, v, rp).split(cuts, dim=2)[1]
        weights = torch.randn(num.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        (num * weights).sum().backward()
        results.append([num, *(leaf.grad for leaf in leaves)])
    for got, want in zip(results[1], results[0], strict=True):
        assert_close(got, want, kind="gradient")


@pytest.mark.parametrize("mirrored", [False, True])
def test_large_values_on_one_side_leave_the_other_its_digits(mirrored):
    """Values of a million times the size behind a query cost the sum of those before it no digit, and the reverse."""
    v = torch.rand(1, 1, 4000, 4, generator=torch.Generator().manual_seed(0))
    v[:, :, 2000:] *= 1e6
    rp = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0])[None, :, None]
    q = torch.ones(1, 1, 4000, 1)
    if mirrored:
        v, rp = v.flip(2), rp.flip(1)
    num = numerators_around(q, v, rp)
    want = numerators_around(q.double(), v.double(), rp.double())
    part = slice(2000, None) if mirrored else slice(2000)
    assert_close(num[:, :, part], want[:, :, part].float())


def test_an_even_number_of_positions_is_refused():
    """phi_rp needs 2 k + 1 rows."""
    q, k, v, rp = _inputs(4, 4, 2)
    with pytest.raises(ShapeError, match="R = 2 k \\+ 1 odd"):
        relative_attention(q, k, v, rp[:, :4], causal=True)

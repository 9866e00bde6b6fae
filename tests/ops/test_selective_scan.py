"""Scans with decays that tokens choose: the form in chunks against the oracle and the golden vectors."""

import math
from itertools import pairwise

import pytest
import torch

from dist_attn.errors import ShapeError
from dist_attn.ops import gated_scan, gated_step, selective_scan, selective_step
from dist_attn.ops.selective_scan import absorb_gated, absorb_selected, gated_scan_naive, selective_scan_naive
from dist_attn.ops.state import steps_in_place
from tests.support.attention import weighted_sum
from tests.support.closeness import assert_close
from tests.support.golden import golden
from tests.support.pairs import each_pair
from tests.support.sharded_call import random_tensor

CHANNELS, SIZE = 3, 2


def _gated(form, length, given_state=True, documents=None, closed=()):
    """What `form` gives, and every gradient."""
    x, gate, state = (random_tensor(2, *s, CHANNELS, seed=i) for i, s in enumerate([(length,), (length,), ()]))
    gate = torch.nn.functional.logsigmoid(gate)
    gate[:, closed] = -math.inf
    leaves = [t.requires_grad_() for t in (x, gate, state)]
    h, after = form(x, gate, state=state if given_state else None, documents=documents)
    return _with_gradients(h, after, leaves)


def _selected(form, length, given_state=True, documents=None, closed=()):
    """What `form` gives, and every gradient; where tokens are `closed`, steps are so long that nothing is left."""
    shapes = [(2, length, CHANNELS), (2, length, CHANNELS), (CHANNELS, SIZE), (2, length, SIZE), (2, length, SIZE)]
    x, dt, a, b, c, skip, state = (
        random_tensor(*s, seed=i) for i, s in enumerate([*shapes, (CHANNELS,), (2, CHANNELS, SIZE)])
    )
    dt = torch.nn.functional.softplus(dt)
    dt[:, closed] = 1e6
    x[:, closed] /= 1e6
    leaves = [t.requires_grad_() for t in (x, dt, -a.exp(), b, c, skip, state)]
    y, after = form(*leaves[:5], skip_D=skip, state=state if given_state else None, documents=documents)
    return _with_gradients(y, after, leaves)


def _with_gradients(y, after, leaves):
    loss = 0 * leaves[0].sum() + weighted_sum(y) + weighted_sum(after, seed=2)
    grads = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return [y, after, *grads]


FORMS = {
    "gated": (_gated, gated_scan, gated_scan_naive),
    "selective": (_selected, selective_scan, selective_scan_naive),
}
BOTH = pytest.mark.parametrize("name", FORMS)


def _compare(name, *args):
    case, fast, naive = FORMS[name]
    for index, (got, want) in enumerate(zip(case(fast, *args), case(naive, *args), strict=True)):
        assert_close(got, want, kind="gradient", what=str(index))


@pytest.mark.parametrize(("name", "length", "given_state"), each_pair(FORMS, (0, 1, 15, 16, 17, 200), (False, True)))
def test_chunks_equal_the_oracle(name, length, given_state):
    """Outputs, final state and every gradient are the oracle's at any length."""
    _compare(name, length, given_state)


@BOTH
def test_several_blocks_equal_the_oracle(name, monkeypatch):
    """So they are where states are kept every few blocks and the others made again."""
    monkeypatch.setitem(selective_scan.__globals__["BLOCK_BYTES"], "cpu", 1)
    _compare(name, 150)


@BOTH
@pytest.mark.parametrize("documents", [(), (0,), (40,), (0, 1, 2, 30, 46, 99)])
def test_documents_equal_the_oracle(name, documents):
    """Each document begins from zeros, with all gradients."""
    _compare(name, 100, True, documents)


@BOTH
@pytest.mark.parametrize("documents", [None, (5, 41)])
def test_closed_gates(name, documents):
    """A decay of 0 drops what came before and harms nothing else, gradients included."""
    _compare(name, 70, True, documents, (0, 3, 4, 15, 16, 40, 69))


@BOTH
def test_a_nan_stays_in_its_document(name):
    """States are dropped where a document starts, not multiplied."""
    x = torch.ones(1, 40, 2)
    x[:, 3] = math.nan
    if name == "gated":
        y, after = gated_scan(x, -x.new_ones(x.shape), documents=(20,))
    else:
        y, after = selective_scan(
            x, x.new_ones(x.shape), -torch.ones(2, 2), *2 * [torch.ones(1, 40, 2)], documents=(20,)
        )
    assert bool(y[:, :3].isfinite().all()) and bool(y[:, 20:].isfinite().all()) and bool(after.isfinite().all())


@pytest.mark.parametrize("form", [selective_scan, selective_scan_naive])
def test_golden_selective_scan(form):
    """Mamba's scan and its last state come out, whole and in two parts."""
    g = golden("selective_scan")
    for cuts in ((0, 11), (0, 4, 11)):
        state, outs = g["h0"], []
        for start, stop in pairwise(cuts):
            x, dt, b, c = (g[k][:, start:stop] for k in ("x", "dt", "B", "C"))
            y, state = form(x, dt, g["A"], b, c, skip_D=g["D"], state=state)
            outs.append(y)
        assert_close(torch.cat(outs, dim=1), g["y"], kind="golden")
        assert_close(state, g["h"], kind="golden")


@pytest.mark.parametrize("form", [gated_scan, gated_scan_naive])
def test_golden_rg_lru(form):
    """Griffin's recurrence comes out, with inputs scaled by sqrt(1 - a^2)."""
    g = golden("rg_lru")
    y, after = form((1 - (2 * g["log_a"]).exp()).sqrt() * g["x"], g["log_a"], state=g["h0"])
    assert_close(y, g["y"], kind="golden")
    assert_close(after, g["y"][:, -1], kind="golden")


@BOTH
def test_second_derivatives(name):
    """Gradients are themselves differentiable."""
    sizes = [(1, 5, 2), (1, 5, 2), (1, 2)] if name == "gated" else [(1, 5, 2), (1, 5, 2), (2, 2), (1, 5, 2), (1, 5, 2)]
    leaves = [random_tensor(*s, seed=i).requires_grad_() for i, s in enumerate(sizes)]

    def call(*t):
        return gated_scan(t[0], t[1], state=t[2], documents=(3,)) if name == "gated" else selective_scan(*t)

    assert torch.autograd.gradgradcheck(call, leaves, fast_mode=True)


def test_steps_and_what_tokens_leave():
    """Token by token the steps give what the scans give, in place too, and tokens alone leave the scans' state."""
    x, dt, b, c = (random_tensor(2, 9, n, seed=i) for i, n in enumerate((3, 3, 2, 2)))
    dt, a, skip = dt.exp(), -random_tensor(3, 2, seed=4).exp(), random_tensor(3, seed=5)
    want, last = selective_scan(x, dt, a, b, c, skip_D=skip)
    h_want, h_last = gated_scan(x, -dt)
    assert_close(absorb_selected(x, dt, a, b, like=torch.float32), last, kind="state")
    assert_close(absorb_gated(x, -dt, like=torch.float32), h_last, kind="state")
    s_BDN, h_BD = torch.zeros_like(last), torch.zeros_like(h_last)
    with torch.no_grad(), steps_in_place():
        for t in range(9):
            y, after = selective_step(x[:, t], dt[:, t], a, b[:, t], c[:, t], s_BDN, skip_D=skip)
            h, h_after = gated_step(x[:, t], -dt[:, t], h_BD)
            assert after is s_BDN and h_after is h_BD
            assert_close(y, want[:, t])
            assert_close(h, h_want[:, t])


def test_half_precision_is_summed_in_float32():
    """Half precision goes in and out, states are float32, under autocast too."""
    x, b = torch.ones(1, 40, 2).bfloat16(), torch.ones(1, 40, 2).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = selective_scan(x, x, -torch.ones(2, 2), b, b)
        h, h_state = gated_scan(x, -x)
    assert (y.dtype, state.dtype, h.dtype, h_state.dtype) == (torch.bfloat16, torch.float32) * 2
    want, want_state = selective_scan(x.double(), x.double(), -torch.ones(2, 2), b.double(), b.double())
    assert_close(state, want_state.float(), kind="state")
    assert_close(y, want.bfloat16())


def test_the_states_of_all_tokens_never_exist_at_once(monkeypatch):
    """No tensor of the forward or the backward pass holds more states than a block has tokens."""
    monkeypatch.setitem(selective_scan.__globals__["BLOCK_BYTES"], "cpu", 4 * 64 * 8 * 64)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else [out]:
                largest = max(largest, t.numel() if isinstance(t, torch.Tensor) else 0)
            return out

    tokens, size = 512, 64
    x, dt, b, c = (torch.ones(1, tokens, n, requires_grad=True) for n in (8, 8, size, size))
    with Watch():
        selective_scan(x, dt, -torch.ones(8, size), b, c)[0].sum().backward()
    assert largest == 64 * 8 * size


@pytest.mark.parametrize(
    "change",
    [{"dt": (2, 5, 4)}, {"a": (4, 2)}, {"b": (2, 4, 2)}, {"c": (2, 5, 3)}, {"state": (1, 3, 2)}, {"skip": (2,)}],
)
def test_shapes_that_do_not_fit_are_named(change):
    """The message says which shapes are needed."""
    shapes = {"x": (2, 5, 3), "dt": (2, 5, 3), "a": (3, 2), "b": (2, 5, 2), "c": (2, 5, 2)}
    shapes |= {"skip": (3,), "state": (2, 3, 2)} | change
    *inputs, skip, state = (torch.zeros(s) for s in shapes.values())
    with pytest.raises(ShapeError, match="needed"):
        selective_scan(*inputs, skip_D=skip, state=state)
    with pytest.raises(ShapeError, match="needed"):
        gated_scan(torch.zeros(2, 5, 3), torch.zeros(2, 5, 3), state=torch.zeros(1, 3))
    with pytest.raises(ShapeError, match="needed"):
        gated_scan(torch.zeros(2, 5, 3), torch.zeros(2, 5, 1))

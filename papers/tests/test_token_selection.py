"""Selection of tokens: the fast form against the oracle and the golden vectors; what is never dropped."""

import pytest
import torch

from dist_attn.errors import InputError, ShapeError
from dist_attn_papers.ops.token_selection import select_tokens, select_tokens_naive
from tests.support.closeness import assert_close
from tests.support.golden import golden


def _selected(x, score, **options):
    kept = select_tokens(x, score, **options)
    return kept.x_NC, kept.position_N


def _scores(length: int, seed: int = 0) -> torch.Tensor:
    """Scores of which many are equal."""
    return torch.randint(0, 7, (length,), generator=torch.Generator().manual_seed(seed)).double() / 7


@pytest.mark.parametrize("at_most", [None, 1, 3, 40])
@pytest.mark.parametrize("threshold", [-1.0, 0.4, 0.8, 2.0])
@pytest.mark.parametrize("length", [0, 1, 13, 31])
def test_fast_equals_oracle(length, threshold, at_most):
    """Tokens, positions and the gradient of the tokens equal the oracle's, with equal scores and with limits."""
    results = []
    for function in (select_tokens_naive, _selected):
        x = torch.randn(length, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()
        kept, position = function(x, _scores(length), threshold=threshold, at_most=at_most)
        (kept.square().sum() + 0 * x.sum()).backward()
        results.append((kept, position, x.grad))
    for got, want in zip(*results, strict=True):
        assert_close(got, want, kind="exact")


def test_golden_selector():
    """The golden scores pass their threshold at the golden positions."""
    g = golden("system")
    assert_close(torch.sigmoid(g["X"] @ g["w"] + g["b"]), g["score"], kind="golden")
    kept, position = _selected(g["X"], g["score"], threshold=float(g["tau"]))
    assert_close(position, g["kept"], kind="exact")
    assert_close(kept, g["X"][g["kept"]], kind="exact")


def test_a_threshold_that_nothing_reaches_keeps_the_best_token():
    """Of tokens that are all below the threshold the one with the highest score stays, the earlier of two."""
    score = torch.tensor([0.1, 0.4, 0.2, 0.4])
    _, position = _selected(torch.zeros(4, 2), score, threshold=0.999)
    assert position.tolist() == [1]


def test_what_cannot_be_selected_is_refused():
    """Scores of another number of tokens and a limit of no tokens are refused with what is needed."""
    with pytest.raises(ShapeError, match=r"needed are \[L, C\] and \[L\]"):
        select_tokens(torch.zeros(4, 2), torch.zeros(3), threshold=0.5)
    with pytest.raises(InputError, match="at least one token is kept"):
        select_tokens(torch.zeros(4, 2), torch.zeros(4), threshold=0.5, at_most=0)

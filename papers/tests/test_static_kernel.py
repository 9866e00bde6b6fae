"""The static kernel of the tokens themselves: its definition."""

import pytest
import torch
import torch.nn.functional as F

from dist_attn.mixers import build_mixer
from dist_attn.ops import LocalSequenceOps
from dist_attn_papers.mixers.static_kernel_config import StaticKernelConfig
from tests.mixers.test_kernel_mixers import SIZE
from tests.support.closeness import assert_close
from tests.support.sharded_call import random_tensor


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("divisor", ["weights", "length", "none"])
def test_static_kernel_is_its_definition(divisor: str, bidirectional: bool) -> None:
    """Outputs are phi(X) phi(X)^T X with phi = elu + 1, by sums of weights, numbers of tokens, or as printed."""
    values = {"kind": "static_kernel", "hidden_size": SIZE, "divisor": divisor, "bidirectional": bidirectional}
    mixer, x = build_mixer(StaticKernelConfig.model_validate(values)).double(), random_tensor(2, 70, SIZE, seed=8)
    got, _ = mixer(x, LocalSequenceOps())
    scores = (F.elu(x) + 1) @ (F.elu(x) + 1).transpose(-1, -2)
    seen = torch.ones_like(scores) if bidirectional else torch.ones_like(scores).tril()
    divisors = {"weights": scores * seen, "length": seen, "none": torch.full_like(scores, 1 / 70)}[divisor]
    assert_close(got, (scores * seen) @ x / divisors.sum(-1, keepdim=True))
    assert not list(mixer.parameters())

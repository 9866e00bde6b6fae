"""Token mixing across ranks: each rank weighs its own tokens, the sums are added, and each makes its own tokens."""

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.layout import SequenceLayout
from dist_attn.ops.token_mixing import Activation, check_token_mlp, sums_over_tokens, tokens_of_sums

__all__ = ["sharded_mix_tokens"]


def sharded_mix_tokens(
    comm: Communicator,
    layout: SequenceLayout,
    x_BLD: torch.Tensor,
    w_in_LS: torch.Tensor,
    w_out_SL: torch.Tensor,
    *,
    bias_in_S: torch.Tensor | None = None,
    bias_out_L: torch.Tensor | None = None,
    activation: Activation = "gelu_tanh",
) -> torch.Tensor:
    """`ops.mix_tokens` on this rank's slice; weights and biases are those of all tokens, equal on all ranks.

    Of the weights only those of this rank's places are used, so their gradients are zero elsewhere; that of the inner
    bias is this rank's share.

    Shapes: x [B, L local, D], weights and biases as `ops.mix_tokens` with L global -> [B, L local, D].
    Cost: one all-reduce of B S D elements, whatever the length.
    """
    check_token_mlp(layout.total, w_in_LS, w_out_SL, bias_in_S, bias_out_L, activation)
    here = slice(*layout.range(comm.rank))
    sums_BSD = collectives.all_reduce_sum(comm, sums_over_tokens(x_BLD, w_in_LS[here]), label="token mixing")
    bias_here = None if bias_out_L is None else bias_out_L[here]
    return tokens_of_sums(sums_BSD, w_out_SL[:, here], bias_in_S, bias_here, activation).to(x_BLD.dtype)

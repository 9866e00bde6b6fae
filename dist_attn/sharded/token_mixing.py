"""Token mixing across ranks: every rank takes all tokens of some channels, mixes them, and gives them back."""

import torch

from dist_attn.comm import Communicator
from dist_attn.layout import SequenceLayout
from dist_attn.ops import mix_tokens
from dist_attn.ops.token_mixing import Activation, check_token_weights
from dist_attn.sharded.reshuffle import columns_to_tokens, tokens_to_columns

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

    Gradients of weights and biases are this rank's share, that of its channels.

    Shapes: x [B, L local, D], weights and biases as `ops.mix_tokens` with L global -> [B, L local, D].
    Cost: two all-to-alls; a rank with D' of the D channels sends B L local (D - D') elements and then
        B (L - L local) D'.
    """
    check_token_weights(layout.total, w_in_LS, w_out_SL, bias_in_S, bias_out_L)
    columns_CTB = tokens_to_columns(comm, layout, x_BLD.permute(2, 1, 0), label="token mixing")
    mixed_BTC = mix_tokens(
        columns_CTB.permute(2, 1, 0),
        w_in_LS,
        w_out_SL,
        bias_in_S=bias_in_S,
        bias_out_L=bias_out_L,
        activation=activation,
    )
    return columns_to_tokens(
        comm, layout, mixed_BTC.permute(2, 1, 0), x_BLD.shape[2], label="token mixing back"
    ).permute(2, 1, 0)

"""Token mixing (MLP-Mixer) by two matrix products along the sequence, with weights shared by all channels.

Over ranks each weighs its own tokens, the sums are added, and each makes its own tokens.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
import torch.nn.functional as F

from dist_attn.comm import differentiable as collectives
from dist_attn.errors import InputError, ShapeError
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn.ops.sequence_call import SequenceCall, local_form
from dist_attn.sharded import Sharding, over_ranks

Activation = Literal["gelu_tanh", "gelu", "relu"]


def mix_tokens(
    x_BLD: torch.Tensor,
    w_in_LS: torch.Tensor,
    w_out_SL: torch.Tensor,
    *,
    bias_in_S: torch.Tensor | None = None,
    bias_out_L: torch.Tensor | None = None,
    activation: Activation = "gelu_tanh",
    ops: SequenceOps | None = None,
) -> torch.Tensor:
    """The MLP that MLP-Mixer applies to every channel over the tokens: w_out^T act(w_in^T x + b_in) + b_out.

    Every token sees every other; the length is that of the weights.

    Shapes: x [B, L, D], w_in [L, S], w_out [S, L], bias_in [S], bias_out [L] -> [B, L, D] in x's dtype.
    Raises: ShapeError when they do not fit together; InputError for another activation.
    Reference: A Unified View of Long-Sequence Models, Eq. 12 (with the GELU that it leaves out).
    """
    mlp = TokenMlp(w_in_LS, w_out_SL, bias_in_S, bias_out_L, activation)
    return (LocalSequenceOps() if ops is None else ops).run(TokenMixingCall(x_BLD, mlp))


@dataclass(frozen=True)
class TokenMlp:
    """The arguments of `mix_tokens` beside the tokens, which explains them."""

    w_in_LS: torch.Tensor
    w_out_SL: torch.Tensor
    bias_in_S: torch.Tensor | None = None
    bias_out_L: torch.Tensor | None = None
    activation: Activation = "gelu_tanh"

    def tensors(self) -> dict[str, torch.Tensor | None]:
        """Weights and biases by name."""
        return {"w_in": self.w_in_LS, "w_out": self.w_out_SL, "bias_in": self.bias_in_S, "bias_out": self.bias_out_L}

    def of_tokens(self, tokens: slice) -> "TokenMlp":
        """The part that is about these tokens: their share of the sums, and what is made at their places."""
        bias_out_L = None if self.bias_out_L is None else self.bias_out_L[tokens]
        return replace(self, w_in_LS=self.w_in_LS[tokens], w_out_SL=self.w_out_SL[:, tokens], bias_out_L=bias_out_L)

    def sums(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """The S weighed sums of tokens that the hidden numbers are made of; those of slices add up.

        Shapes: x [B, L, D] -> [B, S, D].
        """
        return self.w_in_LS.to(x_BLD.dtype).T @ x_BLD

    def outputs(self, sums_BSD: torch.Tensor) -> torch.Tensor:
        """The outputs at the places of `w_out`, from the sums over all tokens.

        Shapes: sums [B, S, D] -> [B, L, D].
        """
        h_BSD = sums_BSD if self.bias_in_S is None else sums_BSD + self.bias_in_S.to(sums_BSD.dtype)[:, None]
        if self.activation == "relu":
            h_BSD = F.relu(h_BSD)
        else:
            h_BSD = F.gelu(h_BSD, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        y_BLD = self.w_out_SL.to(h_BSD.dtype).T @ h_BSD
        return y_BLD if self.bias_out_L is None else y_BLD + self.bias_out_L.to(y_BLD.dtype)[:, None]

    def check(self, length: int) -> None:
        """Raise ShapeError when these are not weights of `length` tokens, InputError for another activation."""
        if self.activation not in get_args(Activation):
            raise InputError(f"activation {self.activation!r} was given; there are {', '.join(get_args(Activation))}")
        hidden = self.w_in_LS.shape[1] if self.w_in_LS.dim() == 2 else 0
        wanted = {"w_in": (length, hidden), "w_out": (hidden, length), "bias_in": (hidden,), "bias_out": (length,)}
        shapes = {name: tuple(t.shape) for name, t in self.tensors().items() if t is not None}
        if any(shape != wanted[name] for name, shape in shapes.items()):
            raise ShapeError(
                f"the weights have shapes {shapes}; for {length} tokens w_in is [{length}, S], w_out [S, {length}], "
                f"bias_in [S] and bias_out [{length}]"
            )


@dataclass(frozen=True)
class TokenMixingCall(SequenceCall[torch.Tensor]):
    """The arguments of `mix_tokens`: the tokens, and the MLP that mixes them."""

    x_BLD: torch.Tensor
    mlp: TokenMlp

    operation: ClassVar[str] = "mix_tokens"
    along: ClassVar[tuple[str, ...]] = ("x_BLD",)
    packs: ClassVar[bool] = False


@local_form(TokenMixingCall)
def mix_whole(call: TokenMixingCall) -> torch.Tensor:
    """`mix_tokens` of a call."""
    x_BLD, mlp = call.x_BLD, call.mlp
    if x_BLD.dim() != 3:
        raise ShapeError(f"x has shape {tuple(x_BLD.shape)}; needed is [B, L, D]")
    mlp.check(x_BLD.shape[1])
    return mlp.outputs(mlp.sums(x_BLD)).to(x_BLD.dtype)


def mix_tokens_naive(
    x_BLD: torch.Tensor,
    w_in_LS: torch.Tensor,
    w_out_SL: torch.Tensor,
    *,
    bias_in_S: torch.Tensor | None = None,
    bias_out_L: torch.Tensor | None = None,
    activation: Literal["gelu_tanh", "gelu", "relu"] = "gelu_tanh",
) -> torch.Tensor:
    """w_out^T act(w_in^T x + b_in) + b_out by definition; see `mix_tokens`."""
    y_BLD = torch.zeros_like(x_BLD)
    for b in range(x_BLD.shape[0]):
        for d in range(x_BLD.shape[2]):
            h_S = sum((w * x for w, x in zip(w_in_LS, x_BLD[b, :, d], strict=True)), start=torch.zeros_like(w_in_LS[0]))
            h_S = h_S if bias_in_S is None else h_S + bias_in_S
            if activation == "gelu_tanh":
                h_S = h_S * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h_S + 0.044715 * h_S**3))) / 2
            elif activation == "gelu":
                h_S = h_S * (1 + torch.erf(h_S / math.sqrt(2))) / 2
            else:
                h_S = h_S * (h_S > 0)
            y_L = sum((w * h for w, h in zip(w_out_SL, h_S, strict=True)), start=torch.zeros_like(w_out_SL[0]))
            y_BLD[b, :, d] = y_L if bias_out_L is None else y_L + bias_out_L
    return y_BLD


@over_ranks(TokenMixingCall)
def sharded_mix_tokens(sharding: Sharding, call: TokenMixingCall) -> torch.Tensor:
    """`mix_tokens` on this rank's slice; weights and biases are those of all tokens, equal on all ranks.

    Of the weights only those of this rank's places are used, so their gradients are zero elsewhere; that of the inner
    bias is this rank's share.

    Shapes: x [B, L local, D], weights and biases as `mix_tokens` with L global -> [B, L local, D].
    Cost: one all-reduce of B S D elements, whatever the length.
    """
    comm, layout, x_BLD, mlp = sharding.comm, sharding.layout, call.x_BLD, call.mlp
    mlp.check(layout.total)
    here = mlp.of_tokens(slice(*layout.range(comm.rank)))
    sums_BSD = collectives.all_reduce_sum(comm, here.sums(x_BLD), label="token mixing")
    return here.outputs(sums_BSD).to(x_BLD.dtype)

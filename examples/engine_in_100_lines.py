"""The engine in 100 lines: one sequence over four ranks, exactly, forward and backward, and then token by token.

    python examples/engine_in_100_lines.py

Gated linear attention keeps a state S and a sum z of fixed size:  S_t = g_t S_(t-1) + f(k_t) v_t^T,
z_t = g_t z_(t-1) + f(k_t),  o_t = S_t^T f(q_t) / z_t . f(q_t).  What a stretch of tokens does to a state is
"multiply by its gates, add its own state", and two such pairs combine to one: so each rank reads its own slice from an
empty state, one small exchange brings it the pairs of the others, and a correction makes its rows those of the whole.
What is written out here is compared with the library's own. B batch, H heads, L tokens, K key size, V value size.
"""

import argparse

import torch

from dist_attn.comm import Communicator, run_simulated
from dist_attn.comm.differentiable import all_gather
from dist_attn.feature_maps import EluPlusOne
from dist_attn.layout import SequenceLayout
from dist_attn.ops import Denominator
from dist_attn.sharded import ShardedSequenceOps

B, H, K, V = 1, 2, 8, 8
feature_map = EluPlusOne()
Tensors = tuple[torch.Tensor, ...]


def with_ones(v_BHLV: torch.Tensor) -> torch.Tensor:
    """A column of ones behind the values: what is summed of it is z."""
    return torch.cat([v_BHLV, torch.ones_like(v_BHLV[..., :1])], dim=-1)


def read(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, log_gate: torch.Tensor) -> Tensors:
    """A slice from an empty state: numerators and z [B, H, L, V + 1], gates so far [B, H, L], the state after it."""
    sums, total = log_gate.cumsum(-1), log_gate.sum(-1, keepdim=True)
    # Token i counts at token t by the gates between them; nothing that comes later counts.
    between = (sums[..., :, None] - sums[..., None, :]).tril()
    weights = (feature_map(q) @ feature_map(k).transpose(-1, -2) * between.exp()).tril()
    state = (feature_map(k) * (total - sums).exp()[..., None]).transpose(-1, -2) @ with_ones(v)
    return weights @ with_ones(v), sums, state


def divided(sums: torch.Tensor) -> torch.Tensor:
    """The numerators over z."""
    return sums[..., :-1] / sums[..., -1:]


def on_this_rank(comm: Communicator, layout: SequenceLayout, whole: Tensors) -> tuple[torch.Tensor, torch.Tensor, int]:
    """This rank's rows of the whole sequence, its state behind the last token, and the bytes that were exchanged."""
    q, k, v, log_gate = (x[:, :, layout.cuts[comm.rank] : layout.cuts[comm.rank + 1]] for x in whole)
    sums, gates, state = read(q, k, v, log_gate)
    # The one exchange: every rank's pair of gates and state. Its size does not depend on the length.
    pair = torch.cat([log_gate.sum(-1)[..., None, None].expand(B, H, 1, V + 1), state], dim=2)
    before, after = torch.zeros_like(state), torch.zeros_like(state)
    for rank, other in enumerate(all_gather(comm, pair, label="carry")):
        gate, own = other[:, :, :1].exp(), other[:, :, 1:]
        after = gate * after + own
        # 0 times: the backward pass of every rank then meets that of the others in the exchange.
        before = after if rank < comm.rank else before + 0 * own
    rows = divided(sums + gates.exp()[..., None] * (feature_map(q) @ before))
    return rows, after, pair.numel() * pair.element_size()


def step(token: Tensors, state: torch.Tensor) -> Tensors:
    """One more token: its row [B, H, 1, V] and the state behind it."""
    q, k, v, log_gate = token
    state = log_gate.exp()[..., None] * state + feature_map(k).transpose(-1, -2) @ with_ones(v)
    return divided(feature_map(q) @ state), state


def main() -> None:
    """Compare the rows, the gradients and the next token of one rank, of four, and of the library."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=4)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)  # so that nothing but mistakes shows
    q, k = (torch.randn(B, H, options.tokens + 1, K) for _ in range(2))
    v, log_gate = torch.randn(B, H, options.tokens + 1, V), -torch.rand(B, H, options.tokens + 1) / 10
    first = tuple(x[:, :, :-1].clone().requires_grad_() for x in (q, k, v, log_gate))
    layout = SequenceLayout.even(options.tokens, options.ranks)

    rows = divided(read(*first)[0])  # on one rank
    wanted = torch.autograd.grad(rows.square().sum(), first)

    def own(comm: Communicator) -> tuple[torch.Tensor, Tensors, torch.Tensor, int]:
        part, state, size = on_this_rank(comm, layout, first)
        return part.detach(), torch.autograd.grad(part.square().sum(), first), state.detach(), size

    def library(comm: Communicator) -> torch.Tensor:
        q, k, v, gate = (x.detach().split(layout.lengths, 2)[comm.rank] for x in first)
        ops, exact = ShardedSequenceOps(comm, layout), Denominator("exact")
        return ops.linear_attention(q, k, v, feature_map=feature_map, log_gate_BHS=gate, denominator=exact)[0]

    parts = run_simulated(own, options.ranks)
    gradients = [torch.stack(shares).sum(0) for shares in zip(*(part[1] for part in parts), strict=True)]
    following, _ = step(tuple(x[:, :, -1:] for x in (q, k, v, log_gate)), parts[0][2])
    differences = {
        "rows over ranks": (torch.cat([part[0] for part in parts], 2) - rows).abs().max(),
        "gradients over ranks": max((a - b).abs().max() for a, b in zip(gradients, wanted, strict=True)),
        "rows of the library": (torch.cat(run_simulated(library, options.ranks), 2) - rows).abs().max(),
        "the next token": (following - divided(read(q, k, v, log_gate)[0])[:, :, -1:]).abs().max(),
    }
    print(f"{options.tokens} tokens over {options.ranks} ranks; each sends {parts[0][3]} bytes, whatever the length")
    for what, difference in differences.items():
        print(f"{what}: {difference:.1e} from one rank")


if __name__ == "__main__":
    main()

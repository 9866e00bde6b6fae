"""Causal linear attention by flash-linear-attention's kernels of gated attention, on features that torch makes.

`fla.ops.simple_gla` computes o_t = q_t^T S_t of S_t = exp(g_t) S_{t-1} + k_t v_t^T and its gradients. Given phi(q),
phi(k) times the key scale, and a column of ones beside v, these are numerators beside denominators, and S beside z.
Masses are no products of queries and keys: torch adds them up.

Unlike in our kernels, the features of all tokens exist at once; so that they are not kept, the backward pass makes them
again. Of bfloat16, states are rounded between chunks and sums before the division; of float32, a GPU's products are
TF32.

Importing this module needs fla (fla-core); `implementation.choose` says whether a call can come here.

Shape letters: B batch, H heads, L tokens, V values, M features, W = V + 1 (S beside z, numerators beside denominators),
N documents of all batch elements, n chunks of C tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
import torch.nn.functional as F
from fla.ops.simple_gla import chunk_simple_gla, fused_recurrent_simple_gla

from dist_attn.ops.device import running_sums, send, without_autocast
from dist_attn.ops.documents import document_ranges, start_flags
from dist_attn.ops.kernel_operation import Tensors, gradients_again, present
from dist_attn.ops.linear_attention.block import CLOSED, bounded
from dist_attn.ops.linear_attention.call import LinearCall
from dist_attn.ops.linear_attention.differentiable import LinearTensors, LinearTerms
from dist_attn.ops.state import LinearState

MASS_CHUNK = 16  # so many numbers are kept for each token and head, far fewer than its features


def fla_linear_attention(call: LinearCall, *, undivided: bool = False) -> tuple[torch.Tensor, LinearState]:
    """`linear_attention` of a causal call with as many queries as keys; `undivided`, as `local_sums`.

    Shapes: q, k [B, H, L, K], v [B, H, L, V], gates [B, H, L] -> o [B, H, L, V] in v's dtype, or float32
        [B, H, L, V + 2] of numerators, denominators and masses; the float32 state after.
    """
    return _FlaKernels.of(call, undivided=undivided).attend(call, call.state_before(call.num_features()))


@dataclass(frozen=True)
class _FlaKernels(LinearTerms):
    def forward(self, x: LinearTensors, *, keep: bool) -> tuple[Tensors, Tensors]:
        return self._results(x), ()

    def backward(self, x: LinearTensors, needs: LinearTensors, grads: Tensors, kept: Tensors) -> LinearTensors:
        """The gradients by fla's own backward pass."""
        return gradients_again(self._results, x, needs, grads)

    def _results(self, x: LinearTensors) -> Tensors:
        call = self.call(x)
        v, state = call.v_BHSV, call.state
        assert state is not None  # a call of tensors by name has one
        # One token is bound by the state, and sums that are not divided yet are float32.
        dtype = torch.float32 if self.undivided or call.queries == 1 else v.dtype
        with without_autocast(v.device):
            phi_q_BHLM, phi_k_BHLM = call.features(call.q_BHLK.float()), call.features(call.k_BHSK.float())
            num_BHLW, sz_BHMW = _products(call, phi_q_BHLM.to(dtype), phi_k_BHLM, state)
            mass_BHL = _masses(call, state)
            if self.undivided:
                out = torch.cat([num_BHLW, mass_BHL[..., None]], dim=-1)
            else:
                out = self.denominator.divide(num_BHLW[..., :-1], num_BHLW[..., -1], mass_BHL).to(v.dtype)
            zm_BHE = torch.cat([sz_BHMW[..., -1], mass_BHL[..., -1:]], dim=-1)
        return out, sz_BHMW[..., :-1], zm_BHE


def _products(
    call: LinearCall, phi_q_BHLM: torch.Tensor, phi_k_BHLM: torch.Tensor, state: LinearState
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numerators beside denominators [B, H, L, V + 1], and S beside z after the last token, in float32."""
    features, width = phi_k_BHLM.shape[3], call.v_BHSV.shape[3] + 1
    if call.key_scale_BHS is not None:
        # Here, so that numerators and denominators are of the same rounded weights.
        phi_k_BHLM = phi_k_BHLM * call.key_scale_BHS.float()[..., None]
    v1_BHLW = F.pad(call.v_BHSV, (0, 1), value=1.0)
    q, k, v = (_even(x).transpose(1, 2).to(phi_q_BHLM.dtype).contiguous() for x in (phi_q_BHLM, phi_k_BHLM, v1_BHLW))
    gate = None if call.log_gate_BHS is None else bounded(call.log_gate_BHS, torch.float32).transpose(1, 2).contiguous()
    before = _even(_even(torch.cat([state.s_BHMV, state.z_BHM[..., None]], dim=-1)).mT).mT
    kernels = fused_recurrent_simple_gla if call.queries == 1 and not call.documents else chunk_simple_gla
    num, after = run_kernels(kernels, (q, k, v, gate), before, call.documents)
    return num.transpose(1, 2)[..., :width].float(), after[..., :features, :width]


def run_kernels(
    kernels: Callable[..., Tensors],
    tensors_BL: Sequence[torch.Tensor | None],
    before_BHKV: torch.Tensor,
    documents: tuple[int, ...],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [B, L, H, V] and the state after the last token of one of fla's operations, unscaled.

    Packed documents become one row of sequences of their own; the state is that of the last document.

    Cost: two states of each document.
    """
    run = partial(kernels, scale=1.0, output_final_state=True)
    if not documents:
        out, after = run(*tensors_BL, initial_state=before_BHKV)
        return present(out), present(after)
    batch, tokens = present(tensors_BL[0]).shape[:2]
    ranges = document_ranges(documents, tokens)
    lengths = [stop - start for start, stop in ranges] * batch
    ends = send(torch.tensor([0, *accumulate(lengths)], device="cpu"), before_BHKV.device)
    first_N = None
    if documents[0]:
        # Only the first of a row's documents goes on from the state.
        others = before_BHKV.new_zeros(()).expand(batch, len(ranges) - 1, *before_BHKV.shape[1:])
        first_N = torch.cat([before_BHKV[:, None], others], dim=1).flatten(0, 1)
    row = (None if x is None else x.flatten(0, 1)[None] for x in tensors_BL)
    out, after_N = run(*row, initial_state=first_N, cu_seqlens=ends)
    return present(out)[0].unflatten(0, (batch, tokens)), present(after_N).unflatten(0, (batch, len(ranges)))[:, -1]


def _masses(call: LinearCall, state: LinearState) -> torch.Tensor:
    """The weight [B, H, L] that each query's keys and the state before them have together."""
    scale, log_gate, before_BH1 = call.key_scale_BHS, call.log_gate_BHS, state.mass_BH[..., None]
    shape, device = call.v_BHSV.shape[:3], call.v_BHSV.device
    weight_BHL = torch.ones(shape, device=device) if scale is None else scale.float()
    if log_gate is None and not call.documents:
        return before_BH1 + running_sums(weight_BHL)
    gate_BHL = torch.zeros(shape, device=device) if log_gate is None else bounded(log_gate, torch.float32)
    if call.documents:
        gate_BHL = gate_BHL.masked_fill(start_flags(call.documents, shape[2], device), CLOSED[torch.float32])
    first_BH1 = weight_BHL[..., :1] + gate_BHL[..., :1].exp() * before_BH1
    return _decayed_sums(torch.cat([first_BH1, weight_BHL[..., 1:]], dim=-1), gate_BHL)


def _decayed_sums(x_BHL: torch.Tensor, log_gate_BHL: torch.Tensor) -> torch.Tensor:
    """y_t = exp(log_gate_t) y_{t-1} + x_t, by chunks, whose ends are such sums again."""
    tokens = x_BHL.shape[2]
    chunks = -(-tokens // MASS_CHUNK)
    padding, shape = (0, chunks * MASS_CHUNK - tokens), (*x_BHL.shape[:2], chunks, MASS_CHUNK)
    x, gate = (F.pad(t, padding).reshape(shape) for t in (x_BHL, log_gate_BHL))
    decay_BHnC = gate.cumsum(-1)
    seen_CC = torch.ones(MASS_CHUNK, MASS_CHUNK, dtype=torch.bool, device=x.device).tril()
    pairs_BHnCC = (decay_BHnC[..., :, None] - decay_BHnC[..., None, :]).masked_fill(~seen_CC, float("-inf")).exp()
    sums_BHnC = (pairs_BHnCC * x[..., None, :]).sum(-1)
    if chunks > 1:
        ends_BHn = _decayed_sums(sums_BHnC[..., -1], bounded(decay_BHnC[..., -1], torch.float32))
        sums_BHnC = sums_BHnC + decay_BHnC.exp() * F.pad(ends_BHn[..., :-1], (1, 0))[..., None]
    return sums_BHnC.flatten(2)[..., :tokens]


def _even(x: torch.Tensor) -> torch.Tensor:
    """x with a column of zeros more where it has an odd number: fla's gradients of half precision need even sizes."""
    return F.pad(x, (0, x.shape[-1] % 2))

"""Linear attention in streaming form: blocks of bounded size, a carried state, memory flat in the length.

Every function here is made of operations that autograd knows, to any order of derivatives, on any device.

Shape letters: B batch, H heads, L queries, S keys, T tokens of a block, K head size, V values, M features, W = V + 1
(S beside z, numerators beside denominators), X = V + 2 (and masses beside both).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch

from dist_attn.ops.device import running_sums
from dist_attn.ops.documents import start_flags
from dist_attn.ops.linear_attention.block import AttentionBlock, BlockCarry, BlockTokens, bounded
from dist_attn.ops.linear_attention.call import LinearCall
from dist_attn.ops.scan import MaybeTensors, OutputOnly, StateOnly, Tensors, scan
from dist_attn.ops.state import LinearState

# A block of 512 tokens x 8 heads of features, scores and states stays inside the L2/L3 cache; whole tensors
# would be bound by memory traffic (4.4 times slower at 32,768 tokens). More batch x heads, fewer tokens a block.
BLOCK_GROUP_TOKENS = 8 * 512
BLOCK_CHUNKS = 8
# A GPU waits for launches, some 30 a block, and not for its cache: there a block may fill 256 MiB, of which a token of
# a head with 64 features and values takes 4 KiB. Work within a block grows with the square of its chunks.
GPU_BLOCK_GROUP_TOKENS = (256 << 20) // 4096
GPU_BLOCK_CHUNKS = 128
CHUNK_TOKENS = 64


def stream_attention(call: LinearCall) -> tuple[torch.Tensor, LinearState]:
    """`linear_attention` without a prefix, and not of several documents unless causal."""
    stream = _Stream.begin(call, call.sums_dtype())
    shared = min(call.queries, call.keys) if call.causal else 0
    carry = stream.carry
    outputs: list[torch.Tensor] = []
    if shared:
        out, carry = stream.attend(call.part(slice(shared), slice(shared)), carry)
        outputs.append(out)
    if shared < call.keys:
        carry = stream.absorb(call.part(slice(0), slice(shared, None)), carry)
    if shared < call.queries or not outputs:
        outputs.append(stream.read(call.q_BHLK[:, :, shared:], carry, call.v_BHSV.dtype))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2), stream.state(carry)


def stream_absorb(call: LinearCall, dtype: torch.dtype = torch.float32) -> LinearState:
    """The state after the last key, of at least this precision; queries count for nothing.

    Without keys there are no blocks, but the same graph: an empty rank takes part in the backward exchange too.
    """
    stream = _Stream.begin(call, call.of_keys().sums_dtype(dtype))
    return stream.state(stream.absorb(call, stream.carry))


def stream_sums(call: LinearCall, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, LinearState]:
    """Numerators, denominators and masses [B, H, L, V + 2] of causal attention, and the state after the last key."""
    stream = _Stream.begin(call, call.sums_dtype(dtype))
    sums_BHLX, carry = stream.attend(call, stream.carry, undivided=True)
    return sums_BHLX, stream.state(carry)


def stream_completed_sums(call: LinearCall, sums_BHLX: torch.Tensor) -> torch.Tensor:
    """Outputs [B, H, L, V] in v's dtype of sums and the call's state, which is decayed by the gates since."""
    dtype, before, log_gate = sums_BHLX.dtype, call.state, call.log_gate_BHS
    assert before is not None  # what the sums are completed by
    sz_BHMW = torch.cat([before.s_BHMV, before.z_BHM[..., None]], dim=-1).to(dtype)
    mass_BH = before.mass_BH.to(dtype)
    out_BHLV, _ = scan(
        _Complete(AttentionBlock(call.feature_map, call.denominator, 1, dtype), len(call.map_tensors)),
        block_ranges(sums_BHLX.shape, sums_BHLX.device),
        (sums_BHLX, call.q_BHLK, log_gate),
        () if log_gate is None else (torch.zeros_like(mass_BH),),
        (*call.map_tensors, sz_BHMW, mass_BH),
        output_shape=(*sums_BHLX.shape[:3], sums_BHLX.shape[3] - 2),
        output_dtype=call.v_BHSV.dtype,
    )
    return out_BHLV


@dataclass(frozen=True)
class _Stream:
    """The terms that all blocks of a call have in common, and the values that they begin with."""

    block: AttentionBlock
    carry: BlockCarry
    map_tensors: Tensors
    reset_BH: torch.Tensor

    @staticmethod
    def begin(call: LinearCall, dtype: torch.dtype) -> "_Stream":
        state = call.state_before(call.num_features(), dtype)
        sz_BHMW = torch.cat([state.s_BHMV, state.z_BHM[..., None]], dim=-1).to(dtype)
        return _Stream(
            AttentionBlock(call.feature_map, call.denominator, CHUNK_TOKENS, dtype, call.v_BHSV.device.type != "cpu"),
            BlockCarry(sz_BHMW, state.mass_BH.to(dtype), state.log_decay_BH.to(dtype)),
            call.map_tensors,
            torch.ones_like(state.reset_BH) if call.documents else state.reset_BH,
        )

    def attend(
        self, call: LinearCall, carry: BlockCarry, *, undivided: bool = False
    ) -> tuple[torch.Tensor, BlockCarry]:
        """Outputs, or what is to be divided [B, H, L, V + 2], and the carry after the last token."""
        columns, dtype = (2, self.block.dtype) if undivided else (0, call.v_BHSV.dtype)
        shape = (*call.v_BHSV.shape[:3], call.v_BHSV.shape[3] + columns)
        out, after = scan(
            _Attend(self.block, undivided),
            block_ranges(shape, call.v_BHSV.device),
            self._tokens(call, call.q_BHLK),
            carry,
            self.map_tensors,
            output_shape=shape,
            output_dtype=dtype,
        )
        return out, BlockCarry(*after)

    def absorb(self, call: LinearCall, carry: BlockCarry) -> BlockCarry:
        """The carry after the last key."""
        body = StateOnly(partial(_absorb, self.block))
        blocks = block_ranges(call.v_BHSV.shape, call.v_BHSV.device)
        return BlockCarry(*scan(body, blocks, self._tokens(call, None), carry, self.map_tensors)[1])

    def _tokens(self, call: LinearCall, q_BHLK: torch.Tensor | None) -> BlockTokens:
        starts_11L = None
        if call.documents:
            starts_11L = start_flags(call.documents, call.keys, call.k_BHSK.device)[None, None]
        return BlockTokens(q_BHLK, *call.sequence[1:], starts_11L)

    def read(self, q_BHLK: torch.Tensor, carry: BlockCarry, dtype: torch.dtype) -> torch.Tensor:
        """Outputs [B, H, L, V] of queries that all see exactly `carry`: a parameter, whose gradients add up."""
        block, count = self.block, len(self.map_tensors)

        def read(sequence: MaybeTensors, parameters: Tensors) -> torch.Tensor:
            (q,) = sequence
            assert q is not None
            return block.read(q, BlockCarry(*parameters[count:]), parameters[:count])

        return scan(
            OutputOnly(read),
            block_ranges(q_BHLK.shape, q_BHLK.device),
            (q_BHLK,),
            (),
            (*self.map_tensors, *carry),
            output_shape=(*q_BHLK.shape[:3], carry.sz_BHMW.shape[3] - 1),
            output_dtype=dtype,
        )[0]

    def state(self, carry: BlockCarry) -> LinearState:
        sz_BHMW, mass_BH, log_decay_BH = carry
        return LinearState(sz_BHMW[..., :-1], sz_BHMW[..., -1], mass_BH, log_decay_BH, self.reset_BH)


def _absorb(block: AttentionBlock, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> BlockCarry:
    """The carry after a block, without its outputs."""
    return block.absorb(BlockTokens.of(sequence), BlockCarry(*carry), parameters)


@dataclass(frozen=True)
class _Attend:
    """Blocks of causal attention; `undivided`, what is to be divided."""

    block: AttentionBlock
    undivided: bool
    has_output = True

    def run(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> tuple[torch.Tensor | None, Tensors]:
        tokens, before = BlockTokens.of(sequence), BlockCarry(*carry)
        if not self.undivided:
            return self.block.attend(tokens, before, parameters)
        num_BHTW, mass_BHT, after = self.block.sums(tokens, before, parameters)
        return torch.cat([num_BHTW, mass_BHT[..., None]], dim=-1), after

    def advance(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> Tensors:
        return _absorb(self.block, sequence, carry, parameters)


@dataclass(frozen=True)
class _Complete:
    """Every block reads the same state, so that one is a parameter; the carry is the log of what is left of it."""

    block: AttentionBlock
    num_map_tensors: int
    has_output = True

    def run(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> tuple[torch.Tensor | None, Tensors]:
        sums, q, log_gate = sequence
        assert sums is not None and q is not None
        sz_BHMW, mass_BH = parameters[self.num_map_tensors :]
        decay_BHT = None
        after = carry
        if log_gate is not None:
            if _vanished(carry[0]):
                return self.block.divide(sums), carry
            decay_BHT = carry[0][..., None] + running_sums(bounded(log_gate, sums.dtype))
            after = (decay_BHT[..., -1],)
        earlier = BlockCarry(sz_BHMW, mass_BH, mass_BH)
        return self.block.complete(sums, q, decay_BHT, earlier, parameters[: self.num_map_tensors]), after

    def advance(self, sequence: MaybeTensors, carry: Tensors, parameters: Tensors) -> Tensors:
        _, _, log_gate = sequence
        if log_gate is None or _vanished(carry[0]):
            return carry
        return (carry[0] + running_sums(bounded(log_gate, carry[0].dtype))[..., -1],)


def _vanished(log_decay_BH: torch.Tensor) -> bool:
    """Return whether all decays are below the smallest normal number; not asked of a GPU, which would have to wait."""
    if log_decay_BH.device.type != "cpu" or torch.compiler.is_compiling() or not log_decay_BH.numel():
        return False
    return bool(log_decay_BH.detach().max() < math.log(torch.finfo(log_decay_BH.dtype).tiny))


def block_ranges(shape: Sequence[int], device: torch.device) -> list[tuple[int, int]]:
    """Token ranges of the blocks of a [B, H, L, ...] tensor: equal ones, the remaining whole chunks, the tail.

    On a CPU they fit into its cache, elsewhere they are few. No token is padded or dropped.
    """
    batch, heads, tokens = shape[:3]
    per_chunk = CHUNK_TOKENS * max(1, batch * heads)
    chunks = min(GPU_BLOCK_CHUNKS, GPU_BLOCK_GROUP_TOKENS // per_chunk)
    if device.type == "cpu":
        chunks = min(BLOCK_CHUNKS, BLOCK_GROUP_TOKENS // per_chunk)
    chunks = max(1, chunks)
    whole = tokens - tokens % CHUNK_TOKENS
    edges = [*range(0, whole, chunks * CHUNK_TOKENS), whole, tokens]
    return [(a, b) for a, b in pairwise(edges) if a < b]

"""`SequenceOps` over a sequence that is cut across ranks: the other side of the seam that models see."""

from dataclasses import replace
from functools import partial

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.layout import SequenceLayout
from dist_attn.ops import KeyValueCache, LinearState, SequenceOps
from dist_attn.ops.affine import AffineCall, AffineState
from dist_attn.ops.dense_space import DenseCall
from dist_attn.ops.diagonal import DiagonalCall
from dist_attn.ops.documents import DocumentPlaces, document_places, sums_of_documents
from dist_attn.ops.fourier import FourierNorm
from dist_attn.ops.legs import LegsState
from dist_attn.ops.linear_attention import Implementation, LinearCall, check_prefix
from dist_attn.ops.relative_attention import RelativeCall, RelativeState
from dist_attn.ops.running_maximum import Maxima
from dist_attn.ops.selective_scan import SelectiveCall
from dist_attn.ops.softmax_attention import SoftmaxCall
from dist_attn.ops.token_mixing import TokenMlp
from dist_attn.sharded.affine import recur_over_ranks, threads_of
from dist_attn.sharded.columns import sharded_fourier_mix, sharded_long_convolve
from dist_attn.sharded.convolution import sharded_convolve, sharded_convolve_streaming
from dist_attn.sharded.linear import attend_over_layouts
from dist_attn.sharded.prefix_scan import Algorithm, ScanExchange, settle
from dist_attn.sharded.relative import (
    sharded_packed_relative_attention,
    sharded_relative_attention,
    sharded_relative_attention_streaming,
)
from dist_attn.sharded.sharding import CacheKept, Sharding, SoftmaxExchange
from dist_attn.sharded.softmax import softmax_over_layouts, softmax_stream_over_layouts
from dist_attn.sharded.state_spaces import (
    sharded_dense_scan,
    sharded_diagonal_scan,
    sharded_gated_scan,
    sharded_legs_memory,
    sharded_selective_scan,
)
from dist_attn.sharded.sums import sharded_mix_tokens, sharded_running_maximum
from dist_attn.sharded.token_routing import ShardedRoutes, sharded_route_tokens
from dist_attn.sharded.token_selection import ShardedSelection, sharded_select_tokens


class ShardedSequenceOps(SequenceOps):
    """The operations of `LocalSequenceOps` on this rank's slice of a sequence laid out by `layout`.

    State in is the state before the first global token, equal on all ranks; state out the global final one, on all
    ranks. Gradients of replicated inputs are this rank's share; the loss is the sum of the ranks' losses; every rank
    runs every operation and its backward pass, empty slices too.

    With `memory_layout` keys and values of attention lie on a layout of their own, as in cross attention; causal linear
    attention then brings queries to its keys. A `prefix` counts global tokens, and takes linear attention a second
    exchange of states.

    `softmax` says how exact attention gets to all keys: by moving heads to ranks, which is even work and two exchanges
    ("reshuffle"), or by passing keys round, which holds two slices at most and takes P - 1 exchanges ("ring").

    `exchange` is how carries travel, by name or with its details; all ways give the same result to rounding.
    `cache` says what a key-value cache holds after a block: each rank the keys of its own slices ("spread"), which is
    the one state that is not equal on all ranks, or every rank all of them ("whole"), so that each can decode alone.

    `deterministic` makes linear attention, affine recurrences and short convolutions give the same bits for any number
    of ranks; every cut must lie at a multiple of 64 tokens or at the end, and other mixing operations are refused.

    `implementation` is what computes linear attention, affine recurrences and the stream of relative attention on this
    rank, as for `LocalSequenceOps`. Kernels by name are refused where there are none, on ranks without tokens too.

    Every rank must construct it: ranks compare layouts and exchanges, in one small exchange unless they are those of
    the object constructed before; the first time they also learn each other's hosts and the measured times.

    Raises: ShapeError for a layout of another number of ranks, or a slice of another length than the layout says;
        MismatchError on every rank where the layouts or the exchanges differ, and from an operation whose arguments
        do: dtypes, sizes, gates, settings. That takes a small exchange the first time a call is met. ConfigError on
        every rank for an implementation that does not exist, or that cannot take a call.
    """

    def __init__(
        self,
        comm: Communicator,
        layout: SequenceLayout,
        memory_layout: SequenceLayout | None = None,
        *,
        softmax: SoftmaxExchange = "reshuffle",
        exchange: ScanExchange | Algorithm = "auto",
        cache: CacheKept = "spread",
        deterministic: bool = False,
        implementation: Implementation = "auto",
    ) -> None:
        memory = layout if memory_layout is None else memory_layout
        asked = ScanExchange(exchange) if isinstance(exchange, str) else exchange
        sharding = Sharding(comm, layout, memory, asked, softmax, cache, deterministic, implementation)
        sharding.check_implementation()
        # Messages have one size for any layout: with different ones on the ranks results would be wrong without a word.
        comm.agree_on("layout and exchange", sharding.words)
        self._sharding = replace(sharding, exchange=settle(comm, asked), threads=threads_of(comm))
        self._comm, self._layout = comm, layout

    def _attend(self, call: LinearCall) -> tuple[torch.Tensor, LinearState]:
        self._sharding.check_queries(call.queries)
        self._sharding.check_keys(call.keys)
        check_prefix(call.prefix, causal=call.causal, documents=self._sharding.packed)
        self._sharding.agree(
            "linear_attention",
            dict(zip(("q", "k", "v", "log_gate", "key_scale"), call.sequence, strict=True)),
            2,
            causal=call.causal,
            prefix=call.prefix,
            denominator=call.denominator,
            feature_map=call.feature_map,
            state=None if call.state is None else call.state.s_BHMV,
        )
        return attend_over_layouts(self._sharding, replace(call, implementation=self._sharding.implementation))

    def _recur(self, call: AffineCall) -> tuple[torch.Tensor, AffineState]:
        operation = "affine_recurrence" if call.beta_BHL is None else "gated_delta_rule"
        self._sharding.check_queries(call.tokens, "tokens")
        names = ("q", "k", "v", "log_decay", "erase_a", "erase_b", "beta")
        state = None if call.state is None else call.state.s_BHKV
        along = dict(zip(names, call.sequence, strict=True))
        self._sharding.agree(operation, along, 2, bonus=call.bonus_HK, read=call.read, state=state)
        return recur_over_ranks(self._sharding, replace(call, implementation=self._sharding.implementation))

    def _attend_relative(self, call: RelativeCall) -> torch.Tensor:
        self._sharding.refuse_deterministic("relative attention")
        self._sharding.check_queries(call.queries)
        self._sharding.check_keys(call.keys)
        along = dict(zip(("phi_q", "phi_k", "v"), call.tensors[:3], strict=True))
        self._sharding.agree("relative_attention", along, 2, rp=call.phi_rp_HRK, causal=call.causal)
        if self._sharding.packed:
            self._sharding.refuse_memory("relative_attention")
        attend = sharded_packed_relative_attention if self._sharding.packed else sharded_relative_attention
        return attend(self._sharding, call)

    def _stream_relative(self, call: RelativeCall) -> tuple[torch.Tensor, RelativeState]:
        self._sharding.refuse_deterministic("relative attention")
        self._sharding.refuse_documents("relative_attention_streaming")
        self._sharding.check_queries(call.queries)
        self._sharding.check_queries(call.keys, "keys")
        along = dict(zip(("phi_q", "phi_k", "v"), call.tensors[:3], strict=True))
        state = call.state is not None
        self._sharding.agree("relative_attention_streaming", along, 2, rp=call.phi_rp_HRK, state=state)
        return sharded_relative_attention_streaming(self._sharding, call)

    def _attend_exactly(self, call: SoftmaxCall) -> torch.Tensor:
        self._sharding.refuse_deterministic("softmax attention")
        self._sharding.check_queries(call.queries)
        self._sharding.check_keys(call.keys)
        check_prefix(call.prefix, causal=call.causal, documents=self._sharding.packed)
        if call.options.relative is not None and self._sharding.packed:
            self._sharding.refuse_memory("softmax_attention with relative positions")
        along = dict(zip("qkv", call.qkv, strict=True))
        settings = {"causal": call.causal, "prefix": call.prefix, **call.options.settings()}
        self._sharding.agree("softmax_attention", along, 2, **settings)
        return softmax_over_layouts(self._sharding, call)

    def _attend_onward(self, call: SoftmaxCall, cache: KeyValueCache) -> tuple[torch.Tensor, KeyValueCache]:
        # The first block of a stream goes the way that `softmax` says, see `sharded.softmax`.
        self._sharding.refuse_deterministic("softmax attention")
        self._sharding.check_queries(call.queries)
        self._sharding.check_queries(call.keys, "keys")
        along = dict(zip("qkv", call.qkv, strict=True))
        self._sharding.agree("softmax_attention_streaming", along, 2, **call.options.settings())
        return softmax_stream_over_layouts(self._sharding, call, cache)

    def fourier_mix(self, x_BLD: torch.Tensor, *, norm: FourierNorm = None) -> torch.Tensor:
        """See `sharded.columns.sharded_fourier_mix`."""
        self._sharding.refuse_deterministic("Fourier mixing")
        self._sharding.agree_on_tokens("fourier_mix", {"x": x_BLD}, norm=norm)
        return sharded_fourier_mix(self._comm, self._layout, x_BLD, norm=norm)

    def long_convolve(
        self, x_BLD: torch.Tensor, kernel_LD: torch.Tensor, *, backward_kernel_LD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `sharded.columns.sharded_long_convolve`."""
        self._sharding.refuse_deterministic("long convolutions")
        self._sharding.agree_on_tokens(
            "long_convolve", {"x": x_BLD}, kernel=kernel_LD, backward_kernel=backward_kernel_LD
        )
        return sharded_long_convolve(self._comm, self._layout, x_BLD, kernel_LD, backward_kernel_LD=backward_kernel_LD)

    def _scan_diagonal(self, call: DiagonalCall) -> tuple[torch.Tensor, torch.Tensor]:
        self._sharding.refuse_deterministic("the diagonal scan")
        system = {"a": call.a_DN, "b": call.b_DN, "c": call.c_DN}
        self._sharding.agree_on_tokens("diagonal_scan", {"u": call.u_BLD}, 1, **system, state=call.state)
        return sharded_diagonal_scan(self._sharding, call)

    def gated_scan(
        self, x_BLD: torch.Tensor, log_decay_BLD: torch.Tensor, *, state: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `sharded.state_spaces.sharded_gated_scan`."""
        self._sharding.refuse_deterministic("the gated scan")
        self._sharding.agree_on_tokens("gated_scan", {"x": x_BLD, "log_decay": log_decay_BLD}, state=state)
        return sharded_gated_scan(self._sharding, x_BLD, log_decay_BLD, state=state)

    def _scan_selected(self, call: SelectiveCall) -> tuple[torch.Tensor, torch.Tensor]:
        self._sharding.refuse_deterministic("the selective scan")
        along = {"x": call.x_BLD, "dt": call.dt_BLD, "b": call.b_BLN, "c": call.c_BLN}
        self._sharding.agree_on_tokens("selective_scan", along, a=call.a_DN, skip=call.skip_D, state=call.state)
        return sharded_selective_scan(self._sharding, call)

    def _scan_dense(self, call: DenseCall) -> tuple[torch.Tensor, torch.Tensor]:
        self._sharding.refuse_documents("dense_scan")
        self._sharding.refuse_deterministic("the scan of a state space")
        system = {"a": call.a_DNN, "b": call.b_DN, "c": call.c_DMN}
        self._sharding.agree_on_tokens("dense_scan", {"u": call.u_BLD}, 1, **system, state=call.state)
        return sharded_dense_scan(self._sharding, call)

    def legs_memory(
        self, f_BLD: torch.Tensor, read_DN: torch.Tensor, *, state: LegsState | None = None
    ) -> tuple[torch.Tensor, LegsState]:
        """See `sharded.state_spaces.sharded_legs_memory`; one unbroken sequence only."""
        self._sharding.refuse_documents("legs_memory")
        self._sharding.refuse_deterministic("the memory of the whole past")
        before = None if state is None else state.c_BDN
        self._sharding.agree_on_tokens("legs_memory", {"f": f_BLD}, read=read_DN, state=before)
        return sharded_legs_memory(self._sharding, f_BLD, read_DN, state=state)

    def _mix_tokens(self, x_BLD: torch.Tensor, mlp: TokenMlp) -> torch.Tensor:
        self._sharding.refuse_documents("mix_tokens")
        self._sharding.refuse_deterministic("token mixing")
        self._sharding.agree_on_tokens("mix_tokens", {"x": x_BLD}, 1, **mlp.tensors(), activation=mlp.activation)
        return sharded_mix_tokens(self._sharding, x_BLD, mlp)

    def convolve(self, x_BLD: torch.Tensor, w_KD: torch.Tensor, *, centred: bool = False) -> torch.Tensor:
        """See `sharded.convolution.sharded_convolve`."""
        self._sharding.agree_on_tokens("convolve", {"x": x_BLD}, w=w_KD, centred=centred)
        return sharded_convolve(self._sharding, x_BLD, w_KD, centred=centred)

    def convolve_streaming(
        self, x_BLD: torch.Tensor, w_KD: torch.Tensor, tail_BKD: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `sharded.convolution.sharded_convolve_streaming`."""
        self._sharding.agree_on_tokens("convolve_streaming", {"x": x_BLD}, w=w_KD, tail=tail_BKD)
        return sharded_convolve_streaming(self._sharding, x_BLD, w_KD, tail_BKD)

    def select_tokens(
        self, x_LC: torch.Tensor, score_L: torch.Tensor, *, threshold: float, at_most: int | None = None
    ) -> ShardedSelection:
        """See `sharded.token_selection.sharded_select_tokens`; one unbroken sequence only."""
        self._sharding.refuse_documents("select_tokens")
        self._sharding.refuse_deterministic("the selection of tokens")
        self._sharding.agree_on_tokens(
            "select_tokens", {"x": x_LC, "score": score_L}, 0, threshold=threshold, at_most=at_most
        )
        along = partial(
            ShardedSequenceOps,
            self._comm,
            softmax=self._sharding.softmax,
            exchange=self._sharding.exchange,
            cache=self._sharding.cache,
            implementation=self._sharding.implementation,
        )
        return sharded_select_tokens(self._comm, self._layout, along, x_LC, score_L, threshold, at_most)

    def route_tokens(
        self, x_LC: torch.Tensor, expert_LK: torch.Tensor, *, num_experts: int, capacity: int
    ) -> ShardedRoutes:
        """See `sharded.token_routing.sharded_route_tokens`; one unbroken sequence only."""
        self._sharding.refuse_documents("route_tokens")
        self._sharding.refuse_deterministic("the routing of tokens")
        self._sharding.agree_on_tokens(
            "route_tokens", {"x": x_LC, "expert": expert_LK}, 0, experts=num_experts, capacity=capacity
        )
        return sharded_route_tokens(self._comm, x_LC, expert_LK, num_experts, capacity)

    def running_maximum(
        self, x_BHS: torch.Tensor, before_BH: torch.Tensor, *, log_gate_BHS: torch.Tensor | None = None
    ) -> Maxima:
        """See `sharded.sums.sharded_running_maximum`; keys lie on `memory_layout` where one is given."""
        if log_gate_BHS is not None:
            self._sharding.refuse_deterministic("the running maximum of gated keys")
        self._sharding.check_keys(x_BHS.shape[2])
        self._sharding.agree("running_maximum", {"x": x_BHS, "log_gate": log_gate_BHS}, 2, before=before_BH)
        return sharded_running_maximum(self._sharding, x_BHS, before_BH, log_gate_BHS=log_gate_BHS)

    def sum_over_sequence(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """The sum over the tokens of all ranks, [B, L, D] -> [B, D], on every rank.

        Cost: one all-reduce of B D elements.
        """
        self._sharding.refuse_deterministic("sums over the sequence")
        self._sharding.agree_on_tokens("sum_over_sequence", {"x": x_BLD})
        return collectives.all_reduce_sum(self._comm, x_BLD.sum(dim=1), label="sum over sequence")

    def sum_over_documents(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """The sums over the tokens of each document on all ranks, [B, L, D] -> [B, N, D], on every rank.

        Cost: one all-reduce of B N D elements.
        """
        self._sharding.refuse_deterministic("sums over documents")
        places = self.document_places(x_BLD.shape[1])
        self._sharding.agree("sum_over_documents", {"x": x_BLD})
        sums_BND = sums_of_documents(x_BLD, places)
        return collectives.all_reduce_sum(self._comm, sums_BND, label="sum over documents")

    def document_places(self, length: int) -> DocumentPlaces:
        """The places of the `length` tokens held here in their documents; an unbroken sequence is one."""
        self._sharding.check_queries(length, "tokens")
        layout = self._layout
        return document_places(layout.document_ranges(), *layout.range(self._comm.rank), layout.documents or ())

    def positions(self, length: int | None = None, device: torch.device | str = "cpu") -> torch.Tensor:
        """Global index of each token held here, [L], counted from the start of this call's sequence."""
        if length is not None:
            self._sharding.check_queries(length, "tokens")
        return torch.arange(*self._layout.range(self._comm.rank), device=device)

    def total_length(self, length: int) -> int:
        """Tokens of the whole sequence, of which `length` are held here."""
        self._sharding.check_queries(length, "tokens")
        return self._layout.total

    @property
    def cuts(self) -> tuple[int, ...]:
        """The positions at which the sequence is cut between processes; the same answer on every rank."""
        return self._layout.cuts[1:-1]

    @property
    def whole(self) -> bool:
        """Return whether all tokens are held here, whatever the layout; the same answer on every rank."""
        return self._comm.size == 1

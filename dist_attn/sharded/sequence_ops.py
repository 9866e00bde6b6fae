"""`SequenceOps` over a sequence that is cut across ranks: the other side of the seam that models see."""

from collections.abc import Callable, Mapping
from functools import partial

import torch

from dist_attn.comm import Communicator
from dist_attn.comm import differentiable as collectives
from dist_attn.errors import ConfigError, InputError, ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.ops import Denominator, FeatureMap, KeyValueCache, LinearState, RelativePositions
from dist_attn.ops.documents import DocumentPlaces, document_places, sums_of_documents
from dist_attn.ops.fourier import FourierNorm
from dist_attn.ops.legs import LegsState
from dist_attn.ops.linear_attention import Implementation
from dist_attn.ops.linear_attention.prefix import Attend, check_prefix, prefix_then_causal
from dist_attn.ops.relative_attention import RelativeState
from dist_attn.ops.running_maximum import Maxima
from dist_attn.ops.token_mixing import Activation
from dist_attn.sharded.call_agreement import Setting, agree_on_call, layouts_in_words
from dist_attn.sharded.carry_scan import sharded_linear_attention
from dist_attn.sharded.dense_space import sharded_dense_scan
from dist_attn.sharded.diagonal import sharded_diagonal_scan
from dist_attn.sharded.fourier import sharded_fourier_mix
from dist_attn.sharded.halo import sharded_convolve, sharded_convolve_streaming
from dist_attn.sharded.in_order import attention_in_order, check_grid
from dist_attn.sharded.legs import sharded_legs_memory
from dist_attn.sharded.long_convolution import sharded_long_convolve
from dist_attn.sharded.packed_diagonal import sharded_packed_diagonal_scan
from dist_attn.sharded.packed_halo import sharded_packed_convolve, sharded_packed_convolve_streaming
from dist_attn.sharded.packed_linear import sharded_packed_linear_attention
from dist_attn.sharded.packed_relative import sharded_packed_relative_attention
from dist_attn.sharded.packed_whole import sharded_packed_fourier_mix, sharded_packed_long_convolve
from dist_attn.sharded.prefix_scan import Algorithm, Exchange, settle
from dist_attn.sharded.relative import sharded_relative_attention, sharded_relative_attention_streaming
from dist_attn.sharded.running_maximum import sharded_running_maximum
from dist_attn.sharded.softmax import CacheKept, ShardedSoftmax, SoftmaxExchange, relative_settings
from dist_attn.sharded.token_mixing import sharded_mix_tokens
from dist_attn.sharded.token_routing import ShardedRoutes, sharded_route_tokens
from dist_attn.sharded.token_selection import ShardedSelection, sharded_select_tokens
from dist_attn.sharded.two_layouts import over_two_layouts

__all__ = ["CacheKept", "ShardedSequenceOps", "SoftmaxExchange"]


class ShardedSequenceOps:
    """The operations of `LocalSequenceOps` on this rank's slice of a sequence laid out by `layout`.

    State in is the state before the first global token, equal on all ranks; state out the global final one, on all
    ranks. Gradients of replicated inputs are this rank's share; the loss is the sum of the ranks' losses; every rank
    runs every operation and its backward pass, empty slices too.

    `softmax` says how exact attention gets to all keys: by moving heads to ranks, which is even work and two exchanges
    ("reshuffle"), or by passing keys round, which holds two slices at most and takes P - 1 exchanges ("ring").
    `exchange` is how carries travel, by name or with its details; all ways give the same result to rounding.
    `cache` says what a key-value cache holds after a block: each rank the keys of its own slices ("spread"), which is
    the one state that is not equal on all ranks, or every rank all of them ("whole"), so that each can decode alone.
    `deterministic` makes linear attention and short convolutions give the same bits for any number of ranks; every cut
    must lie at a multiple of 64 tokens or at the end, and other mixing operations are refused.

    `implementation` is what computes linear attention and the stream of relative attention on this rank, as for
    `LocalSequenceOps`. Kernels by name are refused where there are none.

    Making one is a call that every rank makes: layouts and exchanges are compared, in one small exchange unless they
    are those of the one made before; the first time ranks also learn of each other's hosts and of measured times.

    Raises: ShapeError for a layout of another number of ranks, or a slice of another length than the layout says;
        MismatchError on every rank where the layouts or the exchanges differ, and from an operation whose arguments
        do: dtypes, sizes, gates, settings. That takes a small exchange the first time a call is met.
    """

    def __init__(
        self,
        comm: Communicator,
        layout: SequenceLayout,
        memory_layout: SequenceLayout | None = None,
        *,
        softmax: SoftmaxExchange = "reshuffle",
        exchange: Exchange | Algorithm = "auto",
        cache: CacheKept = "spread",
        deterministic: bool = False,
        implementation: Implementation = "auto",
    ) -> None:
        for given in (layout, memory_layout):
            if given is not None and given.size != comm.size:
                raise ShapeError(f"the layout is for {given.size} ranks, the communicator has {comm.size}")
        self._comm, self._layout = comm, layout
        self._softmax, self._cache = softmax, cache
        self._memory = layout if memory_layout is None else memory_layout
        self._deterministic, self._implementation = deterministic, implementation
        if implementation == "triton" and (deterministic or self._packed):
            raise ConfigError("there are no kernels ('triton') for packed documents and for deterministic; use 'auto'")
        if deterministic:
            check_grid(layout)
            check_grid(self._memory)
        self._exchange = Exchange(exchange) if isinstance(exchange, str) else exchange
        # Messages have one size for any layout: ranks that hold different ones would compute nonsense, and nobody knew.
        choices = {"softmax": softmax, "cache": cache, "deterministic": deterministic}
        words = layouts_in_words(layout, self._memory, self._exchange, choices)
        comm.agree_on("layout and exchange", words)
        self._exchange = settle(comm, self._exchange)

    def linear_attention(
        self,
        q_BHLK: torch.Tensor,
        k_BHSK: torch.Tensor,
        v_BHSV: torch.Tensor,
        *,
        feature_map: FeatureMap | None = None,
        log_gate_BHS: torch.Tensor | None = None,
        key_scale_BHS: torch.Tensor | None = None,
        causal: bool = True,
        state: LinearState | None = None,
        denominator: Denominator | None = None,
        prefix: int = 0,
    ) -> tuple[torch.Tensor, LinearState]:
        """See `sharded.carry_scan.sharded_linear_attention`; keys lie on `memory_layout` where one is given.

        A `prefix` counts global tokens and takes a second exchange of states. Causal attention over keys on a layout of
        their own brings queries to them, see `sharded.two_layouts`.
        """
        self._check("queries", q_BHLK.shape[2], self._layout)
        self._check("keys", k_BHSK.shape[2], self._memory)
        check_prefix(prefix, causal=causal, documents=self._packed)
        self._agree(
            "linear_attention",
            {"q": q_BHLK, "k": k_BHSK, "v": v_BHSV, "log_gate": log_gate_BHS, "key_scale": key_scale_BHS},
            2,
            causal=causal,
            prefix=prefix,
            denominator=denominator,
            feature_map=feature_map,
            state=None if state is None else state.s_BHMV,
        )
        attend: Attend = partial(self._linear_attention(), feature_map=feature_map, denominator=denominator)
        if causal and self._memory != self._layout:
            self._refuse_deterministic("causal attention over keys on a layout of their own")
            attend = over_two_layouts(self._comm, self._layout, self._memory, attend, prefix=prefix)
        if prefix:
            self._refuse_deterministic("a prefix that attends to itself in full")
            here, there = (max(0, prefix - part.range(self._comm.rank)[0]) for part in (self._layout, self._memory))
            return prefix_then_causal(
                attend,
                q_BHLK,
                k_BHSK,
                v_BHSV,
                log_gate_BHS=log_gate_BHS,
                key_scale_BHS=key_scale_BHS,
                state=state,
                queries=here,
                keys=there,
            )
        return attend(
            q_BHLK,
            k_BHSK,
            v_BHSV,
            log_gate_BHS=log_gate_BHS,
            key_scale_BHS=key_scale_BHS,
            causal=causal,
            state=state,
        )

    def _linear_attention(self) -> Callable[..., tuple[torch.Tensor, LinearState]]:
        """How linear attention is done here: over documents, with the bits of one rank, or by a scan of carries."""
        if self._packed:
            self._refuse_memory("linear_attention")
            self._refuse_deterministic("linear attention over packed documents")
            return partial(sharded_packed_linear_attention, self._comm, self._layout)
        if self._deterministic:
            return partial(attention_in_order, self._comm)
        return partial(
            sharded_linear_attention, self._comm, exchange=self._exchange, implementation=self._implementation
        )

    def relative_attention(
        self,
        phi_q_BHLK: torch.Tensor,
        phi_k_BHSK: torch.Tensor,
        v_BHSV: torch.Tensor,
        phi_rp_HRK: torch.Tensor,
        *,
        causal: bool,
    ) -> torch.Tensor:
        """See `sharded.relative.sharded_relative_attention`; keys lie on `memory_layout` where one is given."""
        self._refuse_deterministic("relative attention")
        self._check("queries", phi_q_BHLK.shape[2], self._layout)
        self._check("keys", phi_k_BHSK.shape[2], self._memory)
        self._agree(
            "relative_attention",
            {"phi_q": phi_q_BHLK, "phi_k": phi_k_BHSK, "v": v_BHSV},
            2,
            rp=phi_rp_HRK,
            causal=causal,
        )
        if self._packed:
            self._refuse_memory("relative_attention")
            return sharded_packed_relative_attention(
                self._comm, self._layout, phi_q_BHLK, phi_k_BHSK, v_BHSV, phi_rp_HRK, causal=causal
            )
        return sharded_relative_attention(
            self._comm,
            self._layout,
            phi_q_BHLK,
            phi_k_BHSK,
            v_BHSV,
            phi_rp_HRK,
            causal=causal,
            memory_layout=self._memory,
            implementation=self._implementation,
        )

    def relative_attention_streaming(
        self,
        phi_q_BHLK: torch.Tensor,
        phi_k_BHLK: torch.Tensor,
        v_BHLV: torch.Tensor,
        phi_rp_HRK: torch.Tensor,
        state: RelativeState | None = None,
    ) -> tuple[torch.Tensor, RelativeState]:
        """See `sharded.relative.sharded_relative_attention_streaming`."""
        self._refuse_deterministic("relative attention")
        self._refuse_documents("relative_attention_streaming")
        self._check("queries", phi_q_BHLK.shape[2], self._layout)
        self._check("keys", phi_k_BHLK.shape[2], self._layout)
        self._agree(
            "relative_attention_streaming",
            {"phi_q": phi_q_BHLK, "phi_k": phi_k_BHLK, "v": v_BHLV},
            2,
            rp=phi_rp_HRK,
            state=state is not None,
        )
        return sharded_relative_attention_streaming(
            self._comm, self._layout, phi_q_BHLK, phi_k_BHLK, v_BHLV, phi_rp_HRK, state, self._implementation
        )

    def softmax_attention(
        self,
        q_BHLK: torch.Tensor,
        k_BGSK: torch.Tensor,
        v_BGSV: torch.Tensor,
        *,
        causal: bool,
        scale: float | None = None,
        prefix: int = 0,
        relative: RelativePositions | None = None,
    ) -> torch.Tensor:
        """See `sharded.head_reshuffle` and `sharded.ring_attention`; keys lie on `memory_layout` where one is given."""
        self._refuse_deterministic("softmax attention")
        self._check("queries", q_BHLK.shape[2], self._layout)
        self._check("keys", k_BGSK.shape[2], self._memory)
        check_prefix(prefix, causal=causal, documents=self._packed)
        if relative is not None and self._packed:
            self._refuse_memory("softmax_attention with relative positions")
        along = {"q": q_BHLK, "k": k_BGSK, "v": v_BGSV}
        near = relative_settings(relative)
        self._agree("softmax_attention", along, 2, causal=causal, scale=scale, prefix=prefix, **near)
        return self._softmax_form.attend(
            q_BHLK, k_BGSK, v_BGSV, causal=causal, scale=scale, prefix=prefix, relative=relative
        )

    def softmax_attention_streaming(
        self,
        q_BHLK: torch.Tensor,
        k_BGLK: torch.Tensor,
        v_BGLV: torch.Tensor,
        cache: KeyValueCache,
        *,
        relative: RelativePositions | None = None,
    ) -> tuple[torch.Tensor, KeyValueCache]:
        """See `sharded.softmax_streaming`; the first block of a stream goes the way that `softmax` says."""
        self._refuse_deterministic("softmax attention")
        self._check("queries", q_BHLK.shape[2], self._layout)
        self._check("keys", k_BGLK.shape[2], self._layout)
        along = {"q": q_BHLK, "k": k_BGLK, "v": v_BGLV}
        self._agree("softmax_attention_streaming", along, 2, **relative_settings(relative))
        return self._softmax_form.attend_stream(q_BHLK, k_BGLK, v_BGLV, cache, relative=relative)

    @property
    def _softmax_form(self) -> ShardedSoftmax:
        return ShardedSoftmax(self._comm, self._layout, self._memory, self._softmax, self._cache)

    def fourier_mix(self, x_BLD: torch.Tensor, *, norm: FourierNorm = None) -> torch.Tensor:
        """See `sharded.fourier.sharded_fourier_mix`."""
        self._refuse_deterministic("Fourier mixing")
        self._check("tokens", x_BLD.shape[1], self._layout)
        self._agree("fourier_mix", {"x": x_BLD}, 1, norm=norm)
        if self._packed:
            return sharded_packed_fourier_mix(self._comm, self._layout, x_BLD, norm=norm)
        return sharded_fourier_mix(self._comm, self._layout, x_BLD, norm=norm)

    def long_convolve(
        self, x_BLD: torch.Tensor, kernel_LD: torch.Tensor, *, backward_kernel_LD: torch.Tensor | None = None
    ) -> torch.Tensor:
        """See `sharded.long_convolution.sharded_long_convolve`."""
        self._refuse_deterministic("long convolutions")
        self._check("tokens", x_BLD.shape[1], self._layout)
        self._agree("long_convolve", {"x": x_BLD}, 1, kernel=kernel_LD, backward_kernel=backward_kernel_LD)
        convolve = sharded_packed_long_convolve if self._packed else sharded_long_convolve
        return convolve(self._comm, self._layout, x_BLD, kernel_LD, backward_kernel_LD=backward_kernel_LD)

    def diagonal_scan(
        self,
        u_BLD: torch.Tensor,
        a_DN: torch.Tensor,
        b_DN: torch.Tensor,
        c_DN: torch.Tensor,
        *,
        state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `sharded.diagonal.sharded_diagonal_scan`."""
        self._refuse_deterministic("the diagonal scan")
        self._check("tokens", u_BLD.shape[1], self._layout)
        self._agree("diagonal_scan", {"u": u_BLD}, 1, a=a_DN, b=b_DN, c=c_DN, state=state)
        scan = sharded_packed_diagonal_scan if self._packed else sharded_diagonal_scan
        return scan(self._comm, self._layout, u_BLD, a_DN, b_DN, c_DN, state=state)

    def dense_scan(
        self,
        u_BLD: torch.Tensor,
        a_DNN: torch.Tensor,
        b_DN: torch.Tensor,
        c_DMN: torch.Tensor,
        *,
        state: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `sharded.dense_space.sharded_dense_scan`; one unbroken sequence only."""
        self._refuse_documents("dense_scan")
        self._refuse_deterministic("the scan of a state space")
        self._check("tokens", u_BLD.shape[1], self._layout)
        self._agree("dense_scan", {"u": u_BLD}, 1, a=a_DNN, b=b_DN, c=c_DMN, state=state)
        return sharded_dense_scan(self._comm, self._layout, u_BLD, a_DNN, b_DN, c_DMN, state=state)

    def legs_memory(
        self, f_BLD: torch.Tensor, read_DN: torch.Tensor, *, state: LegsState | None = None
    ) -> tuple[torch.Tensor, LegsState]:
        """See `sharded.legs.sharded_legs_memory`; one unbroken sequence only."""
        self._refuse_documents("legs_memory")
        self._refuse_deterministic("the memory of the whole past")
        self._check("tokens", f_BLD.shape[1], self._layout)
        before = None if state is None else state.c_BDN
        self._agree("legs_memory", {"f": f_BLD}, 1, read=read_DN, state=before)
        return sharded_legs_memory(self._comm, self._layout, f_BLD, read_DN, state=state)

    def mix_tokens(
        self,
        x_BLD: torch.Tensor,
        w_in_LS: torch.Tensor,
        w_out_SL: torch.Tensor,
        *,
        bias_in_S: torch.Tensor | None = None,
        bias_out_L: torch.Tensor | None = None,
        activation: Activation = "gelu_tanh",
    ) -> torch.Tensor:
        """See `sharded.token_mixing.sharded_mix_tokens`; weights for all tokens; one unbroken sequence only."""
        self._refuse_documents("mix_tokens")
        self._refuse_deterministic("token mixing")
        self._check("tokens", x_BLD.shape[1], self._layout)
        self._agree(
            "mix_tokens",
            {"x": x_BLD},
            1,
            w_in=w_in_LS,
            w_out=w_out_SL,
            bias_in=bias_in_S,
            bias_out=bias_out_L,
            activation=activation,
        )
        return sharded_mix_tokens(
            self._comm,
            self._layout,
            x_BLD,
            w_in_LS,
            w_out_SL,
            bias_in_S=bias_in_S,
            bias_out_L=bias_out_L,
            activation=activation,
        )

    def convolve(self, x_BLD: torch.Tensor, w_KD: torch.Tensor, *, centred: bool = False) -> torch.Tensor:
        """See `sharded.halo.sharded_convolve`."""
        self._check("tokens", x_BLD.shape[1], self._layout)
        self._agree("convolve", {"x": x_BLD}, 1, w=w_KD, centred=centred)
        if self._packed:
            return sharded_packed_convolve(self._comm, self._layout, x_BLD, w_KD, centred=centred)
        return sharded_convolve(self._comm, self._layout, x_BLD, w_KD, centred=centred)

    def convolve_streaming(
        self, x_BLD: torch.Tensor, w_KD: torch.Tensor, tail_BKD: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `sharded.halo.sharded_convolve_streaming`."""
        self._check("tokens", x_BLD.shape[1], self._layout)
        self._agree("convolve_streaming", {"x": x_BLD}, 1, w=w_KD, tail=tail_BKD)
        if self._packed:
            return sharded_packed_convolve_streaming(self._comm, self._layout, x_BLD, w_KD, tail_BKD)
        return sharded_convolve_streaming(self._comm, self._layout, x_BLD, w_KD, tail_BKD)

    def select_tokens(
        self, x_LC: torch.Tensor, score_L: torch.Tensor, *, threshold: float, at_most: int | None = None
    ) -> ShardedSelection:
        """See `sharded.token_selection.sharded_select_tokens`; one unbroken sequence only."""
        self._refuse_documents("select_tokens")
        self._refuse_deterministic("the selection of tokens")
        self._check("tokens", len(x_LC), self._layout)
        self._agree("select_tokens", {"x": x_LC, "score": score_L}, 0, threshold=threshold, at_most=at_most)
        along = partial(ShardedSequenceOps, self._comm, softmax=self._softmax, exchange=self._exchange)
        return sharded_select_tokens(self._comm, self._layout, along, x_LC, score_L, threshold, at_most)

    def route_tokens(
        self, x_LC: torch.Tensor, expert_LK: torch.Tensor, *, num_experts: int, capacity: int
    ) -> ShardedRoutes:
        """See `sharded.token_routing.sharded_route_tokens`; one unbroken sequence only."""
        self._refuse_documents("route_tokens")
        self._refuse_deterministic("the routing of tokens")
        self._check("tokens", len(x_LC), self._layout)
        self._agree("route_tokens", {"x": x_LC, "expert": expert_LK}, 0, experts=num_experts, capacity=capacity)
        return sharded_route_tokens(self._comm, x_LC, expert_LK, num_experts, capacity)

    def running_maximum(
        self, x_BHS: torch.Tensor, before_BH: torch.Tensor, *, log_gate_BHS: torch.Tensor | None = None
    ) -> Maxima:
        """See `sharded.running_maximum.sharded_running_maximum`; keys lie on `memory_layout` where one is given."""
        if log_gate_BHS is not None:
            self._refuse_deterministic("the running maximum of gated keys")
        self._check("keys", x_BHS.shape[2], self._memory)
        self._agree("running_maximum", {"x": x_BHS, "log_gate": log_gate_BHS}, 2, before=before_BH)
        return sharded_running_maximum(self._comm, self._memory, x_BHS, before_BH, log_gate_BHS=log_gate_BHS)

    def sum_over_sequence(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """The sum over the tokens of all ranks, [B, L, D] -> [B, D], on every rank.

        Cost: one all-reduce of B D elements.
        """
        self._refuse_deterministic("sums over the sequence")
        self._check("tokens", x_BLD.shape[1], self._layout)
        self._agree("sum_over_sequence", {"x": x_BLD}, 1)
        return collectives.all_reduce_sum(self._comm, x_BLD.sum(dim=1), label="sum over sequence")

    def sum_over_documents(self, x_BLD: torch.Tensor) -> torch.Tensor:
        """The sums over the tokens of each document on all ranks, [B, L, D] -> [B, N, D], on every rank.

        Cost: one all-reduce of B N D elements.
        """
        self._refuse_deterministic("sums over documents")
        places = self.document_places(x_BLD.shape[1])
        self._agree("sum_over_documents", {"x": x_BLD}, 1)
        sums_BND = sums_of_documents(x_BLD, places)
        return collectives.all_reduce_sum(self._comm, sums_BND, label="sum over documents")

    def document_places(self, length: int) -> DocumentPlaces:
        """Where the `length` tokens held here stand in their documents; an unbroken sequence is one."""
        self._check("tokens", length, self._layout)
        return document_places(self._layout.document_ranges(), *self._layout.range(self._comm.rank))

    def positions(self, length: int | None = None) -> torch.Tensor:
        """Global index of each token held here, [L], counted from the start of this call's sequence."""
        if length is not None:
            self._check("tokens", length, self._layout)
        return torch.arange(*self._layout.range(self._comm.rank))

    def total_length(self, length: int) -> int:
        """Tokens of the whole sequence, of which `length` are held here."""
        self._check("tokens", length, self._layout)
        return self._layout.total

    @property
    def whole(self) -> bool:
        """Whether all tokens are held here, whatever the layout; the same answer on every rank."""
        return self._comm.size == 1

    def _agree(self, operation: str, along: Mapping[str, torch.Tensor | None], dim: int, **settings: Setting) -> None:
        agree_on_call(self._comm, operation, along, dim, settings)

    def _refuse_deterministic(self, what: str) -> None:
        if self._deterministic:
            raise InputError(
                f"{what} cannot promise the same bits for any number of ranks; leave out deterministic=True, or take "
                "a model of linear attention and short convolutions"
            )

    @property
    def _packed(self) -> bool:
        """Whether documents start anywhere."""
        return bool(self._layout.documents or self._memory.documents)

    def _refuse_memory(self, operation: str) -> None:
        if self._memory != self._layout:
            raise InputError(
                f"{operation} was given packed documents and a memory on its own layout; it takes documents where "
                "queries and keys lie on one layout"
            )

    def _refuse_documents(self, operation: str) -> None:
        if self._packed:
            raise InputError(f"{operation} was given packed documents; it takes one unbroken sequence")

    def _check(self, what: str, length: int, layout: SequenceLayout) -> None:
        wanted = layout.lengths[self._comm.rank]
        if length != wanted:
            raise ShapeError(f"rank {self._comm.rank} was given {length} {what}; its slice of the layout has {wanted}")

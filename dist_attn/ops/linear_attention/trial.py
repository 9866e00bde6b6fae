"""The calls of Triton's kernels of linear attention: their kinds, and what a trial of one runs.

Shape letters: B batch, H heads, L tokens, K head size, D projections, V values, M features.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from dist_attn.ops.device import send
from dist_attn.ops.feature_map import FusedForm, HasFusedForm
from dist_attn.ops.fla_known import surroundings_of
from dist_attn.ops.linear_attention.call import LinearCall
from dist_attn.ops.linear_attention.streaming import stream_absorb
from dist_attn.ops.sequence_call import Implementation
from dist_attn.ops.state import LinearState
from dist_attn.ops.trial import CLOSED, STARTS, TOKENS, Results, name_of, results_of, way_of

__all__ = ["Form", "LinearKind", "compared"]

Form = Literal["causal", "full", "parts", "step"]
"""The ways that kernels compute: "full" is not causal, or the state of keys alone; "parts" is what ranks join."""
HEADS = 2
CUT = 60  # of the tokens that two ranks have
EPS = 1e-3  # of the denominator: with one that replaces many, a rounding may decide which


@dataclass(frozen=True)
class LinearKind:
    """Calls for which kernels are compiled once, whatever the number of tokens.

    sizes           K, D, V.
    gate, scale     the types of log gates and key scales, None without them.
    packed          several documents.
    """

    device: torch.device
    form: Form
    dtype: torch.dtype
    feature_map: FusedForm | None
    denominator: str
    sizes: tuple[int, int, int]
    gate: torch.dtype | None
    scale: torch.dtype | None
    packed: bool
    gradients: bool

    @staticmethod
    def of(call: LinearCall, form: Form) -> "LinearKind":
        """The kind of a call that kernels can take.

        With gradients where autograd is on: whether parts of a call that ranks cut need them is not known before.
        """
        form_of_map = call.feature_map.fused_form() if isinstance(call.feature_map, HasFusedForm) else None
        size, w = call.q_BHLK.shape[3], call.map_tensor
        gate, scale = (None if t is None else t.dtype for t in (call.log_gate_BHS, call.key_scale_BHS))
        return LinearKind(
            call.v_BHSV.device,
            form,
            call.v_BHSV.dtype,
            form_of_map,
            call.denominator.kind,
            (size, size if w is None else w.shape[1], call.v_BHSV.shape[3]),
            gate,
            scale,
            form == "causal" and bool(call.documents),
            form != "step" and torch.is_grad_enabled(),
        )

    @property
    def case(self) -> str:
        """The first words of the names of such cases in the record of a GPU."""
        features = "features" if self.feature_map is None else self.feature_map.kind
        return f"linear {self.form} {features} {name_of(self.dtype)}"

    @property
    def words(self) -> str:
        """The kind as people are told of it."""
        phi, sizes = self.feature_map, " x ".join(map(str, self.sizes))
        features = "features" if phi is None else f"{phi.kind}{' of unit vectors' * phi.unit_norm}"
        parts = [
            f"Triton's linear {self.form} {name_of(self.dtype)} {way_of(self.gradients)}",
            f"{features} {sizes}",
            f"denominator {self.denominator}",
            *(f"{what} in {name_of(t)}" for what, t in (("gates", self.gate), ("scales", self.scale)) if t is not None),
            *["packed"] * self.packed,
        ]
        return f"{', '.join(parts)} (Triton {surroundings_of(self.device).triton})"


def compared(call: LinearCall, kind: LinearKind) -> tuple[Results, Results]:
    """The results of the kernels, and of the streaming form in float32, on random numbers for a call's tensors."""
    given = _numbers(call, kind)
    by_kernels = results_of(partial(_run, call, kind, "triton"), given, gradients=kind.gradients)
    exact = results_of(partial(_run, call, kind, "streaming"), given, gradients=kind.gradients, dtype=torch.float32)
    return by_kernels, exact


def _numbers(call: LinearCall, kind: LinearKind) -> Results:
    """The tensors of a call of this kind: features are positive, so that denominators are far from 0."""
    generator = torch.Generator(device="cpu").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return send(torch.randn(shape, generator=generator, device="cpu"), kind.device)

    size, projections, values = kind.sizes
    per_token = (1, HEADS, 1 if kind.form == "step" else TOKENS)
    q, k = normal(*per_token, size), normal(*per_token, size)
    if kind.feature_map is None:
        q, k = q.abs(), k.abs()
    elif kind.feature_map.kind != "elu":
        q, k = q * size**-0.5, k * size**-0.5
    found = {"q": q.to(kind.dtype), "k": k.to(kind.dtype), "v": normal(*per_token, values).to(kind.dtype)}
    if kind.gate is not None:
        gate = F.logsigmoid(3 + normal(*per_token))
        gate[:, :, CLOSED : CLOSED + 1] = -torch.inf
        found["log_gate"] = gate.to(kind.gate)
    if kind.scale is not None:
        found["key_scale"] = (0.5 + normal(*per_token).sigmoid()).to(kind.scale)
    if call.map_tensor is not None:
        found["w"] = (0.5 * normal(HEADS, projections, size)).to(call.map_tensor.dtype)
    keys = {"q": k, "k": k, "v": normal(*per_token, values)}
    with torch.no_grad():
        before = _call(call, kind, "streaming", {name: t.float() for name, t in {**found, **keys}.items()})
        state = stream_absorb(replace(before, log_gate_BHS=None, documents=()))
    return found | {"s": state.s_BHMV, "z": state.z_BHM, "mass": state.mass_BH}


def _call(call: LinearCall, kind: LinearKind, implementation: Implementation, given: Results) -> LinearCall:
    """The call of these tensors, otherwise like `call`."""
    phi = call.feature_map
    state = None
    if "s" in given:
        mass = given["mass"]
        nothing = torch.zeros_like(mass, requires_grad=False)
        state = LinearState(given["s"], given["z"], mass, nothing, nothing.bool())
    return LinearCall(
        given["q"],
        given["k"],
        given["v"],
        given.get("log_gate"),
        given.get("key_scale"),
        phi if phi is None or "w" not in given else phi.with_tensors(given["w"]),
        kind.form != "full",
        state,
        replace(call.denominator, eps=EPS),
        documents=STARTS if kind.packed else (),
        implementation=implementation,
    )


def _run(call: LinearCall, kind: LinearKind, implementation: Implementation, given: Results) -> Results:
    """The results of one implementation, by the functions that calls of this kind go through."""
    # These choose, and so need what is here.
    from dist_attn.ops.linear_attention import absorb, attend, complete_sums, linear_attention_step, local_sums

    own = _call(call, kind, implementation, given)
    if kind.form == "step":
        assert own.state is not None
        q, k, v, gate, scale = (None if t is None else t[:, :, 0] for t in own.sequence)
        assert q is not None and k is not None and v is not None
        out, after = linear_attention_step(
            q,
            k,
            v,
            own.state,
            feature_map=own.feature_map,
            log_gate_BH=gate,
            key_scale_BH=scale,
            denominator=own.denominator,
            implementation=implementation,
        )
    elif kind.form == "parts":
        before, rest = absorb(own.tokens(0, CUT)), replace(own.tokens(CUT), state=None)
        sums, after = local_sums(rest)
        out, after = complete_sums(replace(rest, state=before), sums), before.combine(after)
    else:
        out, after = attend(own)
    return {"outputs": out, "s": after.s_BHMV, "z": after.z_BHM, "mass": after.mass_BH}

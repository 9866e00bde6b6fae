"""The maximum so far of a sequence whose past fades by gates: what weights given by logarithms are relative to.

It takes log2(L) passes over the sequence: a scan of (decay, maximum), which join associatively.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from dist_attn.ops.documents import start_flags
from dist_attn.ops.sequence_call import SequenceCall, local_form

NO_TOKENS = -1e30
"""The maximum of no tokens where values may be negative: finite, as states are, and below all that is a value."""


class Element(NamedTuple):
    """The effect of a stretch of tokens on a maximum m before it, which becomes max(m + decay, level).

    The decay is -inf where nothing from before is left: behind a closed gate, or the start of a document.
    """

    decay: torch.Tensor
    level: torch.Tensor


class Maxima(NamedTuple):
    """The maximum at each token, by how much it rose there, and the one after the last token; float64, no gradients."""

    level_BHS: torch.Tensor
    rise_BHS: torch.Tensor
    after_BH: torch.Tensor


def running_maximum(
    x_BHS: torch.Tensor,
    before_BH: torch.Tensor,
    *,
    log_gate_BHS: torch.Tensor | None = None,
    documents: tuple[int, ...] = (),
) -> Maxima:
    """m_t = max(m_{t-1} + log_gate_t, x_t) from m_{-1} = before; where a document starts m_t = x_t, and the rise is 0.

    Nothing rises from `NO_TOKENS`: at the first token after it the rise is 0.

    A rise may be negative where gates lower what came before. It is no function to differentiate: weights relative to
    it give the same quotients whatever it is, so it is a constant.

    Shapes: x, log_gate [B, H, S], before [B, H] -> [B, H, S] twice and [B, H].
    Cost: O(S log S); without gates and documents O(S).
    """
    return find_maxima(MaximumCall(x_BHS, before_BH, log_gate_BHS, documents=documents))


@dataclass(frozen=True)
class MaximumCall(SequenceCall[Maxima]):
    """The arguments of `running_maximum`, which explains them."""

    x_BHS: torch.Tensor
    before_BH: torch.Tensor
    log_gate_BHS: torch.Tensor | None = None

    operation: ClassVar[str] = "running_maximum"
    along_memory: ClassVar[tuple[str, ...]] = ("x_BHS", "log_gate_BHS")
    deterministic: ClassVar[bool] = True
    dim: ClassVar[int] = 2


@local_form(MaximumCall)
def find_maxima(call: MaximumCall) -> Maxima:
    """`running_maximum` of a call."""
    scanned = scan_elements(call.x_BHS, call.log_gate_BHS, call.documents)
    return maxima(scanned, call.before_BH, call.documents)


@torch.no_grad()
def scan_elements(x_BHS: torch.Tensor, log_gate_BHS: torch.Tensor | None, documents: tuple[int, ...]) -> Element:
    """The elements of all stretches from the first token to each, [B, H, S]."""
    level = x_BHS.detach().double()
    if log_gate_BHS is None and not documents:
        # The maximum of no tokens has no indices to be asked for.
        return Element(torch.zeros_like(level), level.cummax(dim=-1).values if level.shape[-1] else level)
    decay = torch.zeros_like(level) if log_gate_BHS is None else log_gate_BHS.detach().double()
    if documents:
        decay = decay.masked_fill(start_flags(documents, level.shape[2], level.device), -torch.inf)
    shift = 1
    while shift < level.shape[2]:
        earlier = Element(decay[..., :-shift], level[..., :-shift])
        joined = join(earlier, Element(decay[..., shift:], level[..., shift:]))
        decay = torch.cat([decay[..., :shift], joined.decay], dim=-1)
        level = torch.cat([level[..., :shift], joined.level], dim=-1)
        shift *= 2
    return Element(decay, level)


def join(earlier: Element, later: Element) -> Element:
    """The element of one stretch behind the other."""
    # Chosen, not added: NaN + -inf would bring one document's NaN into the next.
    cut = later.decay == -torch.inf
    level = torch.where(cut, later.level, torch.maximum(earlier.level + later.decay, later.level))
    return Element(torch.where(cut, later.decay, earlier.decay + later.decay), level)


def rise_from(earlier: torch.Tensor, level: torch.Tensor) -> torch.Tensor:
    """The rise from an earlier maximum to `level`; 0 from that of no tokens, which gates may have lowered."""
    return torch.where(earlier < 0.5 * NO_TOKENS, torch.zeros_like(level), level - earlier)


@torch.no_grad()
def maxima(scanned: Element, before_BH: torch.Tensor, documents: tuple[int, ...]) -> Maxima:
    """The maxima of tokens that stand behind `before`, from the elements of the stretches up to them."""
    before_BH1 = before_BH.detach().double()[..., None]
    level_BHS = join(Element(torch.zeros_like(before_BH1), before_BH1), scanned).level
    from_before_BHT = torch.cat([before_BH1, level_BHS], dim=-1)
    rise_BHS = rise_from(from_before_BHT[..., :-1], level_BHS)
    if documents:
        rise_BHS = rise_BHS.masked_fill(start_flags(documents, level_BHS.shape[2], level_BHS.device), 0.0)
    return Maxima(level_BHS, rise_BHS, from_before_BHT[..., -1].clone())


def running_maximum_naive(
    x_BHS: torch.Tensor,
    before_BH: torch.Tensor,
    *,
    log_gate_BHS: torch.Tensor | None = None,
    documents: tuple[int, ...] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """m_t = max(m_{t-1} + log_gate_t, x_t) by its definition; see `running_maximum`."""
    level_BH = before_BH.detach().double()
    levels, rises = [], []
    for t in range(x_BHS.shape[2]):
        x_BH = x_BHS[:, :, t].detach().double()
        gate_BH = torch.zeros_like(x_BH) if log_gate_BHS is None else log_gate_BHS[:, :, t].detach().double()
        earlier_BH = level_BH
        level_BH = x_BH if t in documents else torch.maximum(level_BH + gate_BH, x_BH)
        levels.append(level_BH)
        first_BH = (earlier_BH < -5e29) | (t in documents)  # nothing before it
        rises.append(torch.where(first_BH, torch.zeros_like(level_BH), level_BH - earlier_BH))
    empty = before_BH.new_empty((*before_BH.shape, 0), dtype=torch.float64)
    return (
        torch.stack(levels, dim=2) if levels else empty,
        torch.stack(rises, dim=2) if rises else empty,
        level_BH,
    )

"""Prefix-LM attention: the first tokens attend to each other fully, the rest causally."""

from typing import Protocol

import torch

from dist_attn.errors import InputError
from dist_attn.ops.state import LinearState

__all__ = ["Attend", "check_prefix", "prefix_then_causal"]


class Attend(Protocol):
    """Linear attention of some queries over some keys, everything else settled."""

    def __call__(
        self,
        q_BHLK: torch.Tensor,
        k_BHSK: torch.Tensor,
        v_BHSV: torch.Tensor,
        *,
        log_gate_BHS: torch.Tensor | None,
        key_scale_BHS: torch.Tensor | None,
        causal: bool,
        state: LinearState | None,
    ) -> tuple[torch.Tensor, LinearState]: ...


def prefix_then_causal(
    attend: Attend,
    q_BHLK: torch.Tensor,
    k_BHSK: torch.Tensor,
    v_BHSV: torch.Tensor,
    *,
    log_gate_BHS: torch.Tensor | None,
    key_scale_BHS: torch.Tensor | None,
    state: LinearState | None,
    queries: int,
    keys: int,
) -> tuple[torch.Tensor, LinearState]:
    """The first `queries` queries read the state after the first `keys` keys, the others go on causally from there."""

    def part(
        of_queries: slice, of_keys: slice, causal: bool, state: LinearState | None
    ) -> tuple[torch.Tensor, LinearState]:
        return attend(
            q_BHLK[:, :, of_queries],
            k_BHSK[:, :, of_keys],
            v_BHSV[:, :, of_keys],
            log_gate_BHS=None if log_gate_BHS is None else log_gate_BHS[:, :, of_keys],
            key_scale_BHS=None if key_scale_BHS is None else key_scale_BHS[:, :, of_keys],
            causal=causal,
            state=state,
        )

    first, state = part(slice(queries), slice(keys), False, state)
    rest, state = part(slice(queries, None), slice(keys, None), True, state)
    return torch.cat([first, rest], dim=2), state


def check_prefix(prefix: int, *, causal: bool, documents: bool) -> None:
    """Raises InputError for a prefix that means nothing: below 0, of full attention, or of packed documents."""
    if prefix < 0 or (prefix and (not causal or documents)):
        raise InputError(
            f"a prefix of {prefix} tokens was given with causal={causal} and documents={documents}; "
            "a prefix is 0 or more tokens of one causal sequence"
        )

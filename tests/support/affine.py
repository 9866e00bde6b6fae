"""Inputs of affine recurrences of every kind, and their oracle."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_attn.ops import AffineState, SequenceOps
from dist_attn.ops.affine import affine_recurrence_naive, gated_delta_rule_naive

KINDS = ("decay", "decay, read before", "delta rule", "erasing")


@dataclass(frozen=True)
class AffineInputs:
    """Tensors along the tokens (dim 2), and those that are not cut; `kind` says which recurrence takes them."""

    kind: str
    sequence: dict[str, Tensor]
    replicated: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def random(
        kind: str,
        tokens: int,
        *,
        channels: bool,
        sizes: tuple[int, int, int, int] = (2, 3, 8, 5),
        dtype: torch.dtype = torch.float64,
        closed: bool = True,
        seed: int = 0,
    ) -> "AffineInputs":
        """Decays that forget within some tokens and, with `closed`, a gate that is closed at token 5.

        Shapes: sizes [B, H, K, V].
        """
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        batch, heads, size, values = sizes
        per_token = (batch, heads, tokens)
        sequence = {name: normal(*per_token, size) / size**0.5 for name in ("q", "k")}
        sequence["v"] = normal(*per_token, values)
        sequence["log_decay"] = F.logsigmoid(normal(*per_token, size if channels else 1))
        if closed and tokens > 5:
            sequence["log_decay"][:, :, 5] = -torch.inf
        replicated = {"state": normal(batch, heads, size, values)}
        if kind == "delta rule":
            sequence["k"] = F.normalize(sequence["k"], dim=-1)
            sequence["beta"] = 2 * normal(*per_token).sigmoid()
        elif kind == "erasing":
            sequence |= {name: 0.5 * normal(*per_token, size) / size**0.5 for name in ("a", "b")}
        elif kind == "decay, read before":
            replicated["bonus"] = normal(heads, size)
        return AffineInputs(
            kind,
            {name: t.to(dtype) for name, t in sequence.items()},
            {name: t.to(torch.promote_types(dtype, torch.float32)) for name, t in replicated.items()},
        )

    def leaves(self, start: int = 0, stop: int | None = None) -> "AffineInputs":
        """Copies of some tokens that want gradients."""
        return AffineInputs(
            self.kind,
            {name: t[:, :, start:stop].clone().requires_grad_() for name, t in self.sequence.items()},
            {name: t.clone().requires_grad_() for name, t in self.replicated.items()},
        )

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them by name."""
        return self.sequence | self.replicated

    def gradients(self) -> dict[str, Tensor]:
        """Those of the leaves, zeros where there are none."""
        return {name: torch.zeros_like(t) if t.grad is None else t.grad for name, t in self.tensors.items()}

    def run(self, ops: SequenceOps) -> tuple[Tensor, AffineState]:
        """The operation that takes these inputs."""
        x, state = self.sequence, AffineState(self.replicated["state"])
        if self.kind == "delta rule":
            return ops.gated_delta_rule(
                x["q"], x["k"], x["v"], beta_BHL=x["beta"], log_decay_BHLK=x["log_decay"], state=state
            )
        return ops.affine_recurrence(
            x["q"],
            x["k"],
            x["v"],
            log_decay_BHLK=x["log_decay"],
            erase=(x["a"], x["b"]) if "a" in x else None,
            bonus_HK=self.replicated.get("bonus"),
            read="before" if "bonus" in self.replicated else "after",
            state=state,
        )

    def naive(self, documents: tuple[int, ...] = ()) -> tuple[Tensor, AffineState]:
        """The oracle's results."""
        return self.run(_Naive(documents))  # type: ignore[arg-type]  # of all operations it has these two


@dataclass(frozen=True)
class _Naive:
    documents: tuple[int, ...]

    def affine_recurrence(self, *qkv: Tensor, **rest: object) -> tuple[Tensor, AffineState]:
        return affine_recurrence_naive(*qkv, **rest, documents=self.documents)  # type: ignore[arg-type]

    def gated_delta_rule(self, *qkv: Tensor, **rest: object) -> tuple[Tensor, AffineState]:
        return gated_delta_rule_naive(*qkv, **rest, documents=self.documents)  # type: ignore[arg-type]

"""What classifying tasks have in common: cross entropy that ranks share, and the tally of a validation."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dist_attn.training.task import Share

__all__ = ["Tally", "cross_entropy"]


def cross_entropy(logits_NC: Tensor, classes_N: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """The sum over the examples; half-precision logits go through the softmax in float32."""
    wide_NC = logits_NC.to(torch.promote_types(logits_NC.dtype, torch.float32))
    return F.cross_entropy(wide_NC, classes_N, reduction="sum", label_smoothing=label_smoothing)


@dataclass
class Tally:
    """Examples scored here so far: the sum of their losses, how many were right, and how many there were."""

    loss: float = 0.0
    right: int = 0
    examples: int = 0

    def add(self, logits_NC: Tensor, classes_N: Tensor) -> None:
        """Count some examples."""
        self.loss += float(cross_entropy(logits_NC, classes_N))
        self.right += int((logits_NC.argmax(dim=1) == classes_N).sum())
        self.examples += len(classes_N)

    def scores(self, share: Share) -> dict[str, float | int]:
        """Accuracy and mean loss over all ranks, each example once; a call of every rank."""
        own_N = torch.tensor([self.loss, self.right, self.examples], dtype=torch.float64, device=share.device)
        loss, right, examples = share.sum(own_N * share.replica_weight).tolist()
        examples = round(examples)  # thirds that were added up
        return {"accuracy": right / examples, "validation_loss": loss / examples, "examples": examples}

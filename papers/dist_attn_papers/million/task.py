"""The training of the million-scale model, which reads each text alone."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from dist_attn.ops.device import send
from dist_attn.training.classification import Tally, cross_entropy
from dist_attn.training.config import TrainingConfig
from dist_attn.training.datasets.labelled_text import TextExamples
from dist_attn.training.datasets.token_cache import Progress, nothing_shown
from dist_attn.training.mesh import Share
from dist_attn.training.text_tasks import TextTask
from dist_attn_papers.million.model import MillionModel, MillionReading

# A Selector keeps at least one token of each text: with hardly more, it has dropped all that could be dropped.
FEW_PER_TEXT = 1.5
# From half of a run on a Selector that is to save something drops more than this leaves.
NEARLY_ALL = 0.95


class MillionTask(TextTask):
    """A task of the classes' mean cross entropy, the Selector's rate term and experts' balance; validated by accuracy.

    Validation also counts which share of the tokens is kept, how many of a text, and which share of the assignments to
    experts is dropped. A remark warns of a Selector that drops nearly all, as under the adversarial objective, or none.

    Reference: A Unified View of Long-Sequence Models, Eq. 27 and 28.
    """

    model: MillionModel

    def __init__(self, config: TrainingConfig, share: Share, progress: Progress = nothing_shown) -> None:
        super().__init__(config, share, progress)
        self._ending = ""  # as `_ends` last said

    def prepare(self, step: int) -> None:
        self.model.prepare(step)

    def loss(self, step: int, rows: slice) -> Tensor:
        numbers = self._numbers(step)[rows].tolist()
        # The noise of a text belongs to its place in the run, whichever rank reads it.
        draws = range(step * self.batch + rows.start, step * self.batch + rows.stop)
        logits_NC, classes_N, readings = self._read(self._train, numbers, draws)
        likelihood = cross_entropy(logits_NC, classes_N, self._config.objective.label_smoothing)
        beside = torch.stack([self.model.side_loss(reading) for reading in readings]).sum()
        return (likelihood + beside) * (self._share.replica_weight / self.batch)

    def validate(self) -> dict[str, float | int]:
        examples = self._validation
        if examples is None:
            return {}
        tally, became_4 = Tally(), torch.zeros(4, dtype=torch.float64, device="cpu")
        for batch, own, counts in self._validation_batches(examples):
            numbers = batch[own]
            logits_NC, classes_N, readings = self._read(examples, numbers, numbers)
            if counts:
                tally.add(logits_NC, classes_N)
                for reading in readings:
                    became = reading.tally
                    found = [became.kept, became.tokens, became.dropped, became.assigned]
                    became_4 += torch.tensor(found, device="cpu")
        scores = tally.scores(self._share)
        weighed_4 = (became_4 * self._share.replica_weight).to(self._share.device)
        kept, tokens, dropped, assigned = self._share.sum(weighed_4).tolist()
        per_text = kept / scores["examples"]
        return {**scores, "kept_share": kept / tokens, "kept_per_text": per_text, "dropped_share": dropped / assigned}

    def remarks(self, step: int, scores: Mapping[str, float | int]) -> list[str]:
        before, self._ending = self._ending, self._ends(step, scores)
        if self._ending == before:
            return []
        selector = self.model.config.selector
        match self._ending:
            case "nothing":
                return [
                    f"step {step}: the Selector keeps {scores['kept_per_text']:.2f} tokens of a text, of which one is "
                    "never dropped: it has taken the texts away. Raise selector.rate_weight, or train under a Selector "
                    "that stays (selector.frozen with run.begin_from)"
                ]
            case "everything":
                return [
                    f"step {step}: the Selector keeps {scores['kept_share']:.0%} of the tokens where selector.rate is "
                    f"{selector.rate:.0%}: nothing is saved. Raise selector.rate_weight, or train for longer"
                ]
        return []

    def _ends(self, step: int, scores: Mapping[str, float | int]) -> str:
        """Say what a Selector keeps that has gone too far: "nothing" that could be dropped, "everything", or ""."""
        selector = self.model.config.selector
        if selector.gate == "top_k" or not scores:
            return ""
        if scores["kept_per_text"] < FEW_PER_TEXT <= scores["kept_per_text"] / scores["kept_share"]:
            return "nothing"
        judged = not selector.frozen and selector.rate < NEARLY_ALL and 2 * step >= self._config.run.steps
        return "everything" if judged and scores["kept_share"] > NEARLY_ALL else ""

    def _read(
        self, examples: TextExamples, numbers: Sequence[int], draws: Sequence[int]
    ) -> tuple[Tensor, Tensor, list[MillionReading]]:
        """Compute logits, classes and readings of some examples."""
        logits, classes, readings = [], [], []
        for number, draw in zip(numbers, draws, strict=True):
            (tokens_T,), label = examples[number]
            ops = self._share.ops(len(tokens_T))
            own_L = tokens_T[self._share.tokens(len(tokens_T))]
            with self._autocast():
                readings.append(self.model.read(own_L, ops, draw))
                logits.append(self.model.classify(readings[-1], ops))
            classes.append(label)
        return torch.stack(logits), send(torch.tensor(classes, device="cpu"), self._share.device), readings

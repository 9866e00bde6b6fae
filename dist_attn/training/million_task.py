"""Classification by the million-scale model: every text is a sequence of its own, read by all its ranks together."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dist_attn.checkpoints import save_model
from dist_attn.errors import ConfigError
from dist_attn.models import MillionConfig, MillionModel
from dist_attn.models.million import Reading
from dist_attn.training.classification import Tally, cross_entropy
from dist_attn.training.config import TrainingConfig
from dist_attn.training.datasets.config import LabelledTextConfig, ListOpsConfig, NeedlesConfig
from dist_attn.training.datasets.order import check_enough, examples_of_step
from dist_attn.training.datasets.token_cache import Progress, nothing_shown
from dist_attn.training.first_model import first_model
from dist_attn.training.task import Criterion, Share, Task, rows_to_read
from dist_attn.training.text_examples import ReaderSizes, TextExamples, read_text_sets

__all__ = ["MillionTask"]

# A Selector keeps at least one token of each text: with hardly more, it has dropped all that could be dropped.
FEW_PER_TEXT = 1.5
# From half of a run on a Selector that is to save something drops more than this leaves.
NEARLY_ALL = 0.95


class MillionTask(Task):
    """The mean cross entropy of the classes, the Selector's rate term and the experts' balance; validated by accuracy.

    Validation also counts which share of the tokens is kept, how many of a text, and which share of the assignments to
    experts is dropped. A Selector that takes everything away, as under the adversarial objective, or nothing is told.

    Reference: A Unified View of Long-Sequence Models, Eq. 27 and 28.
    """

    model: MillionModel
    unit = "texts"
    loss_unit = "nats per text"

    def __init__(self, config: TrainingConfig, share: Share, progress: Progress = nothing_shown) -> None:
        data = cast(LabelledTextConfig | ListOpsConfig | NeedlesConfig, config.data)
        model = cast(MillionConfig, config.model)
        if model.num_classes is None:
            raise ConfigError("model.num_classes is missing; a million model is trained as a classifier")
        self._config, self._share = config, share
        sizes = ReaderSizes(model.vocab_size, model.num_classes)
        self._sets = read_text_sets(data, sizes, config.run.folder / "cache", progress)
        check_enough(len(self._sets.train), data.batch, "labelled texts")
        super().__init__(first_model(model, config.run.begin_from).to(share.device), data.batch)
        self.criterion = None if self._sets.validation is None else Criterion("accuracy", "higher")
        self._ending = ""  # as `_ends` last said

    def prepare(self, step: int) -> None:
        self.model.prepare(step)

    def loss(self, step: int, rows: slice) -> Tensor:
        numbers = examples_of_step(step, self.batch, len(self._sets.train), self._config.run.seed)[rows].tolist()
        # The noise of a text belongs to its place in the run, whichever rank reads it.
        draws = range(step * self.batch + rows.start, step * self.batch + rows.stop)
        logits_NC, classes_N, readings = self._classify(self._sets.train, numbers, draws)
        likelihood = cross_entropy(logits_NC, classes_N, self._config.objective.label_smoothing)
        beside = torch.stack([self.model.side_loss(reading) for reading in readings]).sum()
        return (likelihood + beside) * (self._share.replica_weight / self.batch)

    def validate(self) -> dict[str, float | int]:
        examples = self._sets.validation
        if examples is None:
            return {}
        tally, became_4 = Tally(), torch.zeros(4, dtype=torch.float64)
        for start in range(0, len(examples), self.batch):
            own, counts = rows_to_read(self._share, min(self.batch, len(examples) - start))
            numbers = range(start + own.start, start + own.stop)
            logits_NC, classes_N, readings = self._classify(examples, numbers, numbers)
            if counts:
                tally.add(logits_NC, classes_N)
                for reading in readings:
                    became = reading.tally
                    became_4 += torch.tensor([became.kept, became.tokens, became.dropped, became.assigned])
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
        """What the Selector keeps where it has gone too far: "nothing" that could be dropped, "everything", or ""."""
        selector = self.model.config.selector
        if selector.gate == "top_k" or not scores:
            return ""
        if scores["kept_per_text"] < FEW_PER_TEXT <= scores["kept_per_text"] / scores["kept_share"]:
            return "nothing"
        judged = not selector.frozen and selector.rate < NEARLY_ALL and 2 * step >= self._config.run.steps
        return "everything" if judged and scores["kept_share"] > NEARLY_ALL else ""

    def seen(self, steps: int) -> int:
        return steps * self.batch

    def export(self, folder: Path, weights: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        facts = {"labels": list(self._sets.labels), **facts}
        save_model(self.model, folder, tokeniser=self._sets.tokeniser, half=True, facts=facts, weights=weights)

    def _classify(
        self, examples: TextExamples, numbers: Sequence[int], draws: Sequence[int]
    ) -> tuple[Tensor, Tensor, list[Reading]]:
        """Logits, classes and readings of some examples."""
        logits, classes, readings = [], [], []
        device = self._share.device
        for number, draw in zip(numbers, draws, strict=True):
            (tokens_T,), label = examples[number]
            ops = self._share.ops(len(tokens_T))
            own_L = tokens_T[self._share.tokens(len(tokens_T))].to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._config.run.bf16):
                readings.append(self.model.read(own_L, ops, draw))
                logits.append(self.model.classify(readings[-1], ops))
            classes.append(label)
        return torch.stack(logits), torch.tensor(classes, device=device), readings

"""Classification of texts and of pairs of texts, of any lengths, packed into one sequence for every micro-batch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from dist_attn.checkpoints import save_model
from dist_attn.errors import ConfigError
from dist_attn.mixers import (
    EfficientConfig,
    EluConfig,
    HippoConfig,
    LsslConfig,
    PerformerConfig,
    RandomFeatureConfig,
    S4Config,
    ScaleformerConfig,
    TokenMlpConfig,
    redraw_pools,
)
from dist_attn.model_config.hybrid import mixers_of_layers
from dist_attn.models import TextClassifier, TextClassifierConfig
from dist_attn.training.classification import Tally, cross_entropy
from dist_attn.training.config import TrainingConfig
from dist_attn.training.datasets.config import LabelledTextConfig, ListOpsConfig, NeedlesConfig
from dist_attn.training.datasets.order import check_enough, examples_of_step
from dist_attn.training.datasets.token_cache import Progress, nothing_shown
from dist_attn.training.first_model import first_model
from dist_attn.training.task import Criterion, Share, Task, rows_to_read
from dist_attn.training.text_examples import ReaderSizes, TextExamples, read_text_sets

__all__ = ["TextClassificationTask"]


class TextClassificationTask(Task):
    """The mean cross entropy of the classes of a batch of texts; validated by accuracy.

    Nothing is padded: the texts of a micro-batch lie one after the other, as documents that do not see each other, so a
    text has the logits that it has alone, whatever it is packed with. Ranks along the sequence cut the whole row.

    Reference: Random Feature Attention, Sec. 4.4 (Long Range Arena).
    """

    model: TextClassifier
    unit = "texts"
    loss_unit = "nats per text"

    def __init__(self, config: TrainingConfig, share: Share, progress: Progress = nothing_shown) -> None:
        data = cast(LabelledTextConfig | ListOpsConfig | NeedlesConfig, config.data)
        model = cast(TextClassifierConfig, config.model)
        _check_packs(model)
        self._config, self._share = config, share
        sizes = ReaderSizes(model.vocab_size, model.num_classes, model.texts)
        self._sets = read_text_sets(data, sizes, config.run.folder / "cache", progress)
        check_enough(len(self._sets.train), data.batch, "labelled texts")
        super().__init__(first_model(model, config.run.begin_from).to(share.device), data.batch)
        self.criterion = None if self._sets.validation is None else Criterion("accuracy", "higher")

    def prepare(self, step: int) -> None:
        redraw_pools(self.model, step)

    def loss(self, step: int, rows: slice) -> Tensor:
        numbers = examples_of_step(step, self.batch, len(self._sets.train), self._config.run.seed)
        logits_NC, classes_N = self._classify(self._sets.train, numbers[rows].tolist())
        smoothing = self._config.objective.label_smoothing
        return cross_entropy(logits_NC, classes_N, smoothing) * (self._share.replica_weight / self.batch)

    def validate(self) -> dict[str, float | int]:
        examples = self._sets.validation
        if examples is None:
            return {}
        tally = Tally()
        for start in range(0, len(examples), self.batch):
            own, counts = rows_to_read(self._share, min(self.batch, len(examples) - start))
            scored = self._classify(examples, range(start + own.start, start + own.stop))
            if counts:
                tally.add(*scored)
        return tally.scores(self._share)

    def seen(self, steps: int) -> int:
        return steps * self.batch

    def export(self, folder: Path, weights: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        facts = {"labels": list(self._sets.labels), **facts}
        save_model(self.model, folder, tokeniser=self._sets.tokeniser, half=True, facts=facts, weights=weights)

    def _classify(self, examples: TextExamples, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Logits and classes of some examples."""
        texts, classes = zip(*(examples[number] for number in numbers), strict=True)
        tokens_1T, starts = self.model.pack([text for own in texts for text in own])
        total, device = tokens_1T.shape[1], self._share.device
        own_1L = tokens_1T[:, self._share.tokens(total)].to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self._config.run.bf16):
            logits_NC = self.model.classify_packed(own_1L, self._share.ops(total, documents=starts))
        return logits_NC, torch.tensor(classes, device=device)


def _check_packs(model: TextClassifierConfig) -> None:
    """Raises ConfigError for mixers that would tell packed texts from single ones."""
    for mixer in mixers_of_layers(model.encoder.mixer, model.encoder.num_layers):
        if isinstance(mixer, ScaleformerConfig):
            raise ConfigError(
                "model.encoder.mixer scaleformer is causal and takes no packed texts; take kind bidirectional with "
                'attention = "scaleformer", or another mixer'
            )
        if isinstance(mixer, HippoConfig | LsslConfig | TokenMlpConfig) or (
            isinstance(mixer, S4Config) and mixer.form == "scan"
        ):
            raise ConfigError(
                f"model.encoder.mixer {mixer.kind} takes no packed texts; take s4d, s4 as a convolution, or another "
                "mixer"
            )
        if (
            isinstance(mixer, EfficientConfig | EluConfig | PerformerConfig | RandomFeatureConfig)
            and mixer.rotary is not None
        ):
            raise ConfigError(
                f"model.encoder.mixer {mixer.kind} has rotary positions, so its features depend on where in a batch a "
                "text is packed; leave rotary out and take model.encoder.positions, or take softmax"
            )

"""Classification of texts, packed into one sequence per micro-batch."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dist_attn.checkpoints import save_model
from dist_attn.errors import ConfigError
from dist_attn.model_config.language_model import mixers_of_layers
from dist_attn.models import Model, TextClassifier, TextClassifierConfig
from dist_attn.ops.device import send
from dist_attn.training.classification import ClassificationTask, ExamplesTask
from dist_attn.training.config import TrainingConfig
from dist_attn.training.datasets.labelled_text import ReaderSizes, TextExamples, read_text_sets
from dist_attn.training.datasets.token_cache import Progress, nothing_shown
from dist_attn.training.mesh import Share
from dist_attn.training.task import Criterion


class TextTask(ExamplesTask[TextExamples]):
    """A task over labelled texts."""

    unit, called = "texts", "labelled texts"
    loss_unit = "nats per text"

    def __init__(self, config: TrainingConfig, share: Share, progress: Progress = nothing_shown) -> None:
        model: Any = config.model
        if model.num_classes is None:
            raise ConfigError(f"model.num_classes is missing; a {model.kind} is trained as a classifier")
        sizes = ReaderSizes(model.vocab_size, model.num_classes, getattr(model, "texts", 1))
        self._sets = read_text_sets(config.data, sizes, config.run.folder / "cache", progress)
        super().__init__(config, share, self._sets.train, self._sets.validation, Criterion("accuracy", "higher"))

    def export(self, folder: Path, weights: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        model = cast(Model, self.model)
        facts = {"labels": list(self._sets.labels), **facts}
        save_model(model, folder, tokeniser=self._sets.tokeniser, half=True, facts=facts, weights=weights)


class TextClassificationTask(ClassificationTask[TextExamples], TextTask):
    """Classification of texts and of pairs of texts, of any lengths.

    Nothing is padded: the texts of a micro-batch lie one after the other, as documents that do not see each other, so a
    text has the logits that it has alone, whatever it is packed with. Ranks along the sequence cut the whole row.

    Reference: Random Feature Attention, Sec. 4.4 (Long Range Arena).
    """

    model: TextClassifier

    def __init__(self, config: TrainingConfig, share: Share, progress: Progress = nothing_shown) -> None:
        model = cast(TextClassifierConfig, config.model)
        _check_packs(model)
        super().__init__(config, share, progress)
        self.sequences_per_row = model.texts

    def _classify(self, examples: TextExamples, numbers: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        texts, classes = zip(*(examples[number] for number in numbers.tolist()), strict=True)
        tokens_1T, starts = self.model.pack([text for own in texts for text in own])
        total = tokens_1T.shape[1]
        own_1L = tokens_1T[:, self._share.tokens(total)]
        with self._autocast():
            logits_NC = self.model.classify_packed(own_1L, self._share.ops(total, documents=starts))
        return logits_NC, send(torch.tensor(classes, device="cpu"), logits_NC.device)


def _check_packs(model: TextClassifierConfig) -> None:
    """Raise ConfigError for mixers that would tell packed texts from single ones."""
    for mixer in mixers_of_layers(model.encoder.mixer, model.encoder.num_layers):
        if not mixer.packs:
            raise ConfigError(
                f"model.encoder.mixer {mixer.kind} takes no packed texts; take kind bidirectional, or another mixer"
            )

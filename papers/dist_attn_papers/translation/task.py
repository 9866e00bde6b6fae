"""Translation: sources of one length in a batch, the loss over the tokens of the targets."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dist_attn.checkpoints import save_model
from dist_attn.errors import ConfigError
from dist_attn.ops.device import send
from dist_attn.shipped.folder_files import put_in_place
from dist_attn.text import Tokeniser, load_tokeniser
from dist_attn.training.classification import cross_entropy
from dist_attn.training.config import TrainingConfig
from dist_attn.training.datasets.token_cache import Progress, nothing_shown
from dist_attn.training.mesh import Share
from dist_attn.training.task import Criterion, ModelTask, rows_to_read
from dist_attn_papers.translation.beam_search import BeamSpec, translate
from dist_attn_papers.translation.config import EncoderDecoderConfig
from dist_attn_papers.translation.model import EncoderDecoder
from dist_attn_papers.translation.parallel_text import PairBatch, PairBatches, ParallelTextConfig, read_parallel_texts

__all__ = ["TranslationTask"]


class TranslationTask(ModelTask):
    """A task of the mean cross entropy of the target tokens, ends among them; validated by that of held-out pairs.

    Reference: Random Feature Attention, Sec. 4.2; Vaswani et al. 2017, Sec. 5.4 (label smoothing).
    """

    model: EncoderDecoder
    unit = "pairs"
    loss_unit = "nats per target token"

    def __init__(self, config: TrainingConfig, share: Share, progress: Progress = nothing_shown) -> None:
        data, model = cast(ParallelTextConfig, config.data), cast(EncoderDecoderConfig, config.model)
        self._data = data
        self._tokenisers = _tokenisers(data, model)
        self._ends = _ends(data, self._tokenisers)
        cache, longest = config.run.folder / "cache", data.max_length
        pairs = read_parallel_texts(data.train_files, self._tokenisers, cache, max_length=longest, progress=progress)
        self._batches = PairBatches(pairs, data.batch, config.run.seed, self._ends)
        self._validation: PairBatches | None = None
        if data.validation_files is not None:
            held_out = read_parallel_texts(
                data.validation_files, self._tokenisers, cache, max_length=longest, progress=progress
            )
            self._validation = PairBatches(held_out, min(data.batch, len(held_out.kept)), config.run.seed, self._ends)
            some = range(min(data.translations, len(held_out.sources)))
            self._sources = [np.append(held_out.sources[number], self._ends[0]) for number in some]
        super().__init__(config, share)
        self.criterion = None if self._validation is None else Criterion("validation_loss", "lower")
        self._facts = {"pairs": len(pairs.kept), "pairs_left_out": pairs.left_out}

    def loss(self, step: int, rows: slice) -> Tensor:
        batch = self._batches(step)
        logits_NV, next_N = self._logits(batch.rows(rows.start, rows.stop))
        return cross_entropy(logits_NV, next_N, self._config.objective.label_smoothing) / batch.num_targets

    def validate(self) -> dict[str, float | int]:
        if self._validation is None:
            return {}
        loss, right, tokens = 0.0, 0, 0
        for step in range(self._validation.per_epoch):
            batch = self._validation(step)
            own, counts = rows_to_read(self._share, len(batch.source_BS))
            tokens += batch.num_targets
            logits_NV, next_N = self._logits(batch.rows(own.start, own.stop))
            if counts:
                loss += float(cross_entropy(logits_NV, next_N))
                right += int((logits_NV.argmax(dim=1) == next_N).sum())
        total = self._share.sum(torch.tensor([loss, right], dtype=torch.float64, device="cpu").to(self._share.device))
        if self._data.translations:
            self._write_translations()
        mean = float(total[0]) / tokens
        return {"validation_loss": mean, "perplexity": math.exp(mean), "token_accuracy": float(total[1]) / tokens}

    def seen(self, steps: int) -> int:
        return self._batches.pairs_before(steps)

    def export(self, folder: Path, weights: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        source, target = self._tokenisers
        save_model(
            self.model,
            folder,
            tokeniser=target,
            source_tokeniser=None if self._data.target_tokeniser is None else source,
            half=True,
            facts={**self._facts, **facts},
            weights=weights,
        )

    def _logits(self, part: PairBatch) -> tuple[Tensor, Tensor]:
        """Compute, of the target tokens that lie here, logits [N, V], and the tokens that come after them, [N]."""
        share, device = self._share, self._share.device
        source, target = part.source_BS.shape[1], part.target_BL.shape[1]
        source_BS = part.source_BS[:, share.tokens(source)]
        target_BL, next_BL = (t[:, share.tokens(target)] for t in (part.target_BL, part.next_BL))
        with self._autocast():
            memory_BSD = self.model.encode(source_BS, share.ops(source))
            logits_BLV, _ = self.model.decode(target_BL, memory_BSD, share.ops(target), share.ops(target, source))
        return logits_BLV.flatten(0, 1), send(next_BL.flatten(), device)

    def _write_translations(self) -> None:
        """Write translations.txt: line n is the model's translation of line n of the validation sources."""
        everyone, longest = self._share.lengthwise(), self._data.max_length
        own = everyone.tokens(len(self._sources))
        spec = BeamSpec(self._data.beams, longest, self._data.length_penalty)
        # Token ids and 1, 0 behind the end: what ranks do not have is 0, so that a sum puts the rows together.
        table_NT = torch.zeros(len(self._sources), longest, dtype=torch.int64, device=self._share.device)
        for row, found in enumerate(translate(self.model, self._sources[own], spec, end_token=self._ends[1])):
            tokens = torch.tensor(found[0].tokens, dtype=torch.int64, device="cpu")
            table_NT[own.start + row, : len(tokens)] = tokens + 1
        table_NT = everyone.sum(table_NT)
        if own.start == 0 and own.stop > 0:  # one rank has the first row
            texts = (self._tokenisers[1].decode((row[row > 0] - 1).tolist()) for row in table_NT.cpu())
            lines = b"".join(b" ".join(text.split()) + b"\n" for text in texts)
            put_in_place(self._config.run.folder / "translations.txt", lines)


def _tokenisers(data: ParallelTextConfig, model: EncoderDecoderConfig) -> tuple[Tokeniser, Tokeniser]:
    """Load the tokenisers of source and target.

    Raises: ConfigError where their sizes are not the model's.
    """
    source = load_tokeniser(data.tokeniser)
    target = source if data.target_tokeniser is None else load_tokeniser(data.target_tokeniser)
    if (data.target_tokeniser is None) != (model.source_vocab_size is None):
        raise ConfigError(
            "data.target_tokeniser and model.source_vocab_size say that source and target have vocabularies of their "
            "own; give both or neither"
        )
    sizes = {"vocab_size": (target, model.vocab_size), "source_vocab_size": (source, model.source_vocab_size)}
    for name, (tokeniser, size) in sizes.items():
        if size is not None and tokeniser.vocab_size != size:
            raise ConfigError(
                f"the tokeniser has {tokeniser.vocab_size} tokens, model.{name} is {size}; "
                f"set model.{name} = {tokeniser.vocab_size}"
            )
    return source, target


def _ends(data: ParallelTextConfig, tokenisers: tuple[Tokeniser, Tokeniser]) -> tuple[int, int]:
    """The end tokens of source and target.

    Raises: ConfigError for a tokeniser without one.
    """
    source, target = (tokeniser.end_token for tokeniser in tokenisers)
    if source is None or target is None:
        raise ConfigError(
            f"the tokeniser in {data.tokeniser if source is None else data.target_tokeniser} has no end token, with "
            "which targets begin and end; take one that has"
        )
    return source, target

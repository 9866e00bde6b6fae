"""Language modelling: segments of contiguous streams, with the state carried from each to the next."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dist_attn.checkpoints import save_model
from dist_attn.errors import ConfigError, ModelFolderError
from dist_attn.model_config.language_model import LearnedPositions, mixers_of_layers
from dist_attn.models import LanguageModel, LanguageModelConfig, ModelState
from dist_attn.ops.device import send
from dist_attn.shipped import sha256
from dist_attn.text import Tokeniser, fitted, load_tokeniser
from dist_attn.training.config import TrainingConfig
from dist_attn.training.datasets.config import TextDataConfig
from dist_attn.training.datasets.text_sources import beginning, documents, expand, is_jsonl
from dist_attn.training.datasets.token_cache import (
    Progress,
    cached_texts,
    digest_of,
    nothing_shown,
    reading,
    tokens_of,
)
from dist_attn.training.evaluation import score_tokens, token_loss
from dist_attn.training.mesh import Share
from dist_attn.training.task import Criterion, ModelTask


def tokenise_files(
    paths: tuple[Path, ...],
    tokeniser: Tokeniser,
    cache_folder: Path,
    *,
    text_field: str = "text",
    progress: Progress = nothing_shown,
) -> NDArray[np.int32]:
    """Read the tokens of all documents in order, an end token after each, memory-mapped from a cache keyed by content.

    A path is a text, a folder of *.txt, or `.jsonl` with a document in the `text_field` of every line.

    Raises: ConfigError naming a file that is missing, empty or damaged, with the line where there is one.
    """
    files = expand(paths)
    end = np.array([] if tokeniser.end_token is None else [tokeniser.end_token], dtype=np.int32)

    def texts() -> Iterator[NDArray[np.int32]]:
        progress_of = reading(files, progress)
        for path in files:
            num_tokens = 0
            for document in documents(path, text_field, progress_of(path)):
                before = num_tokens
                for tokens in tokens_of(tokeniser, document):
                    num_tokens += len(tokens)
                    yield tokens
                if num_tokens > before:
                    yield end
            if not num_tokens:
                raise ConfigError(f"training text {path} is empty; it needs at least one byte")

    key = digest_of(files, tokeniser.digest, text_field)
    return cached_texts(cache_folder, f"text-{key}", texts).tokens


def digests_of(paths: Sequence[Path]) -> dict[str, str]:
    """Compute the SHA-256 of each training text by its name; of a folder, that of its files' digests."""
    found = dict[str, str]()
    for path in paths:
        place, digests = path.resolve(), [sha256(file) for file in expand([path])]
        name = place.name if place.name not in found else f"{place.parent.name}/{place.name}"
        found[name] = hashlib.sha256("".join(digests).encode()).hexdigest() if path.is_dir() else digests[0]
    return found


class SegmentStream:
    """The batches of streams: stream i of step n + 1 goes on where stream i of step n stopped; `batch` rows each.

    A pure function of the step, so a resumed run reads exactly what an undisturbed one would have read.
    """

    def __init__(self, tokens: np.ndarray, batch: int, segment: int) -> None:
        needed = batch * (segment + 1)
        if len(tokens) < needed:
            raise ConfigError(
                f"the corpus has {len(tokens)} tokens; one batch of {batch} segments of {segment} needs {needed}. "
                "Give more text, or a smaller data.batch or data.segment"
            )
        self._tokens, self._batch, self._segment = tokens, batch, segment

    def __call__(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Take the inputs and next-token targets of `step`, each [batch, segment] int64."""
        total = len(self._tokens)
        offsets_T = np.arange(self._segment + 1)
        starts_B = np.arange(self._batch) * total // self._batch + step * self._segment
        picked = torch.from_numpy(self._tokens[(starts_B[:, None] + offsets_T) % total].astype(np.int64))
        return picked[:, :-1], picked[:, 1:]


class LanguageTask(ModelTask):
    """A task of the mean cross entropy of the next token; validated in bits per byte of one text read as a stream.

    Reference: Random Feature Attention, Sec. 4.1: the state goes on into the next segment, the gradient does not.
    """

    model: LanguageModel
    loss_unit = "nats per token"

    def __init__(self, config: TrainingConfig, share: Share, progress: Progress = nothing_shown) -> None:
        data = self._data = cast(TextDataConfig, config.data)
        self._tokeniser = self._tokeniser_of(config)
        tokens = tokenise_files(
            data.train_files,
            self._tokeniser,
            config.run.folder / "cache",
            text_field=data.text_field,
            progress=progress,
        )
        self._trained_on = digests_of(data.train_files)  # as they are now, not at the end of the run
        self._stream = SegmentStream(tokens, data.batch, data.segment)
        self._validation = read_validation_text(data)
        super().__init__(config, share)
        self.criterion = None if self._validation is None else Criterion("bits_per_byte", "lower")
        own = share.rows(data.batch)
        # Made while the parameters are whole: a mixer takes the types and devices of its state from them.
        self._initial = self.model.initial_state(own.stop - own.start)
        self._state = self._initial
        self._after: list[ModelState] = []

    def _tokeniser_of(self, config: TrainingConfig) -> Tokeniser:
        """Load the tokeniser of the model.

        Raises: ConfigError where it, the data and the model do not fit each other.
        """
        data, model = self._data, cast(LanguageModelConfig, config.model)
        tokeniser = load_tokeniser(data.tokeniser)
        try:
            tokeniser = fitted(tokeniser, data.tokeniser, model.vocab_size)
        except ModelFolderError as error:
            raise ConfigError(f"model.vocab_size is {model.vocab_size}: {error}") from None
        _check_positions(model, data)
        _check_pools(model, data)
        return tokeniser

    def prepare(self, step: int) -> None:
        super().prepare(step)
        self._after = []

    def loss(self, step: int, rows: slice) -> Tensor:
        data = self._data
        inputs_BT, targets_BT = self._stream(step)
        tokens = self._share.tokens(data.segment)
        inputs_BL = inputs_BT[rows, tokens]
        targets_BL = send(targets_BT[rows, tokens], self._share.device)
        ops = self._share.ops(data.segment, carried=data.stateful)
        with self._autocast():
            h_BLD, after = self.model.hidden(inputs_BL, ops, self._state_of(rows))
            nats = token_loss(self.model.readout, h_BLD.flatten(0, 1), targets_BL.flatten())
        if data.stateful:
            self._keep(after.detach(), rows)
        return nats / targets_BT.numel()

    def carried(self) -> dict[str, Tensor]:
        return {str(i): t for i, t in enumerate(self._state.tensors())}

    def carry(self, tensors: Mapping[str, Tensor]) -> None:
        if len(tensors) != len(self._initial.tensors()):
            raise ConfigError("the state in the checkpoint is of another model; start a new run folder")
        flat = iter(tensors[str(i)].to(self._share.device) for i in range(len(tensors)))
        layers = tuple(s.replace(tuple(next(flat) for _ in s.tensors())) for s in self._initial.layers)
        self._state = ModelState(layers, next(flat))

    def validate(self) -> dict[str, float | int]:
        if self._validation is None:
            return {}
        tokens, data = self._tokeniser.encode(self._validation), self._data
        context = None if data.stateful else data.segment
        score = score_tokens(self.model, tokens, len(self._validation), context, self._share)
        return {"bits_per_byte": score.bits_per_byte, "bytes": score.num_bytes}

    def seen(self, steps: int) -> int:
        return steps * self._data.batch * self._data.segment

    def export(self, folder: Path, weights: Mapping[str, Tensor], facts: dict[str, Any]) -> None:
        facts = {"trained_on": self._trained_on, **facts}
        save_model(self.model, folder, tokeniser=self._tokeniser, half=True, facts=facts, weights=weights)

    def _state_of(self, rows: slice) -> ModelState:
        """Take the state of a micro-batch's rows."""
        own = self._share.rows(self.batch)
        if rows == own:
            return self._state
        return self._state.select(slice(rows.start - own.start, rows.stop - own.start))

    def _keep(self, after: ModelState, rows: slice) -> None:
        """Put a micro-batch's state beside those before it; the last one completes the state of the next step."""
        self._after.append(after)
        if rows.stop == self._share.rows(self.batch).stop:
            self._state = self._after[0] if len(self._after) == 1 else ModelState.stack(self._after)


def _check_positions(model: LanguageModelConfig, data: TextDataConfig) -> None:
    """Raise ConfigError where the streams run beyond the positions that the model has."""
    positions = model.positions
    if not isinstance(positions, LearnedPositions) or positions.beyond == "repeat":
        return
    if data.stateful:
        raise ConfigError(
            f"model.positions has vectors for {positions.length} tokens, and streams with a carried state have no end; "
            'set data.stateful = false, or model.positions.beyond = "repeat"'
        )
    if data.segment > positions.length:
        raise ConfigError(
            f"data.segment is {data.segment}; model.positions has vectors for {positions.length} tokens: raise its "
            "length, or take a smaller segment"
        )


def _check_pools(model: LanguageModelConfig, data: TextDataConfig) -> None:
    """Raise ConfigError where a carried state would be one of other random features than those that read it."""
    for mixer in mixers_of_layers(model.mixer, model.num_layers):
        pool = getattr(mixer, "pool", 0)
        if data.stateful and pool:
            raise ConfigError(
                f"model.mixer {mixer.kind} draws its features from a pool of {pool} at every step, and a state of one "
                "step's features means nothing to the next: set data.stateful = false, or pool = 0"
            )


def read_validation_text(data: TextDataConfig) -> bytes | None:
    """Read the first bytes of the validation text, plain or gzipped, if there is one.

    Raises: ConfigError where it is missing, damaged, empty, or no text.
    """
    path = data.validation_file
    if path is None:
        return None
    if is_jsonl(path):
        raise ConfigError(f"validation text {path} is .jsonl; needed is one text, plain or gzipped")
    text = beginning(path, data.validation_bytes, "validation text")
    if not text:
        raise ConfigError(f"validation text {path} is empty; give a text, or no data.validation")
    return text

"""What decodes greedily where decoding speeds are compared: random features by states, softmax by caches."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from benchmarks.memory import peak_bytes
from dist_attn.models import LanguageModel, LanguageModelConfig, ModelState
from dist_attn_papers.studies.cached_decoder import CachedDecoder
from dist_attn_papers.studies.decoding_forms import PRECISIONS, Sizes
from dist_attn_papers.translation.config import EncoderDecoderConfig
from dist_attn_papers.translation.model import DecoderState, EncoderDecoder

__all__ = ["CachedArm", "StateArm", "model_settings", "random_source", "state_bytes"]

FIRST_TOKEN = 0


def model_settings(sizes: Mapping[str, int], mixer: Mapping[str, Any], cross: Mapping[str, Any]) -> dict[str, Any]:
    """A model's config.json: encoder and decoder, or without anything in `cross` a language model."""
    if not cross:
        return Sizes(**sizes).settings(mixer)
    width = sizes["width"]
    heads = {"hidden_size": width, "num_heads": sizes["heads"]}
    own = {**heads, "short_convolution": 0, **mixer}
    stack = {"num_layers": sizes["layers"], "mlp_size": sizes["mlp"]}
    encoder = {"hidden_size": width, "mixer": {"kind": "bidirectional", "attention": "softmax", **heads}, **stack}
    decoder = {"mixer": own, "cross": {**heads, **cross}, **stack}
    return {"kind": "encoder_decoder", "vocab_size": sizes["vocabulary"], "encoder": encoder, "decoder": decoder}


def _model(settings: Mapping[str, Any], precision: str) -> EncoderDecoder | LanguageModel:
    if settings["kind"] == "language_model":
        model: EncoderDecoder | LanguageModel = LanguageModel(LanguageModelConfig.model_validate(settings))
    else:
        model = EncoderDecoder(EncoderDecoderConfig.model_validate(settings))
    return model.to(PRECISIONS[precision]).eval()


def random_source(model: EncoderDecoder, batch: int, sources: int) -> torch.Tensor:
    """A memory as it may come out of an encoder, [B, S, D]."""
    generator = torch.Generator().manual_seed(0)
    memory_BSD = torch.randn((batch, sources, model.embedding.weight.shape[1]), generator=generator)
    return memory_BSD.to(model.embedding.weight.dtype)


class _Arm(ABC):
    """A model and the tokens that its greedy choice has come to."""

    def __init__(self, settings: Mapping[str, Any], precision: str, batch: int) -> None:
        torch.manual_seed(0)
        self.model = _model(settings, precision)
        self.batch = batch
        self.token_B = torch.full((batch,), FIRST_TOKEN)
        self.chosen: list[torch.Tensor] = []

    @property
    def weight_bytes(self) -> int:
        """Of all parameters and buffers."""
        return sum(t.numel() * t.element_size() for t in self.model.state_dict().values())

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """What is kept from step to step, without weights."""

    def peak(self, position: int) -> int:
        """The most that is held while the step at this position runs, without weights."""
        with torch.inference_mode():
            return self.held_bytes + peak_bytes(lambda: self.steps(position, 1))

    @abstractmethod
    def steps(self, position: int, count: int) -> None:
        """Decode `count` tokens from `position` on, as if the ones before had been decoded."""

    @abstractmethod
    def decode(self, sources: int, length: int) -> list[torch.Tensor]:
        """Absorb a memory of so many random vectors, where there is one, and decode from the first token on."""

    def encode_seconds(self, sources: int) -> float:
        """Of encoding one source of so many tokens."""
        assert isinstance(self.model, EncoderDecoder)  # a language model has no sources
        source_1S = torch.zeros((1, sources), dtype=torch.int64)
        with torch.inference_mode():
            began = time.perf_counter()
            self.model.encode(source_1S)
            return time.perf_counter() - began

    def _choose(self, logits_BV: torch.Tensor) -> None:
        self.token_B = logits_BV.argmax(-1)
        self.chosen.append(self.token_B)


class StateArm(_Arm):
    """The product's own `step`, from a state that some tokens (and a short memory) have left behind.

    A state has no length: what was absorbed before tells a step's cost nothing.
    """

    def __init__(self, settings: Mapping[str, Any], precision: str, batch: int, sources: int) -> None:
        super().__init__(settings, precision, batch)
        with torch.inference_mode():
            self.state = self._begin(min(sources, 64))
            self.steps(0, 2)

    @property
    def held_bytes(self) -> int:
        return state_bytes(self.state)

    def steps(self, position: int, count: int) -> None:
        with torch.inference_mode():
            self.state = replace(self.state, position_B=torch.full((self.batch,), position))
            self._go_on(count)

    def decode(self, sources: int, length: int) -> list[torch.Tensor]:
        with torch.inference_mode():
            self.state, self.chosen = self._begin(sources), []
            self.token_B = torch.full((self.batch,), FIRST_TOKEN)
            self._go_on(length)
        return self.chosen

    def _begin(self, sources: int) -> DecoderState | ModelState:
        if isinstance(self.model, LanguageModel):
            return self.model.initial_state(self.batch)
        memory_BSD = random_source(self.model, self.batch, sources)
        nothing_B0 = torch.zeros((self.batch, 0), dtype=torch.int64)
        return self.model.decode(nothing_B0, memory_BSD)[1]

    def _go_on(self, count: int) -> None:
        for _ in range(count):
            if isinstance(self.model, LanguageModel):
                assert isinstance(self.state, ModelState)  # of this model
                logits_BV, self.state = self.model.step(self.token_B, self.state)
            else:
                assert isinstance(self.state, DecoderState)  # of this model
                logits_BV, self.state = self.model.step(self.token_B, self.state)
            self._choose(logits_BV)


class CachedArm(_Arm):
    """Softmax in caches of full length, filled with random keys and values."""

    def __init__(self, settings: Mapping[str, Any], precision: str, batch: int, length: int, sources: int) -> None:
        super().__init__(settings, precision, batch)
        with torch.inference_mode():
            self.decoder = CachedDecoder(self.model, batch, length, sources)
            self.decoder.fill(seed=0)

    @property
    def held_bytes(self) -> int:
        return self.decoder.num_bytes

    def steps(self, position: int, count: int) -> None:
        with torch.inference_mode():
            for at in range(position, position + count):
                self._choose(self.decoder.step(self.token_B, at))

    def decode(self, sources: int, length: int) -> list[torch.Tensor]:
        self.chosen, self.token_B = [], torch.full((self.batch,), FIRST_TOKEN)
        if isinstance(self.model, EncoderDecoder):
            with torch.inference_mode():
                self.decoder.absorb(random_source(self.model, self.batch, sources))
        self.steps(0, length)
        return self.chosen


def state_bytes(state: DecoderState | ModelState) -> int:
    """Of all tensors of a decoder's state, the absorbed memory included."""
    tensors = [t for layer in state.layers for t in layer.tensors()] + [state.position_B]
    if isinstance(state, DecoderState):
        for memory in state.memories:
            tensors += [*(memory.sums.tensors() if memory.sums is not None else ()), *(memory.kept or ())]
    return sum(t.numel() * t.element_size() for t in tensors)

"""What decodes where speeds are compared: our step by states, eager or compiled; caches; GPT-2 of transformers."""

import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch

from dist_attn.costs import LanguageModelCosts
from dist_attn.generation.decode import prefill
from dist_attn.models import CausalModel, LanguageModel, LanguageModelConfig, ModelState, hold_weights_as
from dist_attn.ops.state import steps_in_place
from dist_attn_papers.studies.cached_decoder import CachedDecoder

__all__ = ["PRECISIONS", "CachedForm", "Form", "Gpt2Form", "Sizes", "StateForm", "language_model"]

PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RANDOM_FEATURES = {"kind": "rfa", "feature": "gaussian", "num_random": 64}


@dataclass(frozen=True)
class Sizes:
    """Of all models that are compared."""

    width: int = 512
    layers: int = 6
    heads: int = 8
    mlp: int = 2048
    vocabulary: int = 32_768

    def settings(self, mixer: Mapping[str, Any]) -> dict[str, Any]:
        """The config.json of a language model with this mixer and sinusoids."""
        return {
            "kind": "language_model",
            "vocab_size": self.vocabulary,
            "hidden_size": self.width,
            "num_layers": self.layers,
            "mlp_size": self.mlp,
            "positions": "sinusoidal",
            "mixer": {"hidden_size": self.width, "num_heads": self.heads, "short_convolution": 0, **mixer},
        }

    @property
    def costs(self) -> LanguageModelCosts:
        """Of the one with random features."""
        return LanguageModelCosts(LanguageModelConfig.model_validate(self.settings(RANDOM_FEATURES)))


def language_model(
    sizes: Sizes, precision: str = "float32", mixer: Mapping[str, Any] = RANDOM_FEATURES
) -> LanguageModel:
    """With random weights; int8 ones as the engine's option holds them."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig.model_validate(sizes.settings(mixer))).eval()
    if precision == "int8":
        hold_weights_as(model, "int8")
        return model
    return model.to(PRECISIONS[precision])


class Form(ABC):
    """A model and where it stands in a text; greedy, every step feeds what the one before chose."""

    def __init__(self, batch: int) -> None:
        self.token_B = torch.zeros(batch, dtype=torch.int64)
        self.compile_s = 0.0

    @property
    @abstractmethod
    def held_bytes(self) -> int:
        """What is kept from step to step, without weights."""

    @abstractmethod
    def step(self) -> torch.Tensor:
        """Feed one token to each sequence: the logits of the next ones."""

    def steps(self, count: int) -> Callable[[], object]:
        """A work of so many tokens for each sequence."""

        def work() -> None:
            with torch.inference_mode():
                for _ in range(count):
                    self.token_B = self.step().argmax(-1)

        return work


class StateForm(Form):
    """Our own step; with `compiled` through torch.compile, whose time is that of the first step.

    The first sequence reads `read` random tokens and all go on from its state.
    """

    def __init__(self, model: CausalModel, batch: int, read: int, *, compiled: bool = False) -> None:
        super().__init__(batch)
        generator = torch.Generator().manual_seed(0)
        tokens_L = torch.randint(model.vocab_size, (read,), generator=generator)
        with torch.inference_mode():
            self.state = ModelState.stack([prefill(model, tokens_L)] * batch)
        self._step: Callable[[torch.Tensor, ModelState], tuple[torch.Tensor, ModelState]] = model.step
        if compiled:
            self._step = torch.compile(model.step, dynamic=False)
            began = time.perf_counter()
            # The second step has a state of the step's own making, which may be compiled for once more.
            self.steps(2)()
            self.compile_s = time.perf_counter() - began

    @property
    def held_bytes(self) -> int:
        return self.state.num_bytes()

    def step(self) -> torch.Tensor:
        with steps_in_place():  # as an engine's batches, of which nobody else has the state
            logits_BV, self.state = self._step(self.token_B, self.state)
        return logits_BV


class CachedForm(Form):
    """Exact attention over keys and values in caches that were allocated once, filled with random numbers."""

    def __init__(self, sizes: Sizes, batch: int, read: int, room: int, precision: str = "float32") -> None:
        super().__init__(batch)
        model = language_model(sizes, precision, {"kind": "softmax"})
        with torch.inference_mode():
            self._decoder = CachedDecoder(model, batch, read + room)
            self._decoder.fill(seed=0)
        self._position = read

    @property
    def held_bytes(self) -> int:
        return self._decoder.num_bytes

    def step(self) -> torch.Tensor:
        logits_BV = self._decoder.step(self.token_B, self._position)
        self._position += 1
        return logits_BV


class Gpt2Form(Form):
    """GPT-2 of transformers as its users run it: attention by SDPA, the dynamic cache; it has read `read` tokens."""

    def __init__(self, sizes: Sizes, batch: int, read: int, room: int, precision: str = "float32") -> None:
        from transformers import DynamicCache

        super().__init__(batch)
        self.model = gpt2(sizes, read + room, precision)
        generator = torch.Generator().manual_seed(0)
        tokens_BL = torch.randint(sizes.vocabulary, (batch, read), generator=generator)
        self._cache = DynamicCache()
        with torch.inference_mode():  # the cache goes by position, as transformers 5.24 renamed the argument
            self.model(tokens_BL, self._cache, use_cache=True, logits_to_keep=1)

    @property
    def held_bytes(self) -> int:
        return sum(t.nbytes for layer in self._cache.layers for t in (layer.keys, layer.values))

    def step(self) -> torch.Tensor:
        out = self.model(self.token_B[:, None], self._cache, use_cache=True)
        return cast(torch.Tensor, out.logits[:, -1])


def gpt2(sizes: Sizes, positions: int, precision: str = "float32") -> Any:
    """GPT-2 of these sizes with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=sizes.vocabulary,
        n_positions=positions,
        n_embd=sizes.width,
        n_layer=sizes.layers,
        n_head=sizes.heads,
        n_inner=sizes.mlp,
        bos_token_id=0,
        eos_token_id=0,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = GPT2LMHeadModel._from_config(config, attn_implementation="sdpa")
    return model.to(PRECISIONS[precision]).eval()

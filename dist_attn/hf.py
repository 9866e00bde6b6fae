"""Our model folders in transformers: after `import dist_attn.hf`, its Auto classes load, run and generate with them.

    import dist_attn.hf
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("runs/first/model")

What transformers calls the cache is our recurrent state, which has a constant size for kernel attention. The extra
`dist-attn[hf]` installs transformers.
"""

import os
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.nn.functional as F

from dist_attn.checkpoints import load_model, resolve_model_folder, save_model
from dist_attn.errors import InputError, MissingExtraError, ShapeError
from dist_attn.models import LanguageModel, LanguageModelConfig, ModelState, build_model
from dist_attn.text import load_tokeniser

try:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationMixin,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
    )
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ModuleNotFoundError as error:
    raise MissingExtraError(f"dist_attn.hf needs {error.name}: pip install 'dist-attn[hf]'") from None

__all__ = ["DistAttnConfig", "DistAttnForCausalLM", "StateCache"]

MODEL_TYPE: Final = "dist_attn"

# What transformers passes on when it loads a folder, and what changes nothing for files of ours on this disk.
IGNORED = frozenset({
    "_from_auto", "adapter_kwargs", "cache_dir", "force_download", "local_files_only", "low_cpu_mem_usage", "proxies",
    "revision", "token", "trust_remote_code", "use_safetensors", "weights_only",
})  # fmt: skip


class DistAttnConfig(PreTrainedConfig):  # type: ignore[misc]
    """The keys of our config.json as attributes; `language_model` is the same as our own frozen value."""

    model_type = MODEL_TYPE
    attribute_map = {"num_hidden_layers": "num_layers", "intermediate_size": "mlp_size"}  # noqa: RUF012

    @classmethod
    def of(cls, config: LanguageModelConfig, *, end_token: int | None = None) -> "DistAttnConfig":
        """The transformers form of our configuration."""
        values = config.model_dump(mode="json")
        return cls(**values, eos_token_id=end_token, pad_token_id=end_token, tie_word_embeddings=False)

    @property
    def language_model(self) -> LanguageModelConfig:
        """Our form; pydantic's ValidationError where the attributes are not a language model."""
        values = {key: getattr(self, key) for key in LanguageModelConfig.model_fields if hasattr(self, key)}
        return LanguageModelConfig.model_validate(values)


@final
class StateCache:
    """Our recurrent state in the place of `past_key_values`; every call puts the state after it in here."""

    is_compileable = False

    def __init__(self) -> None:
        self.state: ModelState | None = None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens so far."""
        return 0 if self.state is None else self.state.position

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """The state of row `beam_idx[i]` in row i, as beam search wants it."""
        if self.state is not None:
            self.state = self.state.select([int(row) for row in beam_idx])


class DistAttnForCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """A language model of ours with the interface of transformers; `model` is the model itself."""

    config_class = DistAttnConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    _is_stateful = True

    def __init__(self, config: DistAttnConfig, model: LanguageModel | None = None) -> None:
        super().__init__(config)
        self.model: LanguageModel = build_model(config.language_model) if model is None else model
        self.post_init()

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **options: Any
    ) -> "DistAttnForCausalLM":
        """The model of a folder or of a shipped name, in evaluation mode; `dtype` and a single device may be given.

        Raises: ModelFolderError for an unusable folder, InputError for an option that would change the model.
        """
        dtype = options.pop("dtype", None) or options.pop("torch_dtype", None)
        device = options.pop("device_map", None)
        options.pop("config", None)  # read from the folder again, with its checks
        unknown = sorted(key for key, value in options.items() if key not in IGNORED and value is not None)
        if args or unknown:
            raise InputError(
                f"from_pretrained was given {', '.join(unknown) or 'positional arguments'}; a model of dist-attn takes "
                "dtype and device_map"
            )
        if isinstance(device, dict):
            device = device.get("")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        folder = resolve_model_folder(str(pretrained_model_name_or_path))
        model = load_model(folder)
        end = load_tokeniser(folder).end_token if (folder / "tokenizer.json").is_file() else None
        own = cls(DistAttnConfig.of(model.config, end_token=end), model)
        own.config.name_or_path = str(folder)
        if dtype not in (None, "auto"):
            own = own.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        if device is not None:
            own = own.to(device)
        own.eval()
        return own

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> None:
        """Write config.json, model.safetensors and manifest.json as `save_model` does; other files there stay."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f".{os.getpid()}.model"
        save_model(self.model, beside)
        for path in sorted(beside.iterdir()):
            path.replace(folder / path.name)
        beside.rmdir()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        past_key_values: StateCache | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        **unused: Any,
    ) -> Any:
        """Logits [B, L, vocabulary], the cache with the state after these tokens, and the loss where labels are given.

        Labels are the tokens themselves, -100 where none counts; the loss is that of each next token.

        Raises: ShapeError for a mask that hides tokens before the last one that counts: pad behind the text.
        """
        if attention_mask is not None and bool((attention_mask.diff(dim=-1) > 0).any()):
            raise ShapeError(
                "the attention mask hides tokens before others; a recurrent state reads every token: pad on the right, "
                "or give one text at a time"
            )
        cache = StateCache() if past_key_values is None else past_key_values
        logits_BLV, state = self.model(input_ids, None, cache.state)
        if use_cache is not False:
            cache.state = state
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(
            loss=loss, logits=logits_BLV, past_key_values=cache if use_cache is not False else None
        )

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, past_key_values: StateCache | None = None, **options: Any
    ) -> dict[str, Any]:
        """The tokens that the state has not seen."""
        use_cache = options.get("use_cache", True)
        cache = StateCache() if past_key_values is None and use_cache else past_key_values
        seen = 0 if cache is None else cache.get_seq_length()
        kept = {"attention_mask": options.get("attention_mask"), "use_cache": use_cache}
        return {"input_ids": input_ids[:, seen:], "past_key_values": cache, **kept}

    def get_input_embeddings(self) -> torch.nn.Module:
        """The table of token vectors."""
        return self.model.embedding

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the state is made by the first call

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Parameters are as the model made or loaded them."""

    def init_weights(self) -> None:
        """Nothing: see `_init_weights`."""


AutoConfig.register(MODEL_TYPE, DistAttnConfig, exist_ok=True)
AutoModelForCausalLM.register(DistAttnConfig, DistAttnForCausalLM, exist_ok=True)
AutoTokenizer.register(DistAttnConfig, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)

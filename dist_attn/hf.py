"""Our model folders in transformers: after `import dist_attn.hf`, its Auto classes load, run and generate with them.

    import dist_attn.hf
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("runs/first/model")

What transformers calls the cache is our recurrent state, which has a constant size for kernel attention. The extra
The extra `hf` installs transformers.
"""

import os
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F

from dist_attn.checkpoints import load_model, resolve_model_folder, save_model
from dist_attn.errors import InputError, MissingExtraError, ShapeError, extra_hint
from dist_attn.models import LanguageModel, LanguageModelConfig, ModelState, build_model
from dist_attn.shipped import OUR_MODEL_TYPE
from dist_attn.text import load_tokeniser

try:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        GenerationMixin,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
    )
    from transformers.modeling_outputs import CausalLMOutputWithPast
except ModuleNotFoundError as error:
    raise MissingExtraError(f"dist_attn.hf needs {error.name}: {extra_hint('hf')}") from None

__all__ = ["DistAttnConfig", "DistAttnForCausalLM", "StateCache"]

# What transformers passes on when it loads a folder, and what changes nothing for files of ours on this disk.
IGNORED = frozenset({
    "_from_auto", "adapter_kwargs", "cache_dir", "force_download", "local_files_only", "low_cpu_mem_usage", "proxies",
    "revision", "token", "trust_remote_code", "use_safetensors", "weights_only",
})  # fmt: skip

OFF = (None, False, "")  # values of an option that asks for nothing


class DistAttnConfig(PreTrainedConfig):  # type: ignore[misc]
    """The keys of our config.json as attributes; `language_model` is the same as our own frozen value."""

    model_type = OUR_MODEL_TYPE
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
    """Our recurrent state in the place of `past_key_values`; every call puts the state after it in here.

    `states` holds one state of the whole batch, or one for each row where rows of different lengths have caches of
    different sizes; it is empty before the first token.
    """

    is_compileable = False

    def __init__(self) -> None:
        self.states: list[ModelState] = []
        self.columns = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of `input_ids` so far, padding included."""
        return self.columns

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """The state of row `beam_idx[i]` in row i, as beam search wants it."""
        rows = [int(row) for row in beam_idx]
        whole = len(self.states) == 1
        self.states = [self.states[0].select(rows)] if whole else [self.states[row] for row in rows if self.states]


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
        """The model of a folder or of a shipped name, in evaluation mode.

        `dtype`, a single device and a `subfolder` may be given. Options of transformers that concern downloads are
        ignored, and so are options that are off: None, False or empty.
        Raises: ModelFolderError for an unusable folder, InputError for an option that would change the model.
        """
        dtype = options.pop("dtype", None) or options.pop("torch_dtype", None)
        device = options.pop("device_map", None)
        inner = options.pop("subfolder", None) or ""
        options.pop("config", None)  # read from the folder again, with its checks
        unknown = sorted(key for key, value in options.items() if key not in IGNORED and value not in OFF)
        if args or unknown:
            raise InputError(
                f"from_pretrained was given {', '.join(unknown) or 'positional arguments'}; a model of dist-attn takes "
                "dtype, device_map and subfolder"
            )
        if isinstance(device, dict):
            device = device.get("")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        folder = resolve_model_folder(Path(pretrained_model_name_or_path) / inner)
        model = load_model(folder)
        end = load_tokeniser(folder).end_token if (folder / "tokenizer.json").is_file() else None
        own = cls(DistAttnConfig.of(model.config, end_token=end), model)
        own.config.name_or_path = str(folder)
        if (folder / "generation_config.json").is_file():
            own.generation_config = GenerationConfig.from_pretrained(folder)
        if dtype not in (None, "auto"):
            own = own.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)
        if device is not None:
            own = own.to(device)
        own.eval()
        return own

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> None:
        """Write what `save_model` writes, and generation_config.json; other files there stay, such as a tokeniser."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f".{os.getpid()}.model"
        save_model(self.model, beside)
        for path in sorted(beside.iterdir()):
            path.replace(folder / path.name)
        beside.rmdir()
        self.generation_config.save_pretrained(folder)

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

        Labels are the tokens themselves, -100 where none counts; the loss is that of each next token. The mask
        [B, tokens before and L] is 0 where a row is padded. Padding before a text is not read: it changes no state,
        its logits are 0, and no loss is taken from it. Padding behind a text is read, after everything that counts.

        Raises: ShapeError for a mask that hides all of a row, or tokens between others.
        """
        cache = StateCache() if past_key_values is None else past_key_values
        padding_B = _padding(attention_mask, cache.columns, input_ids)
        logits_BLV = self._read(input_ids, padding_B, cache)
        cache.columns += input_ids.shape[1]
        loss = None
        if labels is not None:
            columns_L = torch.arange(input_ids.shape[1], device=labels.device)
            labels = labels.masked_fill(columns_L <= padding_B.to(labels.device)[:, None], -100)
            loss = F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return CausalLMOutputWithPast(
            loss=loss, logits=logits_BLV, past_key_values=cache if use_cache is not False else None
        )

    def _read(self, input_ids: torch.Tensor, padding_B: torch.Tensor, cache: StateCache) -> torch.Tensor:
        """Logits [B, L, vocabulary]; the states in the cache go on. Rows that differ in length are read one by one."""
        if len(cache.states) < 2 and not bool(padding_B.any()):
            logits_BLV, state = self.model(input_ids, None, cache.states[0] if cache.states else None)
            cache.states = [state]
            return logits_BLV  # type: ignore[no-any-return]
        rows = len(input_ids)
        before = cache.states if len(cache.states) == rows else [s.select(r) for s in cache.states for r in range(rows)]
        logits, cache.states = [], []
        for row, padding in enumerate(padding_B.tolist()):
            logits_1LV, state = self.model(input_ids[row : row + 1, padding:], None, before[row] if before else None)
            logits.append(F.pad(logits_1LV, (0, 0, padding, 0)))
            cache.states.append(state)
        if len({tuple(t.shape for layer in state.layers for t in layer.tensors()) for state in cache.states}) == 1:
            cache.states = [ModelState.stack(cache.states)]
        return torch.cat(logits)

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, past_key_values: StateCache | None = None, **kwargs: Any
    ) -> dict[str, Any]:
        """The tokens that the state has not seen. transformers passes on a mask only where the name `kwargs` is.

        Raises: ShapeError for texts that are padded behind: what is written would follow the padding.
        """
        mask, use_cache = kwargs.get("attention_mask"), kwargs.get("use_cache", True)
        if mask is not None and not bool(mask[:, -1].all()):
            raise ShapeError(
                "the attention mask hides the last tokens of a text, behind which generate would go on: pad before "
                "the texts, with padding_side = 'left' in the tokenizer"
            )
        cache = StateCache() if past_key_values is None and use_cache else past_key_values
        seen = 0 if cache is None else cache.get_seq_length()
        inputs = {"input_ids": input_ids[:, seen:], "attention_mask": mask}
        return inputs | {"past_key_values": cache, "use_cache": use_cache}

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


def _padding(mask: torch.Tensor | None, seen: int, input_ids: torch.Tensor) -> torch.Tensor:
    """How many columns at the beginning of each row of `input_ids` are padding, [B]; `seen` were read before.

    Raises: ShapeError for a mask of another shape, one that hides all of a row, or tokens between others.
    """
    rows, length = input_ids.shape
    if mask is None:
        return torch.zeros(rows, dtype=torch.int64, device=input_ids.device)
    if mask.shape != (rows, seen + length):
        raise ShapeError(f"the attention mask has shape {tuple(mask.shape)}; needed is {(rows, seen + length)}")
    shown = mask != 0
    if bool((shown.diff(dim=-1).sum(-1) > 1 + (~shown[:, 0]).long()).any()):
        raise ShapeError(
            "the attention mask hides tokens between others; a recurrent state reads every token: pad before or behind "
            "the texts, or give one text at a time"
        )
    hidden = (shown.cumsum(-1) == 0)[:, seen:].sum(-1)
    if bool((hidden == length).any()):
        raise ShapeError("the attention mask hides all tokens of a row; needed is at least one in each")
    return hidden


AutoConfig.register(OUR_MODEL_TYPE, DistAttnConfig, exist_ok=True)
AutoModelForCausalLM.register(DistAttnConfig, DistAttnForCausalLM, exist_ok=True)
AutoTokenizer.register(DistAttnConfig, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)

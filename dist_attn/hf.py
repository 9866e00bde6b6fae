"""Our model folders in transformers: after `import dist_attn.hf`, its Auto classes load, run and generate with them.

    import dist_attn.hf
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained("runs/first/model")

Without the import they do so with `trust_remote_code=True`, by the module that lies in a saved folder. What
transformers calls the cache is our recurrent state, which has a constant size for kernel attention. The extra `hf`
installs transformers.
"""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self, final

import torch
import torch.nn.functional as F

from dist_attn.checkpoints import load_model, load_stream_encoder, resolve_model_folder, save_model
from dist_attn.errors import InputError, MissingExtraError, ShapeError, extra_hint
from dist_attn.models import LanguageModel, LanguageModelConfig, ModelState, build_model
from dist_attn.models.blocks import recompute_layers
from dist_attn.shipped import OUR_MODEL_TYPE
from dist_attn.text import load_tokeniser

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        GenerationMixin,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerFast,
    )
    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
except ModuleNotFoundError as error:
    raise MissingExtraError(f"dist_attn.hf needs {error.name}: {extra_hint('hf')}") from None

__all__ = ["DistAttnConfig", "DistAttnForCausalLM", "DistAttnModel", "SentenceModule", "StateCache"]

# What transformers passes on when it loads a folder, and what changes nothing for files of ours on this disk.
IGNORED = frozenset({
    "_commit_hash", "_from_auto", "adapter_kwargs", "attn_implementation", "cache_dir", "code_revision",
    "force_download", "local_files_only", "low_cpu_mem_usage", "max_memory", "offload_folder", "offload_state_dict",
    "proxies", "resume_download", "revision", "token", "trust_remote_code", "use_auth_token", "use_safetensors",
    "weights_only",
})  # fmt: skip

OFF = (None, False, "")  # values of an option that asks for nothing

# The cache among the outputs; transformers 5.24 renamed it. As an argument both names are taken.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__annotations__ else "past_key_values"


class DistAttnConfig(PreTrainedConfig):  # type: ignore[misc]
    """The keys of our config.json as attributes; `language_model` is the same as our own frozen value."""

    model_type = OUR_MODEL_TYPE
    attribute_map = {"num_hidden_layers": "num_layers", "intermediate_size": "mlp_size"}  # noqa: RUF012

    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None

    @property
    def language_model(self) -> LanguageModelConfig:
        """Our form; pydantic's ValidationError where the attributes are not a language model."""
        values = {key: getattr(self, key) for key in LanguageModelConfig.model_fields if hasattr(self, key)}
        return LanguageModelConfig.model_validate(values)

    @property
    def max_position_embeddings(self) -> int:
        """The number of tokens that the model can read; AttributeError where it reads any number."""
        if not isinstance(self.positions, dict) or self.positions.get("beyond") == "repeat":
            raise AttributeError("max_position_embeddings: this model reads any number of tokens")
        return int(self.positions["length"])

    @property
    def token_ids(self) -> dict[str, int]:
        """The ids of special tokens that there are."""
        ids = {name: getattr(self, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        return {name: token for name, token in ids.items() if token is not None}

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: what is saved names its classes already, and transformers would copy this file into it."""


@final
class StateCache:
    """Our recurrent state in the place of transformers' cache; every call puts the state after it in here.

    `states` holds one state of the whole batch, or one for each row where rows of different lengths have caches of
    different sizes; it is empty before the first token.
    """

    is_compileable = is_croppable = False
    is_linear = (True,)  # "linear" is transformers' word for a layer with a recurrent state

    def __init__(self) -> None:
        self.states: list[ModelState] = []
        self.columns = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns of `input_ids` so far, padding included."""
        return self.columns

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """The state of row `beam_idx[i]` in row i, as beam search wants it."""
        self._take([int(row) for row in beam_idx])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Only these rows."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row so many times, one after the other: several texts go on from one prompt."""
        rows = range(sum(state.batch for state in self.states))
        self._take([row for row in rows for _ in range(repeats)])

    def crop(self, tokens_to_remove: int) -> None:
        """Raises: InputError, as a recurrent state cannot forget its last tokens."""
        raise InputError(
            "a recurrent state cannot be cropped; needed is the state before these tokens: copy.deepcopy of the cache "
            "keeps it"
        )

    def _take(self, rows: list[int]) -> None:
        whole = len(self.states) == 1
        self.states = [self.states[0].select(rows)] if whole else [self.states[row] for row in rows if self.states]


class DistAttnModel(PreTrainedModel):  # type: ignore[misc]
    """A language model of ours with the interface of transformers, up to its hidden states; `model` is ours."""

    config_class = DistAttnConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _is_stateful = True

    def __init__(self, config: DistAttnConfig, model: LanguageModel | None = None) -> None:
        super().__init__(config)
        self.model: LanguageModel = build_model(config.language_model) if model is None else model
        self.post_init()

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike[str], *args: Any, **options: Any) -> Self:
        """The model of a folder or of a shipped name, in evaluation mode.

        `dtype`, a single device, a `subfolder` and a `config` of the same model may be given. Ignored are options of
        transformers that concern downloads, `attn_implementation`, as attention is computed by our own operations,
        and options that are off: None, False or empty.
        Raises: ModelFolderError for an unusable folder, InputError for an option that would change the model.
        """
        dtype = _dtype_of(options.pop("dtype", None) or options.pop("torch_dtype", None))
        device = options.pop("device_map", None)
        inner = options.pop("subfolder", None) or ""
        config = options.pop("config", None)
        unknown = sorted(key for key, value in options.items() if key not in IGNORED and value not in OFF)
        if args or unknown:
            raise InputError(
                f"from_pretrained was given {', '.join(unknown) or 'positional arguments'}; a model of dist-attn takes "
                "dtype, device_map, subfolder and config"
            )
        if isinstance(device, dict):
            device = device.get("")
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        folder = resolve_model_folder(Path(pretrained_model_name_or_path) / inner)
        model = load_model(folder)
        own = cls(_config_of(config, model, folder), model)
        if own.can_generate() and (folder / "generation_config.json").is_file():
            own.generation_config = GenerationConfig.from_pretrained(folder)
            own.generation_config.stop_strings = None  # they end chats; `generate` would ask for the tokeniser
        if dtype is not None:
            own = own.to(dtype)
        if device is not None:
            own = own.to(device)
        own.eval()
        return own

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        *,
        is_main_process: bool = True,
        state_dict: Mapping[str, torch.Tensor] | None = None,
        push_to_hub: bool = False,
        **options: Any,
    ) -> None:
        """Write what `save_model` writes, and generation_config.json; other files there stay, such as a tokeniser.

        `state_dict` stands for the model's own weights, where those are sharded. Other options are ignored: weights are
        one file of safetensors. Raises: InputError for `push_to_hub`.
        """
        if push_to_hub:
            raise InputError("save_pretrained was given push_to_hub; a folder is saved here, upload it yourself")
        if not is_main_process:
            return
        weights = None if state_dict is None else {k.removeprefix("model."): t for k, t in state_dict.items()}
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        beside = folder / f".{os.getpid()}.model"
        save_model(self.model, beside, weights=weights, token_ids=self.config.token_ids)
        for path in sorted(beside.iterdir()):
            path.replace(folder / path.name)
        beside.rmdir()
        if self.can_generate():
            self.generation_config.save_pretrained(folder)

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        cache: StateCache | None = None,
        past_key_values: StateCache | None = None,
        position_ids: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        return_dict: bool | None = None,
    ) -> Any:
        """Hidden states after the final norm [B, L, D], and the cache with the state after these tokens.

        The mask [B, tokens before and L] is 0 where a row is padded. Padding before a text is not read: it changes no
        state, and its hidden states are 0. Padding behind a text is read, after everything that counts. No
        `token_type_ids` are looked at, as a text has one segment.

        Raises: ShapeError for a mask that hides all of a row, or tokens between others; InputError for what a model of
            ours does not have: vectors in the place of tokens, other positions, another cache, other outputs.
        """
        if input_ids is None or inputs_embeds is not None:
            raise InputError("a model of dist-attn reads tokens: give input_ids, and no inputs_embeds")
        if output_hidden_states or output_attentions:
            raise InputError(
                "output_hidden_states and output_attentions are not offered by a model of dist-attn; AutoModel gives "
                "its last_hidden_state"
            )
        cache = _cache_of(cache, past_key_values)
        padding_B = _padding(attention_mask, cache.columns, input_ids)
        if position_ids is not None:
            _check_positions(position_ids, padding_B, cache.states, input_ids)
        h_BLD = self._read(input_ids, padding_B, cache)
        cache.columns += input_ids.shape[1]
        return self._output(BaseModelOutputWithPast, return_dict, use_cache, cache, last_hidden_state=h_BLD)

    def _output(
        self, kind: type, return_dict: bool | None, use_cache: bool | None, cache: StateCache, **values: Any
    ) -> Any:
        out = kind(**values, **{CACHE: cache if use_cache is not False else None})
        return out if return_dict or (return_dict is None and self.config.return_dict) else out.to_tuple()

    def _read(self, input_ids: torch.Tensor, padding_B: torch.Tensor, cache: StateCache) -> torch.Tensor:
        """Hidden states [B, L, D]; the states in the cache go on. Rows that differ in length are read one by one."""
        if len(cache.states) < 2 and not bool(padding_B.any()):
            h_BLD, state = self.model.hidden(input_ids, None, cache.states[0] if cache.states else None)
            cache.states = [state]
            return h_BLD
        rows = len(input_ids)
        before = cache.states if len(cache.states) == rows else [s.select(r) for s in cache.states for r in range(rows)]
        hidden, cache.states = [], []
        for row, padding in enumerate(padding_B.tolist()):
            h_1LD, state = self.model.hidden(input_ids[row : row + 1, padding:], None, before[row] if before else None)
            hidden.append(F.pad(h_1LD, (0, 0, padding, 0)))
            cache.states.append(state)
        if len({state.shapes() for state in cache.states}) == 1:
            cache.states = [ModelState.stack(cache.states)]
        return torch.cat(hidden)

    def get_input_embeddings(self) -> torch.nn.Module:
        """The table of token vectors."""
        return self.model.embedding

    def _set_gradient_checkpointing(self, enable: bool = True, **options: Any) -> None:
        """Our own recomputation of every layer, whose gradients are bitwise those without; it takes no options."""
        recompute_layers(self.model, enable)
        self.gradient_checkpointing = enable

    def _init_weights(self, module: torch.nn.Module) -> None:
        """Parameters are as the model made or loaded them."""

    def init_weights(self) -> None:
        """Nothing: see `_init_weights`."""


class DistAttnForCausalLM(DistAttnModel, GenerationMixin):  # type: ignore[misc]
    """`DistAttnModel` with the logits of the next token, a loss, and transformers' `generate`."""

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        *,
        labels: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        cache: StateCache | None = None,
        past_key_values: StateCache | None = None,
        position_ids: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> Any:
        """Logits [B, L, vocabulary], the cache with the state after these tokens, and the loss where labels are given.

        Labels are the tokens themselves, -100 where none counts; the loss is that of each next token, and none is taken
        from padding before a text, whose logits are 0. `logits_to_keep`: only those of the last so many columns, or
        of these columns; 0 keeps all. The rest is as in `DistAttnModel`.

        Raises: as `DistAttnModel`, and InputError for labels with `logits_to_keep`.
        """
        cache = _cache_of(cache, past_key_values)
        seen = cache.columns
        inner = super().forward(
            input_ids, attention_mask, cache=cache, position_ids=position_ids,
            inputs_embeds=inputs_embeds, output_hidden_states=output_hidden_states,
            output_attentions=output_attentions, return_dict=True,
        )  # fmt: skip
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits_BLV = self.model.readout(inner.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            if logits_BLV.shape[1] != labels.shape[1]:
                raise InputError("labels need the logits of all tokens; leave logits_to_keep at 0")
            columns_L = torch.arange(labels.shape[1], device=labels.device)
            padding_B = _padding(attention_mask, seen, labels).to(labels.device)
            labels = labels.masked_fill(columns_L <= padding_B[:, None], -100)
            loss = F.cross_entropy(logits_BLV[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return self._output(CausalLMOutputWithPast, return_dict, use_cache, cache, loss=loss, logits=logits_BLV)

    def prepare_inputs_for_generation(
        self,
        input_ids: torch.Tensor,
        cache: StateCache | None = None,
        past_key_values: StateCache | None = None,
        **kwargs: Any,
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
        cache = _cache_of(cache, past_key_values)
        passed_on = ("inputs_embeds", "logits_to_keep", "output_attentions", "output_hidden_states")
        inputs = {name: kwargs[name] for name in passed_on if name in kwargs}
        inputs |= {"input_ids": input_ids[:, cache.columns :], "attention_mask": mask}
        return inputs | {"cache": cache, "use_cache": use_cache}

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the state is made by the first call


def _cache_of(cache: object, past_key_values: object) -> StateCache:
    """The cache that is given by either name, else an empty one. Raises: InputError for one of transformers'."""
    given = past_key_values if cache is None else cache
    if past_key_values is not None and past_key_values is not given:
        raise InputError("cache and past_key_values are two names of one: give either")
    if given is not None and not isinstance(given, StateCache):
        raise InputError(f"the cache is a {type(given).__name__}; needed is dist_attn.hf.StateCache, or none")
    return StateCache() if given is None else given


def _config_of(given: DistAttnConfig | None, model: LanguageModel, folder: Path) -> DistAttnConfig:
    """The configuration of a folder's model, with the given one's attributes for transformers.

    Raises: InputError where the given one is of another model.
    """
    if given is not None and given.language_model != model.config:
        raise InputError(
            f"the configuration that was given is of another model than that in {folder}; needed is its own config.json"
        )
    ids = load_tokeniser(folder).token_ids if (folder / "tokenizer.json").is_file() else {}
    values = {} if given is None else given.to_dict()
    own = DistAttnConfig(**values | model.config.model_dump(mode="json"))
    for name, token in ids.items():
        if getattr(own, name) is None:
            setattr(own, name, token)
    own.name_or_path = str(folder)
    return own


def _dtype_of(dtype: Any) -> torch.dtype | None:
    """The precision that is asked for, None for the folder's own. Raises: InputError for one that there is not."""
    if dtype in (None, "auto"):
        return None
    found = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InputError(f"from_pretrained was given dtype {dtype!r}; needed is one such as float32 or bfloat16")
    return found


def _check_positions(
    given: torch.Tensor, padding_B: torch.Tensor, states: list[ModelState], input_ids: torch.Tensor
) -> None:
    """Raises: InputError for positions of tokens that are not those behind the tokens before them."""
    rows, length = input_ids.shape
    before = [state.position_B.to(given.device) for state in states]
    first_B = torch.cat(before) if before else given.new_zeros(rows)
    padding_B = padding_B.to(given.device)
    wanted_BL = (first_B - padding_B)[:, None] + torch.arange(length, device=given.device)
    text_BL = torch.arange(length, device=given.device) >= padding_B[:, None]
    if not bool(((given == wanted_BL) | ~text_BL).all()):
        raise InputError(
            "position_ids are not those of one text for each row, token after token; needed are these, or none: give "
            "texts that were packed into one row as rows of their own"
        )


def _padding(mask: torch.Tensor | None, seen: int, input_ids: torch.Tensor) -> torch.Tensor:
    """Count the columns of padding that begin each row of `input_ids`, [B]; `seen` columns were read before.

    Raises: ShapeError for a mask of another shape, one that hides all of a row, or tokens between others.
    """
    rows, length = input_ids.shape
    if mask is None:
        return torch.zeros(rows, dtype=torch.int64, device="cpu")
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


@final
class SentenceModule(torch.nn.Module):
    """The vectors of /v1/embeddings in sentence-transformers, which a stream encoder's `modules.json` has load this."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.encoder = load_stream_encoder(folder)
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    @classmethod
    def load(cls, input_path: str) -> Self:
        """The module of a folder."""
        return cls(Path(input_path))

    def tokenize(self, texts: list[str]) -> dict[str, torch.Tensor]:
        """The tokens of each text [B, L], behind them zeros, and how many they are [B]."""
        read = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        rows = [torch.tensor(row, dtype=torch.int64, device="cpu") for row in read]
        lengths_B = torch.tensor([len(row) for row in rows], device="cpu")
        return {"input_ids": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), "lengths": lengths_B}

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Add the vectors [B, D], those of short texts read together; a text without tokens has zeros."""
        width, unit = self.encoder.hidden_size, self.encoder.config.sentence.normalise
        vectors_BD = features["input_ids"].new_zeros((len(features["lengths"]), width), dtype=torch.float32)
        texts = [row[:length] for row, length in zip(features["input_ids"], features["lengths"].tolist(), strict=True)]
        short = [row for row, text in enumerate(texts) if 0 < len(text) < self.encoder.grain]
        hidden: dict[int, torch.Tensor] = {}
        if len(short) > 1:
            with contextlib.suppress(InputError):  # of a mixer that takes no packed documents
                hidden = dict(zip(short, self.encoder.short_hidden([texts[row] for row in short]), strict=True))
        for row, text in enumerate(texts):
            if len(text):
                h_1LD = hidden[row] if row in hidden else self.encoder.hidden(text[None])[0]
                vectors_BD[row] = h_1LD[0].mean(0)
        return {**features, "sentence_embedding": F.normalize(vectors_BD, dim=1) if unit else vectors_BD}

    def get_embedding_dimension(self) -> int:
        """The numbers in a vector."""
        return self.encoder.hidden_size


AutoConfig.register(OUR_MODEL_TYPE, DistAttnConfig, exist_ok=True)
AutoModel.register(DistAttnConfig, DistAttnModel, exist_ok=True)
AutoModelForCausalLM.register(DistAttnConfig, DistAttnForCausalLM, exist_ok=True)
AutoTokenizer.register(DistAttnConfig, fast_tokenizer_class=PreTrainedTokenizerFast, exist_ok=True)

"""The settings of one API process: its own parts of the settings tree, side by side."""

import re
from pathlib import Path
from typing import Any, Self

from pydantic import Field

from dist_attn.errors import ConfigError
from dist_attn.log_lines import LogFormat
from dist_attn.settings import (
    DataFolder,
    EncoderSettings,
    FileSettings,
    HttpSettings,
    JobSettings,
    LimitSettings,
    PrefixSettings,
    StoreSettings,
    TracingSettings,
    WaitSettings,
    WorkSettings,
)
from dist_attn.settings import Settings as SettingsTree
from dist_attn.store import StoreLimits
from dist_attn.wire.choices import LogLevel

__all__ = ["Settings"]


class Settings(HttpSettings, LimitSettings, WorkSettings, WaitSettings):
    """The frozen configuration of one API process.

    Units: `*_bytes` in bytes, `*_seconds` in seconds.
    """

    api_address: str = Field(description="ZeroMQ addresses of controllers, ipc:// or tcp://, between commas")
    keys_dir: str = Field(default="", description="folder with the keys for a tcp:// address of the controller")
    insecure_network: bool = Field(default=False, description="connect over a network without keys")
    model: Path = Field(description="model folder; its weights are not read")
    encoder: EncoderSettings = Field(default=EncoderSettings(), description="a second model and its controller")
    data_dir: Path = Field(default=Path("data"), description="spools and states live here")
    log_level: LogLevel = "info"
    log_format: LogFormat = "auto"
    store: StoreSettings = Field(default=StoreSettings(), description="where states of sessions are kept")
    tracing: TracingSettings = Field(default=TracingSettings(), description="where spans of OpenTelemetry are sent")
    prefixes: PrefixSettings = Field(default=PrefixSettings(), description="states of the beginnings of prompts")
    jobs: JobSettings = Field(default=JobSettings(), description="work that outlives its connection")
    files: FileSettings = Field(default=FileSettings(), description="where files that clients upload are kept")

    @classmethod
    def of(cls, tree: SettingsTree) -> Self:
        """The API's part of the whole tree.

        Raises: ConfigError when the tree does not name a model, or not the address of a model's controller.
        """
        needed = [("model", tree.model, "model"), ("engine.api_address", tree.engine.api_address, "api-address")]
        if tree.encoder.model:
            needed.append(("encoder.api_address", tree.encoder.api_address, "encoder-address"))
        for key, value, flag in needed:
            if not value:
                raise ConfigError(f"{key} is not set; give --{flag}, or set it in the configuration or the environment")
        values: dict[str, Any] = {**dict(tree), "model": Path(tree.model or "")}
        for name in ("http", "limits", "work", "waits"):
            values |= dict(values.pop(name))
        engine = values.pop("engine")
        values |= {name: getattr(engine, name) for name in ("api_address", "keys_dir", "insecure_network")}
        return cls(**values)

    def of_models(self) -> "tuple[Settings, ...]":
        """The settings of each model, with its own folder, names and controller; those of the encoder come last."""
        encoder = self.encoder
        if not encoder.model:
            return (self,)
        own = {"model": Path(encoder.model), "served_model_name": encoder.served_model_name}
        return (self, self.model_copy(update={**own, "api_address": encoder.api_address}))

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses of the controllers of the model, one for each of its engines."""
        words = re.split(r",\s*(?=\w+://)", self.api_address.strip(" ,"))  # other commas are of a socket's path
        return tuple(dict.fromkeys(word.strip(" ,") for word in words))

    @property
    def store_address(self) -> str:
        """The address of the store that keeps the states of sessions."""
        return self.store.address or str(self.data_dir / DataFolder.STATES)

    @property
    def store_limits(self) -> StoreLimits:
        """The bounds on what the store keeps."""
        limits = self.store.model_dump(exclude={"address", "blobs", "upkeep_s"})
        return StoreLimits(**limits, grace_s=self.expired_seconds)

    @property
    def files_folder(self) -> Path:
        """The folder that holds the bytes of files."""
        return Path(self.files.folder) if self.files.folder else self.data_dir / DataFolder.FILES

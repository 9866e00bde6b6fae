"""Every value an operator may set: the tree of them all, how it is read, and parts of it as flags."""

from dist_attn.settings.data_folder import DataFolder
from dist_attn.settings.reading import KEY, FlagSettings, Resolved, read_keys, read_settings
from dist_attn.settings.tree import (
    EncoderSettings,
    EngineSettings,
    FileSettings,
    HttpSettings,
    JobSettings,
    LimitSettings,
    PrefixSettings,
    RankTerms,
    Settings,
    StoreSettings,
    TracingSettings,
    WaitSettings,
    WorkSettings,
    settings_keys,
    settings_words,
    user_data_folder,
)

__all__ = [
    "DataFolder",
    "EncoderSettings",
    "EngineSettings",
    "FileSettings",
    "FlagSettings",
    "KEY",
    "HttpSettings",
    "JobSettings",
    "LimitSettings",
    "PrefixSettings",
    "RankTerms",
    "Resolved",
    "Settings",
    "StoreSettings",
    "TracingSettings",
    "WaitSettings",
    "WorkSettings",
    "read_keys",
    "read_settings",
    "settings_keys",
    "settings_words",
    "user_data_folder",
]

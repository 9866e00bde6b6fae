"""The configurations of models and mixers: frozen values that config.json holds, with their costs; no torch."""

# Every built-in mixer is registered before anything of this package can be used.
from dist_attn.model_config import mixers as _built_in_mixers  # noqa: F401

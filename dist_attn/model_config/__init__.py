"""What models and mixers are made of: frozen values that config.json holds, with their costs; never loads torch."""

# Before anything of this package can be used, every built-in mixer is registered.
from dist_attn.model_config import mixers as _built_in_mixers  # noqa: F401

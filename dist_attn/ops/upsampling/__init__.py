"""Up-sampling of kept tokens to every position: the oracle by definition and the fast form."""

from dist_attn.ops.upsampling.interpolate import Interpolation, upsample
from dist_attn.ops.upsampling.naive import upsample_naive

__all__ = ["Interpolation", "upsample", "upsample_naive"]

"""Model folders of other programs made into ours: one file per architecture, and the reading that they share."""

from dist_attn.conversion.convert import Conversion, convert_folder

__all__ = ["Conversion", "convert_folder"]

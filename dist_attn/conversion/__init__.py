"""Model folders of other programs made into ours: one file per architecture, and the reading that they share."""

from dist_attn.conversion.convert import Conversion, convert_folder
from dist_attn.conversion.stream_encoder import begin_stream_encoder, convert_sentence_encoder

__all__ = ["Conversion", "begin_stream_encoder", "convert_folder", "convert_sentence_encoder"]

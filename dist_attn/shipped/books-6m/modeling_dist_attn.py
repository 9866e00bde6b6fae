"""The classes that transformers loads with trust_remote_code=True; dist-attn is needed."""

from dist_attn.hf import DistAttnConfig, DistAttnForCausalLM, DistAttnModel

__all__ = ["DistAttnConfig", "DistAttnForCausalLM", "DistAttnModel"]

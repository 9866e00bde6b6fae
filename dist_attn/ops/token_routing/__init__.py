"""Routing of tokens to experts: the oracle by definition and the fast form."""

from dist_attn.ops.token_routing.naive import route_tokens_naive
from dist_attn.ops.token_routing.route import Routes, check_routing, route_tokens, slots_of_experts

__all__ = ["Routes", "check_routing", "route_tokens", "route_tokens_naive", "slots_of_experts"]

"""Operations of the papers along the sequence; each takes `ops`, over which it runs, and has its form over ranks."""

from dist_attn_papers.ops.token_routing import RoutedTokens, route_tokens
from dist_attn_papers.ops.token_selection import Interpolation, SelectedTokens, select_tokens

__all__ = ["Interpolation", "RoutedTokens", "SelectedTokens", "route_tokens", "select_tokens"]

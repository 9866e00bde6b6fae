"""What token ids must be before a model takes them."""

import torch

from dist_attn.errors import ShapeError, TokenError


def check_tokens(tokens: torch.Tensor, dims: tuple[str, ...], vocab_size: int) -> None:
    """Raises: ShapeError for anything but whole numbers of these dimensions; TokenError for ids that there are not."""
    if tokens.dim() != len(dims) or tokens.dtype not in (torch.int64, torch.int32):
        raise ShapeError(
            f"tokens of shape {tuple(tokens.shape)} and {tokens.dtype} were given; needed are token ids "
            f"[{', '.join(dims)}] of torch.int64 (or int32)"
        )
    if torch.compiler.is_compiling():
        return  # a graph cannot look at its inputs' values; the embedding still refuses ids that it does not have
    if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        raise TokenError(
            f"token ids from {int(tokens.min())} to {int(tokens.max())} were given; this model knows 0 to "
            f"{vocab_size - 1}"
        )

"""The way from token ids to hidden states and one vector: checks, positions, blocks over any mixer, pooling.

Letters: B batch, T tokens of all ranks, L of these on this rank, D model width, N packed documents.
"""

import math
from typing import Literal, cast

import torch
from torch import nn

from dist_attn.errors import InputError, ShapeError, TokenError
from dist_attn.model_config.encoders import EncoderConfig
from dist_attn.model_config.language_model import LearnedPositions, TokenPositions, mixers_of_layers
from dist_attn.models.blocks import Block, build_norm, watched
from dist_attn.models.dropout import Dropout
from dist_attn.ops import SequenceOps
from dist_attn.ops.device import send
from dist_attn.ops.documents import DocumentPlaces


def check_tokens(tokens: torch.Tensor, dims: tuple[str, ...], vocab_size: int, device: torch.device) -> torch.Tensor:
    """The tokens on `device`, where the model is.

    Ids are looked at where they come from, on the CPU: elsewhere the host would wait in every pass for the device to
    tell them, and the kernel of the embedding refuses those that it does not have.

    Raises: ShapeError for anything but whole numbers of these dimensions; TokenError for ids that there are not.
    """
    if tokens.dim() != len(dims) or tokens.dtype not in (torch.int64, torch.int32):
        raise ShapeError(
            f"tokens of shape {tuple(tokens.shape)} and {tokens.dtype} were given; needed are token ids "
            f"[{', '.join(dims)}] of torch.int64 (or int32)"
        )
    # A graph cannot look at its inputs' values either.
    looked_at = tokens.device.type == "cpu" and not torch.compiler.is_compiling()
    if looked_at and tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        raise TokenError(
            f"token ids from {int(tokens.min())} to {int(tokens.max())} were given; this model knows 0 to "
            f"{vocab_size - 1}"
        )
    return send(tokens, device)


def position_layers(kind: TokenPositions, size: int) -> tuple[nn.Embedding | None, nn.Linear | None]:
    """The table of learned positions, and the map from a token beside its sinusoids to one vector, where needed."""
    return (
        nn.Embedding(kind.length, size) if isinstance(kind, LearnedPositions) else None,
        nn.Linear(2 * size, size) if kind == "concatenated" else None,
    )


def with_positions(
    x: torch.Tensor,
    positions: torch.Tensor,
    end_B: torch.Tensor,
    kind: TokenPositions,
    layers: tuple[nn.Embedding | None, nn.Linear | None],
) -> torch.Tensor:
    """Tokens [..., D] at their positions; `end_B` is where all ranks' tokens end, `layers` are `position_layers`.

    Raises: InputError for more tokens than there are learned positions, unless they repeat; on every rank or on none.
        On a device other than the CPU, which does not tell the host its numbers without a wait, the table's kernel
        refuses them.
    Reference: Introduction to Transformers, Sec. 4 (added, and concatenated before a linear map).
    """
    if kind == "none":
        return x
    embedding, position_map = layers
    if not isinstance(kind, LearnedPositions):
        waves = sinusoidal(positions, x.shape[-1]).to(x.dtype)
        if position_map is None:
            return x + waves
        return cast(torch.Tensor, position_map(torch.cat([x, waves.expand_as(x)], dim=-1)))
    if kind.beyond == "refuse" and end_B.device.type == "cpu" and not torch.compiler.is_compiling():
        # Every rank compares the same end, so that all of them refuse or none.
        _check_reach(kind, int(end_B.max()))
    table = cast(nn.Embedding, embedding)
    return x + cast(torch.Tensor, table(positions % kind.length if kind.beyond == "repeat" else positions))


def _check_reach(kind: LearnedPositions, tokens: int) -> None:
    if kind.beyond == "refuse" and tokens > kind.length:
        raise InputError(
            f"the sequence reaches {tokens} tokens; this model has learned positions for {kind.length}: give a shorter "
            "one, or train with more, or with positions that go on"
        )


def sinusoidal(positions_L: torch.Tensor, size: int) -> torch.Tensor:
    """Fixed sinusoids, interleaved sin and cos, wave lengths from 2 pi to 10,000 * 2 pi.

    Shapes: positions [...] (integers) -> [..., size] float32, computed in float64 so that position 1,000,000 keeps
        its digits.
    Reference: Vaswani et al. 2017, Sec. 3.5.
    """
    half = (size + 1) // 2
    numbers = torch.arange(half, dtype=torch.float64, device=positions_L.device)
    rates = torch.exp(numbers * (-2.0 * math.log(10_000.0) / size))
    angles = positions_L.to(torch.float64)[..., None] * rates
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., :size].float()


class Pooling(nn.Module):
    """The vector of a whole sequence, equal on all ranks.

    Reference: Introduction to Transformers, Sec. 4 (class token, pooling; a mean in place of the printed sum).
    """

    def __init__(self, kind: Literal["mean", "class_token"], hidden_size: int, *, causal: bool) -> None:
        super().__init__()
        self.kind, self.causal = kind, causal
        self.class_token_D = nn.Parameter(0.02 * torch.randn(hidden_size)) if kind == "class_token" else None

    @property
    def room(self) -> int:
        """Places that `make_room` adds to a sequence."""
        return 0 if self.class_token_D is None else 1

    def make_room(self, x_BT: torch.Tensor) -> torch.Tensor:
        """A whole sequence, [B, T] or [B, T, N], with zeros in the place of the class token, if there is one."""
        if self.class_token_D is None:
            return x_BT
        place = x_BT.new_zeros((x_BT.shape[0], 1, *x_BT.shape[2:]))
        return torch.cat([x_BT, place] if self.causal else [place, x_BT], dim=1)

    def fill(self, x_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        """The embedded slice of a sequence with room, with the class token in its place, wherever that lies."""
        if self.class_token_D is None:
            return x_BLD
        places = ops.document_places(x_BLD.shape[1])
        return torch.where(self._place(places, x_BLD)[:, None], self.class_token_D.to(x_BLD.dtype), x_BLD)

    def forward(self, h_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        """[B, L, D] of this process's slice -> [B, D] of the whole sequence.

        Cost: across ranks one all-reduce of B D elements.
        Raises: InputError for a sequence without tokens, or of several documents, on every rank.
        """
        vectors_BND = self.of_documents(h_BLD, ops)
        if vectors_BND.shape[1] != 1:
            raise InputError(
                f"{vectors_BND.shape[1]} packed documents were given to be one vector; there is one for each of them"
            )
        return vectors_BND[:, 0]

    def of_documents(self, h_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        """[B, L, D] of this process's slice -> [B, N, D], a vector of each document packed into the sequence.

        Cost: across ranks one all-reduce of B N D elements.
        Raises: InputError for a document without tokens, on every rank.
        """
        places = ops.document_places(h_BLD.shape[1])
        if min(places.lengths_N, default=0) <= self.room:
            raise InputError("the sequence has no tokens; give at least one")
        if self.class_token_D is not None:
            # Masked, not picked: ranks without the place take part in the exchange, forward and backward.
            return ops.sum_over_documents(h_BLD * self._place(places, h_BLD)[:, None])
        lengths_N = send(torch.tensor(places.lengths_N, dtype=h_BLD.dtype, device="cpu"), h_BLD.device)
        return ops.sum_over_documents(h_BLD) / lengths_N[:, None]

    def _place(self, places: DocumentPlaces, x_BLD: torch.Tensor) -> torch.Tensor:
        """Mark the class tokens among the L tokens here, bool [L]."""
        lengths_N = torch.tensor(places.lengths_N, device="cpu")
        wanted_L = lengths_N[places.number_L] - 1 if self.causal else torch.zeros_like(places.position_L)
        return send(places.position_L == wanted_L, x_BLD.device)


class Encoder(nn.Module):
    """Hidden states of a whole sequence.

    Concatenated positions are a linear map of [x; sinusoids], which is the general form of adding them.

    Reference: Introduction to Transformers, Sec. 3 and 4 (position encodings).
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.position_embedding, self.position_map = position_layers(_positions(config), size)
        self.blocks = nn.ModuleList(
            Block(mixer, config.mlp_size, config.block) for mixer in mixers_of_layers(config.mixer, config.num_layers)
        )
        self.embedding_norm = build_norm(config.block.norm, size) if config.embedding_norm else None
        self.dropout = Dropout()
        # Blocks that end with a norm leave nothing for a final one to do.
        self.norm = build_norm(config.block.norm, size) if config.block.norm_placement == "pre" else None

    def forward(self, x_BLD: torch.Tensor, ops: SequenceOps) -> torch.Tensor:
        """Hidden states after the last norm, [B, L, D] -> [B, L, D], of this process's slice.

        Documents packed into the sequence are each as if alone: positions begin anew in every one.

        Raises: InputError for a sequence longer than there are learned positions, on every rank.
        """
        if self.config.positions != "none":
            places = ops.document_places(x_BLD.shape[1])
            positions_L = send(places.position_L, x_BLD.device)
            longest = max(places.lengths_N, default=0)
            kind = _positions(self.config)
            if isinstance(kind, LearnedPositions):
                _check_reach(kind, longest)  # also while it is compiled, which no tensor's value can be read in
            layers = (self.position_embedding, self.position_map)
            end_1 = torch.tensor([longest], device="cpu")
            x_BLD = with_positions(x_BLD, positions_L, end_1, kind, layers)
        if self.embedding_norm is not None:
            x_BLD = self.embedding_norm(x_BLD)
        x_BLD = self.dropout(x_BLD, ops)
        for block in watched(self.blocks):
            x_BLD, _ = block(x_BLD, ops)
        return x_BLD if self.norm is None else cast(torch.Tensor, self.norm(x_BLD))


def _positions(config: EncoderConfig) -> TokenPositions:
    if config.positions == "learned":
        return LearnedPositions(length=config.max_length or 1)
    return config.positions


def initialise(model: nn.Module, num_layers: int) -> None:
    """Normal weights of deviation 0.02, those that write to the residual stream smaller by sqrt(2 layers)."""
    deep = 0.02 / math.sqrt(2 * num_layers)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2 and name.endswith("weight"):
            nn.init.normal_(parameter, std=deep if name.endswith(("out.weight", "mlp_out.weight")) else 0.02)
        elif name.endswith(("_in.bias", "_out.bias", "head.bias", "map.bias", "projection.bias")):
            nn.init.zeros_(parameter)

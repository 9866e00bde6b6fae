"""The million-scale sparse model: few tokens are kept, experts attend in full to theirs, and all mix globally."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, cast

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.errors import ConfigError, InputError
from dist_attn.models.blocks import Recomputable
from dist_attn.models.dropout import Dropout
from dist_attn.models.encoder import check_tokens, initialise, sinusoidal
from dist_attn.models.model import Model, SequenceModel
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn_papers.million.config import MillionConfig
from dist_attn_papers.million.experts import ExpertLayer, Selector
from dist_attn_papers.ops import Interpolation, SelectedTokens, fourier_mix, select_tokens

POSITION_SCALE = 0.02  # that of embeddings at first


@dataclass(frozen=True)
class SlotTally:
    """The counts of a sequence: its kept tokens of all, and assignments to experts that found no room, of all."""

    kept: int
    tokens: int
    dropped: int
    assigned: int


@dataclass(frozen=True)
class MillionReading:
    """One sequence, read: the kept tokens here with their weights, and what is equal on all ranks.

    `open_share` is the mean over all tokens of how open their gates are, `balance` the mean over the layers.
    """

    z_ND: torch.Tensor
    weight_N: torch.Tensor
    selected: SelectedTokens
    open_share: torch.Tensor
    balance: torch.Tensor
    tally: SlotTally


class GlobalMixing(Recomputable):
    """x + Fourier(weight * norm(x)), x + MLP(norm(x)): an FNet block with norms before, over the kept tokens.

    The grid is that of kept tokens, not of positions.
    Reference: A Unified View of Long-Sequence Models, Fig. 4 and Sec. 6.2.
    """

    def __init__(self, size: int, mlp_size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.mlp_norm = nn.LayerNorm(size)
        self.mlp_in = nn.Linear(size, mlp_size)
        self.mlp_out = nn.Linear(mlp_size, size)
        self.dropout, self.mlp_dropout = Dropout(), Dropout()

    def forward(self, x_ND: torch.Tensor, weight_N: torch.Tensor, ops: SequenceOps, draw: int = 0) -> torch.Tensor:
        """[N local, D] -> [N local, D]; `draw` numbers the sequence for dropout."""
        return self._run(self._forward, x_ND, weight_N, ops, draw)

    def _forward(self, x_ND: torch.Tensor, weight_N: torch.Tensor, ops: SequenceOps, draw: int) -> torch.Tensor:
        weighed_ND = weight_N[:, None].to(x_ND.dtype) * self.norm(x_ND)
        mixed_1ND = fourier_mix(weighed_ND[None], norm="ortho", ops=ops).to(x_ND.dtype)
        x_ND = x_ND + self.dropout(mixed_1ND, ops, draw)[0]
        inner = F.gelu(self.mlp_in(self.mlp_norm(x_ND)), approximate="tanh")
        mixed_ND: torch.Tensor = x_ND + self.mlp_dropout(self.mlp_out(inner)[None], ops, draw)[0]
        return mixed_ND


class MillionModel(SequenceModel):
    """Encoder and classifier of sequences of which few tokens matter, cut over any ranks.

    Tokens are scored one by one and the kept ones spread evenly over ranks; layers of experts, Fourier mixing and a
    norm work on those alone, and up-sampling fills all positions. Each sequence of a batch is read by itself, so it
    does not depend on the others. It sees later tokens and has no state: it cannot write.

    Cost: embedding, norm and score of L tokens; for N kept ones E experts of at most C tokens, O(E C^2 D), and
        O(N D log N) for the mixing. With C constant it is linear in L.
    Reference: A Unified View of Long-Sequence Models, Sec. 10 and Fig. 4.
    """

    config: MillionConfig

    def __init__(self, config: MillionConfig) -> None:
        super().__init__()
        self.config = config
        self.hidden_size = size = config.hidden_size
        self.vocab_size, self.max_tokens = config.vocab_size, config.max_tokens
        self.embedding = nn.Embedding(config.vocab_size, size)
        self.context_KD = nn.Parameter(_identity(config.context, size)) if config.context > 1 else None
        self.position_scale_D = None if config.positions == "none" else nn.Parameter(torch.empty(size))
        self.dropout = Dropout()
        self.selector = Selector(config.selector, size, against=config.objective == "adversarial")
        self.layers = nn.ModuleList(
            ExpertLayer(config.router, size, config.num_heads, config.mlp_size) for _ in range(config.num_layers)
        )
        self.mixing = GlobalMixing(size, config.mlp_size) if config.global_mixing else None
        self.norm = nn.LayerNorm(size)
        self.head = None if config.num_classes is None else nn.Linear(size, config.num_classes)
        initialise(self, config.num_layers + 1)
        if self.position_scale_D is not None:
            nn.init.constant_(self.position_scale_D, POSITION_SCALE)

    def begin_from(self, trained: Model, folder: Path) -> None:
        """Take the weights of a model whose Selector learns in another way, or whose objective is another.

        Raises: ConfigError where its sizes are others.
        """
        if not isinstance(trained, MillionModel):
            super().begin_from(trained, folder)
            return
        config, free = trained.config, {"selector", "objective"}
        if self.config.model_dump(exclude=free) != config.model_dump(exclude=free) or (
            self.config.selector.hidden_size != config.selector.hidden_size
        ):
            raise ConfigError(
                f"the model in {folder} differs from [model] in more than how its Selector learns (model.selector but "
                "its hidden_size, model.objective); give the same sizes"
            )
        self.load_state_dict(trained.state_dict())

    def prepare(self, step: int) -> None:
        """Make gates as soft as they are at this step of training."""
        self.selector.step = step

    def forward(
        self, tokens_BL: torch.Tensor, ops: SequenceOps | None = None, draws: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Logits [B, classes], equal on all ranks, from this process's slice of B sequences.

        `draws` number the noise and the dropout of training, one for each sequence. Every rank has the whole loss: it
        counts once when each divides it by the number of ranks.

        Raises: as `read`; InputError for a model without a head.
        """
        return torch.stack([self.classify(reading, ops) for reading in self._readings(tokens_BL, ops, draws)])

    def hidden(self, tokens_BL: torch.Tensor, ops: SequenceOps | None = None) -> torch.Tensor:
        """Vectors of all positions, interpolated between those of kept tokens: [B, L] -> [B, L, D].

        Raises: as `read`.
        """
        return torch.stack([self.spread(reading) for reading in self._readings(tokens_BL, ops, None)])

    def vectors(self, tokens_BL: torch.Tensor, ops: SequenceOps | None = None) -> torch.Tensor:
        """One vector for each sequence, [B, L] -> [B, D], equal on all ranks.

        Raises: as `read`.
        """
        return torch.stack([self.pool(reading, ops) for reading in self._readings(tokens_BL, ops, None)])

    def read(self, tokens_L: torch.Tensor, ops: SequenceOps, draw: int = 0) -> MillionReading:
        """Select, send to experts, restore the order and mix: one sequence, of which this process has a slice.

        Raises: ShapeError, TokenError for tokens that are none; InputError for no tokens or more than `max_tokens`, on
            every rank.
        """
        device = self.embedding.weight.device
        (tokens_L,) = check_tokens(tokens_L[None], ("batch", "length"), self.config.vocab_size, device)
        total = ops.total_length(len(tokens_L))
        if not 0 < total <= self.config.max_tokens:
            raise InputError(
                f"the sequence has {total} tokens; this model reads 1 to {self.config.max_tokens} of them at once"
            )
        x_LD = self.embedding(tokens_L)
        if self.context_KD is not None:
            x_LD = ops.convolve(x_LD[None], self.context_KD, centred=True)[0]
        gates = self.selector(x_LD, ops.positions(len(tokens_L), device), total, draw)
        open_share = ops.sum_over_sequence(gates.open_L[None, :, None])[0, 0] / total
        selected = select_tokens(
            torch.cat([x_LD, gates.weight_L[:, None].to(x_LD.dtype)], dim=1),
            gates.score_L,
            threshold=gates.threshold,
            at_most=gates.at_most,
            ops=ops,
        )
        z_ND, weight_N = selected.x_NC[:, :-1], selected.x_NC[:, -1]
        if self.position_scale_D is not None:
            waves_ND = sinusoidal(selected.position_N, self.config.hidden_size).to(z_ND.dtype)
            z_ND = z_ND + self.position_scale_D.to(z_ND.dtype) * waves_ND
        z_ND = self.dropout(z_ND[None], selected.ops, draw)[0]
        balances, dropped = [], 0
        for layer in cast(list[ExpertLayer], list(self.layers)):
            z_ND, balance, lost = layer(z_ND, weight_N, selected.ops, draw)
            balances.append(balance)
            dropped += lost
        if self.mixing is not None:
            z_ND = self.mixing(z_ND, weight_N, selected.ops, draw)
        assigned = selected.total * self.config.router.choices * self.config.num_layers
        tally = SlotTally(selected.total, total, dropped, assigned)
        return MillionReading(self.norm(z_ND), weight_N, selected, open_share, torch.stack(balances).mean(), tally)

    def spread(self, reading: MillionReading) -> torch.Tensor:
        """Vectors of all positions here, [L, D]: kept ones are copied, the others interpolated."""
        how = Interpolation(self.config.upsampling.kind, self.config.upsampling.neighbours)
        return reading.selected.upsample(_weighed(reading), how)

    def pool(self, reading: MillionReading, ops: SequenceOps | None = None) -> torch.Tensor:
        """The mean over kept tokens by their weights, or over all positions, [D]; equal on all ranks.

        Cost: one all-reduce of D + 1 or D elements.
        """
        if self.config.pooling == "kept":
            weight_N1 = reading.weight_N[:, None].to(reading.z_ND.dtype)
            sums = reading.selected.ops.sum_over_sequence(torch.cat([_weighed(reading), weight_N1], dim=1)[None])[0]
            return sums[:-1] / sums[-1]
        ops = LocalSequenceOps() if ops is None else ops
        return ops.sum_over_sequence(self.spread(reading)[None])[0] / reading.tally.tokens

    def classify(self, reading: MillionReading, ops: SequenceOps | None = None) -> torch.Tensor:
        """Logits [classes], equal on all ranks.

        Raises: InputError for a model without a head.
        """
        if self.head is None:
            raise InputError("this model has no classes; build it with num_classes, or take `hidden` or `vectors`")
        logits_C: torch.Tensor = self.head(self.pool(reading, ops))
        return logits_C

    def side_loss(self, reading: MillionReading) -> torch.Tensor:
        """The terms that a sequence adds to its loss: the rate of the Selector and the balance of the experts.

        Equal on all ranks, as logits are.
        """
        return self.selector.rate_loss(reading.open_share) + self.config.router.balance_weight * reading.balance

    def initial_state(self, batch: int) -> NoReturn:
        """Raise InputError: there is no state to go on from, so nothing can be written with this model."""
        raise InputError(
            "a million-scale model sees later tokens too (its threshold, Fourier mixing and interpolation take the "
            "sequence whole): it encodes and classifies; take a language model to generate"
        )

    def _readings(
        self, tokens_BL: torch.Tensor, ops: SequenceOps | None, draws: Sequence[int] | None
    ) -> list[MillionReading]:
        ops = LocalSequenceOps() if ops is None else ops
        device = self.embedding.weight.device
        tokens_BL = check_tokens(tokens_BL, ("batch", "length"), self.config.vocab_size, device)
        numbers = range(len(tokens_BL)) if draws is None else draws
        return [self.read(tokens_L, ops, draw) for tokens_L, draw in zip(tokens_BL, numbers, strict=True)]


def _weighed(reading: MillionReading) -> torch.Tensor:
    return reading.weight_N[:, None].to(reading.z_ND.dtype) * reading.z_ND


def _identity(taps: int, size: int) -> torch.Tensor:
    weight_KD = torch.zeros(taps, size, device="cpu")
    weight_KD[taps // 2] = 1.0
    return weight_KD

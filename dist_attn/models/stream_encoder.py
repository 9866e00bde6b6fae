"""The stream encoder: a sentence encoder over blocks of a text of any length, and context that goes on behind it.

Letters: B batch, L tokens on this rank, N blocks, C tokens of a block, D model width.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn

from dist_attn.errors import InputError
from dist_attn.model_config.encoders import StreamEncoderConfig
from dist_attn.model_config.figures import GRAIN, tokens_at_once
from dist_attn.model_config.language_model import mixers_of_layers
from dist_attn.models.blocks import Block, stream_through
from dist_attn.models.causal_model import ModelState, StreamingModel
from dist_attn.models.encoder import initialise
from dist_attn.models.model import Model
from dist_attn.models.text_encoder import TextEncoder
from dist_attn.ops import LocalSequenceOps, SequenceOps, current_watch
from dist_attn.ops.finite import checked


class StreamEncoder(StreamingModel, Model):
    """Hidden states of texts of any length, for vectors along them.

    A text is cut into pairs of blocks of `block` tokens, and what is left at its end into halves where it is more than
    one block: a few words alone would say little of it. The sentence encoder reads each block alone, framed as it
    frames a text; the layers of `context` then go along the tokens of all blocks and carry a state from one to the
    next. There is no final norm: what context layers that give zeros leave are the sentence encoder's hidden states.

    What ends inside a pair ends the text: read on from there, its tokens would have seen other neighbours.
    """

    config: StreamEncoderConfig

    def __init__(self, config: StreamEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.hidden_size, self.vocab_size = config.hidden_size, config.vocab_size
        self.grain = min(2 * config.block, GRAIN)
        self.sentence = TextEncoder(config.sentence)
        context = config.context
        self._mixers = () if context is None else mixers_of_layers(context.mixer, context.num_layers)
        self.context = nn.ModuleList()
        if context is not None:
            self.context.extend(Block(mixer, context.mlp_size, context.block) for mixer in self._mixers)
            initialise(self.context, context.num_layers)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.sentence.embedding.weight.device
        return device

    @property
    def parts(self) -> list[nn.Module]:
        own = [part for block in cast(list[Block], list(self.context)) for part in (block.mixer, block)]
        return [*self.sentence.parts, *own]

    @property
    def kinds(self) -> list[str]:
        return [mixer.kind for mixer in self._mixers]

    @property
    def feature_seed(self) -> int | None:
        return next((mixer.seed for mixer in self._mixers if hasattr(mixer, "seed")), None)

    def initial_state(self, batch: int) -> ModelState:
        layers = tuple(block.mixer.initial_state(batch) for block in cast(list[Block], list(self.context)))
        # On the CPU, as the host looks at them before each block.
        return ModelState(layers, torch.zeros(batch, dtype=torch.int64, device="cpu"))

    def pack_weights(self) -> None:
        """`TextEncoder.pack_weights` for the blocks that are read together in a text of any length.

        Under autocast on a CPU weights of the context are rounded once, where they would be in every pass.
        """
        size = self.config.block
        for layer in self.context.modules() if torch.is_autocast_enabled("cpu") else ():
            if isinstance(layer, nn.Linear):
                _round_weights(layer)
        self.sentence.pack_weights(GRAIN // size * (size + self.config.sentence.frame_tokens))

    def hidden(
        self, tokens_BL: torch.Tensor, ops: SequenceOps | None = None, state: ModelState | None = None
    ) -> tuple[torch.Tensor, ModelState]:
        """Read tokens as `StreamingModel.hidden` says.

        Raises: also InputError, on every rank, where a slice or what follows `state` begins inside a block, and for
            packed documents.
        """
        ops = LocalSequenceOps() if ops is None else ops
        tokens_BL = self.check(tokens_BL, ("batch", "length"), state)
        length, total = tokens_BL.shape[1], ops.total_length(tokens_BL.shape[1])
        self._check_cuts(ops, length, total, state)
        state = self.initial_state(tokens_BL.shape[0]) if state is None else state
        before = len(self.sentence.encoder.blocks)
        h_BLD, layers = stream_through(self.context, self.blocks_hidden(tokens_BL), ops, state.layers, before)
        return h_BLD, ModelState(layers, state.position_B + total)

    def blocks_hidden(self, tokens_BL: torch.Tensor) -> torch.Tensor:
        """Read every block alone with the sentence encoder, [B, L] -> [B, L, D]; `L` begins with a pair of blocks.

        As many blocks are read together as the device wants, those of an unfinished pair one by one. Of CPUs it is the
        grid on which ranks are cut, so that the same blocks meet in one product on any number of them.
        """
        (batch, length), size = tokens_BL.shape, self.config.block
        if not length:
            return self._read(tokens_BL)
        read, together = [], tokens_at_once(tokens_BL.device.type)
        for start in range(0, length, together):
            stop = min(start + together, length)
            whole = stop - stop % self.grain
            if whole > start:
                h_NCD = self._read(tokens_BL[:, start:whole].reshape(-1, size), start)
                read.append(h_NCD.reshape(batch, whole - start, -1))
            for block_BC in self._unfinished(tokens_BL[:, whole:stop]):
                read.append(self._read(block_BC, whole))
                whole += block_BC.shape[1]
        return read[0] if len(read) == 1 else torch.cat(read, dim=1)

    def short_hidden(self, texts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Hidden states of whole texts of at most a pair of blocks, [T] each -> [1, T, D] each, read together.

        Raises: as `TextEncoder.hidden_together`.
        """
        before = len(self.config.sentence.prefix)
        cut = [self._unfinished(text_T) for text_T in texts]
        lengths = [len(text_T) for text_T in texts]
        read = self.sentence.hidden_together([block_C for blocks in cut for block_C in blocks])
        sizes = (len(block_C) for blocks in cut for block_C in blocks)
        read_1LD = torch.cat([h[:, before : before + size] for h, size in zip(read, sizes, strict=True)], dim=1)
        ops = LocalSequenceOps(documents=tuple(accumulate(lengths[:-1], initial=0)))
        layers = self.initial_state(1).layers
        h_1LD, _ = stream_through(self.context, read_1LD, ops, layers, len(self.sentence.encoder.blocks))
        return list(h_1LD.split(lengths, dim=1))

    def _unfinished(self, tokens: torch.Tensor) -> Sequence[torch.Tensor]:
        """Tokens [..., T] of less than a pair of blocks as one block or as two, the first a token longer if need be."""
        length = tokens.shape[-1]
        if not length:
            return ()
        blocks: Sequence[torch.Tensor] = tokens.split(-(-length // -(-length // self.config.block)), dim=-1)
        return blocks

    def _read(self, text_NC: torch.Tensor, at: int = 0) -> torch.Tensor:
        """Blocks from token `at` of this slice on, each alone, without what becomes of their frame."""
        if not text_NC.shape[1] and not torch.is_grad_enabled():
            return cast(torch.Tensor, self.sentence.embedding(text_NC))
        # Every rank has a gradient of every weight, one without tokens the zeros of a frame around nothing.
        (blocks, size), before = text_NC.shape, len(self.config.sentence.prefix)
        framed_NL, watch = self.sentence.frame(text_NC), current_watch()
        if watch is None or watch.finite is None:
            h_NLD = self.sentence.hidden(framed_NL)
        else:
            of_slice = watch.finite.first_tokens
            watch.finite.first_tokens = tuple(of_slice[0] + at - before + block * size for block in range(blocks))
            h_NLD = self.sentence.hidden(framed_NL, checked(LocalSequenceOps()))
            watch.finite.first_tokens = of_slice
        return h_NLD[:, before : before + size]

    def _check_cuts(self, ops: SequenceOps, length: int, total: int, state: ModelState | None) -> None:
        size = self.grain
        if len(ops.document_places(length).lengths_N) > 1:
            raise InputError("a stream encoder was given packed documents; it reads one text in each sequence")
        begun = [] if state is None else [at for at in state.position_B.tolist() if at % size and total]
        cut = [at for at in ops.cuts if at % size and at != total]
        if begun:
            raise InputError(
                f"the state stands at token {begun[0]}, inside a pair of blocks of {size} tokens; a text ends with "
                f"what is read short of a multiple of {size}: begin anew, or go on from such a multiple"
            )
        if cut:
            raise InputError(
                f"the tokens are cut over ranks at {cut[0]}, inside a pair of blocks of {size} tokens; cut them at its "
                "multiples"
            )


def _round_weights(layer: nn.Linear) -> None:
    own: Any = layer
    plain, weight_OI = layer.forward, layer.weight.detach().bfloat16()
    bias_O = None if layer.bias is None else layer.bias.detach().bfloat16()

    def forward(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.bfloat16(), weight_OI, bias_O) if torch.is_inference_mode_enabled() else plain(x)

    own.forward = forward

"""Images as sequences of patches: the vision classifier, and the masked auto-encoder."""

from pathlib import Path

import torch
from torch import nn

from dist_attn.errors import ConfigError, InputError, ShapeError
from dist_attn.models.encoder import Encoder, Pooling, initialise
from dist_attn.models.model import Model
from dist_attn.ops import LocalSequenceOps, SequenceOps
from dist_attn_papers.vision.config import ImageConfig, MaskedAutoencoderConfig, VisionClassifierConfig


def to_patches(images_BCHW: torch.Tensor, config: ImageConfig) -> torch.Tensor:
    """Images as sequences, [B, C, H, W] -> [B, T, C p p], patches row by row.

    Raises: ShapeError for images of another size.
    """
    size = (config.channels, config.height, config.width)
    if images_BCHW.dim() != 4 or tuple(images_BCHW.shape[1:]) != size:
        raise ShapeError(f"images of shape {tuple(images_BCHW.shape)} were given; needed is [batch, {size}]")
    patch = config.patch
    rows = images_BCHW.unflatten(3, (-1, patch)).unflatten(2, (-1, patch))  # [B, C, H/p, p, W/p, p]
    patches_BTN: torch.Tensor = rows.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)
    return patches_BTN


def draw_mask(batch: int, config: ImageConfig, share: float, generator: torch.Generator) -> torch.Tensor:
    """Draw the patches of whole images that are hidden, bool [B, T]: `share` of each image's, at least one.

    Drawn before the sequence is cut over ranks, so it does not depend on their number.

    Raises: InputError for a share outside (0, 1].
    """
    if not 0 < share <= 1:
        raise InputError(f"a share of {share} of the patches was to be hidden; needed is one in (0, 1]")
    hidden = max(1, round(share * config.num_patches))
    order_BT = torch.rand(batch, config.num_patches, generator=generator, device=generator.device).argsort(dim=1)
    return order_BT < hidden


class VisionClassifier(Model):
    """Logits of the classes of an image, whose patches may be cut across ranks.

    Reference: Introduction to Transformers, Sec. 4 (patch embedding W p_n, class token or pooling).
    """

    config: VisionClassifierConfig

    def __init__(self, config: VisionClassifierConfig) -> None:
        super().__init__()
        self.config = config
        size = config.encoder.hidden_size
        self.projection = nn.Linear(config.image.patch_size, size)
        self.encoder = Encoder(config.encoder)
        self.pooling = Pooling(config.pooling, size, causal=config.encoder.causal)
        self.head = nn.Linear(size, config.num_classes)
        initialise(self, config.encoder.num_layers)

    def begin_from(self, trained: Model, folder: Path) -> None:
        """Take projection and encoder of a masked auto-encoder, and keep a fresh head; or a classifier's weights.

        Raises: ConfigError for other images or another encoder.
        """
        if not isinstance(trained, MaskedAutoencoder):
            super().begin_from(trained, folder)
            return
        for part in ("image", "encoder"):
            if getattr(self.config, part) != getattr(trained.config, part):
                raise ConfigError(
                    f"the masked auto-encoder in {folder} has another model.{part}; a classifier that begins from it "
                    "needs the same image and encoder"
                )
        self.projection.load_state_dict(trained.projection.state_dict())
        self.encoder.load_state_dict(trained.encoder.state_dict())

    def prepare(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Whole images as `forward` takes them: patches, with room for a class token; what is then cut over ranks."""
        return self.pooling.make_room(to_patches(images_BCHW, self.config.image))

    def forward(self, patches_BLN: torch.Tensor, ops: SequenceOps | None = None) -> torch.Tensor:
        """Logits [B, classes], equal on all ranks, from this process's slice of prepared images.

        Every rank has the whole loss: it counts once when each divides it by the number of ranks.
        """
        ops = LocalSequenceOps() if ops is None else ops
        _check_patches(patches_BLN, self.config.image, self.pooling.room, ops)
        x_BLD = self.pooling.fill(self.projection(patches_BLN), ops)
        logits_BC: torch.Tensor = self.head(self.pooling(self.encoder(x_BLD, ops), ops))
        return logits_BC

    def classify(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits [B, classes] of whole images."""
        return self.forward(self.prepare(images_BCHW))


class MaskedAutoencoder(Model):
    """Hidden patches from those that can be seen: a learned vector stands in for each, and a linear head fills it in.

    The projection and the encoder have the names of the vision classifier's, so that one can start from the other.

    Reference: Introduction to Transformers, Sec. 4 (masked auto-encoding); the encoder sees all places, as in BERT.
    """

    config: MaskedAutoencoderConfig

    def __init__(self, config: MaskedAutoencoderConfig) -> None:
        super().__init__()
        self.config = config
        size = config.encoder.hidden_size
        self.projection = nn.Linear(config.image.patch_size, size)
        self.mask_token_D = nn.Parameter(0.02 * torch.randn(size))
        self.encoder = Encoder(config.encoder)
        self.head = nn.Linear(size, config.image.patch_size)
        initialise(self, config.encoder.num_layers)

    def prepare(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Whole images as `forward` takes them."""
        return to_patches(images_BCHW, self.config.image)

    def forward(
        self, patches_BLN: torch.Tensor, hidden_BL: torch.Tensor, ops: SequenceOps | None = None
    ) -> torch.Tensor:
        """The reconstruction of all patches, [B, L, C p p], of which those marked in `hidden_BL` [B, L] are not seen.

        Raises: ShapeError for other shapes, or a mask that is not bool.
        """
        ops = LocalSequenceOps() if ops is None else ops
        _check_patches(patches_BLN, self.config.image, 0, ops)
        if hidden_BL.shape != patches_BLN.shape[:2] or hidden_BL.dtype != torch.bool:
            raise ShapeError(
                f"a mask {tuple(hidden_BL.shape)} of {hidden_BL.dtype} came with patches {tuple(patches_BLN.shape)}; "
                "needed is one bool per patch"
            )
        # Not multiplied away: a patch that is NaN would show through.
        seen_BLD = self.projection(patches_BLN.masked_fill(hidden_BL[..., None], 0.0))
        x_BLD = torch.where(hidden_BL[..., None], self.mask_token_D.to(seen_BLD.dtype), seen_BLD)
        filled_BLN: torch.Tensor = self.head(self.encoder(x_BLD, ops))
        return filled_BLN

    def loss(self, patches_BLN: torch.Tensor, hidden_BL: torch.Tensor, ops: SequenceOps | None = None) -> torch.Tensor:
        """Mean squared error over the hidden patches of all ranks, equal on each; 0 where none is hidden.

        Every rank has the whole loss: it counts once when each divides it by the number of ranks.
        """
        ops = LocalSequenceOps() if ops is None else ops
        errors_BL = (self.forward(patches_BLN, hidden_BL, ops) - patches_BLN).square().mean(dim=2)
        sums = torch.stack([errors_BL.masked_fill(~hidden_BL, 0.0), hidden_BL.to(errors_BL.dtype)], dim=2)
        error, hidden = ops.sum_over_sequence(sums).sum(dim=0)
        mean: torch.Tensor = error / hidden.clamp_min(1.0)
        return mean


def _check_patches(patches_BLN: torch.Tensor, image: ImageConfig, room: int, ops: SequenceOps) -> None:
    if patches_BLN.dim() != 3 or patches_BLN.shape[2] != image.patch_size:
        raise ShapeError(
            f"patches of shape {tuple(patches_BLN.shape)} were given; needed is [batch, length, {image.patch_size}]"
        )
    total = ops.total_length(patches_BLN.shape[1])
    if total != image.num_patches + room:
        raise ShapeError(
            f"{total} patches were given, places of a class token counted; images of this model have "
            f"{image.num_patches + room}: make them with prepare(images)"
        )

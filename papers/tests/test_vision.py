"""Models of images: the same over ranks, blind to what they must not see, saved and loaded."""

import pytest
import torch
import torch.nn.functional as F
from pydantic import ValidationError
from torch import Tensor

from dist_attn.comm import Communicator
from dist_attn.errors import InputError, ShapeError
from dist_attn.layout import SequenceLayout
from dist_attn.models import Model
from dist_attn_papers.vision.config import MaskedAutoencoderConfig, VisionClassifierConfig
from dist_attn_papers.vision.model import MaskedAutoencoder, VisionClassifier, draw_mask, to_patches
from tests.models import test_classifiers as core
from tests.models.test_classifiers import CLASSES, CUTS, _encoder, _slice
from tests.support.closeness import assert_close
from tests.support.over_ranks import assert_ranks_change_nothing, randomised

IMAGE = {"height": 6, "width": 8, "channels": 2, "patch": 2}


def _vision(mixer: str, pooling: str) -> VisionClassifier:
    encoder = _encoder(mixer, positions="learned", max_length=13)
    values = {"num_classes": CLASSES, "pooling": pooling, "image": IMAGE, "encoder": encoder}
    return randomised(VisionClassifier(VisionClassifierConfig.model_validate(values)))


def _autoencoder(mixer: str) -> MaskedAutoencoder:
    encoder = _encoder(mixer, positions="learned", max_length=12)
    return randomised(MaskedAutoencoder(MaskedAutoencoderConfig.model_validate({"image": IMAGE, "encoder": encoder})))


def _images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 2, 6, 8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.mark.parametrize("mixer", ["rfa", "softmax", "causal"])
def test_an_image_over_ranks_is_classified_as_on_one(mixer: str) -> None:
    """Loss and gradients of every parameter, learned positions among them, are those of one process."""
    layout = SequenceLayout.from_lengths(CUTS[1])

    def share(model: VisionClassifier, comm: Communicator | None) -> Tensor:
        own, ops, ranks = _slice(comm, layout)
        return F.cross_entropy(model(model.prepare(_images())[:, own], ops), torch.tensor([0, 2])) / ranks

    assert_ranks_change_nothing(lambda: _vision(mixer, "class_token"), share, layout.size)


@pytest.mark.parametrize("mixer", ["elu", "scaleformer"])
def test_hidden_patches_over_ranks_are_filled_in_as_on_one(mixer: str) -> None:
    """The auto-encoder's loss and gradients are those of one process, also where a rank hides no patch."""
    layout, hidden = SequenceLayout.from_lengths((5, 0, 7)), torch.zeros(2, 12, dtype=torch.bool)
    hidden[0, 1:4] = hidden[1, 2] = True

    def share(model: MaskedAutoencoder, comm: Communicator | None) -> Tensor:
        own, ops, ranks = _slice(comm, layout)
        return model.loss(model.prepare(_images())[:, own], hidden[:, own], ops) / ranks

    assert_ranks_change_nothing(lambda: _autoencoder(mixer), share, 3)


def test_hidden_patches_are_not_looked_at() -> None:
    """What a hidden patch holds changes nothing but the target, and a loss over no hidden patch is 0."""
    model, images = _autoencoder("rfa"), _images()
    hidden = draw_mask(2, model.config.image, 0.5, torch.Generator().manual_seed(0))
    assert hidden.sum(dim=1).tolist() == [6, 6]
    patches = model.prepare(images)
    filled = model(patches, hidden)
    changed = torch.where(hidden[..., None], torch.full_like(patches, float("nan")), patches)
    assert torch.equal(model(changed, hidden), filled)
    by_hand = (filled - patches).square().mean(2)[hidden].mean()
    assert_close(model.loss(patches, hidden), by_hand)
    assert model.loss(patches, torch.zeros_like(hidden)).item() == 0.0


def test_patches_are_cut_row_by_row_and_put_together() -> None:
    """Patch 5 of a 6 x 8 image, in patches of 2, starts at row 2 and column 2; all of them make the image again."""
    images, config = _images(), _autoencoder("rfa").config.image
    patches = to_patches(images, config)
    assert patches.shape == (2, 12, 8)
    assert torch.equal(patches[:, 5], images[:, :, 2:4, 2:4].flatten(1))
    again = torch.zeros_like(images)
    for number, patch_BN in enumerate(patches.unbind(1)):
        row, column = (2 * place for place in divmod(number, 4))
        again[:, :, row : row + 2, column : column + 2] = patch_BN.unflatten(1, (-1, 2, 2))
    assert torch.equal(again, images)


def test_patches_that_do_not_fit_are_refused() -> None:
    """An image that its patches do not cut evenly is refused."""
    with pytest.raises(ValidationError, match="not cut evenly"):
        MaskedAutoencoderConfig.model_validate({"image": {**IMAGE, "patch": 4}, "encoder": _encoder("rfa")})


@pytest.mark.parametrize("model", [_vision("softmax", "mean"), _autoencoder("elu")])
def test_every_kind_is_saved_and_loaded(tmp_path, model: Model) -> None:
    """A folder gives back configuration and weights exactly, and is refused where a language model is needed."""
    core.test_every_kind_is_saved_and_loaded(tmp_path, model)


def test_unusable_inputs_are_refused() -> None:
    """Images of another size and masks of another shape are named in words."""
    vision, autoencoder = _vision("rfa", "class_token"), _autoencoder("rfa")
    with pytest.raises(ShapeError, match=r"needed is \[batch, \(2, 6, 8\)\]"):
        vision.prepare(torch.zeros(1, 2, 8, 8))
    with pytest.raises(ShapeError, match="12 patches were given"):
        vision(to_patches(_images(), vision.config.image))
    with pytest.raises(ShapeError, match="one bool per patch"):
        autoencoder(autoencoder.prepare(_images()), torch.zeros(2, 11, dtype=torch.bool))
    with pytest.raises(InputError, match=r"share of 0"):
        draw_mask(1, autoencoder.config.image, 0.0, torch.Generator())

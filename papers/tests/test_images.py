"""Images and labels from .npy and .npz files: one size, scaled per channel, and what does not fit named."""

import numpy as np
import pytest

from dist_attn.errors import ConfigError
from dist_attn.training.datasets.examples import LabelNames
from dist_attn_papers.vision.config import ImageConfig
from dist_attn_papers.vision.images import PixelScale, class_numbers, read_images, read_labels

GREY = ImageConfig(height=4, width=6, channels=1, patch=2)
COLOUR = ImageConfig(height=4, width=6, channels=3, patch=2)


def _pixels(*shape):
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)


def test_images_come_from_npy_and_npz(tmp_path):
    """Grey images with and without a channel and colour images are read as they were written."""
    grey, colour = _pixels(5, 4, 6), _pixels(5, 4, 6, 3)
    np.save(tmp_path / "grey.npy", grey)
    np.savez_compressed(tmp_path / "colour.npz", x=colour, y=np.arange(5))
    assert np.array_equal(read_images(tmp_path / "grey.npy", "images", GREY)[..., 0], grey)
    assert np.array_equal(read_images(tmp_path / "colour.npz", "x", COLOUR), colour)
    assert read_labels(tmp_path / "colour.npz", "y", 5) == (0, 1, 2, 3, 4)


def test_channels_are_scaled_to_mean_0_and_deviation_1(tmp_path):
    """What a model sees of the training images has mean 0 and deviation 1 in each channel, channels first."""
    pixels = _pixels(50, 4, 6, 3)
    pixels[..., 2] = 7  # a channel that is always the same
    np.save(tmp_path / "a.npy", pixels)
    images = read_images(tmp_path / "a.npy", "", COLOUR)
    seen = PixelScale.of(images)(images)
    assert seen.shape == (50, 3, 4, 6)
    assert np.allclose(seen.mean(dim=(0, 2, 3)), 0, atol=1e-5)
    assert np.allclose(seen[:, :2].std(dim=(0, 2, 3), correction=0), 1, atol=1e-5)
    assert (seen[:, 2] == 0).all()
    deviation = pixels[:, 1, 3, 0].astype(float) - pixels[..., 0].mean()
    assert np.allclose(seen[:, 0, 1, 3], deviation / pixels[..., 0].std(), atol=1e-5)


def test_labels_may_be_words(tmp_path):
    """Words are numbered by the alphabet; one that is new in the validation set is named."""
    np.savez(tmp_path / "a.npz", labels=np.array(["dog", "cat", "dog"]))
    labels = read_labels(tmp_path / "a.npz", "labels", 3)
    names = LabelNames.of(labels)
    assert class_numbers(labels, names, tmp_path / "a.npz").tolist() == [1, 0, 1]
    with pytest.raises(ConfigError, match=r"b\.npz, image 1: label 'cow' is not one of .*'cat', 'dog'"):
        class_numbers(("cat", "cow"), names, tmp_path / "b.npz")


@pytest.mark.parametrize(
    ("array", "words"),
    [
        (_pixels(5, 4, 7), r"holds an array \[5, 4, 7, 1\]; model\.image needs \[N, 4, 6\]"),
        (_pixels(4, 6), r"holds an array \[4, 6\]"),
        (_pixels(0, 4, 6), "holds no images"),
        (np.zeros((2, 4, 6), dtype=complex), "holds complex128"),
        (np.array([{}]), "cannot be read as .npy or .npz"),
        (np.where(np.arange(48).reshape(2, 4, 6) == 30, np.nan, 1.0), r"image 1 has NaN or infinite pixels"),
    ],
)
def test_arrays_that_are_no_images_are_named(tmp_path, array, words):
    """Arrays of another size or type, none at all, pickled ones and pixels that are no numbers are refused by name."""
    np.save(tmp_path / "a.npy", array, allow_pickle=True)
    with pytest.raises(ConfigError, match=rf"a\.npy:? {words}"):
        read_images(tmp_path / "a.npy", "images", GREY)


def test_files_that_are_no_arrays_are_named(tmp_path):
    """A file that is missing, cut off, of another kind, or without the array asked for is refused with its name."""
    (tmp_path / "text.npz").write_text("hello")
    (tmp_path / "empty.npy").write_bytes(b"")
    np.savez(tmp_path / "cut.npz", x=_pixels(50, 4, 6))
    whole = (tmp_path / "cut.npz").read_bytes()
    (tmp_path / "cut.npz").write_bytes(whole[:100])
    np.savez(tmp_path / "other.npz", x=_pixels(5, 4, 6), y=np.arange(4), z=np.ones(5))
    for name in ("text.npz", "empty.npy", "cut.npz", "missing.npy"):
        with pytest.raises(ConfigError, match=rf"{name} cannot be read as \.npy or \.npz"):
            read_images(tmp_path / name, "x", GREY)
    with pytest.raises(ConfigError, match=r"other\.npz has no array 'images', only x, y, z; name it in \[data\]"):
        read_images(tmp_path / "other.npz", "images", GREY)
    with pytest.raises(ConfigError, match=r"has 4 labels for 5 images"):
        read_labels(tmp_path / "other.npz", "y", 5)
    with pytest.raises(ConfigError, match=r"labels \[5\] of float64; needed is a whole number or word each"):
        read_labels(tmp_path / "other.npz", "z", 5)


def test_a_header_that_is_cut_off_is_named(tmp_path):
    """A .npy file whose header ends in the middle is refused with its name."""
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00\x10\x00{'descr': __impo")
    with pytest.raises(ConfigError, match=r"a\.npy cannot be read as \.npy or \.npz"):
        read_labels(tmp_path / "a.npy", "labels", 1)

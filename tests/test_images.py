"""Sets of images in memory, and the transforms between stored levels and what networks see."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from mmdgs import data
from mmdgs.data import ImageSet, dequantised, flipped, midpoints, to_uint8, transforms
from mmdgs.data.single import NamedImage
from mmdgs.errors import UsageError
from mmdgs.randomness import Streams, seeded


def random_images(
    n: int, channels: int = 3, height: int = 6, width: int = 5, seed: int = 0
) -> Tensor:
    return torch.randint(
        0, 256, (n, channels, height, width), dtype=torch.uint8, generator=seeded(seed)
    )


EVERY_LEVEL = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)


# --- levels and points


def test_crops_are_at_every_place_of_an_image() -> None:
    image = torch.arange(15, dtype=torch.uint8).reshape(1, 5, 3)
    parts = transforms.crops([image], 3, 60, seeded(0))
    assert sorted(set(parts[:, 0, 0, 0].tolist())) == [0, 3, 6]
    assert torch.equal(parts[:, 0, 2, 2] - parts[:, 0, 0, 0], torch.full((60,), 8))


def test_dequantised_images_go_back_to_what_was_stored() -> None:
    x = dequantised(EVERY_LEVEL, seeded(0))
    assert x.dtype == torch.float32
    assert torch.equal(to_uint8(x), EVERY_LEVEL)


@pytest.mark.parametrize("extreme", [0.0, 1 - 2.0**-24], ids=["smallest", "largest"])
def test_no_draw_is_rounded_into_another_level(extreme: float, monkeypatch) -> None:
    # 255 + (1 - 2^-24) is 256 in float32: the point 1, which is outside [0, 1).
    monkeypatch.setattr(
        transforms, "uniforms", lambda shape, like, generator: torch.full(shape, extreme)
    )
    x = dequantised(EVERY_LEVEL, seeded(0))
    assert x.min() >= 0
    assert x.max() < 1
    assert torch.equal(to_uint8(x), EVERY_LEVEL)


def test_the_residual_is_uniform_and_free_of_the_level() -> None:
    images = random_images(64, 1, 64, 64)
    residual = (256 * dequantised(images, seeded(1)).double() - images).flatten()
    n, bins = residual.numel(), 64
    assert residual.min() >= 0
    assert residual.max() < 1
    # Pearson's statistic has mean bins - 1 and variance 2 (bins - 1).
    counts = torch.histc(residual, bins, 0, 1)
    statistic = ((counts - n / bins) ** 2).sum().item() / (n / bins)
    assert abs(statistic - (bins - 1)) < 5 * math.sqrt(2 * (bins - 1))
    correlation = torch.corrcoef(torch.stack([residual, images.double().flatten()]))[0, 1].item()
    assert abs(correlation) < 5 / math.sqrt(n)


def test_an_image_has_the_same_noise_and_mirror_in_every_batch() -> None:
    images = random_images(8)
    for transform in (dequantised, flipped):
        whole = transform(images, Streams(3, 8))
        part = transform(images[2:5], Streams(3, 3, first_row=2))
        assert torch.equal(whole[2:5], part)
        other = transform(images, Streams(4, 8))
        assert not torch.equal(whole, other)


def test_half_of_the_images_are_mirrored() -> None:
    images = random_images(2_000, 1, 2, 3)
    for batch in (images, midpoints(images)):
        out = flipped(batch, seeded(2))
        mirrored = (out == batch.flip(-1)).flatten(1).all(1)
        kept = (out == batch).flatten(1).all(1)
        assert bool((mirrored | kept).all())
        assert abs(mirrored.double().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(2_000)
        assert out.dtype == batch.dtype


def test_the_wrong_kind_of_numbers_is_refused() -> None:
    for transform in (midpoints, lambda x: dequantised(x, seeded(0))):
        with pytest.raises(UsageError, match="float32"):
            transform(torch.zeros(1, 1, 2, 2))
    with pytest.raises(UsageError, match="uint8"):
        to_uint8(EVERY_LEVEL)


# --- size and colour


@pytest.mark.parametrize("size", [4, 13])
def test_resizing_stored_images_is_pillows_bicubic(size: int) -> None:
    images = random_images(3, 3, 8, 8) // 2 + 64  # Pillow clamps between the directions: not here
    ours = transforms.resized(images, size)
    theirs = [
        Image.fromarray(x.permute(1, 2, 0).numpy()).resize((size, size), Image.Resampling.BICUBIC)
        for x in images
    ]
    expected = torch.stack([torch.tensor(np.asarray(x)).permute(2, 0, 1) for x in theirs])
    # Pillow also rounds between them: half a level, at most doubled by the weights, and half a
    # level at the end.
    assert (ours.int() - expected.int()).abs().max() <= 2
    assert ours.dtype == torch.uint8


def test_an_image_of_its_own_in_the_channels_of_a_model() -> None:
    colour = torch.rand(3, 4, 5, generator=seeded(0))
    luma, (said,) = NamedImage("a", colour).in_channels(1, clean=True)
    stored = (255 * colour).round().byte().permute(1, 2, 0).numpy()
    pillows = np.asarray(Image.fromarray(stored).convert("L"))
    np.testing.assert_allclose(255 * luma[0].numpy(), pillows, atol=1.1)
    assert "luma" in said
    repeated, (said,) = NamedImage("a", luma).in_channels(3, clean=True)
    assert torch.equal(repeated, luma.expand(3, -1, -1))
    assert "repeated" in said
    assert NamedImage("a", colour).in_channels(3, clean=True)[0] is colour
    with pytest.raises(UsageError, match="3 channels, and the model's have 2"):
        NamedImage("a", colour).in_channels(2, clean=True)


def test_grey_is_pillows_luma_and_colour_repeats_grey() -> None:
    images = random_images(4, 3, 32, 32)
    grey = transforms.recoloured(images, 1)
    expected = [
        np.asarray(Image.fromarray(x.permute(1, 2, 0).numpy()).convert("L")) for x in images
    ]
    assert np.array_equal(grey[:, 0].numpy(), np.stack(expected))
    again = transforms.recoloured(grey, 3)
    assert again.shape == images.shape
    assert all(torch.equal(again[:, i], grey[:, 0]) for i in range(3))


# --- the set


@pytest.fixture
def numbered() -> ImageSet:
    images = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 2, 3, 4)
    return ImageSet("six", "train", images, torch.arange(6) % 2, ("even", "odd"), ("broken.png",))


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        (slice(2, None), [2, 3, 4, 5]),
        ([5, 0, 5], [5, 0, 5]),
        ([], []),
        (torch.tensor([True, False, False, False, True, False]), [0, 4]),
        (np.array([2, 4]), [2, 4]),
    ],
)
def test_taking_some(numbered: ImageSet, indices, expected: list[int]) -> None:
    some = numbered.take(indices)
    assert some.images[:, 1, 2, 3].tolist() == expected
    assert some.labels.tolist() == [i % 2 for i in expected]
    assert (some.name, some.classes, some.skipped) == ("six", ("even", "odd"), ("broken.png",))


def test_sets_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(UsageError, match="float32"):
        ImageSet("x", "train", torch.zeros(2, 3))
    images = random_images(2)
    with pytest.raises(UsageError, match="one for each image"):
        ImageSet("x", "train", images, torch.zeros(3, dtype=torch.int64))


# --- what is asked for


@pytest.mark.parametrize(
    ("name", "split", "options", "message"),
    [
        ("CIFAR-10", "train", {}, "did you mean 'cifar10'?"),
        ("no/such/folder", "train", {}, "'no/such/folder'; choose one of"),
        ("mnist", "train", {"limit": -1}, "limit .* -1"),
        ("mnist", "valid", {}, "split of mnist 'valid'; choose one of train, test"),
    ],
)
def test_what_is_unknown_is_refused(name: str, split: str, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message.replace("?", "[?]")):
        data.load_images(name, split, **options)

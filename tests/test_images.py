"""Sets of images in memory, and the transforms between stored levels and what networks see."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from mmdgs import data
from mmdgs.data import ImageSet, dequantised, flipped, midpoints, to_uint8, transforms
from mmdgs.errors import UsageError
from mmdgs.randomness import Streams, seeded


def random_images(n: int, channels: int = 3, height: int = 6, width: int = 5, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, (n, channels, height, width), dtype=torch.uint8, generator=seeded(seed))


EVERY_LEVEL = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)


# --- levels and points ------------------------------------------------------------------------------------------


def test_dequantised_images_go_back_to_what_was_stored() -> None:
    x = dequantised(EVERY_LEVEL, seeded(0))
    assert x.dtype == torch.float32
    assert torch.equal(to_uint8(x), EVERY_LEVEL)


@pytest.mark.parametrize("extreme", [0.0, 1 - 2.0**-24], ids=["smallest", "largest"])
def test_no_draw_is_rounded_into_another_level(extreme: float, monkeypatch) -> None:
    # 255 + (1 - 2^-24) is 256 in float32: the point 1, which is outside [0, 1).
    monkeypatch.setattr(transforms, "uniforms", lambda shape, like, generator: torch.full(shape, extreme))
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


def test_midpoints_are_the_middle_of_each_level() -> None:
    x = midpoints(EVERY_LEVEL)
    assert x.dtype == torch.float32
    assert x.flatten().tolist() == [(k + 0.5) / 256 for k in range(256)]
    assert torch.equal(to_uint8(x), EVERY_LEVEL)


def test_points_outside_the_unit_interval_are_clamped() -> None:
    x = torch.tensor([-math.inf, -1.0, -1e-9, 0.0, 1 / 256, 0.999, 1.0, 7.0, math.inf])
    for dtype in (torch.float32, torch.float64):
        assert to_uint8(x.to(dtype)).tolist() == [0, 0, 0, 0, 1, 255, 255, 255, 255]


def test_half_of_the_images_are_mirrored() -> None:
    images = random_images(2_000, 1, 2, 3)
    for batch in (images, midpoints(images)):
        out = flipped(batch, seeded(2))
        mirrored = (out == batch.flip(-1)).flatten(1).all(1)
        kept = (out == batch).flatten(1).all(1)
        assert bool((mirrored | kept).all())
        # A row of three levels that reads the same both ways happens once in 256 for each of two rows: never twice.
        assert abs(mirrored.double().mean().item() - 0.5) < 5 * 0.5 / math.sqrt(2_000)
        assert out.dtype == batch.dtype


@pytest.mark.parametrize("generator", [seeded(0), Streams(0, 4)], ids=["generator", "streams"])
def test_transforms_stay_on_the_device_of_the_images(generator) -> None:
    # A meta tensor holds no numbers: a way through the host would raise.
    images = random_images(4).to("meta")
    for out in (dequantised(images, generator), flipped(images, generator), midpoints(images)):
        assert out.device.type == "meta"
        assert out.shape == images.shape
    assert to_uint8(midpoints(images)).device.type == "meta"


def test_the_wrong_kind_of_numbers_is_refused() -> None:
    for transform in (midpoints, lambda x: dequantised(x, seeded(0))):
        with pytest.raises(UsageError, match=r"uint8 tensor of levels 0 to 255, got torch.float32"):
            transform(torch.zeros(1, 1, 2, 2))
        with pytest.raises(UsageError, match=r"got ndarray"):
            transform(np.zeros((1, 1, 2, 2), dtype=np.uint8))
    with pytest.raises(UsageError, match=r"x must be floating point, got torch.uint8"):
        to_uint8(EVERY_LEVEL)


# --- size and colour --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [4, 13])
def test_resizing_stored_images_is_pillows_bicubic(size: int) -> None:
    images = random_images(3, 3, 8, 8) // 2 + 64  # Pillow clamps between the two directions: not here
    ours = transforms.resized(images, size)
    theirs = [
        Image.fromarray(x.permute(1, 2, 0).numpy()).resize((size, size), Image.Resampling.BICUBIC) for x in images
    ]
    expected = torch.stack([torch.tensor(np.asarray(x)).permute(2, 0, 1) for x in theirs])
    # Pillow also rounds between them: half a level, at most doubled by the weights, and half a level at the end.
    assert (ours.int() - expected.int()).abs().max() <= 2
    assert ours.dtype == torch.uint8


def test_resizing_works_through_all_blocks(monkeypatch) -> None:
    images = random_images(7, 1, 8, 8)
    whole = transforms.resized(images, 5)
    monkeypatch.setattr(transforms, "BLOCK", 3)
    assert torch.equal(transforms.resized(images, 5), whole)


def test_grey_is_pillows_luma_and_colour_repeats_grey() -> None:
    images = random_images(4, 3, 32, 32)
    grey = transforms.recoloured(images, 1)
    expected = [np.asarray(Image.fromarray(x.permute(1, 2, 0).numpy()).convert("L")) for x in images]
    assert np.array_equal(grey[:, 0].numpy(), np.stack(expected))
    again = transforms.recoloured(grey, 3)
    assert again.shape == images.shape
    assert all(torch.equal(again[:, i], grey[:, 0]) for i in range(3))


# --- the set ----------------------------------------------------------------------------------------------------


@pytest.fixture
def numbered() -> ImageSet:
    images = torch.arange(6, dtype=torch.uint8)[:, None, None, None].expand(6, 2, 3, 4)
    return ImageSet("six", "train", images, torch.arange(6) % 2, ("even", "odd"), ("broken.png",))


def test_a_set_knows_its_size(numbered: ImageSet) -> None:
    assert len(numbered) == 6
    assert numbered.shape == (2, 3, 4)


@pytest.mark.parametrize(
    ("indices", "expected"),
    [
        (slice(2, None), [2, 3, 4, 5]),
        (slice(None), [0, 1, 2, 3, 4, 5]),
        ([5, 0, 5], [5, 0, 5]),
        ((1,), [1]),
        ([], []),
        (range(0, 6, 3), [0, 3]),
        (torch.tensor([3, 1]), [3, 1]),
        (torch.tensor([True, False, False, False, True, False]), [0, 4]),
        (np.array([2, 4]), [2, 4]),
    ],
    ids=["slice", "all", "list", "tuple", "none", "range", "tensor", "mask", "numpy"],
)
def test_taking_some(numbered: ImageSet, indices, expected: list[int]) -> None:
    some = numbered.take(indices)
    assert some.images[:, 1, 2, 3].tolist() == expected
    assert some.labels.tolist() == [i % 2 for i in expected]
    assert (some.name, some.split, some.classes, some.skipped) == ("six", "train", ("even", "odd"), ("broken.png",))


def test_taking_from_a_set_without_labels(numbered: ImageSet) -> None:
    assert ImageSet("six", "test", numbered.images).take([1]).labels is None
    with pytest.raises(UsageError, match="one-dimensional"):
        numbered.take(3)


def test_moving_a_set_moves_images_and_labels(numbered: ImageSet) -> None:
    moved = numbered.to("meta")
    assert moved.images.device.type == moved.labels.device.type == "meta"
    assert numbered.images.device.type == "cpu"
    assert ImageSet("six", "test", numbered.images).to("meta").labels is None


def test_sets_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(UsageError, match=re.escape("uint8 (n, channels, height, width), got torch.float32 (2, 3)")):
        ImageSet("x", "train", torch.zeros(2, 3))
    images = random_images(2)
    with pytest.raises(UsageError, match=re.escape("int64 (2,), one for each image, got torch.int64 (3,)")):
        ImageSet("x", "train", images, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(UsageError, match=re.escape("got torch.int32 (2,)")):
        ImageSet("x", "train", images, torch.zeros(2, dtype=torch.int32))


# --- what is asked for ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data_name", "message"),
    [
        (
            "mnits",
            "unknown data 'mnits' (did you mean 'mnist'?); choose one of mnist, cifar10, celeba, or give the path",
        ),
        ("CIFAR-10", "did you mean 'cifar10'?"),
        ("no/such/folder", "unknown data 'no/such/folder'; choose one of"),
    ],
)
def test_unknown_data(data_name: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        data.load_images(data_name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 0}, "size must be a positive whole number, got 0"),
        ({"size": 2.5}, "size must be a positive whole number, got 2.5"),
        ({"limit": -1}, "limit must be a positive whole number, got -1"),
        ({"channels": 4}, "channels must be 1 (grey) or 3 (RGB), got 4"),
        ({"unreadable": "ignore"}, "unreadable must be 'refuse' or 'skip', got 'ignore'"),
    ],
)
def test_unknown_options(options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        data.load_images("mnist", **options)


@pytest.mark.parametrize(
    ("name", "split", "choices"),
    [("mnist", "valid", "train, test"), ("cifar10", "dev", "train, test"), ("celeba", "dev", "train, valid, test")],
)
def test_unknown_splits(name: str, split: str, choices: str) -> None:
    with pytest.raises(UsageError, match=f"unknown split {split!r} of {name}; choose one of {choices}"):
        data.load_images(name, split)


def test_a_file_that_is_no_zip_is_refused(tmp_path) -> None:
    file = tmp_path / "images.rar"
    file.write_bytes(b"Rar!")
    with pytest.raises(UsageError, match=r"images\.rar is a file; expected a folder of images or a \.zip"):
        data.load_images(str(file))

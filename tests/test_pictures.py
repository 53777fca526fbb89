"""Pictures of samples: tiles, borders and scales."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from mmdgs.data.pictures import BACKGROUND, GAP, image_grid, png
from mmdgs.randomness import seeded


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    ("count", "columns", "shape"),
    [(5, None, (2, 3)), (4, None, (2, 2)), (5, 5, (1, 5)), (1, 2, (1, 2))],
)
def test_tiles_are_where_they_should_be(
    channels: int, count: int, columns: int | None, shape: tuple[int, int]
) -> None:
    height, width = 4, 6
    x = torch.rand(count, channels, height, width, generator=seeded(0))
    picture = image_grid(x, columns)
    rows, across = shape
    assert picture.dtype == np.uint8
    whole = (rows * (height + GAP) + GAP, across * (width + GAP) + GAP)
    assert picture.shape == (whole if channels == 1 else (*whole, 3))
    inside = np.zeros(picture.shape, dtype=bool)
    for i in range(count):
        top, left = GAP + (i // across) * (height + GAP), GAP + (i % across) * (width + GAP)
        tile = picture[top : top + height, left : left + width]
        inside[top : top + height, left : left + width] = True
        expected = (255 * x[i]).round().byte()
        np.testing.assert_array_equal(
            tile, expected[0] if channels == 1 else expected.permute(1, 2, 0)
        )
    assert (picture[~inside] == BACKGROUND).all()


@pytest.mark.parametrize("shape", [(2, 4, 4), (2, 2, 4, 4), (0, 1, 4, 4)])
def test_what_is_no_set_of_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got shape {shape}")):
        image_grid(torch.zeros(shape))


def test_a_png_holds_each_pixel_as_a_square() -> None:
    picture = image_grid(torch.rand(3, 3, 4, 4, generator=seeded(0)))
    with Image.open(io.BytesIO(png(picture, scale=2))) as image:
        assert image.format == "PNG"
        pixels = np.asarray(image)
    np.testing.assert_array_equal(pixels, picture.repeat(2, axis=0).repeat(2, axis=1))

"""Parts of a large image: the most uncertain one, and what is around it.

A convolutional network is local: the covariance of a region hardly depends on pixels far from it.
So the components of a region come from a part of the image, the region with some pixels around it.
Of a network for photographs 16 pixels gave the variances and directions that 96 did, to 4 digits.
The part begins at multiples of ALIGNED pixels, since a network that halves its images several times
only commutes with shifts by such numbers.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from mmdgs.uncertainty.settings import Region

SIDE = 64
"""Of the region that is chosen where none is given."""
LARGE = 128 * 128
"""Pixels above which one is chosen."""
ALIGNED = 32


def most_uncertain(std: Tensor, side: int = SIDE) -> Region:
    """The region of this side with the largest mean variance, of standard deviations (C, H, W)."""
    height, width = (min(side, size) for size in std.shape[1:])
    sums = functional.pad(std.double().square().mean(0).cumsum(0).cumsum(1), (1, 0, 1, 0))
    rows = sums[height:] - sums[:-height]
    place = int((rows[:, width:] - rows[:, :-width]).argmax())
    top, left = divmod(place, std.shape[2] - width + 1)
    return left, top, width, height


def around(region: Region, height: int, width: int, margin: int) -> Region:
    """The part of an image (height, width) that the components of a region see."""
    x, y, w, h = region
    (left, right), (top, bottom) = _ends(x, w, width, margin), _ends(y, h, height, margin)
    return left, top, right - left, bottom - top


def most_seen(region: Region | None, height: int, width: int, margin: int) -> int:
    """The most pixels of an image that the components of a region see, or where it is None those of
    the image, or of a large one's most uncertain region.
    """
    if region is not None:
        _, _, w, h = around(region, height, width, margin)
        return w * h
    if height * width <= LARGE:
        return height * width
    most = SIDE + 2 * (margin + ALIGNED)
    return min(most, height) * min(most, width)


def _ends(begin: int, length: int, size: int, margin: int) -> tuple[int, int]:
    low = max(0, begin - margin) // ALIGNED * ALIGNED
    high = min(size, -(-(begin + length + margin) // ALIGNED) * ALIGNED)
    return (max(0, low - ALIGNED), high) if high - low < ALIGNED else (low, high)

"""The public names of mmdgs.data, and where each lives: read by type checkers, and by __init__.py."""

from mmdgs.data.images import image_set, load_images, load_samples
from mmdgs.data.imageset import ImageSet, spread
from mmdgs.data.toys import (
    CURVE_POINTS,
    MOG_MEANS,
    MOG_STD,
    RINGS_FACTOR,
    RINGS_NOISE,
    RINGS_SCALE,
    ROLL_NOISE,
    ROLL_SCALE,
    TOYS,
    Toy,
    mog_density,
    rings_density,
    roll_density,
    toy,
)
from mmdgs.data.transforms import dequantised, flipped, midpoints, to_uint8

__all__ = [
    "CURVE_POINTS",
    "MOG_MEANS",
    "MOG_STD",
    "RINGS_FACTOR",
    "RINGS_NOISE",
    "RINGS_SCALE",
    "ROLL_NOISE",
    "ROLL_SCALE",
    "TOYS",
    "ImageSet",
    "Toy",
    "dequantised",
    "flipped",
    "image_set",
    "load_images",
    "load_samples",
    "midpoints",
    "mog_density",
    "rings_density",
    "roll_density",
    "spread",
    "to_uint8",
    "toy",
]

"""The public names of mmdgs.data, and where each lives: read by type checkers, and by __init__.py."""

from mmdgs.data.images import image_set as image_set, load_images as load_images, load_samples as load_samples
from mmdgs.data.imageset import ImageSet as ImageSet, spread as spread
from mmdgs.data.toys import (
    CURVE_POINTS as CURVE_POINTS,
    MOG_MEANS as MOG_MEANS,
    MOG_STD as MOG_STD,
    RINGS_FACTOR as RINGS_FACTOR,
    RINGS_NOISE as RINGS_NOISE,
    RINGS_SCALE as RINGS_SCALE,
    ROLL_NOISE as ROLL_NOISE,
    ROLL_SCALE as ROLL_SCALE,
    TOYS as TOYS,
    Toy as Toy,
    mog_density as mog_density,
    rings_density as rings_density,
    roll_density as roll_density,
    toy as toy,
)
from mmdgs.data.transforms import (
    dequantised as dequantised,
    flipped as flipped,
    midpoints as midpoints,
    to_uint8 as to_uint8,
)

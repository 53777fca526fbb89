"""The public names of mmdgs.data: read by type checkers, and by __init__.py."""

from mmdgs.data.images import (
    image_set as image_set,
    load_images as load_images,
    load_samples as load_samples,
)
from mmdgs.data.imageset import ImageSet as ImageSet, spread as spread
from mmdgs.data.pictures import image_grid as image_grid, save_grid as save_grid
from mmdgs.data.toys import (
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

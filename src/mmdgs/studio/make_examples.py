"""Results that ship for the first example of each model: `python -m mmdgs.studio.make_examples`.

The example images are samples of the models that ship (docs/use/studio.md has the commands).
Results are in half precision.
"""

from __future__ import annotations

import numpy

from mmdgs.files import file_written_atomically
from mmdgs.models.shipped import PHOTO
from mmdgs.studio import image, restore, sources
from mmdgs.studio.sources import EXAMPLES, MANY_LEVELS, chosen_image, key_of, model_of, models

HALVED = ("noisy", "mean", "std", "low", "high", "draws", "directions", "truth")
"""Arrays of many numbers, all of order one."""


def first_requests() -> list[image.Image | restore.Restore]:
    """What the rooms show at the first click, with each model."""
    small = [name for name in models() if name != PHOTO]
    images = [image.Image(name, image.SIGMAS[name]) for name in small]
    operator = restore.operator_text("a missing box", {"box": restore.STRENGTHS["box"][3]})
    return [*images, *(restore.Restore(name, operator) for name in small if name in MANY_LEVELS)]


def main() -> None:
    """Make all anew, next to the example images."""
    for file in EXAMPLES.glob("*.npz"):
        file.unlink()
    for request in first_requests():
        model = model_of(request.model)
        stored = chosen_image(request.model, sources.examples(request.model)[0])
        if isinstance(request, image.Image):
            arrays = image.arrays_of(image.posterior_of(model, stored, request))
        else:
            arrays = {"draws": restore.restored(model, stored, request).draws.numpy()}
        arrays |= {name: arrays[name].astype(numpy.float16) for name in HALVED if name in arrays}
        with file_written_atomically(EXAMPLES / f"{key_of(request, model, stored)}.npz") as stream:
            numpy.savez_compressed(stream, **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()

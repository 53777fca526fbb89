"""Results that ship with the studio, for its first examples: `python -m mmdgs.studio.make_examples`.

The example images are samples of the models that ship (docs/studio.md has the commands). Results are in half precision.
"""

from __future__ import annotations

import numpy

from mmdgs.files import file_written_atomically
from mmdgs.studio import image, restoring
from mmdgs.studio.sources import EXAMPLES, example, examples, kept, model_of, models

HALVED = ("noisy", "mean", "std", "low", "high", "draws", "directions", "truth")
"""Arrays of many numbers, all of order one."""


def first_image(model: str) -> tuple[numpy.ndarray, image.Wanted]:
    """What the room of an image shows at its first click, with a model."""
    return example(model, examples(model)[0]), image.Wanted(model, image.SIGMAS[model])


def first_restored(model: str) -> tuple[numpy.ndarray, restoring.Wanted]:
    """What the room of restoration shows at its first click, with a model."""
    name, short = next(iter(restoring.OPERATORS.items()))
    text = restoring.operator_text(name, restoring.STRENGTHS[short][2])
    return example(model, examples(model)[0]), restoring.Wanted(model, text)


def main() -> None:
    """Make all anew, next to the example images."""
    for file in EXAMPLES.glob("*.npz"):
        file.unlink()
    for name in models():
        (stored, wanted), model = first_image(name), model_of(name)
        image.posterior_of(model, stored, wanted)
        _write(wanted.key(stored, model))
    for name in models(many_levels=True):
        (stored, asked), model = first_restored(name), model_of(name)
        restoring.restored(model, stored, asked)
        _write(asked.key(stored, None, model))


def _write(key: str) -> None:
    found = kept(key)
    assert found is not None
    arrays = {name: value.astype(numpy.float16) if name in HALVED else value for name, value in found.items()}
    with file_written_atomically(EXAMPLES / f"{key}.npz") as stream:
        numpy.savez_compressed(stream, **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()

"""Training: one loop for every loss and size, its folder, and recipes.

    run -> watching, loop -> stopping, step -> examples -> recipe -> objective

`run` trains a recipe into a folder (`checkpoint`); `loop` takes steps, `step` moves the weights.
The public names are in __init__.pyi. Each is imported when it is first used.
"""

from mmdgs.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

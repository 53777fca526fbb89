"""Training: one loop for every loss and size, its folder, and recipes that say what to train on what.

    run -> watching, loop -> stopping, step -> examples -> recipe -> objective

`run` trains a recipe into a folder, `loop` takes the steps and looks at the model on the way, `stopping` turns Ctrl-C
and SIGTERM into a request to end after a checkpoint, `step` moves the weights,
`examples` are what it learns from, `recipe` says what is trained how, `objective` is what a step minimises, and
`checkpoint` is the run's folder.

The public names are in __init__.pyi. Each is imported when it is first used.
"""

from mmdgs.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)

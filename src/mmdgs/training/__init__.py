"""Training: one loop for every loss and size, its folder, and recipes that say what to train on what.

    run -> watching, loop -> stopping, step -> examples -> recipe -> objective

`run` trains a recipe into a folder, `loop` takes the steps and looks at the model on the way, `stopping` turns Ctrl-C
and SIGTERM into a request to end after a checkpoint, `step` moves the weights,
`examples` are what it learns from, `recipe` says what is trained how, `objective` is what a step minimises, and
`checkpoint` is the run's folder.
"""

from mmdgs.training.checkpoint import RunFolder, last_step, metrics
from mmdgs.training.examples import Examples, ImageExamples, TensorExamples
from mmdgs.training.loop import Trained, Trainer, Validation, train
from mmdgs.training.objective import level_draw, loss_of
from mmdgs.training.recipe import Recipe, TrainingSettings, read_recipe
from mmdgs.training.run import new_model, train_model
from mmdgs.training.stopping import Interrupted

__all__ = [
    "Examples",
    "ImageExamples",
    "Interrupted",
    "Recipe",
    "RunFolder",
    "TensorExamples",
    "Trained",
    "Trainer",
    "TrainingSettings",
    "Validation",
    "last_step",
    "level_draw",
    "loss_of",
    "metrics",
    "new_model",
    "read_recipe",
    "train",
    "train_model",
]

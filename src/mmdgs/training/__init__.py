"""Training: one loop for every loss and size, its folder, and recipes that say what to train on what."""

from mmdgs.training.contract import Trained, Validation, Watch
from mmdgs.training.engine import Trainer, train
from mmdgs.training.examples import Examples, ImageExamples, LabelledExamples, TensorExamples
from mmdgs.training.folder import RunFolder, metrics
from mmdgs.training.job import train_model
from mmdgs.training.levels import level_draw
from mmdgs.training.recipe import Recipe, read_recipe
from mmdgs.training.settings import TrainingSettings
from mmdgs.training.watchers import MakeWatcher, Seen, Watcher

__all__ = [
    "Examples",
    "ImageExamples",
    "LabelledExamples",
    "MakeWatcher",
    "Recipe",
    "RunFolder",
    "Seen",
    "TensorExamples",
    "Trained",
    "Trainer",
    "TrainingSettings",
    "Validation",
    "Watch",
    "Watcher",
    "level_draw",
    "metrics",
    "read_recipe",
    "train",
    "train_model",
]

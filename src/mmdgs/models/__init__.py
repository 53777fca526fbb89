"""Models: configuration, card, and the model itself as a denoiser and as a folder in the hub's format."""

from mmdgs.models.config import CLASSES, DENOISERS, MEAN_STD, PARAMS, ModelConfig, SquaredErrorEnergy
from mmdgs.models.model import CARD, CONFIG, SHIPPED, WEIGHTS, Model, load, load_weights, save

__all__ = [
    "CARD",
    "CLASSES",
    "CONFIG",
    "DENOISERS",
    "MEAN_STD",
    "PARAMS",
    "SHIPPED",
    "WEIGHTS",
    "Model",
    "ModelConfig",
    "SquaredErrorEnergy",
    "load",
    "load_weights",
    "save",
]

"""Models: one class for every network, however it comes; its configuration, card, files, fits."""

from mmdgs.models.config import (
    CLASSES,
    COVARIANCE,
    DENOISERS,
    MEAN_STD,
    PARAMS,
    VARIANCE_RATIO,
    ModelConfig,
    check_levels,
)
from mmdgs.models.estimators import calibrate
from mmdgs.models.fits import FitData
from mmdgs.models.loading import load, load_head
from mmdgs.models.model import Model, save
from mmdgs.models.shapes import complex_model, grey_model, volume_model
from mmdgs.models.shipped import SHIPPED, shipped_folder
from mmdgs.models.weights import (
    CARD,
    CONFIG,
    load_weights,
    read_weights,
    remove_weights,
    weights_digest,
)

# fmt: off
__all__ = [
    "CARD", "CLASSES", "CONFIG", "COVARIANCE", "DENOISERS", "MEAN_STD", "PARAMS", "SHIPPED",
    "VARIANCE_RATIO", "FitData", "Model", "ModelConfig", "calibrate", "check_levels",
    "complex_model", "grey_model", "load", "load_head", "load_weights", "read_weights",
    "remove_weights", "save", "shipped_folder", "volume_model", "weights_digest",
]
# fmt: on

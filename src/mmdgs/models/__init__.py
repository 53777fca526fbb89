"""Models: one class for every network, however it comes; its configuration, card, files and fitted variances."""

from mmdgs.models.calibration import calibrate
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
from mmdgs.models.covariances import COVARIANCES
from mmdgs.models.fits import FitData
from mmdgs.models.heads import load_head
from mmdgs.models.loading import from_pretrained, load
from mmdgs.models.model import CARD, CONFIG, Model, save
from mmdgs.models.shipped import SHIPPED, shipped_folder
from mmdgs.models.weights import load_weights, read_weights, remove_weights, weights_digest

__all__ = [
    "CARD",
    "CLASSES",
    "CONFIG",
    "COVARIANCE",
    "COVARIANCES",
    "DENOISERS",
    "MEAN_STD",
    "PARAMS",
    "SHIPPED",
    "VARIANCE_RATIO",
    "FitData",
    "Model",
    "ModelConfig",
    "calibrate",
    "check_levels",
    "from_pretrained",
    "load",
    "load_head",
    "load_weights",
    "read_weights",
    "remove_weights",
    "save",
    "shipped_folder",
    "weights_digest",
]

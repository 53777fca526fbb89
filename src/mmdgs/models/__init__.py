"""Models: configuration, card, and the model itself as a denoiser and as a folder in the hub's format."""

from mmdgs.models.config import (
    CLASSES,
    DENOISERS,
    MEAN_STD,
    PARAMS,
    VARIANCE_RATIO,
    ModelConfig,
    SquaredErrorEnergy,
    check_levels,
)
from mmdgs.models.model import (
    CARD,
    CONFIG,
    HUB_FILES,
    SHIPPED,
    Model,
    from_hub,
    load,
    save,
    shipped,
)
from mmdgs.models.weights import INDEX, SHARDS, WEIGHTS, check_finite, load_weights, read_weights, remove_weights

__all__ = [
    "CARD",
    "CLASSES",
    "CONFIG",
    "DENOISERS",
    "HUB_FILES",
    "INDEX",
    "MEAN_STD",
    "PARAMS",
    "SHARDS",
    "SHIPPED",
    "VARIANCE_RATIO",
    "WEIGHTS",
    "Model",
    "ModelConfig",
    "SquaredErrorEnergy",
    "check_finite",
    "check_levels",
    "from_hub",
    "load",
    "load_weights",
    "read_weights",
    "remove_weights",
    "save",
    "shipped",
]

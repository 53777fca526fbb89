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
    SHIPPED,
    WEIGHTS,
    Model,
    check_finite,
    from_hub,
    load,
    load_weights,
    save,
    shipped,
)

__all__ = [
    "CARD",
    "CLASSES",
    "CONFIG",
    "DENOISERS",
    "MEAN_STD",
    "PARAMS",
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
    "save",
    "shipped",
]

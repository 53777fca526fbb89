"""What restoration asks of its inputs before any work: model, size, memory and noise."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.memory import memory_of
from mmdgs.models import Model
from mmdgs.models.memory import bytes_kept
from mmdgs.models.parts import PartedDenoiser, part_side
from mmdgs.moments import IsotropicMoments, Moments, SpectralMoments
from mmdgs.moments.contract import with_denoiser
from mmdgs.operators import ESTIMATE, Operator, estimated_noise, noise_variances
from mmdgs.operators.measurements import unit_noise
from mmdgs.sensors import ESTIMATE_POISSON, Sensor, estimated_sensor

FORWARD, WITH_PRODUCTS = 1.0, 4.5
"""Of memory, for one chain, times what one pass keeps (`models.memory`): without and with products
with the Jacobian, of which both networks that were measured took 0.4 to 0.8 and 1.9 to 4.1."""

PART = 0.5
"""Of memory, for one part of an image that does not fit whole."""


def sized_model(model: Model, y: Tensor, operator: Any) -> Model:
    """A model of any size for the images that an operator measures, or for those of y's size."""
    shape = None if isinstance(operator, Tensor) else getattr(operator, "shape", None)
    shape = getattr(operator, "img_size", None) if shape is None else shape
    if shape is None and None in model.shape:
        if isinstance(operator, Tensor) or y.ndim != 1 + len(model.shape):
            raise UsageError(
                f"{model.source} takes images of any size, and neither the operator nor "
                "measurements that are no images say theirs: give shape=(3, height, width)"
            )
        shape = y.shape[1:]
    if shape is not None and len(shape) == 3 and shape[0] == 1:
        model = model.grey()
    return model.sized(*shape[1:]) if model.any_size and shape is not None else model


def in_room(model: Model, moments: Moments) -> Moments:
    """The estimator for images with which not one chain would fit in memory: its denoiser goes over
    them part by part, with the same numbers. Where parts would be too small, they are refused.
    """
    if len(model.shape) != 3 or not model.any_size:
        return moments
    inner, memory = getattr(moments, "moments", moments), memory_of(model.device)
    fitted = isinstance(inner, IsotropicMoments | SpectralMoments)
    each = (FORWARD if fitted else WITH_PRODUCTS) * bytes_kept(model)
    needed = math.prod(model.shape[1:]) * each
    own = moments.denoiser
    if isinstance(own, PartedDenoiser):
        if own.shape == model.shape:
            return moments
        own = own.denoiser
    if needed <= memory:
        return with_denoiser(moments, own)
    if isinstance(own, Model) and (side := part_side(own, PART * memory / each)) is not None:
        return with_denoiser(moments, PartedDenoiser(own, *model.shape[1:], side))
    sizes = f"{model.shape[2]} x {model.shape[1]} pixels need about {needed / 1e9:.0f} GB"
    advice = "restore parts of it, or make it smaller"
    less = "" if fitted else ", or use --quality good (quality='good')"
    raise UsageError(f"{sizes} of memory, and there are {memory / 1e9:.0f}: {advice}{less}")


def check_model(model: Model) -> None:
    """Refuse a model of one level."""
    model.require_denoiser()
    if len(model.levels) < 2:
        raise UsageError(
            f"restoration goes down many noise levels, and this model was trained at "
            f"{model.levels[0]} alone; use a model of many levels, such as cifar10 or celeba"
        )


def noise_of(
    noise: float | Tensor | Sensor | str, y: Tensor, operator: Operator
) -> Tensor | Sensor:
    """The standard deviation of the noise, of as many dimensions as y, or the sensor that has it;
    for values in [0, 1].
    """
    if isinstance(noise, Sensor):
        unit_noise(noise.variances(y).sqrt().amax(), operator, y)
        return noise
    if not isinstance(noise, str):
        return unit_noise(noise, operator, y)
    if noise == ESTIMATE_POISSON:
        return estimated_sensor(y, operator)
    if noise != ESTIMATE:
        raise UsageError(
            "the noise must be a standard deviation (a number, one a row, or one a measurement, in "
            f"y's shape), a mmdgs.sensors.Sensor, {ESTIMATE!r} or {ESTIMATE_POISSON!r}, got "
            f"{noise!r}; Poisson noise, y = counts / peak, is Sensor(gain=1 / peak)"
        )
    return noise_variances(estimated_noise(y, operator), operator, y).sqrt()

"""Operators A of measurements y = A x + noise: masks, blurs, any linear function, and others."""

from mmdgs.operators.contract import (
    Composed,
    FunctionOperator,
    LinearOperator,
    Matrix,
    Operator,
    as_operator,
    linear,
)
from mmdgs.operators.images import Blur, Box, Crop, Downsample, Grayscale, Mask
from mmdgs.operators.measurements import ESTIMATE, estimated_noise, measured, noise_variances
from mmdgs.operators.nonlinear import Nonlinear, compose, nonlinear
from mmdgs.operators.scanners import Coils, Fourier, Radon

# fmt: off
__all__ = [
    "ESTIMATE", "Blur", "Box", "Coils", "Composed", "Crop", "Downsample", "Fourier",
    "FunctionOperator", "Grayscale", "LinearOperator", "Mask", "Matrix", "Nonlinear",
    "Operator", "Radon", "as_operator",
    "compose", "estimated_noise", "linear", "measured", "noise_variances", "nonlinear",
]
# fmt: on

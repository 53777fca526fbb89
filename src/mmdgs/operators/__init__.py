"""Linear operators A of measurements y = A x + noise: masks, blurs, any linear function."""

from mmdgs.operators.contract import (
    Composed,
    FunctionOperator,
    LinearOperator,
    Matrix,
    Operator,
    as_operator,
    compose,
    linear,
)
from mmdgs.operators.images import Blur, Box, Crop, Downsample, Fourier, Grayscale, Mask
from mmdgs.operators.measurements import ESTIMATE, estimated_noise, measured, noise_variances

# fmt: off
__all__ = [
    "ESTIMATE", "Blur", "Box", "Composed", "Crop", "Downsample", "Fourier", "FunctionOperator",
    "Grayscale", "LinearOperator", "Mask", "Matrix", "Operator", "as_operator", "compose",
    "estimated_noise", "linear", "measured", "noise_variances",
]
# fmt: on

"""Operators of measurements: each against its dense matrix, what it says of its structure, and what
is refused.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.linalg.spectral import to_cosines
from mmdgs.operators import (
    Blur,
    Box,
    Coils,
    Crop,
    Downsample,
    Fourier,
    Grayscale,
    Mask,
    Matrix,
    Operator,
    Radon,
    as_operator,
    compose,
    estimated_noise,
    linear,
    measured,
    noise_variances,
)

SHAPE = (3, 4, 6)
D = math.prod(SHAPE)
VOLUME, COMPLEX = (2, 2, 4, 6), (2, 4, 6)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def maps() -> Tensor:
    return torch.randn(3, 4, 6, generator=seeded(2), dtype=torch.complex128)


def operators() -> dict[str, Operator]:
    return {
        "mask": Mask.random(SHAPE, 0.5, generator=seeded()),
        "box": Box(SHAPE, 2),
        "crop": Crop(SHAPE, (2, 3), top=1),
        "downsample": Downsample(SHAPE, 2),
        "gray": Grayscale(SHAPE),
        "gaussian": Blur.gaussian(SHAPE, 0.8),
        "wide": Blur.gaussian(SHAPE, 2.0),  # wider than the image: several reflections
        "motion": Blur.motion(SHAPE, 3, 30),
        "lopsided": Blur(SHAPE, torch.rand(2, 3, generator=seeded())),
        "fourier": Fourier(SHAPE, torch.rand(4, 6, generator=seeded()) < 0.5),
        "matrix": Matrix(torch.randn(5, D, generator=seeded(), dtype=torch.float64), SHAPE),
        "blurred and smaller": compose(Blur.gaussian(SHAPE, 0.8), Downsample(SHAPE, 2)),
        "blurred twice": compose(Blur.gaussian(SHAPE, 0.8), Blur.gaussian(SHAPE, 0.5)),
        "smaller and grey": compose(Downsample(SHAPE, 2), Grayscale((3, 2, 3))),
        "function": linear(lambda x: x.cumsum(-1), SHAPE),
        "coils": Coils(maps(), torch.rand(4, 6, generator=seeded()) < 0.5),
        "coils, lines, real": Coils(maps(), torch.arange(6) % 2 == 0, real=True),
        "projections": Radon(SHAPE, (0.0, 30.0, 90.0, 211.0)),
        "missing voxels": Mask.random(VOLUME, 0.5, generator=seeded()),
        "box in a volume": Box(VOLUME, (1, 2, 3), front=0),
        "part of a volume": Crop(VOLUME, (1, 2, 3), front=1, left=2),
        "thick slices": Downsample(VOLUME, (2, 1, 1)),
        "smaller volume": Downsample(VOLUME, 2),
        "grey volume": Grayscale(VOLUME, (0.3, 0.7)),
        "gaussian in a volume": Blur.gaussian(VOLUME, (0.0, 0.8, 0.6)),
        "motion in slices": Blur.motion(VOLUME, 3, 30),
        "lopsided volume": Blur(VOLUME, torch.rand(2, 3, 2, generator=seeded())),
        "lopsided in four dimensions": Blur(
            (1, 3, 4, 3, 5), torch.rand(2, 3, 2, 3, generator=seeded())
        ),
        "fourier of a volume": Fourier(VOLUME, torch.rand(4, 6, generator=seeded()) < 0.5),
        "projections of slices": Radon(VOLUME, (0.0, 45.0)),
        "coils and volumes": Coils(maps().reshape(3, 1, 4, 6).expand(3, 2, 4, 6)),
    }


OPERATORS = operators()


def matrix_of(operator: Operator) -> Tensor:
    """A (m, d), column by column."""
    return operator(basis_of(operator.shape)).flatten(1).mT


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
def test_the_adjoint_is_the_transpose(operator: Operator) -> None:
    dense = matrix_of(operator)
    transposed = operator.adjoint(basis_of(operator.out_shape)).flatten(1)
    torch.testing.assert_close(transposed, dense, rtol=1e-12, atol=1e-12)


def basis_of(shape: torch.Size) -> Tensor:
    """The unit images of a shape, (numbers, *shape)."""
    return torch.eye(math.prod(shape), dtype=torch.float64).reshape(-1, *shape)


def in_cosines(operator: Operator, dense: Tensor) -> Tensor:
    """A (m, d) between the cosines of x and those of y."""
    rows, columns = (
        to_cosines(basis_of(shape)).flatten(1) for shape in (operator.shape, operator.out_shape)
    )
    return columns.mT @ dense @ rows


def assert_diagonal(a: Tensor, v: Tensor, diagonal: Tensor) -> None:
    """A diag(v) A' is diagonal, and has this diagonal."""
    whole = torch.einsum("if,bf,jf->bij", a, v.flatten(1), a)
    expected = torch.diag_embed(diagonal.flatten(1))
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS.keys())
def test_what_an_operator_says_of_its_structure_is_true(operator: Operator) -> None:
    dense = matrix_of(operator)
    v = torch.rand(2, *operator.shape, generator=seeded(1), dtype=torch.float64) + 0.1
    if (squares := operator.squares(v)) is not None:
        assert_diagonal(dense, v, squares)
    if (gains := operator.cosine_gains(v)) is not None:
        expected = torch.diag(gains.flatten())
        torch.testing.assert_close(in_cosines(operator, dense), expected, rtol=1e-12, atol=1e-12)
        power = operator.cosine_power(v)
        torch.testing.assert_close(power, gains.square(), rtol=1e-10, atol=1e-10)
    if (folded := operator.cosine_squares(v)) is not None:
        assert_diagonal(in_cosines(operator, dense), v, folded)


@pytest.mark.parametrize(("size", "factor"), [(6, 3), (8, 4), (8, 8), (5, 1)])
def test_means_over_blocks_fold_cosines(size: int, factor: int) -> None:
    """Of odd and even factors, down to one mean: S of super-resolution is diagonal in the cosines
    of y.
    """
    operator = Downsample((1, size, 2 * size), factor)
    v = torch.rand(2, 1, size, 2 * size, generator=seeded(1), dtype=torch.float64)
    assert_diagonal(in_cosines(operator, matrix_of(operator)), v, operator.cosine_squares(v))


def test_a_blur_is_the_convolution() -> None:
    kernel = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.5, 0.3], [0.0, 0.2, 0.0]])
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 2, 2] = 1
    torch.testing.assert_close(Blur((1, 5, 5), kernel)(x)[0, 0, 1:4, 1:4], kernel)
    torch.testing.assert_close(Blur.motion(SHAPE, 5).kernel.tensor.sum().item(), 1.0)
    ones = torch.ones(1, *SHAPE)
    torch.testing.assert_close(Blur.gaussian(SHAPE, 2.0)(ones), ones)


def test_coils_are_the_fourier_transform_of_complex_images_times_maps() -> None:
    keep = torch.arange(6) % 3 == 0
    z = torch.randn(2, 4, 6, generator=seeded(3), dtype=torch.complex128)
    seen = torch.fft.fft2(maps() * z[:, None], norm="ortho") * keep
    y = torch.view_as_complex(Coils(maps(), keep)(torch.stack([z.real, z.imag], 1)))
    torch.testing.assert_close(y, seen)
    real = Coils(maps(), keep, real=True)
    y = torch.view_as_complex(real(z.real[:, None]))
    torch.testing.assert_close(y, torch.fft.fft2(maps() * z.real[:, None], norm="ortho") * keep)


def test_projections_are_sums_over_strips() -> None:
    """Of all of x at every angle; columns at 0 degrees, rows at 90, and what a pixel leaves at 45.

    A pixel's shadow at 45 degrees is a triangle of half width sqrt(1 / 2): the strip around its
    centre holds 1 - 2 (sqrt(1 / 2) - 1 / 2)^2 of it.
    """
    x = torch.rand(1, 3, 4, 6, generator=seeded(), dtype=torch.float64)
    y = Radon(SHAPE, (0.0, 90.0, 17.0))(x)
    torch.testing.assert_close(y.sum(-1), x.sum((-2, -1))[..., None].expand(1, 3, 3))
    torch.testing.assert_close(y[:, :, 0, 1:7], x.sum(-2), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(y[:, :, 1, 2:6], x.sum(-1), rtol=1e-6, atol=1e-6)
    pixel = torch.zeros(1, 1, 3, 3, dtype=torch.float64)
    pixel[..., 1, 1] = 1
    shadow = Radon((1, 3, 3), (45.0,))(pixel).flatten()
    inner = 1 - 2 * (math.sqrt(0.5) - 0.5) ** 2
    expected = torch.tensor([0, (1 - inner) / 2, inner, (1 - inner) / 2, 0], dtype=torch.float64)
    torch.testing.assert_close(shadow, expected)


def test_an_object_with_a_and_its_adjoint_is_taken() -> None:
    physics = SimpleNamespace(
        A=lambda x: x[..., ::2],
        A_adjoint=lambda y: torch.zeros(len(y), 6).index_copy(1, torch.tensor([0, 2, 4]), y),
    )
    operator = as_operator(physics, (6,))
    assert operator.out_shape == (3,)
    assert operator.adjoint(torch.ones(1, 3)).tolist() == [[1, 0, 1, 0, 1, 0]]
    with pytest.raises(ValueError, match="shape of x"):
        as_operator(physics)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: linear(lambda x: x + 1, (4,)), "not linear"),
        (lambda: linear(lambda x: x - x.mean(0), (4,)), "mixes the rows"),
        (lambda: linear(lambda x: x, (4,), adjoint=lambda y: 2 * y), "is wrong"),
        (lambda: linear(lambda x: x @ torch.ones(3, 2), (4,)), "cannot be applied"),
        (lambda: linear(lambda x: x / 0, (4,)), "not finite"),
        (lambda: Mask(torch.zeros(4, 6)), "keeps nothing"),
        (lambda: Mask(torch.full((4, 6), 0.5)), "0 and 1 alone"),
        (lambda: Crop(SHAPE, 2, left=5), "a crop of 2 x 2 does not fit"),
        (lambda: Downsample(SHAPE, 3), "4 and 6, got 3"),
        (lambda: Matrix(torch.ones(2, 5), SHAPE), "5 columns does not fit"),
        (lambda: compose(Downsample(SHAPE, 2), Box(SHAPE, 2)), "cannot follow"),
        (lambda: Box(SHAPE, 2)(torch.ones(1, 3, 4, 4)), r"got \(1, 3, 4, 4\)"),
        (lambda: Blur(VOLUME, torch.ones(3, 3)), "3 dimensions"),
        (lambda: Downsample(VOLUME, (2, 3, 1)), "2 and 4 and 6"),
        (lambda: Crop(VOLUME, (1, 9, 1)), "a crop of 1 x 9 x 1 does not fit into images of 2 x 4"),
        (lambda: Coils(torch.ones(3, 4, 6)), "complex tensor"),
        (lambda: Coils(maps(), torch.ones(4)), r"\(4,\) does not fit \(4, 6\)"),
        (lambda: Radon(SHAPE, ()), "one angle or more"),
    ],
)
def test_what_is_refused(make: object, says: str) -> None:
    with pytest.raises((ValueError, TypeError), match=says):
        make()  # type: ignore[operator]


def test_measurements_are_checked() -> None:
    box = Box(SHAPE, 2)
    y = torch.zeros(2, *SHAPE)
    y[0, 0, 2, 3] = math.nan  # inside the box: it says nothing
    assert measured(y, box)[0, 0, 2, 3] == 0
    y[1, 0, 0, 0] = math.inf
    with pytest.raises(UsageError, match="not finite in row 1"):
        measured(y, box)
    with pytest.raises(UsageError, match=r"shape \(2, 3, 4\)"):
        measured(torch.zeros(2, 3, 4), box)
    with pytest.raises(UsageError, match=r"torch\.uint8"):
        measured(torch.zeros(2, *SHAPE, dtype=torch.uint8), box)


def test_noise_is_a_number_one_a_row_or_one_a_measurement() -> None:
    operator, like = Downsample(SHAPE, 2), torch.zeros(2, 3, 2, 3)
    assert noise_variances(0.5, operator, like).shape == (1, 1, 1, 1)
    by_row = noise_variances(torch.tensor([0.5, 1.0]), operator, like)
    assert by_row.flatten().tolist() == [0.25, 1.0]
    assert noise_variances(torch.ones(3, 2, 3), operator, like).shape == (1, 3, 2, 3)
    for bad in (0.0, -1.0, math.nan, math.inf):
        with pytest.raises(UsageError, match="must be positive and finite"):
            noise_variances(bad, operator, like)
    with pytest.raises(UsageError, match=r"got shape \(5,\)"):
        noise_variances(torch.ones(5), operator, like)


def test_the_noise_of_small_images_is_estimated_from_blocks() -> None:
    """They have too few patches. The mean over images, since a median of 81 numbers is rough."""
    y = 0.5 + 0.1 * torch.randn(400, 1, 10, 10, generator=seeded())
    noise = estimated_noise(y, Mask(torch.ones(1, 10, 10)))
    assert noise.mean().item() == pytest.approx(0.1, rel=0.03)
    assert noise.std().item() < 0.02


def test_noise_is_estimated_on_smooth_images() -> None:
    shape = (1, 64, 64)
    line = torch.linspace(0, 1, 64)
    smooth = (line[:, None] * line).expand(2, *shape)
    noise = torch.tensor([0.02, 0.1])
    y = smooth + noise[:, None, None, None] * torch.randn(2, *shape, generator=seeded())
    # The median of 3,969 absolute normals has a relative standard error of about 2%.
    torch.testing.assert_close(estimated_noise(y, Box(shape, 16)), noise, rtol=0.08, atol=0)
    with pytest.raises(UsageError, match="2 x 2 pixels"):
        estimated_noise(y, Mask.random(shape, 0.95, generator=seeded()))
    with pytest.raises(UsageError, match="from images"):
        estimated_noise(torch.ones(1, 5), Matrix(torch.ones(5, 4096), shape))
    with pytest.raises(UsageError, match="no noise"):
        estimated_noise(torch.ones(1, *shape), Box(shape, 16))

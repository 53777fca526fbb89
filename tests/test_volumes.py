"""Volumes against exact Gaussian fields; models of other shapes made of models of images."""

from __future__ import annotations

import math

import pytest
import torch
from oracles import assert_moments, dense_given, numbers
from torch import Tensor
from toy_models import InDouble, Weights, of_levels

import mmdgs
from mmdgs import NoiseLevel, schedules
from mmdgs.errors import UsageError
from mmdgs.linalg.spectral import Spectral, from_cosines, to_cosines
from mmdgs.models import Model, complex_model, grey_model, volume_model
from mmdgs.moments import DiagonalMoments, SpectralMoments
from mmdgs.moments.probes import Lattice, pixel_classes
from mmdgs.noise import LevelTable
from mmdgs.operators import Blur, Coils, Downsample, Mask, Operator
from mmdgs.posterior import Gaussian
from mmdgs.randomness import seeded

VOLUME = (1, 4, 5, 2)
LEVELS = schedules.edm(6, 20.0, 0.01)
CENTRE = 0.5


def spectrum(*sides: int) -> Tensor:
    """A smooth function of frequency, other along each side: (1, *sides)."""
    lines = (torch.arange(n).double() / n for n in sides)
    grid = torch.meshgrid(*lines, indexing="ij")
    distance = sum((weight * side) ** 2 for weight, side in zip((6, 4, 3), grid, strict=True))
    return (0.2 / (1 + distance) ** 2)[None]


def field_denoiser(x_t: Tensor, level: NoiseLevel) -> Tensor:
    """E[x | x_t] of the stationary Gaussian field around CENTRE with this spectrum."""
    v = spectrum(*x_t.shape[2:])
    gain = level.alpha * v / (level.alpha**2 * v + level.sigma**2)
    return CENTRE + from_cosines(gain * to_cosines(x_t - level.alpha * CENTRE))


def field_model(shape: tuple[int | None, ...] = VOLUME) -> Model:
    return of_levels(LEVELS, InDouble(field_denoiser), (0.0, 1.0), shape)  # type: ignore[arg-type]


def exact_moments(model: Model) -> SpectralMoments:
    v = spectrum(*VOLUME[1:])
    table = {level: v * level.variance / (v + level.variance) for level in LEVELS}
    return SpectralMoments(model, LevelTable.of(table))


@pytest.mark.parametrize(
    "operator",
    [
        Blur.gaussian(VOLUME, (0.5, 1.0, 0.0)),
        Downsample(VOLUME, (2, 1, 1)),
        Mask.random(VOLUME, 0.5, generator=seeded(0)),
        Coils(torch.randn(2, *VOLUME[1:], generator=seeded(1), dtype=torch.complex64),
              torch.arange(2) > 0, real=True),
    ],
    ids=["blur", "thick slices", "missing voxels", "coils"],
)  # fmt: skip
def test_draws_of_a_volume_are_those_of_the_exact_posterior(operator: Operator) -> None:
    model, draws, noise = field_model(), 1_500, 0.1
    y = operator(CENTRE + from_cosines(spectrum(*VOLUME[1:]).sqrt() * numbers(1, *VOLUME)))
    restored = mmdgs.restore(
        exact_moments(model), y.float(), operator, noise=noise, chains="bridge", levels=LEVELS,
        draws=draws, progress=None,
    )  # fmt: skip
    prior = Spectral(spectrum(*VOLUME[1:])[None]).dense()
    centre = torch.full((1, *VOLUME), CENTRE, dtype=torch.float64)
    mean, covariance = dense_given(centre, prior, operator, operator.known(y), noise)
    # 860 entries: six standard errors.
    assert_moments(restored.draws[:, 0].flatten(1).double(), mean.flatten(), covariance[0], 6.0)


def test_a_spectrum_is_fitted_to_volumes_and_serves_those_of_other_sides() -> None:
    """With frequencies half as wide apart every other one is as it was."""
    model, level = field_model((1, None, None, None)), NoiseLevel(0.5)
    sides = (8, 10, 6)
    v = spectrum(*sides)
    x = CENTRE + from_cosines(v.sqrt() * numbers(2_000, 1, *sides))
    fitted = SpectralMoments.fit(model, x.float(), [level], generator=seeded(0))
    exact = v * level.variance / (v + level.variance)
    # A variance from 2,000 normals has a relative standard error of 3%.
    torch.testing.assert_close(fitted.variances[level], exact, rtol=0.15, atol=0)
    known = SpectralMoments(model, LevelTable.of({level: exact}))
    wider = known(torch.zeros(1, 1, 16, 20, 12), level).cov
    v = spectrum(16, 20, 12)
    expected = v * level.variance / (v + level.variance)
    values = wider.variances.double()[..., ::2, ::2, ::2]
    torch.testing.assert_close(values[0], expected[..., ::2, ::2, ::2], rtol=1e-5, atol=0)


def test_a_volume_takes_the_operators_size() -> None:
    model = field_model((1, None, None, None))
    shape = (1, 6, 4, 5)
    assert model.sized(*shape[1:]).shape == shape
    blur = Blur.gaussian(shape, 0.8)
    y = torch.full((2, *shape), 0.5)
    restored = mmdgs.restore(
        model, y, blur, noise=0.1, covariance="krylov", steps=2, draws=2, progress=None
    )
    assert restored.draws.shape == (2, 2, *shape)
    with pytest.raises(UsageError, match=r"sides \(6, 4\)"):
        model.sized(6, 4)


@pytest.mark.parametrize("classes", [2, 5, 10, 27])
def test_classes_of_a_volume_are_sublattices_that_lie_apart(classes: int) -> None:
    """Two voxels of a class are nearly as far apart as m voxels to each allow: 0.8 m^(1 / 3)."""
    place = pixel_classes(classes, 1, 9, 9, 9)[0]
    at = (place == place[4, 4, 4]).nonzero() - 4
    squares = at.square().sum(1)
    assert squares[squares > 0].min() >= (0.8 * classes ** (1 / 3)) ** 2
    counts = place.flatten().bincount(minlength=classes)
    assert counts.min() > 0.6 * 729 / classes


def test_lattice_probes_find_the_diagonal_of_a_local_jacobian() -> None:
    """Of a blur that reaches one voxel: classes two voxels apart see no other one. It is filtered,
    and an even diagonal stays as it is.
    """
    shape = (1, 6, 6, 6)
    kernel = torch.zeros(3, 3, 3, dtype=torch.float64)
    kernel[1, 1, 1], kernel[1, 1, ::2], kernel[1, ::2, 1], kernel[::2, 1, 1] = 0.4, 0.1, 0.1, 0.1

    def blurred(x: Tensor) -> Tensor:
        wide = torch.nn.functional.pad(x, (1,) * 6, mode="circular")
        return torch.nn.functional.conv3d(wide, kernel[None, None])

    denoiser = mmdgs.clean_denoiser(blurred)
    x_t, level = numbers(2, *shape), NoiseLevel(0.5)
    plain = DiagonalMoments(denoiser, 8, design=Lattice(smooth=False))
    for moments in (plain, DiagonalMoments(denoiser, 8)):
        variances = moments(x_t, level, generator=seeded(0)).cov.diagonal()
        torch.testing.assert_close(variances, torch.full_like(x_t, 0.4 * 0.25))


def colours(shape: tuple[int | None, ...]) -> Model:
    """Independent numbers N(CENTRE, 0.2^2) of colour images."""

    def denoiser(x_t: Tensor, level: NoiseLevel) -> Tensor:
        gain = level.alpha * 0.04 / (level.alpha**2 * 0.04 + level.sigma**2)
        return CENTRE + gain * (x_t - level.alpha * CENTRE)

    return Model(denoiser, Weights(), LEVELS, shape)


@pytest.mark.parametrize("alpha", [1.0, 0.7])
def test_grey_and_complex_models_are_exact_where_colours_and_parts_are_independent(
    alpha: float,
) -> None:
    """The mean of three is N(CENTRE, 0.04 / 3), and a part 2 u - 1 of it N(0, 4 * 0.04 / 3)."""
    level, x_t = NoiseLevel(sigma=0.4, alpha=alpha), numbers(2, 2, 4, 4)
    model = colours((3, None, None))
    for made, variance, centre in (
        (grey_model(model), 0.04 / 3, CENTRE),
        (complex_model(model), 0.16 / 3, 0.0),
    ):
        gain = alpha * variance / (alpha**2 * variance + 0.16)
        expected = centre + gain * (x_t - alpha * centre)
        given = x_t[:, : made.shape[0]]
        torch.testing.assert_close(made(given, level), expected[:, : made.shape[0]])
        assert made.digest != model.digest  # no fit of the one serves the other
        widest = (math.sqrt(1 / 3) if made.shape[0] == 1 else math.sqrt(4 / 3)) * 20.0
        assert made.levels[0].sigma == pytest.approx(widest)


def test_a_volume_is_the_mean_of_its_slices_each_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmdgs.models.shapes.AT_ONCE", 40)
    image = Model(lambda x_t, level: x_t.cumsum(-1), Weights(), LEVELS, (2, None, None))
    x = numbers(2, 2, 3, 4, 5)
    # Slices along depth and height are summed along width, those along width along height.
    expected = (2 * x.cumsum(4) + x.cumsum(3)) / 3
    model = volume_model(image)
    assert model.shape == (2, None, None, None)
    torch.testing.assert_close(model(x, NoiseLevel(0.5)), expected)
    with pytest.raises(UsageError, match="slices differ"):
        volume_model(colours((3, 4, 5)))


def test_the_spectrum_of_a_grey_and_of_a_complex_model_is_that_of_the_images() -> None:
    """Of independent colours: the variance of a mean of three given x_t, and four times that."""
    model, level = colours((3, None, None)), NoiseLevel(0.4)
    spectrum = 0.04 * level.variance / (0.04 + level.variance)
    table = LevelTable.of({level: torch.full((3, 4, 4), spectrum)})
    model.inherited_fit = {"spectral": table}.get
    for made, factor in ((grey_model(model), 1 / 3), (complex_model(model), 4 / 3)):
        scaled = NoiseLevel(0.4 * math.sqrt(factor))
        x_t = torch.zeros(1, *made.shape[:1], 4, 4)
        variances = made.posterior("spectral")(x_t, scaled).cov.diagonal()
        torch.testing.assert_close(variances, torch.full_like(x_t, factor * spectrum))
    assert volume_model(model).inherited_fit("spectral") is None


def test_a_complex_image_is_conditioned_on_its_k_space() -> None:
    """Two channels with different spectra, by conjugate gradients and by a factor."""
    shape = (2, 4, 5)
    maps = torch.randn(3, 4, 5, generator=seeded(1), dtype=torch.complex128)
    mean, v = numbers(2, *shape), numbers(1, *shape, seed=1).exp()
    for keep in (torch.arange(5) > 2, None):
        coils = Coils(maps, keep)
        y = coils(numbers(2, *shape, seed=2))
        for cov in (Spectral(v), Spectral(v * torch.ones(2, 1, 1, 1).double())):
            q = Gaussian(mean, Spectral(cov.variances.expand(2, -1, -1, -1))).given(y, coils, 0.3)
            expected, matrix = dense_given(mean, cov.dense().expand(2, -1, -1), coils, y, 0.3)
            torch.testing.assert_close(q.mean, expected)
            torch.testing.assert_close(q.cov.dense().expand(2, -1, -1), matrix)

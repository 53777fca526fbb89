"""The spectral covariance: its actions against the matrix itself, and its fit where posteriors are
known exactly.
"""

from __future__ import annotations

import math

import pytest
import torch
from oracles import numbers
from scipy import fft
from torch import Tensor

import mmdgs
from mmdgs import samplers, schedules
from mmdgs.denoisers import Denoiser
from mmdgs.linalg.spectral import Spectral, cosines, from_cosines, resampled, to_cosines
from mmdgs.moments import fitted as fitted_moments
from mmdgs.moments.fitted import SpectralMoments
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.randomness import Streams

EXACT = {"rtol": 1e-9, "atol": 1e-10}  # in float64
SHAPES = [(5,), (2, 3), (3, 4, 5)]
LEVEL = NoiseLevel(sigma=0.5)


# --- the basis


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_coefficients_are_scipys(shape: tuple[int, ...]) -> None:
    x = numbers(4, *shape)
    expected = fft.dctn(x.numpy(), axes=tuple(range(1, x.ndim)), norm="ortho")
    torch.testing.assert_close(to_cosines(x), torch.from_numpy(expected), **EXACT)
    torch.testing.assert_close(from_cosines(to_cosines(x)), x, **EXACT)


def test_the_basis_of_colours_is_grey_and_two_contrasts() -> None:
    grey = to_cosines(torch.ones(1, 3, 1, 1, dtype=torch.float64)).flatten()
    torch.testing.assert_close(
        grey, torch.tensor([math.sqrt(3), 0, 0], dtype=torch.float64), **EXACT
    )


# --- the estimator


SHAPE = (2, 4, 4)
PRIOR = 1 / torch.arange(1.0, 33.0, dtype=torch.float64).reshape(SHAPE)  # of the coefficients


def draws(count: int, seed: int = 0) -> Tensor:
    """Images whose coefficients are independent, with variances PRIOR."""
    return from_cosines(PRIOR.sqrt() * numbers(count, *SHAPE, seed=seed))


def wiener(x_t: Tensor, level: NoiseLevel, /) -> Tensor:
    """The exact denoiser of such images."""
    gain = level.alpha * PRIOR / (level.alpha**2 * PRIOR + level.sigma**2)
    return from_cosines(gain * to_cosines(x_t))


def posterior(level: NoiseLevel) -> Tensor:
    """The exact variances of the coefficients given x_t."""
    return PRIOR * level.sigma**2 / (level.alpha**2 * PRIOR + level.sigma**2)


def fitted(levels: list[NoiseLevel], count: int = 20_000) -> SpectralMoments:
    return SpectralMoments.fit(wiener, draws(count), levels, generator=Streams(1, count))


@pytest.mark.parametrize(
    "level", [NoiseLevel(sigma=0.3), NoiseLevel(alpha=0.6, sigma=0.8)], ids=str
)
def test_the_fit_is_the_posteriors_spectrum(level: NoiseLevel) -> None:
    moments = fitted([level])
    x_t = draws(3, seed=5)
    q = moments(x_t, level)
    torch.testing.assert_close(q.mean, wiener(x_t, level), **EXACT)
    torch.testing.assert_close(q.cov.variances[0], posterior(level), rtol=0.06, atol=0)
    exact = Spectral(posterior(level)[None]).dense()[0]
    assert (q.cov.dense()[0] - exact).norm() < 0.03 * exact.norm()


def test_between_levels_logarithms_are_interpolated_and_beyond_them_kept() -> None:
    moments = SpectralMoments(
        lambda x_t, level: x_t, LevelTable([0.1, 1.0, 10.0], [[1e-2], [1.0], [4.0]])
    )
    for ratio, expected in ((0.1**0.5, 0.1), (10**0.5, 2.0), (10, 4.0), (0.05, 1e-2), (50, 4.0)):
        for level in (NoiseLevel(sigma=ratio), NoiseLevel(sigma=0.5 * ratio, alpha=0.5)):
            assert moments(numbers(1, 1), level).cov.variances.item() == pytest.approx(expected)


def test_the_floor_is_the_levels() -> None:
    moments = SpectralMoments(wiener, LevelTable([1.0], PRIOR[None] * 1e-12), floor=1e-3)
    q = moments(draws(2), LEVEL)
    assert q.cov.variances.min() == pytest.approx(1e-3 * LEVEL.variance)


@pytest.mark.parametrize("levels", [4, 7])
def test_ancestral_sampling_is_exact_in_any_number_of_steps(levels: int) -> None:
    # Where a covariance that is diagonal in pixels is not: its samples have lost most of the smooth
    # contrast.
    path = schedules.geometric(levels, 20, 0.01)
    count = 4_000  # a variance of so many is within 10% (4.5 standard deviations)

    def power(moments: mmdgs.Moments) -> Tensor:
        plan = samplers.ancestral_plan(moments, path)
        streams = Streams(3, count)
        start = plan.noise(SHAPE, count, generator=streams).double()
        return to_cosines(samplers.run(plan, start, seed=4).x).square().mean(0)

    spectral = power(fitted(list(path)))
    torch.testing.assert_close(spectral, PRIOR, rtol=0.12, atol=2e-3)
    fit = mmdgs.IsotropicMoments.fit(wiener, draws(4_000), path, generator=Streams(1, 4_000))
    assert power(fit).flatten()[0] < 0.8 * PRIOR.flatten()[0]


def test_a_gibbs_chain_keeps_its_law() -> None:
    count = 4_000  # a variance of so many is within 10% (4.5 standard deviations)
    x = mmdgs.gibbs_chain(fitted([LEVEL]), draws(count, seed=9), LEVEL, steps=3, seed=0)[-1]
    torch.testing.assert_close(to_cosines(x).square().mean(0), PRIOR, rtol=0.12, atol=2e-3)


# --- images of other sizes than those of the fit

RHO = 0.9  # of neighbours, in a field with covariance RHO^(|i - j| + |k - l|) of pixels apart


def posterior_in_cosines(sides: tuple[int, int]) -> Tensor:
    """The exact posterior covariance of the field's coefficients, given the field with noise."""
    places = [torch.arange(n, dtype=torch.float64) for n in sides]
    prior = torch.kron(*(RHO ** (x[:, None] - x).abs() for x in places))
    noisy = prior + LEVEL.variance * torch.eye(len(prior), dtype=torch.float64)
    basis = torch.kron(*(cosines(n, torch.float64, torch.device("cpu")) for n in sides))
    return basis @ (LEVEL.variance * torch.linalg.solve(noisy, prior)) @ basis.mT


def divergence(variances: Tensor, exact: Tensor) -> float:
    """Of the Gaussian with these variances from the exact one, in nats a number."""
    nats = (exact.diagonal() / variances).sum() - len(exact)
    nats += variances.log().sum() - torch.linalg.slogdet(exact)[1]
    return 0.5 * nats.item() / len(exact)


@pytest.mark.parametrize("sides", [(20, 20), (12, 40), (48, 16), (9, 15)], ids=str)
def test_one_fit_serves_a_stationary_field_at_every_size(sides: tuple[int, int]) -> None:
    """The fit at 24 x 24 is as good as that at the size itself: a spectrum at any size is off by
    what is not diagonal in cosines, and that of the fit by O(1 / 24) at the lowest frequencies.
    """
    fit = posterior_in_cosines((24, 24)).diagonal().reshape(1, 1, 24, 24)
    moments = SpectralMoments(lambda x_t, level: x_t, LevelTable([LEVEL.ratio], fit))
    q = moments(numbers(2, 1, *sides), LEVEL)
    exact = posterior_in_cosines(sides)
    own, found = exact.diagonal(), q.cov.variances[0].flatten()
    assert divergence(found, exact) < divergence(own, exact) + 1e-3
    assert divergence(own.mean().expand_as(own), exact) > 0.4  # one variance for all is far
    assert (found / own).log().abs().mean() < 0.04


@pytest.mark.parametrize("sides", [(8, 8), (5, 16), (3, 7)], ids=str)
def test_logarithms_that_are_linear_in_frequency_are_found_exactly(sides: tuple[int, int]) -> None:
    def spectrum(height: int, width: int) -> Tensor:
        f, g = torch.arange(height).double() / height, torch.arange(width).double() / width
        inner = f.clamp(max=7 / 8)[:, None], g.clamp(max=7 / 8)  # the highest of the fit
        return torch.stack([(-1 - 3 * inner[0] - 2 * inner[1]).exp(), (inner[0] - inner[1]).exp()])

    torch.testing.assert_close(resampled(spectrum(8, 8), sides), spectrum(*sides), **EXACT)


def test_sizes_that_came_before_are_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitted_moments, "KEPT_NUMBERS", 100)
    moments = SpectralMoments(lambda x_t, level: x_t, LevelTable([1.0], PRIOR[None]))
    for side in (4, 6, 7, 8):
        q = moments(numbers(1, 2, side, 5), LEVEL)
        torch.testing.assert_close(q.cov.variances[0], resampled(PRIOR, (side, 5)), **EXACT)
    assert len(moments._at) == 1


# --- bad input


@pytest.mark.parametrize(
    ("denoiser", "x", "message"),
    [
        (wiener, draws(1), "got 1"),
        (wiener, draws(3) * math.inf, "not finite"),
        (lambda x_t, level: x_t * math.nan, draws(3), "sigma=0.5"),
    ],
)
def test_what_cannot_be_fitted_on(denoiser: Denoiser, x: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpectralMoments.fit(denoiser, x, [LEVEL], generator=Streams(0, len(x)))


def test_a_variance_of_zero_and_images_of_other_colours() -> None:
    with pytest.raises(ValueError, match="positive"):
        SpectralMoments(wiener, LevelTable([1.0], [[0.0]]))
    with pytest.raises(ValueError, match=r"\(3, 2, 4, 4\), got \(3, 1, 4, 4\)"):
        fitted([LEVEL], 10)(numbers(3, 1, 4, 4), LEVEL)

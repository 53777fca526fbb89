"""Measurements y = f(x) + noise by tangents, against posteriors by quadrature."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from toy_models import InDouble, of_levels

import mmdgs
from mmdgs import NoiseLevel, schedules
from mmdgs.errors import UsageError
from mmdgs.linalg import Dense, Diagonal
from mmdgs.linalg.spectral import Spectral
from mmdgs.models import Model
from mmdgs.operators import Blur, Matrix, compose, linear, nonlinear
from mmdgs.posterior import Gaussian
from mmdgs.targets import GaussianMixture

SHAPE = (1, 2, 2)
MEANS = torch.tensor([0.3, 0.45, 0.6, 0.75], dtype=torch.float64)
TRUTH = torch.tensor([0.25, 0.5, 0.7, 0.7], dtype=torch.float64)
WIDTH = 0.12
"""Independent numbers N(MEANS, WIDTH^2)."""
LEVELS = schedules.edm(16, 20.0, 0.005)


def gamma(x: Tensor) -> Tensor:
    """A screen's response: values a little below 0 have a place too."""
    return x.sign() * x.abs() ** 2.2


def by_quadrature(f: Callable[[Tensor], Tensor], y: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """Means and standard deviations of the numbers given y, each by itself."""
    x = torch.linspace(-1, 2.5, 20_001, dtype=torch.float64)
    logs = -0.5 * ((x - MEANS[:, None]) / WIDTH) ** 2 - 0.5 * ((y[:, None] - f(x)) / noise) ** 2
    weights = logs.softmax(1)
    mean = (weights * x).sum(1)
    return mean, (weights * (x - mean[:, None]).square()).sum(1).sqrt()


def model(low: float, width: float) -> tuple[Model, mmdgs.DiagonalMoments]:
    covariance = (width * WIDTH) ** 2 * torch.eye(4, dtype=torch.float64)
    data = GaussianMixture([1.0], (low + width * MEANS)[None], covariance[None])
    made = of_levels(LEVELS, InDouble(data.denoiser()), (low, low + width), SHAPE)
    return made, mmdgs.DiagonalMoments(made, probes=None)


@pytest.mark.parametrize(
    ("chains", "interval", "width"),
    [("bridge", (0.0, 1.0), 0.12), ("multistep", (-1.0, 2.0), 0.17)],
)
def test_a_mild_curve_has_nearly_the_exact_posterior(
    chains: str, interval: tuple[float, float], width: float
) -> None:
    """A gamma curve of 2.2 with noise 0.05, of models of [0, 1] and [-1, 1]: docs/use/restore.md.

    Means within 0.25 standard deviations of the posterior and widths within 12%, which include
    twice the errors of 600 draws (0.04 and 3%); `multistep` alone is wider by 5% in so few levels.
    """
    _, moments = model(*interval)
    y = gamma(TRUTH)
    mean, std = by_quadrature(gamma, y, 0.05)
    restored = mmdgs.restore(
        moments, y.reshape(1, *SHAPE).float(), nonlinear(gamma, SHAPE), noise=0.05,
        levels=LEVELS, chains=chains, draws=600, progress=None,
    )  # fmt: skip
    assert ((restored.mean.flatten() - mean) / std).abs().max() < 0.25
    assert (restored.std.flatten() / std - 1).abs().max() < width
    prior = ((MEANS - mean) / std).abs().max()
    assert prior > 0.5  # y says something, and the prior's mean would fail
    assert 0.05 < restored.info["linearisation"].mean() < 0.15
    assert 0.7 < restored.info["misfit"].mean() < 1.1


def test_a_linear_function_is_conditioned_on_as_by_its_matrix() -> None:
    """In one step and in more, for every kind of covariance that tangents meet."""
    a = torch.randn(3, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean = torch.linspace(0, 1, 8, dtype=torch.float64).reshape(2, *SHAPE)
    y = torch.tensor([[0.3, 0.2, -0.4], [1.0, 0.1, 0.2]], dtype=torch.float64)
    root = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    variances = torch.rand(2, *SHAPE, generator=torch.Generator().manual_seed(2)).double() + 0.1

    def function(x: Tensor) -> Tensor:
        return x.flatten(1) @ a.mT.to(x)

    for cov in (
        Dense.from_matrix(root @ root.mT, torch.Size(SHAPE)),
        Diagonal(variances),
        Spectral(variances),
    ):
        expected = Gaussian(mean, cov).given(y, Matrix(a, SHAPE), 0.2)
        for steps in (1, 3):
            got = Gaussian(mean, cov).given(y, nonlinear(function, SHAPE, steps=steps), 0.2)
            torch.testing.assert_close(got.mean, expected.mean)
            torch.testing.assert_close(got.cov.dense(), expected.cov.dense())
            _, info = got.sample_with_info(generator=torch.Generator().manual_seed(0))
            assert info["linearisation"].max() < 1e-9


def test_gauss_newton_finds_the_most_likely_x() -> None:
    """Where the gradient of |x - m|^2 / v + |y - f(x)|^2 / tau^2 is zero."""
    f, tau = nonlinear(lambda x: x.exp(), SHAPE, steps=12), 0.1
    mean, v = MEANS.reshape(1, *SHAPE), torch.full((1, *SHAPE), 0.2, dtype=torch.float64)
    y = torch.full((1, *SHAPE), 2.0, dtype=torch.float64)
    x = Gaussian(mean, Diagonal(v)).given(y, f, tau).mean
    gradient = (x - mean) / v - x.exp() * (y - x.exp()) / tau**2
    assert gradient.abs().max() < 1e-6


def test_a_blur_behind_a_curve_is_one_function() -> None:
    blur, curve = Blur.gaussian(SHAPE, 0.5), nonlinear(gamma, SHAPE)
    camera = compose(blur, curve)
    x = torch.rand(2, *SHAPE, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(camera(x), gamma(blur(x)))
    with pytest.raises(UsageError, match="not linear and has no adjoint"):
        camera.adjoint(x)


def test_a_strong_curve_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """sin(10 x) with noise 0.2 turns back within the posterior's width."""
    made, moments = model(0.0, 1.0)
    y = torch.sin(10 * TRUTH).reshape(1, *SHAPE).float()
    operator = nonlinear(lambda x: torch.sin(10 * x), SHAPE)
    with caplog.at_level(logging.WARNING, "mmdgs"):
        restored = mmdgs.restore(
            moments, y, operator, noise=0.2, levels=LEVELS, draws=50, progress=None
        )
    assert restored.info["linearisation"].median() > 0.3
    assert "off its tangent" in caplog.text
    with pytest.raises(UsageError, match="particles need linear measurements"):
        mmdgs.restore(
            made, y, operator, noise=0.2, covariance=moments, chains="bridge", particles=2
        )


@pytest.mark.parametrize("step", [0.1, 0.4, 1.2])
def test_what_was_rounded_is_linear_with_noise_of_its_step(step: float) -> None:
    """Coefficients N(0, 0.4^2) rounded to steps, as JPEG does: the noise step / sqrt(12).

    Steps up to the width of the prior: mean square errors of the exact posterior by quadrature and
    of the Gaussian are equal, nearly. Three times as wide the Gaussian says 15% too little.
    """
    prior = 0.4
    x = torch.linspace(-6 * prior, 6 * prior, 200_001, dtype=torch.float64)
    weights = (-0.5 * (x / prior).square()).softmax(0)
    cell = (x / step).round()
    y, noise = cell * step, step / math.sqrt(12)
    mean = Gaussian(torch.zeros(1, 1).double(), Diagonal(torch.full((1, 1), prior**2).double()))
    coefficients = linear(lambda x: x, (1,))
    given = mean.given(torch.ones(1, 1).double(), coefficients, noise)
    gain, variance = given.mean.item(), given.cov.diagonal().item()
    own = (weights * (x - gain * y).square()).sum().item()
    places = (cell - cell.min()).long()
    mass = torch.zeros(int(places.max()) + 1).double().index_add(0, places, weights)
    centre = torch.zeros_like(mass).index_add(0, places, weights * x) / mass
    exact = (weights * (x - centre[places]).square()).sum().item()
    limits = (1.001, 0.001) if step <= prior else (1.02, 0.16)

    assert own / exact < limits[0]
    assert variance / own == pytest.approx(1, abs=limits[1])


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (lambda x: torch.fft.fft2(x).abs(), "phase retrieval"),
        (lambda x: x * x, r"x \* x\.abs\(\)"),
        (lambda x: (8 * x).round() / 8, r"step / sqrt\(12\)"),
        (lambda x: x**2.2, "not finite"),
        (lambda x: x - x.mean(0).exp(), "mixes the rows"),
    ],
)
def test_what_is_refused(function: Callable[[Tensor], Tensor], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        nonlinear(function, SHAPE)


def test_a_level_without_a_chain_has_the_same_tangents() -> None:
    """`GivenMoments` conditions p(x | x_t) too: at a sharp level the mean is that of x_t."""
    _, moments = model(0.0, 1.0)
    y = gamma(TRUTH).reshape(1, *SHAPE)
    given = mmdgs.moments.GivenMoments(moments, y, nonlinear(gamma, SHAPE), 0.05)
    x_t = (TRUTH + 0.001).reshape(1, *SHAPE)
    q = given(x_t, NoiseLevel(0.001))
    assert (q.mean - x_t).abs().max() < 1e-3

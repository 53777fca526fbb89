"""A network of one's own, wrapped in one line, in all that a model goes into."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mmdgs
from mmdgs.data.single import NamedImage
from mmdgs.operators import Box
from mmdgs.uncertainty.folder import posteriors_into
from mmdgs.uncertainty.image import PosteriorWork

SHAPE, SIGMA, SPREAD = (1, 8, 8), 0.3, 2 / 3
LEVELS = [
    mmdgs.NoiseLevel(alpha=(1 + s * s) ** -0.5, sigma=s * (1 + s * s) ** -0.5)
    for s in (8.0, 2.0, 0.8, 0.3, 0.1)
]
"""Variance preserving: alpha^2 + sigma^2 = 1."""
SETTINGS = mmdgs.PosteriorSettings(SIGMA, components=2, draws=2)
VARIANCE = 1 / (9 + 1 / SIGMA**2)
"""Of the posterior at SIGMA, in [0, 1] units."""


class Noise(nn.Module):
    """Predicts the noise of independent normal pixels in [-1, 1], a third of the width wide, at its
    levels alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))

    def forward(self, x_t: Tensor, level: mmdgs.NoiseLevel) -> Tensor:
        assert abs(level.alpha**2 + level.sigma**2 - 1) < 0.1  # alphas are interpolated
        return self.gain * level.sigma * x_t / (level.alpha**2 * SPREAD**2 + level.sigma**2)


def own() -> mmdgs.Denoiser:
    return mmdgs.noise_denoiser(Noise())


def images(n: int, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return 0.5 + torch.randn(n, *shape, generator=torch.Generator().manual_seed(0)) / 3


def noisy(shape: tuple[int, ...] = SHAPE) -> Tensor:
    x = images(1, shape)[0]
    return x + SIGMA * torch.randn(shape, generator=torch.Generator().manual_seed(1))


GIVEN = {"levels": LEVELS, "interval": (-1.0, 1.0)}


MODEL = mmdgs.Model(own(), levels=LEVELS, shape=SHAPE, interval=(-1.0, 1.0), source="mine")


def assert_spread(std: Tensor, expected: float) -> None:
    torch.testing.assert_close(std, torch.full_like(std, expected), rtol=1e-3, atol=0)


@pytest.mark.parametrize("shape", [SHAPE, (1, 8, 11)], ids=["own size", "tiles"])
def test_the_posterior_of_an_image(shape: tuple[int, ...]):
    seen = mmdgs.image_posterior(own(), noisy(shape), SETTINGS, shape=SHAPE, **GIVEN)
    assert (seen.tiles > 1) == (shape != SHAPE)
    mean = 0.5 + VARIANCE / SIGMA**2 * (noisy(shape) - 0.5)
    torch.testing.assert_close(seen.mean, mean, rtol=1e-4, atol=1e-5)
    assert_spread(seen.std, math.sqrt(VARIANCE))
    assert_spread(seen.variances, VARIANCE)


def test_simulated_noise_has_the_seed_and_the_size_that_were_asked_for():
    settings = mmdgs.PosteriorSettings(SIGMA, simulate=True, components=0, draws=0)
    clean = images(1, (1, 24, 24))[0]
    seen = [
        mmdgs.image_posterior(MODEL, clean, replace(settings, seed=seed)).noisy - clean
        for seed in (0, 0, 1)
    ]
    assert torch.equal(seen[0], seen[1])
    assert (seen[0] - seen[2]).abs().max() > SIGMA
    for noise in seen:
        assert abs(noise.std().item() / SIGMA - 1) < 4 / (2 * noise.numel()) ** 0.5


def test_levels_and_shape_may_be_left_out():
    denoiser = mmdgs.clean_denoiser(lambda x_t, level: 0.5 + (x_t - 0.5) / (1 + 9 * level.sigma**2))
    assert_spread(mmdgs.image_posterior(denoiser, noisy(), SETTINGS).std, math.sqrt(VARIANCE))


@pytest.mark.parametrize("kind", [mmdgs.DiagonalMoments, mmdgs.KrylovMoments])
def test_a_calibration_is_used(kind):
    """Images half as wide again as the network knows: their errors are larger, and calibrated
    posteriors wider.
    """
    level = mmdgs.NoiseLevel(2 * SIGMA)  # in [-1, 1]
    plain = kind(lambda x_t, level: MODEL(x_t, level))
    calibrated = mmdgs.calibrate(plain, 3 * images(40) - 1.5, [level], progress=None)
    seen = mmdgs.image_posterior(calibrated, noisy(), SETTINGS, interval=(-1.0, 1.0))
    q = calibrated(2 * noisy()[None] - 1, level, generator=mmdgs.randomness.Streams(0, 1))
    expected = q.cov.diagonal()[0].sqrt() / 2
    assert expected.mean() > 1.1 * math.sqrt(VARIANCE)
    torch.testing.assert_close(seen.std, expected, rtol=1e-3, atol=0)
    wide = kind is mmdgs.KrylovMoments  # which is used for components too
    assert (seen.variances > 1.2 * VARIANCE).all() == wide


def test_a_calibrated_estimator_of_a_model():
    table = mmdgs.noise.LevelTable.of({mmdgs.NoiseLevel(2 * SIGMA): [1e-6, 4.0, *[1.5] * 12]})
    calibrated = mmdgs.moments.CalibratedMoments(mmdgs.DiagonalMoments(MODEL), table)
    seen = mmdgs.image_posterior(calibrated, noisy((1, 9, 9)), SIGMA)
    assert_spread(seen.std, 2 * math.sqrt(VARIANCE))
    assert_spread((seen.high - seen.mean) / seen.std, 1.5 * 1.6449)


def test_restoration_is_that_of_the_model():
    operator, y = Box(SHAPE, 4), images(2)
    y = operator(y) + 0.1 * torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    asked = {"noise": 0.1, "draws": 3, "chains": "bridge", "progress": None}
    bare = mmdgs.restore(own(), y, operator, **asked, **GIVEN)
    known = mmdgs.restore(MODEL, y, operator, covariance="krylov", levels=LEVELS, **asked)
    torch.testing.assert_close(bare.draws, known.draws)
    fitted = mmdgs.SpectralMoments.fit(
        MODEL, 2 * images(50) - 1, LEVELS, generator=torch.Generator().manual_seed(2)
    )
    std = mmdgs.restore(fitted, y, operator, levels=LEVELS, **(asked | {"draws": 200})).std
    hidden = operator.adjoint(operator(torch.ones(1, *SHAPE)))[0] == 0
    assert std[:, hidden].mean().item() == pytest.approx(1 / 3, rel=0.1)  # the prior's
    assert std[:, ~hidden].mean().item() == pytest.approx((9 + 100) ** -0.5, rel=0.1)


def test_the_page_is_that_of_the_command(tmp_path: Path):
    image = NamedImage("picture", noisy())
    posteriors_into(tmp_path / "out", PosteriorWork(MODEL, [image], SETTINGS))
    seen = replace(mmdgs.image_posterior(MODEL, image.image, SETTINGS), name="picture")
    path = seen.save_page(tmp_path / "mine.html")
    assert path.read_bytes() == (tmp_path / "out" / "picture" / "page.html").read_bytes()
    assert "Model mine." in path.read_text()


def restore(model: object, operator: object = Box(SHAPE, 4), **settings: object) -> object:
    defaults = {"noise": 0.1, "draws": 1, "progress": None}
    return mmdgs.restore(model, images(1), operator, **(defaults | settings))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: restore(own()), "levels="),
        (lambda: restore(own(), object(), levels=LEVELS), "shape of one example"),
        (lambda: restore(MODEL, shape=SHAPE), "shape is for a denoiser"),
        (lambda: restore(MODEL, noise="poisson"), "Poisson"),
        (lambda: restore(mmdgs.KrylovMoments(MODEL), covariance="diagonal"), "KrylovMoments"),
        (lambda: mmdgs.image_posterior(MODEL, noisy(), 0.3, levels=LEVELS), "levels are for"),
        (lambda: mmdgs.image_posterior(own(), noisy(), 4.5, **GIVEN), "sigma from"),
    ],
)
def test_what_is_missing_or_too_much_is_named(call, message: str):
    with pytest.raises(mmdgs.UsageError, match=message):
        call()

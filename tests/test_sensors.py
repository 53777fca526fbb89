"""Noise maps, photons, clipped values and grey images, against posteriors known in closed form or
by quadrature.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from toy_models import InDouble

import mmdgs
from experiments.instruments import GridPrior, likelihoods, prior
from mmdgs import schedules
from mmdgs.errors import UsageError
from mmdgs.models import Model
from mmdgs.moments import FullMoments, SpectralMoments
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.operators import Mask
from mmdgs.randomness import Streams, seeded
from mmdgs.sensors import Sensor, estimated_sensor
from mmdgs.targets import GaussianMixture

LEVELS = schedules.edm(25, 10.0, 1e-3)


def identity(*shape: int) -> Mask:
    return Mask(torch.ones(shape))


def mixture(weights: list[float]) -> GaussianMixture:
    """In four numbers, as images of (1, 2, 2)."""
    means = torch.tensor([[0.2, 0.3, 0.6, 0.5], [0.8, 0.6, 0.3, 0.4]], dtype=torch.float64)
    return GaussianMixture(weights, means[: len(weights)], 0.1)


def test_a_map_of_deviations_is_exact_on_a_gaussian() -> None:
    """`restore` with the identity, and `image_posterior` by the same draws."""
    data, noise = mixture([1.0]), torch.tensor([[[0.02, 0.1], [0.3, 1.0]]])
    model = Model(InDouble(data.denoiser()), None, schedules.geometric(20, 5.0, 0.005), (1, 2, 2))
    y = torch.tensor([[[[0.3, 0.1], [0.9, 0.2]]]])
    exact = data.given(y.double().flatten(1), torch.eye(4, dtype=torch.float64), noise.flatten())
    deviation = exact.covariance.diagonal(dim1=1, dim2=2).sqrt()[0]
    draws = mmdgs.restore(
        model, y, identity(1, 2, 2), noise=noise, covariance=FullMoments(model), chains="bridge",
        steps=8, draws=1000, progress=None,
    )  # fmt: skip
    assert ((draws.mean.flatten() - exact.mean[0]) / deviation).abs().max() < 4.5 / 1000**0.5
    assert (draws.std.flatten() / deviation - 1).abs().max() < 4.5 / 2000**0.5
    settings = mmdgs.uncertainty.settings.PosteriorSettings(noise, draws=400)
    seen = mmdgs.image_posterior(FullMoments(model), y[0], settings)
    # By multistep chains of 25 levels, which are a few percent too wide or narrow.
    assert ((seen.mean.flatten() - exact.mean[0]) / deviation).abs().max() < 0.3
    assert (seen.std.flatten() / deviation - 1).abs().max() < 0.2
    # 90% intervals are those of one draw more, by Student's law.
    reach = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(0.95)) * (1 + 1 / 400) ** 0.5
    torch.testing.assert_close(seen.high - seen.mean, seen.std * reach, rtol=0.004, atol=0)
    few = mmdgs.image_posterior(FullMoments(model), y[0], replace(settings, draws=2))
    student = 1.753 * (1 + 1 / 16) ** 0.5  # 16 draws at least: 15 degrees of freedom
    torch.testing.assert_close(few.mean - few.low, student * few.std, rtol=0.005, atol=0)


def test_a_map_of_deviations_moves_the_modes_of_a_mixture() -> None:
    """By weighted particles, exact in the limit; the last two numbers say nearly nothing."""
    data, noise = mixture([0.7, 0.3]), torch.tensor([[[0.4, 0.6], [3.0, 3.0]]])
    model = Model(InDouble(data.denoiser()), None, schedules.geometric(20, 5.0, 0.005), (1, 2, 2))
    y = torch.tensor([[[[0.9, 0.5], [0.0, 0.0]]]])
    exact = data.given(y.double().flatten(1), torch.eye(4, dtype=torch.float64), noise.flatten())
    draws = mmdgs.restore(
        model, y, identity(1, 2, 2), noise=noise, covariance=FullMoments(model), chains="bridge",
        particles=16, steps=12, draws=400, progress=None,
    ).draws  # fmt: skip
    share = (draws[:, 0, 0, 0, 0] > 0.5).double().mean().item()
    weight = exact.weights[0, 1].item()
    assert 0.6 < weight < 0.7  # from 0.3 without y
    assert share == pytest.approx(weight, abs=4 * (weight * (1 - weight) / 400) ** 0.5)


def test_a_gaussian_stands_for_photons_and_for_clipped_values_by_its_slope() -> None:
    """Against derivatives of the log-likelihoods themselves."""
    u = torch.linspace(0.05, 1.5, 30, dtype=torch.float64, requires_grad=True)
    gain, y = 0.05, torch.full((30,), 0.35, dtype=torch.float64)
    z, v = Sensor(gain).at(y, u)
    log = (y / gain) * (u / gain).log() - u / gain
    (slope,) = torch.autograd.grad(log.sum(), u)
    torch.testing.assert_close((z - u) / v, slope)
    tau, low, high = 0.2, 0.1, 0.9
    for value, end, side in ((low, low, -1), (high, high, 1)):
        z, v = Sensor(0.0, tau, low=low, high=high).at(torch.full_like(u, value), u)
        a = side * (u - end) / tau
        (slope,) = torch.autograd.grad(torch.special.log_ndtr(a).sum(), u, create_graph=True)
        (curvature,) = torch.autograd.grad(slope.sum(), u)
        torch.testing.assert_close((z - u) / v, slope)
        believed = curvature < -2e-3 / tau**2  # beyond which it is bounded
        torch.testing.assert_close((1 / v)[believed], -curvature[believed], rtol=1e-6, atol=1e-9)
    z, v = Sensor(0.0, tau, low=low, high=high).at(y, u)
    torch.testing.assert_close(z, y)
    torch.testing.assert_close(v, torch.full_like(v, tau**2))


@pytest.mark.parametrize("photons", [1, 5])
def test_draws_given_photons_are_those_of_quadrature(photons: int) -> None:
    """A Gamma prior: what is missing in 25 levels is their own width (docs/use/restore.md)."""
    of, gain, numbers = prior("gamma"), 0.125 / photons, 200
    sensor = Sensor(gain, 0.5 * gain)
    x = of.g[torch.multinomial(of.w, numbers, replacement=True, generator=seeded(0))]
    y = sensor.simulated(x[None], Streams(0, 1, purpose="photons"))[0]
    draws = restored(of, y, sensor)
    p = (likelihoods(y, of.g, sensor) + of.w.log()).softmax(1)
    mean = p @ of.g
    deviation = (p @ of.g.square() - mean.square()).sqrt()
    low, high = (torch.searchsorted(of.g, end) for end in draws.sort(0).values[[4, 94]])
    covered = p.cumsum(1)
    coverage = (covered.gather(1, high[:, None]) - covered.gather(1, low[:, None])).mean().item()
    assert coverage == pytest.approx(0.9, abs=0.035)
    # Means of 99 draws of 200 numbers have a standard error of 0.007; y itself is off by 0.4.
    assert ((draws.mean(0) - mean) / deviation).mean().item() == pytest.approx(0, abs=0.05)


def restored(of: GridPrior, y: Tensor, sensor: Sensor) -> Tensor:
    shape = (1, 1, len(y))
    draws = mmdgs.restore(
        of, y.reshape(1, *shape).float(), identity(*shape), noise=sensor, levels=LEVELS,
        shape=shape, draws=99, progress=None,
    ).draws  # fmt: skip
    return draws.double().flatten(1)


def test_clipped_values_are_bounds() -> None:
    """A Gaussian in the dark: measured zeros make it brighter, bounds leave it where it is."""
    g = torch.linspace(-1, 1, 801, dtype=torch.float64)
    of = GridPrior(g, (-0.5 * ((g - 0.05) / 0.2).square()).softmax(0))
    tau, numbers = 0.15, 300
    x = g[torch.multinomial(of.w, numbers, replacement=True, generator=seeded(1))]
    sensor = Sensor(0.0, tau, low=0.0)
    y = sensor.simulated(x[None], Streams(1, 1))[0]
    assert 0.3 < (y == 0).double().mean() < 0.5
    log = -0.5 * ((y[:, None] - g) / tau).square()
    log = torch.where(y[:, None] <= 0, torch.special.log_ndtr(-g / tau).expand_as(log), log)
    p = (log + of.w.log()).softmax(1)
    mean = p @ g
    deviation = (p @ g.square() - mean.square()).sqrt()
    draws = restored(of, y, sensor)
    off = (draws.mean(0) - mean) / deviation
    assert off.square().mean().sqrt() < 0.2  # of which 0.1 are those of 99 draws
    assert (draws.std(0) / deviation).mean().item() == pytest.approx(1, abs=0.1)
    kept = (restored(of, y, Sensor(0.0, tau)).mean(0) - mean) / deviation
    assert kept[y == 0].mean() > 0.3


def test_a_sensor_has_the_moments_it_says_and_its_rows_their_own_streams() -> None:
    sensor = Sensor(gain=0.1, read=0.05, offset=0.2)
    u = torch.full((4, 1, 100, 100), 0.7)
    y = sensor.simulated(u, Streams(0, 4))
    assert torch.equal(y[2:], sensor.simulated(u[2:], Streams(0, 2, 2)))
    assert y.mean().item() == pytest.approx(0.7, abs=5 * 0.23 / 200)
    assert y.var().item() == pytest.approx(0.1 * 0.5 + 0.05**2, rel=0.05)
    assert sensor.scaled(2.0, 1.0).variances(1 + 2 * u)[0, 0, 0, 0] == pytest.approx(4 * 0.0525)


@pytest.mark.parametrize(("channels", "read"), [(1, 0.0), (3, 0.02)])
def test_gain_and_read_noise_are_found_in_one_image(channels: int, read: float) -> None:
    ramp = torch.linspace(0.05, 0.95, 160)
    x = (0.5 * ramp + 0.5 * ramp[:, None]).expand(channels, -1, -1)
    y = Sensor(0.02, read).simulated(x[None], Streams(0, 1))
    found = estimated_sensor(y, identity(*x.shape))
    assert found.gain.item() == pytest.approx(0.02, rel=0.1)
    assert found.read.item() == pytest.approx(read, abs=0.012)
    flat = x[None] + 0.1 * torch.randn(x[None].shape, generator=seeded(0))
    level = estimated_sensor(flat, identity(*x.shape)).variances(flat).mean().sqrt().item()
    assert level == pytest.approx(0.1, rel=0.1)
    with pytest.raises(UsageError, match="patches"):
        estimated_sensor(y[..., :20, :20], identity(channels, 20, 20))


def test_sensors_are_refused_where_they_cannot_be() -> None:
    for gain, read in ((-1.0, 0.0), (math.nan, 0.1), (0.0, 0.0)):
        with pytest.raises(UsageError, match="sensor"):
            Sensor(gain, read)
    of, y = prior("gamma"), torch.full((4,), 0.2, dtype=torch.float64)
    with pytest.raises(UsageError, match="one particle"):
        mmdgs.restore(
            of, y.reshape(1, 1, 1, 4).float(), identity(1, 1, 4), noise=Sensor(0.1), levels=LEVELS,
            shape=(1, 1, 4), chains="bridge", particles=4, progress=None,
        )  # fmt: skip


class GreyPrior:
    """The exact denoiser of colour images whose channels are one Gaussian image g, (3, 2, 2)."""

    matrix = torch.tensor(
        [[1.0, 0.6, 0.3, 0.1], [0.6, 1, 0.4, 0.3], [0.3, 0.4, 1, 0.5], [0.1, 0.3, 0.5, 1]]
    ).double()

    def __call__(self, x_t: Tensor, level: NoiseLevel) -> Tensor:
        whole = torch.kron(torch.ones(3, 3), self.matrix.float()).double()
        gain = whole @ torch.linalg.inv(whole + level.variance * torch.eye(12))
        return (x_t.double().flatten(1) @ gain.mT).reshape(x_t.shape).to(x_t)


def test_a_grey_image_counts_once() -> None:
    """By a model of colours: mean, covariance and fits are those of one measurement a pixel."""
    levels = schedules.geometric(8, 5.0, 0.05)
    colours = Model(GreyPrior(), None, levels, (3, 2, 2))
    grey, level = colours.grey(), NoiseLevel(sigma=0.4)
    z = torch.randn(2, 1, 2, 2, generator=seeded(0), dtype=torch.float64)
    k = GreyPrior.matrix
    gain = k @ torch.linalg.inv(k + 0.16 * torch.eye(4))
    q = FullMoments(grey)(z, level)
    torch.testing.assert_close(q.mean.flatten(1), z.flatten(1) @ gain.mT)
    torch.testing.assert_close(q.cov.dense()[0], k - gain @ k)
    assert grey.levels[0].sigma == pytest.approx(5.0 / 3**0.5)
    assert grey.grey() is grey
    repeated = colours(z.expand(-1, 3, -1, -1), level).mean(1)  # as if it were measured thrice
    assert (repeated.flatten(1) - q.mean.flatten(1)).abs().max() > 0.05
    noise = torch.full((1, 2, 2), 0.4)
    settings = {"noise": noise, "chains": "bridge", "steps": 8, "draws": 800, "progress": None}
    draws = mmdgs.restore(FullMoments(grey), z[:1].float(), identity(1, 2, 2), **settings)
    deviation = (k - gain @ k).diagonal().sqrt()
    off = (draws.mean.flatten() - q.mean[0].flatten()) / deviation
    assert off.abs().max() < 4.5 / 800**0.5


def test_spectra_of_colours_serve_grey_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variance of the channels' mean is a third of that of their first cosine."""
    colours = Model(GreyPrior(), None, schedules.geometric(8, 5.0, 0.05), (3, 2, 2))
    variances = torch.rand(8, 3, 2, 2, generator=seeded(0), dtype=torch.float64) + 0.1
    table = LevelTable([level.ratio for level in colours.levels[::-1]], variances)
    monkeypatch.setattr("mmdgs.models.shapes.FitStore.best_of", lambda store, levels=None: table)
    kept = colours.grey().inherited_fit("spectral")
    assert kept is not None
    level = NoiseLevel(sigma=0.3)
    x_t = torch.zeros(1, 3, 2, 2, dtype=torch.float64)
    wider = NoiseLevel(sigma=0.3 * 3**0.5)
    whole = SpectralMoments(colours, table).covariance(x_t, wider).dense()[0]
    mean = torch.kron(torch.full((1, 3), 1 / 3), torch.eye(4)).double()
    grey = SpectralMoments(colours.grey(), kept).covariance(x_t[:, :1], level).dense()[0]
    torch.testing.assert_close(grey, mean @ whole @ mean.mT)

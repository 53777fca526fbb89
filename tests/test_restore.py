"""`restore`: draws of p(x | y) by a model of many levels, against the exact posterior of its data."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from toy_models import LEVELS, SHAPE, exact, of_levels

import mmdgs
from mmdgs import schedules
from mmdgs.errors import UsageError
from mmdgs.generation.restoration import restoration_plan
from mmdgs.metrics import calibration_ratio
from mmdgs.models import Model
from mmdgs.moments import ExactMoments, FullMoments, GivenMoments
from mmdgs.noise import NoiseLevel
from mmdgs.operators import Box, Downsample, Grayscale, Matrix
from mmdgs.randomness import Streams
from mmdgs.samplers import multistep_plan, run
from mmdgs.targets import GaussianMixture

FINE = schedules.geometric(6, 20.0, 0.01)
MEANS = torch.linspace(-0.4, 0.8, 12, dtype=torch.float64)[None]


def normals(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def gaussian() -> GaussianMixture:
    """Data in the units of a model on [-1, 1]: one Gaussian image with correlations."""
    a = torch.randn(12, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return GaussianMixture([1.0], MEANS, (0.05 * (a @ a.mT / 12) + 0.01 * torch.eye(12, dtype=torch.float64))[None])


def gaussian_model() -> Model:
    denoiser = gaussian().denoiser()

    def denoise(x_t: Tensor, level: NoiseLevel) -> Tensor:
        return denoiser(x_t.double(), level).to(x_t.dtype)

    return of_levels(FINE, denoise)


@pytest.mark.parametrize(("chains", "steps"), [("bridge", 8), ("mirrored", 8), ("multistep", 60)])
def test_draws_are_those_of_the_exact_posterior_in_units_of_pixels(chains: str, steps: int) -> None:
    """An operator that does not keep constants, on a model of [-1, 1]: x = 2 u - 1 and y = A u + noise e."""
    model, data = gaussian_model(), gaussian()
    matrix = torch.randn(3, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.tensor([[0.5, 1.0, -0.2], [1.5, 0.0, 0.3]], dtype=torch.float64)
    pixels = GaussianMixture([1.0], (data.means + 1) / 2, data.covariances / 4)
    expected = pixels.given(y, matrix, 0.1)
    draws = 800
    found = mmdgs.restore(
        model,
        y.float(),
        Matrix(matrix, SHAPE),
        noise=0.1,
        covariance=FullMoments(model),
        chains=chains,
        steps=steps,
        draws=draws,
        progress=None,
    )
    assert found.draws.shape == (draws, 2, *SHAPE)
    assert found.cost.forwards == steps
    deviation = expected.covariance.diagonal(dim1=1, dim2=2).sqrt()
    z = (found.mean.flatten(1) - expected.mean) / deviation
    assert z.abs().max() < 4.5 / math.sqrt(draws)
    ratio = found.std.flatten(1) / deviation
    assert (ratio - 1).abs().max() < 4.5 / math.sqrt(2 * draws)
    assert found.noise.flatten().tolist() == pytest.approx([0.1])


def test_a_draw_depends_on_seed_image_and_number_alone() -> None:
    model = exact()
    y = torch.rand(3, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    operator = Grayscale(SHAPE)

    def restored(y: Tensor, **given: object) -> Tensor:
        settings = {"noise": 0.1, "covariance": FullMoments(model), "steps": 4, "draws": 5, "progress": None}
        return mmdgs.restore(model, y, operator, **{**settings, **given}).draws  # type: ignore[arg-type]

    whole = restored(y)
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(restored(y, batch_size=2), whole, **close)
    torch.testing.assert_close(restored(y, draws=2), whole[:2], **close)
    torch.testing.assert_close(restored(y[1:], first=1), whole[:, 1:], **close)
    by_row = torch.tensor([0.1, 0.1, 0.1])
    torch.testing.assert_close(restored(y, noise=by_row, batch_size=4), whole, **close)
    assert (restored(y, seed=1) - whole).abs().max() > 0.01
    probed = {"covariance": mmdgs.DiagonalMoments(model, probes=1)}
    torch.testing.assert_close(restored(y, **probed, batch_size=2), restored(y, **probed), **close)
    for chains in ("mirrored", "bridge"):
        other = restored(y, chains=chains)
        torch.testing.assert_close(restored(y[1:], chains=chains, first=1, batch_size=2), other[:, 1:], **close)
        assert (other - whole).abs().max() > 0.01


@pytest.mark.parametrize("chains", ["multistep", "bridge"])
def test_what_is_measured_varies_as_much_as_its_noise(chains: str) -> None:
    """Also where the noise is hardly above the last level's: a mean there would leave out a fifth of the variance."""
    model = of_levels(schedules.geometric(6, 20.0, 0.02))  # standard normal data, so that y decides all
    y = torch.full((1, *SHAPE), 0.6)
    found = mmdgs.restore(
        model, y, Box(SHAPE, 1), noise=0.02, covariance=FullMoments(model), chains=chains, steps=40, draws=3_000,
        progress=None,
    )  # fmt: skip
    measured = Box(SHAPE, 1).known(torch.ones(1, *SHAPE)) > 0
    expected = 0.02 / math.sqrt(1 + 0.02**2 / 0.25)  # data of standard deviation 1 / 2 in units of pixels
    ratio = found.std[measured] / expected
    assert ratio.numel() > 0
    assert (ratio - 1).abs().max() < 4.5 / math.sqrt(2 * 3_000) + 0.02


def test_chains_of_means_are_the_midpoint_method_of_the_sde_and_draw_at_the_last_level() -> None:
    """The numbers of the docs are by this method: others have other spreads along few levels."""
    levels, seeds = schedules.edm(6, 20.0, 0.05), [0, 1, 2]
    given = mmdgs.GivenMoments(ExactMoments(gaussian()), torch.ones(3, 4).double(), torch.eye(12)[:4].double(), 0.3)
    plan = restoration_plan(given, levels, "multistep")
    method = multistep_plan(given.denoiser, levels, eta=1.0, midpoint=True)
    x0 = method.noise((12,), 3, generator=Streams(seeds, 3, purpose="start")).double()
    steps = range(1, len(levels))
    found, expected = (run(one, x0, seed=seeds, keep=steps, progress=None) for one in (plan, method))
    torch.testing.assert_close(found.samples, expected.samples)
    draws = [run(one, x0, seed=seeds, progress=None).x for one in (plan, method)]
    assert (draws[0] - draws[1]).abs().max() > 0.01


@pytest.mark.parametrize("chains", ["multistep", "bridge", "mirrored"])
def test_it_tells_how_systems_were_solved(chains: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, matrix = gaussian_model(), torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr("mmdgs.linalg.given.MOST_EACH", 1)
    monkeypatch.setattr("mmdgs.linalg.given.MOST_SHARED", 1)
    found = mmdgs.restore(
        model, torch.ones(2, 3), Matrix(matrix, SHAPE), noise=0.1, covariance=mmdgs.DiagonalMoments(model, probes=1),
        chains=chains, steps=3, draws=2, progress=None,
    )  # fmt: skip
    assert set(found.info) >= {"cg_iterations", "cg_residual"}
    assert found.info["cg_iterations"].shape == (2, 2)
    assert found.info["cg_iterations"].min() >= 1
    assert found.info["cg_residual"].max() < 1e-3


def test_draws_of_a_mixture_are_calibrated() -> None:
    """Exact moments at every level, truths from the model's own data: spread over error is near 1."""
    model = exact()
    means = torch.stack([torch.linspace(-0.9, 0.9, 12), torch.linspace(0.7, -0.4, 12)]).double()
    data = GaussianMixture([0.6, 0.4], means, 0.3)
    truth = (data.sample(60, generator=torch.Generator().manual_seed(5)).reshape(-1, *SHAPE).float() + 1) / 2
    operator = Downsample(SHAPE, 2)
    y = operator(truth) + 0.05 * torch.randn(60, 3, 1, 1, generator=torch.Generator().manual_seed(6))
    moments = ExactMoments(data.to(dtype=torch.float32))
    found = mmdgs.restore(model, y, operator, noise=0.05, covariance=moments, steps=12, draws=8, progress=None)
    assert calibration_ratio(found.draws, truth) == pytest.approx(1, abs=0.1)


def test_the_noise_is_estimated() -> None:
    shape = (1, 16, 16)
    model = Model(lambda x_t, level: x_t / (1 + level.variance), of_levels(LEVELS).network, LEVELS, shape)
    y = 0.5 + 0.05 * torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    moments = mmdgs.DiagonalMoments(model, probes=1)
    found = mmdgs.restore(
        model, y, Box(shape, 4), noise="estimate", covariance=moments, steps=3, draws=2, progress=None
    )
    assert found.noise.shape == (2, 1, 1, 1)
    assert found.noise.flatten().tolist() == pytest.approx([0.05, 0.05], rel=0.35)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"noise": 0.0}, "must be positive and finite, got 0"),
        ({"noise": "guess"}, "or 'estimate', got 'guess'"),
        ({"noise": "estimate"}, "measured whole"),
        ({"chains": "mirror"}, "unknown chains 'mirror' .did you mean 'mirrored'"),
        ({"steps": 1}, "steps must be a whole number of at least 2, got 1"),
        ({"draws": 0}, "draws must be a whole number of at least 1, got 0"),
        ({"y": torch.full((1, 3, 2, 2), math.nan)}, "not finite in row 0"),
        ({"y": torch.zeros(1, 3, 4, 4)}, r"have shape \(B, 3, 2, 2\), got \(1, 3, 4, 4\)"),
        ({"operator": Box((3, 4, 4), 2)}, r"does not fit x of shape \(3, 2, 2\)"),
        ({"covariance": "spectrum"}, "did you mean 'spectral'"),
        ({"model": of_levels(LEVELS[:1])}, "trained at NoiseLevel.* alone"),
        ({"precision": "half"}, "precision must be one of"),
    ],
)
def test_what_is_refused(given: dict[str, object], says: str) -> None:
    model = exact()
    settings = {"model": model, "y": torch.zeros(1, *SHAPE), "operator": Box(SHAPE, 1), "noise": 0.1}
    settings |= {"covariance": FullMoments(model), "steps": 2, "draws": 1, "progress": None}
    with pytest.raises(UsageError, match=says):
        mmdgs.restore(**{**settings, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(("chains", "shares"), [("bridge", (0.41, 0.30, 0.50)), ("multistep", (0.42, 0.30, 0.51))])
def test_chains_take_too_little_of_the_modes_weights_from_y(chains: str, shares: tuple[float, ...]) -> None:
    """docs/inverse.md: with exact moments and 400 levels, p(x | y) with 0.29, 0.12 and 0.5 in one of two modes.

    N(-1, 0.3^2 I) and N(1, 0.3^2 I) in the plane, the first number measured with noise 0.5. p(x | x_t, y) by a Gaussian
    is not that of a mixture, so the law along the levels is not that of p(x | y). Where y says nothing it is right.
    """
    exact = torch.tensor([0.29, 0.12, 0.5], dtype=torch.float64)
    width, noise = 0.3, 0.5
    means = torch.tensor([[-1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
    mixture = GaussianMixture([0.5, 0.5], means, width**2 * torch.eye(2, dtype=torch.float64).repeat(2, 1, 1))
    operator = Matrix(torch.tensor([[1.0, 0.0]], dtype=torch.float64), (2,))
    y = -exact.logit()[:, None] * (width**2 + noise**2) / 2  # the evidence of the modes is N(y; -+1, width^2 + noise^2)
    torch.testing.assert_close(mixture.given(y, operator, noise).weights[:, 0], exact)
    rows = y.repeat_interleave(1_000, 0)
    plan = restoration_plan(
        GivenMoments(ExactMoments(mixture), rows, operator, noise), schedules.edm(400, 100.0, 0.01), chains
    )
    start = plan.start.sigma * normals(3_000, 2)
    x = run(plan, start, seed=0, progress=None).x.unflatten(0, (3, -1))
    found = (x[..., 1] < 0).double().mean(1)
    assert found.tolist() == pytest.approx(shares, abs=0.04)  # a share of 1,000 has a standard deviation of 0.016


@pytest.mark.parametrize(
    ("steps", "measured", "free"), [(10, 0.78, 1.07), (12, 0.84, 1.10), (25, 0.96, 1.05), (50, 0.99, 1.01)]
)
def test_multistep_is_too_narrow_where_y_is_sharp_and_too_wide_where_it_says_nothing(
    steps: int, measured: float, free: float
) -> None:
    """docs/inverse.md: widths over right ones along the levels of `cifar10`, of data N(0, 0.3^2) and noise 0.02."""
    data = GaussianMixture(
        [1.0], torch.zeros(1, 2, dtype=torch.float64), 0.09 * torch.eye(2, dtype=torch.float64)[None]
    )
    operator = Matrix(torch.tensor([[1.0, 0.0]], dtype=torch.float64), (2,))
    given = GivenMoments(ExactMoments(data), torch.zeros(20_000, 1, dtype=torch.float64), operator, 0.02)
    plan = restoration_plan(given, schedules.edm(steps, 50.0, 0.01), "multistep")
    x = run(plan, plan.start.sigma * normals(20_000, 2), seed=0, progress=None).x
    exact = torch.tensor([(0.3**-2 + 0.02**-2) ** -0.5, 0.3], dtype=torch.float64)
    assert (x.std(0) / exact).tolist() == pytest.approx([measured, free], abs=0.02)  # of 20,000: 0.5%

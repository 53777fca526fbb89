"""`restore`: draws of p(x | y) by a model of many levels, against the exact posterior."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from nets import tiny_model
from torch import Tensor
from toy_models import LEVELS, SHAPE, InDouble, any_size_model, exact, of_levels

import mmdgs
from mmdgs import schedules
from mmdgs.errors import UsageError
from mmdgs.metrics import calibration_ratio
from mmdgs.models import Model
from mmdgs.models.estimators import estimator_name
from mmdgs.moments import ExactMoments, FullMoments, GivenMoments
from mmdgs.operators import Box, Downsample, Grayscale, Mask, Matrix, Operator
from mmdgs.randomness import Streams
from mmdgs.restoration.chains import restoration_plan
from mmdgs.restoration.draws import Restored
from mmdgs.restoration.folder import Measurements, restore_into
from mmdgs.restoration.settings import RestorationSettings
from mmdgs.samplers import Multistep, Plan, run
from mmdgs.targets import GaussianMixture

FINE = schedules.geometric(6, 20.0, 0.01)
FIRST = Matrix(torch.tensor([[1.0, 0.0]], dtype=torch.float64), (2,))
"""Measures the first number of two."""
EYE = torch.eye(2, dtype=torch.float64)[None]
MEANS = torch.linspace(-0.4, 0.8, 12, dtype=torch.float64)[None]


def normals(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def gaussian() -> GaussianMixture:
    """Data in the units of a model on [-1, 1]: one Gaussian image with correlations."""
    a = torch.randn(12, 12, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    covariance = 0.05 * (a @ a.mT / 12) + 0.01 * torch.eye(12, dtype=torch.float64)
    return GaussianMixture([1.0], MEANS, covariance[None])


def gaussian_model() -> Model:
    return of_levels(FINE, InDouble(gaussian().denoiser()))


def restore(model: Model, y: Tensor, operator: Operator, **settings: Any) -> Restored:
    """With the exact covariance, unless another is asked for."""
    defaults = {"noise": 0.1, "covariance": FullMoments(model), "progress": None}
    return mmdgs.restore(model, y, operator, **(defaults | settings))


@pytest.mark.parametrize(("chains", "steps"), [("bridge", 8), ("mirrored", 8), ("multistep", 30)])
def test_draws_are_those_of_the_exact_posterior_in_units_of_pixels(chains: str, steps: int) -> None:
    """An operator that does not keep constants, on a model of [-1, 1]: x = 2 u - 1 and y = A u +
    noise e.
    """
    data, draws = gaussian(), 800
    matrix = torch.randn(3, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.tensor([[0.5, 1.0, -0.2], [1.5, 0.0, 0.3]], dtype=torch.float64)
    pixels = GaussianMixture([1.0], (data.means + 1) / 2, data.covariances / 4)
    expected = pixels.given(y, matrix, 0.1)
    restored = restore(
        *(gaussian_model(), y.float(), Matrix(matrix, SHAPE)),
        chains=chains, steps=steps, draws=draws,
    )  # fmt: skip
    assert restored.draws.shape == (draws, 2, *SHAPE)
    assert restored.cost.forwards == steps
    deviation = expected.covariance.diagonal(dim1=1, dim2=2).sqrt()
    z = (restored.mean.flatten(1) - expected.mean) / deviation
    assert z.abs().max() < 4.5 / math.sqrt(draws)
    ratio = restored.std.flatten(1) / deviation
    assert (ratio - 1).abs().max() < 4.5 / math.sqrt(2 * draws)
    assert restored.noise.flatten().tolist() == pytest.approx([0.1])


def test_a_draw_depends_on_seed_image_and_number_alone() -> None:
    model, operator = exact(), Grayscale(SHAPE)
    y = torch.rand(3, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)

    def draws(y: Tensor, **settings: Any) -> Tensor:
        return restore(model, y, operator, **{"steps": 4, "draws": 5, **settings}).draws

    whole = draws(y)
    close(draws(y, batch_size=2), whole)
    close(draws(y, draws=2), whole[:2])
    close(draws(y[1:], first=1), whole[:, 1:])
    close(draws(y, noise=torch.tensor([0.1, 0.1, 0.1]), batch_size=4), whole)
    assert (draws(y, seed=1) - whole).abs().max() > 0.01
    probed = {"covariance": mmdgs.DiagonalMoments(model, probes=1)}
    close(draws(y, **probed, batch_size=2), draws(y, **probed))
    for chains in ("mirrored", "bridge"):
        other = draws(y, chains=chains)
        close(draws(y[1:], chains=chains, first=1, batch_size=2), other[:, 1:])
        assert (other - whole).abs().max() > 0.01


@pytest.mark.parametrize("chains", ["bridge", "multistep"])
def test_a_model_has_its_own_units(chains: str) -> None:
    """Data of [1, 5] that are 3 + 2 x for x of [-1, 1]: the same draws in [0, 1], and all along."""
    denoiser, levels = InDouble(gaussian().denoiser()), schedules.geometric(3, 0.5, 0.1)

    def moved(x_t: Tensor, level: mmdgs.NoiseLevel) -> Tensor:
        return 3 + 2 * denoiser((x_t - 3) / 2, mmdgs.NoiseLevel(sigma=level.sigma / 2))

    wide = [mmdgs.NoiseLevel(sigma=2 * level.sigma) for level in levels]
    models = (
        Model(denoiser, levels=levels, shape=SHAPE, interval=(-1.0, 1.0)),
        Model(moved, levels=wide, shape=SHAPE, interval=(1.0, 5.0)),
    )
    y = torch.rand(2, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    seen: list[list[Tensor]] = [[], []]
    draws = [
        restore(
            model, y, Grayscale(SHAPE), levels=model.levels, chains=chains, draws=3,
            callback=lambda step, state, info, first, i=i: seen[i].append(state.x),
        ).draws
        for i, model in enumerate(models)
    ]  # fmt: skip
    torch.testing.assert_close(draws[1], draws[0], rtol=1e-3, atol=1e-4)
    for own, other in zip(*seen, strict=True):
        torch.testing.assert_close((other - 3) / 2, own, rtol=1e-3, atol=1e-3)


def test_the_noise_of_each_row_is_its_own() -> None:
    model, operator = exact(), Grayscale(SHAPE)
    y = torch.rand(2, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    settings = {"steps": 4, "draws": 3}
    both = restore(model, y, operator, noise=torch.tensor([0.05, 1.0]), **settings).draws
    for row, noise in enumerate((0.05, 1.0)):
        alone = restore(model, y[row:][:1], operator, noise=noise, first=row, **settings).draws
        torch.testing.assert_close(both[:, row], alone[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("chains", "steps"), [("multistep", 40), ("bridge", 20)])
def test_what_is_measured_varies_as_much_as_its_noise(chains: str, steps: int) -> None:
    """Also where the noise is hardly above the last level's: a mean there would leave out a fifth
    of the variance.
    """
    # Standard normal data, so that y decides all; of standard deviation 1 / 2 in units of pixels.
    model, box = of_levels(schedules.geometric(6, 20.0, 0.02)), Box(SHAPE, 1)
    y = torch.full((1, *SHAPE), 0.6)
    restored = restore(model, y, box, noise=0.02, chains=chains, steps=steps, draws=3_000)
    measured = box.known(torch.ones(1, *SHAPE)) > 0
    expected = 0.02 / math.sqrt(1 + 0.02**2 / 0.25)
    ratio = restored.std[measured] / expected
    assert ratio.numel() > 0
    assert (ratio - 1).abs().max() < 4.5 / math.sqrt(2 * 3_000) + 0.02


def test_chains_of_means_are_the_midpoint_method_of_the_sde_and_draw_at_the_last_level() -> None:
    """The numbers of the docs are by this method: others have other spreads along few levels."""
    levels, seeds = schedules.edm(6, 20.0, 0.05), [0, 1, 2]
    given = mmdgs.moments.GivenMoments(
        ExactMoments(gaussian()), torch.ones(3, 4).double(), torch.eye(12)[:4].double(), 0.3
    )
    plan = restoration_plan(given, levels, "multistep")
    method = Plan.down(Multistep(given.denoiser, eta=1.0, midpoint=True), levels)
    x0 = method.noise((12,), 3, generator=Streams(seeds, 3, purpose="start")).double()
    steps = range(1, len(levels))
    samples = [
        run(path, x0, seed=seeds, keep=steps, progress=None).samples for path in (plan, method)
    ]
    torch.testing.assert_close(*samples)
    draws = [run(path, x0, seed=seeds, progress=None).x for path in (plan, method)]
    assert (draws[0] - draws[1]).abs().max() > 0.01


@pytest.mark.parametrize("limit", ["MOST_SHARED", "MOST_NUMBERS"])
@pytest.mark.parametrize("chains", ["multistep", "bridge", "mirrored"])
def test_it_tells_how_systems_were_solved(
    chains: str, limit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, matrix = gaussian_model(), torch.randn(3, 12, generator=torch.Generator().manual_seed(1))
    monkeypatch.setattr("mmdgs.linalg.solvers.MOST_EACH", 1)
    monkeypatch.setattr(f"mmdgs.linalg.solvers.{limit}", 1)
    info = restore(
        *(model, torch.ones(2, 3), Matrix(matrix, SHAPE)),
        covariance=mmdgs.DiagonalMoments(model, probes=1), chains=chains, steps=3, draws=2,
    ).info  # fmt: skip
    assert set(info) >= {"cg_iterations", "cg_residual"}
    assert info["cg_iterations"].shape == (2, 2)
    assert info["cg_iterations"].min() >= 1
    assert info["cg_residual"].max() < 1e-3


def test_draws_of_a_mixture_are_calibrated() -> None:
    """Exact moments at every level, truths from the model's data: spread over error is near 1."""
    model, operator = exact(), Downsample(SHAPE, 2)
    means = torch.stack([torch.linspace(-0.9, 0.9, 12), torch.linspace(0.7, -0.4, 12)]).double()
    data = GaussianMixture([0.6, 0.4], means, 0.3)
    x = data.sample(60, generator=torch.Generator().manual_seed(5)).reshape(-1, *SHAPE)
    truth = (x.float() + 1) / 2
    noise = torch.randn(60, 3, 1, 1, generator=torch.Generator().manual_seed(6))
    moments = ExactMoments(data.to(dtype=torch.float32))
    settings = {"noise": 0.05, "covariance": moments, "steps": 12, "draws": 8}
    restored = restore(model, operator(truth) + 0.05 * noise, operator, **settings)
    assert calibration_ratio(restored.draws, truth) == pytest.approx(1, abs=0.1)


def test_the_noise_is_estimated() -> None:
    shape = (1, 16, 16)
    model = Model(
        lambda x_t, level: x_t / (1 + level.variance), of_levels(LEVELS).network, LEVELS, shape
    )
    y = 0.5 + 0.05 * torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    moments = mmdgs.DiagonalMoments(model, probes=1)
    restored = restore(
        model, y, Box(shape, 4), noise="estimate", covariance=moments, steps=3, draws=2
    )
    assert restored.noise.shape == (2, 1, 1, 1)
    assert restored.noise.flatten().tolist() == pytest.approx([0.05, 0.05], rel=0.35)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"noise": 0.0}, "got 0"),
        ({"noise": "guess"}, "'guess'"),
        ({"noise": "estimate"}, "measured whole"),
        ({"chains": "mirror"}, "'mirrored'"),
        ({"steps": 1}, "steps .* got 1"),
        ({"draws": 0}, "draws .* got 0"),
        ({"particles": 2}, "'multistep'"),
        ({"inflation": 3.0}, "inflation is a factor near 1 .* got 3.0"),
        ({"inflation": 1.1, "chains": "bridge"}, "inflation is of .* got 1.1 with 'bridge'"),
        ({"resample": 1.5}, "resample is a share of the particles, 0 to 1, got 1.5"),
        ({"resample": 0.0}, "resample is of several particles"),
        ({"y": torch.full((1, 3, 2, 2), math.nan)}, "not finite in row 0"),
        ({"y": torch.zeros(1, 3, 4, 4)}, r"\(1, 3, 4, 4\)"),
        ({"operator": Box((3, 4, 4), 2)}, r"\(3, 2, 2\)"),
        ({"covariance": "spectrum"}, "'spectral'"),
        ({"model": of_levels(LEVELS[:1])}, "NoiseLevel.* alone"),
        ({"precision": "half"}, "precision"),
    ],
)
def test_what_is_refused(settings: dict[str, Any], says: str) -> None:
    inputs = {"model": exact(), "y": torch.zeros(1, *SHAPE), "operator": Box(SHAPE, 1)}
    with pytest.raises(UsageError, match=says):
        restore(**{**inputs, "steps": 2, "draws": 1, **settings})  # type: ignore[arg-type]


def test_the_fresh_noise_of_chains_is_inflated_as_the_model_says() -> None:
    model, operator = tiny_model("edm", SHAPE, sigma=None, sigmas=[4.0, 1.0, 0.2]), Box(SHAPE, 1)
    settings: dict[str, Any] = {"noise": 0.1, "steps": 3, "draws": 4, "covariance": "diagonal"}

    def draws(model: Any, **more: Any) -> Tensor:
        y, own = torch.zeros(1, *SHAPE), {} if isinstance(model, Model) else {"covariance": None}
        return restore(model, y, operator, **settings | own, **more, progress=None).draws

    plain, name = draws(model), estimator_name(model.posterior("diagonal"), model)
    wider, others = (
        Model.build(replace(model.config, inflation={str(key): 1.5}), model.network)
        for key in (name, "spectral")
    )
    assert torch.equal(draws(wider), draws(model, inflation=1.5))
    assert torch.equal(draws(wider.posterior("diagonal")), draws(wider))
    assert torch.equal(draws(others), plain)
    assert torch.equal(draws(wider, inflation=1.0), plain)
    assert not torch.equal(draws(wider), plain)
    assert torch.equal(draws(wider, chains="bridge"), draws(model, chains="bridge"))


def test_grey_images_are_not_inflated_by_a_model_of_colours(tmp_path: Path) -> None:
    """By a call, into a folder, and by the grey model itself: the inflation is of colours."""
    plain = any_size_model()
    name = estimator_name(plain.posterior("diagonal"), plain)
    model = Model.build(replace(plain.config, inflation={str(name): 1.5}), plain.network)
    assert model.inflation(model.posterior("diagonal")) == 1.5
    y, operator = torch.full((1, 1, 16, 16), 0.5), Mask(torch.ones(16, 16), (1, 16, 16))
    settings: dict[str, Any] = {"noise": 0.1, "steps": 3, "draws": 2, "covariance": "diagonal"}
    grey = restore(model.grey(), y, operator, **settings).draws
    assert torch.equal(restore(model, y, operator, **settings).draws, grey)
    restore_into(
        tmp_path / "out", model, Measurements(y, operator), RestorationSettings(**settings)
    )
    record = json.loads((tmp_path / "out" / "restored.json").read_text())
    assert record["settings"]["inflation"] == 1.0
    with numpy.load(tmp_path / "out" / "draws.npz") as arrays:
        assert numpy.allclose(arrays["draws"], grey.numpy(), atol=1e-5)


def modes() -> tuple[GaussianMixture, Tensor, Tensor, float]:
    """Two modes in the plane, measurements of the first number, the weights these give, the noise.

    N(-1, 0.3^2 I) and N(1, 0.3^2 I); the evidence of the modes is N(y; -+1, 0.3^2 + noise^2).
    """
    exact, width, noise = torch.tensor([0.29, 0.12, 0.5], dtype=torch.float64), 0.3, 0.5
    means = torch.tensor([[-1.0, -1.0], [1.0, 1.0]], dtype=torch.float64)
    mixture = GaussianMixture([0.5, 0.5], means, width**2 * EYE.repeat(2, 1, 1))
    y = -exact.logit()[:, None] * (width**2 + noise**2) / 2
    torch.testing.assert_close(mixture.given(y, FIRST, noise).weights[:, 0], exact)
    return mixture, y, exact, noise


@pytest.mark.parametrize(
    ("chains", "shares"), [("bridge", (0.41, 0.30, 0.50)), ("multistep", (0.42, 0.30, 0.51))]
)
def test_chains_take_too_little_of_the_modes_weights_from_y(
    chains: str, shares: tuple[float, ...]
) -> None:
    """docs/use/restore.md: with exact moments and many levels, p(x | y) with 0.29, 0.12 and 0.5 in
    one of two modes. Of 400 levels, which take four times as long, the shares are the same.

    p(x | x_t, y) by a Gaussian is not that of a mixture, so the law along the levels is not that of
    p(x | y). Where y says nothing it is right.
    """
    mixture, y, _, noise = modes()
    given = GivenMoments(ExactMoments(mixture), y.repeat_interleave(1_000, 0), FIRST, noise)
    plan = restoration_plan(given, schedules.edm(100, 100.0, 0.01), chains)
    start = plan.start.sigma * normals(3_000, 2)
    x = run(plan, start, seed=0, progress=None).x.unflatten(0, (3, -1))
    # A share of 1,000 has a standard deviation of 0.016.
    assert (x[..., 1] < 0).double().mean(1).tolist() == pytest.approx(shares, abs=0.04)


def test_particles_take_the_modes_weights_from_y() -> None:
    """docs/use/restore.md: the same with 64 particles and 25 levels."""
    mixture, y, exact, noise = modes()
    runs, count = 150, 64
    given = GivenMoments(ExactMoments(mixture), y.repeat_interleave(runs * count, 0), FIRST, noise)
    plan = restoration_plan(given, schedules.edm(25, 100.0, 0.01), "bridge", count)
    chains = run(plan, plan.start.sigma * normals(len(given.y), 2), seed=0, progress=None)
    of_runs = (chains.x[..., 1] < 0).double().unflatten(0, (3, runs, count)).mean(2)
    assert (of_runs.mean(1) - exact).abs().max() < 0.01 + 2 * of_runs.std(1).max() / math.sqrt(runs)


def test_particles_tell_the_evidence_in_units_of_pixels() -> None:
    """Of Gaussian data it is exact, and the draws are those of the exact posterior."""
    data = gaussian()
    matrix = torch.randn(3, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = torch.tensor([[0.5, 1.0, -0.2], [1.5, 0.0, 0.3]], dtype=torch.float64)
    pixels = GaussianMixture([1.0], (data.means + 1) / 2, data.covariances / 4)
    operator = Matrix(matrix, SHAPE)
    settings = {"chains": "bridge", "steps": 25, "draws": 30, "particles": 4}
    restored = restore(gaussian_model(), y.float(), operator, **settings)
    law = torch.distributions.MultivariateNormal(
        pixels.means[0] @ matrix.mT,
        matrix @ pixels.covariances[0] @ matrix.mT + 0.1**2 * torch.eye(3, dtype=torch.float64),
    )
    log_evidence, error = restored.log_evidence()
    torch.testing.assert_close(log_evidence, law.log_prob(y), atol=0.02, rtol=0)
    assert error.max() < 0.02
    assert restored.info["effective"].shape == (30, 2, 25)
    assert restored.info["effective"].min() > 0.98
    assert restored.cost.forwards == 25 * 4
    part = restore(gaussian_model(), y.float(), operator, **settings, batch_size=7)
    torch.testing.assert_close(part.draws, restored.draws, rtol=1e-4, atol=1e-5)
    with pytest.raises(UsageError, match="particles"):
        restore(gaussian_model(), y.float(), operator, steps=2, draws=1).log_evidence()


@pytest.mark.parametrize(
    ("steps", "measured", "free"),
    [
        (10, 0.78, 1.07),
        pytest.param(12, 0.84, 1.10, marks=pytest.mark.slow),
        (25, 0.96, 1.05),
        pytest.param(50, 0.99, 1.01, marks=pytest.mark.slow),
    ],
)
def test_multistep_is_too_narrow_where_y_is_sharp_and_too_wide_where_it_says_nothing(
    steps: int, measured: float, free: float
) -> None:
    """docs/use/restore.md: widths over right ones along the levels of `cifar10`, of data N(0,
    0.3^2) and noise 0.02.
    """
    data = GaussianMixture([1.0], torch.zeros(1, 2, dtype=torch.float64), 0.09 * EYE)
    y = torch.zeros(20_000, 1, dtype=torch.float64)
    given = GivenMoments(ExactMoments(data), y, FIRST, 0.02)
    plan = restoration_plan(given, schedules.edm(steps, 50.0, 0.01), "multistep")
    x = run(plan, plan.start.sigma * normals(20_000, 2), seed=0, progress=None).x
    exact = torch.tensor([(0.3**-2 + 0.02**-2) ** -0.5, 0.3], dtype=torch.float64)
    # Of 20,000 draws: 0.5%.
    assert (x.std(0) / exact).tolist() == pytest.approx([measured, free], abs=0.02)

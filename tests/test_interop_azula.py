"""Denoisers of azula and ours, both ways, and azula's solvers of inverse problems, against closed
forms.
"""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from test_readme import INTEROP, blocks_of
from torch import Tensor, nn
from toy_models import stand_in_model

import mmdgs
from experiments import rivals
from experiments.inverse import ImageDenoiser
from mmdgs.errors import UsageError
from mmdgs.models import Model
from mmdgs.moments import ExactMoments, FullMoments, GivenMoments
from mmdgs.noise import NoiseLevel
from mmdgs.operators import Box, Downsample
from mmdgs.randomness import seeded
from mmdgs.schedules import geometric
from mmdgs.targets import GaussianMixture

pytest.importorskip("azula", reason="azula is not installed: pip install mmdgs[azula]")

from azula.denoise import DiracPosterior, GaussianDenoiser, GaussianPosterior
from azula.linalg.covariance import DiagonalCovariance
from azula.noise import CosineSchedule, RectifiedSchedule, VESchedule, VPSchedule
from azula.sample import DDPMSampler

from mmdgs.interop.azula import from_azula, to_azula

pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated"
)  # torch's own, in torch.func.jvp

SHAPE = (1, 4, 4)
MIXTURE = GaussianMixture(
    [0.6, 0.4],
    torch.tensor([[0.5, -0.5], [-1.0, 1.0]], dtype=torch.float64),
    torch.tensor([0.3, 0.5]),
)
SCHEDULES = [VPSchedule(), VESchedule(), CosineSchedule(), RectifiedSchedule()]


def smooth() -> GaussianMixture:
    """One Gaussian of 4 x 4 images with neighbours that are alike: linear, so that every solver has
    a closed form.
    """
    places = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0)).double()
    covariance = 0.25 * (
        -0.5 * (torch.cdist(places, places) / 1.5).square()
    ).exp() + 0.01 * torch.eye(16)
    return GaussianMixture([1.0], 0.1 * torch.ones(1, 16, dtype=torch.float64), covariance[None])


def toy_model(std: float = 0.1) -> Model:
    """x ~ N(0.5, std^2) in [0, 1], exactly, as a model of many levels."""

    def denoiser(x_t: Tensor, level: NoiseLevel) -> Tensor:
        gain = level.alpha * std**2 / (level.alpha**2 * std**2 + level.sigma**2)
        return 0.5 + gain * (x_t - level.alpha * 0.5)

    return Model(denoiser, nn.Identity(), geometric(20, 50.0, 0.01), SHAPE, source="toy")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: type(one).__name__)
def test_our_denoiser_is_azulas(schedule: Any) -> None:
    guest = to_azula(MIXTURE.denoiser(), schedule)
    for time in (0.05, 0.4, 0.9):
        t = torch.tensor(time, dtype=torch.float64)
        alpha, sigma = schedule(t)
        x_t = torch.randn(5, 2, generator=seeded(0), dtype=torch.float64)
        found = guest(x_t, t)
        assert isinstance(found, DiracPosterior)
        expected = MIXTURE.denoiser()(x_t, NoiseLevel(alpha=alpha.item(), sigma=sigma.item()))
        torch.testing.assert_close(found.mean, expected)


def test_rows_may_be_at_their_own_times() -> None:
    guest = to_azula(MIXTURE.denoiser(), VPSchedule())
    x_t, t = (
        torch.randn(4, 2, generator=seeded(0), dtype=torch.float64),
        torch.tensor([0.7, 0.1, 0.7, 0.3], dtype=torch.float64),
    )
    alone = torch.cat([guest(x_t[i : i + 1], t[i]).mean for i in range(4)])
    torch.testing.assert_close(guest(x_t, t).mean, alone)
    with pytest.raises(UsageError, match="one for each of 4 rows, got 3"):
        guest(x_t, t[:3])


def test_with_moments_it_has_variances() -> None:
    guest = to_azula(MIXTURE.denoiser(), VPSchedule(), moments=ExactMoments(MIXTURE))
    x_t, t = (
        torch.randn(3, 2, generator=seeded(0), dtype=torch.float64),
        torch.tensor(0.5, dtype=torch.float64),
    )
    found = guest(x_t, t)
    alpha, sigma = VPSchedule()(t)
    q = ExactMoments(MIXTURE)(x_t, NoiseLevel(alpha=alpha.item(), sigma=sigma.item()))
    assert isinstance(found, GaussianPosterior)
    torch.testing.assert_close(found.mean, q.mean)
    torch.testing.assert_close(found.var, q.cov.diagonal())


def test_a_models_values_lie_within_minus_one_and_one() -> None:
    """x ~ N(0.5, 0.1^2) is u ~ N(0, 0.2^2); the schedule ends at the model's noisiest level, 50 for
    x and 100 for u.
    """
    guest = to_azula(toy_model(0.1))
    u_t, t = torch.randn(3, *SHAPE, generator=seeded(0)), torch.tensor(0.6)
    alpha, sigma = (one.item() for one in guest.schedule(t))
    gain = alpha * 0.04 / (alpha**2 * 0.04 + sigma**2)
    torch.testing.assert_close(guest(u_t, t).mean, gain * u_t)
    alpha, sigma = guest.schedule(torch.tensor(1.0, dtype=torch.float64))
    assert (sigma / alpha).item() == pytest.approx(100)


def test_azulas_samplers_sample_ours() -> None:
    """DDPM's steps with the exact denoiser of u ~ N(0, 0.2^2) are linear: their variance is known,
    step by step.
    """
    sampler = DDPMSampler(to_azula(toy_model(0.1)), steps=40, silent=True)
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        u = sampler(sampler.init((500, *SHAPE)))
    levels = [
        tuple(one.item() for one in sampler.denoiser.schedule(t))
        for t in sampler.timesteps.double()
    ]
    variance = levels[0][0] ** 2 + levels[0][1] ** 2
    for (alpha, sigma), (alpha_s, sigma_s) in pairwise(levels):
        gain = alpha * 0.04 / (alpha**2 * 0.04 + sigma**2)
        kept = (alpha / alpha_s * sigma_s / sigma) ** 2
        factor = alpha_s * gain + sigma_s * math.sqrt(kept) / sigma * (1 - alpha * gain)
        variance = factor**2 * variance + sigma_s**2 * (1 - kept)
    assert u.mean().item() == pytest.approx(0, abs=0.01)
    assert u.std().item() == pytest.approx(math.sqrt(variance), rel=0.03)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda one: type(one).__name__)
def test_azulas_denoiser_is_ours(schedule: Any) -> None:
    """Of N(1, 0.3^2), at levels of any alpha; mean and covariance by the Jacobian, closed form."""
    prior = GaussianDenoiser(
        torch.ones(2).double(), DiagonalCovariance(torch.tensor([0.09, 0.09]).double()), schedule
    )
    prior.forward = lambda x_t, t: _gaussian(
        x_t, t, schedule
    )  # azula 0.11.1 calls a property in GaussianDenoiser
    ours = from_azula(prior)
    for level in (
        NoiseLevel(0.2),
        NoiseLevel(alpha=0.5, sigma=0.4),
        NoiseLevel(alpha=3.0, sigma=7.0),
    ):
        x_t = torch.randn(4, 2, generator=seeded(1), dtype=torch.float64)
        q = FullMoments(ours)(x_t, level)
        gain = level.alpha * 0.09 / (level.alpha**2 * 0.09 + level.sigma**2)
        torch.testing.assert_close(ours(x_t, level), 1 + gain * (x_t - level.alpha))
        torch.testing.assert_close(
            q.cov.diagonal(), torch.full((4, 2), gain * level.tweedie, dtype=torch.float64)
        )


def _gaussian(x_t: Tensor, t: Tensor, schedule: Any) -> DiracPosterior:
    alpha, sigma = schedule(t)
    return DiracPosterior(1 + alpha * 0.09 / (alpha**2 * 0.09 + sigma**2) * (x_t - alpha))


def test_there_and_back() -> None:
    back = from_azula(to_azula(MIXTURE.denoiser()))
    x_t = torch.randn(4, 2, generator=seeded(0), dtype=torch.float64)
    for sigma in (0.01, 0.5, 30.0):
        torch.testing.assert_close(
            back(x_t, NoiseLevel(sigma)), MIXTURE.denoiser()(x_t, NoiseLevel(sigma))
        )


def test_bad_input() -> None:
    with pytest.raises(UsageError, match="2000"):
        from_azula(to_azula(MIXTURE.denoiser()))(torch.zeros(1, 2), NoiseLevel(2000.0))
    with pytest.raises(UsageError, match="got Identity"):
        from_azula(nn.Identity())
    with pytest.raises(UsageError, match="called with x_t and a level, got int"):
        to_azula(3)  # type: ignore[arg-type]


def test_where_azula_is_missing_one_line_says_so() -> None:
    code = "import sys; sys.modules['azula'] = None\nimport mmdgs\nmmdgs.interop.to_azula"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "pip install mmdgs[azula]" in found.stderr.splitlines()[-1]
    assert mmdgs.interop.to_azula is to_azula


def test_the_example_of_the_docs_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmdgs, "load", lambda name: stand_in_model(tmp_path), raising=False)
    scope: dict[str, Any] = {}
    with torch.random.fork_rng([]):
        exec(blocks_of(INTEROP)[0], scope)
    assert scope["images"].shape == scope["q"].mean.shape == (2, 3, 16, 16)


# --- azula's solvers


def problem(rows: int, operator: Any, tau: float = 0.1) -> rivals.Problem:
    mixture = smooth()
    x = mixture.sample(rows, generator=seeded(2)).reshape(-1, *SHAPE)
    y = operator(x)
    y = y + tau * torch.randn(y.shape, generator=seeded(3), dtype=y.dtype)
    return rivals.Problem(
        rivals.Counted(ImageDenoiser(mixture.denoiser())), y, operator, tau, 100.0
    )


@pytest.mark.parametrize("operator", [Box(SHAPE, 2), Downsample(SHAPE, 2)], ids=repr)
def test_mmps_is_given_the_same_levels_units_and_operator(operator: Any) -> None:
    """On a Gaussian its mean with enough iterations is that of our conditioned Gaussian."""
    posed = problem(3, operator)
    guest = to_azula(posed.counted, VPSchedule())
    sampler = rivals._SAMPLERS["MMPS"](posed, guest, 16, {"steps": 4})
    t = torch.tensor(0.4, dtype=torch.float64)
    alpha, sigma = (one.item() for one in VPSchedule()(t))
    x_t = torch.randn(3, *SHAPE, generator=seeded(4), dtype=torch.float64)
    exact = GivenMoments(_Images(smooth()), posed.y, operator, posed.tau)(
        x_t, NoiseLevel(alpha=alpha, sigma=sigma)
    )
    torch.testing.assert_close(sampler.denoiser(x_t, t).mean, exact.mean, rtol=1e-5, atol=1e-6)


class _Images:
    """Exact moments of images."""

    def __init__(self, mixture: GaussianMixture) -> None:
        self.moments = FullMoments(ImageDenoiser(mixture.denoiser()))
        self.denoiser = self.moments.denoiser

    def __call__(self, x_t: Tensor, level: NoiseLevel, **keywords: Any) -> Any:
        return self.moments(x_t, level)


@pytest.mark.parametrize(
    ("name", "setting", "a_step"), [("MMPS", 1, 5), ("MMPS", 4, 11), ("PiGDM", 0, 3), ("DPS", 1, 3)]
)
def test_evaluations_are_counted(name: str, setting: float, a_step: int) -> None:
    """A forward pass is one and a product with the Jacobian two: GMRES has one an iteration, and
    one is at the end.
    """
    posed = problem(2, Box(SHAPE, 2))
    posed.draw(name, 6, setting, 0)
    assert posed.counted.cost.evaluations == 6 * a_step


def test_the_pseudo_inverse_is_the_ridge_estimate() -> None:
    posed = problem(3, Downsample(SHAPE, 2))
    a = posed.a(torch.eye(16, dtype=torch.float64).reshape(-1, *SHAPE)).mT
    gain = 0.7 * a.mT @ torch.linalg.inv(0.7 * a @ a.mT + posed.tau**2 * torch.eye(4))
    expected = posed.y.flatten(1) @ gain.mT
    torch.testing.assert_close(posed.pseudo_inverse(posed.y.flatten(1), 0.7).flatten(1), expected)


def test_rows_of_dps_do_not_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """azula divides by the norm of the whole batch; here each row has the step that it would have
    alone.
    """
    monkeypatch.setattr(torch, "randn_like", lambda x, **_: torch.ones_like(x))
    both = problem(2, Box(SHAPE, 2))
    together = both.draw("DPS", 5, 1.0, 0)
    for i in range(2):
        one = rivals.Problem(
            both.counted, both.y[i : i + 1], both.operator, both.tau, both.noisiest
        )
        torch.testing.assert_close(one.draw("DPS", 5, 1.0, 0), together[i : i + 1])


@pytest.mark.parametrize("name", ["MMPS", "PiGDM", "DPS"])
def test_a_model_is_restored_in_its_units(name: str) -> None:
    """x ~ N(0.5, 0.1^2) seen at half of its pixels: draws are near y there, elsewhere near 0.5."""
    model, operator = toy_model(0.1), Box(SHAPE, 2)
    y = operator(torch.full((2, *SHAPE), 0.6))
    draws, evaluations = rivals.restore(name, model, y, operator, 0.02, steps=60, draws=20, seed=1)
    assert draws.shape == (20, 2, *SHAPE)
    assert draws.isfinite().all()
    assert evaluations == 60 * (5 if name == "MMPS" else 3)
    seen = operator(torch.ones(1, *SHAPE))[0].bool()
    assert draws[..., seen].mean().item() == pytest.approx(0.6, abs=0.03)
    assert draws[..., ~seen].mean().item() == pytest.approx(0.5, abs=0.03)
    again, _ = rivals.restore(name, model, y, operator, 0.02, steps=60, draws=20, seed=1)
    assert torch.equal(draws, again)


def test_mmps_draws_the_posterior_of_a_gaussian() -> None:
    """With iterations enough for 12 measurements and many steps: the mean and the spread of p(x |
    y).
    """
    posed = problem(1, Box(SHAPE, 2))
    rows = rivals.Problem(
        posed.counted, posed.y.expand(400, *SHAPE), posed.operator, posed.tau, 100.0
    )
    draws = rows.draw("MMPS", 60, 12, 0)
    exact = smooth().given(posed.y, posed.operator, posed.tau)
    spread = exact.sample(4000, generator=seeded(5)).std(0)[0].reshape(SHAPE)
    hidden = ~posed.operator(torch.ones(1, *SHAPE))[0].bool()
    error = (draws.mean(0) - exact.mean[0].reshape(SHAPE))[hidden].abs()
    assert (error < 5 * spread[hidden] / math.sqrt(400) + 0.01).all()
    torch.testing.assert_close(draws.std(0)[hidden], spread[hidden].to(draws), rtol=0.2, atol=0.02)


def test_unknown_names() -> None:
    with pytest.raises(UsageError, match=r"unknown rival 'mmps' \(did you mean 'MMPS'\?\)"):
        rivals.restore("mmps", toy_model(), torch.zeros(1, *SHAPE), Box(SHAPE, 2), 0.1)

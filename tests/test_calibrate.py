"""Calibration: on exact mixtures it changes nothing, wrong covariances come right, and what is fitted is kept."""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from image_experiments import picture_folder
from nets import tiny_model
from oracles import PLAIN, linear_denoiser, random_covariances
from shared import MNIST_FILES, needs_mnist_files
from torch import Tensor
from toy_models import many_level_model
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli
from mmdgs.data import dequantised, load_images, spread
from mmdgs.errors import UsageError
from mmdgs.lab import shipped_calibrations
from mmdgs.linalg import repair
from mmdgs.linalg.operators import Dense, Diagonal
from mmdgs.metrics import CalibrationReport, calibration_report
from mmdgs.models import FitData
from mmdgs.models.fits import FitStore
from mmdgs.moments import FLOOR, CalibratedMoments, ClippedMoments, calibrated, contract
from mmdgs.moments.calibrated import fit_reach, likeliest_lift
from mmdgs.moments.ocm import OcmMoments
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.posterior import PROBABILITIES
from mmdgs.randomness import Streams, randn_like, seeded
from mmdgs.targets import GaussianMixture

D = 16
LEVELS = [NoiseLevel(sigma=1.0), NoiseLevel(alpha=0.7, sigma=0.3)]


def target() -> GaussianMixture:
    """A Gaussian whose variances run over three orders of magnitude: its posteriors' differ much."""
    rotation, _ = torch.linalg.qr(torch.randn(D, D, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    values = torch.logspace(-3, 0, D, dtype=torch.float64)
    covariance = (rotation * values) @ rotation.mT
    return GaussianMixture(torch.ones(1, dtype=torch.float64), torch.zeros(1, D).double(), covariance[None])


def draws(n: int, seed: int = 1) -> Tensor:
    return target().sample((n,), generator=torch.Generator().manual_seed(seed))


def corrupted(size: float = 0.05) -> mmdgs.Denoiser:
    """The exact denoiser with a Jacobian that is not: its mean is right, and its Jacobian has an error."""
    exact = target().denoiser()
    error = size * torch.randn(D, D, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def denoiser(x_t: Tensor, level: NoiseLevel) -> Tensor:
        wrong = x_t @ error
        return exact(x_t, level) + wrong - wrong.detach()

    return denoiser


@dataclass(frozen=True)
class Scaled:
    """An estimator whose covariance is off by a factor."""

    moments: mmdgs.Moments
    factor: float

    @property
    def denoiser(self) -> mmdgs.Denoiser:
        return self.moments.denoiser

    def __call__(self, x_t: Tensor, level: NoiseLevel, *, generator=None) -> mmdgs.Gaussian:
        q = self.moments(x_t, level, generator=generator)
        return replace(q, cov=q.cov.affine(self.factor, 0.0))


def estimators(denoiser: mmdgs.Denoiser) -> dict[str, mmdgs.Moments]:
    variances = LevelTable.of(dict.fromkeys(LEVELS, 0.3))
    return {
        "full": mmdgs.FullMoments(denoiser),
        "diagonal": mmdgs.DiagonalMoments(denoiser, probes=None),
        "probes": mmdgs.DiagonalMoments(denoiser, probes=10),
        "krylov": mmdgs.KrylovMoments(denoiser, steps=8),
        "isotropic": mmdgs.IsotropicMoments(denoiser, variances),
        "spectral": mmdgs.SpectralMoments(denoiser, LevelTable.of({level: torch.full((D,), 0.1) for level in LEVELS})),
        "ocm": OcmMoments(denoiser, lambda x_t, mean, level: torch.full_like(x_t, 0.1)),
        "clipped": ClippedMoments(mmdgs.FullMoments(denoiser), (-9.0, 9.0)),
    }


# --- without data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_rule_leaves_exact_denoisers_as_they_are(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    means = 0.5 * torch.randn(2, 6, dtype=torch.float64, generator=generator)
    mixture = GaussianMixture([0.6, 0.4], means, random_covariances(2, 6, seed=1))
    denoiser, x_t = mixture.to(dtype=dtype).denoiser(), torch.randn(20, 6, dtype=dtype, generator=generator)
    for level in LEVELS:
        for make in (mmdgs.FullMoments, lambda d, floor: mmdgs.DiagonalMoments(d, None, floor)):
            ruled, plain = make(denoiser, None)(x_t, level), make(denoiser, FLOOR)(x_t, level)
            torch.testing.assert_close(ruled.cov.dense(), plain.cov.dense(), rtol=0, atol=2e-6 * level.variance)
            assert ruled.repaired.max() == 0


def test_the_rule_makes_noisy_jacobians_sane() -> None:
    x = draws(400)
    for name in ("full", "diagonal", "probes", "krylov"):
        ruled = estimators(corrupted())[name]
        before = calibration_report(replace(ruled, floor=FLOOR), x, LEVELS[0])
        after = calibration_report(ruled, x, LEVELS[0])
        assert before.above_isotropic <= after.above_isotropic
        assert after.above_isotropic > -0.1, name
        assert after.z_variance < 3, name
    assert calibration_report(replace(estimators(corrupted())["full"], floor=FLOOR), x, LEVELS[0]).mahalanobis > 100


def test_exact_variances_of_few_numbers_take_their_error_from_the_eigenvalues() -> None:
    """diag J is about (0.05, 0.15), and J has the eigenvalue -0.1: what is below 0.75 of its size is lifted."""
    angle = 0.9
    turn = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]], dtype=torch.float64)
    jacobian = turn @ torch.diag(torch.tensor([0.3, -0.1], dtype=torch.float64)) @ turn.mT
    assert 0 < jacobian[0, 0] < 0.075 < jacobian[1, 1]
    x_t = torch.zeros(3, 2, dtype=torch.float64)
    for probes in (None, 2, 5):
        q = mmdgs.DiagonalMoments(linear_denoiser(jacobian), probes=probes)(x_t, PLAIN, generator=seeded(0))
        expected = torch.stack([torch.tensor(0.075, dtype=torch.float64), jacobian[1, 1]]) * PLAIN.tweedie
        torch.testing.assert_close(q.cov.diagonal(), expected.expand(3, 2))
        assert (q.repaired == 0.5).all()
    given = mmdgs.DiagonalMoments(linear_denoiser(jacobian), None, FLOOR)(x_t, PLAIN)
    torch.testing.assert_close(given.cov.diagonal(), (PLAIN.tweedie * jacobian.diagonal()).expand(3, 2))


@pytest.mark.parametrize("probes", [2, 3, 5])
def test_few_probes_of_an_exact_denoiser_are_as_good_as_one_variance(probes: int) -> None:
    """Their noise is known, and what is below it is lifted to it; before, 3 signs were 0.2 nats a number worse."""
    x = draws(400)
    for denoiser in (target().denoiser(), corrupted()):
        found = calibration_report(mmdgs.DiagonalMoments(denoiser, probes=probes), x, LEVELS[0])
        assert found.above_isotropic > -0.1
        assert found.z_variance < 1.5


def test_much_repair_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(repair, "_seen", 0)
    post = mmdgs.FullMoments(corrupted())
    with caplog.at_level(logging.WARNING, logger="mmdgs"):
        for _ in range(3):
            post(draws(4), PLAIN)
    assert caplog.text.count("moments = mmdgs.calibrate(moments, data, levels)") == 1
    caplog.clear()
    monkeypatch.setattr(repair, "_seen", 0)
    with caplog.at_level(logging.WARNING, logger="mmdgs"):
        for _ in range(repair.WATCHED):
            mmdgs.FullMoments(target().denoiser())(draws(4), PLAIN)
        post(draws(4), PLAIN)  # the eleventh posterior: nobody looks
        monkeypatch.setattr(repair, "_seen", 0)
        replace(post, floor=0.1)(draws(4), PLAIN)  # a floor that was asked for
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("kind", "sigma", "dtype", "warned"),
    [("noise", 500, "float32", True), ("noise", 500, "float64", False), ("edm", 500, "float32", False),
     ("noise", 20, "float32", False)],
)  # fmt: skip
def test_variances_lost_to_rounding_are_said(kind, sigma, dtype, warned, monkeypatch, caplog) -> None:
    monkeypatch.setattr(contract, "_looks", {"left": 10})
    level, dtype = NoiseLevel(sigma=float(sigma)), getattr(torch, dtype)
    # Of N(0, 1): D = x_t / (1 + sigma^2).
    if kind == "noise":
        denoiser = mmdgs.noise_denoiser(lambda x: x * (level.sigma / (1 + level.variance)))
    else:
        denoiser = mmdgs.clean_denoiser(lambda x: x / (1 + level.variance))
    x_t = torch.full((2, 4), 3.0, dtype=dtype)
    with caplog.at_level(logging.WARNING, logger="mmdgs"):
        for _ in range(3):
            mmdgs.FullMoments(denoiser)(x_t, level)
            mmdgs.DiagonalMoments(denoiser, None)(x_t, level)
    assert caplog.text.count("rounding in float32 is about") == warned


# --- with data ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [0.1, 1.0, 7.0])
def test_a_wrong_scale_is_found(factor: float) -> None:
    found = mmdgs.calibrate(Scaled(mmdgs.FullMoments(target().denoiser()), factor), draws(2000), LEVELS, progress=None)
    # 1,000 rows of 16 numbers: the relative error of a mean of squares is sqrt(2 / 16,000) = 0.011.
    for level in LEVELS:
        _, scale, *reach = found.table[level].tolist()
        assert scale == pytest.approx(1 / factor, rel=0.05)
        # A quantile's relative error is sqrt(p (1 - p) / 16,000) / (z density): at most 0.04 at 5% and 99.9%.
        assert reach == pytest.approx([1] * len(PROBABILITIES), abs=0.12)
        assert reach[3:-2] == pytest.approx([1] * (len(PROBABILITIES) - 5), abs=0.05)
        report = found.report[level.ratio]
        assert isinstance(report, CalibrationReport)
        assert report.examples == 1000
        assert report.mahalanobis == pytest.approx(1, rel=0.05)


def test_on_exact_mixtures_it_changes_little() -> None:
    post = mmdgs.FullMoments(target().denoiser())
    found = mmdgs.calibrate(post, draws(1000), LEVELS[0], progress=None)
    x_t = draws(5, seed=3)
    torch.testing.assert_close(found(x_t, LEVELS[0]).cov.dense(), post(x_t, LEVELS[0]).cov.dense(), rtol=0.1, atol=1e-3)


@pytest.mark.parametrize("name", list(estimators(corrupted())))
def test_every_estimator_comes_right(name: str) -> None:
    found = mmdgs.calibrate(estimators(corrupted())[name], draws(600), LEVELS, progress=None)
    for level in LEVELS:
        report = calibration_report(found, draws(400, seed=5), level)
        assert 0.8 < report.mahalanobis < 1.25
        assert 0.87 < report.interval_coverage < 0.93
        if name != "spectral":  # cosines are no basis for these data, and its spectrum was made up
            assert report.above_isotropic > -0.05


def test_the_best_floor_and_scale_are_those_of_a_search() -> None:
    """The grid in one pass over the data, against likelihoods of calibrated estimators one by one."""
    x, level, post = draws(200), LEVELS[0], mmdgs.FullMoments(corrupted())
    found = mmdgs.calibrate(post, x, level, progress=None)
    floor, scale, *_ = found.table[level].tolist()

    def nats(floor: float, scale: float) -> float:
        return calibration_report(CalibratedMoments(post, LevelTable.of({level: [floor, scale]})), x[::2], level).nats

    best = nats(floor, scale)
    others = [
        nats(f * floor, s * scale) for f, s in ((1.3, 1), (1 / 1.3, 1), (1, 1.1), (1, 0.9), (1.3, 0.9), (0.7, 1.1))
    ]
    assert best > max(others)


@pytest.mark.parametrize("name", ["full", "krylov"])
def test_densities_and_draws_both_come_right(name: str) -> None:
    """A steep spectrum whose small values are error: a scale by r' C^-1 r alone left draws too narrow."""
    d, n, level = 96, 64, NoiseLevel(sigma=1.0)
    generator = torch.Generator().manual_seed(0)
    rotation, _ = torch.linalg.qr(torch.randn(d, d, generator=generator, dtype=torch.float64))
    values = 0.999 * torch.logspace(0, -4, d, dtype=torch.float64)  # of the posterior covariance
    error = torch.randn(d, d, generator=generator, dtype=torch.float64) * 0.01 / math.sqrt(d)
    prior, exact = ((rotation * one) @ rotation.mT for one in ((values / (1 - values)).sqrt(), values))

    def denoiser(x_t: Tensor, level: NoiseLevel) -> Tensor:
        wrong = x_t @ (error + error.mT)
        return x_t @ exact + wrong - wrong.detach()

    x = torch.randn(n, d, generator=generator, dtype=torch.float64) @ prior
    made = {"full": mmdgs.FullMoments(denoiser), "krylov": mmdgs.KrylovMoments(denoiser, steps=12)}[name]
    found = mmdgs.calibrate(made, x, level, progress=None)
    report = found.report[level.ratio]
    # 32 rows judge; half of tr C lies in its ten largest eigenvalues: a relative error of sqrt(2 / 320) = 0.08.
    assert 0.8 < report.mahalanobis < 1.25
    assert report.above_isotropic > 0.8
    clean = torch.randn(n, d, generator=generator, dtype=torch.float64) @ prior
    q = found(clean + torch.randn(n, d, generator=generator, dtype=torch.float64), level, generator=generator)
    spread = (q.sample(generator=generator) - q.mean).square().mean()
    assert spread / (clean - q.mean).square().mean() == pytest.approx(1, abs=0.25)


@pytest.mark.parametrize("tails", ["heavy", "light"])
def test_every_interval_holds_what_it_says(tails: str) -> None:
    """Errors that are no Gaussian's, two Gaussians mixed or a sign: also intervals between those that are fitted."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(6_000, 8, generator=generator, dtype=torch.float64)
    wide = torch.rand(drawn.shape, generator=generator) < 0.1
    x = drawn * torch.where(wide, 8.0, 0.5) if tails == "heavy" else drawn.sign() + 0.05 * drawn
    moments, level = Still(), NoiseLevel(sigma=10.0)
    found = mmdgs.calibrate(moments, x[:4_000], level, progress=None)
    clean = x[4_000:]
    q = found(clean, level)
    held = {p: _held(q, clean, p) for p in (0.05, 0.25, 0.5, 0.65, 0.8, 0.9, 0.93, 0.95, 0.97, 0.99, 0.995)}
    # 16,000 numbers judge and as many fitted: a standard error of at most sqrt(2 / 4 / 16,000) = 0.0056.
    assert held == pytest.approx({p: p for p in held}, abs=0.02)
    assert held[0.99] == pytest.approx(0.99, abs=0.005)
    assert found.report[level.ratio].covered[0.99] == pytest.approx(0.99, abs=0.005)
    assert "99% hold 9" in str(found.report[level.ratio])
    halves = [q.deviations(p / 1000) for p in range(50, 1000)]
    assert halves == sorted(halves)
    # Without the shape 50% and 99% are far off.
    assert abs(_held(replace(q, reach=None), clean, 0.5) - 0.5) > 0.1


@dataclass(frozen=True)
class Still:
    """An estimator whose mean is 0 and whose variances are 1."""

    @property
    def denoiser(self) -> mmdgs.Denoiser:
        return lambda x_t, level: 0 * x_t

    def __call__(self, x_t: Tensor, level: NoiseLevel, *, generator=None) -> mmdgs.Gaussian:
        return mmdgs.Gaussian(0 * x_t, Diagonal(torch.ones_like(x_t)))


def _held(q: mmdgs.Gaussian, x: Tensor, probability: float) -> float:
    low, high = q.interval(probability)
    return ((low <= x) & (x <= high)).double().mean().item()


def test_intervals_that_few_examples_do_not_tell_are_refused() -> None:
    """Of 400 numbers 8 lie beyond 98%, which are too few, and 20 beyond 95%."""
    level = NoiseLevel(sigma=10.0)
    found = mmdgs.calibrate(Still(), torch.randn(200, 4, generator=seeded(0)), level, progress=None)
    q = found(torch.zeros(1, 4), level)
    assert q.highest == 0.95
    assert [*found.report[level.ratio].covered][-1] == 0.95
    for probability in (0.01, 0.951, 0.99):
        with pytest.raises(ValueError, match=rf"fitted for intervals of probability 0.05 to 0.95, got {probability}"):
            q.interval(probability)
    with pytest.raises(ValueError, match="probability must lie between 0 and 1, got 1"):
        q.interval(1)
    plain = replace(q, reach=None)
    torch.testing.assert_close(plain.interval(0.9)[1], 1.6448536 * q.cov.diagonal().sqrt())
    assert plain.deviations(1e-3) < plain.deviations(0.9999)


def test_a_quantile_curve_of_normals_is_flat() -> None:
    z = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    assert fit_reach(3 * z) == pytest.approx([3] * len(PROBABILITIES), rel=0.03)
    assert min(fit_reach(torch.zeros(100))) > 0


@dataclass(frozen=True)
class Noting:
    """An estimator that notes what it was given and what it drew, row by row."""

    noted: dict[str, list[tuple[float, ...]]]

    @property
    def denoiser(self) -> mmdgs.Denoiser:
        return lambda x_t, level: x_t

    def __call__(self, x_t: Tensor, level: NoiseLevel, *, generator=None) -> mmdgs.Gaussian:
        self.noted["noise"] += map(tuple, x_t.tolist())
        self.noted["probes"] += map(tuple, randn_like(x_t, generator).tolist())
        return mmdgs.Gaussian(x_t, Diagonal(torch.ones_like(x_t)))


def test_no_example_is_judged_with_noise_or_probes_of_the_fit() -> None:
    """Of clean zeros x_t is the noise itself: twelve examples have twelve noises, in whatever half they are."""
    noting = Noting({"noise": [], "probes": []})
    mmdgs.calibrate(noting, torch.zeros(12, 3), PLAIN, progress=None)
    for what in ("noise", "probes"):
        assert len(set(noting.noted[what])) == 12, what
    fitted = set(noting.noted["noise"][:6])
    noting.noted["noise"].clear()
    calibration_report(noting, torch.zeros(12, 3), PLAIN)
    assert fitted.isdisjoint(noting.noted["noise"])


def test_between_levels_it_is_interpolated() -> None:
    table = LevelTable([0.1, 0.4], [[0.01, 1.0], [0.04, 4.0]])
    found = CalibratedMoments(mmdgs.DiagonalMoments(linear_denoiser(-torch.eye(2)), None), table)
    q = found(torch.zeros(1, 2), NoiseLevel(sigma=0.2))
    torch.testing.assert_close(q.cov.diagonal(), torch.full((1, 2), 2.0 * 0.02 * 0.04))


def test_beyond_the_levels_of_the_fit_it_fades_to_nothing(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """Scale 4 and reach 2 at sigma 1: half as much in logarithms at sqrt(2), and none from 2 on; said once."""
    monkeypatch.setattr(calibrated, "_told", set())
    row = [1e-3, 4.0, *[2.0] * len(PROBABILITIES)]
    own = mmdgs.DiagonalMoments(linear_denoiser(0.5 * torch.eye(2, dtype=torch.float64)), None)
    found = CalibratedMoments(own, LevelTable([0.1, 1.0], [row, row]))
    x_t = torch.zeros(1, 2, dtype=torch.float64)

    def scale_and_reach(sigma: float) -> tuple[float, float]:
        level = NoiseLevel(sigma=sigma)
        q = found(x_t, level)
        scale = (q.cov.diagonal() / own(x_t, level).cov.diagonal()).mean().item()
        return scale, q.deviations(0.9) / replace(q, reach=None).deviations(0.9)

    with caplog.at_level(logging.WARNING, logger="mmdgs"):
        assert scale_and_reach(0.5) == pytest.approx((4, 2))
        assert caplog.text == ""
        for beyond in (math.sqrt(2), 0.1 / math.sqrt(2)):
            assert scale_and_reach(beyond) == pytest.approx((2, math.sqrt(2)))
        for far in (2.0, 50.0, 0.05, 1e-3):
            assert scale_and_reach(far) == pytest.approx((1, 1))
    assert caplog.text.count("lies outside 0.1 to 1, where the calibration was fitted") == 1


@pytest.mark.parametrize("name", ["full", "diagonal", "krylov", "ocm", "clipped"])
def test_the_fade_ends_at_the_estimators_own_floor(name: str) -> None:
    """The Jacobian has negative values, so that the floor without a calibration comes from their size."""
    own = estimators(corrupted())[name]
    found = CalibratedMoments(own, LevelTable([1.0], [[0.3, 1.0]]))
    x_t = draws(2)

    def covariance(moments: mmdgs.Moments, sigma: float) -> Tensor:
        return moments(x_t, NoiseLevel(sigma=sigma), generator=seeded(0)).cov.dense()

    for before, after in ((1.999, 1.999), (0.5003, 0.5003)):
        torch.testing.assert_close(covariance(found, before), covariance(own, after), rtol=0.02, atol=1e-3)
    assert (covariance(found, 1.0) - covariance(own, 1.0)).abs().max() > 0.05
    assert (covariance(found, 1.01) - covariance(found, 1.0)).abs().max() < 0.05, "no jump where it begins"


# --- kept beside the model ----------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MMDGS_CACHE", str(tmp_path / "cache"))
    mmdgs.save(tiny_model("score", (1, 8, 8), sigma=0.5), tmp_path / "model")
    return tmp_path / "model"


def images(n: int = 16) -> Tensor:
    return torch.rand(n, 1, 8, 8, generator=torch.Generator().manual_seed(0))


def test_a_models_calibration_is_kept_and_used(folder: Path) -> None:
    model = mmdgs.load(folder)
    assert isinstance(model.posterior("diagonal"), mmdgs.DiagonalMoments)
    found = mmdgs.calibrate(model.posterior("diagonal", probes=4), images(), progress=None)
    assert (folder / "calibration-lattice-4.safetensors").is_file()
    again = mmdgs.load(folder)
    kept = again.posterior("diagonal", probes=4)
    assert isinstance(kept, CalibratedMoments)
    torch.testing.assert_close(kept.table.values, found.table.values, rtol=1e-6, atol=0)
    for other in (
        again.posterior("diagonal"),  # three probes
        again.posterior("krylov"),
        again.posterior("diagonal", probes=4, calibrated=False),
        again.posterior("diagonal", probes=4, floor=1e-6),
    ):
        assert not isinstance(other, CalibratedMoments)
    assert kept.fit_digest == found.fit_digest
    assert isinstance(again.posterior("diagonal", probes=4, calibrated=True), CalibratedMoments)
    with pytest.raises(UsageError, match=r"no calibration of lattice-3 is kept for .*: fit one with mmdgs.calibrate"):
        again.posterior("diagonal", calibrated=True)
    with pytest.raises(UsageError, match="a calibration has a floor of its own: leave out the floor 1e-06"):
        again.posterior("diagonal", probes=4, floor=1e-6, calibrated=True)
    with torch.no_grad():
        next(again.network.parameters()).add_(1.0)  # other weights
    assert isinstance(again.posterior("diagonal", probes=4), mmdgs.DiagonalMoments)


def test_data_by_name_and_a_second_calibration(folder: Path, tmp_path: Path) -> None:
    mmdgs.save(tiny_model("score", (3, 8, 8), sigma=0.5), tmp_path / "colours")
    model = mmdgs.load(tmp_path / "colours")
    data = FitData(str(picture_folder(tmp_path / "images", shape=(3, 8, 8))), 12)
    first = mmdgs.calibrate(model.posterior("diagonal"), data, progress=None)
    second = mmdgs.calibrate(model.posterior("diagonal"), data, progress=None)  # of one that is calibrated
    assert isinstance(second.moments, mmdgs.DiagonalMoments)
    assert torch.equal(first.table.values, second.table.values)


def test_a_report_is_drawn_and_saved(tmp_path: Path) -> None:
    report = calibration_report(mmdgs.FullMoments(target().denoiser()), draws(200), PLAIN)
    assert report.save(tmp_path / "report.png").stat().st_size > 5000
    canvas = report.figure()
    canvas.draw_without_rendering()
    title = canvas.get_suptitle() and canvas._suptitle.get_window_extent()
    assert 0 <= title.x0 < title.x1 <= canvas.bbox.x1  # no word of it is cut off
    assert "z variance" in str(report)
    assert math.isclose(report.covered[0.9], report.interval_coverage)
    assert report.coverage == pytest.approx(0.9, abs=0.03)


# --- bad input ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("judge", ["calibrate", "report"])
@pytest.mark.parametrize(
    ("data", "level", "message"),
    [
        (torch.zeros(16, 1, 7, 7), 0.5, r"the data are of shape \(1, 7, 7\) each, and the model's of \(1, 8, 8\)"),
        (255 * images(), 0.5, "the data run from .* and the model's from 0 to 1"),
        (2 * images() - 1, 0.5, "the data run from -"),
        (images(7), 0.5, "need 8 clean examples or more, got 7"),
        (images() / 0, 0.5, "values that are not finite"),
        (images(), 0.4, "trained at sigma / alpha 0.5 alone, and has no level 0.4"),
    ],
)
def test_bad_input_takes_one_line(folder: Path, judge: str, data: Tensor, level: float, message: str) -> None:
    moments, at = mmdgs.load(folder).posterior("diagonal"), NoiseLevel(sigma=level)
    with pytest.raises(ValueError, match=message):
        mmdgs.calibrate(moments, data, at, progress=None) if judge == "calibrate" else calibration_report(
            moments, data, at
        )


def test_levels_are_needed_without_a_model() -> None:
    with pytest.raises(ValueError, match="give the noise levels to calibrate at"):
        mmdgs.calibrate(mmdgs.FullMoments(target().denoiser()), draws(20))


def test_a_covariance_whose_large_eigenvalues_are_too_small_is_fitted_for_densities_and_draws_alike() -> None:
    """Four large eigenvalues are told four times too small: one scale cannot be right for them and for the others."""
    g = torch.Generator().manual_seed(0)
    true = torch.cat([torch.full((4,), 1.0), torch.full((36,), 0.01)]).double()
    said = true.clone()
    said[:4] = 0.25
    x = true.sqrt() * torch.randn(2_000, 40, generator=g, dtype=torch.float64)
    q = mmdgs.Gaussian(torch.zeros_like(x), Dense.from_matrix(torch.diag(said).expand(len(x), -1, -1), x.shape[1:]))
    floor, scale = likeliest_lift([(x, q)], 1.0)
    fitted = scale * said.clamp(min=floor)
    by_direction, by_spread = (x.square() / fitted).mean().item(), (x.square().sum(1).mean() / fitted.sum()).item()
    assert max(by_direction, by_spread) < 1.11
    assert by_direction * by_spread == pytest.approx(1), "one is as much above as the other is below"


# --- commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untrained: None) -> Path:
    """A model of five levels from 4 to 0.1, calibrated from 0.8 to 0.2, and images for it."""
    monkeypatch.setenv("MMDGS_CACHE", str(tmp_path / "cache"))
    many_level_model().save_pretrained(tmp_path / "many")
    model = mmdgs.load(tmp_path / "many")
    for probes in (3, 10):
        moments, levels = model.posterior("diagonal", probes=probes), [NoiseLevel(sigma=0.8), NoiseLevel(sigma=0.2)]
        mmdgs.calibrate(moments, images(24), levels, progress=None)
    numpy.savez(tmp_path / "clean.npz", arr_0=(255 * images(2)).byte().permute(0, 2, 3, 1).numpy())
    return tmp_path


COMMANDS = {
    "sample": (["--n", "2", "--covariance", "diagonal", "--sweeps", "1"], "samples.json", 3),
    "restore": (
        ["clean.npz", "--simulate", "--operator", "sr:2", "--noise", "0.1", "--steps", "3", "--covariance", "diagonal"],
        "restored.json",
        3,
    ),
    "posterior": (["clean.npz", "--sigma", "0.3", "--draws", "1", "--components", "1"], "posterior.json", 0),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_record_the_calibration_and_can_leave_it_out(many: Path, name: str) -> None:
    more, file, outside = COMMANDS[name]

    def settings(out: str, *options: str) -> dict[str, Any]:
        words = [str(many / word) if word == "clean.npz" else word for word in more]
        result = CliRunner().invoke(cli.app, [name, str(many / "many"), *words, "-q", "-o", str(many / out), *options])
        assert result.exit_code == 0, result.output
        return json.loads((many / out / file).read_text())["settings"]

    probes = 10 if name == "posterior" else 3
    kept = mmdgs.load(many / "many").posterior("diagonal", probes=probes)
    with_it, without, required = settings("with"), settings("without", "--uncalibrated"), settings("r", "--calibrated")
    recorded = {
        "digest": kept.fit_digest,
        "fitted_at": [pytest.approx(0.2), pytest.approx(0.8)],
        "fitted_levels": 2,
        "levels_outside": outside,
    }
    for one in (with_it, required):
        assert (one["calibration"]["diagonal"] if name == "posterior" else one["calibration"]) == recorded
    assert without["calibration"] == ({"diagonal": None, "krylov": None} if name == "posterior" else None)
    option = without["method"] if name == "sample" else without
    assert option["calibrated"] is False
    # What was made with one calibration is not gone on with with another.
    words = [str(many / word) if word == "clean.npz" else word for word in more]
    mmdgs.calibrate(kept, images(24), [NoiseLevel(sigma=0.7), NoiseLevel(sigma=0.2)], progress=None)
    again = [name, str(many / "many"), *words, "-q", "-o", str(many / "with"), "--resume"]
    assert CliRunner().invoke(cli.app, again).exit_code == 2


def test_a_calibration_that_is_not_kept_cannot_be_required(many: Path) -> None:
    words = ["sample", str(many / "many"), "--covariance", "krylov", "--calibrated", "-o", str(many / "out")]
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 2
    assert "no calibration of krylov-20 is kept for" in " ".join(result.output.split())
    assert not (many / "out").exists()


# --- those that ship ----------------------------------------------------------------------------------------------


@needs_mnist_files
@pytest.mark.parametrize(("name", "count"), [("mnist", 40), ("mnist-kl", 400)])
def test_intervals_of_models_that_ship_hold_what_they_say(name: str, count: int) -> None:
    """Test digits, which neither the network nor the calibration has seen."""
    model, stored = mmdgs.load(name), load_images("mnist", "test", data_dir=MNIST_FILES).images
    chosen = stored[spread(len(stored), count)]
    x = model.scaled(dequantised(chosen, Streams(1, count, purpose="digits")))
    report = calibration_report(model.posterior(calibrated=True), x, model.level, seed=1)
    held = {p: report.covered[p] for p in (0.5, 0.8, 0.9, 0.95)}
    # From digit to digit the share of 50% intervals has a standard deviation of 0.043: 0.007 of the mean of 40.
    assert held == pytest.approx({p: p for p in held}, abs=0.025)
    assert report.covered[0.99] == pytest.approx(0.99, abs=0.006)


def test_shipped_calibrations_are_made_by_a_command(tmp_path: Path) -> None:
    digits = torch.rand(24, 28, 28, 1, generator=seeded(0)).mul(255).byte().numpy()
    for split in ("train", "test"):
        numpy.savez(tmp_path / f"mnist-{split}.npz", digits)
    shipped_calibrations.fit(tmp_path, tmp_path / "weights", tmp_path / "records", ["mnist-kl"], "cpu")
    model, records = mmdgs.load("mnist-kl"), json.loads((tmp_path / "records" / "records.json").read_text())
    store = FitStore(model, "calibration-learned")
    store.beside = tmp_path / "weights" / "mnist-kl" / "calibration-learned.safetensors"
    fitted = CalibratedMoments(model.learned(), store.best_of())
    assert fitted.table.values.shape == (1, 2 + len(PROBABILITIES))
    (cell,) = records["cells"]
    assert (cell["row"], cell["levels"], cell["judged by"]) == ("mnist-kl learned", 1, 24)
    assert cell["held 90"] == pytest.approx(100 * records["reports"]["mnist-kl learned"][0]["covered"]["0.9"])

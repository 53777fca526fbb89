"""Calibration: on exact mixtures it changes nothing, wrong covariances come right, and what is fitted is kept."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from image_experiments import picture_folder
from nets import tiny_model
from oracles import PLAIN, linear_denoiser, random_covariances
from torch import Tensor

import mmdgs
from mmdgs.linalg import repair
from mmdgs.linalg.operators import Dense, Diagonal
from mmdgs.metrics import CalibrationReport, calibration_report
from mmdgs.models import FitData
from mmdgs.moments import FLOOR, CalibratedMoments, ClippedMoments, contract
from mmdgs.moments.calibrated import fit_reach, likeliest_lift
from mmdgs.moments.ocm import OcmMoments
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.randomness import randn_like, seeded
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
        _, scale, reach = found.table[level].tolist()
        assert scale == pytest.approx(1 / factor, rel=0.05)
        assert reach == pytest.approx(1, abs=0.03)
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
    floor, scale, _ = found.table[level].tolist()

    def nats(floor: float, scale: float) -> float:
        return calibration_report(
            CalibratedMoments(post, LevelTable.of({level: [floor, scale, 1.0]})), x[::2], level
        ).nats

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


def test_intervals_reach_as_far_as_errors_do() -> None:
    q = mmdgs.Gaussian(
        torch.zeros(3, 2), mmdgs.FullMoments(linear_denoiser(torch.eye(2)))(torch.zeros(3, 2), PLAIN).cov
    )
    low, high = replace(q, reach=2.0).interval(0.9)
    torch.testing.assert_close(high, 2 * 1.6448536 * q.cov.diagonal().sqrt())
    torch.testing.assert_close(low, -high)
    with pytest.raises(ValueError, match="probability must lie between 0 and 1, got 1"):
        q.interval(1)
    z = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    assert fit_reach(3 * z) == pytest.approx(3, rel=0.02)


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
    table = LevelTable([0.1, 0.4], [[0.01, 1.0, 1.0], [0.04, 4.0, 1.0]])
    found = CalibratedMoments(mmdgs.DiagonalMoments(linear_denoiser(-torch.eye(2)), None), table)
    q = found(torch.zeros(1, 2), NoiseLevel(sigma=0.2))
    torch.testing.assert_close(q.cov.diagonal(), torch.full((1, 2), 2.0 * 0.02 * 0.04))


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

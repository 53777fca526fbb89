"""Calibration: on exact mixtures it changes nothing, wrong covariances come right, and what is
fitted is kept.
"""

from __future__ import annotations

import json
import logging
import math
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from image_experiments import picture_folder
from nets import tiny_model
from oracles import PLAIN, linear_denoiser, numbers, random_covariances
from shared import MNIST_FILES, needs_mnist_files
from torch import Tensor
from toy_models import many_level_model
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli
from mmdgs.data import dequantised, load_images, spread
from mmdgs.errors import UsageError
from mmdgs.linalg import repair
from mmdgs.linalg.operators import Diagonal
from mmdgs.metrics import CalibrationReport, calibration_report
from mmdgs.models import FitData
from mmdgs.moments import FLOOR, CalibratedMoments, ClippedMoments, calibrated, contract
from mmdgs.moments.calibrated import FITTING, posteriors
from mmdgs.moments.ocm import OcmMoments
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.posterior import PROBABILITIES
from mmdgs.randomness import Streams, randn_like, seeded
from mmdgs.targets import GaussianMixture

D = 16
LEVELS = [NoiseLevel(sigma=1.0), NoiseLevel(alpha=0.7, sigma=0.3)]


def target() -> GaussianMixture:
    """A Gaussian whose variances run over three orders of magnitude."""
    rotation, _ = torch.linalg.qr(numbers(D, D))
    covariance = (rotation * torch.logspace(-3, 0, D, dtype=torch.float64)) @ rotation.mT
    return GaussianMixture([1.0], torch.zeros(1, D).double(), covariance[None])


def draws(n: int, seed: int = 1) -> Tensor:
    return target().sample((n,), generator=seeded(seed))


def with_error(denoiser: mmdgs.Denoiser, error: Tensor) -> mmdgs.Denoiser:
    """A denoiser with an error in its Jacobian alone."""

    def wrong(x_t: Tensor, level: NoiseLevel) -> Tensor:
        added = x_t @ error
        return denoiser(x_t, level) + added - added.detach()

    return wrong


def corrupted() -> mmdgs.Denoiser:
    return with_error(target().denoiser(), 0.05 * numbers(D, D, seed=2))


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
    spectrum = LevelTable.of({level: torch.full((D,), 0.1) for level in LEVELS})
    return {
        "full": mmdgs.FullMoments(denoiser),
        "diagonal": mmdgs.DiagonalMoments(denoiser, probes=None),
        "probes": mmdgs.DiagonalMoments(denoiser, probes=10),
        "krylov": mmdgs.KrylovMoments(denoiser, steps=8),
        "isotropic": mmdgs.IsotropicMoments(denoiser, variances),
        "spectral": mmdgs.SpectralMoments(denoiser, spectrum),
        "ocm": OcmMoments(denoiser, lambda x_t, mean, level: torch.full_like(x_t, 0.1)),
        "clipped": ClippedMoments(mmdgs.FullMoments(denoiser), (-9.0, 9.0)),
    }


# --- without data


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_rule_leaves_exact_denoisers_as_they_are(dtype: torch.dtype) -> None:
    mixture = GaussianMixture([0.6, 0.4], 0.5 * numbers(2, 6), random_covariances(2, 6, seed=1))
    denoiser, x_t = mixture.to(dtype=dtype).denoiser(), numbers(20, 6, seed=2).to(dtype)
    for level in LEVELS:
        for make in (mmdgs.FullMoments, lambda d, floor: mmdgs.DiagonalMoments(d, None, floor)):
            ruled, plain = make(denoiser, None)(x_t, level), make(denoiser, FLOOR)(x_t, level)
            off = ruled.cov.dense() - plain.cov.dense()
            assert off.abs().max() <= 2e-6 * level.variance
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
    plain = replace(estimators(corrupted())["full"], floor=FLOOR)
    assert calibration_report(plain, x, LEVELS[0]).mahalanobis > 100


def test_exact_variances_of_few_numbers_take_their_error_from_the_eigenvalues() -> None:
    """diag J is about (0.05, 0.15), and J has the eigenvalue -0.1: what is below 0.75 of its size
    is lifted.
    """
    cos, sin = math.cos(0.9), math.sin(0.9)
    turn = torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
    jacobian = turn @ torch.diag(torch.tensor([0.3, -0.1], dtype=torch.float64)) @ turn.mT
    assert 0 < jacobian[0, 0] < 0.075 < jacobian[1, 1]
    x_t = torch.zeros(3, 2, dtype=torch.float64)
    for probes in (None, 2, 5):
        moments = mmdgs.DiagonalMoments(linear_denoiser(jacobian), probes=probes)
        q = moments(x_t, PLAIN, generator=seeded(0))
        expected = PLAIN.tweedie * jacobian.diagonal().clamp(min=0.075)
        torch.testing.assert_close(q.cov.diagonal(), expected.expand(3, 2))
        assert (q.repaired == 0.5).all()


@pytest.mark.parametrize("probes", [2, 5])
def test_few_probes_of_an_exact_denoiser_are_as_good_as_one_variance(probes: int) -> None:
    """Their noise is known, and what is below it is lifted to it."""
    for denoiser in (target().denoiser(), corrupted()):
        moments = mmdgs.DiagonalMoments(denoiser, probes=probes)
        report = calibration_report(moments, draws(400), LEVELS[0])
        assert report.above_isotropic > -0.1
        assert report.z_variance < 1.5


def test_much_repair_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    monkeypatch.setattr(repair, "_seen", 0)
    post = mmdgs.FullMoments(corrupted())
    with caplog.at_level(logging.WARNING, logger="mmdgs"):
        for _ in range(3):
            post(draws(4), PLAIN)
    assert caplog.text.count("mmdgs.calibrate") == 1
    caplog.clear()
    monkeypatch.setattr(repair, "_seen", 0)
    with caplog.at_level(logging.WARNING, logger="mmdgs"):
        mmdgs.FullMoments(target().denoiser())(draws(4), PLAIN)
        replace(post, floor=0.1)(draws(4), PLAIN)  # a floor that was asked for
    assert caplog.text == ""


@pytest.mark.parametrize(("kind", "warned"), [("noise", True), ("edm", False)])
def test_variances_lost_to_rounding_are_said(kind, warned, monkeypatch, caplog) -> None:
    monkeypatch.setattr(contract, "_looks", {"left": 10})
    level = NoiseLevel(sigma=500.0)
    # Of N(0, 1): D = x_t / (1 + sigma^2).
    if kind == "noise":
        denoiser = mmdgs.noise_denoiser(lambda x: x * (level.sigma / (1 + level.variance)))
    else:
        denoiser = mmdgs.clean_denoiser(lambda x: x / (1 + level.variance))
    x_t = torch.full((2, 4), 3.0)
    with caplog.at_level(logging.WARNING, logger="mmdgs"):
        for _ in range(3):
            mmdgs.FullMoments(denoiser)(x_t, level)
            mmdgs.DiagonalMoments(denoiser, None)(x_t, level)
    assert caplog.text.count("rounding in float32") == warned


# --- with data


@pytest.mark.parametrize("factor", [0.1, 1.0, 7.0])
def test_a_wrong_scale_is_found(factor: float) -> None:
    wrong = Scaled(mmdgs.FullMoments(target().denoiser()), factor)
    fit = mmdgs.calibrate(wrong, draws(2000), LEVELS, progress=None)
    # 1,000 rows of 16 numbers: the relative error of a mean of squares is sqrt(2 / 16,000) = 0.011.
    for level in LEVELS:
        _, scale, *reach = fit.table[level].tolist()
        assert scale == pytest.approx(1 / factor, rel=0.05)
        # A quantile's relative error is sqrt(p (1 - p) / 16,000) / (z density): at most 0.04 at 5%
        # and 99.9%.
        assert reach == pytest.approx([1] * len(PROBABILITIES), abs=0.12)
        assert reach[3:-2] == pytest.approx([1] * (len(PROBABILITIES) - 5), abs=0.05)
        report = fit.report[level.ratio]
        assert isinstance(report, CalibrationReport)
        assert report.examples == 1000
        assert report.mahalanobis == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("name", list(estimators(corrupted())))
def test_every_estimator_comes_right(name: str) -> None:
    fitted = mmdgs.calibrate(estimators(corrupted())[name], draws(600), LEVELS, progress=None)
    for level in LEVELS:
        report = calibration_report(fitted, draws(400, seed=5), level)
        assert 0.8 < report.mahalanobis < 1.25
        assert 0.87 < report.interval_coverage < 0.93
        if name != "spectral":  # cosines are no basis for these data, and its spectrum was made up
            assert report.above_isotropic > -0.05


def test_the_best_floor_and_scale_are_those_of_a_search() -> None:
    """The grid in one pass over the data, against likelihoods one by one."""
    x, level, post = draws(200), LEVELS[0], mmdgs.FullMoments(corrupted())
    fitted = mmdgs.calibrate(post, x, level, progress=None)
    floor, scale, *_ = fitted.table[level].tolist()

    def nats(f: float, s: float) -> float:
        other = CalibratedMoments(post, LevelTable.of({level: [f * floor, s * scale]}))
        return calibration_report(other, x[::2], level).nats

    others = (1.3, 1), (1 / 1.3, 1), (1, 1.1), (1, 0.9), (1.3, 0.9), (0.7, 1.1)
    assert nats(1, 1) > max(nats(f, s) for f, s in others)


def test_densities_and_draws_both_come_right() -> None:
    """A steep spectrum whose small values are error: a scale by r' C^-1 r alone left draws too
    narrow.
    """
    d, n, level = 96, 64, NoiseLevel(sigma=1.0)
    rotation, _ = torch.linalg.qr(numbers(d, d))
    values = 0.999 * torch.logspace(0, -4, d, dtype=torch.float64)  # of the posterior covariance
    error = 0.01 / math.sqrt(d) * numbers(d, d, seed=1)
    prior = (rotation * (values / (1 - values)).sqrt()) @ rotation.mT
    exact = (rotation * values) @ rotation.mT

    denoiser = with_error(linear_denoiser(exact), error + error.mT)
    x, clean = numbers(2, n, d, seed=2) @ prior
    moments = mmdgs.calibrate(mmdgs.FullMoments(denoiser), x, level, progress=None)
    report = moments.report[level.ratio]
    # 32 rows judge; half of tr C lies in its ten largest eigenvalues: a relative error of sqrt(2 /
    # 320) = 0.08.
    assert 0.8 < report.mahalanobis < 1.25
    assert report.above_isotropic > 0.8
    q = moments(clean + numbers(n, d, seed=3), level)
    spread = (q.sample(generator=seeded(0)) - q.mean).square().mean()
    assert spread / (clean - q.mean).square().mean() == pytest.approx(1, abs=0.25)
    # The scale is sqrt(Q P): on the rows of the fit what is left of Q and P is one over the other.
    ((x_fit, q),) = posteriors(moments, x[::2], level, seed=0, purpose=FITTING)
    error = x_fit - q.mean
    by_direction = q.cov.mahalanobis(error).mean().item() / d
    by_spread = (error.square().sum(1) / q.cov.diagonal().sum(1)).mean().item()
    assert by_direction * by_spread == pytest.approx(1, rel=1e-9)
    assert by_direction < 0.95, "the test needs a Q and a P that differ"


@pytest.mark.parametrize("tails", ["heavy", "light"])
def test_every_interval_holds_what_it_says(tails: str) -> None:
    """Errors that are no Gaussian's, two Gaussians mixed or a sign: also intervals between those
    that are fitted.
    """
    z = numbers(6_000, 8)
    wide = torch.rand(z.shape, generator=seeded(1)) < 0.1
    x = z * torch.where(wide, 8.0, 0.5) if tails == "heavy" else z.sign() + 0.05 * z
    moments, level = Still(), NoiseLevel(sigma=10.0)
    fitted = mmdgs.calibrate(moments, x[:4_000], level, progress=None)
    clean = x[4_000:]
    q = fitted(clean, level)
    probabilities = (0.05, 0.25, 0.5, 0.65, 0.8, 0.9, 0.93, 0.95, 0.97, 0.99, 0.995)
    held = {p: _held(q, clean, p) for p in probabilities}
    # 16,000 numbers judge and as many fitted: a standard error of at most sqrt(2 / 4 / 16,000) =
    # 0.0056.
    assert held == pytest.approx({p: p for p in held}, abs=0.02)
    assert held[0.99] == pytest.approx(0.99, abs=0.005)
    assert fitted.report[level.ratio].covered[0.99] == pytest.approx(0.99, abs=0.005)

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
    fitted = mmdgs.calibrate(
        Still(), torch.randn(200, 4, generator=seeded(0)), level, progress=None
    )
    q = fitted(torch.zeros(1, 4), level)
    assert q.highest == 0.95
    assert [*fitted.report[level.ratio].covered][-1] == 0.95
    for probability in (0.01, 0.951, 1):
        with pytest.raises(ValueError, match=f"got {probability}"):
            q.interval(probability)
    plain = replace(q, reach=None)
    torch.testing.assert_close(plain.interval(0.9)[1], 1.6448536 * q.cov.diagonal().sqrt())
    assert plain.deviations(1e-3) < plain.deviations(0.9999)


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
    """Of clean zeros x_t is the noise itself: twelve examples have twelve noises, in whatever half
    they are.
    """
    noting = Noting({"noise": [], "probes": []})
    mmdgs.calibrate(noting, torch.zeros(12, 3), PLAIN, progress=None)
    for what in ("noise", "probes"):
        assert len(set(noting.noted[what])) == 12, what
    fitted = set(noting.noted["noise"][:6])
    noting.noted["noise"].clear()
    calibration_report(noting, torch.zeros(12, 3), PLAIN)
    assert fitted.isdisjoint(noting.noted["noise"])


def test_every_second_example_is_fitted_to_and_the_others_judge() -> None:
    """Row i of the data is 100 i, far above the noise; a fit passes over its rows twice."""
    noting = Noting({"noise": [], "probes": []})
    data = 100 * torch.arange(12.0)[:, None].expand(12, 3)
    mmdgs.calibrate(noting, data, PLAIN, progress=None)
    seen = [round(row[0] / 100) for row in noting.noted["noise"]]
    assert seen == [*range(0, 12, 2)] * 2 + [*range(1, 12, 2)]


def test_a_calibration_that_does_not_hold_on_other_examples_is_said(caplog) -> None:
    examples = draws(40)
    level = NoiseLevel(1.0)
    moments = mmdgs.IsotropicMoments(target().denoiser(), LevelTable.of({level: 0.02}))
    mmdgs.calibrate(moments, examples, level, progress=None)
    assert not caplog.messages
    mean = examples.mean(0)
    examples[1::2] = mean + 3 * (examples[1::2] - mean)
    report = mmdgs.calibrate(moments, examples, level, progress=None).report[1.0]
    (message,) = caplog.messages
    assert f"z variance is {report.z_variance:.3g} (1); 40 examples" in message


def test_between_levels_it_is_interpolated() -> None:
    table = LevelTable([0.1, 0.4], [[0.01, 1.0], [0.04, 4.0]])
    fitted = CalibratedMoments(mmdgs.DiagonalMoments(linear_denoiser(-torch.eye(2)), None), table)
    q = fitted(torch.zeros(1, 2), NoiseLevel(sigma=0.2))
    torch.testing.assert_close(q.cov.diagonal(), torch.full((1, 2), 2.0 * 0.02 * 0.04))


def test_beyond_the_levels_of_the_fit_it_fades_to_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """Scale 4 and reach 2 at sigma 1: half as much in logarithms at sqrt(2), and none from 2 on;
    said once.
    """
    monkeypatch.setattr(calibrated, "_warned", set())
    row = [1e-3, 4.0, *[2.0] * len(PROBABILITIES)]
    own = mmdgs.DiagonalMoments(linear_denoiser(0.5 * torch.eye(2, dtype=torch.float64)), None)
    fitted = CalibratedMoments(own, LevelTable([0.1, 1.0], [row, row]))
    x_t = torch.zeros(1, 2, dtype=torch.float64)

    def scale_and_reach(sigma: float) -> tuple[float, float]:
        level = NoiseLevel(sigma=sigma)
        q = fitted(x_t, level)
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


# --- kept beside the model


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MMDGS_CACHE", str(tmp_path / "cache"))
    mmdgs.save(tiny_model("score", (1, 8, 8), sigma=0.5), tmp_path / "model")
    return tmp_path / "model"


def images(n: int = 16) -> Tensor:
    return torch.rand(n, 1, 8, 8, generator=seeded(0))


def test_a_models_calibration_is_kept_and_used(folder: Path) -> None:
    model, four = mmdgs.load(folder), partial(mmdgs.covariances.Diagonal, probes=4)
    assert isinstance(model.posterior("diagonal"), mmdgs.DiagonalMoments)
    fit = mmdgs.calibrate(model.posterior(four()), images(), progress=None)
    assert (folder / "calibration-lattice-4.safetensors").is_file()
    again = mmdgs.load(folder)
    kept = again.posterior(four())
    assert isinstance(kept, CalibratedMoments)
    assert isinstance(again.posterior(four(calibrated=True)), CalibratedMoments)
    assert kept.fit_digest == fit.fit_digest
    torch.testing.assert_close(kept.table.values, fit.table.values, rtol=1e-6, atol=0)
    for other in (
        again.posterior("diagonal"),  # three probes
        again.posterior("krylov"),
        again.posterior(four(calibrated=False)),
        again.posterior(four(floor=1e-6)),
    ):
        assert not isinstance(other, CalibratedMoments)
    with pytest.raises(UsageError, match="no calibration of lattice-3"):
        again.posterior(mmdgs.covariances.Diagonal(calibrated=True))
    with pytest.raises(UsageError, match="floor 1e-06"):
        again.posterior(four(floor=1e-6, calibrated=True))
    with torch.no_grad():
        next(again.network.parameters()).add_(1.0)  # other weights
    assert isinstance(again.posterior(four()), mmdgs.DiagonalMoments)


def test_data_by_name_and_a_second_calibration(folder: Path, tmp_path: Path) -> None:
    mmdgs.save(tiny_model("score", (3, 8, 8), sigma=0.5), tmp_path / "colours")
    model = mmdgs.load(tmp_path / "colours")
    data = FitData(str(picture_folder(tmp_path / "images", shape=(3, 8, 8))), 12)
    # The second is of an estimator that is calibrated.
    first, second = (
        mmdgs.calibrate(model.posterior("diagonal"), data, progress=None) for _ in range(2)
    )
    assert isinstance(second.moments, mmdgs.DiagonalMoments)
    assert torch.equal(first.table.values, second.table.values)


# --- bad input


@pytest.mark.parametrize(
    ("data", "level", "message"),
    [
        (torch.zeros(16, 1, 7, 7), 0.5, r"\(1, 7, 7\)"),
        (255 * images(), 0.5, "run from"),
        (images(7), 0.5, "got 7"),
        (images() / 0, 0.5, "not finite"),
        (images(), 0.4, "no level 0.4"),
    ],
)
def test_bad_input_is_refused(folder: Path, data: Tensor, level: float, message: str) -> None:
    moments, at = mmdgs.load(folder).posterior("diagonal"), NoiseLevel(sigma=level)
    with pytest.raises(ValueError, match=message):
        mmdgs.calibrate(moments, data, at, progress=None)
    with pytest.raises(ValueError, match=message):
        calibration_report(moments, data, at)


# --- commands


@pytest.fixture
def many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untrained: None) -> Path:
    """A model of five levels from 4 to 0.1, calibrated from 0.8 to 0.2, and images for it."""
    monkeypatch.setenv("MMDGS_CACHE", str(tmp_path / "cache"))
    many_level_model().save_pretrained(tmp_path / "many")
    model = mmdgs.load(tmp_path / "many")
    for probes in (3, 10):
        moments = model.posterior(mmdgs.covariances.Diagonal(probes=probes))
        mmdgs.calibrate(moments, images(24), [NoiseLevel(0.8), NoiseLevel(0.2)], progress=None)
    numpy.savez(tmp_path / "clean.npz", arr_0=(255 * images(2)).byte().permute(0, 2, 3, 1).numpy())
    return tmp_path


COMMANDS = {
    "sample": ("--n 2 --covariance diagonal --sweeps 1", "samples.json", 3),
    "restore": (
        "clean.npz --simulate --operator sr:2 --noise 0.1 --steps 3 --covariance diagonal",
        "restored.json",
        3,
    ),
    "posterior": ("clean.npz --sigma 0.3 --draws 1 --components 1", "posterior.json", 0),
}


@pytest.mark.parametrize(
    "name", ["sample", "restore", pytest.param("posterior", marks=pytest.mark.slow)]
)
def test_commands_record_the_calibration_and_can_leave_it_out(many: Path, name: str) -> None:
    more, file, outside = COMMANDS[name]
    words = [str(many / word) if word == "clean.npz" else word for word in more.split()]

    def run(out: str, *options: str) -> Any:
        command = [name, str(many / "many"), *words, "-q", "-o", str(many / out), *options]
        return CliRunner().invoke(cli.app, command)

    def settings(out: str, *options: str) -> dict[str, Any]:
        result = run(out, *options)
        assert result.exit_code == 0, result.output
        return json.loads((many / out / file).read_text())["settings"]

    probes = 10 if name == "posterior" else 3
    kept = mmdgs.load(many / "many").posterior(mmdgs.covariances.Diagonal(probes=probes))
    recorded = {
        "digest": kept.fit_digest,
        "fitted_at": [pytest.approx(0.2), pytest.approx(0.8)],
        "fitted_levels": 2,
        "levels_outside": outside,
    }
    calibration = settings("with", "--calibrated")["calibration"]
    assert (calibration["diagonal"] if name == "posterior" else calibration) == recorded
    calibration = settings("without", "--uncalibrated")["calibration"]
    assert calibration == ({"diagonal": None, "krylov": None} if name == "posterior" else None)
    # What was made with one calibration is not gone on with with another.
    mmdgs.calibrate(kept, images(24), [NoiseLevel(sigma=0.7), NoiseLevel(sigma=0.2)], progress=None)
    assert run("with", "--resume").exit_code == 2


# --- those that ship


@needs_mnist_files
@pytest.mark.parametrize(
    ("name", "count"), [("mnist", 40), pytest.param("mnist-kl", 400, marks=pytest.mark.slow)]
)
def test_intervals_of_models_that_ship_hold_what_they_say(name: str, count: int) -> None:
    """Test digits, which neither the network nor the calibration has seen."""
    model, stored = mmdgs.load(name), load_images("mnist", "test", data_dir=MNIST_FILES).images
    chosen = stored[spread(len(stored), count)]
    x = model.scaled(dequantised(chosen, Streams(1, count, purpose="digits")))
    moments = model.posterior()
    assert isinstance(moments, CalibratedMoments)
    report = calibration_report(moments, x, model.level, seed=1)
    held = {p: report.covered[p] for p in (0.5, 0.8, 0.9, 0.95)}
    # From digit to digit the share of 50% intervals has a standard deviation of 0.043: 0.007 of the
    # mean of 40.
    assert held == pytest.approx({p: p for p in held}, abs=0.025)
    assert report.covered[0.99] == pytest.approx(0.99, abs=0.006)

"""The theorems of the paper: a quick run of the experiment, and the existence test on densities with known answers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sizes import unpaint
from torch import Tensor

from mmdgs.lab import EXPERIMENTS, Context, Workspace
from mmdgs.lab.theory import skewed_density
from mmdgs.metrics import deconvolve
from mmdgs.noise import NoiseLevel
from mmdgs.targets import GaussianMixture

FIGURES = (
    "theory_covariance",
    "theory_kl",
    "theory_fisher",
    "theory_existence_line",
    "theory_existence_plane",
    "theory_joint_kl",
    "theory_always_clean",
)
ISOTROPIC = 0.020157255414492793  # of the four Gaussians at sigma 0.2, in one dimension by adaptive quadrature (scipy)
SIGMA = 0.2


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    context = Context(Workspace(tmp_path_factory.mktemp("theory")), torch.device("cpu"), seed=0, quick=True)
    with pytest.MonkeyPatch.context() as patch:
        unpaint(patch)
        EXPERIMENTS["theory"].perform(context)
    return context.workspace.out


@pytest.fixture(scope="module")
def records(out: Path) -> dict[str, Any]:
    return json.loads((out / "records.json").read_text())


def line(limit: float = 4.0, points: int = 161) -> tuple[Tensor, float]:
    return torch.linspace(-limit, limit, points, dtype=torch.float64), 2 * limit / (points - 1)


def gaussian(x: Tensor, variance: float) -> Tensor:
    return (-0.5 * x.square() / variance).exp() / math.sqrt(2 * math.pi * variance)


def test_the_report_is_written(out: Path) -> None:
    page = (out / "report.html").read_text()
    assert page.count("data:image/png") == len(FIGURES)
    assert page.count("data:image/svg+xml") > len(FIGURES)  # formulas
    assert "sigma^2 /" not in re.sub(r'alt="[^"]*"', "", page)  # all mathematics is set
    for name in FIGURES:
        assert (out / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_every_claim_holds(records: dict[str, Any]) -> None:
    assert [claim["text"] for claim in records["claims"] if not claim["holds"]] == []
    assert len(records["claims"]) == 15


def test_the_covariance_is_the_jacobian(records: dict[str, Any]) -> None:
    cases = records["covariance_identity"]
    assert len(cases) == 3
    for case in cases:
        assert case["points"] >= 400
        assert case["largest_error"] < 1e-10
        # 18 standard scores: none beyond 4.5 (probability 1e-4), and of the right size, or the check would be idle.
        assert case["largest_score"] < 4.5
        assert 0.5 < case["rms_score"] < 1.6


def test_the_analytic_moments_are_the_closest(records: dict[str, Any]) -> None:
    points = records["kl_optimum"]
    assert [p["x_t"] for p in points] == [[0, 0], [0.2, 0.2], [1, 0], [1, 1]]
    for p in points:
        # The KL is flat at its minimum: float64 resolves it to 1e-16, so the minimiser to about 1e-8.
        assert p["mean_distance"] < 1e-7
        assert p["covariance_distance"] < 1e-7
        assert p["kl_start"] > p["kl_analytic"] + 1
        assert p["kl_found"] == pytest.approx(p["kl_analytic"], abs=1e-12)
    assert points[0]["kl_analytic"] > 1  # four modes are far from a Gaussian
    assert points[3]["kl_analytic"] < 1e-6  # one mode is not


def test_the_fisher_identity_and_the_isotropic_variance(records: dict[str, Any]) -> None:
    for r in records["fisher_identity"]:
        assert r["largest_error"] < 1e-10
        assert r["variance_trace"] == pytest.approx(r["variance_score"], rel=1e-10)
        assert abs(r["estimate"] - r["variance_score"]) < 4.5 * r["standard_error"]
        ratios = [e * math.sqrt(n) / r["deviation"] for e, n in zip(r["rms_errors"], r["sizes"], strict=True)]
        assert math.exp(sum(map(math.log, ratios)) / len(ratios)) == pytest.approx(1, abs=0.4)
    at = next(r for r in records["fisher_identity"] if r["sigma"] == SIGMA)
    assert at["variance_trace"] == pytest.approx(0.02014, abs=1e-4)
    assert at["variance_trace"] == pytest.approx(ISOTROPIC, rel=1e-6)  # the mixture's 0.2 is rounded to float32


def test_which_densities_have_a_clean_model(records: dict[str, Any]) -> None:
    cases = records["existence"]
    for dimension in (1, 2):
        chosen = [c for c in cases if c["dimension"] == dimension]
        assert [c["exists"] for c in chosen] == [True, True, False, False, False]
        mixture, faint, *failing = chosen
        assert mixture["distance"] < 1e-6
        assert mixture["negative_mass"] < 1e-6
        assert faint["negative_mass"] < 0.05
        for case in failing:
            assert case["negative_mass"] > 0.1
            assert case["least_eigenvalue"] < -0.1


def test_the_joint_kl_bounds_the_marginal_kl(records: dict[str, Any]) -> None:
    found = {(r["posterior"], r["sigma"]): r for r in records["joint_kl"]}
    assert len(found) == 5 * 4
    for (posterior, sigma), r in found.items():
        assert r["joint"] == pytest.approx(r["marginal"] + r["conditional"], abs=1e-12)
        assert min(r["marginal"], r["conditional"]) > -1e-12
        if posterior == "the true posterior":
            assert r["joint"] == pytest.approx(0, abs=1e-12)
        if posterior == "Gaussian, half the variance":  # log sqrt(1/2) + 1/2 (2 - 1) in every x_t
            best = found["Gaussian, true moments", sigma]["joint"]
            assert r["joint"] - best == pytest.approx(0.5 * (1 - math.log(2)), abs=1e-10)
    # The bound is not tight: the narrow Gaussian has the larger joint KL and the smaller marginal one.
    wide, narrow = (found[f"Gaussian, {which}", 0.8] for which in ("true moments", "half the variance"))
    assert narrow["joint"] > wide["joint"] + 0.1
    assert narrow["marginal"] < wide["marginal"] - 0.05


def test_a_noised_energy_has_its_clean_model(records: dict[str, Any]) -> None:
    for r in records["always_clean"]:
        assert r["exists"]
        assert r["distance"] < 1e-6
        assert r["mean_error"] < 1e-3  # derivatives by differences, on a grid of 0.045
        assert r["variance_as_printed"] == pytest.approx(SIGMA**2 / 2, rel=1e-6)


def test_deconvolution_recovers_a_mixture_with_full_covariances() -> None:
    mixture, level = skewed_density(), NoiseLevel(sigma=0.14)  # no component is finer than the noise
    x, spacing = line(6.5, 225)
    where = torch.stack(torch.meshgrid(x, x, indexing="ij"), dim=-1)
    result = deconvolve(5 * mixture.noised(level).log_prob(where).exp(), spacing, level.sigma)  # any constant will do
    assert result.exists
    assert result.distance(mixture.log_prob(where).exp()) < 1e-5  # the threshold, 1e-7, over some hundred ripples
    assert result.clean.sum().item() * spacing**2 == pytest.approx(1, abs=1e-12)


def test_deconvolution_in_one_dimension_is_exact() -> None:
    x, spacing = line()
    result = deconvolve(gaussian(x - 0.3, 0.09 + SIGMA**2), spacing, SIGMA)
    torch.testing.assert_close(result.clean, gaussian(x - 0.3, 0.09), atol=1e-7, rtol=0)  # 1e-7 is the threshold
    assert result.threshold == pytest.approx(1e-7)
    assert result.cutoff == pytest.approx(math.sqrt(2 * math.log(1e7)) / SIGMA)
    assert result.negative_mass < 1e-7
    assert abs(result.least_eigenvalue) < result.tolerance < 1e-5


@pytest.mark.parametrize(("share", "exists"), [(0.8, True), (0.99, True), (1.1, False), (1.2, False)])
def test_the_limit_of_a_ripple_is_found(share: float, exists: bool) -> None:
    """N(0, V) (1 + a cos wx), V = v + sigma^2, is N(0, v) (1 + a gain cos(w V x / v)), noised: clean if a gain <= 1."""
    x, spacing = line(7.0, 301)
    v, w = 0.36, 3.0
    total = v + SIGMA**2
    gain = math.exp(0.5 * w**2 * total * SIGMA**2 / v)
    result = deconvolve(gaussian(x, total) * (1 + share / gain * (w * x).cos()), spacing, SIGMA)
    expected = gaussian(x, v) * (1 + share * (w * total / v * x).cos())
    expected /= expected.sum() * spacing
    assert result.exists is exists
    assert result.distance(expected) < 1e-6
    assert result.negative_mass == pytest.approx(expected.clamp(max=0).sum().abs().item() * spacing, abs=1e-6)


def test_a_gaussian_needs_the_width_of_the_noise() -> None:
    x, spacing = line()
    assert deconvolve(gaussian(x, (1.001 * SIGMA) ** 2), spacing, SIGMA).exists
    narrow = deconvolve(gaussian(x, (0.999 * SIGMA) ** 2), spacing, SIGMA)
    assert not narrow.exists
    # phi is exp((1 - 0.999^2) sigma^2 w^2 / 2), above phi(0) = 1 already where it is tested.
    assert narrow.phi.abs().max().item() > 1


def test_the_eigenvalue_is_the_definition() -> None:
    """The quadratic form sum a_i conj(a_j) phi(w_i - w_j) of a clean density q is int q |sum a_i exp(i w_i x)|^2."""
    x, spacing = line(5.0, 201)
    v = 0.25
    result = deconvolve(gaussian(x, v + SIGMA**2), spacing, SIGMA, max_frequencies=5)
    assert result.frequencies == 5
    w = 2 * math.pi / (len(x) * spacing) * torch.tensor([0.0, 1.0, -1.0, 2.0, -2.0], dtype=torch.float64)
    matrix = (-0.5 * v * (w[:, None] - w).square()).exp()
    assert result.least_eigenvalue == pytest.approx(torch.linalg.eigvalsh(matrix)[0].item(), abs=1e-10)


def test_a_shift_of_the_grid_changes_nothing() -> None:
    x, spacing = line(5.0, 201)
    mixture = GaussianMixture([0.7, 0.3], torch.tensor([[-0.5], [0.6]], dtype=torch.float64), 0.25)
    noisy = mixture.noised(NoiseLevel(sigma=SIGMA)).log_prob(x[:, None]).exp()
    here, there = deconvolve(noisy, spacing, SIGMA), deconvolve(noisy.roll(15), spacing, SIGMA)
    assert here.least_eigenvalue == pytest.approx(there.least_eigenvalue, abs=here.tolerance)
    torch.testing.assert_close(here.clean.roll(15), there.clean, atol=1e-6, rtol=0)


def test_values_of_low_accuracy_are_not_trusted() -> None:
    x, spacing = line()
    noisy = gaussian(x, 0.09 + SIGMA**2) * (1 + 1e-6 * (25 * x).cos())
    assert not deconvolve(noisy, spacing, SIGMA, accuracy=1e-14).exists  # it takes the error for a fact
    assert deconvolve(noisy, spacing, SIGMA, accuracy=1e-5).exists


def test_bad_grids_are_refused() -> None:
    x, spacing = line()
    noisy = gaussian(x, 0.1)
    with pytest.raises(ValueError, match="too coarse"):
        deconvolve(noisy, spacing, 0.05)
    with pytest.raises(ValueError, match="too small"):
        deconvolve(gaussian(x, 1.0), spacing, SIGMA)
    with pytest.raises(ValueError, match="non-negative"):
        deconvolve(noisy - 0.1, spacing, SIGMA)
    with pytest.raises(ValueError, match="spacing must be positive"):
        deconvolve(noisy, -spacing, SIGMA)
    with pytest.raises(ValueError, match="sigma must be positive"):
        deconvolve(noisy, spacing, 0.0)
    with pytest.raises(ValueError, match="accuracy must be"):
        deconvolve(noisy, spacing, SIGMA, accuracy=1.0)
    with pytest.raises(ValueError, match="shape of the grid"):
        deconvolve(noisy, spacing, SIGMA).distance(noisy[1:])

"""The theorems of the paper in numbers, in float64 where posteriors are known.

Theorem 2 (the covariance is the denoiser's Jacobian) is in test_targets.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from deconvolution import deconvolve
from torch import Tensor
from torch.distributions import MultivariateNormal

from mmdgs.demo.toys import four_gaussians
from mmdgs.jacobians import mean_and_jacobian
from mmdgs.metrics import kl_divergence
from mmdgs.moments import FullMoments, IsotropicMoments
from mmdgs.moments.fitted import by_score
from mmdgs.noise import NoiseLevel
from mmdgs.report.drawing import grid
from mmdgs.targets import GaussianMixture

ISOTROPIC = 0.020157255414492793
"""Of the four Gaussians at sigma 0.2, in one dimension by adaptive quadrature (scipy)."""
SIGMA = 0.2
LEVEL = NoiseLevel(sigma=SIGMA)


def line(limit: float = 4.0, points: int = 161) -> tuple[Tensor, float]:
    return torch.linspace(-limit, limit, points, dtype=torch.float64), 2 * limit / (points - 1)


def gaussian(x: Tensor, variance: Tensor | float) -> Tensor:
    variance = torch.as_tensor(variance, dtype=x.dtype)
    return (-0.5 * x.square() / variance).exp() / (2 * math.pi * variance).sqrt()


def three() -> GaussianMixture:
    """Three Gaussians in one dimension, as wide as the noise."""
    means = torch.tensor([[-1.1], [0.0], [1.0]], dtype=torch.float64)
    return GaussianMixture([0.5, 0.2, 0.3], means, SIGMA)


@pytest.mark.parametrize(
    ("point", "least"), [((0.0, 0.0), 1.0), ((0.2, 0.2), 0.1), ((1.0, 1.0), 0.0)]
)
def test_no_gaussian_is_closer_to_the_posterior_than_the_analytic_one(
    point: tuple[float, float], least: float
) -> None:
    """Theorem 3: arg min over m, C of KL(p(x | x_t) || N(m, C)), by search from a wrong start."""
    mixture, (where, cell) = four_gaussians(), grid(2.5, 101)
    x_t = where.new_tensor([point])
    log_p = mixture.posterior(x_t.expand(len(where), 2), LEVEL).log_prob(where)
    parameters = x_t.new_tensor((-0.6, 0.5, -0.3, 0.4, 0.2)).requires_grad_(True)

    def law() -> MultivariateNormal:
        a, b, c = parameters[2:]
        root = torch.stack([a.exp(), torch.zeros_like(a), b, c.exp()]).reshape(2, 2)
        return MultivariateNormal(parameters[:2], scale_tril=root)

    def objective() -> float:
        loss = -(log_p.exp() * cell * law().log_prob(where)).sum()
        (parameters.grad,) = torch.autograd.grad(loss, parameters)
        return loss.item()

    start = kl_divergence(log_p, law().log_prob(where).detach(), cell)
    options = {"max_iter": 200, "tolerance_grad": 1e-10, "tolerance_change": 1e-15}
    torch.optim.LBFGS([parameters], line_search_fn="strong_wolfe", **options).step(objective)
    q = FullMoments(mixture.denoiser())(x_t, LEVEL)
    analytic = MultivariateNormal(q.mean[0], q.cov.dense()[0])
    kl = kl_divergence(log_p, analytic.log_prob(where), cell)
    # The KL is flat at its minimum: float64 resolves it to 1e-16, the minimiser to about 1e-8.
    torch.testing.assert_close(law().mean.detach(), analytic.mean, atol=1e-7, rtol=0)
    covariance = law().covariance_matrix.detach()
    torch.testing.assert_close(covariance, analytic.covariance_matrix, atol=1e-7, rtol=0)
    assert kl_divergence(log_p, law().log_prob(where).detach(), cell) == pytest.approx(
        kl, abs=1e-12
    )
    assert start > kl + 1
    assert kl >= least


@pytest.mark.parametrize("sigma", [0.1, 0.2, 0.8])
def test_the_fisher_identity_and_the_isotropic_variance(sigma: float) -> None:
    """Appendix B: E[-hess log p~] = E[s s'] under p~, so both formulas of the variance agree."""
    mixture, level = four_gaussians(), NoiseLevel(sigma=sigma)
    noised = mixture.noised(level)
    reach = noised.means.abs().max().item() + 8 * noised.values.max().sqrt().item()
    where, cell = grid(reach, 161)
    weight, s = noised.log_prob(where).exp() * cell, noised.score(where)
    _, jacobian = mean_and_jacobian(mixture.denoiser(), where, level)
    hessian = (jacobian - torch.eye(2, dtype=s.dtype)) / sigma**2
    information = torch.einsum("n,ni,nj->ij", weight, s, s)
    expected = -torch.einsum("n,nij->ij", weight, hessian)
    torch.testing.assert_close(information, expected, atol=1e-10, rtol=0)
    trace = mixture.posterior(where, level).covariance.diagonal(dim1=1, dim2=2).sum(1)
    single = sigma**2 * (1 - sigma**2 * s.square().sum(1) / 2)  # what one draw x_t says
    variance = (weight * single).sum().item()
    assert variance == pytest.approx((weight * trace).sum().item() / 2, rel=1e-10)
    if sigma == SIGMA:
        assert variance == pytest.approx(ISOTROPIC, rel=1e-6)  # its 0.2 is rounded to float32
    generator = torch.Generator().manual_seed(0)
    x = mixture.sample((6_400,), generator=generator)
    fitted = IsotropicMoments.fit(
        mixture.denoiser(), x, level, generator=generator, variance_of=by_score
    )
    error = (weight * (single - variance).square()).sum().sqrt().item() / 80
    assert abs(fitted.variances[level] - variance) < 4.5 * error


@pytest.mark.parametrize("dimension", [1, 2])
def test_which_densities_have_a_clean_model(dimension: int) -> None:
    """Appendix A.2: a noised mixture; it times 1 + a cos(2 x_1 / sigma), which has a clean model
    for a < exp(-4) = 0.018; exp(-|x|^4), whose transform decays slower than any Gaussian; a
    Gaussian narrower than the noise.
    """
    x, spacing = line(3.6, 641 if dimension == 1 else 97)
    where = torch.stack(torch.meshgrid(*[x] * dimension, indexing="ij"), dim=-1)
    mixture, norm = three() if dimension == 1 else four_gaussians(), where.square().sum(-1)
    noised, ripple = mixture.noised(LEVEL).log_prob(where).exp(), (10 * where[..., 0]).cos()
    known, *results = (
        deconvolve(noisy, spacing, sigma)
        for noisy, sigma in (
            (noised, SIGMA),
            (noised * (1 + 0.01 * ripple), SIGMA),
            (noised * (1 + 0.05 * ripple), SIGMA),
            ((-norm.square()).exp(), 0.25),
            ((-0.5 * norm / (0.95 * SIGMA) ** 2).exp(), SIGMA),
        )
    )
    assert known.exists
    assert known.distance(mixture.log_prob(where).exp()) < 1e-6
    assert [result.exists for result in results] == [True, False, False, False]
    assert results[0].negative_mass < 0.05  # of the cut-off in frequency
    for result in results[1:]:
        assert result.negative_mass > 0.1
        assert result.least_eigenvalue < -0.1


@pytest.mark.parametrize("sigma", [0.1, 0.2, 0.4, 0.8])
def test_the_joint_kl_bounds_the_marginal_kl(sigma: float) -> None:
    """Section 2.2: KL(p(x_t | x) p(x) || q(x | x_t) p~(x_t)) is KL(p || q) plus E KL(p(x_t | x) ||
    q(x_t | x)), for q(x) = int q(x | x_t) p~(x_t) dx_t; on a grid, rows x and columns x_t.
    """
    x, step = line(9.0, 401)
    p = three().log_prob(x[:, None]).exp()
    noise = gaussian(x[None] - x[:, None], sigma**2)
    joint = p[:, None] * noise
    noised = joint.sum(0) * step
    posterior = joint / noised
    mean = (posterior * x[:, None]).sum(0) * step
    variance = (posterior * (x[:, None] - mean).square()).sum(0) * step
    average = (noised * variance).sum() * step
    away = x[:, None] - mean
    kls = {}
    for name, q in {
        "true": posterior,
        "moments": gaussian(away, variance),
        "one variance": gaussian(away, average),
        "half": gaussian(away, variance / 2),
        "shifted": gaussian(away - 0.1, variance),
    }.items():
        q = q.clamp(min=1e-300)
        marginal = (q * noised).sum(1) * step
        ratios = (joint / (q * noised).clamp(min=1e-300)).log()
        both = (joint * torch.where(joint > 1e-250, ratios, 0.0)).sum().item() * step**2
        alone = (
            p * torch.where(p > 1e-250, (p / marginal.clamp(min=1e-300)).log(), 0.0)
        ).sum().item() * step
        conditional = q * noised / marginal[:, None].clamp(min=1e-300)
        ratios = (noise / conditional.clamp(min=1e-300)).log()
        rest = (joint * torch.where(joint > 1e-250, ratios, 0.0)).sum().item() * step**2
        assert both == pytest.approx(alone + rest, abs=1e-10)
        assert min(alone, rest) > -1e-12
        kls[name] = both, alone
    assert kls["true"][0] == pytest.approx(0, abs=1e-12)
    assert all(
        joint_kl >= kls["moments"][0] for name, (joint_kl, _) in kls.items() if name != "true"
    )
    # log sqrt(1/2) + (2 - 1) / 2 in every x_t
    assert kls["half"][0] - kls["moments"][0] == pytest.approx(0.5 * (1 - math.log(2)), abs=1e-9)
    if sigma == 0.8:  # the bound is not tight: a larger joint KL, and a smaller marginal one
        assert kls["half"][0] > kls["moments"][0] + 0.1
        assert kls["half"][1] < kls["moments"][1] - 0.05


@pytest.mark.parametrize(
    "energy",
    [
        lambda x: (x.square() - 1).square(),
        lambda x: x.pow(4),
        lambda x: x.square() + 0.5 * (3 * x).cos(),
    ],
    ids=["two wells", "flat", "ripple"],
)
def test_a_noised_energy_has_its_clean_model(energy: Callable[[Tensor], Tensor]) -> None:
    """The footnote of Appendix A.2: q~(x_t) ~ int exp(-g(x) - (x_t - x)^2 / (2 sigma^2)) dx has the
    clean model exp(-g) / Z, and x_t + sigma^2 s is the mean of x given x_t. The paper prints 1 /
    sigma^2 in the exponent, which is noise of half the variance.
    """
    x, step = line(9.0, 401)
    clean = (-energy(x)).exp()
    clean /= clean.sum() * step
    weights = gaussian(x[:, None] - x[None], SIGMA**2) * clean
    noisy, mean = weights.sum(1) * step, (weights * x).sum(1) / weights.sum(1)
    result = deconvolve(noisy, step, SIGMA)
    assert result.exists
    assert result.distance(clean) < 1e-6
    score = torch.gradient(noisy.log(), spacing=step)[0]
    inside = noisy > 1e-3 * noisy.max()
    # The score by differences, on a grid of 0.045.
    assert (x + SIGMA**2 * score - mean)[inside].abs().max() < 1e-3
    printed = (gaussian(x[:, None] - x[None], SIGMA**2 / 2) * clean).sum(1)
    added = ((printed * x.square()).sum() * step - (clean * x.square()).sum()).item() * step
    assert added == pytest.approx(SIGMA**2 / 2, rel=1e-6)


def test_deconvolution_recovers_a_mixture_with_full_covariances() -> None:
    covariances = [
        [[0.16, 0.10], [0.10, 0.12]],
        [[0.05, -0.06], [-0.06, 0.30]],
        [[0.40, 0.00], [0.00, 0.02]],
    ]
    means = torch.tensor([[-0.8, -0.5], [0.7, 0.6], [0.4, -1.2]], dtype=torch.float64)
    mixture = GaussianMixture([0.6, 0.3, 0.1], means, covariances)
    level = NoiseLevel(sigma=0.14)  # no component is finer than the noise
    x, spacing = line(6.5, 225)
    where = torch.stack(torch.meshgrid(x, x, indexing="ij"), dim=-1)
    result = deconvolve(
        5 * mixture.noised(level).log_prob(where).exp(), spacing, level.sigma
    )  # any constant will do
    assert result.exists
    assert (
        result.distance(mixture.log_prob(where).exp()) < 1e-5
    )  # the threshold, 1e-7, over some hundred ripples
    assert result.clean.sum().item() * spacing**2 == pytest.approx(1, abs=1e-12)


def test_deconvolution_in_one_dimension_is_exact() -> None:
    x, spacing = line()
    result = deconvolve(gaussian(x - 0.3, 0.09 + SIGMA**2), spacing, SIGMA)
    torch.testing.assert_close(
        result.clean, gaussian(x - 0.3, 0.09), atol=1e-7, rtol=0
    )  # 1e-7 is the threshold
    assert result.cutoff == pytest.approx(math.sqrt(2 * math.log(1e7)) / SIGMA)
    assert result.negative_mass < 1e-7
    assert abs(result.least_eigenvalue) < result.tolerance < 1e-5


@pytest.mark.parametrize(
    ("share", "exists"), [(0.8, True), (0.99, True), (1.1, False), (1.2, False)]
)
def test_the_limit_of_a_ripple_is_found(share: float, exists: bool) -> None:
    """N(0, V) (1 + a cos wx), V = v + sigma^2, is N(0, v) (1 + a gain cos(w V x / v)), noised:
    clean if a gain <= 1.
    """
    x, spacing = line(7.0, 301)
    v, w = 0.36, 3.0
    total = v + SIGMA**2
    gain = math.exp(0.5 * w**2 * total * SIGMA**2 / v)
    result = deconvolve(gaussian(x, total) * (1 + share / gain * (w * x).cos()), spacing, SIGMA)
    expected = gaussian(x, v) * (1 + share * (w * total / v * x).cos())
    expected /= expected.sum() * spacing
    assert result.exists is exists
    assert result.distance(expected) < 1e-6
    assert result.negative_mass == pytest.approx(
        expected.clamp(max=0).sum().abs().item() * spacing, abs=1e-6
    )


def test_a_gaussian_needs_the_width_of_the_noise() -> None:
    x, spacing = line()
    assert deconvolve(gaussian(x, (1.001 * SIGMA) ** 2), spacing, SIGMA).exists
    narrow = deconvolve(gaussian(x, (0.999 * SIGMA) ** 2), spacing, SIGMA)
    assert not narrow.exists
    # phi is exp((1 - 0.999^2) sigma^2 w^2 / 2), above phi(0) = 1 already where it is tested.
    assert narrow.phi.abs().max().item() > 1

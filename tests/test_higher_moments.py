"""Third and fourth moments along directions, against exact mixtures; the densities they imply."""

from __future__ import annotations

import pytest
import torch
from oracles import NETWORK_KINDS, PLAIN, SCALED, TARGETS, exact_networks, points
from torch import Tensor, nn

import mmdgs
from mmdgs.moments.higher import higher_moments, maximum_entropy
from mmdgs.randomness import seeded
from mmdgs.targets import MixturePosterior


def central_moments(posterior: MixturePosterior, u: Tensor) -> list[Tensor]:
    """Mean, variance, third and fourth central moment of u' x under a mixture, u (B, k, ...)."""
    own = u.flatten(2)
    means = torch.einsum("bkd,bcd->bkc", own, posterior.means)
    covariances = posterior.mixture(0).covariances  # the same in all rows
    v = torch.einsum("bkd,cde,bke->bkc", own, covariances, own)
    weights = posterior.weights[:, None]
    mean = (weights * means).sum(2)
    m = means - mean[..., None]
    powers = v + m**2, 3 * m * v + m**3, 3 * v**2 + 6 * m**2 * v + m**4
    return [mean, *((weights * power).sum(2) for power in powers)]


@pytest.mark.parametrize("kind", NETWORK_KINDS)
@pytest.mark.parametrize(
    ("target", "level"), [*zip(TARGETS, [PLAIN, SCALED, SCALED], strict=True)], ids=TARGETS
)
def test_against_mixtures(kind: str, target: str, level: mmdgs.NoiseLevel) -> None:
    make, event = TARGETS[target]
    mixture = make()
    x_t = points(mixture, event, level, 2)
    u = torch.randn(2, 2, *event, generator=seeded(1), dtype=torch.float64)  # of any length
    moments = higher_moments(exact_networks(mixture)[kind], x_t, level, u)
    expected = central_moments(mixture.posterior(x_t, level), u)
    for got, right in zip(
        (moments.mean, moments.variance, moments.third, moments.fourth), expected, strict=True
    ):
        torch.testing.assert_close(got, right, rtol=1e-6, atol=1e-8)
    _, variance, third, fourth = expected
    torch.testing.assert_close(moments.skewness, third / variance**1.5, rtol=1e-5, atol=1e-7)
    kurtosis = fourth / variance**2 - 3
    torch.testing.assert_close(moments.excess_kurtosis, kurtosis, rtol=1e-5, atol=1e-6)


def test_along_components_of_a_network() -> None:
    """A U-Net with attention and group norms: both ways to differentiate agree with differences of
    its mean.
    """
    from toy_models import many_level_model

    model = many_level_model()
    model.network.double()
    level = mmdgs.NoiseLevel(sigma=0.5)
    x_t = torch.rand(2, 1, 8, 8, generator=seeded(0), dtype=torch.float64)
    u = mmdgs.moments.components(model, x_t, level, 2).directions
    moments = higher_moments(model, x_t, level, u)

    def g(s: float) -> Tensor:
        moved = (x_t[:, None] + s * u).flatten(0, 1)
        with torch.no_grad():
            return (model(moved, level).unflatten(0, (2, 2)) * u).flatten(2).sum(2)

    h = 1e-2
    second = (g(h) - 2 * g(0) + g(-h)) / h**2
    third = (g(2 * h) - 2 * g(h) + 2 * g(-h) - g(-2 * h)) / (2 * h**3)
    torch.testing.assert_close(moments.third, level.tweedie**2 * second, rtol=1e-3, atol=1e-6)
    fourth = level.tweedie**3 * third + 3 * moments.variance**2
    torch.testing.assert_close(moments.fourth, fourth, rtol=1e-3, atol=1e-6)


class _Opaque(torch.autograd.Function):
    """tanh with a gradient and no forward mode."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)  # type: ignore[attr-defined]
        return x.tanh()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad / x.cosh() ** 2


class _Dropping(nn.Module):
    """Takes a value out of forward mode and puts its gradient back, unseen by forward mode."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            return x.tanh()
        return x.detach().tanh()


@pytest.mark.parametrize(
    "network", [_Opaque.apply, _Dropping()], ids=["no forward mode", "detached"]
)
def test_networks_without_forward_mode(network: nn.Module) -> None:
    level = mmdgs.NoiseLevel(sigma=0.7)
    x = torch.tensor([[0.3, -0.5]], dtype=torch.float64)
    u = torch.tensor([[[1.0, 0.0]]], dtype=torch.float64)
    moments = higher_moments(mmdgs.clean_denoiser(lambda x_t: network(x_t)), x, level, u)
    t, v = torch.tensor(0.3, dtype=torch.float64).tanh(), level.tweedie
    assert moments.variance.item() == pytest.approx((v * (1 - t**2)).item())
    assert moments.third.item() == pytest.approx((v**2 * -2 * t * (1 - t**2)).item())
    fourth = v**3 * (1 - t**2) * (6 * t**2 - 2) + 3 * moments.variance.item() ** 2
    assert moments.fourth.item() == pytest.approx(fourth.item())


def test_a_linear_denoiser_is_gaussian_and_directions_of_another_shape_are_refused() -> None:
    denoiser, x_t = mmdgs.clean_denoiser(lambda x_t: 0.5 * x_t), torch.ones(1, 3)
    gaussian = higher_moments(denoiser, x_t, PLAIN, torch.eye(3)[None])
    torch.testing.assert_close(gaussian.skewness, torch.zeros(1, 3))
    torch.testing.assert_close(gaussian.excess_kurtosis, torch.zeros(1, 3))
    with pytest.raises(ValueError, match="directions"):
        higher_moments(denoiser, x_t, PLAIN, torch.eye(3))


@pytest.mark.parametrize(
    ("skewness", "excess"),
    [
        (0.0, 0.0),
        (0.5, 0.2),
        (-0.4, -0.3),
        (0.0, -1.5),
        (0.8, 1.0),
        (0.3, 2.0),
        (1.0, 0.9),
        (0.76, -1.02),
    ],
)
def test_the_density_has_the_moments(skewness: float, excess: float) -> None:
    marginal = maximum_entropy(torch.tensor(skewness), torch.tensor(excess))
    z, p = marginal.grid, marginal.density
    assert (p >= 0).all()

    def moment(power: int) -> float:
        return torch.trapezoid(p * z**power, z).item()

    assert [moment(i) for i in range(5)] == pytest.approx([1, 0, 1, skewness, excess + 3], abs=1e-5)
    if skewness == excess == 0:
        torch.testing.assert_close(
            p, torch.exp(-(z**2) / 2) / (2 * torch.pi) ** 0.5, rtol=1e-2, atol=1e-5
        )
    assert marginal.modes == (2 if excess < -1 else 1)


def test_moments_that_no_law_has_are_shrunk() -> None:
    marginal = maximum_entropy(
        torch.tensor([2.0, 0.0, float("nan")]), torch.tensor([-1.0, -2.5, 0.0])
    )
    assert torch.isfinite(marginal.density[:2]).all()
    assert marginal.density[2].isnan().all()
    assert 0 < marginal.skewness[0] < 2
    assert -2 <= marginal.excess_kurtosis[1] < -1.4

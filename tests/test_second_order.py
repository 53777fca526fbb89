"""The second-order baseline of Table 1: its loss has the posterior covariance as its minimiser."""

import torch
from torch import nn

from experiments.table1 import SecondOrderMoments, second_order_loss
from mmdgs.data import mog_density
from mmdgs.moments import FullMoments
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import seeded

LEVEL = NoiseLevel(sigma=0.5)


MIXTURE = mog_density().to(dtype=torch.float64)


class Exact(nn.Module):
    """Cov[x | x_t] / sigma^2 of a mixture, changed by a factor: three numbers a row."""

    def __init__(self, factor: float = 1.0) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.tensor(factor, dtype=torch.float64))

    def forward(self, x_t: torch.Tensor) -> torch.Tensor:
        covariance = MIXTURE.posterior(x_t, LEVEL).covariance / LEVEL.variance
        return self.factor * covariance.flatten(1)[:, [0, 1, 3]]


def moments(factor: float = 1.0) -> SecondOrderMoments:
    return SecondOrderMoments(MIXTURE.denoiser(), Exact(factor))


def data(n: int) -> torch.Tensor:
    return MIXTURE.sample((n,), generator=seeded(0))


def test_the_true_covariance_gives_the_posterior_of_the_jacobian():
    x_t = data(50)
    estimate, exact = moments()(x_t, LEVEL), FullMoments(moments().denoiser)(x_t, LEVEL)
    torch.testing.assert_close(estimate.mean, exact.mean)
    torch.testing.assert_close(estimate.cov.dense(), exact.cov.dense(), atol=1e-8, rtol=0)


def test_the_loss_is_least_at_the_true_covariance():
    """The gradient in a factor on the true covariance vanishes within its standard error, and not
    at another factor.
    """
    n = 40_000
    for factor, vanishes in ((1.0, True), (0.9, False), (1.1, False)):
        scaled = moments(factor)
        loss = second_order_loss(scaled, data(n), LEVEL, generator=seeded(1))
        # The loss is quadratic in the factor: d/df of (f R - y)^2 is 2 (f R - y) R, row by row.
        (gradient,) = torch.autograd.grad(loss.mean(), scaled.network.factor)
        other = second_order_loss(moments(factor + 1e-4), data(n), LEVEL, generator=seeded(1))
        error = (((other - loss) / 1e-4).std() / n**0.5).item()
        assert (abs(gradient.item()) < 4 * error) is vanishes


def test_covariances_that_are_not_positive_are_lifted_to_the_floor():
    q = moments(-1.0)(data(3), LEVEL)
    assert q.repaired is not None
    assert q.repaired.tolist() == [1.0] * 3
    assert q.cov.values.min().item() == 1e-6 * LEVEL.variance  # type: ignore[attr-defined]

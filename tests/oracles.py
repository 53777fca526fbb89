"""What the tests hold the library against: known targets, networks that are exactly right, and
error bars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

import mmdgs
from mmdgs.linalg import Covariance
from mmdgs.operators import Operator, noise_variances
from mmdgs.targets import GaussianMixture

PLAIN = mmdgs.NoiseLevel(alpha=1.0, sigma=0.5)
SCALED = mmdgs.NoiseLevel(alpha=0.7, sigma=0.6)  # alpha != 1: catches every formula that forgot it
LEVELS = {"alpha=1": PLAIN, "alpha=0.7": SCALED}
IMAGE = (3, 2, 2)  # its last dimension is not its size, so that nothing can confuse the two


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers in float64, the same at every call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normals(*shape: int, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def random_covariances(components: int, d: int, seed: int) -> Tensor:
    """Well-conditioned covariance matrices without any symmetry, (K, d, d)."""
    a = numbers(components, d, d, seed=seed)
    return a @ a.mT / d + 0.1 * torch.eye(d, dtype=torch.float64)


def paper_mixture() -> GaussianMixture:
    """The paper's section 2.4: four Gaussians of standard deviation 0.2 at (+-1, +-1)."""
    means = torch.tensor([[-1.0, -1.0], [-1.0, 1.0], [1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    return GaussianMixture([0.25] * 4, means, 0.2)


def skewed_mixture() -> GaussianMixture:
    """Three overlapping components in 3-D with full covariances, unequal weights and no symmetry at
    all.
    """
    means = torch.tensor(
        [[0.0, 0.5, -1.0], [1.2, -0.3, 0.4], [-0.8, 0.9, 1.1]], dtype=torch.float64
    )
    return GaussianMixture([0.5, 0.3, 0.2], means, random_covariances(3, 3, seed=0))


def image_mixture() -> GaussianMixture:
    """Two components over tensors of shape IMAGE, with full covariances."""
    d = math.prod(IMAGE)
    means = torch.linspace(-1, 1, 2 * d, dtype=torch.float64).reshape(2, d)
    return GaussianMixture([0.6, 0.4], means, random_covariances(2, d, seed=1))


def gaussian_target() -> GaussianMixture:
    """One Gaussian in 3-D with a full covariance."""
    means = torch.tensor([[0.5, -1.0, 2.0]], dtype=torch.float64)
    return GaussianMixture([1.0], means, random_covariances(1, 3, seed=2))


TARGETS: dict[str, tuple[Callable[[], GaussianMixture], tuple[int, ...]]] = {
    "paper": (paper_mixture, (2,)),
    "skewed": (skewed_mixture, (3,)),
    "image": (image_mixture, IMAGE),
}
"""Each target with the event shape its points have."""


def points(
    mixture: GaussianMixture,
    event: Sequence[int],
    level: mmdgs.NoiseLevel,
    rows: int,
    seed: int = 0,
) -> Tensor:
    """Noisy points x_t (rows, *event) from the target itself."""
    generator = torch.Generator().manual_seed(seed)
    return mixture.noised(level).sample((rows,), generator=generator).reshape(rows, *event)


def as_distribution(weights: Tensor, means: Tensor, covariances: Tensor) -> MixtureSameFamily:
    """The same mixture by torch.distributions."""
    return MixtureSameFamily(Categorical(probs=weights), MultivariateNormal(means, covariances))


def exact_networks(mixture: GaussianMixture) -> dict[str, mmdgs.Denoiser]:
    """A denoiser of every kind, made of a network that is exactly right for the mixture at every
    level.
    """

    def score(x_t: Tensor, level: mmdgs.NoiseLevel) -> Tensor:
        return mixture.noised(level).score(x_t)

    def energy(x_t: Tensor, level: mmdgs.NoiseLevel) -> Tensor:
        return -mixture.noised(level).log_prob(x_t)

    def noise(x_t: Tensor, level: mmdgs.NoiseLevel) -> Tensor:
        return -level.sigma * score(x_t, level)

    def clean(x_t: Tensor, level: mmdgs.NoiseLevel) -> Tensor:
        return mixture.posterior(x_t, level).mean

    def velocity(x_t: Tensor, level: mmdgs.NoiseLevel) -> Tensor:
        return level.alpha * noise(x_t, level) - level.sigma * clean(x_t, level)

    return {
        "energy": mmdgs.energy_denoiser(energy),
        "score": mmdgs.score_denoiser(score),
        "noise": mmdgs.noise_denoiser(noise),
        "clean": mmdgs.clean_denoiser(clean),
        "velocity": mmdgs.velocity_denoiser(velocity),
        "mixture": mixture.denoiser(),
    }


NETWORK_KINDS = ("energy", "score", "noise", "clean", "velocity", "mixture")


def root_matrix(cov: Covariance, like: Tensor) -> Tensor:
    """R (B, d, n) with R R' = C, column by column."""
    shape = cov.normals(like.shape[1:])
    basis = torch.eye(math.prod(shape), dtype=like.dtype).reshape(-1, 1, *shape)
    columns = [cov.root(z.expand(len(like), *shape)).flatten(1) for z in basis]
    return torch.stack(columns, -1)


def assert_acts_as(
    cov: Covariance, matrix: Tensor, like: Tensor, tolerance: float = 1e-9, *, root: bool = True
) -> None:
    """All that is asked of a covariance of vectors `like` (B, ...) is as of matrices (B, d, d)."""

    def same(values: Tensor, expected: Tensor) -> None:
        assert values.dtype == like.dtype
        expected = expected.expand_as(values)
        torch.testing.assert_close(values.double(), expected, rtol=tolerance, atol=tolerance)

    z = numbers(*like.shape, seed=3).to(like.dtype)
    flat = z.double().flatten(1)
    image = torch.einsum("bij,bj->bi", matrix, flat)
    same(cov.dense(), matrix)
    same(cov.diagonal().flatten(1), matrix.diagonal(dim1=1, dim2=2))
    same(cov.apply(z).flatten(1), image)
    u = torch.stack([z, 2 * z.roll(1, -1)])
    along = u.double().flatten(2)
    same(cov.variance_along(u), torch.einsum("nbi,bij,nbj->nb", along, matrix, along))
    same(cov.logdet(), torch.linalg.slogdet(matrix).logabsdet)
    same(cov.mahalanobis(z), (flat * torch.linalg.solve(matrix, flat)).sum(1))
    values, counts = cov.spectrum()
    same((values * counts).sum(1), matrix.diagonal(dim1=1, dim2=2).sum(1))
    values, squares = cov.coordinates(z)
    same((values * squares).sum(1), (flat * image).sum(1))
    if root:
        columns = root_matrix(cov, like)
        same(columns @ columns.mT, matrix)
        normals = numbers(len(like), *cov.normals(like.shape[1:])).to(like.dtype)
        once, info = cov.root_with_info(normals)
        assert torch.equal(once, cov.root(normals))
        assert all(value.shape == (len(like),) for value in info.values())


def dense_given(
    mean: Tensor, matrix: Tensor, operator: Operator, y: Tensor, noise: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Mean (B, ...) and covariance (B, d, d) of N(mean, matrix) given y, by dense matrices."""
    rows, d = len(mean), matrix.shape[-1]
    a = operator(torch.eye(d, dtype=torch.float64).reshape(d, *mean.shape[1:])).flatten(1).mT
    variances = noise_variances(noise, operator, y).expand(rows, *operator.out_shape).flatten(1)
    gain = matrix @ a.mT @ torch.linalg.inv(a @ matrix @ a.mT + torch.diag_embed(variances))
    left = operator.known(y - operator(mean)).expand(rows, *operator.out_shape).flatten(1)
    shift = (gain @ left[..., None])[..., 0]
    return mean + shift.reshape(mean.shape), matrix - gain @ a @ matrix


def linear_denoiser(matrix: Tensor) -> mmdgs.Denoiser:
    """D(x_t) = A x_t: its Jacobian is A itself, whatever A is."""
    return mmdgs.clean_denoiser(lambda x_t: (x_t.flatten(1) @ matrix.mT).reshape(x_t.shape))


def assert_moments(samples: Tensor, mean: Tensor, covariance: Tensor, errors: float = 5.0) -> None:
    """Independent samples (n, d) have this mean and covariance, each entry within `errors` standard
    errors.

    Five standard errors: an entry of a right sampler is out with probability 6e-7. The error of a
    covariance entry comes from the spread of the products it averages, so that it holds for any
    law.
    """
    n = len(samples)
    centred = samples - mean
    products = centred[:, :, None] * centred[:, None, :]
    for name, values, expected in (("mean", samples, mean), ("covariance", products, covariance)):
        error = values.std(0) / math.sqrt(n)
        off = (values.mean(0) - expected).abs() / error
        assert off.max() < errors, f"{name} is off by {off.max():.1f} standard errors"

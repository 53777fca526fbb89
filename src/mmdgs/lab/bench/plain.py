"""The plain way: each method as one first writes it down, in float32 with torch's defaults.

These share nothing with the library but denoisers and random draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from mmdgs.denoisers import Denoiser
from mmdgs.models import Model
from mmdgs.moments import FLOOR
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Generator, randn_like, seeded, signs


def plain_chain(energy: nn.Module, x: Tensor, steps: int, sigma: float, generator: torch.Generator) -> Tensor:
    """One Gibbs chain with the full covariance, x (d,): a pass for the mean, and one for each row of the Hessian."""
    samples = []
    d = len(x)
    for _ in range(steps):
        noisy = x + sigma * torch.randn(d, generator=generator, device=generator.device).to(x.device)
        point = noisy[None].requires_grad_(True)
        (gradient,) = torch.autograd.grad(energy(point).sum(), point)
        mean = noisy - sigma**2 * gradient[0]
        rows = []
        for i in range(d):
            (gradient,) = torch.autograd.grad(energy(point).sum(), point, create_graph=True)
            rows.append(torch.autograd.grad(gradient[0, i], point)[0][0])
        covariance = sigma**2 * torch.eye(d, device=x.device) - sigma**4 * torch.stack(rows)
        root, failed = torch.linalg.cholesky_ex(covariance)
        if failed:
            root = torch.linalg.cholesky(covariance + 0.01 * torch.eye(d, device=x.device))
        x = mean.detach() + root @ torch.randn(d, generator=generator, device=generator.device).to(x.device)
        samples.append(x)
    return torch.stack(samples)


def batched_chain(energy: nn.Module, x: Tensor, steps: int, sigma: float, generator: torch.Generator) -> Tensor:
    """Many Gibbs chains at once, x (chains, d): the last states. Ten lines of autograd, without this library."""
    eye = torch.eye(x.shape[1], device=x.device)
    for _ in range(steps):
        noisy = x + sigma * torch.randn(x.shape, generator=generator, device=generator.device).to(x.device)
        point = noisy.requires_grad_(True)
        (gradient,) = torch.autograd.grad(energy(point).sum(), point, create_graph=True)
        rows = [torch.autograd.grad(one.sum(), point, retain_graph=True)[0] for one in gradient.unbind(1)]
        covariance = sigma**2 * eye - sigma**4 * torch.stack(rows, 1)
        root, failed = torch.linalg.cholesky_ex(covariance)
        if failed.any():
            root = torch.linalg.cholesky(covariance + 0.01 * eye * (failed > 0)[:, None, None])
        z = torch.randn(x.shape, generator=generator, device=generator.device).to(x.device)
        x = (noisy - sigma**2 * gradient + (root @ z[..., None])[..., 0]).detach()
    return x


def plain_moments(
    denoiser: Denoiser, x_t: Tensor, level: NoiseLevel, probes: int, generator: Generator
) -> tuple[Tensor, Tensor]:
    """The mean and the diagonal of the covariance by probes, lifted to the floor.

    One forward pass for the mean; one forward and one backward pass for each probe.
    """
    with torch.no_grad():
        mean = denoiser(x_t, level)
    total = torch.zeros_like(x_t)
    for _ in range(probes):
        v = signs(x_t.shape, x_t, generator)
        point = x_t.detach().requires_grad_(True)
        (product,) = torch.autograd.grad((denoiser(point, level) * v).sum(), point)
        total += v * product
    variances = level.sigma**2 / level.alpha * total / probes
    return mean, variances.clamp(min=FLOOR * (level.sigma / level.alpha) ** 2)


def plain_gibbs(
    denoiser: Denoiser, x: Tensor, levels: Sequence[NoiseLevel], sweeps: int, probes: int, generator: Generator
) -> Tensor:
    """The paper's Algorithm 2 at levels with alpha = 1. A sweep at the pair (t, s) is

    x_t = x_s + b e,   b^2 = sigma_t^2 - sigma_s^2,   g = b^2 / sigma_t^2
    x_s = g D(x_t) + (1 - g) x_t + sqrt(g^2 C + sigma_s^2 g) e
    """
    for level, following in pairwise(levels):
        b = (level.sigma**2 - following.sigma**2) ** 0.5
        gain = b**2 / level.sigma**2
        for _ in range(sweeps):
            x_t = x + b * randn_like(x, generator)
            mean, variances = plain_moments(denoiser, x_t, level, probes, generator)
            spread = (gain**2 * variances + following.sigma**2 * gain).sqrt()
            x = gain * mean + (1 - gain) * x_t + spread * randn_like(x, generator)
    with torch.no_grad():
        return denoiser(x, levels[-1])


def plain_steps(model: Model, images: Tensor, batch_size: int, steps: int) -> float:
    """Training steps of denoising score matching with Adam; returns the last loss."""
    network, sigma = model.network.train(), model.level.sigma
    optimiser = torch.optim.Adam(network.parameters(), lr=1e-4)
    generator = seeded(0, device=images.device)
    value = torch.zeros(())
    for step in range(steps):
        first = step * batch_size % (len(images) - batch_size + 1)
        batch = images[first : first + batch_size].float()
        x = (batch + torch.rand(batch.shape, generator=generator, device=batch.device)) / 256
        noise = torch.randn(x.shape, generator=generator, device=x.device)
        x_t = x + sigma * noise
        if model.config.param == "energy":
            x_t.requires_grad_(True)
            score = -torch.autograd.grad(network(x_t).sum(), x_t, create_graph=True)[0]
        else:
            score = network(x_t)
        value = 0.5 * (score + noise / sigma).square().flatten(1).sum(1).mean()
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
    return value.item()

"""`mmdgs bench chain`: Gibbs chains in 2-D with the full covariance, against the plain way.

The plain way is how the method reads when written down directly: one chain at a time; per step one forward
and backward for the mean and one more for each row of the Hessian.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmdgs.denoisers import energy_denoiser
from mmdgs.lab.bench.timing import Row, Work, measure, row
from mmdgs.moments import FullMoments
from mmdgs.networks import MLP
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import seeded
from mmdgs.runtime import threads
from mmdgs.samplers import gibbs_chain

LEVEL = NoiseLevel(sigma=0.2)
STEPS = {"cpu": {1: 500, 5: 500, 1000: 20}, "cuda": {1: 2000, 5: 2000, 1000: 2000}}
"""Steps of a measurement by the number of chains: some tenths of a second."""


def plain_chain(energy: nn.Module, x: Tensor, steps: int, sigma: float, generator: torch.Generator) -> Tensor:
    """One full-covariance chain, x (d,), the plain way."""
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


def chain(device: torch.device, *, quick: bool = False) -> list[Row]:
    """The 2-D full-covariance chain at 1, 5 and 1,000 chains, from the first step to the last."""
    scale = 0.1 if quick else 1.0
    energy = MLP(2, 2, seed=0).to(device)
    post = FullMoments(energy_denoiser(energy))
    generator = seeded(0)
    start = torch.ones(2, device=device)

    def plain(steps: int) -> Work:
        def work() -> None:
            with threads(1):  # the plain way is faster so: its matrices are small
                plain_chain(energy, start, steps, LEVEL.sigma, generator)

        return Work(work, steps)

    def ours(chains: int, steps: int) -> Work:
        x0 = start.expand(chains, 2).clone()
        return Work(lambda: gibbs_chain(post, x0, LEVEL, steps=steps, progress=None), chains * steps)

    sizes = {chains: max(2, int(steps * scale)) for chains, steps in STEPS.get(device.type, STEPS["cpu"]).items()}
    base, *measured = measure([plain(int(300 * scale)), *(ours(c, n) for c, n in sizes.items())], device)
    return [
        row(f"2-D full covariance, {chains:,} chain{'s' * (chains > 1)}, {steps:,} steps", "chain-steps/s", base, found)
        for (chains, steps), found in zip(sizes.items(), measured, strict=True)
    ]

"""`mmdgs bench chain`: Gibbs chains in 2-D and the probe diagonal, against the plain way.

The plain way is how the method reads when written down directly: one chain at a time; per step one forward
and backward for the mean and one more for each row of the Hessian; per probe one forward and one backward.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmdgs.bench.timing import REPEATS, Row, Work, rates
from mmdgs.denoisers import energy_denoiser, score_denoiser
from mmdgs.moments import DiagonalMoments, FullMoments
from mmdgs.networks import MLP
from mmdgs.noise import NoiseLevel
from mmdgs.probes import Rademacher
from mmdgs.randomness import seeded
from mmdgs.samplers import gibbs_chain
from mmdgs.threads import threads

LEVEL = NoiseLevel(sigma=0.2)
IMAGE = (3, 32, 32)  # d = 3,072
PROBES = 10


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


def plain_diagonal(score: nn.Module, x_t: Tensor, probes: int, sigma: float, generator: torch.Generator) -> Tensor:
    """The probe diagonal, one forward and one backward per probe, and one forward for the mean."""
    with torch.no_grad():
        score(x_t)
    total = torch.zeros_like(x_t)
    for _ in range(probes):
        v = torch.randint(0, 2, x_t.shape, generator=generator, device=generator.device).to(x_t) * 2 - 1
        point = x_t.detach().requires_grad_(True)
        (product,) = torch.autograd.grad((score(point) * v).sum(), point)
        total += v * product
    return sigma**2 + sigma**4 * total / probes


def small_convnet(channels: int = 3, width: int = 32, depth: int = 4) -> nn.Sequential:
    """A small convolutional score network for the probe benchmark."""
    with torch.random.fork_rng(devices=[]):  # torch's layers start from the global generator: leave it as it was
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.SiLU()]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU()]
        return nn.Sequential(*layers, nn.Conv2d(width, channels, 3, padding=1))


def chain(device: torch.device, *, quick: bool = False) -> list[Row]:
    """The 2-D full-covariance chain at 1, 5 and 1,000 chains, and the probe diagonal at d = 3,072."""
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

    sizes = {chains: max(2, int(steps * scale)) for chains, steps in ((1, 500), (5, 500), (1000, 20))}
    base, *measured = rates([plain(int(300 * scale)), *(ours(c, n) for c, n in sizes.items())], device)
    rows = [
        Row(f"2-D full covariance, {chains:,} chain{'s' * (chains > 1)}", "chain-steps/s", base, rate)
        for chains, rate in zip(sizes, measured, strict=True)
    ]
    network = small_convnet().to(device)
    x_t = torch.rand(8, *IMAGE, generator=generator).to(device)
    diagonal = DiagonalMoments(score_denoiser(network), probes=PROBES, design=Rademacher())
    base, rate = rates(
        [
            Work(lambda: plain_diagonal(network, x_t, PROBES, LEVEL.sigma, generator), len(x_t)),
            Work(lambda: diagonal(x_t, LEVEL, generator=generator), len(x_t)),
        ],
        device,
        repeats=3 * REPEATS,
    )
    return [*rows, Row(f"diagonal, {PROBES} probes, d = 3,072, batch {len(x_t)}", "images/s", base, rate)]

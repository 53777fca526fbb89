"""`mmdgs bench moments`: the mean and the probe diagonal of a batch of images, against the plain way.

The plain way: one forward pass for the mean, and for each probe one forward and one backward pass, in float32 with
torch's defaults. The floor of what any way can reach with forward and backward passes is 1 + S forward passes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mmdgs.denoisers import Denoiser, denoise, score_denoiser
from mmdgs.errors import UsageError
from mmdgs.lab.bench.timing import REPEATS, Row, Work, compiled_at_once, measure, row
from mmdgs.models import load
from mmdgs.moments import FLOOR, DiagonalMoments
from mmdgs.moments.probes import Rademacher
from mmdgs.networks import build_network, preset
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Generator, Streams, seeded, signs
from mmdgs.runtime import autocast, matmul_precision

logger = logging.getLogger("mmdgs")

SIGMA = 0.3
PROBES = 10
SIZE = 32
MULTIPLE = 8
"""What an image's side must be a multiple of: the paper's U-Net halves it three times."""

BATCH = {"cuda": 100, "cpu": 8}
BATCHES = {"cuda": (10, 100, 500), "cpu": (2, 8, 32)}
SWEPT_PROBES = (1, 3, 10, 30)
SIZES = (16, 32, 64)


def plain_moments(
    denoiser: Denoiser, x_t: Tensor, level: NoiseLevel, probes: int, generator: Generator
) -> tuple[Tensor, Tensor]:
    """The mean and the diagonal of the covariance by probes, lifted to the floor."""
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


def small_convnet(channels: int = 3, width: int = 32, depth: int = 4) -> nn.Sequential:
    """A small convolutional score network."""
    with torch.random.fork_rng(devices=[]):  # torch's layers start from the global generator: leave it as it was
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.SiLU()]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU()]
        return nn.Sequential(*layers, nn.Conv2d(width, channels, 3, padding=1))


def awake(network: nn.Module, seed: int = 0) -> nn.Module:
    """A network, with small random weights where it starts from zero: a trained one has no such layers."""
    generator = seeded(seed)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim > 1 and not weight.any():
                drawn = torch.randn(weight.shape, generator=generator) * (0.1 / weight[0].numel() ** 0.5)
                weight.copy_(drawn)
    return network


@dataclass(frozen=True)
class Case:
    """A denoiser, the shape of its images and its noise level."""

    name: str
    denoiser: Denoiser
    channels: int
    level: NoiseLevel
    precisions: tuple[str, ...] = ("float32",)
    size: int = SIZE

    def images(self, batch: int, size: int, device: torch.device) -> Tensor:
        """Noisy images: the same on every device."""
        shape = (batch, self.channels, size, size)
        x = torch.rand(shape, generator=seeded(1))
        return (x + self.level.sigma * torch.randn(shape, generator=seeded(2))).to(device)


def _convnet(device: torch.device) -> Case:
    return Case("small convnet", score_denoiser(small_convnet().to(device)), 3, NoiseLevel(sigma=SIGMA))


def _paper(device: torch.device) -> Case:
    kind, options = preset("unet-paper")
    network = awake(build_network(kind, 3, 3, options)).to(device).eval()
    return Case("unet-paper", score_denoiser(network), 3, NoiseLevel(sigma=SIGMA), ("tf32", "bf16"))


def _digits(device: torch.device) -> Case:
    model = load("mnist").to(device)
    return Case("mnist energy", model, 1, model.level, size=28)


CASES: dict[str, tuple[Callable[[torch.device], Case], ...]] = {"cuda": (_paper,), "cpu": (_digits, _convnet)}


@contextlib.contextmanager
def strict_float32() -> Iterator[None]:
    """No TF32 anywhere: torch's convolutions use it by themselves."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _check(batch: int | None, probes: int | None, size: int | None) -> None:
    for name, value in (("batch", batch), ("probes", probes)):
        if value is not None and value < 1:
            raise UsageError(f"{name} must be at least 1, got {value}")
    if size is not None and (size < MULTIPLE or size % MULTIPLE):
        raise UsageError(f"size must be a multiple of {MULTIPLE}, got {size}")


def moments(
    device: torch.device,
    *,
    batch: int | None = None,
    probes: int | None = None,
    size: int | None = None,
    quick: bool = False,
) -> list[Row]:
    """One call with probes: the paper's U-Net in tf32 and bf16 on a GPU; MNIST's energy, a small convnet on a CPU."""
    _check(batch, probes, size)
    kind = device.type if device.type in CASES else "cpu"
    batch = batch or (2 if quick else BATCH[kind])
    probes = probes or (2 if quick else PROBES)
    repeats = 1 if quick else REPEATS
    return [one for make in CASES[kind] for one in _rows(make(device), device, batch, probes, size, repeats)]


def _rows(case: Case, device: torch.device, batch: int, probes: int, size: int | None, repeats: int) -> Iterator[Row]:
    """A row for each precision of a case."""
    x_t = case.images(batch, size or case.size, device)
    with strict_float32():
        _, expected = plain_moments(case.denoiser, x_t, case.level, probes, Streams(0, batch))
    generator = seeded(0, device=device)
    for precision in case.precisions:
        estimate = _estimate(case, x_t, probes, precision, device)
        found = estimate(Streams(0, batch))
        error = ((found - expected).norm() / expected.norm()).item()
        base, ours = measure(
            [
                Work(lambda: plain_moments(case.denoiser, x_t, case.level, probes, generator), batch),
                Work(lambda estimate=estimate: estimate(generator), batch),  # type: ignore[misc]
            ],
            device,
            repeats=repeats,
        )
        name = f"{case.name}, {'x'.join(map(str, x_t.shape[1:]))}, batch {batch}, {probes} probes"
        yield row(name, "images/s", base, ours, precision=precision, error=error)


def _estimate(
    case: Case, x_t: Tensor, probes: int, precision: str, device: torch.device
) -> Callable[[Generator], Tensor]:
    """Our estimator: the diagonal as a function of the generator."""
    post = DiagonalMoments(case.denoiser, probes=probes, design=Rademacher())

    def estimate(generator: Generator) -> Tensor:
        with matmul_precision(precision), autocast(precision, device), compiled_at_once(device):
            return post(x_t, case.level, generator=generator).cov.diagonal()

    return estimate


@dataclass(frozen=True)
class Point:
    """What one call takes at a size: seconds, and those of one forward pass in the same run and precision."""

    name: str
    precision: str
    batch: int
    probes: int
    size: int
    seconds: float
    forward: float
    memory: int | None

    @property
    def floor(self) -> float:
        """1 + S forward passes."""
        return (1 + self.probes) * self.forward

    @property
    def ratio(self) -> float:
        """How many times the floor."""
        return self.seconds / self.floor


def sweep(
    device: torch.device,
    *,
    batch: int | None = None,
    probes: int | None = None,
    size: int | None = None,
    quick: bool = False,
) -> list[Point]:
    """One call's cost against the batch, the probes and the resolution, one of them at a time."""
    _check(batch, probes, size)
    kind = device.type if device.type in CASES else "cpu"
    case = CASES[kind][-1](device)
    at: dict[str, Any] = {"batch": batch or BATCH[kind], "probes": probes or PROBES, "size": size or case.size}
    varied = {"batch": BATCHES[kind], "probes": SWEPT_PROBES, "size": SIZES}
    most = 2 if quick else None
    points = {tuple((at | {key: value}).items()) for key, values in varied.items() for value in values[:most]}
    found = []
    for point in sorted(points):
        try:
            found.append(_point(case, device, **dict(point), repeats=1 if quick else 3))
        except torch.OutOfMemoryError:
            logger.warning("%s does not fit on %s, and is left out", dict(point), device)
    return found


def _point(case: Case, device: torch.device, *, batch: int, probes: int, size: int, repeats: int) -> Point:
    x_t, precision, generator = case.images(batch, size, device), case.precisions[-1], seeded(0, device=device)
    estimate = _estimate(case, x_t, probes, precision, device)

    def forward() -> None:
        with torch.no_grad(), matmul_precision(precision), autocast(precision, device), compiled_at_once(device):
            denoise(case.denoiser, x_t, case.level)

    ours, one = measure([Work(lambda: estimate(generator), 1), Work(forward, 1)], device, repeats=repeats)
    return Point(case.name, precision, batch, probes, size, ours.seconds, one.seconds, ours.memory)

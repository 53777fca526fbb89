"""`mmdgs bench`: mmdgs against a plain implementation, both measured in one run on one machine.

The plain way is the method as one first writes it down, in float32 with torch's defaults; it shares
only denoisers and draws with ours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mmdgs.compiled import fast_path
from mmdgs.denoisers import Denoiser, denoise, energy_denoiser, score_denoiser
from mmdgs.errors import UsageError
from mmdgs.models import load
from mmdgs.moments import FLOOR, DiagonalMoments, FullMoments
from mmdgs.moments.probes import Rademacher
from mmdgs.networks import MLP, build_network, preset
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Generator, Streams, seeded, signs
from mmdgs.runtime import autocast, environment, matmul_precision, progress_bar, threads
from mmdgs.samplers import gibbs_chain

REPEATS = 5
SIGMA = 0.3  # the paper's on CIFAR-10


# --- measuring


@dataclass(frozen=True)
class Row:
    """One line of a benchmark: the same work done the plain way and ours.

    Both are numbers in `unit`: a rate ("images/s") or a time ("s/image-step"). `floor` is the rate
    of 1 + S forward passes; `first_call` is how long our first call took, which may compile; memory
    is the peak in bytes, where the device counts it; `error` is the relative difference of our
    result from the plain one in float32.
    """

    name: str
    unit: str
    plain: float
    ours: float
    precision: str = "float32"
    floor: float | None = None
    first_call: float | None = None
    plain_memory: int | None = None
    memory: int | None = None
    error: float | None = None

    @classmethod
    def of(cls, name: str, unit: str, plain: Timing, ours: Timing, **more: Any) -> Row:
        """A row of two timings, as rates or as times by its unit."""
        times = plain.seconds, ours.seconds
        values = times if unit.startswith("s/") else [1 / seconds for seconds in times]
        more |= {"first_call": ours.first_call, "plain_memory": plain.memory, "memory": ours.memory}
        return cls(name, unit, *values, **more)

    @property
    def ratio(self) -> float:
        """How many times as fast as the plain way."""
        return self.plain / self.ours if self.unit.startswith("s/") else self.ours / self.plain


class Timing(NamedTuple):
    """Seconds a unit of work in the best call, those of the first call, and the peak memory."""

    seconds: float
    first_call: float
    memory: int | None


class Work(NamedTuple):
    """A call to be timed, and how many units of work it does."""

    call: Callable[[], object]
    units: int


def measure(works: Sequence[Work], device: torch.device, repeats: int = REPEATS) -> list[Timing]:
    """Time each piece of work: a first call, a warm-up, and the best of some repeats.

    The pieces take turns, so that a change in the machine's speed meets all of them. The best
    counts, because other work on the machine can only slow a call down. The warm-up is there for
    what compiles at the second call.
    """
    turns: list[list[tuple[float, int | None]]] = []
    with progress_bar((2 + repeats) * len(works), "measuring", unit="call") as bar:
        for _ in range(2 + repeats):
            turns.append([])
            for call, _ in works:
                turns[-1].append(timed(call, device))
                bar.update()
    best = [min(turn[i][0] for turn in turns[2:]) / units for i, (_, units) in enumerate(works)]
    return [Timing(best[i], turns[0][i][0], turns[-1][i][1]) for i in range(len(works))]


def timed(call: Callable[[], object], device: torch.device) -> tuple[float, int | None]:
    """Seconds, and the peak of memory on a GPU."""
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    call()
    if on_gpu:
        torch.cuda.synchronize(device)
    seconds = time.perf_counter() - started
    return seconds, torch.cuda.max_memory_allocated(device) if on_gpu else None


@contextmanager
def our_way(precision: str, device: torch.device) -> Iterator[None]:
    """Our side of a comparison: in this precision, and on a GPU compiled at the first call."""
    fast = fast_path("now") if device.type == "cuda" else nullcontext()
    with matmul_precision(precision), autocast(precision, device), fast:
        yield


def record(rows: Sequence[Row], device: torch.device) -> dict[str, Any]:
    """The benchmark as JSON-ready data, with the machine it ran on."""
    machine = environment(device)
    name = machine["device" if device.type == "cuda" else "processor"]
    cells = [asdict(row) | {"ratio": row.ratio} for row in rows]
    return machine | {"device": str(device), "device_name": name, "rows": cells}


def kind_of(device: torch.device) -> str:
    """The device by which sizes are chosen: "cuda" or "cpu"."""
    return "cuda" if device.type == "cuda" else "cpu"


# --- chains in 2-D

PLAIN_STEPS = 300
CHAIN_STEPS = {"cpu": {1: 500, 5: 500, 1000: 20}, "cuda": {1: 2000, 5: 2000, 1000: 2000}}
"""Steps of a measurement by the number of chains: some tenths of a second."""


def chain(device: torch.device, *, quick: bool = False) -> list[Row]:
    """Gibbs chains in 2-D, full covariance: 1, 5 and 1,000 at once against one at a time."""
    shorter = 10 if quick else 1
    level, start, generator = NoiseLevel(sigma=0.2), torch.ones(2, device=device), seeded(0)
    energy = MLP(2, 2, seed=0).to(device)
    moments = FullMoments(energy_denoiser(energy))

    def plain() -> None:
        with threads(1):  # faster than more of them: the matrices are small
            plain_chain(energy, start, PLAIN_STEPS // shorter, level.sigma, generator)

    names, works = [], [Work(plain, PLAIN_STEPS // shorter)]
    for chains, most in CHAIN_STEPS[kind_of(device)].items():
        steps, x0 = most // shorter, start.expand(chains, 2).clone()
        ours = partial(gibbs_chain, moments, x0, level, steps=steps, progress=None)
        works.append(Work(ours, chains * steps))
        names.append(f"2-D full covariance, {chains:,} chain{'s' * (chains > 1)}, {steps:,} steps")
    base, *timings = measure(works, device, 1 if quick else REPEATS)
    pairs = zip(names, timings, strict=True)
    return [Row.of(name, "chain-steps/s", base, timing) for name, timing in pairs]


def plain_chain(
    energy: nn.Module, x: Tensor, steps: int, sigma: float, generator: torch.Generator
) -> Tensor:
    """One Gibbs chain, full covariance, x (d,): passes for the mean and each row of the Hessian."""
    samples, eye = [], torch.eye(len(x), device=x.device)
    normal = partial(torch.randn, x.shape, generator=generator, device=generator.device)
    for _ in range(steps):
        noisy = x + sigma * normal().to(x.device)
        point = noisy[None].requires_grad_(True)
        (gradient,) = torch.autograd.grad(energy(point).sum(), point)
        mean = noisy - sigma**2 * gradient[0]
        rows = []
        for i in range(len(x)):
            (gradient,) = torch.autograd.grad(energy(point).sum(), point, create_graph=True)
            rows.append(torch.autograd.grad(gradient[0, i], point)[0][0])
        covariance = sigma**2 * eye - sigma**4 * torch.stack(rows)
        root, failed = torch.linalg.cholesky_ex(covariance)
        if failed:
            root = torch.linalg.cholesky(covariance + 0.01 * eye)
        x = mean.detach() + root @ normal().to(x.device)
        samples.append(x)
    return torch.stack(samples)


# --- the mean and the diagonal of images

PROBES = 10
BATCH = {"cuda": 100, "cpu": 8}


@dataclass(frozen=True)
class Case:
    """A denoiser, the shape of its images and its noise level."""

    name: str
    denoiser: Denoiser
    shape: tuple[int, int, int]
    level: NoiseLevel
    precisions: tuple[str, ...] = ("float32",)


def cases(device: torch.device) -> list[Case]:
    """The paper's U-Net on a GPU; the MNIST energy that ships and a small convnet on a CPU."""
    level = NoiseLevel(sigma=SIGMA)
    if kind_of(device) == "cuda":
        kind, options = preset("unet-paper")
        network = awake(build_network(kind, 3, 3, options)).to(device)
        return [Case("unet-paper", score_denoiser(network), (3, 32, 32), level, ("tf32", "bf16"))]
    digits = load("mnist").to(device)
    convnet = score_denoiser(small_convnet().to(device))
    return [
        Case("mnist energy", digits, (1, 28, 28), digits.level),
        Case("small convnet", convnet, (3, 32, 32), level),
    ]


def awake(network: nn.Module) -> nn.Module:
    """A network whose zero weights are small random ones: a trained one has no layers at zero."""
    generator = seeded(0)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim > 1 and not weight.any():
                noise = torch.randn(weight.shape, generator=generator)
                weight.copy_(noise * (0.1 / weight[0].numel() ** 0.5))
    return network.eval()


def small_convnet() -> nn.Sequential:
    """A small convolutional score network of colour images."""
    # torch's layers draw from the global generator: leave it as it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1), nn.SiLU()]
        for _ in range(4):
            layers += [nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU()]
        return nn.Sequential(*layers, nn.Conv2d(32, 3, 3, padding=1))


def moments(
    device: torch.device,
    *,
    batch: int | None = None,
    probes: int | None = None,
    size: int | None = None,
    quick: bool = False,
) -> list[Row]:
    """One call for the mean and the probe diagonal of a batch of images, `size` pixels a side."""
    if size is not None and size % 8:  # the paper's U-Net halves an image three times
        raise UsageError(f"size must be a multiple of 8, got {size}")
    batch = batch or (2 if quick else BATCH[kind_of(device)])
    probes, repeats = probes or (2 if quick else PROBES), 1 if quick else REPEATS
    return [
        row
        for case in cases(device)
        for row in case_rows(case, device, batch, probes, size or case.shape[1], repeats)
    ]


def case_rows(
    case: Case, device: torch.device, batch: int, probes: int, size: int, repeats: int
) -> Iterator[Row]:
    """A row for each precision of a case."""
    level, shape = case.level, (case.shape[0], size, size)
    x, noise = (
        draw(batch, *shape, generator=seeded(seed))
        for seed, draw in enumerate((torch.rand, torch.randn), 1)
    )
    x_t = (x + level.sigma * noise).to(device)
    # Errors are against float32 without TF32, which cuDNN uses by default.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        _, expected = plain_moments(case.denoiser, x_t, level, probes, Streams(0, batch))
    generator = seeded(0, device=device)
    estimator = DiagonalMoments(case.denoiser, probes=probes, floor=FLOOR, design=Rademacher())
    plain = partial(plain_moments, case.denoiser, x_t, level, probes, generator)
    for precision in case.precisions:

        def estimate(generator: Generator, precision: str = precision) -> Tensor:
            with our_way(precision, device):
                return estimator(x_t, level, generator=generator).cov.diagonal()

        def forward(precision: str = precision) -> None:
            with torch.no_grad(), our_way(precision, device):
                denoise(case.denoiser, x_t, level)

        error = ((estimate(Streams(0, batch)) - expected).norm() / expected.norm()).item()
        calls = (plain, partial(estimate, generator), forward)
        base, ours, one_pass = measure([Work(call, batch) for call in calls], device, repeats)
        name = f"{case.name}, {'x'.join(map(str, shape))}, batch {batch}, {probes} probes"
        floor = 1 / ((1 + probes) * one_pass.seconds)
        more = {"precision": precision, "floor": floor, "error": error}
        yield Row.of(name, "images/s", base, ours, **more)


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

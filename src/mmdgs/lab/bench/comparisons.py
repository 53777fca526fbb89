"""Four benchmarks of `mmdgs bench` (restoration.py has the fifth), each against its plain implementation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmdgs.denoisers import Denoiser, denoise, energy_denoiser, score_denoiser
from mmdgs.errors import UsageError
from mmdgs.generation.methods import exploding_levels
from mmdgs.lab.bench.plain import batched_chain, plain_chain, plain_gibbs, plain_moments, plain_steps
from mmdgs.lab.bench.timing import REPEATS, Row, Work, measure, our_way
from mmdgs.models import Model, from_pretrained, load
from mmdgs.moments import FLOOR, DiagonalMoments, FullMoments
from mmdgs.moments.probes import Rademacher
from mmdgs.networks import MLP, build_network, preset
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Generator, Streams, seeded
from mmdgs.runtime import check_precision, threads
from mmdgs.samplers import gibbs_chain, gibbs_plan, run
from mmdgs.training.examples import ImageExamples
from mmdgs.training.loop import Trainer
from mmdgs.training.objective import PerExampleLoss, loss_of
from mmdgs.training.recipe import Recipe, TrainingSettings
from mmdgs.training.run import placed
from mmdgs.training.untrained import new_model

logger = logging.getLogger("mmdgs")

SIGMA = 0.3  # the paper's on CIFAR-10


def kind_of(device: torch.device) -> str:
    """The device by which sizes are chosen: "cuda" or "cpu"."""
    return "cuda" if device.type == "cuda" else "cpu"


def awake(network: nn.Module) -> nn.Module:
    """A network whose zero weights are small random ones instead: a trained network has no layers at zero."""
    generator = seeded(0)
    with torch.no_grad():
        for weight in network.parameters():
            if weight.ndim > 1 and not weight.any():
                weight.copy_(torch.randn(weight.shape, generator=generator) * (0.1 / weight[0].numel() ** 0.5))
    return network.eval()


# --- chains in 2-D --------------------------------------------------------------------------------------------------

CHAIN_STEPS = {"cpu": {1: 500, 5: 500, 1000: 20}, "cuda": {1: 2000, 5: 2000, 1000: 2000}}
"""Steps of a measurement by the number of chains: some tenths of a second."""


def chain(device: torch.device, *, quick: bool = False) -> list[Row]:
    """Gibbs chains in 2-D with the full covariance: 1, 5 and 1,000 at once, against one at a time.

    The last row is against 1,000 chains of batched autograd: what is left of the ratio without batching.
    """
    scale = 0.1 if quick else 1.0
    level, start, generator = NoiseLevel(sigma=0.2), torch.ones(2, device=device), seeded(0)
    energy = MLP(2, 2, seed=0).to(device)
    moments = FullMoments(energy_denoiser(energy))

    def plain() -> None:
        with threads(1):  # faster than more of them: the matrices are small
            plain_chain(energy, start, int(300 * scale), level.sigma, generator)

    def ours(chains: int, steps: int) -> Work:
        x0 = start.expand(chains, 2).clone()
        return partial(gibbs_chain, moments, x0, level, steps=steps, progress=None), chains * steps

    sizes = {chains: max(2, int(steps * scale)) for chains, steps in CHAIN_STEPS[kind_of(device)].items()}
    (*_, most), (*_, steps) = zip(*sizes.items(), strict=True)
    x0 = start.expand(most, 2).clone()
    batched = (partial(batched_chain, energy, x0, steps, level.sigma, generator), most * steps)
    works: list[Work] = [(plain, int(300 * scale)), batched, *(ours(c, n) for c, n in sizes.items())]
    base, together, *measured = measure(works, device)
    names = [f"2-D full covariance, {c:,} chain{'s' * (c > 1)}, {n:,} steps" for c, n in sizes.items()]
    rows = [Row.of(name, "chain-steps/s", base, found) for name, found in zip(names, measured, strict=True)]
    return [*rows, Row.of(f"{names[-1]}, against batched autograd", "chain-steps/s", together, measured[-1])]


# --- the mean and the diagonal of images ----------------------------------------------------------------------------

PROBES = 10
BATCH = {"cuda": 100, "cpu": 8}
SWEPT_BATCHES = {"cuda": (10, 100, 500), "cpu": (2, 8, 32)}
SWEPT_PROBES = (1, 3, 10, 30)
SWEPT_SIZES = (16, 32, 64)


@dataclass(frozen=True)
class Case:
    """A denoiser, the shape of its images and its noise level."""

    name: str
    denoiser: Denoiser
    channels: int
    level: NoiseLevel
    size: int
    precisions: tuple[str, ...] = ("float32",)

    def images(self, batch: int, size: int, device: torch.device) -> Tensor:
        """Noisy images, the same on every device."""
        shape = (batch, self.channels, size, size)
        x, noise = torch.rand(shape, generator=seeded(1)), torch.randn(shape, generator=seeded(2))
        return (x + self.level.sigma * noise).to(device)

    def estimate(self, x_t: Tensor, probes: int, precision: str) -> Callable[[Generator], Tensor]:
        """Our estimator: the diagonal at x_t as a function of the generator."""
        moments = DiagonalMoments(self.denoiser, probes=probes, floor=FLOOR, design=Rademacher())

        def estimate(generator: Generator) -> Tensor:
            with our_way(precision, x_t.device):
                return moments(x_t, self.level, generator=generator).cov.diagonal()

        return estimate


def small_convnet(channels: int = 3, width: int = 32, depth: int = 4) -> nn.Sequential:
    """A small convolutional score network."""
    with torch.random.fork_rng(devices=[]):  # torch's layers draw from the global generator: leave it as it was
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Conv2d(channels, width, 3, padding=1), nn.SiLU()]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(8, width), nn.SiLU()]
        return nn.Sequential(*layers, nn.Conv2d(width, channels, 3, padding=1))


def cases(device: torch.device) -> list[Case]:
    """The paper's U-Net on a GPU; the MNIST energy that ships and a small convnet on a CPU."""
    level = NoiseLevel(sigma=SIGMA)
    if kind_of(device) == "cuda":
        kind, options = preset("unet-paper")
        network = awake(build_network(kind, 3, 3, options)).to(device)
        return [Case("unet-paper", score_denoiser(network), 3, level, 32, ("tf32", "bf16"))]
    digits = load("mnist").to(device)
    convnet = score_denoiser(small_convnet().to(device))
    return [Case("mnist energy", digits, 1, digits.level, 28), Case("small convnet", convnet, 3, level, 32)]


class Sizes(NamedTuple):
    """How large the work is; None: as large as the benchmark's own."""

    batch: int | None = None
    probes: int | None = None
    size: int | None = None  # the side of the images

    def filled(self, batch: int, probes: int, size: int) -> tuple[int, int, int]:
        """With these where nothing was asked for."""
        if self.size is not None and self.size % 8:  # the paper's U-Net halves an image three times
            raise UsageError(f"size must be a multiple of 8, got {self.size}")
        return self.batch or batch, self.probes or probes, self.size or size


def moments(device: torch.device, asked: Sizes, *, quick: bool = False) -> list[Row]:
    """One call for the mean and the probe diagonal of a batch of images."""
    batch, probes = (2, 2) if quick else (BATCH[kind_of(device)], PROBES)
    repeats = 1 if quick else REPEATS
    sized = [(case, asked.filled(batch, probes, case.size)) for case in cases(device)]
    return [row for case, sizes in sized for row in case_rows(case, device, *sizes, repeats)]


def case_rows(case: Case, device: torch.device, batch: int, probes: int, size: int, repeats: int) -> Iterator[Row]:
    """A row for each precision of a case. Errors are against float32 without TF32, which cuDNN uses by default."""
    x_t = case.images(batch, size, device)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        _, expected = plain_moments(case.denoiser, x_t, case.level, probes, Streams(0, batch))
    generator = seeded(0, device=device)
    plain = partial(plain_moments, case.denoiser, x_t, case.level, probes, generator)
    for precision in case.precisions:
        estimate = case.estimate(x_t, probes, precision)
        error = ((estimate(Streams(0, batch)) - expected).norm() / expected.norm()).item()
        base, ours = measure([(plain, batch), (partial(estimate, generator), batch)], device, repeats)
        name = f"{case.name}, {'x'.join(map(str, x_t.shape[1:]))}, batch {batch}, {probes} probes"
        yield Row.of(name, "images/s", base, ours, precision=precision, error=error)


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
        """1 + S forward passes: the least that forward and backward passes can reach."""
        return (1 + self.probes) * self.forward

    @property
    def ratio(self) -> float:
        """How many times the floor."""
        return self.seconds / self.floor


def sweep(device: torch.device, asked: Sizes, *, quick: bool = False) -> list[Point]:
    """The cost of one call against the batch, the probes and the resolution, one of them at a time."""
    kind, case = kind_of(device), cases(device)[-1]
    at = asked.filled(BATCH[kind], PROBES, case.size)
    varied = [values[: 2 if quick else None] for values in (SWEPT_BATCHES[kind], SWEPT_PROBES, SWEPT_SIZES)]
    found = []
    for point in sorted({(*at[:i], value, *at[i + 1 :]) for i, values in enumerate(varied) for value in values}):
        try:
            found.append(_point(case, device, 1 if quick else 3, *point))
        except torch.OutOfMemoryError:
            logger.warning("batch %d, %d probes, size %d do not fit on %s and are left out", *point, device)
    return found


def _point(case: Case, device: torch.device, repeats: int, batch: int, probes: int, size: int) -> Point:
    x_t, precision, generator = case.images(batch, size, device), case.precisions[-1], seeded(0, device=device)

    def forward() -> None:
        with torch.no_grad(), our_way(precision, device):
            denoise(case.denoiser, x_t, case.level)

    estimate = case.estimate(x_t, probes, precision)
    ours, one = measure([(partial(estimate, generator), 1), (forward, 1)], device, repeats)
    return Point(case.name, precision, batch, probes, size, ours.seconds, one.seconds, ours.memory)


# --- multi-level Gibbs ----------------------------------------------------------------------------------------------

SAMPLED = {"cuda": ("unet-paper", (3, 32, 32), 100), "cpu": ("unet-tiny", (1, 16, 16), 4)}
"""Where no model is named: a preset with random weights, the shape of its images, and the batch."""


def random_model(name: str, shape: tuple[int, int, int]) -> Model:
    """A network of many levels with random weights."""
    model = new_model(Recipe(model=name, param="edm", levels="geometric:100:50:0.01"), shape)
    awake(model.network)
    return model


def sampler(
    device: torch.device,
    *,
    model: str | None = None,
    levels_count: int = 4,
    sweeps: int = 3,
    probes: int = 3,
    batch: int | None = None,
    precision: str = "float32",
    quick: bool = False,
) -> list[Row]:
    """Seconds of an image's step in the paper's Algorithm 2, over a few levels of a model."""
    check_precision(precision)
    name, shape, usual = SAMPLED[kind_of(device)]
    chosen = (random_model(name, shape) if model is None else from_pretrained(model)).to(device)
    if len(chosen.levels) < 2:
        raise UsageError(f"{model!r} was trained at one noise level; multi-level Gibbs needs a model of many")
    batch = batch or usual
    levels = exploding_levels(chosen, 2 if quick else levels_count)
    moments = DiagonalMoments(chosen, probes=probes, floor=FLOOR, design=Rademacher())
    plan = gibbs_plan(moments, levels, sweeps=sweeps)
    x0 = plan.noise(chosen.shape, batch, generator=seeded(1)).to(device)

    def ours() -> None:
        with our_way(precision, device):
            run(plan, x0, progress=None)

    plain = partial(plain_gibbs, chosen, x0, levels, sweeps, probes, seeded(0, device=device))
    steps = batch * sweeps * (len(levels) - 1)
    base, found = measure([(plain, steps), (ours, steps)], device, 1 if quick else REPEATS)
    what = f"{f'{name}, random' if model is None else model}, {'x'.join(map(str, chosen.shape))}"
    label = f"Gibbs, {what}, batch {batch}, {len(levels)} levels, {sweeps} sweeps, {probes} probes"
    return [Row.of(label, "s/image-step", base, found, precision=precision)]


# --- training -------------------------------------------------------------------------------------------------------

TRAINED = {
    "cuda": ("unet-paper", (3, 32, 32), 512, 6, "bf16"),
    "cpu": ("unet-small", (1, 28, 28), 16, 2, "float32"),
}
"""A preset, the shape of its images, the batch, the steps of a measurement, and our precision."""
IMAGES = 2_048


def train(device: torch.device, *, quick: bool = False) -> list[Row]:
    """Images a second of denoising score matching, for the score and the energy form of a U-Net.

    Ours is the engine of `mmdgs train`: dequantisation, noise from a stream per example and a moving average included.
    """
    name, shape, batch, steps, precision = TRAINED[kind_of(device)]
    images = torch.randint(0, 256, (IMAGES, *shape), generator=seeded(0)).byte().to(device)
    steps = max(1, steps // 5) if quick else steps
    settings = TrainingSettings(steps=steps, batch_size=batch, ema=0.999, precision=precision, checkpoint_every=None)
    rows = []
    for param in ("score", "energy"):
        recipe = Recipe(model=name, param=param, sigma=SIGMA, network={"dropout": 0.0}, training=settings)
        plain = partial(plain_steps, new_model(recipe, shape).to(device), images, batch, steps)
        model = placed(new_model(recipe, shape), device)
        loss = loss_of(model, compiled=device.type == "cuda")  # once: a new one would compile again
        ours = partial(_trained, model, loss, images, settings)
        base, found = measure([(plain, batch * steps), (ours, batch * steps)], device, 1 if quick else 3)
        label = f"DSM, {param}, {name}, {'x'.join(map(str, shape))}, batch {batch}"
        rows.append(Row.of(label, "images/s", base, found, precision=precision))
    return rows


def _trained(model: Model, loss: PerExampleLoss, images: Tensor, settings: TrainingSettings) -> None:
    Trainer(model.network, loss, ImageExamples(images), settings).run(None)

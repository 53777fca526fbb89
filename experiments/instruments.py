"""Images of instruments: photon noise against exact posteriors, gain and read noise found in an
image, and `photo` on cells and stars.

    python -m experiments instruments --data-dir photos/val

photons    numbers from two priors, counted with 1 to 100 photons for their mean, with and without
           read noise; p(x | y) is known by quadrature. Draws by `restore` with the variance at the
           current mean (`mmdgs.sensors`), through the generalised Anscombe transform (the prior of
           the transformed number is exact here; back by the exact unbiased inverse), and with the
           variance that y itself has. The 5th and 95th of 99 draws hold 90% where they are right
estimated  the error of gain and read noise on photographs of a folder (--data-dir)
examples   a cell (scikit-image) and the stars of M13 (astropy), files that come with the packages,
           taken as the truth: 20 photons for white, draws, and their coverage
own        calibration of `photo` on crops of these images: as it comes, and after mmdgs.calibrate
           with 20 crops of another part of them
"""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

import mmdgs
from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure, Results
from mmdgs.data.instruments import Range
from mmdgs.data.single import named_images
from mmdgs.data.transforms import crops
from mmdgs.errors import UsageError
from mmdgs.linalg.operators import Diagonal
from mmdgs.metrics import calibration_ratio, psnr
from mmdgs.models import Model
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.operators import Mask
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Streams, seeded
from mmdgs.report.drawing import new_figure
from mmdgs.report.page import Figure, Outcome, Section
from mmdgs.schedules import edm
from mmdgs.sensors import Sensor, estimated_sensor
from mmdgs.workspace import Part

AT_MEAN, ANSCOMBE, AT_Y = "variance at the current mean", "Anscombe transform", "variance at y"
WAYS = (AT_MEAN, ANSCOMBE, AT_Y)
PRIORS = {"Gamma": "gamma", "log-normal": "lognormal"}
MEAN = 0.125
"""Of the priors, whose values reach 8 times as far."""
COVERAGE = Measure("coverage", "coverage of 90% intervals, %", 1)
BIAS = Measure("bias", "bias of the mean, posterior deviations", 2, "zero")
WIDTH = Measure("width", "width of draws over the exact one", 2, "one")
CELL, STARS = "cell", "stars"
SIDE, CROP, PHOTONS = 96, 48, 20
OWN, HELD_OUT = 20, 20
SHOWN = Path("docs", "images")


@dataclass(frozen=True)
class Settings:
    """Numbers and draws of each by quadrature; photographs; draws, levels and sides of examples."""

    numbers: int = 400
    draws: int = 99
    levels: int = 25
    photons: tuple[int, ...] = (1, 5, 20, 100)
    images: int = 20
    example_draws: int = 16
    example_levels: int = 16
    side: int = SIDE


FULL = Settings()
QUICK = Settings(40, 19, 8, (5,), 2, 4, 4, 48)


@dataclass(frozen=True)
class GridPrior:
    """A number with the weights w at points g of a grid: its posterior at any level is a sum."""

    g: Tensor
    w: Tensor
    denoiser: Any = None
    tables: dict[NoiseLevel, tuple[Tensor, ...]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        if self.denoiser is None:
            own = GridPrior(self.g, self.w, self, self.tables)
            object.__setattr__(self, "denoiser", lambda x_t, level: own(x_t, level).mean)

    def __call__(self, x_t: Tensor, level: NoiseLevel, *, generator: Any = None) -> Gaussian:
        if level not in self.tables:
            reach = 8 * level.sigma
            x = torch.linspace(self.g[0] - reach, self.g[-1] + reach, 1500, dtype=torch.float64)
            p = (self.w.log() - 0.5 * ((x[:, None] - self.g) / level.sigma) ** 2).softmax(1)
            mean = p @ self.g
            square = (p * (self.g - mean[:, None]).square()).sum(1)
            self.tables[level] = x, mean, square.clamp(min=1e-8 * level.variance)
        x, *values = (table.numpy() for table in self.tables[level])
        mean, square = (
            torch.from_numpy(numpy.interp(x_t.double().numpy(), x, value)).to(x_t)
            for value in values
        )
        return Gaussian(mean, Diagonal(square))


def prior(name: str) -> GridPrior:
    """Of a mean MEAN and standard deviation of about 0.7 and 0.9 of it."""
    g = torch.linspace(0, 1, 1001, dtype=torch.float64)[1:]
    if name == "gamma":
        logs = g.log() - 2 * g / MEAN  # of shape 2
    else:
        logs = -g.log() - 0.5 * ((g / MEAN).log() + 0.32).square() / 0.64
    return GridPrior(g, logs.softmax(0))


def likelihoods(y: Tensor, g: Tensor, sensor: Sensor) -> Tensor:
    """log p(y | g) (n, points) of counts with read noise, by the sum over counts."""
    gain, read = float(sensor.gain), float(sensor.read)
    rate = g / gain
    k = torch.arange(int(rate.max() + 8 * rate.max().sqrt() + 20), dtype=torch.float64)
    counts = k * rate[:, None].log() - rate[:, None] - torch.lgamma(k + 1)  # (points, counts)
    if read == 0:
        return counts.T[(y / gain).round().long()]
    seen = -0.5 * ((y[:, None] - gain * k) / read).square()
    peak = seen.amax(1, keepdim=True)
    return ((seen - peak).exp() @ counts.exp().T).clamp(min=1e-300).log() + peak


def anscombe(g: Tensor, sensor: Sensor) -> tuple[Any, Tensor]:
    """The generalised transform f of y, and its mean over y at each g: the inverse's table."""
    gain, read = float(sensor.gain), float(sensor.read)

    def f(y: Tensor) -> Tensor:
        return 2 / gain * (gain * y + 0.375 * gain**2 + read**2).clamp(min=0).sqrt()

    rate = g / gain
    k = torch.arange(int(rate.max() + 8 * rate.max().sqrt() + 20), dtype=torch.float64)
    p = (k * rate[:, None].log() - rate[:, None] - torch.lgamma(k + 1)).exp()
    nodes, weights = (torch.from_numpy(x) for x in numpy.polynomial.hermite_e.hermegauss(32))
    return f, p @ (f(gain * k[:, None] + read * nodes) @ (weights / weights.sum()))


def _drawn(way: str, of: GridPrior, y: Tensor, sensor: Sensor, at: Settings, seed: int) -> Tensor:
    """Draws (draws, n) of p(x | y) for numbers y (n,)."""
    noise: Any = sensor
    if way == AT_Y:
        noise = sensor.variances(y.clamp(min=float(sensor.gain))).sqrt().reshape(1, 1, -1)
    if way == ANSCOMBE:
        f, table = anscombe(of.g, sensor)
        top = float(table.max())
        of, noise, back, y = GridPrior(table / top, of.w), 1 / top, of.g, f(y) / top
    shape = (1, 1, len(y))
    x = mmdgs.restore(
        of, y.reshape(1, *shape).float(), Mask(torch.ones(shape)), noise=noise, seed=seed,
        levels=edm(at.levels, 10.0, 1e-3), shape=shape, draws=at.draws, progress=None,
    ).draws.double().flatten(1)  # fmt: skip
    if way != ANSCOMBE:
        return x
    return torch.from_numpy(numpy.interp(x.numpy(), of.g.numpy(), back.numpy()))


def _photons(cell: Cell, settings: Settings) -> Part:
    """How draws of a way compare with the exact posterior."""
    way, name, read, photons = cell.what
    of, gain = prior(name), MEAN / photons
    sensor = Sensor(gain, read * gain)
    generator = seeded(cell.seed, "numbers")
    x = of.g[torch.multinomial(of.w, settings.numbers, replacement=True, generator=generator)]
    streams = Streams(cell.seed, 1, purpose="photons")
    y = sensor.simulated(x[None], streams)[0]
    draws = _drawn(way, of, y, sensor, settings, cell.seed).sort(0).values
    p = (likelihoods(y, of.g, sensor) + of.w.log()).softmax(1)
    mean = p @ of.g
    deviation = (p @ of.g.square() - mean.square()).sqrt()
    k = (settings.draws + 1) // 20
    ends = [
        torch.searchsorted(of.g, draws[i].contiguous()).clamp(max=len(of.g) - 1)
        for i in (k - 1, -k)
    ]
    low, high = (p.cumsum(1).gather(1, end[:, None])[:, 0] for end in ends)
    return Part({
        "coverage": (100 * (high - low)).tolist(),
        "bias": ((draws.mean(0) - mean) / deviation).tolist(),
        "width": (draws.std(0) / deviation).tolist(),
    })  # fmt: skip


def _estimated(cell: Cell, photographs: list[Tensor]) -> Part:
    """Errors of the estimated gain and read noise."""
    photons, read = cell.what
    sensor = Sensor(1 / photons, read / photons)
    gains, reads = [], []
    for i, x in enumerate(photographs):
        y = sensor.simulated(x[None], Streams(cell.seed, 1, i, purpose="photons"))
        found = estimated_sensor(y, Mask(torch.ones_like(x)))
        gains.append(100 * abs(float(found.gain) * photons - 1))
        reads.append(float(found.read) * photons - read)
    middle = sorted(gains)[len(gains) // 2]
    within = sum(error <= 10 for error in gains) / len(gains)
    return Part({"median": middle, "within": 100 * within, "read": sum(reads) / len(reads)})


def example(name: str) -> Tensor:
    """An image (1, H, W) from the files of an installed package; of the cell the part around it."""
    package, path, given = {
        CELL: ("skimage", "data/cell.png", Range(0.1, 99.9, True)),
        STARS: ("astropy", "io/fits/hdu/compressed/tests/data/m13.fits", Range(100, 700)),
    }[name]
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UsageError(f"the example {name!r} is a file of {package}: pip install {package}")
    (image,) = named_images([str(Path(spec.submodule_search_locations[0]) / path)], given=given)
    return image.image[:, 240:500, 290:550] if name == CELL else image.image


def _part(name: str, side: int) -> Tensor:
    """The middle of an example, (1, 1, side, side), no value above 1 or below 0."""
    x = example(name)
    top, left = ((size - side) // 2 for size in x.shape[1:])
    return x[None, :, top : top + side, left : left + side].clamp(0, 1)


def _example(cell: Cell, settings: Settings, model: Model) -> Part:
    """Draws of an example with photon noise: coverage, spread over error, PSNR; what is shown."""
    x = _part(cell.row, settings.side)
    sensor = Sensor(1 / PHOTONS, 1 / PHOTONS)
    y = sensor.simulated(x, Streams(cell.seed, 1, purpose="photons"))
    noise: Any = sensor if cell.what else sensor.variances(y).mean().sqrt().item()
    operator = Mask(torch.ones_like(x[0]))
    restored = mmdgs.restore(
        model, y, operator, noise=noise, seed=cell.seed, draws=settings.example_draws,
        steps=settings.example_levels, progress=None,
    )  # fmt: skip
    reach = 1.645 * math.sqrt(1 + 1 / settings.example_draws) * restored.std
    inside = (x - restored.mean).abs() <= reach
    dark = x <= x.flatten().quantile(0.5)
    values = {
        "noisy": psnr(y, x).item(), "psnr": psnr(restored.mean, x).item(),
        "coverage": 100 * inside.float().mean().item(),
        "dark": 100 * inside[dark].float().mean().item(),
        "bright": 100 * inside[~dark].float().mean().item(),
        "spread": calibration_ratio(restored.draws, x),
    }  # fmt: skip
    pictures = {"y": y, "mean": restored.mean, "std": restored.std, "x": x}
    return Part(values, {key: value[0, 0] for key, value in pictures.items()})


@contextmanager
def _own_cache() -> Iterator[None]:
    """Calibrations of this run are kept nowhere."""
    before = os.environ.get("MMDGS_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MMDGS_CACHE"] = folder
        try:
            yield
        finally:
            os.environ.pop("MMDGS_CACHE")
            os.environ |= {} if before is None else {"MMDGS_CACHE": before}


def _own(cell: Cell, model: Model) -> Part:
    """Coverage of 90% intervals on crops of the lower half of an example, by the estimator as it
    comes or after a calibration on crops of the upper half.
    """
    x, sigma = example(cell.row).clamp(0, 1), 0.1
    middle = x.shape[1] // 2
    generator = seeded(cell.seed, "crops")
    upper, lower = (
        crops([half.contiguous()], CROP, count, generator)
        for half, count in ((x[:, :middle], OWN), (x[:, middle:], HELD_OUT))
    )
    level, grey = NoiseLevel(sigma=sigma), model.grey()
    with _own_cache():
        moments = grey.posterior()
        if cell.what:
            moments = mmdgs.calibrate(moments, upper, level, seed=cell.seed, progress=None)
        inside, squares = [], []
        for i, clean in enumerate(lower):
            noisy = add_noise(clean[None], level, generator=Streams(cell.seed, 1, i, purpose="own"))
            q = moments(noisy, level, generator=Streams(cell.seed, 1, i, purpose="probes"))
            low, high = q.interval(0.9)
            inside.append(100 * ((clean >= low) & (clean <= high)).float().mean().item())
            squares.append(((clean - q.mean).square() / q.cov.diagonal()).mean().item())
    return Part({"coverage": inside, "z": squares})


def run(context: Context) -> Outcome:
    """The four tables; what `photo` is not asked is left out where photographs are missing."""
    settings = context.sized(FULL, QUICK)
    model = mmdgs.load(context.model or "photo", device=context.device)
    photographs: list[Tensor] = []
    if context.data_dir:
        every = named_images([context.data_dir])
        step = max(1, len(every) // settings.images)
        photographs = [image.image for image in every[::step][: settings.images]]
    columns = [f"{n} photon{'s' * (n > 1)}" for n in settings.photons]
    photons: dict[Any, Any] = {
        (f"{title}{', read noise' * read}: {way}", column): (way, name, read, n)
        for title, name in PRIORS.items()
        for read in (0, 1)
        for way in WAYS
        for column, n in zip(columns, settings.photons, strict=True)
    }
    estimated: dict[Any, Any] = {
        (f"{n} photons, read noise {read}", "photographs"): (n, read)
        for n, read in ((20, 0), (20, 2), (100, 0), (100, 2), (500, 5))
    }
    kinds = {"one noise for all pixels": False, "photons": True}
    examples: dict[Any, Any] = {(row, k): w for row in (CELL, STARS) for k, w in kinds.items()}
    after = {"as it comes": False, f"after {OWN} crops": True}
    own: dict[Any, Any] = {(row, k): w for row in (CELL, STARS) for k, w in after.items()}
    on = {"model": model, "settings": settings}
    grids = {
        "photons": Grid("photons", photons, partial(_photons, settings=settings),
                        (settings.numbers, settings.draws, settings.levels), "case"),
        "estimated": Grid("estimated", estimated, partial(_estimated, photographs=photographs),
                          photographs, "case"),
        "examples": Grid("examples", examples, partial(_example, settings=settings, model=model),
                         on, "case"),
        "own": Grid("own", own, partial(_own, model=model), model, "case"),
    }  # fmt: skip
    if not photographs:
        del grids["estimated"]
    results = {name: grid.run(context, least=0) for name, grid in grids.items()}
    records = {name: each.records() for name, each in results.items()}
    left = [name for each in results.values() for name in each.open()]
    return Outcome({"settings": asdict(settings), **records}, _sections(results), left=left)


def _sections(results: dict[str, Results]) -> list[Section]:
    titles = {
        "photons": ("Photon noise against exact posteriors", [COVERAGE, BIAS, WIDTH]),
        "estimated": (
            "Gain and read noise, estimated",
            [
                Measure("median", "median error of the gain, %", 1, "less"),
                Measure("within", "images within 10%, %", 0, "more"),
                Measure("read", "error of the read noise, photons", 2, "zero"),
            ],
        ),
        "examples": (
            f"Cells and stars with {PHOTONS} photons at white",
            [
                Measure("psnr", "PSNR of the mean, dB", 1, "more"),
                Measure("coverage", "coverage, %", 1),
                Measure("dark", "of the darker half, %", 1),
                Measure("bright", "of the brighter half, %", 1),
                Measure("spread", "spread over error", 2, "one"),
            ],
        ),
        "own": (
            "Calibration on images that are no photographs",
            [Measure("coverage", "coverage of 90% intervals, %", 1), Measure("z", "z²", 2, "one")],
        ),
    }
    sections = []
    for name, each in results.items():
        title, measures = titles[name]
        whole = name == "examples" and not each.left
        figures = [_figure(each)] if whole else []
        sections.append(Section(title, tables=[each.table(title, measures)], figures=figures))
    return sections


def _figure(results: Results) -> Figure:
    """Truth, measurement, mean and standard deviation of each example."""
    canvas, axes = new_figure(2, 4, inches=(10, 5.4))
    words = {
        "x": "truth",
        "y": f"{PHOTONS} photons at white",
        "mean": "mean of draws",
        "std": "deviation",
    }
    for line, row in zip(axes, results.rows, strict=False):
        tensors = results.parts[row, "photons"].tensors
        for place, (key, word) in zip(line, words.items(), strict=True):
            scale = {"cmap": "inferno"} if key == "std" else {"cmap": "gray", "vmin": 0, "vmax": 1}
            shown = place.imshow(tensors[key].numpy(), **scale)
            place.set_title(word if key != "x" else f"{row}: {word}", fontsize=9)
            place.axis("off")
            if key == "std":
                canvas.colorbar(shown, ax=place, fraction=0.046)
    return Figure("instruments", "Examples with photon noise, restored by photo.", canvas)

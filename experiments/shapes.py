"""Volumes and complex images: a phantom in k-space by eight coils, and a stack with dead pixels,
restored by a model of photographs.

    python -m experiments shapes

    k-space  the phantom of Shepp and Logan, a quarter of the lines of k-space, eight coils. "real":
             the phase is known, and part of the maps; "complex": it is not
    stack    volumes of ellipsoids, half of the pixels dead, the same in every slice. "slice by
             slice" restores each slice as an image; "three ways" the volume, by a denoiser that
             sees the slices along each side, with a spectrum of volumes

PSNR is of the mean of the draws; the white Gaussian prior has its exact mean. Spread over error is
1 where draws are calibrated. Draws of a volume must also be consistent: deviations of the draws at
neighbouring slices should be as correlated as errors are, and means over eight slices and over
cubes calibrated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor
from torch.nn.functional import max_pool2d

import mmdgs
from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure
from mmdgs.covariances import LowRank
from mmdgs.linalg import Diagonal
from mmdgs.metrics import calibration_ratio, coverage_of
from mmdgs.models import Model, complex_model, grey_model, load, volume_model
from mmdgs.moments import LowRankMoments, Moments, SpectralMoments
from mmdgs.operators import Coils, Mask
from mmdgs.posterior import Gaussian
from mmdgs.randomness import randn_like, seeded
from mmdgs.report.drawing import bare, new_figure
from mmdgs.report.page import Figure, Outcome, Section
from mmdgs.schedules import Levels, edm, geometric
from mmdgs.workspace import Part

SHEPP_LOGAN = (
    (1.0, 0.0, 0.0, 0.69, 0.92, 0), (-0.8, 0.0, -0.0184, 0.6624, 0.874, 0),
    (-0.2, 0.22, 0.0, 0.11, 0.31, -18), (-0.2, -0.22, 0.0, 0.16, 0.41, 18),
    (0.1, 0.0, 0.35, 0.21, 0.25, 0), (0.1, 0.0, 0.1, 0.046, 0.046, 0),
    (0.1, 0.0, -0.1, 0.046, 0.046, 0), (0.1, -0.08, -0.605, 0.046, 0.023, 0),
    (0.1, 0.0, -0.605, 0.023, 0.023, 0), (0.1, 0.06, -0.605, 0.023, 0.046, 0),
)  # fmt: skip
"""Shepp and Logan (1974) with Toft's contrast: value, centre, half axes, degrees."""
ZERO, WHITE = "zero-filled", "white Gaussian prior"
SPECTRAL, LOW_RANK, OWN = "photo, spectral", "photo, low rank", "photo, low rank, 20 phantoms"
SLICES, THREE_WAYS = "slice by slice", "three ways"
REAL, COMPLEX, STACK = "real", "complex", "stack"
PRIOR_STD = 0.3
"""Of the white prior, about that of the phantom."""
KNOTS, LARGEST = 8, 1.0
"""Levels at which spectra are fitted, and those of chains begin: four standard deviations of the
phantoms."""
DEEP, CUBE = 8, 6
"""Slices that are averaged, and the side of a cube that is."""

PSNR = Measure("psnr", "PSNR, dB", 1, "more")
COVERAGE = Measure("coverage_90", "coverage of 90% intervals", 1, percent=True)
EDGES = Measure("coverage_edges", "at edges", 1, percent=True)
SPREAD = Measure("spread", "spread/error", 2, "one")
DEPTH = Measure("depth", f"spread/error of {DEEP} slices' mean", 2, "one")
CUBES = Measure("cubes", f"spread/error of means over cubes of {CUBE}", 2, "one")
NEXT = Measure("next_draws", "correlation with the next slice, draws", 2)
NEXT_ERROR = Measure("next_errors", "errors", 2)
SECONDS = Measure("seconds", "seconds a draw", 1, "less")
MEASURES = (PSNR, COVERAGE, EDGES, SPREAD, DEPTH, CUBES, NEXT, NEXT_ERROR, SECONDS)


@dataclass(frozen=True)
class ShapeSettings:
    """Sides, noise, and how many draws by how many levels."""

    side: int = 48
    coils: int = 8
    noise: float = 0.02
    phantoms: int = 20
    depth: int = 24
    volumes: int = 2
    fitted: int = 6
    stack_noise: float = 0.05
    draws: int = 4
    steps: int = 12


FULL = ShapeSettings()
QUICK = ShapeSettings(side=16, coils=3, phantoms=2, depth=16, volumes=1, fitted=2, draws=2, steps=3)


def run(context: Context) -> Outcome:
    """Every row on the phantom, real and complex, and on the stack."""
    settings = context.sized(FULL, QUICK)
    work = _Work(settings, load(context.model or "photo", device=context.device))
    cells = {(row, column): None for column in (REAL, COMPLEX) for row in work.images}
    depends = {"model": work.photo, "settings": settings}
    space = Grid("k-space", cells, work.of_phantom, depends, "data").run(context)
    stacks = {(row, STACK): None for row in (SLICES, THREE_WAYS)}
    stack = Grid(STACK, stacks, work.of_stack, depends, "data").run(context)
    figures = []
    if not space.left:
        parts = {key: part.tensors for key, part in space.parts.items()}
        caption = "The phantom, restored: mean, a draw and the standard deviation of the draws."
        figures.append(Figure("kspace", caption, _phantoms(parts, work)))
    if not stack.left:
        caption = "The middle slice (above) and a cut through all slices (below)."
        figures.append(
            Figure("stack", caption, _stacks({k[0]: p.tensors for k, p in stack.parts.items()}))
        )
    tables = [
        space.table(f"k-space, {column}", MEASURES, columns={column: ""})
        for column in (REAL, COMPLEX)
    ]
    tables.append(stack.table("A stack with dead pixels", MEASURES, columns={STACK: ""}))
    named = asdict(settings) | {"model": work.photo.source}
    records = {"settings": named, "kspace": space.records(), "stack": stack.records()}
    text = [f"{settings.draws} draws along {settings.steps} levels by {work.photo.source}."]
    section = Section("Volumes and complex images", text, tables, figures)
    return Outcome(records, [section], left=[*space.open(), *stack.open()])


@dataclass(frozen=True, eq=False)
class _Work:
    """The settings, the model of photographs, and what cells measure."""

    settings: ShapeSettings
    photo: Model
    images = (ZERO, WHITE, SPECTRAL, LOW_RANK, OWN)

    def levels(self, model: Any) -> Levels:
        return edm(self.settings.steps, LARGEST, model.levels[-1].sigma)

    # --- k-space

    @cached_property
    def phase(self) -> Tensor:
        """Of a complex image, smooth, (side, side)."""
        down, across = _grid(self.settings.side, 2)
        return 1.2 * (1.5 * across + 0.5).sin() + 0.8 * down

    def truth(self, column: str, magnitudes: Tensor) -> Tensor:
        """Images (B, 1 or 2, side, side) with these magnitudes (B, 1, side, side)."""
        if column == REAL:
            return magnitudes
        return torch.cat([magnitudes * self.phase.cos(), magnitudes * self.phase.sin()], 1)

    def coils(self, column: str) -> Coils:
        """Coils around the image, their sum of squares one; a quarter of the lines."""
        side, count = self.settings.side, self.settings.coils
        down, across = _grid(side, 2)
        angles = torch.arange(count)[:, None, None] * 2 * math.pi / count
        x, y = across - 1.2 * angles.cos(), down - 1.2 * angles.sin()
        turn = angles + x * angles.cos() + (self.phase if column == REAL else 0)
        maps = torch.polar((-(x * x + y * y) / 1.2).exp(), turn)
        maps = maps / maps.abs().square().sum(0).sqrt()
        keep = torch.zeros(side, dtype=torch.bool)
        middle = max(2, side // 16)
        keep[:middle], keep[-middle:] = True, True
        others = (~keep).nonzero()[:, 0]
        order = torch.randperm(len(others), generator=seeded(0, "lines"))
        keep[others[order[: max(1, side // 4 - 2 * middle)]]] = True
        return Coils(maps, keep, real=column == REAL)

    def of_phantom(self, cell: Cell) -> Part:
        truth = self.truth(cell.column, shepp_logan(self.settings.side))
        coils, noise = self.coils(cell.column), self.settings.noise
        y = coils(truth)
        y = coils.known(y + noise * randn_like(y, seeded(cell.seed, "k-space")))
        if cell.row == ZERO:
            return Part({PSNR.key: _psnr(coils.adjoint(y), truth)}, {"draws": coils.adjoint(y)})
        if cell.row == WHITE:
            prior = Diagonal(torch.full_like(truth, PRIOR_STD**2))
            q = Gaussian(torch.zeros_like(truth), prior).given(y, coils, noise)
            draws = q.sample(self.settings.draws, generator=seeded(cell.seed, "white"))
            exact = {PSNR.key: _psnr(q.mean, truth), EDGES.key: self.at_edges(draws, truth)}
            return Part(_scores(draws, truth) | exact, {"draws": draws, "mean": q.mean})
        moments = self.moments(cell.column, cell.row, cell.seed)
        restored = mmdgs.restore(
            moments, y, coils, noise=noise, draws=self.settings.draws,
            levels=self.levels(moments.denoiser), seed=cell.seed,
        )  # fmt: skip
        values = _scores(restored.draws, truth) | _costs(restored)
        values[EDGES.key] = self.at_edges(restored.draws, truth)
        return Part(values, {"draws": restored.draws})

    def at_edges(self, draws: Tensor, truth: Tensor) -> float:
        """The coverage of pixels of the phantom within one of its edges."""
        x = shepp_logan(self.settings.side)
        near = (max_pool2d(x, 3, 1, 1) + max_pool2d(-x, 3, 1, 1) > 0.05).expand_as(truth)
        return coverage_of(draws[:, near], truth[near])

    def moments(self, column: str, row: str, seed: int) -> Moments:
        side = self.settings.side
        model = (grey_model if column == REAL else complex_model)(self.photo).sized(side, side)
        if row == SPECTRAL:
            return model.posterior("spectral")
        if row == LOW_RANK:
            return model.posterior(LowRank(1, symmetric=True))
        x = self.truth(column, ellipsoids(self.settings.phantoms, side, 2, seed))
        return LowRankMoments(model, _fitted(model, x, seed), 1, symmetric=True)

    # --- the stack

    def of_stack(self, cell: Cell) -> Part:
        settings, n = self.settings, self.settings.depth
        truth = ellipsoids(settings.volumes, n, 3, cell.seed)
        others = ellipsoids(settings.fitted, n, 3, cell.seed + 1_000)
        keep = Mask.random((n, n), 0.5, generator=seeded(cell.seed, "dead")).keep.tensor
        noisy = truth + settings.stack_noise * randn_like(truth, seeded(cell.seed, "stack"))
        grey = grey_model(self.photo)
        if cell.row == SLICES:
            model, x, y = grey.sized(n, n), _slices(others), _slices(noisy)
        else:
            model, x, y = volume_model(grey).sized(n, n, n), others, noisy
        mask = Mask(keep, model.shape)
        restored = mmdgs.restore(
            _fitted(model, x, cell.seed), mask.known(y), mask, noise=settings.stack_noise,
            draws=settings.draws, levels=self.levels(model), seed=cell.seed,
        )  # fmt: skip
        draws = restored.draws.reshape(settings.draws, *truth.shape)
        values = _scores(draws, truth) | _costs(restored)
        if cell.row == SLICES:
            values["seconds"] *= n
        for measure, sides in ((DEPTH, (DEEP, 1, 1)), (CUBES, (CUBE,) * 3)):
            values[measure.key] = calibration_ratio(_pooled(draws, sides), _pooled(truth, sides))
        mean = draws.mean(0)
        values |= {NEXT.key: _next(draws - mean), NEXT_ERROR.key: _next(truth - mean)}
        return Part(values, {"draws": draws, "truth": truth, "seen": noisy * keep})


def _grid(side: int, ndim: int) -> Tensor:
    """Coordinates in [-1, 1], (ndim, *sides)."""
    return torch.stack(torch.meshgrid(*[torch.linspace(-1, 1, side)] * ndim, indexing="ij"))


def shepp_logan(side: int) -> Tensor:
    """The phantom, (1, 1, side, side)."""
    down, across = _grid(side, 2)
    x = torch.zeros(side, side)
    for value, right, up, wide, high, degrees in SHEPP_LOGAN:
        cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
        u, v = across - right, -down - up
        x += value * (((cos * u + sin * v) / wide) ** 2 + ((cos * v - sin * u) / high) ** 2 <= 1)
    return x[None, None]


def ellipsoids(count: int, side: int, ndim: int, seed: int) -> Tensor:
    """Bodies with ten ellipsoids in each, at random: (count, 1, *sides) in [0, 1]."""
    generator, grid = seeded(seed, "ellipsoids"), _grid(side, ndim)

    def uniform(low: float, high: float, size: int = 1) -> Tensor:
        return low + (high - low) * torch.rand(size, generator=generator)

    def inside(centre: Tensor, axes: Tensor) -> Tensor:
        turn = torch.linalg.qr(torch.randn(ndim, ndim, generator=generator))[0]
        places = (grid - centre.reshape(-1, *[1] * ndim)).flatten(1)
        return ((turn @ places / axes[:, None]).square().sum(0) <= 1).reshape(grid.shape[1:])

    images = []
    for _ in range(count):
        x = uniform(0.3, 0.6) * inside(uniform(-0.1, 0.1, ndim), uniform(0.6, 0.95, ndim))
        for _ in range(10):
            x = x + uniform(-0.35, 0.35) * inside(uniform(-0.6, 0.6, ndim), uniform(0.1, 0.4, ndim))
        images.append(x.clamp(0, 1))
    return torch.stack(images)[:, None]


def _fitted(model: Model, x: Tensor, seed: int) -> SpectralMoments:
    levels = geometric(KNOTS, LARGEST, model.levels[-1].sigma)
    return SpectralMoments.fit(model, x, levels, generator=seeded(seed, "fit"))


def _slices(volumes: Tensor) -> Tensor:
    """Volumes (B, 1, D, H, W) as images (B D, 1, H, W)."""
    return volumes.movedim(2, 1).flatten(0, 1)


def _pooled(volumes: Tensor, sides: Sequence[int]) -> Tensor:
    """Means over boxes with these sides, whole ones alone."""
    for dim, side in zip((-3, -2, -1), sides, strict=True):
        whole = volumes.narrow(dim, 0, volumes.shape[dim] // side * side)
        volumes = whole.unflatten(dim, (-1, side)).mean(dim)
    return volumes


def _next(deviations: Tensor) -> float:
    """The correlation of neighbouring slices, of numbers of mean zero (..., D, H, W)."""
    here, there = deviations[..., :-1, :, :].double(), deviations[..., 1:, :, :].double()
    return ((here * there).sum() / (here.square().sum() * there.square().sum()).sqrt()).item()


def _psnr(mean: Tensor, truth: Tensor) -> float:
    """Of the squared distance in the complex plane, where there are two parts."""
    return -10 * (mean - truth).double().square().sum(1).mean().log10().item()


def _scores(draws: Tensor, truth: Tensor) -> dict[str, Any]:
    scores = {PSNR.key: _psnr(draws.mean(0), truth), COVERAGE.key: coverage_of(draws, truth)}
    return scores | {SPREAD.key: calibration_ratio(draws, truth)}


def _costs(restored: mmdgs.restoration.Restored) -> dict[str, float]:
    count = restored.draws.shape[0] * restored.draws.shape[1]
    costs = {"seconds": restored.seconds / count, "evaluations": restored.cost.evaluations}
    means = {name: value.mean().item() for name, value in restored.info.items()}
    return costs | {name: means[name] for name in ("cg_iterations", "cg_residual") if name in means}


def _phantoms(parts: dict[tuple[str, str], dict[str, Tensor]], work: _Work) -> Canvas:
    """A row of pictures for each kind of image: magnitudes."""
    columns = ("truth", ZERO, WHITE, f"{LOW_RANK}:\nmean", "a draw", "standard deviation")
    canvas, axes = new_figure(2, len(columns), inches=(9.6, 3.6))
    for line, column in zip(axes, (REAL, COMPLEX), strict=True):
        draws = parts[LOW_RANK, column]["draws"]
        truth = work.truth(column, shepp_logan(work.settings.side))
        std = draws.var(0).sum(1).sqrt()[0]
        pictures = [
            truth, parts[ZERO, column]["draws"], parts[WHITE, column]["mean"],
            draws.mean(0), draws[0],
        ]  # fmt: skip
        shown = [(image.square().sum(1).sqrt()[0], "gray", 1.0) for image in pictures]
        for axis, title, (image, colours, top) in zip(
            line, columns, [*shown, (std, "inferno", 0.2)], strict=True
        ):
            axis.imshow(image.numpy(), cmap=colours, vmin=0, vmax=top, interpolation="nearest")
            bare(axis, title if column == REAL else "", 8)
        line[0].set_ylabel(column, fontsize=8)
    return canvas


def _stacks(parts: dict[str, dict[str, Tensor]]) -> Canvas:
    """The first volume: the middle slice, and the middle cut through the slices."""
    one, other = parts[SLICES]["draws"][:, 0, 0], parts[THREE_WAYS]["draws"][:, 0, 0]
    columns: Sequence[tuple[str, Tensor]] = (
        ("truth", parts[SLICES]["truth"][0, 0]), ("measured", parts[SLICES]["seen"][0, 0]),
        (f"{SLICES}:\na draw", one[0]), (f"{THREE_WAYS}:\na draw", other[0]),
        (f"{SLICES}:\nmean", one.mean(0)), (f"{THREE_WAYS}:\nmean", other.mean(0)),
    )  # fmt: skip
    canvas, axes = new_figure(2, len(columns), inches=(9.6, 3.6))
    for (title, volume), above, below in zip(columns, *axes, strict=True):
        middle = volume.shape[0] // 2
        for axis, image in ((above, volume[middle]), (below, volume[:, middle])):
            axis.imshow(image.numpy(), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            bare(axis, title if axis is above else "", 8)
    return canvas

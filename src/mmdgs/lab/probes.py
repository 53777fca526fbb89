"""Probes compared: how near so many products with a Jacobian come to its diagonal, design by design.

On the MNIST energy that ships, at its noise level, and on a diffusion model at several. Images are the models' own
samples. A Jacobian is computed whole, which costs no more than its exact diagonal; then every design is tried on the
matrix by the library's own estimator, with many draws of the signs, and no network is asked again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.generation import Method, generate
from mmdgs.jacobians import linearised
from mmdgs.lab.drawing import ORANGE, new_panels
from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.few_steps import MODEL
from mmdgs.lab.grid import Cell, Grid, Measure, Results
from mmdgs.lab.report import Figure, Section
from mmdgs.lab.workspace import Part, axis
from mmdgs.models import Model, from_pretrained
from mmdgs.moments import DiagonalMoments
from mmdgs.moments.probes import Hadamard, Lattice, ProbeDesign, Rademacher
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.randomness import Streams, child_seed
from mmdgs.runtime import progress_bar
from mmdgs.tables import Table

DIGITS = "mnist"
YARDSTICK, COMPARED = "Rademacher (paper)", 10
"""The paper's design and its number of probes on MNIST, by which others are judged."""
DESIGNS: dict[str, ProbeDesign] = {
    YARDSTICK: Rademacher(),
    "Hadamard": Hadamard(),
    "lattice": Lattice(smooth=False),
    "lattice, filtered": Lattice(),
}
ERROR = Measure("error", "relative error", 3, "less")
ROWS_AT_ONCE = {"cpu": 8, "cuda": 256}
"""Rows of a Jacobian that go through the network together: each is a product at another copy of the image."""
PANELS_A_ROW = 3


@dataclass(frozen=True)
class ProbeSettings:
    """How many products, how often, on how many images, and at which sigma / alpha of a model of many levels."""

    counts: tuple[int, ...] = axis((1, 2, 3, 5, 10, 20, 50, 100))
    draws: int = 20  # of the signs
    digits: int = 3
    images: int = 1  # a level
    ratios: tuple[float, ...] = axis((0.1, 0.7, 3.0, 12.0))
    sampling_steps: int = 20
    window: int | None = None  # only the middle pixels of the Jacobian, so many a side


FULL = ProbeSettings()
QUICK = ProbeSettings(counts=(1, 2, 5, 10, 20), draws=10, digits=1, ratios=(0.7,), sampling_steps=5, window=8)


def run(context: Context) -> Outcome:
    """Measure every design on MNIST, and on a diffusion model where there is one."""
    settings = QUICK if context.quick else FULL
    model, note = _diffusion_model(context)
    models = {"MNIST energy": from_pretrained(DIGITS, device=context.device)}
    if model is not None:
        models["diffusion model"] = model
    found: dict[str, Results] = {}
    for name, one in models.items():
        for level in one.levels if len(one.levels) == 1 else [NoiseLevel(sigma=ratio) for ratio in settings.ratios]:
            place = Place(context, one, name, level, settings)
            cells = {(row, n): design for row, design in DESIGNS.items() for n in settings.counts}
            found[place.title] = Grid(place.title, cells, place.measure, (settings, one), "products").run(context)
    source = None if model is None else model.source
    records = [{"where": where, **one} for where, own in found.items() for one in own.records()]
    named = {"settings": asdict(settings) | {"model": source}, "probes": records}
    return Outcome(named, [_section(found, settings, note)])


def _diffusion_model(context: Context) -> tuple[Model | None, str]:
    """The model and a sentence about it; a run without one measures MNIST only."""
    if context.model is None and context.quick:
        return None, "MNIST only: the quick version takes a diffusion model where --model names one."
    try:
        model = from_pretrained(context.model or MODEL, device=context.device)
    except UsageError as error:
        if context.model is not None:
            raise
        return None, f"MNIST only: the diffusion model {MODEL} could not be had ({error}). Name another with --model."
    if len(model.levels) == 1:
        raise UsageError(f"--model must be a model of many noise levels, and {model.source} was trained at one")
    return model, f"The diffusion model is {model.source}."


@dataclass(eq=False)
class Place:
    """A model at a level: the Jacobians at some of its own samples, which are kept as parts."""

    context: Context
    model: Model
    name: str
    level: NoiseLevel
    settings: ProbeSettings

    @property
    def title(self) -> str:
        return f"{self.name}, sigma/alpha {self.level.sigma / self.level.alpha:g}"

    @property
    def count(self) -> int:
        """How many images."""
        return self.settings.digits if len(self.model.levels) == 1 else self.settings.images

    @cached_property
    def jacobians(self) -> Tensor:
        """One matrix for each image."""
        context, settings = self.context, self.settings
        depends = (self.model, self.level, self.count, context.seed, settings.sampling_steps, settings.window)
        part = context.workspace.part(f"{self.title}-jacobians", depends, self._jacobians)
        return part.tensors["jacobians"].to(context.device)

    def _jacobians(self) -> Part:
        """At noisy samples of the model itself, so that no data are needed."""
        model, seed = self.model, self.context.seed
        method = Method("gibbs" if len(model.levels) == 1 else "ddim", steps=self.settings.sampling_steps)
        made = generate(model, method, self.count, seed=child_seed(seed, "images"), progress=f"samples of {self.name}")
        assert made.x is not None
        x = model.scaled(made.x).to(self.context.device)
        x_t = add_noise(x, self.level, generator=Streams(seed, len(x), purpose="noise"))
        found = [jacobian(model, one[None], self.level, self.settings.window, self.title) for one in x_t]
        return Part({}, {"jacobians": torch.stack(found)})

    def measure(self, cell: Cell) -> Part:
        """The error of a design with so many products for each image, and that of the mean in place of every entry."""
        channels, *sides = self.model.shape
        shape = (channels, *(min(side, self.settings.window or side) for side in sides))
        draws = (self.settings.draws, cell.seed)
        found = [error_of(matrix, shape, cell.what, cell.column, *draws) for matrix in self.jacobians]
        diagonals = self.jacobians.diagonal(dim1=1, dim2=2)
        flat = (diagonals - diagonals.mean(1, keepdim=True)).norm(dim=1) / diagonals.norm(dim=1)
        return Part({"error": found, "flat": flat.tolist()})


def jacobian(model: Model, x_t: Tensor, level: NoiseLevel, window: int | None, label: str) -> Tensor:
    """dD/dx_t at one image (1, C, H, W) as a matrix, or only how its middle window depends on itself."""
    numbers = torch.arange(x_t[0].numel(), device=x_t.device).reshape(x_t.shape[1:])
    for dimension in (1, 2):
        side = numbers.shape[dimension]
        kept = min(side, window or side)
        numbers = numbers.narrow(dimension, (side - kept) // 2, kept)
    places = numbers.flatten()
    size = min(len(places), ROWS_AT_ONCE.get(x_t.device.type, ROWS_AT_ONCE["cuda"]))
    at = linearised(model, x_t.expand(size, -1, -1, -1), level)
    found = []
    with progress_bar(len(places), label, "product") as bar:
        for own in places.split(size):
            v = x_t.new_zeros(size, x_t[0].numel())
            v[torch.arange(len(own), device=own.device), own] = 1
            found.append(at.pull(v.reshape(1, size, *x_t.shape[1:]))[0].flatten(1)[: len(own), places])
            bar.update(len(own))
    return torch.cat(found)


def error_of(matrix: Tensor, shape: tuple[int, ...], design: ProbeDesign, count: int, draws: int, seed: int) -> float:
    """|estimate - diagonal| / |diagonal| of a design with so many products, the mean over draws of the signs."""

    def denoiser(x: Tensor, level: NoiseLevel) -> Tensor:
        return (x.flatten(1) @ matrix.mT).reshape(x.shape)  # its Jacobian is the matrix

    moments = DiagonalMoments(denoiser, probes=count, floor=-math.inf, design=design)
    streams = Streams(seed, draws, purpose="signs")
    q = moments(matrix.new_zeros(draws, *shape), NoiseLevel(sigma=1.0), generator=streams)
    off = q.cov.diagonal().flatten(1) - matrix.diagonal()
    return (off.norm(dim=1) / matrix.diagonal().norm()).mean().item()


def needed(counts: Sequence[int], found: Sequence[float], target: float) -> float:
    """The number of products at which a curve of errors falls to the target, between counts along a power law.

    The first count where it starts below; infinite where it stays above.
    """
    if found[0] <= target:
        return float(counts[0])
    for i in range(1, len(counts)):
        if found[i] <= target:
            share = math.log(found[i - 1] / target) / math.log(found[i - 1] / found[i])
            return counts[i - 1] * (counts[i] / counts[i - 1]) ** share
    return math.inf


# --- the report -----------------------------------------------------------------------------------------------------


def _section(found: dict[str, Results], settings: ProbeSettings, note: str) -> Section:
    text = [
        "Relative error of the diagonal of a denoiser's Jacobian, |estimate - exact| / |exact|, by the number of "
        "products with the Jacobian. Rademacher probes are the paper's.",
        note,
    ]
    if settings.window is not None:
        side = settings.window
        text.append(f"This is the quick version: only the {side} x {side} pixels in the middle are looked at.")
    columns = {n: f"{n}" for n in settings.counts}
    tables = [_needed_table(found, settings.counts)]
    tables += [
        own.table(f"Relative error by number of products: {where}", [ERROR], head="design", columns=columns)
        for where, own in found.items()
    ]
    caption = (
        f"Error against products ({settings.draws} draws of the signs for each of {settings.digits} digits, and "
        f"{settings.images} image a level of the diffusion model). Dotted: the exact mean in place of every entry."
    )
    return Section("How near so many products come", text, tables, [Figure("probes", caption, _draw(found))])


def _needed_table(found: dict[str, Results], counts: Sequence[int]) -> Table:
    rows = []
    for row in DESIGNS:
        cells = []
        for own in found.values():
            target = own.number(YARDSTICK, COMPARED, ERROR).value
            value = needed(counts, [own.number(row, n, ERROR).value for n in counts], target)
            # A product is taken whole or not at all; the yardstick's own number may come out as 10.0000001.
            cells.append(f"> {counts[-1]}" if math.isinf(value) else f"{math.ceil(round(value, 6))}")
        rows.append([row, *cells])
    note = "Between the counts that were measured errors are taken to follow a power law."
    return Table(f"Products needed for the error of {COMPARED} Rademacher probes", ["design", *found], rows, note)


def _draw(found: dict[str, Results]) -> Canvas:
    canvas, places = new_panels(len(found) + 1, PANELS_A_ROW, 3.2)  # one more, for the legend
    for panel, (where, own) in zip(places, found.items(), strict=False):
        own.draw(panel, ERROR)
        flat = own.number(YARDSTICK, COMPARED, "flat").value
        panel.axhline(flat, color=ORANGE, linestyle=":", linewidth=1.2, label="one variance, the right one")
        panel.set_title(where, fontsize=9)
    places[len(found)].set_axis_off()
    places[len(found)].legend(*places[0].get_legend_handles_labels(), fontsize=8, frameon=False, loc="center left")
    return canvas

"""Probes compared: how near so many products with a Jacobian come to its diagonal.

    designs      every design on the MNIST energy that ships and on a diffusion model, at samples of
                 their own: a Jacobian is computed whole, which costs no more than its exact
                 diagonal; designs are then tried on the matrix by the library's own estimator
    maps         the paper's figure of variances by 1, 10 and 100 probes, on CIFAR-10 at one level

The maps need the data, and quick runs leave them out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from experiments.drawing import colour_bar, colour_picture
from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure, Results, axis
from experiments.hadamard import Hadamard
from mmdgs.data import dequantised, load_images, spread, to_uint8
from mmdgs.errors import UsageError
from mmdgs.jacobians import linearised
from mmdgs.models import Model, load
from mmdgs.moments import DiagonalMoments
from mmdgs.moments.probes import Lattice, ProbeDesign, Rademacher
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.randomness import Streams, child_seed
from mmdgs.report.drawing import ORANGE, new_figure, new_panels
from mmdgs.report.page import Claim, Figure, Outcome, Section
from mmdgs.runtime import progress_bar
from mmdgs.sampling import SamplerSettings, generate
from mmdgs.tables import Table
from mmdgs.workspace import Part

DIGITS, MODEL, ONE_LEVEL = "mnist", "cifar10", "cifar10-score"
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
"""Rows of a Jacobian that go through the network together, at copies of the image."""
ONE = "one variance for all"


@dataclass(frozen=True)
class ProbeSettings:
    """How many products, how often, on how many images, and at which sigma / alpha."""

    counts: tuple[int, ...] = axis((1, 2, 3, 5, 10, 20, 50, 100))
    draws: int = 20  # of the signs
    digits: int = 3
    images: int = 1  # a level
    ratios: tuple[float, ...] = axis((0.1, 0.7, 3.0, 12.0))
    sampling_steps: int = 20
    map_images: int = 8
    map_probes: tuple[int, ...] = (1, 10, 100)
    lattice_probes: tuple[int, ...] = (3, 10)


FULL = ProbeSettings()
QUICK = ProbeSettings(counts=(1, 2, 5, 10, 20), draws=10, digits=1, ratios=(0.7,), sampling_steps=5)


def run(context: Context) -> Outcome:
    """Every design on MNIST and a diffusion model, and the paper's figure."""
    settings = context.sized(FULL, QUICK)
    digits = load(DIGITS, device=context.device)
    models, results = {"MNIST energy": digits}, {}
    if context.model is not None or not context.quick:
        model = load(context.model or MODEL, device=context.device)
        if len(model.levels) == 1:
            raise UsageError(f"--model must be one of many noise levels, unlike {model.source}")
        models["diffusion model"] = model
    cells = {(row, n): design for row, design in DESIGNS.items() for n in settings.counts}
    for name, model in models.items():
        ratios = [NoiseLevel(sigma=ratio) for ratio in settings.ratios]
        for level in model.levels if len(model.levels) == 1 else ratios:
            place = Place(context, model, name, level, settings)
            grid = Grid(place.title, cells, place.measure, (settings, model), "products")
            results[place.title] = grid.run(context)
    records: dict[str, Any] = {"settings": asdict(settings)}
    records["settings"]["model"] = models["diffusion model"].source if len(models) > 1 else None
    records["probes"] = [
        {"where": where, **cell} for where, own in results.items() for cell in own.records()
    ]
    sections = [_section(results, settings)]
    if not context.quick:
        maps = variance_maps(context, load(ONE_LEVEL, device=context.device), settings)
        records["maps"] = maps.values
        sections.append(_map_section(maps))
    return Outcome(records, sections)


# --- designs on whole Jacobians


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

    @cached_property
    def jacobians(self) -> Tensor:
        """One matrix for each image."""
        context, settings, one_level = self.context, self.settings, len(self.model.levels) == 1
        count = settings.digits if one_level else settings.images
        steps = settings.sampling_steps

        def compute() -> Part:
            """At noisy samples of the model itself, so that no data are needed."""
            method = SamplerSettings("gibbs" if one_level else "ddim", steps=steps)
            seed, label = child_seed(context.seed, "images"), f"samples of {self.name}"
            samples = generate(self.model, method, count, seed=seed, progress=label).x
            assert samples is not None
            x = self.model.scaled(samples).to(context.device)
            streams = Streams(context.seed, len(x), purpose="noise")
            x_t = add_noise(x, self.level, generator=streams)
            own = [jacobian(self.model, row[None], self.level, self.title) for row in x_t]
            return Part({}, {"jacobians": torch.stack(own)})

        depends = (self.model, self.level, count, context.seed, steps)
        part = context.workspace.part(f"{self.title}-jacobians", depends, compute)
        return part.tensors["jacobians"].to(context.device)

    def measure(self, cell: Cell) -> Part:
        """The error of a design on each image, and that of the mean in place of every entry."""
        tried = (self.model.shape, cell.what, cell.column, self.settings.draws, cell.seed)
        errors = [error_of(matrix, *tried) for matrix in self.jacobians]
        diagonals = self.jacobians.diagonal(dim1=1, dim2=2)
        flat = (diagonals - diagonals.mean(1, keepdim=True)).norm(dim=1) / diagonals.norm(dim=1)
        return Part({"error": errors, "flat": flat.tolist()})


def jacobian(model: Model, x_t: Tensor, level: NoiseLevel, label: str) -> Tensor:
    """dD/dx_t at one image (1, C, H, W) as a matrix."""
    places = torch.arange(x_t.numel(), device=x_t.device)
    size = min(len(places), ROWS_AT_ONCE.get(x_t.device.type, ROWS_AT_ONCE["cuda"]))
    at = linearised(model, x_t.expand(size, -1, -1, -1), level)
    rows = []
    with progress_bar(len(places), label, "product") as bar:
        for own in places.split(size):
            v = x_t.new_zeros(size, len(places))
            v[torch.arange(len(own), device=own.device), own] = 1
            products = at.pull(v.reshape(1, size, *x_t.shape[1:]))[0].flatten(1)
            rows.append(products[: len(own)])
            bar.update(len(own))
    return torch.cat(rows)


def error_of(
    matrix: Tensor, shape: tuple[int, ...], design: ProbeDesign, count: int, draws: int, seed: int
) -> float:
    """|estimate - diagonal| / |diagonal| of a design, the mean over draws of the signs."""

    def denoiser(x: Tensor, level: NoiseLevel) -> Tensor:
        return (x.flatten(1) @ matrix.mT).reshape(x.shape)  # its Jacobian is the matrix

    moments = DiagonalMoments(denoiser, probes=count, floor=-math.inf, design=design)
    streams = Streams(seed, draws, purpose="signs")
    q = moments(matrix.new_zeros(draws, *shape), NoiseLevel(sigma=1.0), generator=streams)
    off = q.cov.diagonal().flatten(1) - matrix.diagonal()
    return (off.norm(dim=1) / matrix.diagonal().norm()).mean().item()


def needed(counts: Sequence[int], errors: Sequence[float], target: float) -> float:
    """The products at which a curve of errors falls to the target, by a power law between counts.

    The first count where it starts below; infinite where it stays above.
    """
    if errors[0] <= target:
        return float(counts[0])
    for i in range(1, len(counts)):
        if errors[i] <= target:
            share = math.log(errors[i - 1] / target) / math.log(errors[i - 1] / errors[i])
            return counts[i - 1] * (counts[i] / counts[i - 1]) ** share
    return math.inf


def _section(results: dict[str, Results], settings: ProbeSettings) -> Section:
    text = [
        "Relative error of the diagonal of a denoiser's Jacobian, |estimate - exact| / |exact|, by "
        "the number of products with the Jacobian. Rademacher probes are the paper's."
    ]
    counts, rows = settings.counts, []
    for row in DESIGNS:
        cells = []
        for own in results.values():
            target = own.number(YARDSTICK, COMPARED, ERROR).value
            value = needed(counts, [own.number(row, n, ERROR).value for n in counts], target)
            # A product is taken whole; the yardstick's own number may come out as 10.0000001.
            whole = "" if math.isinf(value) else f"{math.ceil(round(value, 6))}"
            cells.append(whole or f"> {counts[-1]}")
        rows.append([row, *cells])
    title = f"Products needed for the error of {COMPARED} Rademacher probes"
    note = "Between the counts that were measured errors are taken to follow a power law."
    tables, columns = [Table(title, ["design", *results], rows, note)], {n: f"{n}" for n in counts}
    for where, own in results.items():
        title = f"Relative error by number of products: {where}"
        tables.append(own.table(title, [ERROR], head="design", columns=columns))
    caption = (
        f"Error against products ({settings.draws} draws of the signs for each of "
        f"{settings.digits} digits, and {settings.images} image a level of the diffusion model). "
        "Dotted: the exact mean in place of every entry."
    )
    figures = [Figure("probes", caption, _draw(results))]
    return Section("How near so many products come", text, tables, figures)


def _draw(results: dict[str, Results]) -> Canvas:
    canvas, panels = new_panels(len(results) + 1, 3, 3.2)  # one more, for the legend
    for panel, (where, own) in zip(panels, results.items(), strict=False):
        own.draw(panel, ERROR)
        flat, label = own.number(YARDSTICK, COMPARED, "flat").value, "one variance, the right one"
        panel.axhline(flat, linestyle=":", label=label, color=ORANGE, linewidth=1.2)
        panel.set_title(where, fontsize=9)
    last, shown = panels[len(results)], panels[0].get_legend_handles_labels()
    last.set_axis_off()
    last.legend(*shown, fontsize=8, frameon=False, loc="center left")
    return canvas


# --- the paper's figure of variances


def variance_maps(context: Context, model: Model, settings: ProbeSettings) -> Part:
    """Variances at noisy test images by each design, and their relative errors."""
    designs: dict[str, tuple[ProbeDesign | None, int | None]] = {
        "exact": (None, None),
        **{f"Rademacher, {n}": (Rademacher(), n) for n in settings.map_probes},
        **{f"lattice, {n}": (Lattice(), n) for n in settings.lattice_probes},
    }

    def compute() -> Part:
        size, level = model.shape[1], model.levels[0]
        stored = load_images("cifar10", "test", data_dir=context.data_dir, size=size).images
        images = stored[spread(len(stored), settings.map_images)]

        def streams(purpose: str) -> Streams:
            return Streams(context.seed, len(images), purpose=purpose)

        clean = model.scaled(dequantised(images, streams("images"))).to(context.device)
        x_t = add_noise(clean, level, generator=streams("noise"))
        low, high = model.interval
        noisy = to_uint8(((x_t.float() - low) / (high - low)).clamp(0, 1)).cpu()
        tensors = {"x": images, "x_t": noisy}
        for name, (design, probes) in designs.items():
            moments = DiagonalMoments(model, probes=probes, floor=-torch.inf, design=design)
            with torch.no_grad():
                q = moments(x_t, level, generator=streams("probes"))
            tensors[name] = q.cov.diagonal().cpu()
        exact = tensors["exact"].double()
        estimates = {name: tensors[name] for name in designs if name != "exact"}
        estimates[ONE] = exact.mean()
        errors = {n: ((e - exact).norm() / exact.norm()).item() for n, e in estimates.items()}
        return Part({"errors": errors, "negative": (exact < 0).double().mean().item()}, tensors)

    depends = (model, context.seed, settings.map_images, list(designs))
    return context.workspace.part("maps", depends, compute)


def _map_section(maps: Part) -> Section:
    errors = maps.values["errors"]
    text = (
        "The paper's figure of posterior variances with 1, 10 and 100 Rademacher probes. "
        f"{100 * maps.values['negative']:.1f}% of the exact variances are negative, which is an "
        "error of the network."
    )
    rows = [[name, f"{value:.3f}"] for name, value in errors.items()]
    note = f"|estimate - exact| / |exact| over {len(maps.tensors['x'])} images."
    table = Table("Error of the diagonal", ["probes", "relative error"], rows, note)
    signs = [value for name, value in errors.items() if name.startswith("Rademacher")]
    falls, numbers = all(a > b for a, b in pairwise(signs)), ", ".join(f"{e:.2f}" for e in signs)
    claim = Claim("the error falls with the number of Rademacher probes", falls, numbers)
    caption = (
        "Test images, noisy, and standard deviations of p(x | noisy x), mean over the colours, in "
        "one scale."
    )
    names = [*(name for name in errors if name != ONE), "exact"]
    figures = [Figure("cifar10_maps", caption, _draw_maps(maps.tensors, names))]
    return Section("Covariances by probes", [text], [table], figures, [claim])


def _draw_maps(images: Mapping[str, Tensor], names: Sequence[str]) -> Canvas:
    """A row for each image, a column for each estimate, in the scale of the exact ones."""
    deviations = {name: images[name].mean(1, keepdim=True).clamp(min=0).sqrt() for name in names}
    most = torch.quantile(deviations["exact"], 0.999).item()
    scale = ScalarMappable(Normalize(0.0, most), "magma")
    count, _, height, width = images["x"].shape
    inches = (1.15 * (2 + len(names)) + 0.8, 1.05 * count * height / width + 0.3)
    canvas, (panels,) = new_figure(1, 2 + len(names), inches=inches)
    colour_picture(panels[0], images["x"], 1, "data x")
    colour_picture(panels[1], images["x_t"], 1, "noisy $x_t$")
    for panel, name in zip(panels[2:], names, strict=True):
        coloured = scale.cmap(scale.norm(deviations[name][:, 0].numpy()), bytes=True)
        colour_picture(panel, torch.from_numpy(coloured)[..., :3].movedim(-1, 1), 1, name)
    colour_bar(canvas, scale, panels, "standard deviation")
    return canvas

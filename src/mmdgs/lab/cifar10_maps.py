"""Variances of the posterior by probes, as in the paper's figure with 1, 10 and 100 of them, against the exact ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure as Canvas
from torch import Tensor

from mmdgs.data import dequantised, spread
from mmdgs.lab.drawing import colour_bar, colour_picture, new_figure
from mmdgs.lab.report import Claim, Figure, Section
from mmdgs.lab.sampler_cells import QUICK_NOTE
from mmdgs.lab.single_level_chains import Chains
from mmdgs.lab.workspace import Part
from mmdgs.moments import DiagonalMoments
from mmdgs.moments.probes import Lattice, ProbeDesign, Rademacher
from mmdgs.noise import add_noise
from mmdgs.randomness import Streams
from mmdgs.tables import Table

if TYPE_CHECKING:
    from mmdgs.lab.cifar10 import Cifar10Settings

ONE = "one variance for all"


def maps(chains: Chains, settings: Cifar10Settings) -> Part:
    """Variances at some noisy test images by each design, and their relative errors. Negative ones are kept."""
    context, model = chains.context, chains.model
    designs: dict[str, tuple[ProbeDesign | None, int | None]] = {
        "exact": (None, None),
        **{f"Rademacher, {n}": (Rademacher(), n) for n in settings.map_probes},
        **{f"lattice, {n}": (Lattice(), n) for n in settings.lattice_probes},
    }

    def compute() -> Part:
        stored, level = chains.references.load("test").images, model.levels[0]
        images = stored[spread(len(stored), settings.map_images)]

        def streams(purpose: str) -> Streams:
            return Streams(context.seed, len(images), purpose=purpose)

        clean = model.scaled(dequantised(images, streams("images"))).to(context.device)
        x_t = add_noise(clean, level, generator=streams("noise"))
        found = {"x": images, "x_t": chains.stored(x_t)}
        for name, (design, probes) in designs.items():
            moments = DiagonalMoments(model, probes=probes, floor=-torch.inf, design=design)
            with torch.no_grad():
                found[name] = moments(x_t, level, generator=streams("probes")).cov.diagonal().cpu()
        exact = found["exact"].double()
        estimates = {name: found[name] for name in designs if name != "exact"} | {ONE: exact.mean()}
        errors = {name: ((one - exact).norm() / exact.norm()).item() for name, one in estimates.items()}
        return Part({"errors": errors, "negative": (exact < 0).double().mean().item()}, found)

    return context.workspace.part("maps", (model, context.seed, settings.map_images, list(designs)), compute)


def map_section(found: Part, quick: bool) -> Section:
    """The errors of each design, and the variances as pictures."""
    errors = found.values["errors"]
    text = [
        "The paper's figure of posterior variances with 1, 10 and 100 Rademacher probes. "
        f"{100 * found.values['negative']:.1f}% of the exact variances are negative, which is an error of the network.",
        *([QUICK_NOTE] if quick else []),
    ]
    rows = [[name, f"{value:.3f}"] for name, value in errors.items()]
    note = f"|estimate - exact| / |exact| over {len(found.tensors['x'])} images."
    table = Table("Error of the diagonal", ["probes", "relative error"], rows, note)
    signs = {name: value for name, value in errors.items() if name.startswith("Rademacher")}
    falls = all(a > b for a, b in pairwise(signs.values()))
    numbers = ", ".join(f"{value:.2f} ({name.split(', ')[1]})" for name, value in signs.items())
    claim = Claim("the error falls with the number of Rademacher probes", falls, numbers)
    caption = "Test images, noisy, and standard deviations of p(x | noisy x), mean over the colours, in one scale."
    shown = [*(name for name in errors if name != ONE), "exact"]
    figure = Figure("cifar10_maps", caption, _draw(found.tensors, shown))
    return Section("Covariances by probes", text, [table], [figure], [] if quick else [claim])


def _draw(images: Mapping[str, Tensor], names: Sequence[str]) -> Canvas:
    """A row for each image, a column for each of the named estimates, in the scale of the exact ones."""
    deviations = {name: images[name].mean(1, keepdim=True).clamp(min=0).sqrt() for name in names}
    scale = ScalarMappable(Normalize(0.0, torch.quantile(deviations["exact"], 0.999).item()), "magma")
    count, (height, width) = len(images["x"]), images["x"].shape[2:]
    inches = (1.15 * (2 + len(names)) + 0.8, 1.05 * count * height / width + 0.3)
    canvas, axes = new_figure(1, 2 + len(names), inches=inches)
    for axis, name, title in zip(axes[0], ("x", "x_t"), ("data x", "noisy $x_t$"), strict=False):
        colour_picture(axis, images[name], 1, title)
    for axis, name in zip(axes[0][2:], names, strict=True):
        coloured = torch.from_numpy(scale.cmap(scale.norm(deviations[name][:, 0].numpy()), bytes=True))[..., :3]
        colour_picture(axis, coloured.movedim(-1, 1), 1, name)
    colour_bar(canvas, scale, axes[0], "standard deviation")
    return canvas

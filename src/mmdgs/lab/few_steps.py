"""Few-step sampling of a pretrained diffusion model: what the covariance is worth, in FID (Bao et al., 2022, table 1).

One network, one number of images, the same noise for every sampler; only the sampler differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from matplotlib.figure import Figure as Canvas
from torch import Tensor

from mmdgs.data.pictures import tiled
from mmdgs.generation import Method
from mmdgs.lab.drawing import COLOURS, GREEN, GREY, ORANGE, PINK, RED, new_figure, open_axes, plain_logs
from mmdgs.lab.experiment import Context, Experiment, Outcome
from mmdgs.lab.report import Figure, Section, Table
from mmdgs.lab.sampler_cells import Cells, Judge, References
from mmdgs.lab.workspace import Part
from mmdgs.models import from_pretrained, load_head

MODEL = "google/ddpm-cifar10-32"
DATA = "cifar10"
SHOWN = 5

LEARNED = "diagonal, learned"
"""The row that needs a head, and is left out where none is given."""
ROWS: dict[str, tuple[str, str, Method]] = {
    "small variance": (GREY, "o-", Method("ancestral", covariance="small")),
    "large variance": (GREY, "s--", Method("ancestral", covariance="large")),
    "isotropic": (ORANGE, "o-", Method("ancestral", covariance="isotropic")),
    "spectral": (PINK, "o-", Method("ancestral", covariance="spectral")),
    "diagonal, Rademacher": (COLOURS["diagonal"], "o-", Method("ancestral", covariance="rademacher", probes=3)),
    "diagonal, lattice": (COLOURS["diagonal"], "s--", Method("ancestral", covariance="lattice", probes=3)),
    LEARNED: (RED, "o-", Method("ancestral", covariance="ocm")),
    "Krylov": (COLOURS["full"], "o-", Method("ancestral", covariance="krylov", krylov_steps=5)),
    "DDIM": (GREEN, "o-", Method("ddim")),
    "Heun": (GREEN, "s--", Method("heun")),
}
"""Rows of the table: how each is drawn, and what it is."""


@dataclass(frozen=True)
class FewStepSettings:
    """How many steps and images, and which rows need so many evaluations that they are run at the fewest steps only."""

    steps: tuple[int, ...] = (10, 25, 50)
    images: int = 5_000
    fit_images: int = 2_000
    batch_size: int = 500  # chains at a time: fewer leave a GPU idle between kernels
    costly: tuple[str, ...] = ("Krylov",)
    precision: str = "bf16"
    measure: str = "fid"


FULL = FewStepSettings()
QUICK = FewStepSettings(steps=(4, 8), images=6, fit_images=8, precision="float32", measure="diversity")


def run(context: Context) -> Outcome:
    """Sample by every row and number of steps, and measure."""
    settings = QUICK if context.quick else FULL
    model = from_pretrained(context.model or MODEL, device=context.device)
    judge = Judge.of(context, [settings.measure], References(DATA, context.data_dir))
    cells = Cells(context, model, DATA, settings.fit_images, settings.batch_size, settings.precision, SHOWN)
    if context.head is not None:
        load_head(context.head, model)  # refused before the work
    wanted = [
        (row, steps)
        for row in ROWS
        if row != LEARNED or context.head is not None
        for steps in (settings.steps[:1] if row in settings.costly else settings.steps)
    ]
    found = {cell: _cell(cells, judge, *cell, settings) for cell in wanted}
    records = [{"row": row, "steps": steps, **part.values} for (row, steps), part in found.items()]
    pictures = {cell: part.tensors["shown"] for cell, part in found.items()}
    sections = [_section(records, settings, model.source), _picture_section(pictures, settings)]
    return Outcome({"settings": asdict(settings) | {"model": model.source}, "samplers": records}, sections)


def method_of(row: str, steps: int, head: str | None = None) -> Method:
    """A row's sampler with so many evaluations of the mean: Heun has two a step, and one in the last."""
    asked = replace(ROWS[row][2], steps=(steps + 1) // 2 if row == "Heun" else steps)
    return replace(asked, head=head) if row == LEARNED else asked


def _cell(cells: Cells, judge: Judge, row: str, steps: int, settings: FewStepSettings) -> Part:
    def judged(x: Tensor, label: str) -> dict[str, Any]:
        return {"value": judge(x, label)[settings.measure]}

    name, method = f"{row}-{steps}", method_of(row, steps, cells.context.head)
    return cells.sampled(name, method, settings.images, [cells.context.seed], judged, {"measure": settings.measure})


def _section(records: Sequence[dict[str, Any]], settings: FewStepSettings, source: str) -> Section:
    by = {(r["row"], r["steps"]): r for r in records}
    names = _names(by)
    what = "FID" if settings.measure == "fid" else "diversity, relative to data's"
    header = [
        "sampler",
        *(f"{what}, {n} steps" for n in settings.steps),
        *(f"evaluations, {n}" for n in settings.steps),
    ]
    rows = []
    for row in names:
        own = [by.get((row, n)) for n in settings.steps]
        rows.append(
            [
                row,
                *(f"{r['value']:.2f}" if r else "" for r in own),
                *(f"{r['evaluations']:g}" if r else "" for r in own),
            ]
        )
    best = frozenset() if settings.measure != "fid" else frozenset(_lowest(by, settings.steps))
    note = (
        f"{settings.images:,} images each of {source}, {settings.precision}, the same noise for every row. A product "
        "with the Jacobian counts as two evaluations; Heun has half the steps, so as many evaluations."
    )
    text = [
        "Ancestral sampling in few steps, with DDPM's two fixed variances, with the best isotropic variance or one "
        "variance for each frequency (estimated once), and with the covariance of the network's own Jacobian: its "
        "diagonal by 3 probes (the paper's, or on lattices) or by a head that has learned it, or whole by Krylov "
        "products. DDIM and Heun have no noise of their own.",
        *(_verdicts(by, settings) if settings.measure == "fid" else [
            "This is the quick version: so few images show that everything runs, and nothing about the samplers."
        ]),
    ]  # fmt: skip
    caption = f"{what[0].upper()}{what[1:]} against steps, and against evaluations of the network."
    figure = Figure("few_steps", caption, _draw(records, what))
    return Section(
        "What the covariance is worth", text, [Table("Few-step sampling", header, rows, note, best=best)], [figure]
    )


def _names(cells: Iterable[tuple[str, int]]) -> list[str]:
    """The rows that were made, in the table's order."""
    made = {row for row, _ in cells}
    return [row for row in ROWS if row in made]


def _lowest(by: Mapping[tuple[str, int], dict[str, Any]], steps: Sequence[int]) -> list[tuple[int, int]]:
    names = _names(by)
    return [
        (min((i for i, row in enumerate(names) if (row, n) in by), key=lambda i: by[names[i], n]["value"]), 1 + j)
        for j, n in enumerate(steps)
    ]


def _verdicts(by: Mapping[tuple[str, int], dict[str, Any]], settings: FewStepSettings) -> list[str]:
    """What was expected, and whether it came out."""
    said = []
    for better, worse in (
        ("isotropic", ("small variance", "large variance")),
        ("spectral", ("isotropic", "diagonal, lattice")),
        ("diagonal, Rademacher", ("isotropic",)),
        ("diagonal, lattice", ("isotropic", "diagonal, Rademacher")),
        *(((LEARNED, ("isotropic", "diagonal, lattice")),) if LEARNED in _names(by) else ()),
    ):
        for other in worse:
            pairs = [(n, by[better, n]["value"], by[other, n]["value"]) for n in settings.steps]
            wins = [n for n, a, b in pairs if a < b]
            won = " and ".join(map(str, wins))
            verdict = "at every number of steps" if len(wins) == len(pairs) else f"at {won or 'no number of'} steps"
            numbers = ", ".join(f"{a:.2f} against {b:.2f} at {n}" for n, a, b in pairs)
            said.append(f"{better[0].upper()}{better[1:]} is below {other} {verdict}: {numbers}.")
    return said


def _draw(records: Sequence[dict[str, Any]], what: str) -> Canvas:
    canvas, axes = new_figure(1, 2, 4.0)
    canvas.set_size_inches(11.5, 4.0)
    for axis, key, label in zip(
        axes[0], ("steps", "evaluations"), ("steps", "evaluations of the network"), strict=True
    ):
        for row in _names((r["row"], r["steps"]) for r in records):
            colour, style, _ = ROWS[row]
            own = [r for r in records if r["row"] == row]
            points = ([r[key] for r in own], [r["value"] for r in own])
            axis.loglog(*points, style, color=colour, markersize=4, linewidth=1.3, label=row)
        axis.set_xlabel(label, fontsize=9)
        axis.set_ylabel(what, fontsize=9)
        plain_logs(axis)
        open_axes(axis, 8)
    axes[0][1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return canvas


def _picture_section(pictures: Mapping[tuple[str, int], Tensor], settings: FewStepSettings) -> Section:
    names, columns = _names(pictures), len(settings.steps)
    canvas, axes = new_figure(len(names), columns, 1.0)
    canvas.set_size_inches(0.9 + 2.6 * columns, 0.62 * len(names) + 0.3)
    for i, row in enumerate(names):
        for j, steps in enumerate(settings.steps):
            axis = axes[i][j]
            axis.set(xticks=[], yticks=[])
            for spine in axis.spines.values():
                spine.set_visible(False)
            if (row, steps) in pictures:
                images = pictures[row, steps].float() / 255
                axis.imshow(tiled(images, len(images), gap=1, fill=1.0).movedim(0, -1).numpy())
            if i == 0:
                axis.set_title(f"{steps} steps", fontsize=8)
            if j == 0:
                axis.set_ylabel(row, fontsize=7, rotation=0, ha="right", va="center")
    caption = "The first images of each, from the same noise."
    return Section("Images", (), (), [Figure("few_steps_images", caption, canvas)])


EXPERIMENT = Experiment(
    "few-steps",
    "Few-step sampling of a pretrained diffusion model",
    "Ancestral sampling with fixed, isotropic, spectral, diagonal and full covariances, DDIM and Heun: FID against "
    "steps (--model, --head).",
    run,
)

"""A learned diagonal (optimal covariance matching) against probes: error, calibration and cost, level by level."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import Any

from mmdgs.lab.drawing import GREEN
from mmdgs.lab.experiment import Context, Outcome
from mmdgs.lab.grid import Cell, Grid, Measure, Results
from mmdgs.lab.held_out import ACROSS, chosen_levels, costs, data_of, held_out_images, over_levels, titles
from mmdgs.lab.report import Section
from mmdgs.lab.small_models import trained_here
from mmdgs.lab.workspace import Part, axis
from mmdgs.metrics.comparison import compare_diagonals
from mmdgs.models import VARIANCE_RATIO, Model, from_pretrained, load, load_head
from mmdgs.moments import FLOOR, DiagonalMoments, IsotropicMoments, Moments
from mmdgs.moments.ocm import OcmMoments
from mmdgs.moments.probes import Lattice, ProbeDesign, Rademacher
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams
from mmdgs.training import Recipe, TrainingSettings

MODEL = "mnist"
HEAD, ISOTROPIC, RESOLVED = "OCM head", "isotropic", "(least that is resolved)"
PROBED: dict[str, tuple[int, ProbeDesign]] = {
    "1 product": (1, Rademacher()),
    "3 products": (3, Rademacher()),
    "10 products": (10, Rademacher()),
    "3 products, lattice": (3, Lattice()),
}
ROWS = (HEAD, *PROBED, ISOTROPIC)
ERROR = Measure("error", "relative error", 3, "less")
FITTED = Measure("fitted", "negative log-likelihood with fitted floor and scale", 3, "less")
Z2 = Measure("z2", "mean of z^2 with fitted floor and scale", 3)
MEASURES = (ERROR, Measure("nll", "negative log-likelihood", 3, "less"), FITTED, Z2)
DRAWN = ((ERROR, "xy"), (Measure("above", "negative log-likelihood above isotropic"), "x"), (Z2, "xy"))
TRAINING = TrainingSettings(
    steps=None, minutes=12, batch_size=8, learning_rate=2e-3, warmup=50, decay=True, ema=0.99,
    checkpoint_every=None, validate_every=None,
)  # fmt: skip


@dataclass(frozen=True)
class OcmSettings:
    """How many held-out images, images to fit the isotropic variance on, levels and products of the references; and how
    a head is trained where none is given."""

    images: int = 128
    fit_images: int = 200
    levels: int = axis(8)
    reference_probes: int = 12
    network: str = "unet-tiny"
    width: int = 16
    training: TrainingSettings = TRAINING


FULL = {"cuda": OcmSettings(images=512, reference_probes=32), "cpu": OcmSettings()}
"""References of more products resolve smaller errors, above all at high noise, where a product says least."""
QUICK = OcmSettings(
    images=4, fit_images=8, levels=3, reference_probes=2, width=8, training=replace(TRAINING, steps=3, minutes=None)
)


def run(context: Context) -> Outcome:
    """Compare at every level, with the head given or with one trained here."""
    settings = context.sized(FULL.get(context.device.type, FULL["cpu"]), QUICK)
    model = from_pretrained(context.model or MODEL, device=context.device)
    data = data_of(model)
    head = load(context.head) if context.head is not None else _trained(context, model, settings)
    load_head(head, model)  # refused before the work

    @lru_cache(maxsize=1)
    def compared(level: NoiseLevel) -> dict[str, dict[str, Any]]:
        return at_level(context, model, head, level, settings)

    def measure(cell: Cell) -> Part:
        return Part(compared(cell.what)[cell.row])

    levels = chosen_levels(model.levels, settings.levels)
    cells = {(row, ratio): level for ratio, level in levels.items() for row in (*ROWS, RESOLVED)}
    depends = (model, head.digest, settings.images, settings.fit_images, settings.reference_probes, data)
    found = Grid("ocm", cells, measure, depends, ACROSS).run(context)
    records = {
        "settings": asdict(settings) | {"model": model.source, "data": data, "head": context.head},
        "parameters": {name: _size(one) for name, one in (("denoiser", model), ("head", head))},
        "levels": found.records(),
    }
    return Outcome(records, [_section(found, records, context.quick)])


def _size(model: Model) -> int:
    return sum(p.numel() for p in model.network.parameters())


def _trained(context: Context, model: Model, settings: OcmSettings) -> Model:
    """A head for the model, trained here."""
    recipe = Recipe(
        data=data_of(model), data_dir=context.data_dir, model=settings.network, network={"width": settings.width},
        param=VARIANCE_RATIO, denoiser=model.source, training=replace(settings.training, seed=context.seed),
    )  # fmt: skip
    asked = {"model": model.digest, "network": [settings.network, settings.width], "training": asdict(recipe.training)}
    return trained_here(context, "head", recipe, asked)


def at_level(
    context: Context, model: Model, head: Model, level: NoiseLevel, settings: OcmSettings
) -> dict[str, dict[str, Any]]:
    """Every row at one level: error, likelihood with and without fitted floor and scale, calibration and cost."""
    fit = held_out_images(context, model, "train", settings.fit_images)
    streams = Streams(context.seed, len(fit), purpose="fit")
    estimators: dict[str, Moments] = {
        HEAD: OcmMoments(model, load_head(head, model), FLOOR),
        **{row: DiagonalMoments(model, probes=n, floor=FLOOR, design=design) for row, (n, design) in PROBED.items()},
        ISOTROPIC: IsotropicMoments.fit(model, fit, level, generator=streams),
    }
    x = held_out_images(context, model, "test", settings.images)
    compared = compare_diagonals(
        estimators, model, x, level, seed=context.seed, reference_probes=settings.reference_probes
    )
    base = compared[ISOTROPIC].fitted.nll
    found: dict[str, dict[str, Any]] = {
        row: {
            "error": one.error, "nll": one.calibration.nll, "fitted": one.fitted.nll, "above": one.fitted.nll - base,
            "z2": one.fitted.variance, "evaluations": one.cost.evaluations,
        }
        for row, one in compared.items()
    }  # fmt: skip
    return found | {RESOLVED: {"error": compared[HEAD].resolution}}


def _section(found: Results, records: dict[str, Any], quick: bool) -> Section:
    settings, sizes = records["settings"], records["parameters"]
    text = [
        f"The denoiser is {settings['model']} ({sizes['denoiser'] / 1e6:.2f} million parameters), the head has "
        f"{sizes['head'] / 1e6:.2f} million. In brackets: evaluations of one posterior. A head counts as one "
        "evaluation whatever its size, a product as two.",
        "The error is that against the diagonal of the network's own Jacobian, by two independent estimates of "
        f"{settings['reference_probes']} products each; errors below the last row cannot be told from none. The "
        "likelihood is that of held-out images under the posterior of their noisy versions, a floor of the variances "
        "fitted on half of them and judged on the others.",
        *(["This is the quick version: so few images say nothing."] if quick else []),
    ]
    note = f"{settings['images']} held-out images; likelihoods in nats a number; z^2 is 1 where calibrated."
    named = costs(found)
    tables = [
        found.table(
            one.title.capitalize(), [one], head="variances", note=note, columns=titles(found), compared=ROWS,
            rows={row: title for row, title in named.items() if row in ROWS or one is ERROR},
        )
        for one in MEASURES
    ]  # fmt: skip
    drawn = replace(found, parts={key: part for key, part in found.parts.items() if key[0] in ROWS})
    caption = "Error, likelihood and calibration at each level, the last two with fitted floor and scale."
    figure = over_levels(drawn, "ocm", caption, DRAWN)
    line = figure.canvas.axes[-1].axhline if len(found.columns) > 1 else figure.canvas.axes[-1].axvline
    line(1, color=GREEN, linewidth=0.8)
    others = [row for row in ROWS if row != HEAD]
    claims = [] if quick else [found.below(HEAD, row, one) for row in others for one in (ERROR, FITTED)]
    return Section("A head in place of probes", text, tables, [figure], claims)

"""A learned diagonal (optimal covariance matching) against probes: error, calibration and cost, level by level."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from mmdgs.lab.experiment import Context, Experiment, Outcome
from mmdgs.lab.held_out import chosen_levels, data_of, held_out
from mmdgs.lab.ocm_report import HEAD, ISOTROPIC, section
from mmdgs.lab.small_models import trained_here
from mmdgs.lab.workspace import Part
from mmdgs.metrics.comparison import compare_diagonals
from mmdgs.models import VARIANCE_RATIO, Model, from_pretrained, load, load_head
from mmdgs.moments import DiagonalMoments, IsotropicMoments, Moments
from mmdgs.moments.ocm import OcmMoments
from mmdgs.moments.probes import Lattice, Rademacher
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams
from mmdgs.training import Recipe, TrainingSettings

MODEL = "mnist"
SEED = 40

PROBED: dict[str, Callable[[Model], Moments]] = {
    "1 product": lambda model: DiagonalMoments(model, probes=1, design=Rademacher()),
    "3 products": lambda model: DiagonalMoments(model, probes=3, design=Rademacher()),
    "10 products": lambda model: DiagonalMoments(model, probes=10, design=Rademacher()),
    "3 products, lattice": lambda model: DiagonalMoments(model, probes=3, design=Lattice()),
}
"""Probed diagonals by the names of ocm_report.STYLES."""

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
    levels: int = 8
    reference_probes: int = 12
    network: str = "unet-tiny"
    width: int = 16
    training: TrainingSettings = TRAINING


FULL = {"cuda": OcmSettings(images=512, reference_probes=32), "cpu": OcmSettings()}
"""References of more products resolve smaller errors, above all at high noise, where a product says least."""
QUICK = OcmSettings(
    images=4,
    fit_images=8,
    levels=3,
    reference_probes=2,
    width=8,
    training=replace(TRAINING, steps=3, minutes=None),
)


def run(context: Context) -> Outcome:
    """Compare at every level, with the head given or with one trained here."""
    settings = context.sized(FULL.get(context.device.type, FULL["cpu"]), QUICK)
    model = from_pretrained(context.model or MODEL, device=context.device)
    data = data_of(model)
    head = load(context.head) if context.head is not None else _trained(context, model, settings)
    load_head(head, model)  # refused before the work
    levels = chosen_levels(model.levels, settings.levels)
    found = [_level(context, model, head, level, settings) for level in levels]
    records = {
        "settings": asdict(settings) | {"model": model.source, "data": data, "head": context.head},
        "parameters": {name: _size(one) for name, one in (("denoiser", model), ("head", head))},
        "levels": found,
    }
    return Outcome(records, [section(records)])


def _size(model: Model) -> int:
    return sum(p.numel() for p in model.network.parameters())


def _trained(context: Context, model: Model, settings: OcmSettings) -> Model:
    """A head for the model, trained here."""
    recipe = Recipe(
        data=data_of(model),
        data_dir=context.data_dir,
        model=settings.network,
        network={"width": settings.width},
        param=VARIANCE_RATIO,
        denoiser=model.source,
        training=replace(settings.training, seed=context.seed),
    )
    asked = {"model": model.digest, "network": [settings.network, settings.width], "training": asdict(recipe.training)}
    return trained_here(context, "head", recipe, asked)


def _level(context: Context, model: Model, head: Model, level: NoiseLevel, settings: OcmSettings) -> dict[str, Any]:
    """Every estimator at one level: error, fit and cost."""
    asked = {
        "model": model.digest, "head": load(head).digest, "seed": context.seed,
        "level": [level.alpha, level.sigma], "images": settings.images, "fit_images": settings.fit_images,
        "reference_probes": settings.reference_probes, "data": data_of(model),
    }  # fmt: skip

    def compute() -> Part:
        fitted = held_out(context, model, "train", settings.fit_images, SEED)
        isotropic = IsotropicMoments.fit(model, fitted, level, generator=Streams(context.seed + SEED + 1, len(fitted)))
        estimators: dict[str, Moments] = {
            HEAD: OcmMoments(model, load_head(head, model)),
            **{name: make(model) for name, make in PROBED.items()},
            ISOTROPIC: isotropic,
        }
        x = held_out(context, model, "test", settings.images, SEED)
        compared = compare_diagonals(
            estimators, model, x, level, seed=context.seed + SEED + 2, reference_probes=settings.reference_probes
        )
        return Part({name: asdict(one) for name, one in compared.items()})

    ratio = level.sigma / level.alpha
    part = context.workspace.part(f"level-{ratio:.4g}", asked, compute)
    return {"ratio": ratio, "alpha": level.alpha, "sigma": level.sigma, "estimators": part.values}


EXPERIMENT = Experiment(
    "ocm",
    "A learned diagonal covariance against probes",
    "Optimal covariance matching (Ou et al., 2024): a small head against 1, 3 and 10 products with the Jacobian and an "
    "isotropic variance, in error, likelihood and calibration (--model, --head; 20 minutes by default on a CPU).",
    run,
)

"""A learned diagonal (optimal covariance matching) against probes: error, calibration and cost, level by level."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from matplotlib.figure import Figure as Canvas
from torch import Tensor

from mmdgs.data import dequantised, load_images, spread
from mmdgs.errors import UsageError
from mmdgs.experiments.drawing import BLUE, COLOURS, GREEN, GREY, ORANGE, new_figure, open_axes
from mmdgs.experiments.experiment import Context, Experiment, Outcome
from mmdgs.experiments.report import Figure, Section, Table
from mmdgs.experiments.workspace import Part
from mmdgs.files import to_json
from mmdgs.metrics.comparison import compare_diagonals
from mmdgs.models import VARIANCE_RATIO, Model, ModelConfig, load
from mmdgs.moments import DiagonalMoments, IsotropicMoments, Moments
from mmdgs.noise import NoiseLevel
from mmdgs.ocm import OcmMoments
from mmdgs.pretrained import Pretrained, from_pretrained, load_head
from mmdgs.pretrained.pretrained import weights_digest
from mmdgs.probes import Lattice
from mmdgs.randomness import Streams
from mmdgs.schedules import geometric
from mmdgs.training import Recipe, TrainingSettings, train_model

MODEL = "mnist"
DATA: dict[tuple[int, ...], str] = {(1, 28, 28): "mnist", (3, 32, 32): "cifar10", (3, 64, 64): "celeba"}
"""The images of a model, by their shape."""
HEAD, ISOTROPIC = "OCM head", "isotropic"
SEED = 40

Maker = Callable[[Pretrained], Moments]
PROBED: dict[str, tuple[str, str, Maker]] = {
    "1 product": (GREY, "v:", lambda model: DiagonalMoments(model, probes=1)),
    "3 products": (GREY, "s--", lambda model: DiagonalMoments(model, probes=3)),
    "10 products": (GREY, "o-", lambda model: DiagonalMoments(model, probes=10)),
    "3 products, lattice": (
        COLOURS["diagonal"],
        "s--",
        lambda model: DiagonalMoments(model, probes=3, design=Lattice()),
    ),
}
"""Probed diagonals: how each is drawn, and what it is."""
STYLES = {HEAD: (BLUE, "o-"), ISOTROPIC: (ORANGE, "o-"), **{name: style[:2] for name, style in PROBED.items()}}
MEASURES = {
    "error": "relative error of the variances",
    "nll": "negative log-likelihood of x, nats a number",
    "z2": "mean of z^2 (1: calibrated)",
}


TRAINING = TrainingSettings(
    steps=None, minutes=12, batch_size=8, learning_rate=2e-3, warmup=50, decay=True, ema=0.99,
    checkpoint_every=None, validate_every=None,
)  # fmt: skip


@dataclass(frozen=True)
class OcmSettings:
    """How many held-out images, images to fit the isotropic variance on, levels and products of the references; and how
    a head is trained where none is given."""

    images: int = 128
    fit_images: int = 500
    levels: int = 8
    reference_probes: int = 16
    network: str = "unet-tiny"
    width: int = 16
    training: TrainingSettings = TRAINING


FULL = OcmSettings()
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
    settings = QUICK if context.quick else FULL
    model = from_pretrained(context.model or MODEL, device=context.device)
    if model.shape not in DATA:
        raise UsageError(f"no images are known for a model of {model.shape}; known: {list(DATA)}")
    head = load(context.head) if context.head is not None else _trained(context, model, settings)
    load_head(head, model)  # refused before the work
    levels = chosen_levels(model.levels, settings.levels)
    found = [_level(context, model, head, level, settings) for level in levels]
    records = {
        "settings": asdict(settings) | {"model": model.source, "data": DATA[model.shape], "head": context.head},
        "parameters": {name: _size(one) for name, one in (("denoiser", model), ("head", head))},
        "levels": found,
    }
    return Outcome(records, [_section(records, settings, model.source)])


def _size(model: Model | Pretrained) -> int:
    return sum(p.numel() for p in model.network.parameters())


def chosen_levels(levels: Sequence[NoiseLevel], count: int) -> list[NoiseLevel]:
    """About `count` of the levels, equally far apart in log(sigma / alpha), both ends among them."""
    if len(levels) <= count:
        return list(levels)
    ratios = [level.sigma / level.alpha for level in levels]
    wanted = [level.sigma for level in geometric(count, ratios[0], ratios[-1])]
    places = [_nearest(ratios, one) for one in wanted]
    return [levels[i] for i in dict.fromkeys(places)]


def _nearest(ratios: Sequence[float], wanted: float) -> int:
    return min(range(len(ratios)), key=lambda i: abs(math.log(ratios[i] / wanted)))


def _trained(context: Context, model: Pretrained, settings: OcmSettings) -> Model:
    """A head for the model, trained here."""
    recipe = Recipe(
        data=DATA[model.shape],
        data_dir=context.data_dir,
        model=settings.network,
        network={"width": settings.width},
        param=VARIANCE_RATIO,
        denoiser=model.source,
        training=replace(settings.training, seed=context.seed),
    )
    asked = {"model": model.digest, "network": [settings.network, settings.width], "training": asdict(recipe.training)}

    def compute() -> Part:
        with tempfile.TemporaryDirectory() as folder:
            head, trained = train_model(recipe, folder, device=context.device, progress="head")
        values = {
            "config": json.loads(to_json(head.config.to_json())),
            "steps": len(trained.losses),
            "minutes": trained.seconds / 60,
        }
        return Part(values, {name: value.cpu() for name, value in head.network.state_dict().items()})

    part = context.workspace.part("head", asked, compute)
    head = Model(ModelConfig.from_json(part.values["config"], "the head"))
    head.network.load_state_dict(part.tensors)
    head.network.requires_grad_(False).eval()
    return head


def _images(context: Context, model: Pretrained, split: str, count: int) -> Tensor:
    """Images spread over a set, dequantised, as the model has them."""
    channels, height, _ = model.shape
    stored = load_images(DATA[model.shape], split, data_dir=context.data_dir, size=height, channels=channels).images
    images = stored[spread(len(stored), count)].to(context.device)
    return model.scaled(dequantised(images, Streams(context.seed + SEED, len(images))))


def _level(
    context: Context, model: Pretrained, head: Model, level: NoiseLevel, settings: OcmSettings
) -> dict[str, Any]:
    """Every estimator at one level: error, fit and cost."""
    asked = {
        "model": model.digest, "head": weights_digest(head.network.state_dict(), "the head"), "seed": context.seed,
        "level": [level.alpha, level.sigma], "images": settings.images, "fit_images": settings.fit_images,
        "reference_probes": settings.reference_probes, "data": DATA[model.shape],
    }  # fmt: skip

    def compute() -> Part:
        fitted = _images(context, model, "train", settings.fit_images)
        isotropic = IsotropicMoments.fit_errors(
            model, fitted, level, generator=Streams(context.seed + SEED + 1, len(fitted))
        )
        estimators: dict[str, Moments] = {
            HEAD: OcmMoments(model, load_head(head, model)),
            **{name: make(model) for name, (_, _, make) in PROBED.items()},
            ISOTROPIC: isotropic,
        }
        x = _images(context, model, "test", settings.images)
        compared = compare_diagonals(
            estimators, model, x, level, seed=context.seed + SEED + 2, reference_probes=settings.reference_probes
        )
        return Part({name: asdict(one) for name, one in compared.items()})

    ratio = level.sigma / level.alpha
    part = context.workspace.part(f"level-{ratio:.4g}", asked, compute)
    return {"ratio": ratio, "alpha": level.alpha, "sigma": level.sigma, "estimators": part.values}


def _measured(record: Mapping[str, Any], measure: str) -> float:
    if measure == "error":
        return float("nan") if record["error"] is None else record["error"]
    return record["calibration"]["nll" if measure == "nll" else "variance"]


def _section(records: Mapping[str, Any], settings: OcmSettings, source: str) -> Section:
    levels = records["levels"]
    tables = []
    for measure, what in MEASURES.items():
        rows = [
            [
                name,
                *(f"{_measured(level['estimators'][name], measure):.3f}" for level in levels),
                _cost(levels[0], name),
            ]
            for name in STYLES
        ]
        columns = [[_measured(level["estimators"][name], measure) for name in STYLES] for level in levels]
        best = [_best(measure, column) for column in columns]
        header = ["variances", *(f"sigma / alpha {level['ratio']:.3g}" for level in levels), "evaluations"]
        note = f"{settings.images} held-out images; the best of each column in bold."
        tables.append(
            Table(
                what[0].upper() + what[1:], header, rows, note, best=frozenset((i, 1 + j) for j, i in enumerate(best))
            )
        )
    sizes = records["parameters"]
    text = [
        f"The denoiser is {source} ({sizes['denoiser'] / 1e6:.2f} million parameters), the head has "
        f"{sizes['head'] / 1e6:.2f} million. A head counts as one evaluation whatever its size, a product as two.",
        "The error is that of the variances against the diagonal of the network's own Jacobian, by two independent "
        f"estimates of {settings.reference_probes} products each. The likelihood is that of held-out images under the "
        "posterior of their noisy versions: what a wrong mean costs is in it, too.",
        _verdict(levels),
    ]
    caption = "Error, misfit (likelihood of the isotropic posterior minus one's own) and calibration at each level."
    return Section("A head in place of probes", text, tables, [Figure("ocm", caption, _draw(levels))])


def _best(measure: str, values: Sequence[float]) -> int:
    """The place of the best value: the smallest, or of z^2 the one nearest to 1."""
    return min(range(len(values)), key=lambda i: abs(math.log(values[i])) if measure == "z2" else values[i])


def _cost(level: Mapping[str, Any], name: str) -> str:
    cost = level["estimators"][name]["cost"]
    return f"{cost['forwards'] + 2 * cost['products']:g}"


def _verdict(levels: Sequence[Mapping[str, Any]]) -> str:
    """Where the head is nearer than what it stands in for."""
    said = []
    for other in ("1 product", "3 products", "10 products", ISOTROPIC):
        for measure, what in (("error", "nearer to the diagonal"), ("nll", "likelier")):
            wins = sum(
                _measured(level["estimators"][HEAD], measure) < _measured(level["estimators"][other], measure)
                for level in levels
            )
            said.append(f"{what} than {other} at {wins} of {len(levels)} levels")
    return f"The head is {'; '.join(said)}."


def _draw(levels: Sequence[Mapping[str, Any]]) -> Canvas:
    canvas, axes = new_figure(1, len(MEASURES), 3.6)
    canvas.set_size_inches(12.5, 3.6)
    ratios = [level["ratio"] for level in levels]
    labels = {**MEASURES, "nll": "nats a number above isotropic's"}
    for axis, measure in zip(axes[0], MEASURES, strict=True):
        for name, (colour, style) in STYLES.items():
            values = [_measured(level["estimators"][name], measure) for level in levels]
            if measure == "nll":
                values = [
                    value - _measured(level["estimators"][ISOTROPIC], measure)
                    for value, level in zip(values, levels, strict=True)
                ]
            axis.plot(ratios, values, style, color=colour, markersize=4, linewidth=1.3, label=name)
        axis.set_xscale("log")
        axis.set_yscale("symlog", linthresh=0.1) if measure == "nll" else axis.set_yscale("log")
        axis.set_xlabel("sigma / alpha", fontsize=9)
        axis.set_ylabel(labels[measure], fontsize=9)
        open_axes(axis, 8)
    axes[0][-1].axhline(1, color=GREEN, linewidth=0.8)
    axes[0][-1].legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    return canvas


EXPERIMENT = Experiment(
    "ocm",
    "A learned diagonal covariance against probes",
    "Optimal covariance matching (Ou et al., 2024): a small head against 1, 3 and 10 products with the Jacobian and an "
    "isotropic variance, in error, likelihood and calibration (--model, --head; 20 minutes by default on a CPU).",
    run,
)

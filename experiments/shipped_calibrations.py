"""The calibrations that ship with the models: images as .npz, files made of them, and a judgement.

    python -m experiments.shipped_calibrations export --data-dir FOLDER --images 2000 --out images
    python -m experiments.shipped_calibrations fit --data images --out weights --device cuda \\
        --records runs/calibrations
    python -m experiments.shipped_calibrations fit --model photo --photographs FOLDER --out weights
    python -m experiments.tables --from calibration_shipped=runs/calibrations

The first writes SET-train.npz and SET-test.npz (`arr_0`, uint8, (N, H, W, C)) of mnist, cifar10 and
celeba; FOLDER holds a folder of each set, that of celeba with CelebA or a faces*.zip. The second
fits to the training images, writes calibration-ESTIMATOR.safetensors into OUT/MODEL for every model
that ships, and judges by the test images: records.json has a cell for each model and estimator,
with what is farthest from right over the levels, and the reports of all.

A model of any size is fitted to crops of photographs, in a folder with the parts train and test
(neither seen in training), and comes by its isotropic.safetensors and spectral.safetensors too.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import typer
from torch import Tensor

from experiments.held_out import data_of
from experiments.tables import RUN_RECORDS
from mmdgs.cli.app import App, Device, device_named
from mmdgs.covariances import Learned, named
from mmdgs.data import dequantised, load_images, spread
from mmdgs.errors import UsageError
from mmdgs.files import to_json, write_atomically
from mmdgs.metrics.reports import LISTED, CalibrationReport
from mmdgs.models import MEAN_STD, Model, load
from mmdgs.models.estimators import estimator_name, fit_at, judge_at, levels_of
from mmdgs.models.fits import FitData, FitStore, isotropic_moments, spectral_moments
from mmdgs.models.shipped import SHIPPED
from mmdgs.models.weights import CALIBRATION, ISOTROPIC, SPECTRAL
from mmdgs.moments import DiagonalMoments, FullMoments, KrylovMoments, Moments
from mmdgs.noise import LevelTable
from mmdgs.randomness import Streams
from mmdgs.runtime import environment
from mmdgs.schedules import geometric

app = App(help=__doc__)
MODELS = ("mnist", "mnist-kl", "cifar10", "cifar10-score", "celeba")
SETS, SPLITS = ("mnist", "cifar10", "celeba"), ("train", "test")
FEWER = {"lattice-3": 512, "lattice-10": 512, "krylov-20": 64, "full": 64}
"""Images for estimators that take products; fitted variances vary more from image to image."""
CROPS = 512
PHOTOGRAPH_LEVELS = 12
"""Over the whole range of a model of any size, which is that of its restorations."""
KRYLOV_PROBES = 4
AIM, RARE, RARE_AIM = 0.02, 0.99, 0.005
"""How near to its probability coverage must come on test images, and that of rare intervals."""


@app.command()
def export(
    data_dir: Annotated[Path, typer.Option()],
    out: Annotated[Path, typer.Option()],
    images: Annotated[int, typer.Option()] = 2_000,
) -> None:
    """Write training and test images of each set, spread over it."""
    out.mkdir(parents=True, exist_ok=True)
    for name in SETS:
        faces = sorted((data_dir / name).glob("faces*.zip"))  # in the place of CelebA itself
        for split in SPLITS:
            source = str(faces[0]) if faces else name
            stored = load_images(source, split, data_dir=data_dir / name).images
            exported = stored[spread(len(stored), images)].permute(0, 2, 3, 1).contiguous()
            numpy.savez_compressed(out / f"{name}-{split}.npz", exported.numpy())
            print(f"{out / name}-{split}.npz: {tuple(exported.shape)}")


def estimators(model: Model) -> list[Moments]:
    """Those that are calibrated here; Krylov and full ones do not come with the models."""
    if model.param == MEAN_STD:
        return [model.posterior(Learned(calibrated=False))]
    results: list[Moments] = [DiagonalMoments(model, 3), DiagonalMoments(model, 10)]
    for name in ("isotropic", "spectral"):
        try:
            results.append(model.posterior(named(name, {"calibrated": False})))
        except UsageError as error:
            print(f"{model.source}: {error}")
    results.append(KrylovMoments(model, 20, probes=KRYLOV_PROBES))
    return [*results, FullMoments(model)] if model.shape == (1, 28, 28) else results


@app.command()
def fit(
    data: Annotated[Path, typer.Option(help="Of the first command.")] = Path("images"),
    photographs: Annotated[Path | None, typer.Option(help="For models of any size.")] = None,
    crops: Annotated[int, typer.Option(help="Crops of photographs, of each part.")] = CROPS,
    out: Annotated[Path, typer.Option()] = Path("weights"),
    records: Annotated[Path, typer.Option()] = Path("runs/calibrations"),
    models: Annotated[list[str], typer.Option("--model")] = [*MODELS],  # noqa: B006
    only: Annotated[list[str], typer.Option(help="Such as krylov-20.")] = [],  # noqa: B006
    device: Device = "auto",
) -> None:
    """Calibrate every model at its levels, or only some estimators, and write the files."""
    cells, judged, where, seed = [], {}, device_named(device), 0
    for name in models:
        model = load(name, device=where)
        folder = out / SHIPPED.get(name, Path(name).name)
        folder.mkdir(parents=True, exist_ok=True)
        levels = levels_of(model, None)
        if model.any_size:
            if photographs is None:
                raise UsageError(f"{name} is fitted to --photographs FOLDER")
            source = FitData(str(photographs), crops)
            x, held_out = (_crops(source, model, split) for split in SPLITS)
            fit_variances(model, source, folder)
            ends = (level.ratio for level in (model.levels[0], model.levels[-1]))
            levels = list(geometric(PHOTOGRAPH_LEVELS, *ends))
        else:
            x, held_out = (_images(data, model, split) for split in SPLITS)
        for moments in estimators(model):
            called, started = estimator_name(moments, model), time.perf_counter()
            assert called is not None
            if only and called not in only:
                continue
            some, others = (images[:: _every(called, len(images))] for images in (x, held_out))
            results = {level: fit_at(moments, some, level, seed) for level in levels}
            reports = [
                judge_at(moments, own, others, level, seed) for level, own in results.items()
            ]
            table = LevelTable.of(results)
            store = FitStore(model, f"{CALIBRATION}-{called}")
            key = {"data": kind_of(model), "images": len(some), "seed": seed, "of": CALIBRATION}
            store.write(folder / f"{CALIBRATION}-{called}.safetensors", key, table)
            judged[f"{name} {called}"] = [report.to_json() for report in reports]
            cells.append(_cell(name, called, reports) | {"fitted on": len(some)})
            for fitted, report in zip(results.values(), reports, strict=True):
                lift = f"floor {fitted[0]:.4g}, scale {fitted[1]:.4g}"
                print(f"{name} {called}: {report}; {lift}", flush=True)
            within = "within" if cells[-1]["within"] else "NOT WITHIN"
            seconds = f"{time.perf_counter() - started:.0f} s"
            print(f"{name} {called}: {within} the aims, {seconds}", flush=True)
            records.mkdir(parents=True, exist_ok=True)
            known = {"reports": judged, "environment": environment(model.device)}
            write_atomically(records / RUN_RECORDS, to_json({"cells": cells, **known}))


def fit_variances(model: Model, data: FitData, folder: Path) -> None:
    """Write the isotropic variances and the spectra of a model's errors into its folder."""
    key = {**data.record(), "data": kind_of(model), "of": "errors"}
    for kind, moments in (
        (ISOTROPIC, isotropic_moments(model, data=data)),
        (SPECTRAL, spectral_moments(model, data)),
    ):
        FitStore(model, kind).write(folder / f"{kind}.safetensors", key, moments.variances)


def kind_of(model: Model) -> str:
    """What the images of a model are called."""
    return "photographs" if model.any_size else data_of(model)


def _every(estimator: str, images: int) -> int:
    return max(1, images // FEWER.get(estimator, images))


def _cell(model: str, estimator: str, reports: Sequence[CalibrationReport]) -> dict[str, Any]:
    """What is farthest from right over the levels, and whether all is within the aims."""

    def farthest(right: float, values: Iterable[float]) -> float:
        return max(values, key=lambda value: abs(value - right))

    held = {p: farthest(p, (report.covered[p] for report in reports)) for p in LISTED}
    return {
        "row": f"{model} {estimator}",
        "levels": len(reports),
        "judged by": reports[0].examples,
        "z_variance": farthest(1.0, (report.z_variance for report in reports)),
        "nats": min(report.above_isotropic for report in reports),
        **{f"held {100 * p:g}": 100 * share for p, share in held.items()},
        "within": all(
            abs(share - p) <= (AIM if p < RARE else RARE_AIM) for p, share in held.items()
        ),
    }


def _crops(data: FitData, model: Model, split: str) -> Tensor:
    streams = Streams(0, data.images, purpose=f"{split} images")
    stored = data.crops(split, model.shape[0])
    return model.scaled(dequantised(stored, streams)).to(model.device)


def _images(data: Path, model: Model, split: str) -> Tensor:
    images = numpy.load(data / f"{data_of(model)}-{split}.npz")["arr_0"]
    stored = torch.from_numpy(images).permute(0, 3, 1, 2)
    streams = Streams(0, len(stored), purpose=f"{split} images")
    return model.scaled(dequantised(stored, streams)).to(model.device)


if __name__ == "__main__":
    app()

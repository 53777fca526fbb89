"""The calibrations that ship with the models: images as .npz, the files made of them, and how they do on others.

    python -m mmdgs.lab.shipped_calibrations export --data-dir FOLDER --images 2000 --out images
    python -m mmdgs.lab.shipped_calibrations fit --data images --out weights --device cuda --records runs/calibrations
    mmdgs reproduce tables --from calibration_shipped=runs/calibrations

The first writes SET-train.npz and SET-test.npz (`arr_0`, uint8, (N, H, W, C)) of mnist, cifar10 and celeba; FOLDER
holds a folder of each set, that of celeba with CelebA or a faces*.zip. The second fits to the training images, writes
calibration-ESTIMATOR.safetensors into OUT/MODEL for every model that ships, and judges by the test images: records.json
has a cell for each model and estimator, with what is farthest from right over the levels, and the reports of all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from mmdgs.data import dequantised, load_images, spread
from mmdgs.errors import UsageError
from mmdgs.files import to_json, write_atomically
from mmdgs.lab.documents import RUN_RECORDS
from mmdgs.lab.held_out import data_of
from mmdgs.metrics.reports import LISTED, CalibrationReport
from mmdgs.models import MEAN_STD, Model, from_pretrained
from mmdgs.models.calibration import estimator_name, fit_at, judge_at, levels_of
from mmdgs.models.fits import CALIBRATION, FitStore
from mmdgs.models.shipped import SHIPPED
from mmdgs.moments import DiagonalMoments, FullMoments, KrylovMoments, Moments
from mmdgs.noise import LevelTable
from mmdgs.randomness import Streams
from mmdgs.runtime import environment

MODELS = ("mnist", "mnist-kl", "cifar10", "cifar10-score", "celeba")
SETS, SPLITS = ("mnist", "cifar10", "celeba"), ("train", "test")
FEWER = {"lattice-3": 512, "lattice-10": 512, "krylov-20": 64, "full": 64}
"""Images for estimators that take products; fitted variances vary more from image to image."""
KRYLOV_PROBES = 4
AIM, RARE, RARE_AIM = 0.02, 0.99, 0.005
"""How near to its probability the coverage of intervals must come on test images, and that of rare ones."""


def export(data_dir: Path, images: int, out: Path) -> None:
    """Training and test images of each set, spread over it."""
    out.mkdir(parents=True, exist_ok=True)
    for name in SETS:
        faces = sorted((data_dir / name).glob("faces*.zip"))  # in the place of CelebA itself
        for split in SPLITS:
            stored = load_images(str(faces[0]) if faces else name, split, data_dir=data_dir / name).images
            chosen = stored[spread(len(stored), images)].permute(0, 2, 3, 1).contiguous()
            numpy.savez_compressed(out / f"{name}-{split}.npz", chosen.numpy())
            print(f"{out / name}-{split}.npz: {tuple(chosen.shape)}")


def estimators(model: Model) -> list[Moments]:
    """Those that are calibrated here; Krylov and full ones do not come with the models (--only leaves them out)."""
    if model.param == MEAN_STD:
        return [model.posterior("learned", calibrated=False)]
    found: list[Moments] = [DiagonalMoments(model, 3), DiagonalMoments(model, 10)]
    for name in ("isotropic", "spectral"):
        try:
            found.append(model.posterior(name, calibrated=False))
        except UsageError as error:
            print(f"{model.source}: {error}")
    found.append(KrylovMoments(model, 20, probes=KRYLOV_PROBES))
    return [*found, FullMoments(model)] if model.shape == (1, 28, 28) else found


def fit(
    data: Path, out: Path, records: Path, models: Sequence[str], device: str, only: Sequence[str] = (), seed: int = 0
) -> None:
    """Calibrate every model at its levels, and write the files; with names of estimators in `only` those alone."""
    cells, judged = [], {}
    for name in models:
        model = from_pretrained(name, device=device)
        x, held_out = (_images(data, model, split) for split in SPLITS)
        folder = out / SHIPPED[name]
        folder.mkdir(parents=True, exist_ok=True)
        for moments in estimators(model):
            called, started = estimator_name(moments, model), time.perf_counter()
            assert called is not None
            if only and called not in only:
                continue
            some, others = (images[:: _every(called, len(images))] for images in (x, held_out))
            found = {level: fit_at(moments, some, level, seed) for level in levels_of(model, None)}
            reports = [judge_at(moments, fitted, others, level, seed) for level, fitted in found.items()]
            table = LevelTable.of(found)
            store = FitStore(model, f"{CALIBRATION}-{called}")
            key = {"data": data_of(model), "images": len(some), "seed": seed, "of": CALIBRATION}
            store.write(folder / f"{CALIBRATION}-{called}.safetensors", key, table)
            judged[f"{name} {called}"] = [report.to_json() for report in reports]
            cells.append(_cell(name, called, reports) | {"fitted on": len(some)})
            for fitted, report in zip(found.values(), reports, strict=True):
                print(f"{name} {called}: {report}; floor {fitted[0]:.4g}, scale {fitted[1]:.4g}", flush=True)
            within = "within" if cells[-1]["within"] else "NOT WITHIN"
            print(f"{name} {called}: {within} the aims, {time.perf_counter() - started:.0f} s", flush=True)
            records.mkdir(parents=True, exist_ok=True)
            write_atomically(
                records / RUN_RECORDS,
                to_json({"cells": cells, "reports": judged, "environment": environment(model.device)}),
            )


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
        "within": all(abs(share - p) <= (AIM if p < RARE else RARE_AIM) for p, share in held.items()),
    }


def _images(data: Path, model: Model, split: str) -> Tensor:
    stored = torch.from_numpy(numpy.load(data / f"{data_of(model)}-{split}.npz")["arr_0"]).permute(0, 3, 1, 2)
    return model.scaled(dequantised(stored, Streams(0, len(stored), purpose=f"{split} images"))).to(model.device)


def main() -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m mmdgs.lab.shipped_calibrations")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("export")
    one.add_argument("--data-dir", type=Path, required=True)
    one.add_argument("--images", type=int, default=2_000)
    one.add_argument("--out", type=Path, required=True)
    two = commands.add_parser("fit")
    two.add_argument("--data", type=Path, required=True)
    two.add_argument("--out", type=Path, default=Path("weights"))
    two.add_argument("--records", type=Path, default=Path("runs/calibrations"))
    two.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    two.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    two.add_argument("--only", nargs="+", default=[], help="Estimators, such as krylov-20 or full.")
    given = parser.parse_args()
    if given.command == "export":
        export(given.data_dir, given.images, given.out)
    else:
        fit(given.data, given.out, given.records, given.models, given.device, given.only)


if __name__ == "__main__":
    main()

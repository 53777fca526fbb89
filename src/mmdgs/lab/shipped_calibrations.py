"""The calibrations that ship with the models: training images as .npz, and the files made of them.

    python -m mmdgs.lab.shipped_calibrations export --data-dir FOLDER --images 256 --out images
    python -m mmdgs.lab.shipped_calibrations fit --data images --out weights --device cuda

The first writes mnist.npz, cifar10.npz and celeba.npz (`arr_0`, uint8, (N, H, W, C)); FOLDER holds a folder of each
set, that of celeba with CelebA or a faces*.zip. The second writes calibration-ESTIMATOR.safetensors into OUT/MODEL for
every model that ships, and MODEL.json into --records with the reports of the half of the images that judges.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from torch import Tensor

from mmdgs.data import dequantised, load_images, spread
from mmdgs.errors import UsageError
from mmdgs.files import to_json, write_atomically
from mmdgs.lab.held_out import data_of
from mmdgs.models import MEAN_STD, Model, from_pretrained
from mmdgs.models.calibration import estimator_name, fit_at, levels_of
from mmdgs.models.fits import CALIBRATION, FitStore
from mmdgs.models.shipped import SHIPPED
from mmdgs.moments import DiagonalMoments, FullMoments, KrylovMoments, Moments
from mmdgs.noise import LevelTable
from mmdgs.randomness import Streams

MODELS = ("mnist", "mnist-kl", "cifar10", "cifar10-score", "celeba")
SETS = ("mnist", "cifar10", "celeba")
FEWER = {"krylov-20": 64, "full": 64}
"""Images for estimators that take many products."""
KRYLOV_PROBES = 4


def export(data_dir: Path, images: int, out: Path) -> None:
    """Training images of each set, spread over it."""
    out.mkdir(parents=True, exist_ok=True)
    for name in SETS:
        faces = sorted((data_dir / name).glob("faces*.zip"))  # in the place of CelebA itself
        stored = load_images(str(faces[0]) if faces else name, "train", data_dir=data_dir / name).images
        chosen = stored[spread(len(stored), images)].permute(0, 2, 3, 1).contiguous()
        numpy.savez_compressed(out / f"{name}.npz", chosen.numpy())
        print(f"{out / name}.npz: {tuple(chosen.shape)}")


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
    records.mkdir(parents=True, exist_ok=True)
    for name in models:
        model = from_pretrained(name, device=device)
        x = _images(data, model)
        folder, reports = out / SHIPPED[name], {}
        folder.mkdir(parents=True, exist_ok=True)
        for moments in estimators(model):
            called, started = estimator_name(moments, model), time.perf_counter()
            assert called is not None
            if only and called not in only:
                continue
            some = x[: FEWER.get(called)]
            found = {level: fit_at(moments, some, level, seed) for level in levels_of(model, None)}
            table = LevelTable.of({level: values for level, (values, _) in found.items()})
            store = FitStore(model, f"{CALIBRATION}-{called}")
            key = {"data": data_of(model), "images": len(some), "seed": seed, "of": CALIBRATION}
            store.write(folder / f"{CALIBRATION}-{called}.safetensors", key, table)
            reports[called] = [report.to_json() | {"fitted": values} for values, report in found.values()]
            for values, report in found.values():
                print(
                    f"{name} {called}: {report}; floor, scale, reach {' '.join(f'{v:.4g}' for v in values)}", flush=True
                )
            print(f"{name} {called}: {time.perf_counter() - started:.0f} s", flush=True)
        write_atomically(records / f"{name}.json", to_json(reports))


def _images(data: Path, model: Model) -> Tensor:
    stored = torch.from_numpy(numpy.load(data / f"{data_of(model)}.npz")["arr_0"]).permute(0, 3, 1, 2)
    return model.scaled(dequantised(stored, Streams(0, len(stored), purpose="images"))).to(model.device)


def main() -> None:
    """The command line of this module."""
    parser = argparse.ArgumentParser(prog="python -m mmdgs.lab.shipped_calibrations")
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("export")
    one.add_argument("--data-dir", type=Path, required=True)
    one.add_argument("--images", type=int, default=256)
    one.add_argument("--out", type=Path, required=True)
    two = commands.add_parser("fit")
    two.add_argument("--data", type=Path, required=True)
    two.add_argument("--out", type=Path, default=Path("weights"))
    two.add_argument("--records", type=Path, default=Path("runs/calibration-records"))
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

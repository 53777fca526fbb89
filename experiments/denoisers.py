"""Denoisers of others: their posteriors as they come and calibrated, and their Jacobians.

    python -m experiments denoisers --data-dir photos/val --weights-dir DIR

DIR holds, at any depth, what there is of `ffdnet_color.pth` (ffdnet.py), and of a clone of
bias_free_denoising and the files of scico (dncnn.py). Crops from the middle of photographs; grey is
the mean of the colours. Sigma is in 255ths, in the middle of the range of a network's training.

    posteriors  fitted and calibrated (mmdgs.calibrate) on the first half of the photographs by
                name, judged on the second: z variance, coverage, nats a number above one variance
    jacobians   |J - J'| / |J + J'| by probes; the noise that blind_sigma and patches estimate
    stored      products with the Jacobian against matrices that the authors kept of it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from experiments.dncnn import load_blind, load_scico
from experiments.experiment import Context
from experiments.ffdnet import load_ffdnet
from experiments.grid import Cell, Grid, Measure, Results, axis
from experiments.photographs import photographs
from mmdgs import calibrate
from mmdgs.denoisers import Denoiser
from mmdgs.errors import UsageError
from mmdgs.jacobians import blind_sigma, linearised
from mmdgs.metrics import psnr
from mmdgs.metrics.reports import report_of
from mmdgs.moments import DiagonalMoments, KrylovMoments, LowRankMoments, Moments, SpectralMoments
from mmdgs.moments.calibrated import posteriors
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.operators import Mask, estimated_noise
from mmdgs.randomness import Streams, signs
from mmdgs.report.drawing import labelled, new_figure
from mmdgs.report.page import Claim, Figure, Outcome, Section
from mmdgs.workspace import Part

DIAGONAL, SPECTRAL, LOW_RANK, KRYLOV = KINDS = "diagonal", "spectral", "low rank", "Krylov"
COMES, FITTED = "as it comes", "calibrated"
Z, COVERAGE = "z variance", "coverage of 90% intervals, %"
NATS = "nats a number above isotropic"
MEASURES = (Z, COVERAGE, NATS)
WITHIN = 0.02, 0.9, 1.1
"""Coverage this near to 0.9, and z variance between these, are called calibrated."""


class Outside(NamedTuple):
    """Where a network's file is, what reads it, and the sigma at which it is judged."""

    file: str
    load: Callable[[Path], Denoiser]
    sigma: float
    channels: int = 1


def _ffdnet(path: Path) -> Denoiser:
    return load_ffdnet(path, torch.device("cpu"))


RANGES = {10: 5, 30: 15, 55: 25, 100: 50}
STORED = "DnCNN without biases, 0 to 100"
NETWORKS = {
    "FFDNet, colour": Outside("ffdnet_color.pth", _ffdnet, 25, 3),
    **{
        f"DnCNN {words} biases, 0 to {top}": Outside(
            f"pretrained/dncnn/{folder}/0-{top}.pt", load_blind, sigma
        )
        for words, folder in (("with", "bias"), ("without", "bias_free"))
        for top, sigma in RANGES.items()
    },
    "U-Net without biases, 0 to 55": Outside("pretrained/unet/bias_free/0-55.pt", load_blind, 25),
    "DnCNN of 6 layers, told sigma": Outside("dncnn6N.mpk", load_scico, 25),
    "DnCNN of 17 layers, 25.5": Outside("dncnn17M.mpk", load_scico, 25.5),
}


@dataclass(frozen=True)
class DenoiserSettings:
    """Crops of both halves together, and of each half for low rank and Krylov."""

    images: int = 100
    side: int = 32
    low_rank_crops: int = 16
    krylov_crops: int = 8
    krylov_steps: int = 8
    krylov: tuple[str, ...] = axis((
        "FFDNet, colour", "DnCNN without biases, 0 to 55", "U-Net without biases, 0 to 55",
    ))  # fmt: skip
    probes: int = 3
    stored: tuple[int, ...] = axis((10, 30, 100))
    vectors: int = 8


FULL = DenoiserSettings()
QUICK = DenoiserSettings(
    images=16, side=16, low_rank_crops=8, krylov_steps=2, krylov=("FFDNet, colour",), vectors=2
)


def run(context: Context) -> Outcome:
    """All networks whose files are in --weights-dir."""
    settings = context.sized(FULL, QUICK)
    folder = Path(context.weights_dir or ".").expanduser()
    files = {name: found for name, (file, *_) in NETWORKS.items() if (found := find(folder, file))}
    if not files:
        sought = ", ".join(of.file for of in NETWORKS.values())
        raise UsageError(f"--weights-dir must hold one of {sought}; {folder} has none")
    halves = photographs(context.data_dir, settings.images, settings.side)
    fit, judge = (torch.stack(list(half.values())) for half in halves)
    work = _Work(context, settings, files, fit, judge)
    weights = {name: path.stat().st_size for name, path in files.items()}
    depends = (settings, weights, [list(half) for half in halves])
    cells: dict[tuple[str, Any], Any] = {(name, "J"): None for name in files}
    jacobians = Grid("jacobians", cells, work.jacobian, depends, "case").run(context)
    kept = {sigma: find(folder, f"Jacobian_{sigma}.npy") for sigma in settings.stored}
    cells = {(STORED, sigma): None for sigma in kept if kept[sigma] and STORED in files}
    stored = Grid("stored", cells, work.stored, depends, "case").run(context, least=0)
    cells = {
        (name, kind): None
        for kind in KINDS
        for name in files
        if kind != KRYLOV or name in settings.krylov
    }
    judged = Grid("posteriors", cells, work.posterior, depends, "case").run(context)
    every = {"jacobians": jacobians, "stored": stored, "posteriors": judged}
    records: dict[str, Any] = {name: results.records() for name, results in every.items()}
    absent = [name for name in NETWORKS if name not in files]
    left = [cell for results in every.values() for cell in results.open()]
    section = _section(settings, absent, jacobians, stored, judged)
    return Outcome(records | {"settings": asdict(settings)}, [section], left=left)


def find(folder: Path, name: str) -> Path | None:
    """The first file below a folder whose path ends so."""
    every = sorted(folder.rglob(Path(name).name))
    return next((path for path in every if path.as_posix().endswith(name)), None)


@dataclass(frozen=True, eq=False)
class _Work:
    """The files, the crops (n, 3, side, side) of both halves, and what cells measure."""

    context: Context
    settings: DenoiserSettings
    files: dict[str, Path]
    fit: Tensor
    judge: Tensor

    @lru_cache(maxsize=1)  # noqa: B019 - it lives as long as the run
    def network(self, name: str) -> Denoiser:
        return NETWORKS[name].load(self.files[name])

    def crops(self, name: str, images: Tensor) -> Tensor:
        return images if NETWORKS[name].channels == 3 else images.mean(1, keepdim=True)

    def level(self, name: str) -> NoiseLevel:
        return NoiseLevel(sigma=NETWORKS[name].sigma / 255)

    def streams(self, rows: int, purpose: str) -> Streams:
        return Streams(self.context.seed, rows, purpose=purpose)

    def moments(self, name: str, kind: str, x: Tensor) -> Moments:
        """An estimator as it comes; what is fitted is fitted to clean crops x."""
        denoiser, level, settings = self.network(name), self.level(name), self.settings
        if kind == DIAGONAL:
            return DiagonalMoments(denoiser, settings.probes)
        if kind == KRYLOV:
            return KrylovMoments(denoiser, settings.krylov_steps, probes=1)
        streams = self.streams(len(x), "spectrum")
        spectral = SpectralMoments.fit(denoiser, x, [level], generator=streams)
        return spectral if kind == SPECTRAL else LowRankMoments(denoiser, spectral)

    def posterior(self, cell: Cell) -> Part:
        """The measures as it comes and calibrated, on crops that neither fit has seen."""
        few = {LOW_RANK: self.settings.low_rank_crops, KRYLOV: self.settings.krylov_crops}
        most, level, seed = few.get(cell.column), self.level(cell.row), cell.seed
        x, held_out = (self.crops(cell.row, part) for part in (self.fit, self.judge))
        moments = self.moments(cell.row, cell.column, x)
        fitted = x[: 2 * most if most else None]  # every second one is fitted to
        both = {
            COMES: moments,
            FITTED: calibrate(moments, fitted, level, seed=seed, progress=cell.name),
        }
        values: dict[str, Any] = {}
        for words, of in both.items():
            pairs = posteriors(of, held_out[:most], level, seed=seed, purpose="denoisers")
            report = report_of(pairs, level, seed=seed)
            numbers = report.z_variance, 100 * report.interval_coverage, report.above_isotropic
            values |= {f"{key}, {words}": n for key, n in zip(MEASURES, numbers, strict=True)}
        return Part(values | {"fitted to": len(fitted[::2]), "judged by": report.examples})

    def jacobian(self, cell: Cell) -> Part:
        """PSNR and asymmetry on the judging crops, and how far estimates of the noise are off."""
        denoiser, level = self.network(cell.row), self.level(cell.row)
        x = self.crops(cell.row, self.judge)
        x_t = add_noise(x, level, generator=self.streams(len(x), "noise"))
        with torch.no_grad():
            near = psnr(denoiser(x_t, level), x).tolist()
        some = x_t[: self.settings.krylov_crops]
        at = linearised(denoiser, some, level, symmetric=False)
        v = signs((len(some), 2, some[0].numel()), some, self.streams(len(some), "asymmetry"))
        v = v.transpose(0, 1).reshape(-1, *some.shape)
        pulled, both = at.pull(v), at.symmetric(v)  # v' J, (J + J') v / 2
        values: dict[str, Any] = {"psnr": near, "sigma": NETWORKS[cell.row].sigma}
        values["asymmetry"] = ((pulled - both).norm() / both.norm()).item()
        guesses = {"patches": estimated_noise(x_t, Mask(torch.ones_like(x_t[0])))}
        if getattr(denoiser, "blind", False):
            streams = self.streams(len(x), "trace")
            guesses["blind"] = blind_sigma(denoiser, x_t, generator=streams)
        for name, sigma in guesses.items():
            values[f"{name} off"] = 100 * (sigma / level.sigma - 1).square().mean().sqrt().item()
        return Part(values)

    def stored(self, cell: Cell) -> Part:
        """Relative differences from the Jacobian of the noise that the authors kept, I - J."""
        folder = self.files[STORED].parents[3]
        kept, x_t, mean = (
            torch.from_numpy(numpy.load(found, allow_pickle=False)).double()
            for name in ("Jacobian", "noisy_im", "im_denoised")
            if (found := find(folder, f"{name}_{cell.column}.npy"))
        )
        denoiser: Any = load_blind(self.files[STORED])
        denoiser.network.double()
        image = x_t.reshape(1, 1, *x_t.shape[-2:])
        at = linearised(denoiser, image, NoiseLevel(sigma=cell.column / 255), symmetric=False)
        count = self.settings.vectors
        v = signs((count, *image.shape), image, self.streams(count, "vectors"))
        pulled, both = at.pull(v), at.symmetric(v)
        rows = v.flatten(1)
        theirs = {"v'J": rows - rows @ kept, "Jv": rows - rows @ kept.T}
        ours = {"v'J": pulled.flatten(1), "Jv": (2 * both - pulled).flatten(1)}
        values = {key: _apart(ours[key], theirs[key]) for key in ours}
        values["mean"] = _apart(at.mean.flatten(), mean.flatten())
        known = torch.eye(len(kept)) - kept
        values["asymmetry"] = ((known - known.T).norm() / (known + known.T).norm()).item()
        return Part(values)


def _apart(x: Tensor, y: Tensor) -> float:
    return ((x - y).norm() / y.norm()).item()


def _section(
    settings: DenoiserSettings,
    absent: list[str],
    jacobians: Results,
    stored: Results,
    judged: Results,
) -> Section:
    text = [
        f"Crops of {settings.side} x {settings.side} pixels. Low rank is fitted to and judged by "
        f"{settings.low_rank_crops} crops, Krylov of {settings.krylov_steps} steps by "
        f"{settings.krylov_crops}, the others by all of both halves.",
        *([f"Left out, since their files are not there: {'; '.join(absent)}."] if absent else []),
    ]
    shown = [
        Measure("sigma", "sigma"), Measure("psnr", "PSNR, dB", 2),
        Measure("asymmetry", "asymmetry", 3), Measure("blind off", "blind_sigma off by, %", 1),
        Measure("patches off", "patches off by, %", 1),
    ]  # fmt: skip
    tables = [jacobians.table("Jacobians", shown, head="network", columns={"J": ""})]
    keys = ("v'J", "Jv", "mean", "asymmetry")
    if stored.parts:
        measures = [Measure(key, key, 5) for key in keys]
        tables.append(stored.listing(f"Products against the stored Jacobians: {STORED}", measures))
    for key in MEASURES:
        both = [
            Measure(f"{key}, {words}", words, 1 if key == COVERAGE else 2)
            for words in (COMES, FITTED)
        ]
        tables.append(judged.table(f"{key[0].upper()}{key[1:]}", both, head="network"))
    caption = "Coverage of 90% intervals: hollow as they come, filled calibrated."
    figures = [Figure("denoisers", caption, _draw(judged))]
    return Section("Denoisers of others", text, tables, figures, _claims(judged))


def _draw(judged: Results) -> Any:
    """A row for each network, a panel for each covariance."""
    kinds = [kind for kind in KINDS if kind in judged.columns]
    canvas, axes = new_figure(1, len(kinds), inches=(2.2 * len(kinds) + 2.4, 4.0))
    keys = [f"{COVERAGE}, {words}" for words in (COMES, FITTED)]
    every = [part.values[key] for part in judged.parts.values() for key in keys]
    for panel, kind in zip(axes[0], kinds, strict=True):
        for place, row in enumerate(reversed(judged.rows)):
            if not judged.has(row, kind):
                continue
            ends = [judged.values(row, kind)[key] for key in keys]
            panel.plot(ends, [place, place], color="0.8", linewidth=1.5, zorder=1)
            panel.scatter(ends, [place, place], 22, ["white", "C0"], edgecolors="C0", zorder=2)
        panel.axvline(90, color="0.5", linewidth=0.8, linestyle="--")
        first = panel is axes[0][0]
        panel.set_yticks(range(len(judged.rows)), judged.rows[::-1] if first else [])
        panel.set(ylim=(-0.6, len(judged.rows) - 0.4), xlim=(min(every) - 1, max(every) + 1))
        labelled(panel, kind, "coverage, %", "", 9)
    return canvas


def _claims(judged: Results) -> list[Claim]:
    near, low, high = WITHIN
    verdicts, said = [], []
    for (row, kind), part in judged.parts.items():
        if kind == KRYLOV:
            continue
        z, held = (part.values[f"{key}, {FITTED}"] for key in (Z, COVERAGE))
        verdicts.append(low <= z <= high and abs(held / 100 - 0.9) <= near)
        if not verdicts[-1]:
            said.append(f"{row}, {kind}: {z:.2f}, {held:.1f}%")
    text = f"calibrated z variance is {low} to {high}, and coverage of 90% intervals 88 to 92%"
    return [Claim.of_all(text, verdicts, said or ["all"])]

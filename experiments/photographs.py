"""The denoiser of photographs beside FFDNet: PSNR, calibration, and where its error lies,
on a folder of images (--data-dir).

    python -m experiments photographs --data-dir photos/val --ffdnet ffdnet_color.pth

    PSNR         of both networks on whole images with the same noise, which is not clipped; means
                 are clipped for both
    calibration  z variance and coverage of 90% intervals of posteriors with the calibration kept
                 with the model, on the second half of the images by name: it was fitted on others
    map          of each image, whether pixels of large variance are those of large error: their
                 correlation, and the mean square error that is left without the most uncertain

Sigma is in 255ths of [0, 1]. Without FFDNet's file (ffdnet.py) its columns are left out.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor
from torch.nn import functional

from experiments.drawing import image_rows, line_style
from experiments.experiment import Context
from experiments.ffdnet import FFDNet, load_ffdnet
from experiments.grid import Cell, Grid, Measure, Results, axis
from mmdgs.covariances import Diagonal, Estimated, Isotropic, Spectral
from mmdgs.data import spread, to_uint8
from mmdgs.data.single import named_images
from mmdgs.errors import UsageError
from mmdgs.metrics import psnr
from mmdgs.metrics.reports import COVERED, standardised
from mmdgs.models import Model, load
from mmdgs.moments import DiagonalMoments, Moments
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.randomness import Streams, child_seed
from mmdgs.report.drawing import labelled, new_figure
from mmdgs.report.page import Claim, Figure, Outcome, Section
from mmdgs.tables import Table
from mmdgs.workspace import Part

PHOTO, FFDNET, PROBES = "photo", "FFDNet", 3
POSTERIORS: dict[str, Estimated] = {
    "diagonal, as it comes": Diagonal(PROBES, calibrated=False),
    "diagonal": Diagonal(PROBES),
    "spectral": Spectral(),
    "isotropic": Isotropic(),
}
OURS, RANDOM, GRADIENT, ORACLE = "diagonal", "isotropic", "gradient of the mean", "oracle"
JACOBIAN, OWN = "FFDNet's Jacobian", "FFDNet's Jacobian, FFDNet's error"
MAPS = {  # and the look of their curves
    OURS: "full", RANDOM: "data", GRADIENT: "isotropic", JACOBIAN: "spectral", OWN: "second",
    ORACLE: "exact",
}  # fmt: skip
SMOOTH = 5  # pixels a side, over which squares of the gradient are averaged
SHARES, ASIDE = tuple(i / 20 for i in range(20)), (0.1, 0.3, 0.5)
AT_ONCE = {"cuda": 8, "cpu": 1}

PSNR = Measure("psnr", "PSNR, dB", 2, "more")
GAIN = Measure("gain", "PSNR above FFDNet's, dB", 2, "more")
Z = Measure("z_variance", "z variance", 2)
COVERAGE = Measure("coverage_90", "coverage of 90% intervals", 1, percent=True)
CORRELATION = Measure("correlation", "correlation with the squared error", 2, "more")
LEFT = [Measure(f"left_{100 * s:.0f}", f"error left without {s:.0%}", 3, "less") for s in ASIDE]
AIM, AIM_AT = 0.45, (15, 25, 50)  # dB above FFDNet
Z_AIM, COVERAGE_AIM = (0.85, 1.15), (0.88, 0.92)


@dataclass(frozen=True)
class PhotographSettings:
    """Images in all, of which the second half judges posteriors, and levels."""

    images: int = 100
    side: int | None = None  # of squares cut from the centres; None: whole images
    sigmas: tuple[int, ...] = axis((5, 15, 25, 50, 75, 128, 255))
    judged: tuple[int, ...] = axis((5, 15, 25, 50, 75))
    drawn: int = 25  # the sigma of the figures
    timed: int = 512  # pixels a side


FULL = PhotographSettings()
QUICK = PhotographSettings(images=8, side=96, sigmas=(15, 25, 50), judged=(25,))


def run(context: Context) -> Outcome:
    """Both networks on the photographs of the context's folder."""
    settings = context.sized(FULL, QUICK)
    model = load(context.model or PHOTO, device=context.device)
    first, second = photographs(context.data_dir, settings.images, settings.side)
    ffdnet = None if context.ffdnet is None else load_ffdnet(context.ffdnet, context.device)
    work = _Work(context, model, ffdnet, first | second, tuple(second))
    theirs = None if ffdnet is None else ffdnet.state_dict()
    depends = (settings, model, theirs, first, second)

    def grid(name: str, rows: Sequence[str], sigmas: Sequence[int], measure: Any) -> Results:
        cells = {(row, sigma): None for sigma in sigmas for row in rows}
        return Grid(name, cells, measure, depends, across="sigma").run(context)

    networks = [PHOTO] if ffdnet is None else [PHOTO, FFDNET]
    maps = [row for row in MAPS if ffdnet is not None or row not in (JACOBIAN, OWN)]
    every = {
        "psnr": grid("psnr", networks, settings.sigmas, work.quality),
        "posteriors": grid("posteriors", work.kept(), settings.judged, work.calibration),
        "maps": grid("maps", maps, settings.judged, work.map),
    }
    seconds = work.seconds(settings.timed) if context.device.type == "cpu" else {}
    named = asdict(settings) | {"model": model.source, "photographs": len(first | second)}
    records = {name: results.records() for name, results in every.items()}
    records |= {"settings": named, "seconds": seconds}
    left = [cell for results in every.values() for cell in results.open()]
    return Outcome(records, [_section(settings, *every.values(), seconds)], left=left)


def photographs(
    folder: str | None, count: int, side: int | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Colour images by name, spread over both halves of a folder by name: each (3, H, W) in [0, 1],
    whole or a square of so many pixels from the middle.
    """
    if folder is None or not Path(folder).expanduser().is_dir():
        raise UsageError(f"name the folder of photographs with --data-dir, got {folder}")
    every = sorted(named_images([folder]), key=lambda image: image.name)
    halves: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
    for place in spread(len(every), count).tolist():
        image, _ = every[place].in_channels(3, clean=True)
        height, width = image.shape[1:]
        if side is not None:
            if min(height, width) < side:
                size = f"{width} x {height} pixels, less than {side} a side"
                raise UsageError(f"the photograph {every[place].name} has {size}")
            top, start = (height - side) // 2, (width - side) // 2
            image = image[:, top : top + side, start : start + side].clone()
        halves[2 * place >= len(every)][every[place].name] = image
    return halves


def error_left(uncertainty: Tensor, squares: Tensor, shares: Sequence[float]) -> list[float]:
    """The mean of `squares` without each share of the most uncertain, over the mean of all."""
    ordered = squares.flatten()[uncertainty.flatten().argsort()].double()  # the most certain first
    means = ordered.cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    kept = [round((1 - share) * len(ordered)) for share in shares]
    return (means[torch.tensor(kept) - 1] / means[-1]).tolist()


def smoothed_gradient(mean: Tensor) -> Tensor:
    """The squared gradient of images (B, C, H, W), over colours and small windows: (B, H, W)."""
    across, down = torch.gradient(mean, dim=(2, 3))
    squares = across.square() + down.square()
    near = functional.avg_pool2d(squares, SMOOTH, 1, SMOOTH // 2, count_include_pad=False)
    return near.mean(1)


@dataclass(frozen=True, eq=False)
class _Work:
    """The networks, the photographs by name, and what cells measure of them."""

    context: Context
    model: Model
    ffdnet: FFDNet | None
    images: dict[str, Tensor]
    judging: tuple[str, ...]

    def noisy(self, names: Sequence[str], sigma: int) -> Iterator[tuple[list[str], Tensor, Tensor]]:
        """Names, clean and noisy images of one size at a time; the noise depends on the name."""
        by_size: dict[torch.Size, list[str]] = {}
        for name in names:
            by_size.setdefault(self.images[name].shape, []).append(name)
        rows = AT_ONCE[self.context.device.type]
        for alike in by_size.values():
            for some in (alike[first : first + rows] for first in range(0, len(alike), rows)):
                clean = torch.stack([self.images[name] for name in some]).to(self.context.device)
                noise = self.streams(some, f"noise {sigma}")
                yield some, clean, add_noise(clean, NoiseLevel(sigma / 255), generator=noise)

    def streams(self, names: Sequence[str], purpose: str) -> Streams:
        seeds = [child_seed(self.context.seed, name) for name in names]
        return Streams(seeds, len(seeds), purpose=purpose)

    def quality(self, cell: Cell) -> Part:
        """PSNR by image, and of the model's how much it is above FFDNet's."""
        level, values = NoiseLevel(cell.column / 255), {}
        networks = {PHOTO: self.model, FFDNET: self.ffdnet}
        for names, clean, x_t in self.noisy(tuple(self.images), cell.column):
            for row, network in networks.items():
                if network is not None and row in (cell.row, FFDNET):
                    with torch.no_grad():
                        near = psnr(network(x_t, level).clamp(0, 1), clean).tolist()
                    values |= {(row, name): value for name, value in zip(names, near, strict=True)}
        own = [values[cell.row, name] for name in self.images]
        if cell.row == FFDNET or self.ffdnet is None:
            return Part({"psnr": own})
        gains = [value - values[FFDNET, name] for value, name in zip(own, self.images, strict=True)]
        return Part({"psnr": own, "gain": gains})

    @cache  # noqa: B019 - it lives as long as the run
    def moments(self, row: str, height: int, width: int) -> Moments:
        """A posterior for images of a size."""
        return self.model.sized(height, width).posterior(POSTERIORS[row])

    def kept(self) -> list[str]:
        """The posteriors that can be had: those that are fitted only where a fit is kept."""
        rows, size = [], next(iter(self.images.values())).shape[1:]
        for row in POSTERIORS:
            with contextlib.suppress(UsageError):
                self.moments(row, *size)
                rows.append(row)
        return rows

    def posteriors(self, row: str, sigma: int) -> Iterator[tuple[list[str], Tensor, Tensor, Any]]:
        """Names, clean and noisy images of the second half, and their posteriors."""
        for names, clean, x_t in self.noisy(self.judging, sigma):
            moments = self.moments(row, *clean.shape[2:])
            probes = self.streams(names, "probes")
            yield names, clean, x_t, moments(x_t, NoiseLevel(sigma / 255), generator=probes)

    def calibration(self, cell: Cell) -> Part:
        """z variance and coverage by image."""
        values: dict[str, list[float]] = {Z.key: [], COVERAGE.key: []}
        for _, clean, _, q in self.posteriors(cell.row, cell.column):
            z = standardised(clean, q).flatten(1)
            values[Z.key] += z.square().mean(1).tolist()
            values[COVERAGE.key] += (z.abs() <= q.deviations(COVERED)).double().mean(1).tolist()
        return Part(values)

    @lru_cache(maxsize=1)  # noqa: B019 - the rows of one sigma come one after the other
    def evidence(
        self, sigma: int
    ) -> tuple[dict[str, list[tuple[Tensor, Tensor]]], dict[str, Tensor]]:
        """By map, for each image its uncertainty and the squared error, of pixels (H, W); and what
        is drawn of the first image.
        """
        pairs: dict[str, list[tuple[Tensor, Tensor]]] = {row: [] for row in MAPS}
        first: dict[str, Tensor] = {}
        for names, clean, x_t, q in self.posteriors(OURS, sigma):
            variance, squares = q.cov.diagonal().mean(1), (clean - q.mean).square().mean(1)
            chance = torch.rand(squares.shape, generator=torch.Generator().manual_seed(0))
            maps = {OURS: variance, RANDOM: chance.to(squares), ORACLE: squares}
            maps[GRADIENT], errors = smoothed_gradient(q.mean), {}
            if self.ffdnet is not None:
                theirs = DiagonalMoments(self.ffdnet, PROBES)
                probes = self.streams(names, "probes")
                p = theirs(x_t, NoiseLevel(sigma / 255), generator=probes)
                maps[JACOBIAN] = maps[OWN] = p.cov.diagonal().mean(1)
                errors[OWN] = (clean - p.mean).square().mean(1)
            for row, values in maps.items():
                pairs[row] += zip(values, errors.get(row, squares), strict=True)
            std, error = (x[:1].sqrt().expand(3, -1, -1).contiguous() for x in (variance, squares))
            first = first or {"noisy": x_t[0], "mean": q.mean[0], "std": std, "error": error}
        return pairs, first

    def map(self, cell: Cell) -> Part:
        """What a map of uncertainty tells of the error, by image."""
        pairs, first = self.evidence(cell.column)
        curves = [error_left(*pair, SHARES) for pair in pairs[cell.row]]
        both = (torch.stack([x.flatten().double() for x in pair]) for pair in pairs[cell.row])
        values = {CORRELATION.key: [pair.corrcoef()[0, 1].item() for pair in both]}
        for measure, share in zip(LEFT, ASIDE, strict=True):
            values[measure.key] = [curve[SHARES.index(share)] for curve in curves]
        values["curve"] = torch.tensor(curves).mean(0).tolist()
        shown = first if cell.row == OURS else {}
        return Part(values, {name: image.cpu() for name, image in shown.items()})

    def seconds(self, side: int, repeats: int = 3) -> dict[str, float]:
        """Seconds of one mean on this machine: the least of a few, in turn."""
        x, taken = torch.full((1, 3, side, side), 0.5), {}
        networks: dict[str, Callable[..., Tensor] | None] = {PHOTO: self.model, FFDNET: self.ffdnet}
        for name, network in list(networks.items()) * repeats:
            began = time.perf_counter()
            if network is not None:
                with torch.no_grad():
                    network(x, NoiseLevel(0.1))
                taken[name] = min(time.perf_counter() - began, taken.get(name, torch.inf))
        return taken


# --- what is shown


def _section(
    settings: PhotographSettings, quality: Results, posteriors: Results, maps: Results,
    seconds: dict[str, float],
) -> Section:  # fmt: skip
    absent = [row for row in POSTERIORS if row not in posteriors.rows]
    text = [
        "Photographs get noise of a known sigma, in 255ths of [0, 1], and both networks take the "
        "same noisy images. FFDNet was trained for sigma up to 75. Intervals are over images.",
        "Posteriors are judged on the second half of the images by name; their calibration was "
        "fitted on others.",
        *(f"Left out, as no fit is kept with the model: {row}." for row in absent),
        *([] if FFDNET in quality.rows else ["FFDNet is left out: --ffdnet names its file."]),
    ]
    compared = [row for row in maps.rows if row != ORACLE]
    columns = {sigma: f"sigma {sigma}" for sigma in settings.sigmas}
    tables = quality.tables((PSNR, GAIN), columns=columns)
    tables += posteriors.tables((Z, COVERAGE), columns=columns)
    tables += maps.tables((CORRELATION, *LEFT), columns=columns, compared=compared)
    if seconds:
        lines = [[name, f"{taken:.2f}"] for name, taken in seconds.items()]
        title = f"Seconds of one mean of {settings.timed} x {settings.timed} pixels"
        tables.append(Table(title, ["network", "seconds"], lines))
    figures = []
    if FFDNET in quality.rows:
        figures += [quality.curves("photo_gain", GAIN.title, GAIN, log="x", rows={PHOTO: PHOTO})]
    if maps.has(OURS, settings.drawn):
        words = "Mean square error left when the most uncertain pixels of an image are set aside"
        at = f"sigma {settings.drawn}"
        curves = _draw_curves(maps, settings.drawn)
        figures.append(Figure("photo_sparsification", f"{words}, {at}.", curves))
        images = maps.parts[OURS, settings.drawn].tensors
        figures.append(Figure("photo_posterior", f"A photograph at {at}.", _draw_one(images)))
    return Section("Photographs", text, tables, figures, _claims(quality, posteriors))


def _draw_curves(maps: Results, sigma: int) -> Canvas:
    canvas, ((panel,),) = new_figure(1, 1, inches=(5.6, 3.6))
    for row in maps.rows:
        heights = [100 * left for left in maps.values(row, sigma)["curve"]]
        look = line_style(MAPS[row])
        panel.plot([100 * share for share in SHARES], heights, label=row, **look)
    panel.legend(fontsize=7, frameon=False)
    labelled(panel, "", "pixels set aside, %", "mean square error left, %")
    return canvas


def _draw_one(images: dict[str, Tensor]) -> Canvas:
    noisy, mean, std, error = (images[name] for name in ("noisy", "mean", "std", "error"))
    white = 3 * std.mean()
    strips = {
        "noisy, mean": torch.stack([noisy, mean]),
        "standard deviation, error": torch.stack([std, error]) / white,
    }
    return image_rows({title: to_uint8(strip) for title, strip in strips.items()}, tile=3.2)


def _claims(quality: Results, posteriors: Results) -> list[Claim]:
    verdicts: list[bool] = []
    at = [sigma for sigma in AIM_AT if "gain" in quality.values(PHOTO, sigma)]
    gains = [quality.number(PHOTO, sigma, GAIN).value for sigma in at]
    said = [f"{gain:+.2f} dB at {sigma}" for gain, sigma in zip(gains, at, strict=True)]
    text = f"photo is {AIM} dB or more above FFDNet at sigma 15, 25 and 50"
    claims = [Claim.of_all(text, [gain >= AIM for gain in gains], said)]
    said = []
    for row, sigma in (key for key in posteriors.parts if key[0] in ("diagonal", "spectral")):
        z, held = (posteriors.number(row, sigma, measure).value for measure in (Z, COVERAGE))
        within = COVERAGE_AIM[0] <= held <= COVERAGE_AIM[1]
        verdicts.append(Z_AIM[0] <= z <= Z_AIM[1] and within)
        said.append(f"{row} at {sigma}: {z:.2f}, {held:.1%}")
    text = "calibrated z variance is 0.85 to 1.15 and coverage of 90% intervals 88 to 92%"
    return [*claims, Claim.of_all(text, verdicts, said)]

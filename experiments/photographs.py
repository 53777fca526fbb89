"""The denoiser of photographs beside FFDNet: PSNR, calibration, and where its error lies.

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

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure as Canvas
from torch import Tensor
from torch.nn import functional

from experiments.drawing import line_style
from experiments.experiment import Context
from experiments.ffdnet import FFDNet, load_ffdnet
from experiments.grid import Cell, Grid, Measure, Results, axis
from mmdgs.covariances import Diagonal, Estimated, Isotropic, Spectral
from mmdgs.data import spread
from mmdgs.data.single import NamedImage, named_images
from mmdgs.errors import UsageError
from mmdgs.metrics import psnr
from mmdgs.metrics.reports import COVERED, standardised
from mmdgs.models import Model, load
from mmdgs.moments import DiagonalMoments, Moments
from mmdgs.noise import NoiseLevel, add_noise
from mmdgs.randomness import Streams, child_seed
from mmdgs.report.drawing import bare, labelled, new_figure
from mmdgs.report.page import Claim, Figure, Outcome, Section
from mmdgs.tables import Table
from mmdgs.workspace import Part

PHOTO, FFDNET = "photo", "FFDNet"
SHAPE = (3, None, None)
PROBES = 3
PLAIN = "diagonal, as it comes"
POSTERIORS: dict[str, Estimated] = {
    PLAIN: Diagonal(PROBES, calibrated=False),
    "diagonal": Diagonal(PROBES),
    "spectral": Spectral(),
    "isotropic": Isotropic(),
}
OURS, RANDOM, GRADIENT, ORACLE = "diagonal", "isotropic", "gradient of the mean", "oracle"
JACOBIAN, OWN = "FFDNet's Jacobian", "FFDNet's Jacobian, FFDNet's error"
MAPS = (OURS, RANDOM, GRADIENT, JACOBIAN, OWN, ORACLE)
SMOOTH = 5  # pixels a side, over which squares of the gradient are averaged
SHARES = tuple(i / 20 for i in range(20))
ASIDE = (0.1, 0.3, 0.5)
AT_ONCE = {"cuda": 8, "cpu": 1}

PSNR = Measure("psnr", "PSNR, dB", 2, "more")
Z = Measure("z_variance", "z variance", 2)
COVERAGE = Measure("coverage_90", "coverage of 90% intervals", 1, percent=True)
NATS = Measure("nats", "log-likelihood, nats a number", 3, "more")
CORRELATION = Measure("correlation", "correlation with the squared error", 2, "more")
LEFT = [
    Measure(f"left_{round(100 * share)}", f"error left without {100 * share:.0f}%", 3, "less")
    for share in ASIDE
]
GAIN, GAIN_AT = 0.45, (15, 25, 50)  # what the denoiser must reach above FFDNet, in dB
Z_GOOD, COVERAGE_GOOD = (0.85, 1.15), (0.88, 0.92)


@dataclass(frozen=True)
class PhotographSettings:
    """Images in all, of which the second half judges posteriors, and levels."""

    images: int = 100
    side: int | None = None  # of squares cut from the centres; None: whole images
    sigmas: tuple[int, ...] = axis((5, 15, 25, 50, 75, 128, 255))
    judged: tuple[int, ...] = axis((5, 15, 25, 50, 75))
    drawn: int = 25  # the sigma of the figures
    timed: int = 512
    repeats: int = 3


FULL = PhotographSettings()
QUICK = PhotographSettings(
    images=8, side=96, sigmas=(15, 25, 50), judged=(25,), timed=256, repeats=1
)


def run(context: Context) -> Outcome:
    """Both networks on the photographs of the context's folder."""
    settings = context.sized(FULL, QUICK)
    model = load(context.model or PHOTO, device=context.device)
    if model.shape != SHAPE:
        raise UsageError(f"{model.source} is no denoiser of colour images of any size")
    images, second = photographs(context.data_dir, settings)
    ffdnet = None if context.ffdnet is None else load_ffdnet(context.ffdnet, context.device)
    work = _Work(context, settings, model, ffdnet, images, second)
    networks = (PHOTO,) if ffdnet is None else (PHOTO, FFDNET)
    theirs = None if ffdnet is None else ffdnet.state_dict()
    depends = (settings, model, theirs, [image.image for image in images])

    def grid(name: str, rows: Sequence[str], sigmas: Sequence[int], measure: Any) -> Results:
        cells = {(row, sigma): None for sigma in sigmas for row in rows}
        return Grid(name, cells, measure, depends, across="sigma").run(context)

    absent = work.absent()
    maps = [row for row in MAPS if ffdnet is not None or row not in (JACOBIAN, OWN)]
    quality = grid("psnr", networks, settings.sigmas, work.quality)
    rows = [row for row in POSTERIORS if row not in absent]
    posteriors = grid("posteriors", rows, settings.judged, work.calibration)
    errors = grid("maps", maps, settings.judged, work.map)
    timed = work.times() if context.device.type == "cpu" else {}
    named = asdict(settings) | {"model": model.source, "photographs": len(images)}
    every = {"psnr": quality, "posteriors": posteriors, "maps": errors}
    records = {name: results.records() for name, results in every.items()}
    records |= {"settings": named, "absent": absent, "seconds": timed}
    left = [cell for results in every.values() for cell in results.open()]
    section = _section(settings, quality, posteriors, errors, timed, absent)
    return Outcome(records, [section], left=left)


def photographs(folder: str | None, settings: PhotographSettings) -> tuple[list[NamedImage], range]:
    """Images spread over a folder by name, and which of them lie in its second half."""
    if folder is None or not Path(folder).expanduser().is_dir():
        raise UsageError(f"name the folder of photographs with --data-dir, got {folder}")
    every = sorted(named_images([folder]), key=lambda image: image.name)
    places = spread(len(every), settings.images).tolist()
    chosen = [
        NamedImage(every[place].name, _centre(every[place], settings.side)) for place in places
    ]
    return chosen, range(sum(2 * place < len(every) for place in places), len(places))


def _centre(photograph: NamedImage, side: int | None) -> Tensor:
    """A square of so many pixels from the middle (None: the whole), in three colours."""
    image, _ = photograph.in_channels(3, clean=True)
    if side is None:
        return image
    top, left = ((length - side) // 2 for length in image.shape[1:])
    if top < 0 or left < 0:
        size = f"{image.shape[2]} x {image.shape[1]} pixels"
        raise UsageError(f"the photograph {photograph.name} has {size}: less than {side} a side")
    return image[:, top : top + side, left : left + side]


def error_left(uncertainty: Tensor, squares: Tensor, shares: Sequence[float]) -> list[float]:
    """The mean of `squares` without each share of the most uncertain, over the mean of all."""
    ordered = squares.flatten()[uncertainty.flatten().argsort(descending=True)].double()
    left = functional.pad(ordered.flip(0).cumsum(0), (1, 0)).flip(0)  # of all but the first k
    count = len(ordered)
    places = [round(share * count) for share in shares]
    return [(left[k] / left[0] * count / (count - k)).item() for k in places]


def correlation(a: Tensor, b: Tensor) -> float:
    """Pearson's correlation of two maps; 0 where one is constant."""
    both = torch.stack([a.flatten(), b.flatten()]).double()
    return both.corrcoef()[0, 1].nan_to_num(0.0).item()


@dataclass(frozen=True, eq=False)
class _Work:
    """The networks, the photographs, and what cells measure of them."""

    context: Context
    settings: PhotographSettings
    model: Model
    ffdnet: FFDNet | None
    images: list[NamedImage]
    second: range

    def noisy(self, which: Sequence[int], sigma: int) -> Iterator[tuple[list[int], Tensor, Tensor]]:
        """Numbers, clean and noisy images of one size at a time."""
        sizes: dict[torch.Size, list[int]] = {}
        for i in which:
            sizes.setdefault(self.images[i].image.shape, []).append(i)
        rows = AT_ONCE.get(self.context.device.type, 1)
        for numbers in sizes.values():
            for first in range(0, len(numbers), rows):
                some = numbers[first : first + rows]
                clean = torch.stack([self.images[i].image for i in some]).to(self.context.device)
                noise = self._streams(some, f"noise {sigma}")
                yield some, clean, add_noise(clean, NoiseLevel(sigma / 255), generator=noise)

    def _streams(self, numbers: Sequence[int], purpose: str) -> Streams:
        seeds = [child_seed(self.context.seed, self.images[i].name) for i in numbers]
        return Streams(seeds, len(numbers), purpose=purpose)

    @cache  # noqa: B019 - it lives as long as the run
    def moments(self, row: str, height: int, width: int) -> Moments:
        """A posterior for images of a size."""
        return self.model.sized(height, width).posterior(POSTERIORS[row])

    def absent(self) -> dict[str, str]:
        """The posteriors that nothing is kept for with the model, and why."""
        missing = {}
        for row in POSTERIORS:
            try:
                self.moments(row, *self.images[0].image.shape[1:])
            except UsageError as error:
                missing[row] = str(error)
        return missing

    def quality(self, cell: Cell) -> Part:
        """PSNR by image."""
        network = self.model if cell.row == PHOTO else self.ffdnet
        assert network is not None
        values: dict[int, float] = {}
        for numbers, clean, x_t in self.noisy(range(len(self.images)), cell.column):
            with torch.no_grad():
                mean = network(x_t, NoiseLevel(cell.column / 255)).clamp(0, 1)
            values |= zip(numbers, psnr(mean, clean).tolist(), strict=True)
        return Part({"psnr": [values[i] for i in sorted(values)]})

    def calibration(self, cell: Cell) -> Part:
        """z variance, coverage and likelihood by image."""
        values: dict[str, list[float]] = {measure.key: [] for measure in (Z, COVERAGE, NATS)}
        for numbers, clean, x_t in self.noisy(self.second, cell.column):
            moments = self.moments(cell.row, *clean.shape[2:])
            q = moments(x_t, NoiseLevel(cell.column / 255), generator=self._probes(numbers))
            z, size = standardised(clean, q), clean[0].numel()
            values["z_variance"] += z.square().flatten(1).mean(1).tolist()
            inside = (z.abs() <= q.deviations(COVERED)).double()
            values["coverage_90"] += inside.flatten(1).mean(1).tolist()
            values["nats"] += (q.log_prob(clean) / size).tolist()
        return Part(values)

    def _probes(self, numbers: Sequence[int]) -> Streams:
        return self._streams(numbers, "probes")

    @lru_cache(maxsize=1)  # noqa: B019 - the rows of one sigma come one after the other
    def evidence(self, sigma: int) -> tuple[dict[str, list[tuple[Tensor, Tensor]]], dict[str, Any]]:
        """By map, for each image its uncertainty and the squared error, of pixels (H, W); and what
        the figure of the first image shows.
        """
        level = NoiseLevel(sigma / 255)
        pairs: dict[str, list[tuple[Tensor, Tensor]]] = {row: [] for row in MAPS}
        shown: dict[str, Tensor] = {}
        for numbers, clean, x_t in self.noisy(self.second, sigma):
            moments = self.moments(OURS, *clean.shape[2:])
            q = moments(x_t, level, generator=self._probes(numbers))
            variance, squares = q.cov.diagonal().mean(1), (clean - q.mean).square().mean(1)
            chance = torch.rand(squares.shape, generator=torch.Generator().manual_seed(numbers[0]))
            maps = {OURS: variance, RANDOM: chance.to(squares), ORACLE: squares}
            maps[GRADIENT] = smoothed_gradient(q.mean)
            errors = dict.fromkeys(maps, squares)
            if self.ffdnet is not None:
                theirs = DiagonalMoments(self.ffdnet, PROBES)
                p = theirs(x_t, level, generator=self._probes(numbers))
                maps[JACOBIAN] = maps[OWN] = p.cov.diagonal().mean(1)
                errors |= {JACOBIAN: squares, OWN: (clean - p.mean).square().mean(1)}
            for row, values in maps.items():
                pairs[row] += zip(values, errors[row], strict=True)
            if not shown:
                shown = {"noisy": x_t[0], "mean": q.mean[0], "std": variance[0].sqrt()}
                shown["error"] = squares[0].sqrt()
        return pairs, shown

    def map(self, cell: Cell) -> Part:
        """What a map of uncertainty tells of the error, by image."""
        evidence, shown = self.evidence(cell.column)
        pairs = evidence[cell.row]
        curves = [error_left(*pair, SHARES) for pair in pairs]
        values: dict[str, Any] = {CORRELATION.key: [correlation(*pair) for pair in pairs]}
        for measure, share in zip(LEFT, ASIDE, strict=True):
            values[measure.key] = [curve[SHARES.index(share)] for curve in curves]
        values["curve"] = torch.tensor(curves).mean(0).tolist()
        drawn = cell.row == OURS and cell.column == self.settings.drawn
        return Part(values, {name: x.cpu() for name, x in shown.items()} if drawn else {})

    def times(self) -> dict[str, float]:
        """Seconds of one mean on this machine, the least of a few runs in turn."""
        x = torch.rand(1, 3, self.settings.timed, self.settings.timed)
        level, least = NoiseLevel(0.1), {}
        for _ in range(self.settings.repeats):
            for name, network in ((PHOTO, self.model), (FFDNET, self.ffdnet)):
                if network is not None:
                    began = time.perf_counter()
                    with torch.no_grad():
                        network(x, level)
                    taken = time.perf_counter() - began
                    least[name] = min(taken, least.get(name, taken))
        return least


def smoothed_gradient(mean: Tensor) -> Tensor:
    """The squared gradient of images (B, C, H, W), over colours and small windows: (B, H, W)."""
    squares = sum(part.square() for part in torch.gradient(mean, dim=(2, 3)))
    assert isinstance(squares, Tensor)
    near = functional.avg_pool2d(squares, SMOOTH, 1, SMOOTH // 2, count_include_pad=False)
    return near.mean(1)


# --- what is shown


def _section(
    settings: PhotographSettings, quality: Results, posteriors: Results, maps: Results,
    timed: dict[str, float], absent: dict[str, str],
) -> Section:  # fmt: skip
    text = [
        "Photographs get noise of a known sigma, in 255ths of [0, 1], and both networks take the "
        "same noisy images. FFDNet was trained for sigma up to 75.",
        "Intervals are over images. Posteriors are judged on the second half of the images by "
        "name; their calibration was fitted on others.",
        *(f"Left out: {row} ({reason})." for row, reason in absent.items()),
        *([] if FFDNET in quality.rows else ["FFDNet is left out: --ffdnet names its file."]),
    ]
    by_sigma = {sigma: f"sigma {sigma}" for sigma in quality.columns}
    judged = {sigma: f"sigma {sigma}" for sigma in posteriors.columns}
    compared = quality.table("PSNR of the mean, dB", [PSNR], head="network", columns=by_sigma)
    tables = [compared]
    for measure in (Z, COVERAGE, NATS):
        shown = {"head": "covariance", "columns": judged}
        tables.append(posteriors.table(measure.title.capitalize(), [measure], **shown))
    rows = [row for row in maps.rows if row != ORACLE]
    for measure in (CORRELATION, *LEFT):
        title = f"The map: {measure.title}"
        shown = {"head": "map", "columns": judged, "compared": rows}
        tables.append(maps.table(title, [measure], **shown))
    if timed:
        lines = [[name, f"{seconds:.2f}"] for name, seconds in timed.items()]
        if FFDNET in timed:
            lines.append(["ratio", f"{timed[PHOTO] / timed[FFDNET]:.1f}"])
        title = f"Seconds of one mean, {settings.timed} x {settings.timed} pixels"
        tables.append(Table(title, ["network", "seconds"], lines))
    figures = []
    if FFDNET in quality.rows:
        figures.append(Figure("photo_gain", "PSNR above FFDNet's.", _draw_gain(quality)))
    if maps.has(OURS, settings.drawn):
        words = (
            f"Mean square error of what is left when the most uncertain pixels of each image are "
            f"set aside, sigma {settings.drawn}."
        )
        figures.append(Figure("photo_sparsification", words, _draw_curves(maps, settings.drawn)))
        words = f"One photograph at sigma {settings.drawn}."
        parts = maps.parts[OURS, settings.drawn].tensors
        figures.append(Figure("photo_posterior", words, _draw_one(parts)))
    claims = [_gain_claim(quality), _calibration_claim(posteriors)]
    return Section("Photographs", text, tables, figures, claims)


def _draw_gain(quality: Results) -> Canvas:
    canvas, axes = new_figure(1, 1, inches=(4.6, 3.2))
    panel, shared = axes[0][0], [s for s in quality.columns if quality.has(FFDNET, s)]
    gains = [quality.number(PHOTO, sigma, PSNR, FFDNET) for sigma in shared]
    panel.errorbar(shared, *zip(*gains, strict=True), capsize=2, **line_style("full"))
    panel.axhline(0, color="black", linewidth=0.8)
    panel.set_xscale("log")
    panel.set_xticks(shared, [f"{sigma}" for sigma in shared], minor=False)
    panel.minorticks_off()
    labelled(panel, "", "sigma, of 255", "PSNR above FFDNet's, dB")
    return canvas


def _draw_curves(maps: Results, sigma: int) -> Canvas:
    names = ("full", "data", "isotropic", "spectral", "second", "exact")
    looks = dict(zip(MAPS, names, strict=True))
    canvas, axes = new_figure(1, 1, inches=(5.6, 3.6))
    panel = axes[0][0]
    for row in maps.rows:
        curve = maps.values(row, sigma)["curve"]
        panel.plot([100 * s for s in SHARES], curve, label=row, **line_style(looks[row]))
    panel.legend(fontsize=7, frameon=False)
    labelled(panel, "", "pixels set aside, %", "mean square error left, of that of all")
    return canvas


def _draw_one(parts: dict[str, Tensor]) -> Canvas:
    canvas, axes = new_figure(2, 2, inches=(7.2, 5.2))
    white = 3 * parts["std"].mean().item()
    titles = {"noisy": "noisy", "mean": "mean", "std": "standard deviation", "error": "error"}
    for panel, (name, title) in zip((p for row in axes for p in row), titles.items(), strict=True):
        image = parts[name]
        if image.ndim == 3:
            panel.imshow(image.clamp(0, 1).movedim(0, -1).numpy(), interpolation="nearest")
        else:
            panel.imshow(image.numpy(), cmap="magma", vmin=0, vmax=white, interpolation="nearest")
        bare(panel, title)
    return canvas


def _gain_claim(quality: Results) -> Claim:
    shared = [s for s in GAIN_AT if quality.has(PHOTO, s) and quality.has(FFDNET, s)]
    gains = [quality.number(PHOTO, sigma, PSNR, FFDNET).value for sigma in shared]
    said = [f"{gain:+.2f} dB at {sigma}" for gain, sigma in zip(gains, shared, strict=True)]
    text = f"photo is {GAIN} dB or more above FFDNet at sigma {', '.join(map(str, GAIN_AT))}"
    return Claim.of_all(text, [gain >= GAIN for gain in gains], said)


def _calibration_claim(posteriors: Results) -> Claim:
    verdicts: list[bool | None] = []
    said = []
    for row in (row for row in posteriors.rows if row in ("diagonal", "spectral")):
        for sigma in posteriors.columns:
            z, held = (posteriors.number(row, sigma, m).value for m in (Z, COVERAGE))
            verdicts.append(
                Z_GOOD[0] <= z <= Z_GOOD[1] and COVERAGE_GOOD[0] <= held <= COVERAGE_GOOD[1]
            )
            said.append(f"{row} at {sigma}: {z:.2f}, {100 * held:.1f}%")
    text = "calibrated z variance is 0.85 to 1.15 and coverage of 90% intervals 0.88 to 0.92"
    return Claim.of_all(text, verdicts, said)

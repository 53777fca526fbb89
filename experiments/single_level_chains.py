"""Chains at one noise level, from the authors' code to ours step by step: what turns them black.

    python -m experiments single-level-chains --data-dir FOLDER

The authors' sampler (generation.py of zmtomorrow/MMDGS_NeurIPS, read for what it does): from
init_mu + init_std N(0, I), noise, the score network's mean, 10 Rademacher probes for the diagonal
of its Jacobian, negative variances set to 0, a draw; nothing is clipped but what is saved, draws or
means. The values of init_mu and init_std, and whether data were scaled to [-1, 1] (an option), are
not published. Each row changes one thing. Measured are the means of the posteriors.

`Chains` are also what `cifar10` runs: kept at some steps, in blocks that a stopped run reuses. A
step draws from a posterior. Kept are the draws and the means they were drawn around: a mean has
none of the noise that the covariance puts into an image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.drawing import image_rows
from experiments.experiment import Context
from experiments.grid import Cell, Grid, Measure, Results, axis
from experiments.sampler_cells import References, SamplingSettings
from experiments.small_models import model_of
from mmdgs.covariances import named
from mmdgs.data import spread, to_uint8
from mmdgs.denoisers import Denoiser
from mmdgs.models import Model, load
from mmdgs.moments import FLOOR, Moments
from mmdgs.noise import NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator, Streams, randn, uniforms
from mmdgs.report.page import Claim, Figure, Outcome, Section
from mmdgs.samplers import Info, State, single_level_plan
from mmdgs.sampling import generate
from mmdgs.workspace import Part

DRAWS, MEANS = "draws", "means"


class ChainKind(NamedTuple):
    """The covariance that chains draw with, what they start from, probes other than those of the
    settings, the floor of variances in sigma^2, and the level and network if they are others.
    """

    covariance: str
    start: str
    probes: int | None = None
    floor: float = FLOOR
    sigma: float | None = None
    network: str | None = None


FROM_NORMAL, DIAGONAL = "diagonal, from N(0, I)", "diagonal"
ISOTROPIC, SPECTRAL = "isotropic", "spectral"
TEN_SIGNS, SPECTRAL_NORMAL = "diagonal, 10 Rademacher, from N(0, I)", "spectral, from N(0, I)"
ROWS = {
    TEN_SIGNS: ChainKind("rademacher", "normal", probes=10),
    FROM_NORMAL: ChainKind("diagonal", "normal"),
    SPECTRAL_NORMAL: ChainKind("spectral", "normal"),
    DIAGONAL: ChainKind("diagonal", "uniform"),
    ISOTROPIC: ChainKind("isotropic", "uniform"),
    SPECTRAL: ChainKind("spectral", "uniform"),
}
"""The paper's own (its section 2.1 starts from a standard normal, its experiment has ten probes),
the same with fewer and better probes and with a spectrum, and others from uniform noise in the
data's interval: for images in [0, 1] a standard normal is darker than any of them."""


STARTS = {
    "normal": (randn, 0.0, 1.0),
    "grey": (randn, 0.5, 1.0),
    "half": (randn, 0.5, 0.5),
    "uniform": (uniforms, 0.0, 1.0),
}
"""Random numbers, what they are multiplied by and added to, for images in [0, 1]. A standard normal
for data in [-1, 1] is "half"."""
DATA, MODEL, MANY, SIGMA = "cifar10", "cifar10-score", "cifar10", 0.3
AUTHORS, LATTICE, GREY, HALF, UNIFORM, OTHER, SCALED, FREE = (
    "authors' code, from N(0, I)", "3 lattice probes, floor 1e-6", "from N(1/2, I)",
    "from N(1/2, I/4)", "from uniform noise", "network of many levels, from N(0, I)",
    "the same, data in [-1, 1], from N(0, I)", "spectral covariance, from N(0, I)",
)  # fmt: skip
SWITCHES = {
    AUTHORS: ChainKind("rademacher", "normal", 10, floor=0.0),
    LATTICE: ChainKind("diagonal", "normal"),
    GREY: ChainKind("diagonal", "grey"),
    HALF: ChainKind("diagonal", "half"),
    UNIFORM: ChainKind("diagonal", "uniform"),
    OTHER: ChainKind("diagonal", "normal", network=MANY),
    SCALED: ChainKind("diagonal", "half", sigma=SIGMA / 2, network=MANY),
    FREE: ChainKind("spectral", "normal"),
}
"""From the authors' code to ours. Sigma 0.3 of data in [-1, 1] is 0.15 of them in [0, 1]."""


@dataclass(eq=False)
class NotedMoments:
    """Moments that hold the mean of their last call."""

    moments: Moments
    mean: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def denoiser(self) -> Denoiser:
        return self.moments.denoiser

    def __call__(
        self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None
    ) -> Gaussian:
        q = self.moments(x_t, level, generator=generator)
        self.mean = q.mean
        return q


@dataclass(frozen=True, eq=False)
class Chains:
    """Gibbs chains of a model at its level, in blocks that are parts of the workspace. Block i has
    the seed plus i.
    """

    context: Context
    model: Model
    references: References
    settings: SamplingSettings
    probes: int  # of the diagonal covariance
    block: int  # chains that are one part
    rows: Mapping[str, ChainKind] = field(default_factory=lambda: ROWS)

    @property
    def depends(self) -> dict[str, object]:
        """What chains depend on, besides their row and their number."""
        known, seed = self.settings, self.context.seed
        fit = {"fit_images": known.fit_images, "precision": known.precision, "seed": seed}
        return {"model": self.model, "probes": self.probes, **fit}

    def states(self, row: str, chains: int, keep: tuple[int, ...]) -> dict[str, Tensor]:
        """Draws and means of so many chains after these steps (0: the start as both), uint8 (kept,
        chains, ...).
        """
        blocks = []
        for i, first in enumerate(range(0, chains, self.block)):
            count, seed = min(self.block, chains - first), self.context.seed + i
            depends = (self.depends, row, count, keep, seed)

            def compute(count: int = count, seed: int = seed) -> Part:
                self.context.check_time()
                return Part({}, self._run(row, count, keep, seed))

            part = self.context.workspace.part(f"chains-{row}-{keep[-1]}-{i}", depends, compute)
            blocks.append(part.tensors)
        return {kind: torch.cat([block[kind] for block in blocks], 1) for kind in (DRAWS, MEANS)}

    def _run(self, row: str, count: int, keep: Sequence[int], seed: int) -> dict[str, Tensor]:
        kind = self.rows[row]
        noted = NotedMoments(self._moments(kind))
        level = self.model.levels[0] if kind.sigma is None else NoiseLevel(sigma=kind.sigma)
        plan = single_level_plan(noted, level, steps=keep[-1])
        means: dict[tuple[int, int], Tensor] = {}  # by step, and the first chain of the batch

        def start(chains: int, first: int) -> Tensor:
            draw, middle, spread = STARTS[kind.start]
            streams = Streams(seed, chains, first, purpose="start")
            noise = draw((chains, *self.model.shape), torch.empty(0), streams)
            return self.model.scaled(middle + spread * noise)

        def note(step: int, state: State, info: Info, first: int) -> None:
            if step + 1 in keep:
                means[step + 1, first] = self.stored(noted.mean)

        samples = generate(
            self.model, plan, count, keep=keep, seed=seed, start=start, callback=note,
            batch_size=self.settings.batch_size, precision=self.settings.precision,
            fast=False if self.context.quick else None, progress=f"{row}, {keep[-1]} steps",
        )  # fmt: skip
        assert samples.states is not None, "states were asked for"
        draws = to_uint8(samples.states.clamp(0, 1))
        firsts = sorted({first for _, first in means})
        kept = [
            torch.cat([means[step, first] for first in firsts]) if step else draws[0]
            for step in keep
        ]
        return {DRAWS: draws, MEANS: torch.stack(kept)}

    def stored(self, x: Tensor) -> Tensor:
        """States as images, uint8."""
        low, high = self.model.interval
        return to_uint8(((x.float() - low) / (high - low)).clamp(0, 1)).cpu()

    def _moments(self, kind: ChainKind) -> Moments:
        if kind.covariance in ("diagonal", "rademacher"):
            options = {"probes": kind.probes or self.probes, "floor": kind.floor}
            return self.model.posterior(named(kind.covariance, options))
        count = self.settings.fit_images  # none: what is kept with the model
        data = self.references.fit_data(count) if count else None
        return self.model.posterior(named(kind.covariance, {"calibrated": False}), data=data)


# --- from the authors' code to ours


@dataclass(frozen=True)
class SwitchSettings(SamplingSettings):
    """Chains, the steps that are looked at, and the data that they are near to."""

    images: int = 3
    fit_images: int = 0
    precision: str = "float32"
    steps: tuple[int, ...] = (1, 2, 5, 10, 20)
    rows: tuple[str, ...] = axis(tuple(SWITCHES))
    data: int | None = 5_000


FULL = SwitchSettings()
QUICK = SwitchSettings(images=2, steps=(1, 3), rows=(AUTHORS, LATTICE, GREY), data=200)
BLACK, DARK = 16, 0.2
"""Values of 255 below which a pixel is black, and a mean brightness below which chains are."""
BRIGHTNESS = Measure("brightness", "brightness, of [0, 1]", 2)
BLACKNESS = Measure("black", "black pixels", 0, percent=True)
CONTRAST = Measure("contrast", "standard deviation inside an image", 2)
NEAREST = Measure("nearest", "distance from the nearest image, root mean square", 2)
SHOWN = (BRIGHTNESS, BLACKNESS, CONTRAST, NEAREST)


def run(context: Context) -> Outcome:
    """Chains of each row, and what their means are like after some steps."""
    settings = context.sized(FULL, QUICK)
    data = {"data": DATA, "data_dir": context.data_dir}
    models: dict[str | None, Model] = {None: model_of(context, MODEL, sigma=SIGMA, **data)}
    rows = {row: SWITCHES[row] for row in settings.rows}
    if any(kind.network for kind in rows.values()):
        models[MANY] = load(MANY, device=context.device)
    references = References(DATA, context.data_dir, models[None].shape[1], settings.data)
    depends = (context, references, settings, 3, settings.images)
    chains = {
        name: Chains(context, model, *depends[1:], rows=rows) for name, model in models.items()
    }
    near = references.load().images.flatten(1).float() / 255
    states = lru_cache(maxsize=1)(
        lambda row: chains[rows[row].network].states(row, settings.images, (0, *settings.steps))
    )

    def measure(cell: Cell) -> Part:
        i = 1 + settings.steps.index(cell.column)
        return Part(
            likeness(states(cell.row)[MEANS][i], near), {"means": states(cell.row)[MEANS][i]}
        )

    cells = {(row, t): rows[row] for row in rows for t in settings.steps}
    on = {str(name): model for name, model in models.items()}
    results = Grid("switches", cells, measure, (settings, on), "Gibbs steps").run(context)
    held_out = references.load("test").images
    test = likeness(held_out[spread(len(held_out), 10 * settings.images)], near)
    records = {"settings": asdict(settings), "switches": results.records(), "test": test}
    return Outcome(records, [_section(results, settings, test)], left=results.open())


def likeness(x: Tensor, near: Tensor) -> dict[str, list[float]]:
    """Of each image uint8 (n, C, H, W): brightness, black pixels, contrast, and how far the nearest
    of others (m, d) in [0, 1] is.
    """
    flat = x.flatten(1).float() / 255
    black = (x.amax(1) < BLACK).flatten(1).float().mean(1)
    nearest = torch.cdist(flat, near).min(1).values / flat.shape[1] ** 0.5
    values = flat.mean(1), black, flat.std(1), nearest
    return {key.key: value.tolist() for key, value in zip(SHOWN, values, strict=True)}


def _section(
    results: Results, settings: SwitchSettings, test: Mapping[str, list[float]]
) -> Section:
    said = "; ".join(f"{measure.title} {measure.text(measure.of(test))}" for measure in SHOWN)
    note = f"{settings.images} chains a row, means. Test images: {said}."
    tables = results.tables(SHOWN, note=note, head="chains")
    strips = {
        row: torch.cat([results.parts[row, t].tensors["means"][:2] for t in settings.steps])
        for row in results.rows
        if all(results.has(row, t) for t in settings.steps)
    }
    titles = [f"{t}" if i == 0 else "" for t in settings.steps for i in range(2)]
    caption = "Means of two chains of each row after so many Gibbs steps."
    pictures = image_rows(strips, titles=titles)
    figures = [Figure("single_level_switches", caption, pictures)]
    last = settings.steps[-1]
    ends = {
        row: results.number(row, last, BRIGHTNESS).value
        for row in results.rows
        if results.has(row, last)
    }
    dark = {row for row, value in ends.items() if value < DARK}
    words = "; ".join(f"{row} {value:.2f}" for row, value in ends.items())
    normal = {row for row in ends if SWITCHES[row].start == "normal" and row != OTHER}
    text = f"chains of {MODEL} are black at the end from N(0, I), and from no start of mean 1/2"
    claim = Claim(f"{text}; those of {MANY} are not", dark == normal, words)
    return Section("From the authors' code to ours", [], tables, figures, [claim])

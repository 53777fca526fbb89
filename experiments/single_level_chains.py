"""Gibbs chains at one noise level, from noise: kept at some steps, in blocks that a stopped run
reuses.

A step draws from a posterior. Kept are the draws and the means they were drawn around: a mean has
none of the noise that the covariance puts into an image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from experiments.experiment import Context
from experiments.sampler_cells import References, SamplingSettings
from mmdgs.covariances import named
from mmdgs.data import to_uint8
from mmdgs.denoisers import Denoiser
from mmdgs.models import Model
from mmdgs.moments import FLOOR, Moments
from mmdgs.noise import NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator, Streams, randn, uniforms
from mmdgs.samplers import Info, State, single_level_plan
from mmdgs.sampling import generate
from mmdgs.workspace import Part

DRAWS, MEANS = "draws", "means"


class ChainKind(NamedTuple):
    """The covariance that chains draw with, what they start from, and probes other than those of
    the settings.
    """

    covariance: str
    start: str
    probes: int | None = None


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
        noted = NotedMoments(self._moments(ROWS[row]))
        plan = single_level_plan(noted, self.model.levels[0], steps=keep[-1])
        means: dict[tuple[int, int], Tensor] = {}  # by step, and the first chain of the batch

        def start(chains: int, first: int) -> Tensor:
            draw = uniforms if ROWS[row].start == "uniform" else randn
            streams = Streams(seed, chains, first, purpose="start")
            return self.model.scaled(draw((chains, *self.model.shape), torch.empty(0), streams))

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
            options = {"probes": kind.probes or self.probes, "floor": FLOOR}
            return self.model.posterior(named(kind.covariance, options))
        data = self.references.fit_data(self.settings.fit_images)
        return self.model.posterior(named(kind.covariance, {"calibrated": False}), data=data)

"""Gibbs chains at one noise level, from noise: kept at some steps, in blocks that a stopped run reuses.

A step draws from a posterior. Kept are the draws and the means they were drawn around, which have none of the noise
that a covariance puts into an image: what is in a draw of a wrong covariance is seen in its mean.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mmdgs.compiled import fast_path
from mmdgs.data import to_uint8
from mmdgs.denoisers import Denoiser
from mmdgs.lab.experiment import Context
from mmdgs.lab.sampler_cells import file_name
from mmdgs.lab.workspace import Part
from mmdgs.models import FitData, Model
from mmdgs.moments import DiagonalMoments, Moments
from mmdgs.noise import NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator, Streams, randn, uniforms
from mmdgs.runtime import autocast, matmul_precision, progress_bar
from mmdgs.samplers import Info, State, run
from mmdgs.samplers.plans import single_level_plan

DATA = "cifar10"
START_SEED = 30
DRAWS, MEANS = "draws", "means"


class Row(NamedTuple):
    """How chains go: the covariance that they draw with, and what they start from."""

    covariance: str
    start: str


PAPERS, DIAGONAL, ISOTROPIC, SPECTRAL = "diagonal, from N(0, I)", "diagonal", "isotropic", "spectral"
ROWS = {
    PAPERS: Row("diagonal", "normal"),
    DIAGONAL: Row("diagonal", "uniform"),
    ISOTROPIC: Row("isotropic", "uniform"),
    SPECTRAL: Row("spectral", "uniform"),
}
"""The paper's own (its section 2.1 starts from a standard normal), and others from uniform noise in the data's
interval: for images in [0, 1] a standard normal is darker than any of them."""


@dataclass(eq=False)
class _Noted:
    """Moments that note the mean of the last posterior."""

    moments: Moments
    mean: Tensor | None = None

    @property
    def denoiser(self) -> Denoiser:
        return self.moments.denoiser

    def __call__(self, x_t: Tensor, level: NoiseLevel, *, generator: Generator | None = None) -> Gaussian:
        q = self.moments(x_t, level, generator=generator)
        self.mean = q.mean
        return q


@dataclass(frozen=True, eq=False)
class Chains:
    """Gibbs chains of a model at its level, in blocks that are parts of the workspace."""

    context: Context
    model: Model
    probes: int  # of the diagonal covariance
    fit_images: int  # for the isotropic and the spectral one
    batch_size: int
    block: int  # chains that are one part
    precision: str

    def states(self, row: str, chains: int, keep: Sequence[int]) -> dict[str, Tensor]:
        """Draws and means of so many chains after these steps (0: the start as both), uint8 (kept, chains, ...)."""
        blocks = []
        for first in range(0, chains, self.block):
            count = min(self.block, chains - first)
            asked = {
                "model": self.model.digest, "row": row, "first": first, "count": count, "keep": list(keep),
                "probes": self.probes, "fit_images": self.fit_images, "seed": self.context.seed,
                "precision": self.precision,
            }  # fmt: skip
            name = file_name(f"chains-{row}-{keep[-1]}-{first}")

            def compute(first: int = first, count: int = count) -> Part:
                return Part({}, self._run(row, first, count, keep))

            blocks.append(self.context.workspace.part(name, asked, compute).tensors)
        return {kind: torch.cat([block[kind] for block in blocks], 1) for kind in (DRAWS, MEANS)}

    def _run(self, row: str, first: int, count: int, keep: Sequence[int]) -> dict[str, Tensor]:
        moments, level = _Noted(self._moments(ROWS[row].covariance)), self.model.levels[0]
        plan = single_level_plan(moments, level, steps=keep[-1])
        shape = (len(keep), count, *self.model.shape)
        found = {kind: torch.empty(shape, dtype=torch.uint8) for kind in (DRAWS, MEANS)}
        seed = self.context.seed + START_SEED
        how = self.precision
        with progress_bar(count * keep[-1], f"{row}, {keep[-1]} steps", unit="chain-step") as bar:
            for start in range(first, first + count, self.batch_size):
                rows = min(self.batch_size, first + count - start)
                place = slice(start - first, start - first + rows)
                x0 = self._start(ROWS[row].start, rows, Streams(seed, rows, start, purpose="start")).to(
                    self.context.device
                )

                def keep_state(step: int, draws: Tensor, means: Tensor, place: slice = place) -> None:
                    for i, t in enumerate(keep):
                        if t == step:
                            found[DRAWS][i, place], found[MEANS][i, place] = self.stored(draws), self.stored(means)

                def note(step: int, state: State, info: Info, rows: int = rows) -> None:
                    assert moments.mean is not None, "a step asks for a posterior"
                    keep_state(step + 1, state.x, moments.mean)
                    bar.update(rows)

                keep_state(0, x0, x0)
                fast = contextlib.nullcontext() if self.context.quick else fast_path("auto")
                with matmul_precision(how), autocast(how, self.context.device), fast:
                    run(plan, x0, seed=seed, first_chain=start, callback=note, progress=None)
        return found

    def _start(self, start: str, rows: int, streams: Streams) -> Tensor:
        """Standard normal noise, or uniform noise in the data's interval."""
        draw = uniforms if start == "uniform" else randn
        return self.model.scaled(draw((rows, *self.model.shape), torch.empty(0), streams))

    def stored(self, x: Tensor) -> Tensor:
        """States as images, uint8."""
        low, high = self.model.interval
        return to_uint8(((x.float() - low) / (high - low)).clamp(0, 1)).cpu()

    def _moments(self, covariance: str) -> Moments:
        if covariance == "diagonal":
            return DiagonalMoments(self.model, probes=self.probes)
        files = None if self.context.data_dir is None else Path(self.context.data_dir)
        return self.model.posterior(covariance, data=FitData(DATA, self.fit_images, files))

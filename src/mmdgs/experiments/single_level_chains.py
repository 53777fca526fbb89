"""Gibbs chains at one noise level, from noise: kept at some steps, in blocks that a stopped run reuses."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mmdgs.data import to_uint8
from mmdgs.experiments.experiment import Context
from mmdgs.experiments.sampler_cells import file_name
from mmdgs.experiments.workspace import Part
from mmdgs.fast import fast_path
from mmdgs.moments import DiagonalMoments, Moments
from mmdgs.precision import autocast, matmul_precision
from mmdgs.pretrained import Pretrained
from mmdgs.progress import progress_bar
from mmdgs.randomness import Streams, randn, uniforms
from mmdgs.samplers import Info, State, run_plan
from mmdgs.samplers.plans import single_level_plan
from mmdgs.sampling import FitData, isotropic_moments

DATA = "cifar10"
START_SEED = 30
DIAGONAL, ISOTROPIC, UNIFORM = "diagonal", "isotropic", "diagonal, uniform start"
CURVES = (DIAGONAL, ISOTROPIC, UNIFORM)


@dataclass(frozen=True, eq=False)
class Chains:
    """Gibbs chains of a model at its level, in blocks that are parts of the workspace."""

    context: Context
    model: Pretrained
    probes: int  # of the diagonal covariance
    fit_images: int  # for the isotropic one
    batch_size: int
    block: int  # chains that are one part
    precision: str

    def states(self, row: str, chains: int, keep: Sequence[int]) -> Tensor:
        """The states of so many chains after these steps, uint8 (kept, chains, ...)."""
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
                return Part({}, {"x": self._run(row, first, count, keep)})

            blocks.append(self.context.workspace.part(name, asked, compute).tensors["x"])
        return torch.cat(blocks, 1)

    def _run(self, row: str, first: int, count: int, keep: Sequence[int]) -> Tensor:
        moments, level = self._moments(row), self.model.levels[0]
        plan = single_level_plan(moments, level, steps=keep[-1])
        found = torch.empty(len(keep), count, *self.model.shape, dtype=torch.uint8)
        seed = self.context.seed + START_SEED
        how = self.precision
        with progress_bar(count * keep[-1], f"{row}, {keep[-1]} steps", unit="chain-step") as bar:
            for start in range(first, first + count, self.batch_size):
                rows = min(self.batch_size, first + count - start)
                place = slice(start - first, start - first + rows)
                x0 = self._start(row, rows, Streams(seed, rows, start)).to(self.context.device)

                def note(step: int, state: State, info: Info, place: slice = place, rows: int = rows) -> None:
                    for i, t in enumerate(keep):
                        if t == step + 1:
                            found[i, place] = self.stored(state.x)
                    bar.update(rows)

                if keep[0] == 0:
                    found[0, place] = self.stored(x0)
                fast = contextlib.nullcontext() if self.context.quick else fast_path("auto")
                with matmul_precision(how), autocast(how, self.context.device), fast:
                    # The start took the numbers of another seed: none is used twice.
                    run_plan(plan, x0, seed=seed + 1, first_chain=start, callback=note, progress=None)
        return found

    def _start(self, row: str, rows: int, streams: Streams) -> Tensor:
        """The paper's standard normal (its section 2.1), or uniform noise in the data's interval."""
        draw = uniforms if row == UNIFORM else randn
        return self.model.scaled(draw((rows, *self.model.shape), torch.empty(0), streams))

    def stored(self, x: Tensor) -> Tensor:
        """States as images, uint8."""
        low, high = self.model.interval
        return to_uint8(((x.float() - low) / (high - low)).clamp(0, 1)).cpu()

    def _moments(self, row: str) -> Moments:
        if row != ISOTROPIC:
            return DiagonalMoments(self.model, probes=self.probes)
        files = None if self.context.data_dir is None else Path(self.context.data_dir)
        return isotropic_moments(self.model, self.model.levels, FitData(DATA, self.fit_images, files))

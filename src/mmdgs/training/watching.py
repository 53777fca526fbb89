"""Watching a model as it trains: samples by a cheap sampler, a picture of some, and their distance from the data.

    many levels     Heun's method along EDM's levels: 35 evaluations an image
    one level       Gibbs sweeps with one variance for all pixels, which is fitted at each look; the last gives the mean
    mean and std    Gibbs sweeps with the learned posterior

Every look starts from the same noise, so that pictures can be compared. What it measures:

    fid             the Frechet distance of the samples from all training images, where an Inception file is found.
                    It is biased upwards by their small number: it compares with looks of as many, and nothing else
    diversity       the mean distance of a sample to its nearest other, over that of as many training images: 1 is as it
                    should be, and near 0 they are all alike
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from mmdgs.data import ImageSet, midpoints, spread, to_uint8
from mmdgs.data.pictures import save_grid
from mmdgs.errors import NonFiniteError, UsageError
from mmdgs.generation import Method, generate
from mmdgs.metrics.features import cached_features, image_features
from mmdgs.metrics.frechet import FeatureMoments, frechet_distance
from mmdgs.metrics.inception_file import ENVIRONMENT, Inception, load_inception
from mmdgs.metrics.neighbours import diversity
from mmdgs.models import DENOISERS, MEAN_STD, Model
from mmdgs.models.fits import FIT_IMAGES
from mmdgs.moments import IsotropicMoments
from mmdgs.randomness import Streams, child_seed
from mmdgs.samplers import Plan, single_level_plan
from mmdgs.training.recipe import TrainingSettings

logger = logging.getLogger("mmdgs")

LEVELS = 18
SWEEPS = 40
"""The paper's number of sweeps at one level, before its FID rises again."""
SHOWN, SCALE = 64, 2


def sample_watcher(
    model: Model,
    images: ImageSet,
    settings: TrainingSettings,
    folder: Path,
    report: Callable[[str], None] | None = None,
) -> SampleWatcher:
    """What watches `settings.watch` samples of a model while it trains; pictures of them go into `folder`.

    The Inception network is the file that MMDGS_INCEPTION names, or one that is found (none is downloaded).
    """
    single = len(model.levels) == 1
    if model.config.param not in DENOISERS and not (model.config.param == MEAN_STD and single):
        raise UsageError(
            f"a model with parametrisation {model.config.param!r} at {len(model.levels)} levels draws no samples "
            "to watch: leave watch out"
        )
    return SampleWatcher(model, images, settings, _inception(), folder, report)


def _inception() -> Inception | None:
    """The Inception network; None, and a line in the log, where there is no file of it."""
    if os.environ.get(ENVIRONMENT):
        return load_inception()
    try:
        return load_inception(download=False)
    except UsageError:
        logger.warning(
            "watching the diversity of samples alone, and no FID: no Inception network was found; "
            "%s can name its file (docs/evaluation.md)",
            ENVIRONMENT,
        )
        return None


def one_variance(model: Model, x: Tensor, seed: int) -> IsotropicMoments:
    """The posterior of a model of one level with one variance for all pixels, fitted to clean data x."""
    streams = Streams(seed, len(x), purpose="fit")
    return IsotropicMoments.fit(model, x, model.level, generator=streams)


@dataclass(frozen=True, eq=False)
class SampleWatcher:
    """Draws and judges samples of the model; training goes on as if it had not."""

    model: Model
    images: ImageSet
    settings: TrainingSettings
    inception: Inception | None
    folder: Path
    report: Callable[[str], None] | None = None

    @property
    def judged_by(self) -> str | None:
        return None if self.inception is None else "fid"

    @property
    def count(self) -> int:
        assert self.settings.watch is not None, "it was asked to watch"
        return self.settings.watch

    @property
    def seed(self) -> int:
        """That of the samples' noise, which is the same at every look."""
        return child_seed(self.settings.seed, "watch")

    def look(self, step: int, /) -> dict[str, float]:
        """Draw samples, write a picture of some, and measure them all."""
        try:
            x = self._samples()
            values = self._measured(to_uint8(x))
        except (NonFiniteError, ValueError) as error:  # a look must not end a training run
            logger.warning("the samples at step %d could not be judged: %s", step, error)
            return {}
        if x.shape[1] in (1, 3):
            self.folder.mkdir(exist_ok=True)
            save_grid(self.folder / f"{step:07}.png", x[:SHOWN], scale=SCALE)
        if self.report:
            self.report(f"step {step:,}: " + ", ".join(f"{name} {value:.4g}" for name, value in values.items()))
        return values

    def _samples(self) -> Tensor:
        """Samples in [0, 1], (count, channels, height, width)."""
        model = self.model
        single = len(model.levels) == 1
        found = generate(
            model,
            self._chain() if single else Method("heun", steps=LEVELS),
            self.count,
            seed=self.seed,
            batch_size=self.settings.batch_size,
            precision=self.settings.precision,
            fast=False,  # compiling takes longer than a look
            progress=None,
        )
        assert found.x is not None, "nothing was written"
        return found.x

    def _chain(self) -> Plan:
        """Gibbs sweeps at the model's one level, the last of which gives the mean in place of a draw."""
        model, level = self.model, self.model.level
        if model.config.param == MEAN_STD:
            return single_level_plan(model.posterior(), level, steps=SWEEPS)
        device = next(model.network.parameters()).device
        chosen = self.images.take(spread(len(self.images), FIT_IMAGES.get(device.type, FIT_IMAGES["cpu"])))
        moments = one_variance(model, midpoints(chosen.images.to(device)), self.seed)
        return single_level_plan(moments, level, steps=SWEEPS, mean=True)

    def _measured(self, samples: Tensor) -> dict[str, float]:
        device = self.images.images.device
        values = {"diversity": diversity(samples.to(device)).distance / self._diversity_of_data}
        if self.inception is not None:
            drawn = ImageSet("samples", "samples", samples)
            ours = image_features(drawn, self.inception, device=device).moments
            values = {"fid": frechet_distance(ours, self._data_moments), **values}
        return values

    @cached_property
    def _diversity_of_data(self) -> float:
        """Of as many training images as there are samples."""
        chosen = self.images.take(spread(len(self.images), self.count)).images
        return max(diversity(chosen).distance, torch.finfo(torch.float32).tiny)

    @cached_property
    def _data_moments(self) -> FeatureMoments:
        """Of the features of all training images: computed once, and kept in the cache folder."""
        assert self.inception is not None
        device = self.images.images.device
        return cached_features(
            self.images, self.inception, device=device, progress="watching: features of the data"
        ).moments

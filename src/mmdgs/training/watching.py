"""Watching a model as it trains: samples by a cheap sampler, a picture of some, and their quality.

    many levels     Heun's method along EDM's levels: 35 evaluations an image
    one level       Gibbs sweeps with one fitted variance for all pixels; the last gives the mean
    mean and std    Gibbs sweeps with the learned posterior

Every look starts from the same noise, so that pictures can be compared. What it measures:

    fid             the Frechet distance of the samples from all training images, where an
                    Inception file is found; biased upwards: compare looks of as many samples only
    diversity       the mean distance of a sample to its nearest other, over that of as many
                    training images: 1 is ideal, and near 0 they are all alike
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmdgs.data import ImageSet, midpoints, spread, to_uint8
from mmdgs.data.pictures import save_grid
from mmdgs.errors import NonFiniteError, UsageError
from mmdgs.metrics.features import image_features
from mmdgs.metrics.frechet import FeatureMoments, frechet_distance
from mmdgs.metrics.inception_file import ENVIRONMENT, Inception, load_inception
from mmdgs.metrics.neighbours import diversity
from mmdgs.models import DENOISERS, MEAN_STD, Model
from mmdgs.models.fits import FIT_IMAGES
from mmdgs.moments import IsotropicMoments
from mmdgs.randomness import Streams, child_seed
from mmdgs.samplers import Plan, single_level_plan
from mmdgs.sampling import SamplerSettings, generate
from mmdgs.training.examples import by_device
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
    """What watches `settings.watch` samples of a model while it trains; pictures go to `folder`.

    The Inception network is the file that MMDGS_INCEPTION names, or one that is found.
    """
    single = len(model.levels) == 1
    param = model.config.param
    if param not in DENOISERS and not (param == MEAN_STD and single):
        which = f"{param!r} at {len(model.levels)} levels"
        raise UsageError(f"a model of {which} draws no samples to watch: leave watch out")
    return SampleWatcher(model, images, settings, _inception(), folder, report)


def _inception() -> Inception | None:
    """The Inception network; None, and a line in the log, where there is no file of it."""
    if os.environ.get(ENVIRONMENT):
        return load_inception()
    try:
        return load_inception(download=False)
    except UsageError:
        why = f"no Inception network was found; {ENVIRONMENT} can name its file"
        logger.warning("watching the diversity of samples and no FID: %s", why)
        return None


def one_variance(model: Model, x: Tensor, seed: int) -> IsotropicMoments:
    """The moments of a model of one level with one variance for all pixels, fitted to clean x."""
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
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            self.report(f"step {step:,}: {numbers}")
        return values

    def _samples(self) -> Tensor:
        """Samples in [0, 1], (count, channels, height, width)."""
        seed = child_seed(self.settings.seed, "watch")  # the same noise at every look
        many = len(self.model.levels) > 1
        samples = generate(
            self.model,
            SamplerSettings("heun", steps=LEVELS) if many else self._chain(seed),
            self.count,
            seed=seed,
            batch_size=self.settings.batch_size,
            precision=self.settings.precision,
            fast=False,  # compiling takes longer than a look
            progress=None,
        )
        assert samples.x is not None, "nothing was written"
        return samples.x

    def _chain(self, seed: int) -> Plan:
        """Gibbs sweeps at the model's one level, the last of which gives the mean."""
        model, level = self.model, self.model.level
        if model.config.param == MEAN_STD:
            return single_level_plan(model.posterior(), level, steps=SWEEPS)
        device = next(model.network.parameters()).device
        fitted = self.images.take(spread(len(self.images), by_device(FIT_IMAGES, device)))
        moments = one_variance(model, midpoints(fitted.images.to(device)), seed)
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
        images = self.images.take(spread(len(self.images), self.count)).images
        return max(diversity(images).distance, torch.finfo(torch.float32).tiny)

    @cached_property
    def _data_moments(self) -> FeatureMoments:
        """Of the features of all training images: computed once, and kept in the cache folder."""
        assert self.inception is not None
        label, device = "watching: features of the data", self.images.images.device
        how: dict[str, Any] = {"cache": True, "device": device, "progress": label}
        return image_features(self.images, self.inception, **how).moments

"""A scheduler for pipelines of diffusers that samples with our covariance: ancestral sampling
through the bridge.

    pipe.scheduler = mmdgs.interop.MomentScheduler.for_pipeline(pipe, moments=...)

A step draws x_s | x_t from the Gaussian of `posterior.py` with the moments of x | x_t: DDPM's
"fixed_small" variance is the case of no covariance at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mmdgs.errors import UsageError
from mmdgs.lazy import optional
from mmdgs.linalg.operators import Diagonal, raise_non_finite
from mmdgs.models.diffusers import INTERVAL, prediction_of, preserving_level
from mmdgs.models.loading import load
from mmdgs.moments import IsotropicMoments, Moments
from mmdgs.noise import CLEAN, LevelTable, NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Generator, Streams
from mmdgs.samplers.ancestral import LAST_NOISE, grey_levels, limited

optional("diffusers")

from diffusers import DDPMScheduler  # noqa: E402
from diffusers.schedulers.scheduling_ddpm import DDPMSchedulerOutput  # noqa: E402
from diffusers.utils.torch_utils import randn_tensor  # noqa: E402

Variances = Mapping[NoiseLevel, float]


class MomentScheduler(DDPMScheduler):  # type: ignore[misc]
    """Ancestral sampling with the moments of p(x | x_t); made by `for_pipeline`.

    Schedule, timesteps, clipping and what the network predicts are as in the pipeline's own
    scheduler. With a table of variances (`IsotropicMoments`, or a mapping from levels to numbers)
    the mean comes from the pipeline's evaluation of its network. With any other moments estimator
    `step` evaluates mean and covariance itself, and the pipeline's own evaluation is not used: one
    forward pass more a step. The last step returns the mean, and the one before draws noise of at
    most `last_noise` grey levels on average, since nothing removes it (ancestral.py).

    `repaired` is the fraction of the covariance that was lifted to its floor in the last step.
    """

    _moments: Moments | LevelTable | None = None
    last_noise: float = LAST_NOISE
    repaired: float = 0.0

    @classmethod
    def for_pipeline(
        cls,
        pipe: Any,
        moments: Moments | Variances | None = None,
        *,
        last_noise: float = LAST_NOISE,
    ) -> MomentScheduler:
        """The scheduler for a pipeline with a UNet2DModel.

        `moments` is `IsotropicMoments`, a mapping from levels to variances, or an estimator on the
        pipeline's network, such as FullMoments(mmdgs.load(pipe)); the diagonal by three
        probes where none is given.
        """
        scheduler = cls.from_config(pipe.scheduler.config)
        if not last_noise >= 0:
            raise UsageError(f"last_noise must be grey levels, 0 or more, got {last_noise}")
        scheduler.last_noise = last_noise
        if moments is None:
            moments = load(pipe).posterior("diagonal")
        if isinstance(moments, IsotropicMoments):
            scheduler._moments = moments.variances
        elif isinstance(moments, Mapping):
            try:
                scheduler._moments = LevelTable.of(moments)
            except ValueError as error:
                raise UsageError(f"the variances of a scheduler: {error}") from error
        elif callable(moments):
            scheduler._moments = moments
        else:
            expected = "a moments estimator, or a mapping from levels to variances"
            raise UsageError(f"moments must be {expected}, got {moments!r}")
        return scheduler

    def level(self, timestep: int | Tensor) -> NoiseLevel:
        """The noise level of a timestep; clean below 0."""
        if timestep < 0:
            return CLEAN
        return preserving_level(self.alphas_cumprod[int(timestep)].item())

    def step(
        self,
        model_output: Tensor,
        timestep: int | Tensor,
        sample: Tensor,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        return_dict: bool = True,
        **unused: Any,
    ) -> Any:
        """Draw x_s | x_t at the next timestep s; what other schedulers take (eta ...) is ignored.

        Without a generator the draws come from torch's global one, as everywhere in diffusers.
        """
        level, cleaner = self.level(timestep), self.level(self.previous_timestep(timestep))
        with torch.inference_mode(False):
            x_t = sample.detach().clone().to(torch.promote_types(sample.dtype, torch.float32))
            q = self._posterior(model_output, x_t, level, generator)
            raise_non_finite("denoising mean", q.mean)
            self.repaired = 0.0 if q.repaired is None else q.repaired.mean().item()
            mean = self._clipped(q.mean)
            drawn = mean
            if cleaner != CLEAN:
                bridge = Gaussian(mean, q.cov).bridge(x_t, level, cleaner)
                place = {"device": sample.device, "dtype": sample.dtype}
                noise = randn_tensor(sample.shape, generator=generator, **place)
                drawn = bridge.mean + self._bounded(bridge.cov.root(noise.to(x_t.dtype)), timestep)
        drawn, mean = drawn.to(sample.dtype), mean.to(sample.dtype)
        if not return_dict:
            return drawn, mean
        return DDPMSchedulerOutput(prev_sample=drawn, pred_original_sample=mean)

    def _bounded(self, noise: Tensor, timestep: int | Tensor) -> Tensor:
        """Noise as it is, or into the cleanest level of the run at most `last_noise`."""
        following = self.previous_timestep(self.previous_timestep(timestep))
        return noise if following >= 0 else limited(noise, grey_levels(self.last_noise, INTERVAL))

    def _posterior(
        self, model_output: Tensor, x_t: Tensor, level: NoiseLevel, generator: Any
    ) -> Gaussian:
        """The law of x | x_t: from the network's output and the table, or by the estimator."""
        if self._moments is None:
            advice = "make it with MomentScheduler.for_pipeline(pipe, moments=...)"
            raise UsageError(f"this scheduler has no moments: {advice}")
        if not isinstance(self._moments, LevelTable):
            return self._moments(x_t, level, generator=_one_generator(generator, x_t))
        # Further channels hold variances.
        out = model_output.detach().clone()[:, : x_t.shape[1]].to(x_t.dtype)
        mean = prediction_of(self)(out, x_t, level.alpha, level.sigma)
        return Gaussian(mean, Diagonal(mean.new_tensor(self._moments[level]).expand_as(mean)))

    def _clipped(self, mean: Tensor) -> Tensor:
        """The mean within the data's range, as the pipeline's scheduler keeps it there."""
        if self.config.thresholding:
            return self._threshold_sample(mean)
        reach = self.config.clip_sample_range
        return mean.clamp(-reach, reach) if self.config.clip_sample else mean


def _one_generator(generator: Any, x_t: Tensor) -> Generator:
    """The generator an estimator draws probes from; images with their own have their own stream."""
    if generator is None:
        return torch.default_generator
    if isinstance(generator, torch.Generator):
        return generator
    if len(generator) == 1:
        return generator[0]
    seeds = [int(torch.randint(2**62, (), generator=own, device=own.device)) for own in generator]
    return Streams(seeds, len(x_t))

"""MomentScheduler: pipelines of diffusers that sample with our covariance, against diffusers' own
and closed forms.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from nets import tiny_pipeline
from test_models import refused
from torch import Tensor

import mmdgs
from mmdgs.errors import UsageError
from mmdgs.linalg.operators import Diagonal
from mmdgs.models.diffusers import schedule_levels
from mmdgs.noise import CLEAN, LevelTable, NoiseLevel
from mmdgs.posterior import Gaussian
from mmdgs.randomness import seeded

diffusers = pytest.importorskip("diffusers")
MomentScheduler = mmdgs.interop.MomentScheduler


def table(pipe: Any, relative: float) -> dict[NoiseLevel, float]:
    """The same variance, relative to (sigma / alpha)^2, at every level of a pipeline."""
    return {level: relative * level.variance for level in schedule_levels(pipe.scheduler)}


def drawn(pipe: Any, steps: int = 6, generator: Any = None) -> Tensor:
    return pipe(
        2, generator=generator or seeded(3), num_inference_steps=steps, output_type="pt"
    ).images


CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "velocity": {"prediction_type": "v_prediction"},
    "not clipped": {"clip_sample": False},
    "thresholded": {"thresholding": True, "sample_max_value": 2.0},
    "evenly": {"timestep_spacing": "linspace"},
}


@pytest.mark.parametrize("changes", CONFIGURATIONS.values(), ids=CONFIGURATIONS.keys())
def test_no_covariance_is_ddpm_with_its_small_variance(changes: dict[str, Any]) -> None:
    scheduler = diffusers.DDPMScheduler(variance_type="fixed_small", **changes)
    pipe = tiny_pipeline(scheduler)
    expected = drawn(pipe)
    pipe.scheduler = MomentScheduler.for_pipeline(pipe, moments=table(pipe, 0.0))
    torch.testing.assert_close(drawn(pipe), expected, rtol=1e-4, atol=1e-4)
    pipe.scheduler = MomentScheduler.for_pipeline(pipe, moments=table(pipe, 0.1))
    assert (drawn(pipe) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["mapping", "IsotropicMoments", "few levels"])
def test_an_isotropic_table_gives_the_analytic_variance(kind: str) -> None:
    pipe = tiny_pipeline()
    variances = table(pipe, 0.2)
    if kind == "few levels":  # the rest is interpolated, relative to (sigma / alpha)^2
        variances = dict(list(variances.items())[::111])
    moments = (
        mmdgs.IsotropicMoments(lambda x, level: x, LevelTable.of(variances))
        if kind == "IsotropicMoments"
        else variances
    )
    scheduler = MomentScheduler.for_pipeline(pipe, moments=moments)
    scheduler.set_timesteps(10)
    x, out = (torch.randn(2, 1, 8, 8, generator=seeded(seed)) for seed in (0, 1))
    t, s = scheduler.timesteps[3:5].tolist()
    level, cleaner = scheduler.level(t), scheduler.level(s)
    found = scheduler.step(out, t, x, generator=seeded(2))
    # Ancestral sampling (Bao et al., 2022): the posterior's variance, by the gain squared, on top
    # of the small one.
    a = level.alpha / cleaner.alpha
    b2 = level.sigma**2 - a**2 * cleaner.sigma**2
    gain = cleaner.alpha * b2 / level.sigma**2
    mean = gain * found.pred_original_sample + a * cleaner.sigma**2 / level.sigma**2 * x
    noise = (found.prev_sample - mean) / torch.randn(x.shape, generator=seeded(2))
    variance = cleaner.sigma**2 * b2 / level.sigma**2 + gain**2 * 0.2 * level.variance
    torch.testing.assert_close(noise, torch.full_like(x, variance**0.5), rtol=1e-3, atol=1e-4)


def test_the_noise_of_the_step_before_the_last_is_bounded() -> None:
    pipe = tiny_pipeline()
    drawn_by = {}
    for last in (2.0, math.inf):
        scheduler = MomentScheduler.for_pipeline(pipe, moments=table(pipe, 1.0), last_noise=last)
        scheduler.set_timesteps(4)
        x = torch.randn(3, 1, 8, 8, generator=seeded(0))
        for t, s in zip(
            scheduler.timesteps[1:3].tolist(), scheduler.timesteps[2:4].tolist(), strict=True
        ):
            found = scheduler.step(torch.zeros_like(x), t, x, generator=seeded(1))
            clean = Gaussian(found.pred_original_sample, Diagonal(torch.zeros_like(x)))
            mean = clean.bridge(x, scheduler.level(t), scheduler.level(s)).mean
            drawn_by[last, t] = (found.prev_sample - mean).flatten(1).abs().mean(1)
    early, late = (int(t) for t in scheduler.timesteps[1:3])
    torch.testing.assert_close(drawn_by[2.0, early], drawn_by[math.inf, early])
    assert (drawn_by[math.inf, late] > 0.1).all()
    torch.testing.assert_close(drawn_by[2.0, late], torch.full((3,), 4 / 255), rtol=1e-3, atol=0)
    with pytest.raises(UsageError, match="last_noise"):
        MomentScheduler.for_pipeline(pipe, last_noise=-1)


def test_an_estimator_gives_mean_and_covariance_whatever_the_pipeline_computed() -> None:
    pipe = tiny_pipeline(diffusers.DDPMScheduler(clip_sample=False))
    denoiser = mmdgs.load(pipe)
    scheduler = MomentScheduler.for_pipeline(pipe, moments=mmdgs.FullMoments(denoiser))
    scheduler.set_timesteps(10)
    x = torch.randn(2, 1, 8, 8, generator=seeded(0))
    t, s = scheduler.timesteps[7:9].tolist()
    level, cleaner = scheduler.level(t), scheduler.level(s)
    assert (level, scheduler.level(-1)) == (denoiser.levels[-1 - t], CLEAN)
    with torch.no_grad():
        found = scheduler.step(torch.full_like(x, torch.nan), t, x, generator=seeded(2)).prev_sample
    q = mmdgs.FullMoments(denoiser)(x, level).bridge(x, level, cleaner)
    torch.testing.assert_close(found, q.sample(generator=seeded(2)), rtol=1e-4, atol=1e-4)
    assert not found.requires_grad


@pytest.mark.parametrize("pipeline", ["DDPMPipeline", "DDIMPipeline"])
def test_one_line_is_enough(pipeline: str) -> None:
    unet = tiny_pipeline().unet
    own = getattr(diffusers, pipeline.replace("Pipeline", "Scheduler"))()
    pipe = getattr(diffusers, pipeline)(unet, own)
    pipe.set_progress_bar_config(disable=True)
    pipe.scheduler = mmdgs.interop.MomentScheduler.for_pipeline(pipe)
    images = drawn(pipe, 2)
    assert images.shape == (2, 1, 8, 8)
    assert torch.isfinite(images).all()
    assert not torch.equal(images, drawn(pipe, 2, seeded(4)))


def test_without_a_generator_it_draws_as_diffusers_does() -> None:
    pipe = tiny_pipeline()
    scheduler = MomentScheduler.for_pipeline(pipe)
    scheduler.set_timesteps(10)
    x = torch.randn(2, 1, 8, 8, generator=seeded(0))
    with torch.random.fork_rng():
        torch.manual_seed(5)
        one, other = (scheduler.step(x, 500, x).prev_sample for _ in range(2))
        torch.manual_seed(5)
        again = scheduler.step(x, 500, x).prev_sample
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


def test_half_precision_comes_back_as_it_came() -> None:
    pipe = tiny_pipeline()
    pipe.unet.to(torch.bfloat16)
    for moments in (None, table(pipe, 0.1)):
        scheduler = MomentScheduler.for_pipeline(pipe, moments=moments)
        scheduler.set_timesteps(10)
        x = torch.randn(2, 1, 8, 8, generator=seeded(0)).bfloat16()
        found = scheduler.step(x, 500, x, generator=seeded(1))
        assert found.prev_sample.dtype == found.pred_original_sample.dtype == torch.bfloat16


def test_repairs_are_told_and_what_is_not_finite_stops() -> None:
    pipe = tiny_pipeline()
    x = torch.randn(2, 1, 8, 8, generator=seeded(0))
    moments = mmdgs.DiagonalMoments(
        mmdgs.load(pipe), probes=None, floor=1.0
    )  # high: some lie below
    scheduler = MomentScheduler.for_pipeline(pipe, moments=moments)
    scheduler.step(x, 500, x, generator=seeded(1))
    assert scheduler.repaired == moments(x, scheduler.level(500)).repaired.mean().item() > 0
    scheduler = MomentScheduler.for_pipeline(pipe, moments=table(pipe, 0.1))
    scheduler.step(x, 500, x, generator=seeded(1))
    assert scheduler.repaired == 0
    with pytest.raises(mmdgs.NonFiniteError, match="chain 0, 1"):
        scheduler.step(x * torch.inf, 500, x, generator=seeded(1))


def test_moments_that_are_none() -> None:
    pipe = tiny_pipeline()
    for moments, parts in (
        (3.0, ["moments", "3.0"]),
        ({}, ["got none"]),
        ({NoiseLevel(sigma=1.0): -1.0}, ["got -1"]),
        ({NoiseLevel(sigma=1.0): float("nan")}, ["got nan"]),
    ):
        with refused(*parts):
            MomentScheduler.for_pipeline(pipe, moments=moments)
    x = torch.zeros(1, 1, 8, 8)
    with refused("has no moments", "for_pipeline"):
        MomentScheduler().step(x, 5, x)

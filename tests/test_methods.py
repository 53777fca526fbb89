"""Samplers by name: the plan each stands for, the levels it takes, what it refuses; and means that
are clipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import partial

import pytest
import torch
from nets import tiny_model
from torch import Tensor
from toy_models import LEVELS, exact, of_levels

import mmdgs
from mmdgs import samplers, schedules
from mmdgs.covariances import Diagonal, Krylov, LatticeDiagonal, RademacherDiagonal  # fmt: skip
from mmdgs.errors import UsageError
from mmdgs.models import FitData, Model, ModelConfig, estimators
from mmdgs.moments import Moments
from mmdgs.moments.clipped import ClippedDenoiser, ClippedMoments
from mmdgs.moments.probes import Lattice, ProbeDesign, Rademacher
from mmdgs.noise import CLEAN, LevelTable, NoiseLevel
from mmdgs.randomness import Streams, seeded
from mmdgs.samplers import (
    DDIM,
    ConsistentAnnealed,
    FixedVariance,
    Heun,
    Multistep,
    Plan,
    State,
    run,
)
from mmdgs.sampling import SamplerSettings, make_plan, resolved

CLIPPED = (-1.0, 1.0)


def ending(plan: Plan, shape: tuple[int, ...] = (3, 2, 2)) -> Tensor:
    x0 = plan.noise(shape, 4, generator=Streams(0, 4))
    return run(plan, x0, seed=1, progress=None).x


def clipped(model: Model) -> ClippedDenoiser:
    return ClippedDenoiser(model, CLIPPED)


def diagonal(model: Model, probes: int = 3, design: ProbeDesign | None = None) -> Moments:
    return mmdgs.DiagonalMoments(model, probes=probes, design=design)


Written = Callable[[Model], Plan]
S, gibbs = SamplerSettings, partial(samplers.gibbs_plan, levels=LEVELS, sweeps=3)
full = mmdgs.FullMoments
PLANS: list[tuple[SamplerSettings, Written]] = [
    (S("gibbs"), lambda m: gibbs(diagonal(m))),
    (
        S("gibbs", covariance="full", sweeps=2, steps=4),
        lambda m: gibbs(full(m), levels=schedules.subsampled(LEVELS, 4), sweeps=2),
    ),
    (
        S("gibbs", covariance=Diagonal(1), clip=True),
        lambda m: gibbs(ClippedMoments(diagonal(m, 1), CLIPPED)),
    ),
    (S("gibbs", covariance=RademacherDiagonal(2)), lambda m: gibbs(diagonal(m, 2, Rademacher()))),
    (S("gibbs", covariance=LatticeDiagonal(2)), lambda m: gibbs(diagonal(m, 2, Lattice()))),
    (S("gibbs", covariance=Krylov(2)), lambda m: gibbs(mmdgs.KrylovMoments(m, steps=2))),
    (
        S("gibbs-down", covariance=Diagonal(2), sweeps=1),
        lambda m: gibbs(diagonal(m, 2), sweeps=1, noise_first=False),
    ),
    (S("langevin"), lambda m: samplers.langevin_plan(m, LEVELS, steps=5)),
    (
        S("langevin", sweeps=2, rate=0.1),
        lambda m: samplers.langevin_plan(m, LEVELS, steps=2, rate=0.1),
    ),
    (S("consistent"), lambda m: Plan.down(ConsistentAnnealed(m), LEVELS)),
    (
        S("consistent", eta=0.9, clip=True),
        lambda m: Plan.down(ConsistentAnnealed(clipped(m), eta=0.9), LEVELS),
    ),
    (S("ancestral"), lambda m: Plan.down(FixedVariance(clipped(m)), LEVELS)),
    (
        S("ancestral", covariance="large", clip=False),
        lambda m: Plan.down(FixedVariance(m, large=True), LEVELS),
    ),
    (
        S("ancestral", covariance="full"),
        lambda m: samplers.ancestral_plan(
            ClippedMoments(full(m), CLIPPED), LEVELS, last_noise=4 / 255
        ),
    ),
    (
        S("ancestral", covariance="full", last_noise=math.inf, clip=False),
        lambda m: samplers.ancestral_plan(full(m), LEVELS),
    ),
    (S("ddim"), lambda m: Plan.down(DDIM(m, interval=CLIPPED), LEVELS)),
    (S("ddim", eta=0.5, clip=False), lambda m: Plan.down(DDIM(m, eta=0.5), LEVELS)),
    (S("heun", levels=LEVELS), lambda m: Plan.down(Heun(m), LEVELS)),
    (
        S("heun", levels=LEVELS, churn=0.2, clip=True),
        lambda m: Plan.down(Heun(clipped(m), churn=0.2), LEVELS),
    ),
    (S("multistep", levels=LEVELS), lambda m: Plan.down(Multistep(m), LEVELS)),
    (
        S("multistep", levels=LEVELS, order=3, eta=0.7, clip=True),
        lambda m: Plan.down(Multistep(clipped(m), order=3, eta=0.7), LEVELS),
    ),
]


def test_settings_are_the_plan_written_out_and_each_is_another() -> None:
    model = exact()
    ends = [ending(make_plan(settings, model)) for settings, _ in PLANS]
    for end, (settings, written) in zip(ends, PLANS, strict=True):
        assert torch.equal(end, ending(written(model))), settings
    assert all(not torch.equal(a, b) for i, a in enumerate(ends) for b in ends[:i])


def test_variances_are_fitted_at_the_levels_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked, data = exact(), [], FitData("cifar10", 5)
    fixed = mmdgs.IsotropicMoments(model, LevelTable.of(dict.fromkeys(LEVELS, 0.01)))

    def fitted(*given: object) -> mmdgs.IsotropicMoments:
        asked.append(given)
        return fixed

    for covariance in ("isotropic", "spectral"):
        with pytest.raises(UsageError, match=f"no {covariance} variances"):
            make_plan(SamplerSettings("gibbs", covariance=covariance), model)
    monkeypatch.setattr(estimators, "isotropic_moments", fitted)
    found = make_plan(SamplerSettings("gibbs", covariance="isotropic"), model, data=data)
    assert torch.equal(ending(found), ending(samplers.gibbs_plan(fixed, LEVELS, sweeps=3)))
    assert asked == [(model, LEVELS, data)]


def test_a_model_with_mean_and_std_has_chains_of_its_own_posterior() -> None:
    model = tiny_model("mean-std")
    settings = resolved(SamplerSettings(steps=2), model)
    assert (settings.sampler, str(settings.covariance)) == ("gibbs", "learned")
    assert settings.levels == model.levels
    written = samplers.single_level_plan(mmdgs.LearnedMoments(model.network), model.level, steps=2)
    x = torch.rand(2, *model.shape, generator=seeded(0))
    found = [
        run(plan, x, seed=1, progress=None).x
        for plan in (make_plan(SamplerSettings(steps=2), model), written)
    ]
    assert torch.equal(*found)
    with pytest.raises(UsageError, match="'score' has no learned posterior"):
        make_plan(SamplerSettings(covariance="learned"), tiny_model("score"))


def test_a_classifier_draws_no_samples() -> None:
    config = ModelConfig("classifier", "classes", (1, 12, 12), {"width": 4}, classes=("a", "b"))
    with pytest.raises(UsageError, match="'classes' is no denoiser"):
        make_plan(SamplerSettings(), Model.build(config))


def test_a_model_of_one_level_has_chains() -> None:
    level = NoiseLevel(sigma=0.5)
    model = of_levels((level,))
    plan = make_plan(SamplerSettings(steps=3), model)
    assert plan.start == level
    assert [step.following for step in plan.steps] == [CLEAN] * 3
    assert len(make_plan(SamplerSettings(), model).steps) == 20
    written = samplers.single_level_plan(mmdgs.FullMoments(model), level, steps=3)
    assert torch.equal(
        ending(make_plan(SamplerSettings(steps=3, covariance="full"), model)), ending(written)
    )
    to_mean = samplers.single_level_plan(mmdgs.FullMoments(model), level, steps=3, mean=True)
    found = ending(make_plan(SamplerSettings(steps=3, covariance="full", mean=True), model))
    assert torch.equal(found, ending(to_mean))
    assert not torch.equal(found, ending(written))
    with pytest.raises(UsageError, match="takes no mean"):
        make_plan(SamplerSettings("gibbs", covariance="full", mean=True), of_levels(LEVELS))


# --- levels
# --------------------------------------------------------------------------------------------------

DDPM = schedules.variance_preserving_linear(1000)


def test_variance_preserving_models_are_annealed_along_ncsnv2s_levels() -> None:
    """NCSNv2's sigmas are for data in [0, 1]; in [-1, 1] they are twice as large."""
    geometric, model = schedules.geometric, of_levels(DDPM)
    for name in ("gibbs", "gibbs-down", "langevin", "consistent"):
        assert resolved(S(name), model).levels == geometric(232, 100.0, 0.02)
        assert resolved(S(name, steps=10), model).levels == geometric(10, 100.0, 0.02)
    largest, smallest = (level.ratio for level in (DDPM[0], DDPM[-1]))
    unit, wide = (of_levels(DDPM, interval=(0.0, high)) for high in (1.0, 9.0))
    assert resolved(S("gibbs"), unit).levels == geometric(232, 50.0, smallest)
    assert resolved(S("gibbs"), wide).levels == geometric(232, largest, 0.09)
    few = schedules.variance_preserving_linear(40, 1e-3, 0.5)
    assert len(resolved(S("gibbs"), of_levels(few)).levels) == 40


@pytest.mark.parametrize(
    ("names", "levels", "spacing"),
    [
        (("ancestral", "ddim"), DDPM, "leading"),
        (("gibbs", "langevin", "ancestral", "ddim"), LEVELS, "even"),
    ],
)
def test_trained_levels_are_taken_as_diffusers_takes_them(
    names: tuple[str, ...], levels: schedules.Levels, spacing: str
) -> None:
    for name in names:
        assert resolved(S(name), of_levels(levels)).levels == levels
        fewer = resolved(S(name, steps=3), of_levels(levels)).levels
        assert fewer == schedules.subsampled(levels, 3, spacing)


def test_heun_has_edms_levels_within_the_models_range() -> None:
    levels = resolved(SamplerSettings("heun"), of_levels(DDPM)).levels
    assert levels == schedules.edm(18, 80.0, DDPM[-1].sigma / DDPM[-1].alpha)
    assert len(resolved(SamplerSettings("heun", steps=5), of_levels(DDPM)).levels) == 5


def test_levels_given_stand_in_place_of_the_samplers_own() -> None:
    levels = schedules.geometric(9, 3.0, 0.1)
    assert resolved(SamplerSettings("ddim", levels=levels), of_levels(DDPM)).levels == levels
    fewer = resolved(SamplerSettings("gibbs", levels=levels, steps=4), of_levels(DDPM))
    assert fewer.levels == schedules.subsampled(levels, 4)
    assert fewer.to_json()["levels"] == {
        "count": 4,
        "first": [1.0, 3.0],
        "last": [1.0, pytest.approx(0.1)],
    }


def test_means_are_clipped_where_diffusers_would() -> None:
    for interval, expected in ((CLIPPED, True), ((0.0, 1.0), False)):
        model = of_levels(DDPM, interval=interval)
        assert {
            name: resolved(SamplerSettings(name), model).clip
            for name in ("ancestral", "ddim", "gibbs", "heun")
        } == {"ancestral": expected, "ddim": expected, "gibbs": False, "heun": False}


# --- clipping
# --------------------------------------------------------------------------------------------------


def test_clipping_leaves_the_covariance_as_it_is() -> None:
    model, level = exact(), LEVELS[2]
    x_t = 3 * torch.randn(20, 3, 2, 2, generator=seeded(0))
    bare, clipped_q = (
        mmdgs.FullMoments(model)(x_t, level),
        ClippedMoments(mmdgs.FullMoments(model), (-0.5, 0.2))(x_t, level),
    )
    assert (bare.mean.abs() > 0.5).any()
    assert torch.equal(clipped_q.mean, bare.mean.clamp(-0.5, 0.2))
    assert torch.equal(clipped_q.cov.dense(), bare.cov.dense())
    assert torch.equal(
        ClippedDenoiser(model, (-0.5, 0.2))(x_t, level), model(x_t, level).clamp(-0.5, 0.2)
    )


def noisy_network(x: Tensor, t: int) -> Tensor:
    """A prediction of the noise that is far off, so that clean images leave [-1, 1]."""
    return torch.tanh(2 * x + 0.001 * t)


def predicted(x_t: Tensor, level: NoiseLevel) -> Tensor:
    t = DDPM[::-1].index(level)
    return (x_t - level.sigma * noisy_network(x_t, t)) / level.alpha


def test_ddim_and_ancestral_sampling_are_those_of_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = of_levels(DDPM, predicted)
    x = torch.randn(2, 3, 2, 2, generator=seeded(3))
    ddim = diffusers.DDIMScheduler(clip_sample=True, steps_offset=0)
    ddpm = diffusers.DDPMScheduler(clip_sample=True, variance_type="fixed_small")
    for scheduler, method in (
        (ddim, SamplerSettings("ddim", steps=8)),
        (ddpm, SamplerSettings("ancestral", steps=8)),
    ):
        scheduler.set_timesteps(8)
        plan = make_plan(method, model)
        theirs, ours = x, State(x)
        mine, yours = seeded(5), seeded(5)
        outside = 0
        for t, (kernel, level, following) in zip(
            scheduler.timesteps.tolist(), plan.steps, strict=True
        ):
            assert level == DDPM[999 - t]
            outside += int((predicted(ours.x, level).abs() > 1).any())
            theirs = scheduler.step(
                noisy_network(theirs, t), t, theirs, generator=yours
            ).prev_sample
            ours, _ = kernel.step(ours, level, following, generator=mine)
            torch.testing.assert_close(ours.x, theirs, rtol=1e-3, atol=1e-4)
        assert outside > 1


# --- refusals
# --------------------------------------------------------------------------------------------------

MANY, ONE = of_levels(DDPM), of_levels((NoiseLevel(sigma=0.5),))
REFUSED: list[tuple[Model, dict[str, object], str]] = [
    (MANY, {"sampler": "gibs"}, "did you mean 'gibbs'"),
    (MANY, {"covariance": "small"}, "'gibbs-down' has no covariance 'small'"),
    (MANY, {"sampler": "ddim", "covariance": "full"}, "'ddim' takes no covariance"),
    (MANY, {"rate": 0.1}, "takes no rate"),
    (MANY, {"sampler": "ancestral", "covariance": "full", "last_noise": -1.0}, "at least 0"),
    (MANY, {"sampler": "langevin", "rate": 3.0}, "rate must lie in"),
    (MANY, {"sampler": "ddim", "eta": 3.0}, "eta must lie in"),
    (MANY, {"sampler": "ddim", "steps": 1001}, "1001 of 1000 levels"),
    (MANY, {"sampler": "ddim", "levels": DDPM[::-1]}, "wrong order"),
    (ONE, {"sampler": "ddim"}, "needs a model of many noise levels"),
    (ONE, {"levels": LEVELS}, "takes no other levels"),
]


@pytest.mark.parametrize(("model", "settings", "message"), REFUSED)
def test_what_does_not_apply_is_refused_by_name(
    model: Model, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        make_plan(SamplerSettings(**settings), model)


def test_data_are_for_fitted_covariances() -> None:
    for settings in (SamplerSettings("ddim"), SamplerSettings("gibbs", covariance="full")):
        with pytest.raises(UsageError, match="--data"):
            make_plan(settings, MANY, data=FitData("cifar10", 5))


@pytest.mark.parametrize(
    ("named", "rate"), [((232, 50.0, 0.01), 0.062), ((500, 90.0, 0.01), 0.033)]
)
def test_langevin_takes_ncsnv2s_rate_for_its_levels(
    named: tuple[int, float, float], rate: float
) -> None:
    levels = schedules.geometric(*named)
    assert resolved(SamplerSettings("langevin", levels), MANY).rate == pytest.approx(rate, abs=5e-4)
    fewer = resolved(SamplerSettings("langevin", levels, steps=40), MANY).rate
    assert 3 * rate < fewer < 1  # larger steps between levels that are further apart
    assert resolved(SamplerSettings("langevin", levels, rate=0.1), MANY).rate == 0.1

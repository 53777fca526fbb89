"""Samplers by name: the plan each stands for, the levels it takes, what it refuses; and means that are clipped."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

import pytest
import torch
from nets import tiny_model
from torch import Tensor
from toy_models import LEVELS, exact, of_levels

import mmdgs
from mmdgs import samplers, schedules
from mmdgs.errors import UsageError
from mmdgs.generation import Method, make_plan, resolved
from mmdgs.models import FitData, Model, ModelConfig, covariances
from mmdgs.moments.clipped import ClippedDenoiser, ClippedMoments
from mmdgs.noise import CLEAN, LevelTable, NoiseLevel
from mmdgs.randomness import Streams, seeded
from mmdgs.samplers import Plan, State, run

CLIPPED = (-1.0, 1.0)


def ending(plan: Plan, shape: tuple[int, ...] = (3, 2, 2)) -> Tensor:
    x0 = plan.noise(shape, 4, generator=Streams(0, 4))
    return run(plan, x0, seed=1, progress=None).x


def clipped(model: Model) -> ClippedDenoiser:
    return ClippedDenoiser(model, CLIPPED)


def diagonal(model: Model, probes: int = 3) -> mmdgs.DiagonalMoments:
    return mmdgs.DiagonalMoments(model, probes=probes)


Written = Callable[[Model], Plan]
PLANS: dict[str, tuple[Method, Written]] = {
    "gibbs": (Method("gibbs"), lambda m: samplers.gibbs_plan(diagonal(m), LEVELS, sweeps=3)),
    "gibbs, settings": (
        Method("gibbs", covariance="full", sweeps=2, steps=4),
        lambda m: samplers.gibbs_plan(mmdgs.FullMoments(m), schedules.subsampled(LEVELS, 4), sweeps=2),
    ),
    "gibbs, clipped": (
        Method("gibbs", probes=1, clip=True),
        lambda m: samplers.gibbs_plan(ClippedMoments(diagonal(m, 1), CLIPPED), LEVELS, sweeps=3),
    ),
    "gibbs, rademacher": (
        Method("gibbs", covariance="rademacher", probes=2),
        lambda m: samplers.gibbs_plan(mmdgs.DiagonalMoments(m, probes=2, design=mmdgs.Rademacher()), LEVELS, sweeps=3),
    ),
    "gibbs, lattice": (
        Method("gibbs", covariance="lattice", probes=2),
        lambda m: samplers.gibbs_plan(mmdgs.DiagonalMoments(m, probes=2, design=mmdgs.Lattice()), LEVELS, sweeps=3),
    ),
    "gibbs, krylov": (
        Method("gibbs", covariance="krylov", krylov_steps=2),
        lambda m: samplers.gibbs_plan(mmdgs.KrylovMoments(m, steps=2), LEVELS, sweeps=3),
    ),
    "gibbs-down": (
        Method("gibbs-down", probes=2, sweeps=1),
        lambda m: samplers.gibbs_plan(diagonal(m, 2), LEVELS, sweeps=1, noise_first=False),
    ),
    "langevin": (Method("langevin"), lambda m: samplers.langevin_plan(m, LEVELS, steps=5)),
    "langevin, settings": (
        Method("langevin", sweeps=2, rate=0.1),
        lambda m: samplers.langevin_plan(m, LEVELS, steps=2, rate=0.1),
    ),
    "consistent": (Method("consistent"), lambda m: samplers.consistent_plan(m, LEVELS)),
    "consistent, settings": (
        Method("consistent", eta=0.9, clip=True),
        lambda m: samplers.consistent_plan(clipped(m), LEVELS, eta=0.9),
    ),
    "small": (Method("ancestral"), lambda m: samplers.fixed_variance_plan(clipped(m), LEVELS)),
    "large": (
        Method("ancestral", covariance="large", clip=False),
        lambda m: samplers.fixed_variance_plan(m, LEVELS, large=True),
    ),
    "ancestral, full": (
        Method("ancestral", covariance="full"),
        lambda m: samplers.ancestral_plan(ClippedMoments(mmdgs.FullMoments(m), CLIPPED), LEVELS, last_noise=4 / 255),
    ),
    "ancestral, no bound": (
        Method("ancestral", covariance="full", last_noise=math.inf, clip=False),
        lambda m: samplers.ancestral_plan(mmdgs.FullMoments(m), LEVELS),
    ),
    "ddim": (Method("ddim"), lambda m: samplers.ddim_plan(m, LEVELS, interval=CLIPPED)),
    "ddim, settings": (Method("ddim", eta=0.5, clip=False), lambda m: samplers.ddim_plan(m, LEVELS, eta=0.5)),
    "heun": (Method("heun", levels=LEVELS), lambda m: samplers.heun_plan(m, LEVELS)),
    "heun, settings": (
        Method("heun", levels=LEVELS, churn=0.2, clip=True),
        lambda m: samplers.heun_plan(clipped(m), LEVELS, churn=0.2),
    ),
    "multistep": (Method("multistep", levels=LEVELS), lambda m: samplers.multistep_plan(m, LEVELS)),
    "multistep, settings": (
        Method("multistep", levels=LEVELS, order=3, eta=0.7, clip=True),
        lambda m: samplers.multistep_plan(clipped(m), LEVELS, order=3, eta=0.7),
    ),
}


@pytest.mark.parametrize("case", PLANS.values(), ids=PLANS.keys())
def test_a_method_is_the_plan_written_out(case: tuple[Method, Written]) -> None:
    method, written = case
    model = exact()
    assert torch.equal(ending(make_plan(method, model)), ending(written(model)))


def test_each_case_above_is_another_sampler() -> None:
    ends = [ending(make_plan(method, exact())) for method, _ in PLANS.values()]
    assert all(not torch.equal(a, b) for i, a in enumerate(ends) for b in ends[:i])


def test_variances_are_fitted_at_the_levels_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked, data = exact(), [], FitData("cifar10", 5)
    fixed = mmdgs.IsotropicMoments(model, LevelTable.of(dict.fromkeys(LEVELS, 0.01)))

    def fitted(*given: object) -> mmdgs.IsotropicMoments:
        asked.append(given)
        return fixed

    for covariance in ("isotropic", "spectral"):
        with pytest.raises(UsageError, match=f"no {covariance} variances are kept for a test"):
            make_plan(Method("gibbs", covariance=covariance), model)
    monkeypatch.setattr(covariances, "isotropic_moments", fitted)
    found = make_plan(Method("gibbs", covariance="isotropic"), model, data=data)
    assert torch.equal(ending(found), ending(samplers.gibbs_plan(fixed, LEVELS, sweeps=3)))
    assert asked == [(model, LEVELS, data)]


def test_a_model_with_mean_and_std_has_chains_of_its_own_posterior() -> None:
    model = tiny_model("mean-std")
    method = resolved(Method(steps=2), model)
    assert (method.sampler, method.covariance, method.levels) == ("gibbs", "learned", model.levels)
    written = samplers.single_level_plan(mmdgs.LearnedMoments(model.network), model.level, steps=2)
    x = torch.rand(2, *model.shape, generator=seeded(0))
    found = [run(plan, x, seed=1, progress=None).x for plan in (make_plan(Method(steps=2), model), written)]
    assert torch.equal(*found)
    with pytest.raises(UsageError, match="'learned' takes no probes; it takes calibrated, clip"):
        make_plan(Method(probes=3), model)
    with pytest.raises(UsageError, match="'score' has no learned posterior"):
        make_plan(Method(covariance="learned"), tiny_model("score"))


def test_a_classifier_draws_no_samples() -> None:
    config = ModelConfig("classifier", "classes", (1, 12, 12), {"width": 4}, classes=("a", "b"))
    with pytest.raises(UsageError, match="'classes' is no denoiser"):
        make_plan(Method(), Model.build(config))


def test_a_model_of_one_level_has_chains() -> None:
    level = NoiseLevel(sigma=0.5)
    model = of_levels((level,))
    plan = make_plan(Method(steps=3), model)
    assert plan.start == level
    assert [step.following for step in plan.steps] == [CLEAN] * 3
    assert len(make_plan(Method(), model).steps) == 20
    written = samplers.single_level_plan(mmdgs.FullMoments(model), level, steps=3)
    assert torch.equal(ending(make_plan(Method(steps=3, covariance="full"), model)), ending(written))
    to_mean = samplers.single_level_plan(mmdgs.FullMoments(model), level, steps=3, mean=True)
    found = ending(make_plan(Method(steps=3, covariance="full", mean=True), model))
    assert torch.equal(found, ending(to_mean))
    assert not torch.equal(found, ending(written))
    with pytest.raises(UsageError, match="'gibbs' with the covariance 'full' takes no mean; it takes"):
        make_plan(Method("gibbs", covariance="full", mean=True), of_levels(LEVELS))


# --- levels ------------------------------------------------------------------------------------------------------

DDPM = schedules.variance_preserving_linear(1000)


def test_variance_preserving_models_are_annealed_along_ncsnv2s_levels() -> None:
    """NCSNv2's sigmas are for data in [0, 1]; in [-1, 1] they are twice as large."""
    model = of_levels(DDPM)
    for name in ("gibbs", "gibbs-down", "langevin", "consistent"):
        assert resolved(Method(name), model).levels == schedules.geometric(232, 100.0, 0.02)
        assert resolved(Method(name, steps=10), model).levels == schedules.geometric(10, 100.0, 0.02)
    unit = of_levels(DDPM, interval=(0.0, 1.0))
    largest, smallest = (level.sigma / level.alpha for level in (DDPM[0], DDPM[-1]))
    assert resolved(Method("gibbs"), unit).levels == schedules.geometric(232, 50.0, smallest)
    wide = of_levels(DDPM, interval=(0.0, 9.0))
    assert resolved(Method("gibbs"), wide).levels == schedules.geometric(232, largest, 0.09)
    few = schedules.variance_preserving_linear(40, 1e-3, 0.5)
    assert len(resolved(Method("gibbs"), of_levels(few)).levels) == 40


def test_trained_levels_are_taken_as_diffusers_takes_them() -> None:
    model = of_levels(DDPM)
    for name in ("ancestral", "ddim"):
        assert resolved(Method(name), model).levels == DDPM
        assert resolved(Method(name, steps=50), model).levels == schedules.subsampled(DDPM, 50, "leading")
    exploding = of_levels(LEVELS)
    for name in ("gibbs", "langevin", "ancestral", "ddim"):
        assert resolved(Method(name), exploding).levels == LEVELS
        assert resolved(Method(name, steps=3), exploding).levels == schedules.subsampled(LEVELS, 3, "even")


def test_heun_has_edms_levels_within_the_models_range() -> None:
    levels = resolved(Method("heun"), of_levels(DDPM)).levels
    assert levels == schedules.edm(18, 80.0, DDPM[-1].sigma / DDPM[-1].alpha)
    assert len(resolved(Method("heun", steps=5), of_levels(DDPM)).levels) == 5


def test_levels_given_stand_in_place_of_the_samplers_own() -> None:
    levels = schedules.geometric(9, 3.0, 0.1)
    assert resolved(Method("ddim", levels=levels), of_levels(DDPM)).levels == levels
    fewer = resolved(Method("gibbs", levels=levels, steps=4), of_levels(DDPM))
    assert fewer.levels == schedules.subsampled(levels, 4)
    assert fewer.to_json()["levels"] == {"count": 4, "first": [1.0, 3.0], "last": [1.0, pytest.approx(0.1)]}


def test_means_are_clipped_where_diffusers_would() -> None:
    for interval, expected in ((CLIPPED, True), ((0.0, 1.0), False)):
        model = of_levels(DDPM, interval=interval)
        assert {name: resolved(Method(name), model).clip for name in ("ancestral", "ddim", "gibbs", "heun")} == {
            "ancestral": expected,
            "ddim": expected,
            "gibbs": False,
            "heun": False,
        }


# --- clipping ----------------------------------------------------------------------------------------------------


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
    assert torch.equal(ClippedDenoiser(model, (-0.5, 0.2))(x_t, level), model(x_t, level).clamp(-0.5, 0.2))


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
    for scheduler, method in ((ddim, Method("ddim", steps=8)), (ddpm, Method("ancestral", steps=8))):
        scheduler.set_timesteps(8)
        plan = make_plan(method, model)
        theirs, ours = x, State(x)
        mine, yours = seeded(5), seeded(5)
        outside = 0
        for t, (kernel, level, following) in zip(scheduler.timesteps.tolist(), plan.steps, strict=True):
            assert level == DDPM[999 - t]
            outside += int((predicted(ours.x, level).abs() > 1).any())
            theirs = scheduler.step(noisy_network(theirs, t), t, theirs, generator=yours).prev_sample
            ours, _ = kernel.step(ours, level, following, generator=mine)
            torch.testing.assert_close(ours.x, theirs, rtol=1e-3, atol=1e-4)
        assert outside > 1


# --- refusals ----------------------------------------------------------------------------------------------------

MANY, ONE = of_levels(DDPM), of_levels((NoiseLevel(sigma=0.5),))
REFUSED: dict[str, tuple[Model, dict[str, object], str]] = {
    "unknown sampler": (
        MANY,
        {"sampler": "gibs"},
        "unknown sampler 'gibs' (did you mean 'gibbs'?); choose one of gibbs",
    ),
    "unknown covariance": (
        MANY,
        {"covariance": "diag"},
        "'gibbs-down' has no covariance 'diag' (did you mean 'diagonal'?)",
    ),
    "a fixed variance": (
        MANY,
        {"covariance": "small"},
        "'gibbs-down' has no covariance 'small'; choose one of diagonal",
    ),
    "covariance": (MANY, {"sampler": "ddim", "covariance": "full"}, "'ddim' takes no covariance; it takes clip, eta"),
    "probes": (MANY, {"covariance": "full", "probes": 3}, "the covariance 'full' takes no probes"),
    "krylov steps": (MANY, {"krylov_steps": 3}, "the covariance 'diagonal' takes no krylov-steps"),
    "rate": (MANY, {"rate": 0.1}, "takes no rate"),
    "eta": (MANY, {"sampler": "heun", "eta": 0.1}, "'heun' takes no eta; it takes churn, clip, guidance, guide"),
    "churn": (MANY, {"sampler": "ddim", "churn": 0.1}, "takes no churn"),
    "last noise": (MANY, {"sampler": "ancestral", "last_noise": 1.0}, "'small' takes no last-noise"),
    "negative": (
        MANY,
        {"sampler": "ancestral", "covariance": "full", "last_noise": -1.0},
        "most_noise must be at least 0",
    ),
    "sweeps": (MANY, {"sampler": "ancestral", "sweeps": 2}, "takes no sweeps"),
    "clip": (MANY, {"sampler": "langevin", "clip": True}, "'langevin' takes no clip"),
    "no sweeps": (MANY, {"sweeps": 0}, "sweeps must be at least 1, got 0"),
    "a rate there cannot be": (MANY, {"sampler": "langevin", "rate": 3.0}, "rate must lie in (0, 2)"),
    "an eta there cannot be": (MANY, {"sampler": "ddim", "eta": 3.0}, "eta must lie in [0, 1], got 3.0"),
    "one level": (MANY, {"steps": 1}, "count must be a whole number of at least 2, got 1"),
    "no level": (MANY, {"sampler": "ddim", "steps": 0}, "at least 1, got 0"),
    "too many levels": (MANY, {"sampler": "ddim", "steps": 1001}, "cannot take 1001 of 1000 levels"),
    "wrong order": (MANY, {"sampler": "ddim", "levels": DDPM[::-1]}, "levels are in the wrong order"),
    "single, sampler": (ONE, {"sampler": "ddim"}, "needs a model of many noise levels, and this one was trained at"),
    "single, levels": (ONE, {"levels": LEVELS}, "alone and takes no other levels"),
    "single, sweeps": (ONE, {"sweeps": 2}, "takes no sweeps"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_apply_is_refused_by_name(case: tuple[Model, dict[str, object], str]) -> None:
    model, settings, message = case
    with pytest.raises(UsageError, match=re.escape(message)):
        make_plan(Method(**settings), model)


def test_a_record_holds_what_is_set() -> None:
    found = resolved(Method("ddim", steps=50), of_levels(DDPM)).to_json()
    assert found.pop("levels")["count"] == 50
    assert found == {"sampler": "ddim", "steps": 50, "eta": 0.0, "clip": True}
    assert resolved(Method("langevin"), MANY).to_json()["rate"] == pytest.approx(0.062, abs=5e-4)


@pytest.mark.parametrize(("named", "rate"), [((232, 50.0, 0.01), 0.062), ((500, 90.0, 0.01), 0.033)])
def test_langevin_takes_ncsnv2s_rate_for_its_levels(named: tuple[int, float, float], rate: float) -> None:
    levels = schedules.geometric(*named)
    assert resolved(Method("langevin", levels), MANY).rate == pytest.approx(rate, abs=5e-4)
    fewer = resolved(Method("langevin", levels, steps=40), MANY).rate
    assert 3 * rate < fewer < 1  # larger steps between levels that are further apart
    assert resolved(Method("langevin", levels, rate=0.1), MANY).rate == 0.1

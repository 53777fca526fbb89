"""Autoguidance: what it gives where errors are known, what it costs, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from nets import tiny_model
from torch import Tensor
from toy_models import LEVELS, SHAPE, exact, many_level_model, of_levels

import mmdgs
from mmdgs import samplers
from mmdgs.cost import counting
from mmdgs.denoisers import denoise
from mmdgs.errors import UsageError
from mmdgs.guidance import GuidedDenoiser
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams, seeded
from mmdgs.samplers import Plan
from mmdgs.sampling import SamplerSettings, generate, make_plan, resolved


def erring(size: float):
    """The exact denoiser of a mixture, and an error that depends on place and level."""
    truth = exact()

    def denoiser(x_t: Tensor, level: NoiseLevel) -> Tensor:
        return truth(x_t, level) + size * torch.sin(3 * x_t) / (1 + level.sigma)

    return denoiser


@pytest.mark.parametrize("larger", [1.5, 2.0, 5.0])
def test_errors_that_the_guide_has_enlarged_are_taken_off(larger: float) -> None:
    # D* + e and D* + k e: with the weight k / (k - 1) the errors cancel, and samples are those of
    # D* itself.
    guided = GuidedDenoiser(erring(0.2), erring(0.2 * larger), larger / (larger - 1))
    ends = []
    for denoiser in (exact(), guided, erring(0.2)):
        plan = Plan.down(samplers.Heun(denoiser), LEVELS)
        start = plan.noise(SHAPE, 20, generator=Streams(0, 20))
        ends.append(samplers.run(plan, start, progress=None).x)
    torch.testing.assert_close(ends[1], ends[0], atol=1e-4, rtol=1e-4)
    assert (ends[2] - ends[0]).abs().max() > 0.05


def test_weights_lead_on_in_a_straight_line() -> None:
    x_t, level = torch.randn(5, *SHAPE, generator=seeded(0)), LEVELS[2]
    near, far = exact(), erring(1.0)
    for weight in (1.0, 1.3, 4.0):
        worse, better = far(x_t, level), near(x_t, level)
        guided = GuidedDenoiser(near, far, weight)(x_t, level)
        torch.testing.assert_close(guided, worse + weight * (better - worse))


def test_the_guides_evaluations_are_counted() -> None:
    with counting() as cost:
        guided = GuidedDenoiser(exact(), erring(1.0), 2.0)
        denoise(guided, torch.zeros(2, *SHAPE), LEVELS[0])
    assert (cost.forwards, cost.products) == (2, 0)
    cost.products += 3  # a product is a pass forwards and one back
    assert cost.evaluations == 2 + 3 * 2


@pytest.mark.parametrize("weight", [0.5, float("inf"), float("nan")])
def test_a_weight_that_leads_nowhere_is_refused(weight: float) -> None:
    with pytest.raises(ValueError, match=f"weight .* got {weight}"):
        GuidedDenoiser(exact(), exact(), weight)


@pytest.fixture
def guide(tmp_path: Path) -> Path:
    model = many_level_model()
    with torch.no_grad():
        for weights in model.network.parameters():
            weights.mul_(0.9)
    return model.save_pretrained(tmp_path / "worse")


@pytest.mark.parametrize("sampler", ["heun", "multistep", "ddim", "langevin", "consistent"])
def test_a_method_takes_its_guide_from_a_folder(sampler: str, guide: Path) -> None:
    model, worse = many_level_model(), mmdgs.load(guide)
    kernels = {
        "heun": samplers.Heun,
        "multistep": samplers.Multistep,
        "ddim": samplers.DDIM,
        "consistent": samplers.ConsistentAnnealed,
    }
    guided = GuidedDenoiser(model, worse, 1.5)
    if sampler == "langevin":
        written = samplers.langevin_plan(guided, model.levels)
    else:
        written = Plan.down(kernels[sampler](guided), model.levels)
    method = SamplerSettings(sampler, guide=str(guide), guidance=1.5, levels=model.levels)
    ours, theirs = (generate(model, plan, 3, progress=None) for plan in (method, written))
    plain = generate(model, SamplerSettings(sampler, levels=model.levels), 3, progress=None)
    assert torch.equal(ours.x, theirs.x)
    assert not torch.equal(ours.x, plain.x)
    assert ours.cost.forwards == 2 * plain.cost.forwards


def test_a_guide_alone_leads_twice_as_far_and_guidance_alone_takes_the_models_own(
    guide: Path, tmp_path: Path
) -> None:
    many_level_model().save_pretrained(tmp_path / "model")
    model = mmdgs.load(tmp_path / "model")
    assert resolved(SamplerSettings("heun", guide=str(guide)), model).guidance == 2.0
    with pytest.raises(UsageError, match="--guide MODEL"):
        make_plan(SamplerSettings("heun", guidance=2.0), model)
    guide.rename(tmp_path / "model" / "guide")
    named = SamplerSettings("heun", guide=str(tmp_path / "model" / "guide"))
    own, said = (
        generate(model, method, 2, progress=None).x
        for method in (SamplerSettings("heun", guidance=2.0), named)
    )
    assert torch.equal(own, said)


def test_a_run_goes_on_with_the_same_guide_only(guide: Path, tmp_path: Path) -> None:
    model, out = many_level_model(), tmp_path / "samples.npz"
    method = SamplerSettings("heun", steps=3, guide=str(guide))
    generate(model, method, 2, out=out, progress=None)
    other = many_level_model()
    with torch.no_grad():
        next(iter(other.network.parameters())).add_(0.1)
    other.save_pretrained(guide)
    with pytest.raises(UsageError, match="guide"):
        generate(model, method, 2, out=out, resume=True, progress=None)


def test_guides_that_cannot_be_are_refused(tmp_path: Path) -> None:
    model = many_level_model()
    many_level_model((1, 4, 4)).save_pretrained(tmp_path / "small")
    with pytest.raises(UsageError, match=r"\(1, 4, 4\)"):
        make_plan(SamplerSettings("heun", guide=str(tmp_path / "small")), model)
    tiny_model("classes", classes=("a", "b")).save_pretrained(tmp_path / "classifier")
    with pytest.raises(UsageError, match="is no denoiser"):
        make_plan(SamplerSettings("heun", guide=str(tmp_path / "classifier")), model)
    with pytest.raises(UsageError, match="takes no guidance"):
        make_plan(SamplerSettings("gibbs-down", guidance=2.0), of_levels(LEVELS))

"""On a GPU (make test-gpu): compiled products, CUDA graphs, bf16, generation, resume, training."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy
import pytest
import torch
from nets import lively, tiny_unet
from torch import Tensor

import mmdgs
from mmdgs import compiled, samplers
from mmdgs.denoisers import Denoiser, denoise, edm_denoiser, energy_denoiser, score_denoiser
from mmdgs.jacobians import linearised
from mmdgs.models import Model, ModelConfig
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams, randn, seeded, signs
from mmdgs.schedules import geometric

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("default"),  # the compiler warns where TF32 is off
]
CUDA = torch.device("cuda")
SHAPE = (3, 16, 16)
LEVELS = (NoiseLevel(sigma=0.4), NoiseLevel(alpha=0.8, sigma=0.6), NoiseLevel(sigma=3.0))


@pytest.fixture(autouse=True)
def _float32() -> Iterator[None]:
    """No TF32: compiled and plain numbers then differ by float32's rounding alone."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


def network(**options: object) -> torch.nn.Module:
    unet = tiny_unet(3, multipliers=[1, 2], blocks=1, attention=[1], **options)
    return unet.to(CUDA).eval().requires_grad_(False)


DENOISERS = {
    "score": lambda: score_denoiser(network()),
    "energy": lambda: energy_denoiser(network()),
    "edm, conditional": lambda: edm_denoiser(network(conditional=True)),
}


def batch(rows: int = 6) -> Tensor:
    return randn((rows, *SHAPE), torch.empty(0), seeded(0)).to(CUDA)


def probes(count: int, like: Tensor) -> Tensor:
    return signs((len(like), count, *like.shape[1:]), like, seeded(7)).transpose(0, 1)


def products(
    denoiser: Denoiser, x: Tensor, level: NoiseLevel, v: Tensor, mode: str, every: bool
) -> list[Tensor]:
    """v' J and the mean, compiled ("now") or plain; `every`: (J + J') v / 2 and D alone."""
    with compiled.fast_path(mode), torch.no_grad():
        at = linearised(denoiser, x, level)
        more = [at.symmetric(v), denoise(denoiser, x, level)] if every else []
        return [at.pull(v), at.mean, *more]


def programs_of(denoiser: Denoiser) -> list[compiled.Program]:
    shelves = denoiser.network.__dict__[compiled.PROGRAMS].made  # type: ignore[attr-defined]
    return [program for shelf in shelves.values() for program in shelf]


@pytest.mark.parametrize("name", DENOISERS)
def test_compiled_products_are_the_plain_ones_at_every_level(name: str) -> None:
    denoiser, x = DENOISERS[name](), batch()
    v = probes(3, x)
    every = name == "score"
    for level in LEVELS:
        both = (products(denoiser, x, level, v, mode, every) for mode in ("now", "never"))
        for ours, theirs in zip(*both, strict=True):
            atol = 2e-4 * theirs.abs().max().item()
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=atol)
    programs = programs_of(denoiser)
    assert len(programs) == (3 if every else 1), "one program of a kind for all levels"
    assert not any(isinstance(program.function, torch.fx.GraphModule) for program in programs)


def test_smaller_batches_and_changed_weights_are_seen_by_a_recorded_graph() -> None:
    denoiser, x = DENOISERS["score"](), batch(8)
    v = probes(2, x)
    with compiled.fast_path("now"), torch.no_grad():
        whole = linearised(denoiser, x, LEVELS[0]).pull(v).clone()
        part = linearised(denoiser, x[:6], LEVELS[0]).pull(v[:, :6])
        torch.testing.assert_close(part, whole[:, :6], rtol=1e-5, atol=1e-5)
        for weight in denoiser.network.parameters():
            weight.mul_(1.5)
        changed = linearised(denoiser, x, LEVELS[0]).pull(v)
    assert len(programs_of(denoiser)) == 1
    assert not torch.allclose(changed, whole, rtol=1e-3)
    with compiled.fast_path("never"):
        expected = linearised(denoiser, x, LEVELS[0]).pull(v)
    torch.testing.assert_close(changed, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["score", "energy"])
def test_bf16_is_near_float32(name: str) -> None:
    denoiser, x = DENOISERS[name](), batch()
    v = probes(3, x)
    exact = products(denoiser, x, LEVELS[0], v, "never", every=False)
    with torch.autocast("cuda", torch.bfloat16):
        low = products(denoiser, x, LEVELS[0], v, "now", every=False)
    for ours, theirs in zip(low, exact, strict=True):
        error = ((ours - theirs).norm() / theirs.norm()).item()
        assert 0 < error < 0.05, "bf16 differs from float32, and by a few percent at the most"


def test_streams_give_the_cpus_numbers() -> None:
    for kind in ("normal", "sign", "uniform"):
        streams = (Streams(5, 64, purpose="start") for _ in range(2))
        here, there = (
            stream.draw(kind, 100, torch.float64, torch.device(place)).cpu()
            for stream, place in zip(streams, ("cpu", "cuda"), strict=True)
        )
        torch.testing.assert_close(here, there, rtol=1e-12, atol=1e-12)


def model() -> Model:
    config = ModelConfig(
        "unet", "edm", SHAPE,
        {"width": 8, "multipliers": [1, 2], "attention": [1], "conditional": True},
        sigmas=tuple(level.sigma for level in geometric(8, 10.0, 0.1)),
    )  # fmt: skip
    unet = Model.build(config, seed=0)
    lively(unet.network.eval().requires_grad_(False), seed=1)
    return unet.to(CUDA)


@pytest.mark.parametrize("covariance", ["diagonal", "krylov"])
def test_samples_depend_on_seed_and_number_alone_and_are_the_cpus(covariance: str) -> None:
    def draws(on: Model, batch_size: int) -> Tensor:
        plan = samplers.gibbs_plan(on.posterior(covariance), on.levels, sweeps=2)
        x = mmdgs.generate(on, plan, 6, seed=3, batch_size=batch_size, progress=None).x
        assert x is not None
        return x

    unet = model()
    x = draws(unet, 6)
    # A chain adds up what another batch rounds otherwise.
    torch.testing.assert_close(draws(unet, 2), x, rtol=0, atol=2e-3)
    torch.testing.assert_close(draws(copy.deepcopy(unet).to("cpu"), 6), x, rtol=0, atol=2e-2)


@pytest.mark.parametrize("fast", [True, False])
def test_a_stopped_run_goes_on_to_the_same_bytes(fast: bool, tmp_path: Path) -> None:
    one = model()
    plan = samplers.gibbs_plan(one.posterior("diagonal"), one.levels, sweeps=1)
    options = {"seed": 1, "batch_size": 2, "fast": fast, "progress": None}
    mmdgs.generate(one, plan, 6, out=tmp_path / "whole", **options)
    shutil.copytree(tmp_path / "whole", tmp_path / "part")
    for number in (1, 4, 5):
        (tmp_path / "part" / f"{number:06}.png").unlink()
    mmdgs.generate(one, plan, 6, out=tmp_path / "part", resume=True, **options)
    for number in range(6):
        name = f"{number:06}.png"
        assert (tmp_path / "part" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    x = mmdgs.generate(one, plan, 6, **options).x
    assert x is not None
    assert numpy.isfinite(x.numpy()).all()


@pytest.mark.parametrize("precision", ["float32", "bf16"])
def test_training_on_the_device_learns_and_goes_on(precision: str, tmp_path: Path) -> None:
    from mmdgs.training import Recipe, TrainingSettings, train_model

    def recipe(steps: int) -> Recipe:
        settings = TrainingSettings(
            steps=steps, batch_size=256, precision=precision, checkpoint_every=20
        )
        return Recipe(
            "rings", model="mlp", param="energy", sigma=0.2, compile=False, training=settings
        )

    _, whole = train_model(recipe(60), tmp_path / "whole", device=CUDA, progress=None)
    train_model(recipe(40), tmp_path / "part", device=CUDA, progress=None)
    _, part = train_model(recipe(60), tmp_path / "part", device=CUDA, resume=True, progress=None)
    assert whole.losses[-20:].mean() < 0.97 * whole.losses[:5].mean()
    torch.testing.assert_close(part.losses, whole.losses, rtol=1e-3, atol=1e-3)

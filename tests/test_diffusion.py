"""Networks of diffusers as denoisers: parity with their own schedulers, any level, folders, and
what is refused.
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from nets import tiny_diffusers_unet, tiny_pipeline
from safetensors.torch import load_file, save_file
from shared import CIFAR10_DDPM, needs_cifar10_ddpm
from test_loading import converted
from test_models import refused
from torch import Tensor, nn

import mmdgs
from mmdgs.models.diffusers import from_pipeline
from mmdgs.noise import NoiseLevel, NoiseLevels
from mmdgs.randomness import seeded

diffusers = pytest.importorskip("diffusers")
WEIGHTS = "diffusion_pytorch_model.safetensors"


def images(n: int = 2, *shape: int) -> Tensor:
    return torch.randn(n, *(shape or (1, 8, 8)), generator=seeded(5))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny pipeline; not to be changed."""
    folder = tmp_path_factory.mktemp("pipeline") / "tiny"
    tiny_pipeline().save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to change."""
    return Path(shutil.copytree(saved, tmp_path / "tiny"))


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


# --- parity


def ddim(found: mmdgs.Model, x: Tensor, timesteps: list[int]) -> Tensor:
    """DDIM with eta = 0 (Song et al., 2021) on the means of a denoiser, which are clipped to the
    data's interval.
    """
    levels = [found.levels[-1 - t] for t in timesteps]
    for level, cleaner in zip(levels, [*levels[1:], None], strict=True):
        mean = found(x, level)
        clipped = mean.clamp(*found.interval)
        noise = (x - level.alpha * mean) / level.sigma
        x = clipped if cleaner is None else cleaner.alpha * clipped + cleaner.sigma * noise
    return x


@needs_cifar10_ddpm
@torch.no_grad()
def test_ddim_parity_on_a_trained_model() -> None:
    found = mmdgs.load(CIFAR10_DDPM)
    assert (found.shape, found.interval, len(found.levels)) == ((3, 32, 32), (-1.0, 1.0), 1000)
    assert {p.dtype for p in found.network.parameters()} == {torch.float32}  # stored in bfloat16
    unet = diffusers.UNet2DModel.from_pretrained(CIFAR10_DDPM, subfolder="unet").float().eval()
    scheduler = diffusers.DDIMScheduler.from_pretrained(CIFAR10_DDPM, subfolder="scheduler")
    scheduler.set_timesteps(5)
    x = start = images(2, 3, 32, 32)
    for t in scheduler.timesteps:
        x = scheduler.step(unet(x, t).sample, t, x).prev_sample
    ours = ddim(found, start, scheduler.timesteps.tolist())
    assert (ours - x).abs().max() < 1e-4
    assert x.std() > 0.1


SCHEDULES: dict[str, dict[str, Any]] = {
    "linear": {},
    "scaled": {"beta_schedule": "scaled_linear", "num_train_timesteps": 50},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
    "given": {"trained_betas": [0.01, 0.2, 0.05, 0.4], "num_train_timesteps": 4},
    "no signal": {"rescale_betas_zero_snr": True},
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES.keys())
@pytest.mark.parametrize("prediction", ["epsilon", "sample", "v_prediction"])
@torch.no_grad()
def test_the_mean_is_the_schedulers(prediction: str, schedule: dict[str, Any]) -> None:
    scheduler = diffusers.DDPMScheduler(prediction_type=prediction, clip_sample=False, **schedule)
    pipe = tiny_pipeline(scheduler)
    found, x = mmdgs.load(pipe), images()
    last = len(found.levels) - 1
    assert last + 1 == scheduler.config.num_train_timesteps
    # Without signal at the end the mean is divided by nothing where the noise is predicted.
    for t in (0, 1, last // 2, last - 1 if schedule.get("rescale_betas_zero_snr") else last):
        level = found.levels[-1 - t]
        assert level.alpha**2 == pytest.approx(scheduler.alphas_cumprod[t].item(), rel=1e-12)
        expected = scheduler.step(
            pipe.unet(x, t).sample, t, x, generator=seeded(0)
        ).pred_original_sample
        torch.testing.assert_close(found(x, level), expected, rtol=1e-5, atol=1e-5 / level.alpha)


@torch.no_grad()
def test_attention_written_out_is_the_same_and_can_be_differentiated_twice(saved: Path) -> None:
    pipe, found, x = tiny_pipeline(), mmdgs.load(saved), images()
    level = found.levels[300]
    torch.testing.assert_close(found(x, level), mmdgs.load(pipe)(x, level), rtol=1e-4, atol=1e-5)
    with torch.enable_grad():
        x.requires_grad_(True)
        mean = found(x, level)
        v = torch.randn(3, *x.shape, generator=seeded(1))
        (batched,) = torch.autograd.grad(mean, x, v, is_grads_batched=True, retain_graph=True)
        each = [torch.autograd.grad(mean, x, one, create_graph=True)[0] for one in v]
        torch.testing.assert_close(batched, torch.stack(each).detach(), rtol=1e-4, atol=1e-5)
        (second,) = torch.autograd.grad(each[0].square().sum(), x)
    assert second.abs().max() > 0


# --- any level


class UNet2DModel(nn.Module):
    """In place of diffusers' network: the exact noise for N(m, s^2) data, and a note of the
    timesteps it was given.
    """

    m, s, dtype = 0.3, 0.7, torch.float64

    def __init__(self, signal: Tensor, outputs: int = 1) -> None:
        super().__init__()
        self.signal, self.asked = signal.double(), []
        self.config = diffusers.configuration_utils.FrozenDict(
            in_channels=1,
            out_channels=outputs,
            sample_size=(8, 4),
            time_embedding_type="positional",
        )

    def forward(self, x: Tensor, timestep: Tensor, return_dict: bool) -> tuple[Tensor]:
        self.asked.append(timestep.tolist())
        signal = self.signal[timestep.long()].reshape(-1, 1, 1, 1)
        noise = (
            (1 - signal).sqrt() / (signal * self.s**2 + 1 - signal) * (x - signal.sqrt() * self.m)
        )
        return (torch.cat([noise, 100 * noise], 1)[:, : self.config.out_channels],)


def gaussian(outputs: int = 1) -> tuple[mmdgs.Model, Any]:
    scheduler = diffusers.DDPMScheduler()
    network = UNet2DModel(scheduler.alphas_cumprod, outputs)
    return from_pipeline(network, scheduler, "a Gaussian"), network


def exact_mean(x_t: Tensor, level: NoiseLevel | NoiseLevels) -> Tensor:
    gain = level.alpha * 0.49 / (level.alpha**2 * 0.49 + level.sigma**2)
    return 0.3 + gain * (x_t - level.alpha * 0.3)


@pytest.mark.parametrize("outputs", [1, 2], ids=["noise", "noise and variances"])
@pytest.mark.parametrize("t", [0, 1, 499, 999])
@pytest.mark.parametrize("alpha", [None, 1.0, 3.0])
def test_the_moments_of_a_gaussian_are_exact_at_every_scale(
    t: int, alpha: float | None, outputs: int
) -> None:
    found, network = gaussian(outputs)
    assert found.shape == (1, 8, 4)
    level = found.levels[-1 - t]
    if alpha is not None:
        level = NoiseLevel(alpha=alpha, sigma=alpha * level.sigma / level.alpha)
    x_t = level.alpha * images(2, 1, 8, 4).double() + level.sigma
    q = mmdgs.DiagonalMoments(found, probes=None)(x_t, level)
    assert network.asked == [[t]]  # the integer, not 499.9999
    torch.testing.assert_close(q.mean, exact_mean(x_t, level), rtol=1e-7, atol=1e-7)
    variance = 0.49 * level.sigma**2 / (level.alpha**2 * 0.49 + level.sigma**2)
    torch.testing.assert_close(q.cov.diagonal(), torch.full_like(x_t, variance), rtol=1e-7, atol=0)


def test_rows_may_have_levels_of_their_own() -> None:
    found, network = gaussian()
    x_t = images(3, 1, 8, 4).double()
    levels = [found.levels[-1 - t] for t in (999, 20, 0)]
    rows = NoiseLevels.of(levels, x_t)
    torch.testing.assert_close(found(x_t, rows), exact_mean(x_t, rows), rtol=1e-7, atol=1e-7)
    assert network.asked == [[999, 20, 0]]
    found, _ = gaussian()
    single = NoiseLevels.of(
        levels, x_t.float()
    )  # a float32's rounding does not move it off its timestep
    torch.testing.assert_close(
        found(x_t.float(), single), exact_mean(x_t, rows).float(), rtol=1e-3, atol=1e-3
    )


def test_between_timesteps_and_beyond(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "mmdgs")
    found, network = gaussian()
    x_t = images(1, 1, 8, 4).double()
    low, high = (level.sigma / level.alpha for level in (found.levels[-11], found.levels[-12]))
    found(x_t, NoiseLevel(sigma=low**0.75 * high**0.25))
    assert network.asked[0] == pytest.approx([10.25], abs=1e-4)
    assert not caplog.records
    found(x_t, NoiseLevel(sigma=1e-4))
    found(x_t, NoiseLevel(sigma=1e4))
    assert network.asked[1:] == [[0], [999]]
    assert len(caplog.records) == 1
    near = found(x_t, NoiseLevel(sigma=1e-6))
    torch.testing.assert_close(near, x_t, rtol=0, atol=1e-5)  # hardly any noise: hardly any change


def test_the_networks_precision_is_its_own() -> None:
    pipe = tiny_pipeline()
    expected = mmdgs.load(pipe)(images(), NoiseLevel(sigma=1.0)).detach()
    found = mmdgs.load(pipe, dtype=torch.bfloat16)
    out = found(images(), NoiseLevel(sigma=1.0))
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, expected, rtol=0.1, atol=0.1)
    assert not torch.equal(out, expected)


# --- folders


def layouts(folder: Path) -> dict[str, tuple[Path, dict[str, str]]]:
    """The ways a pipeline lies on disk: whole, its network alone, and all in one folder (as
    Google's DDPM).
    """
    flat = folder.parent / "flat"
    shutil.copytree(folder / "unet", flat)
    shutil.copy(folder / "scheduler" / "scheduler_config.json", flat)
    return {
        "whole": (folder, {}),
        "its network": (folder / "unet", {}),
        "a subfolder": (folder, {"subfolder": "unet"}),
        "flat": (flat, {}),
    }


def test_every_layout_of_a_folder(folder: Path) -> None:
    edit(folder / "scheduler" / "scheduler_config.json", beta_end=0.05)
    expected, x = None, images()
    for name, (path, options) in layouts(folder).items():
        found = mmdgs.load(path, **options)
        expected = found(x, found.levels[500]) if expected is None else expected
        assert torch.equal(found(x, found.levels[500]), expected), name
        assert found.levels[0].alpha < 1e-5, name  # the schedule is the one with larger betas
        assert not any(p.requires_grad for p in found.network.parameters())
    assert found.source == str(path)


def test_a_network_without_a_schedule_gets_ddpms_and_the_log_says_so(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "mmdgs")
    alone = Path(shutil.copytree(folder / "unet", folder.parent / "alone"))
    assert mmdgs.load(alone).levels == mmdgs.load(folder).levels
    assert ["without a scheduler" in record.message for record in caplog.records] == [True]


@pytest.mark.parametrize("flat", [False, True])
def test_a_pipeline_on_the_hub(flat: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, **options: Any) -> str:
        asked.append((name, options["allow_patterns"]))
        return str(folder / "unet" if flat else folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert mmdgs.load("google/tiny").source == "google/tiny"
    weights = "diffusion_pytorch_model*.safetensors"
    assert asked == [
        ("google/tiny", ["*.json"]),
        ("google/tiny", [weights if flat else f"unet/{weights}"]),
    ]


# --- what is refused

UNET, SCHEDULE = "unet/config.json", "scheduler/scheduler_config.json"
MISTAKES: list[tuple[str, dict[str, object], str]] = [
    (UNET, {"_class_name": "UNet2DConditionModel"}, "only UNet2DModel"),
    (UNET, {"num_class_embeds": 10}, "class labels"),
    (UNET, {"time_embedding_type": "fourier"}, "takes sigma"),
    (UNET, {"in_channels": 3}, "3 input and 1 output channels"),
    (UNET, {"block_out_channels": [8, 24]}, "shape"),
    (UNET, {"add_attention": False}, "unexpected keys"),
    (UNET, {"down_block_types": ["Down", "Up"]}, "Down"),
    (SCHEDULE, {"_class_name": "ScoreSdeVeScheduler"}, "no alphas_cumprod"),
    (SCHEDULE, {"_class_name": "Nobody"}, "no scheduler"),
    (SCHEDULE, {"prediction_type": "flow"}, "prediction_type 'flow'"),
    (SCHEDULE, {"beta_schedule": "none"}, "none"),
    (SCHEDULE, {"trained_betas": [0.1, -0.1, 0.2]}, "to the cleanest"),
]


@pytest.mark.parametrize(("file", "changes", "named"), MISTAKES)
def test_folders_that_are_refused(
    file: str, changes: dict[str, object], named: str, folder: Path
) -> None:
    edit(folder / file, **changes)
    with torch.random.fork_rng(), refused(named):
        mmdgs.load(folder)


def test_a_pipeline_on_latents_is_refused_but_its_network_can_be_had(folder: Path) -> None:
    edit(folder / "model_index.json", vqvae=["diffusers", "VQModel"])
    with refused("denoises the latents of its vqvae", 'subfolder="unet"'):
        mmdgs.load(folder)
    assert len(mmdgs.load(folder, subfolder="unet").levels) == 1000


def test_weights_that_are_refused(folder: Path) -> None:
    path = folder / "unet" / WEIGHTS
    tensors = load_file(path)
    save_file(tensors | {"conv_out.bias": torch.tensor([float("nan")])}, path)
    with refused("not finite, in conv_out.bias"):
        mmdgs.load(folder)
    path.write_bytes(path.read_bytes()[:500])
    with refused("cannot load the network", "unet"):
        mmdgs.load(folder)
    path.unlink()
    with refused("there is no diffusion_pytorch_model.safetensors in"):
        mmdgs.load(folder)


def test_a_network_without_its_pipeline() -> None:
    with refused("UNet2DModel", "schedule"):
        mmdgs.load(tiny_diffusers_unet())
    pipe = SimpleNamespace(unet=nn.Identity(), scheduler=diffusers.DDPMScheduler())
    pipe.unet.config = {}
    with refused("holds a network Identity"):
        mmdgs.load(pipe)


def test_without_diffusers(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with refused("not installed: pip install mmdgs[diffusers]"):
        mmdgs.load(saved)


# --- convert


def test_pickled_weights_are_converted(folder: Path, tmp_path: Path) -> None:
    expected = mmdgs.load(folder).digest
    path = folder / "unet" / WEIGHTS
    torch.save(load_file(path), path.with_suffix(".bin"))
    path.unlink()
    with refused("its weights are a pickle", "mmdgs convert"):
        mmdgs.load(folder)
    result = converted(folder, "--out", tmp_path / "new")
    assert result.exit_code == 0, result.output
    assert mmdgs.load(tmp_path / "new").digest == expected
    names = sorted(str(p.relative_to(tmp_path / "new")) for p in (tmp_path / "new").rglob("*.*"))
    assert names == ["model_index.json", SCHEDULE, UNET, f"unet/{WEIGHTS}"]


def test_what_cannot_be_converted_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    def said(*words: object) -> str:
        result = converted(*words)
        assert result.exit_code == 2
        return " ".join(result.output.split())

    assert "are safetensors already" in said(folder, "--out", tmp_path / "new")
    assert "the source itself" in said(folder, "--out", folder, "--overwrite")
    (folder / "unet" / WEIGHTS).unlink()
    assert "no diffusion_pytorch_model.bin" in said(folder, "--out", tmp_path / "new")
    for option in (["--raw"], ["--size", "8"]):
        assert f"{option[0]} is for an NCSNv2" in said(folder, "--out", tmp_path / "new", *option)
    pickled = folder / "unet" / "diffusion_pytorch_model.bin"
    for content, message in (([1], "no dictionary"), ({"a": torch.zeros(1)}, "architecture")):
        torch.save(content, pickled)
        with torch.random.fork_rng():
            assert message in said(folder, "--out", tmp_path / "new")
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"]

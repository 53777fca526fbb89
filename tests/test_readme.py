"""The Python examples of the README and the docs, run as a user would paste them."""

import re
from pathlib import Path

import pytest
import torch
from nets import lively, tiny_pipeline
from shared import CIFAR10_DDPM, needs_cifar10_ddpm
from toy_models import stand_in_model

import mmdgs
from mmdgs.networks import NCSNv2

ROOT = Path(__file__).parents[1]
USE = ROOT / "docs" / "use"
README, COMMANDS = ROOT / "README.md", USE / "commands.md"
INTEROP = USE / "interop.md"
"""Its examples run in test_interop_azula.py and test_interop_deepinv.py."""
HUB = "google/ddpm-cifar10-32"
"""A model that examples fetch: tests put one of this machine in its place."""


def blocks_of(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)


def run_blocks(page: Path, **scope: object) -> dict[str, object]:
    """Run a page's blocks one after another; `scope` is what its text takes as given."""
    blocks = [block for block in blocks_of(page) if HUB not in block]
    assert blocks
    for block in blocks:
        exec(compile(block, str(page), "exec"), scope)
    return scope


def test_the_examples_run_in_order(tmp_path, monkeypatch):
    """A tiny network of many levels stands in for that of faces, which takes a minute."""
    load, stand_in = mmdgs.load, stand_in_model(tmp_path / "faces")
    models = {"celeba": stand_in}
    monkeypatch.setattr(mmdgs, "load", lambda name: models.get(name) or load(name), raising=False)
    monkeypatch.chdir(tmp_path)
    scope = run_blocks(README)
    assert scope["chain"].shape == (50, 100, 2)
    assert scope["draws"].shape == (2, 4, 3, 16, 16)
    assert (tmp_path / "posterior.png").stat().st_size > 1000
    # The exact denoiser of the rings leaves 0.79 of the noise's variance.
    held_out, level = scope["held_out"], scope["level"]
    x_t = mmdgs.add_noise(held_out, level, generator=torch.Generator().manual_seed(1))
    q = mmdgs.FullMoments(scope["denoiser"])(x_t, level)
    assert (q.mean - held_out).square().mean() < 0.83 * level.variance
    assert q.repaired.mean() < 0.01
    (report,) = scope["moments"].report.values()
    assert report.interval_coverage == pytest.approx(0.9, abs=0.02)
    assert report.repaired < 0.1


def test_the_examples_of_commands_run():
    assert run_blocks(COMMANDS)["samples"].x.shape == (4, 1, 28, 28)


@pytest.mark.parametrize(
    "shared", [False, pytest.param(True, marks=[pytest.mark.slow, needs_cifar10_ddpm])]
)
def test_the_lines_that_sample_a_model_of_diffusers(shared: bool, tmp_path):
    pytest.importorskip("diffusers")
    folder = CIFAR10_DDPM if shared else tmp_path
    if not shared:
        tiny_pipeline().save_pretrained(tmp_path)
    (block,) = [block for block in blocks_of(COMMANDS) if HUB in block]
    assert len(block.splitlines()) == 5
    for written, smaller in ((HUB, str(folder)), ("(232,", "(3,"), ("plan, 4)", "plan, 1)")):
        assert written in block
        block = block.replace(written, smaller)
    scope: dict[str, object] = {"mmdgs": mmdgs}
    exec(compile(block, str(COMMANDS), "exec"), scope)
    samples = scope["samples"]
    assert samples.x.shape == (1, *scope["model"].shape)
    assert (samples.cost.forwards, samples.cost.products) == (2 * 3 + 1, 2 * 3 * 3)


def test_the_examples_with_pretrained_networks_run(tmp_path, monkeypatch):
    pytest.importorskip("diffusers")
    monkeypatch.chdir(tmp_path)
    network = lively(NCSNv2(3, width=2))
    state = {"module.sigmas": torch.tensor([1.0, 0.1])}
    state |= {f"module.{key}": value for key, value in network.state_dict().items()}
    torch.save([state, {}, 1, 1, network.state_dict()], "checkpoint.pth")
    tiny_pipeline().save_pretrained("ddpm")
    monkeypatch.setenv("TQDM_DISABLE", "1")
    scope = run_blocks(USE / "bring-your-model.md")
    variances = scope["posterior"].cov.diagonal()
    assert torch.allclose(variances, torch.tensor(0.25 * 0.8))  # sigma^2 times the slope
    assert scope["q"].mean.shape == (2, 3, 32, 32)
    assert len(scope["images"]) == 2
    assert len(scope["table"].variances.ratios) == 10


def test_the_examples_of_samplers_run():
    scope = run_blocks(USE / "sample.md")
    run = scope["run"]
    assert run.x.shape == (8, 2)
    # Three probes of two numbers: the exact diagonal, by two.
    assert (run.cost.forwards, run.cost.products) == (20, 19 * 2)


def test_every_file_the_readme_points_to_exists():
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", README.read_text()):
        assert (README.parent / target).exists(), target

"""The models of images that ship: they denoise real images, know their errors, and are sampled by
their names.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from shared import FACES, cifar10_test_images, needs_cifar10_files, needs_faces
from torch import Tensor
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli
from mmdgs.data import load_images, midpoints
from mmdgs.linalg.spectral import to_cosines
from mmdgs.models import Model
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams, randn_like


def slow(*values: object) -> object:
    """Values of a test that `make test-all` runs."""
    return pytest.param(*values, marks=pytest.mark.slow)


@cache
def loaded(name: str) -> Model:
    return mmdgs.load(name)


@pytest.fixture(scope="module")
def model() -> Model:
    return loaded("cifar10")


@pytest.fixture(scope="module")
def x() -> Tensor:
    """Test images in [0, 1], which the model has not seen."""
    return midpoints(cifar10_test_images(rows=1, columns=16)[0])


@cache
def denoised(model: Model, x: Tensor, sigma: float, told: float = 1.0) -> tuple[Tensor, Tensor]:
    x_t = x + sigma * randn_like(x, Streams(0, len(x)))
    with torch.no_grad():
        return x_t, model(x_t, NoiseLevel(sigma=told * sigma))


@needs_cifar10_files
@pytest.mark.parametrize(
    ("sigma", "most"),
    [slow(0.02, 1.6e-4), slow(0.1, 1.5e-3), (0.3, 5.5e-3), slow(1.0, 2e-2), (8.0, 6e-2)],
)
def test_it_denoises(sigma: float, most: float, model: Model, x: Tensor) -> None:
    error = (denoised(model, x, sigma)[1] - x).square().mean()
    assert 0.5 * most < error < most


@needs_cifar10_files
def test_the_score_network_denoises_as_well_at_its_level(model: Model, x: Tensor) -> None:
    score = loaded("cifar10-score")
    errors = [
        (denoised(one, x, score.level.sigma)[1] - x).square().mean() for one in (score, model)
    ]
    assert (
        0.99 * errors[1] < errors[0] < 1.1 * errors[1]
    )  # a smaller network that saw a twentieth of the images
    assert score.config.isotropic_variance == pytest.approx(errors[0].item(), rel=0.5)


@needs_faces
@pytest.mark.parametrize(("sigma", "most"), [(0.1, 1.5e-3), slow(1.0, 1.2e-2)])
def test_that_of_faces_denoises_faces(sigma: float, most: float) -> None:
    x = midpoints(load_images(str(FACES), "test", size=64, limit=4).images)
    error = (denoised(mmdgs.load("celeba"), x, sigma)[1] - x).square().mean()
    assert 0.3 * most < error < most


@needs_cifar10_files
def test_it_sees_by_itself_how_noisy_an_image_is(model: Model, x: Tensor) -> None:
    # It was trained with level_jitter: samplers may be wrong about their noise.
    right = (denoised(model, x, 0.3)[1] - x).square().mean()
    wrong = (denoised(model, x, 0.3, told=1.1)[1] - x).square().mean()
    assert wrong < 1.01 * right


@needs_cifar10_files
def test_it_knows_its_errors(model: Model, x: Tensor) -> None:
    level = NoiseLevel(sigma=0.3)
    x_t, mean = denoised(model, x[:6], level.sigma)
    q = mmdgs.DiagonalMoments(model, probes=3)(x_t, level, generator=Streams(1, len(x_t)))
    torch.testing.assert_close(q.mean, mean, rtol=1e-4, atol=1e-4)
    ratio = (mean - x[:6]).square().mean() / q.cov.diagonal().mean()
    assert 0.8 < ratio < 1.25


@needs_cifar10_files
@pytest.mark.parametrize("name", ["cifar10", "cifar10-score"])
def test_a_spectrum_is_that_of_the_errors(name: str, x: Tensor) -> None:
    level = NoiseLevel(sigma=0.3)
    _, mean = denoised(loaded(name), x, level.sigma)
    found = to_cosines(x - mean).square().mean(0)
    kept = loaded(name).posterior(mmdgs.covariances.Spectral(calibrated=False)).variances[level]
    for part in (
        slice(0, 4),
        slice(4, 12),
        slice(12, 32),
    ):  # of 48 numbers and more each, from 16 images
        ratio = found[:, part, part].mean() / kept[:, part, part].mean()
        assert 0.6 < ratio < 1.6


@pytest.mark.parametrize(
    ("name", "more", "forwards"),
    [
        slow("cifar10", [], 7),
        ("cifar10", ["--sampler", "ancestral", "--covariance", "spectral"], 4),
        slow("cifar10-score", ["--covariance", "isotropic"], 4),
        ("cifar10-score", ["--covariance", "spectral", "--mean"], 4),
        slow("celeba", [], 7),
    ],
)
def test_they_are_sampled_by_their_names(
    name: str, more: list[str], forwards: int, tmp_path: Path
) -> None:
    words = ["sample", name, *more, "-n", "2", "--steps", "4", "--device", "cpu"]
    result = CliRunner().invoke(cli.app, [*words, "--out", str(tmp_path / "two.png")])
    assert result.exit_code == 0, result.output
    assert f"2 images: {forwards} forwards and 0 Jacobian products each" in result.output
    with Image.open(tmp_path / "two.png") as picture:
        assert picture.mode == "RGB"
        assert np.asarray(picture).std() > 20


@pytest.mark.slow
def test_at_one_level_the_spectral_covariance_keeps_the_contrast(tmp_path: Path) -> None:
    """An isotropic one, whose noise no image has, ends in small shapes before a plain ground."""
    contrast = {}
    for covariance in ("isotropic", "spectral"):
        out = tmp_path / f"{covariance}.npz"
        words = ["sample", "cifar10-score", "--covariance", covariance, "--mean"]
        words += ["-n", "6", "--steps", "15"]
        result = CliRunner().invoke(cli.app, [*words, "--device", "cpu", "--out", str(out)])
        assert result.exit_code == 0, result.output
        with np.load(out) as stored:
            contrast[covariance] = stored["arr_0"].std(axis=(1, 2, 3)).mean()
    assert contrast["spectral"] > 1.3 * contrast["isotropic"]

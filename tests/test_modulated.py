"""A spectrum whose strength changes from place to place: the covariance, its head, and the way
through training.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy
import pytest
import torch
from nets import random_images, save_pictures
from oracles import SCALED, assert_acts_as, dense_given, numbers
from torch import Tensor
from toy_models import many_level_model
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli, losses
from mmdgs.errors import UsageError
from mmdgs.linalg import Modulated, Spectral
from mmdgs.models import load_head
from mmdgs.moments.heads import head_inputs
from mmdgs.networks.spectrum_head import SpectrumHead
from mmdgs.noise import NoiseLevel, NoiseLevels, add_noise
from mmdgs.operators import Box, Mask
from mmdgs.posterior import Gaussian
from mmdgs.randomness import Streams, seeded
from mmdgs.training import Recipe, TrainingSettings, read_recipe, train_model

SHAPE, B = (3, 4, 4), 2
run = CliRunner().invoke


def modulated(shape: tuple[int, ...] = SHAPE) -> Modulated:
    spectral = Spectral(numbers(B, *shape, seed=2).square() + 0.05)
    return Modulated(0.5 * numbers(B, *shape, seed=1), spectral)


def written_out(cov: Modulated) -> Tensor:
    """T' S T Q V Q' T' S T by matrices, (B, d, d)."""
    colours, side, d = cov.log_scales.shape[1], cov.log_scales.shape[-1], cov.log_scales[0].numel()

    def dct(n: int) -> Tensor:
        k = torch.arange(n, dtype=torch.float64)
        rows = torch.cos(math.pi / n * (k + 0.5) * k[:, None]) * math.sqrt(2 / n)
        rows[0] /= math.sqrt(2)
        return rows

    t = torch.kron(dct(colours), torch.eye(side * side, dtype=torch.float64))
    q = torch.kron(dct(colours), torch.kron(dct(side), dct(side)))
    m = t.mT @ torch.diag_embed(cov.log_scales.exp().reshape(-1, d)) @ t
    return m @ q.mT @ torch.diag_embed(cov.spectral.variances.reshape(-1, d)) @ q @ m


@pytest.mark.parametrize("shape", [(3, 4, 4), (1, 5, 5)])
def test_it_is_the_matrix_written_out(shape: tuple[int, ...]) -> None:
    cov, like = modulated(shape), numbers(B, *shape)
    matrix = written_out(cov)
    for scale, shift in ((1.0, 0.0), (0.3, 0.0), (0.3, 0.2)):
        expected = scale * matrix + shift * torch.eye(matrix.shape[1], dtype=torch.float64)
        assert_acts_as(cov.affine(1.0, 0.0).affine(scale, shift), expected, like)


@pytest.mark.parametrize("operator", [Mask.random(SHAPE, 0.5, generator=seeded(0)), Box(SHAPE, 2)])
def test_given_measurements_it_is_the_closed_form(operator: mmdgs.operators.Operator) -> None:
    cov, mean, y = modulated(), numbers(B, *SHAPE, seed=4), numbers(B, *operator.out_shape, seed=5)
    q = Gaussian(mean, cov).given(y, operator, 0.3)
    expected, matrix = dense_given(mean, written_out(cov), operator, y, 0.3)
    torch.testing.assert_close(q.mean, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(q.cov.dense(), matrix, rtol=1e-6, atol=1e-6)


# --- the network


def head_network(**changes: object) -> SpectrumHead:
    options = {"size": (8, 8), "ends": (0.1, 10.0), "knots": 3, "width": 4, "multipliers": [1]}
    return SpectrumHead(2, 2, **{**options, "attention": [], **changes})


def test_the_inputs_of_a_head_are_the_noise_and_the_mean_in_their_own_units() -> None:
    clean, noise = numbers(2, 1, 4, 4), numbers(2, 1, 4, 4, seed=1)
    x_t = SCALED.alpha * clean + SCALED.sigma * noise
    inputs = head_inputs(x_t, clean, SCALED, data_std=0.25)
    torch.testing.assert_close(inputs, torch.cat([noise, 4 * clean], 1))


def test_the_spectrum_is_interpolated_in_logarithms() -> None:
    network = head_network()
    with torch.no_grad():
        network.log_variances.copy_(torch.arange(3.0)[:, None, None, None].expand(3, 1, 8, 8))
    assert network.ratios == pytest.approx([0.1, 1.0, 10.0])
    for sigma, expected in ((0.1, 0.0), (10**0.5, 1.5), (0.01, 0.0), (99.0, 2.0)):
        mean = network.spectrum(NoiseLevel(sigma=sigma)).mean().item()
        assert mean == pytest.approx(expected, abs=1e-5)
    rows = NoiseLevels.of(
        [NoiseLevel(sigma=0.1), NoiseLevel(alpha=0.1, sigma=1.0)], torch.zeros(2, 1, 8, 8)
    )
    assert network.spectrum(rows).mean((1, 2, 3)).tolist() == pytest.approx([0.0, 2.0], abs=1e-5)


@pytest.mark.parametrize("wrong", [{"knots": 0}, {"ends": (1.0, 0.5)}])
def test_tables_that_are_none_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="knots"):
        head_network(**wrong)


# --- training, and what comes of it


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Pictures, a denoiser of five levels, and a head that was trained for it."""
    folder = tmp_path_factory.mktemp("modulated")
    names = [f"{'test' if i % 5 == 0 else 'train'}/{i:02}" for i in range(30)]
    save_pictures(folder / "pictures", random_images(30, (1, 8, 8)), names)
    mmdgs.save(many_level_model(), folder / "denoiser")
    train_model(recipe(folder), folder / "head", progress=None)
    return folder / "pictures", folder / "denoiser", folder / "head"


def recipe(folder: Path, **changes: object) -> Recipe:
    small = {"width": 4, "multipliers": [1], "attention": [], "knots": 4}
    keys = {
        "data": str(folder / "pictures"),
        "model": "spectrum-head",
        "network": small,
        "param": "covariance",
    }
    settings = TrainingSettings(steps=30, batch_size=12, learning_rate=1e-2, ema=0.5)
    return Recipe(**{**keys, "denoiser": str(folder / "denoiser"), "training": settings, **changes})


def test_training_makes_held_out_images_likelier(trained: tuple[Path, Path, Path]) -> None:
    pictures, folder, head = trained
    denoiser = mmdgs.load(folder)
    x = denoiser.scaled(mmdgs.data.midpoints(mmdgs.data.load_images(str(pictures), "test").images))
    isotropic, own = [], []
    for level in (denoiser.levels[0], denoiser.levels[-1]):
        streams = Streams(0, len(x))
        loss = losses.covariance(load_head(head, denoiser), denoiser, x, level, generator=streams)
        own.append(loss.mean().item())
        x_t = add_noise(x, level, generator=Streams(0, len(x)))
        error = (x - denoiser(x_t, level)).square().mean()
        isotropic.append(0.5 * x[0].numel() * (1 + math.log(2 * math.pi * error.item())))
    assert all(a < b for a, b in zip(own, isotropic, strict=True))


def test_it_is_a_covariance_by_name(trained: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, folder, head = trained
    model = mmdgs.load(folder)
    moments = model.posterior(mmdgs.covariances.Modulated(head=head))
    assert isinstance(moments, mmdgs.ModulatedMoments)
    x_t = numbers(3, *model.shape).float()
    q = moments(x_t, model.levels[2], generator=Streams(0, 3))
    assert isinstance(q.cov, Modulated)
    torch.testing.assert_close(q.mean, model(x_t, model.levels[2]))
    words = f"--sampler ancestral --covariance modulated --head {head} -n 3 --steps 3"
    for size in (1, 3):
        more = ["--batch-size", str(size), "--out", str(tmp_path / f"{size}.npz")]
        result = run(cli.app, ["sample", str(folder), *words.split(), *more])
        assert result.exit_code == 0, result.output
        assert "0 Jacobian products" in result.output
    single, three = (numpy.load(tmp_path / f"{size}.npz")["arr_0"].astype(int) for size in (1, 3))
    assert abs(single - three).max() <= 1


def test_a_head_beside_its_model_is_found(trained: tuple[Path, Path, Path], tmp_path: Path) -> None:
    _, folder, head = trained
    model = mmdgs.load(folder)
    with pytest.raises(UsageError, match="--head"):
        model.posterior("modulated")
    copy = mmdgs.save(model, tmp_path / "copy")
    mmdgs.save(mmdgs.load(head), copy / "covariance-head")
    assert isinstance(mmdgs.load(copy).posterior("modulated"), mmdgs.ModulatedMoments)


def test_restoring_with_it(trained: tuple[Path, Path, Path]) -> None:
    _, folder, head = trained
    model = mmdgs.load(folder)
    moments = model.posterior(mmdgs.covariances.Modulated(head=head))
    operator = Box(model.shape, 4)
    y = operator(numbers(2, *model.shape).float())
    options = {"noise": 0.1, "covariance": moments, "steps": 3, "draws": 2, "progress": None}
    whole, cut = (mmdgs.restore(model, y, operator, batch_size=n, **options) for n in (4, 1))
    assert whole.draws.isfinite().all()
    torch.testing.assert_close(whole.draws, cut.draws, rtol=1e-3, atol=1e-3)


def test_heads_are_refused_where_they_do_not_belong(trained: tuple[Path, Path, Path]) -> None:
    _, folder, head = trained
    with pytest.raises(UsageError, match="variance-ratio"):
        mmdgs.load(folder).posterior(mmdgs.covariances.named("ocm", {"head": head}))


def test_recipes(trained: tuple[Path, Path, Path]) -> None:
    folder = trained[0].parent
    assert read_recipe(None, {"loss": "covariance", "denoiser": "cifar10"}).model == "spectrum-head"
    with pytest.raises(UsageError, match="spectrum-head"):
        train_model(recipe(folder, model="unet-tiny", network={}), folder / "none", progress=None)
    with pytest.raises(UsageError, match="denoiser"):
        Recipe(param="covariance")

"""Isotropic variances and spectra: estimated once from data, kept, and only what is missing estimated anew."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path

import pytest
import torch
from mmdgs.generation.spectra import KNOTS, spectrum_files
from mmdgs.generation.variances import variance_files
from nets import random_images
from PIL import Image
from toy_models import LEVELS, SHAPE, Weights, many_level_model
from torch import Tensor
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli, moments
from mmdgs.data import midpoints
from mmdgs.errors import UsageError
from mmdgs.generation import FitData, isotropic_moments, spectral_moments
from mmdgs.models import Model
from mmdgs.moments.spectral import SpectralMoments
from mmdgs.noise import NoiseLevel
from mmdgs.randomness import Streams

run = CliRunner().invoke
IMAGES = 30


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MMDGS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def data(tmp_path: Path) -> FitData:
    folder = tmp_path / "pictures" / "train"
    folder.mkdir(parents=True)
    for i, image in enumerate(random_images(IMAGES, (3, 2, 2))):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(folder / f"{i:03}.png")
    shutil.copytree(folder, folder.parent / "test")
    return FitData(str(folder.parent), IMAGES, seed=3)


class Counting:
    """The denoiser of uniform noise in [-1, 1], as if it were Gaussian; it counts the levels it was asked for."""

    def __init__(self) -> None:
        self.asked: list[NoiseLevel] = []

    def __call__(self, x_t: Tensor, level: NoiseLevel) -> Tensor:
        self.asked.append(level)
        return level.alpha / 3 / (level.alpha**2 / 3 + level.sigma**2) * x_t


def model(denoiser: Counting, source: str = "a test", interval: tuple[float, float] = (-1.0, 1.0)) -> Model:
    return Pretrained(denoiser, LEVELS, SHAPE, interval, Weights(), source)


def fitted(denoiser: Counting, levels: tuple[NoiseLevel, ...], data: FitData | None, source: str = "a test"):
    return isotropic_moments(model(denoiser, source), levels, data, progress=None)


def test_the_variances_are_those_of_the_data_in_the_models_interval(data: FitData) -> None:
    denoiser = Counting()
    found = fitted(denoiser, LEVELS, data)
    x = 2 * midpoints(random_images(IMAGES, SHAPE)) - 1
    for level in LEVELS:
        by_hand = mmdgs.IsotropicMoments.fit(denoiser, x, level, generator=Streams(3, IMAGES))
        assert found.variances[level] == by_hand.variances[level]
    cleanest = LEVELS[-1]
    expected = cleanest.sigma**2 / 3 / (1 / 3 + cleanest.sigma**2)  # of a Gaussian of variance 1/3
    assert found.variances[cleanest] == pytest.approx(expected, rel=3 * (2 / 360) ** 0.5)  # 30 images of 12 numbers
    fewer = FitData(data.name, 5, seed=3)
    assert fitted(denoiser, LEVELS[-1:], fewer).variances[cleanest] != found.variances[cleanest]


def test_they_are_estimated_once(data: FitData) -> None:
    first = Counting()
    found = fitted(first, LEVELS[:3], data)
    assert first.asked == list(LEVELS[:3])
    again = Counting()
    assert fitted(again, LEVELS[:3], data).variances == found.variances
    assert again.asked == []
    more = Counting()
    all_of_them = fitted(more, LEVELS, data)
    assert more.asked == list(LEVELS[3:])  # what was missing, and no more
    assert {level: all_of_them.variances[level] for level in LEVELS[:3]} == found.variances
    # In another order they come out the same: a level's variance is its own.
    (path,) = variance_files(model(first))
    path.unlink()
    assert fitted(Counting(), LEVELS[::-1], data).variances == all_of_them.variances
    # Other data, another count, another seed: other variances, kept beside the first.
    for other in (FitData(data.name, IMAGES, seed=4), FitData(data.name, 7, seed=3)):
        one = Counting()
        fitted(one, LEVELS[:2], other)
        assert one.asked == list(LEVELS[:2])
    unasked = Counting()
    fitted(unasked, LEVELS, data)
    assert unasked.asked == []


def test_other_weights_have_other_variances(data: FitData, tmp_path: Path) -> None:
    folder = tmp_path / "model"  # of one that was trained on: the file beside it is the same
    folder.mkdir()
    fitted(Counting(), LEVELS[:1], data, str(folder))
    other, kept = Counting(), Counting()
    network = Weights()
    torch.nn.init.zeros_(network.weight)
    changed = Pretrained(other, LEVELS, SHAPE, (-1.0, 1.0), network, str(folder))
    with pytest.raises(UsageError, match="no isotropic variances are kept"):
        isotropic_moments(changed, LEVELS[:1], progress=None)
    isotropic_moments(changed, LEVELS[:1], data, progress=None)
    assert other.asked == [LEVELS[0]]
    fitted(kept, LEVELS[:1], data, str(folder))
    assert kept.asked == []


def test_they_lie_beside_the_model_or_in_the_cache(data: FitData, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    fitted(Counting(), LEVELS[:1], data, str(folder))
    assert [path.name for path in folder.iterdir()] == ["isotropic.json"]
    assert not cache.exists()
    (folder / "isotropic.json").unlink()
    folder.chmod(0o555)
    fitted(Counting(), LEVELS[:1], data, str(folder))
    assert list(folder.iterdir()) == []
    kept = Counting()
    fitted(kept, LEVELS[:1], data, str(folder))
    assert kept.asked == []
    assert len(list((cache / "isotropic").iterdir())) == 1


@pytest.mark.parametrize(
    "damage",
    [
        b"",
        b"{",
        b"[]",
        b'{"fits": [{"digest": 1}]}',
        b'{"fits": 3}',
        b'{"fits": [{"digest": "a", "key": {"images": 3}, "levels": [[1.0, 1.0, -2.0, false]]}]}',
    ],
)
def test_a_damaged_file_is_made_anew(damage: bytes, data: FitData, caplog: pytest.LogCaptureFixture) -> None:
    found = fitted(Counting(), LEVELS[:2], data)
    (path,) = variance_files(model(Counting()))
    path.write_bytes(damage)
    again = Counting()
    with caplog.at_level(logging.WARNING, "mmdgs"):
        assert fitted(again, LEVELS[:2], data).variances == found.variances
    assert again.asked == list(LEVELS[:2])
    assert any("cannot be read" in record.message and path.name in record.message for record in caplog.records)
    assert len(json.loads(path.read_text())["fits"]) == 1


def test_without_data_what_is_kept_will_do(data: FitData) -> None:
    with pytest.raises(UsageError, match=re.escape("no isotropic variances are kept for a test at these 2 levels")):
        fitted(Counting(), LEVELS[:2], None)
    fitted(Counting(), LEVELS[:2], FitData(data.name, 5, seed=3))
    best = fitted(Counting(), LEVELS[:2], data)
    kept = Counting()
    assert fitted(kept, LEVELS[:2], None).variances == best.variances  # of the most images
    assert kept.asked == []
    with pytest.raises(UsageError, match="such as --data cifar10"):
        fitted(Counting(), LEVELS[:3], None)


def test_a_variance_that_was_lifted_is_reported_as_such(data: FitData) -> None:
    for file in Path(data.name).rglob("*.png"):
        Image.new("RGB", (2, 2), (127, 127, 127)).save(file)

    def knowing(x_t: Tensor, level: NoiseLevel) -> Tensor:
        return torch.full_like(x_t, 2 * 127.5 / 256 - 1)  # the one image there is: no error at all

    bad = Pretrained(knowing, LEVELS, SHAPE, (-1.0, 1.0), Weights(), "a test")
    for _ in range(2):  # fitted, and read back
        found = isotropic_moments(bad, LEVELS[:1], data, progress=None)
        assert found.lifted == {LEVELS[0]}
        assert found.variances[LEVELS[0]] == pytest.approx(moments.FLOOR * LEVELS[0].variance)


def test_data_that_do_not_fit_the_model(data: FitData) -> None:
    points = Pretrained(Counting(), LEVELS, (12,), (-1.0, 1.0), Weights(), "a test")
    with pytest.raises(UsageError, match=re.escape("estimated from images, and this model's are (12,)")):
        isotropic_moments(points, LEVELS, data, progress=None)
    oblong = Pretrained(Counting(), LEVELS, (3, 2, 4), (-1.0, 1.0), Weights(), "a test")
    with pytest.raises(UsageError, match=re.escape("are (3, 2, 2), and the model's (3, 2, 4)")):
        isotropic_moments(oblong, LEVELS, data, progress=None)


@pytest.mark.parametrize("covariance", ["isotropic", "spectral"])
def test_the_command_fits_once_and_then_needs_no_data(
    covariance: str, data: FitData, cache: Path, tmp_path: Path
) -> None:
    folder = mmdgs.save(many_level_model((3, 8, 8)), tmp_path / "model")
    common = ["sample", str(folder), "--covariance", covariance, "--sweeps", "1", "--n", "2", "--device", "cpu"]
    result = run(cli.app, [*common, "--out", str(tmp_path / "a.npz")])
    assert result.exit_code == 2
    assert "such as --data cifar10" in " ".join(result.output.split())
    fit = ["--data", data.name, "--fit-images", "6"]
    result = run(cli.app, [*common, *fit, "--out", str(tmp_path / "a.npz")])
    assert result.exit_code == 0, result.output
    assert "0 Jacobian products each" in result.output
    record = json.loads((tmp_path / "a.samples.json").read_text())
    assert record["settings"][covariance] == {"data": data.name, "images": 6, "seed": 0, "of": "errors"}
    assert (folder / "isotropic.json").is_file() if covariance == "isotropic" else list((cache / "spectral").iterdir())
    result = run(cli.app, [*common, "--out", str(tmp_path / "b.npz")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


# --- spectra ----------------------------------------------------------------------------------------------------


def spectrum(denoiser: Counting, data: FitData | None, source: str = "a test") -> SpectralMoments:
    return spectral_moments(model(denoiser, source), data, progress=None)


def test_a_spectrum_is_fitted_between_the_ends_of_the_models_range(data: FitData) -> None:
    denoiser = Counting()
    found = spectrum(denoiser, data)
    ends = sorted(level.sigma / level.alpha for level in (LEVELS[0], LEVELS[-1]))
    assert len(found.ratios) == KNOTS
    assert found.ratios[[0, -1]].tolist() == pytest.approx(ends)
    x = 2 * midpoints(random_images(IMAGES, SHAPE)) - 1
    level = NoiseLevel(sigma=found.ratios[7].item())
    by_hand = SpectralMoments.fit(denoiser, x, [level], generator=Streams(3, IMAGES))
    torch.testing.assert_close(found.variances[7], by_hand.variances[0], rtol=1e-6, atol=0)


def test_a_spectrum_of_the_same_data_is_not_fitted_again(data: FitData) -> None:
    found = spectrum(Counting(), data)
    again = Counting()
    kept = spectrum(again, data)
    assert again.asked == []
    assert torch.equal(kept.variances, found.variances)
    other = Counting()
    spectrum(other, FitData(data.name, 5, seed=3))
    assert len(other.asked) == KNOTS
    without = Counting()
    assert torch.equal(spectrum(without, None).variances, found.variances)  # of the most images
    assert without.asked == []


def test_a_spectrum_may_come_with_the_model(data: FitData, tmp_path: Path, cache: Path) -> None:
    with pytest.raises(UsageError, match="no spectrum is kept for a test: give the data"):
        spectrum(Counting(), None)
    found = spectrum(Counting(), data)
    (file,) = spectrum_files(model(Counting()))
    (tmp_path / "model").mkdir()
    file.rename(tmp_path / "model" / "spectral.safetensors")
    kept = spectrum(Counting(), None, str(tmp_path / "model"))
    assert torch.equal(kept.variances, found.variances)


def test_a_damaged_spectrum_is_left_aside(data: FitData, caplog: pytest.LogCaptureFixture) -> None:
    spectrum(Counting(), data)
    (file,) = spectrum_files(model(Counting()))
    file.write_bytes(file.read_bytes()[:100])
    again = Counting()
    with caplog.at_level(logging.WARNING, "mmdgs"):
        spectrum(again, data)
    assert len(again.asked) == KNOTS
    assert any("cannot be read" in record.message and file.name in record.message for record in caplog.records)


def test_a_model_that_ships_is_known_by_its_name_and_left_as_it_is(cache: Path) -> None:
    found = [file.parent.name for file in spectrum_files(model(Counting(), "cifar10"))]
    assert found == ["cifar10"]
    assert spectrum_files(model(Counting(), "")) == []
    (file,) = variance_files(model(Counting(), "cifar10"))
    assert file.is_relative_to(cache)

"""Fitted variances, isotropic and spectral: estimated once from data, kept, and added to."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from nets import random_images, save_pictures
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from toy_models import LEVELS, SHAPE, Weights, any_size_model, many_level_model
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli
from mmdgs.data import midpoints
from mmdgs.data.folders import load_pictures
from mmdgs.errors import UsageError
from mmdgs.linalg.spectral import resampled
from mmdgs.models import FitData, Model
from mmdgs.models.fits import CROP, KNOTS, FitStore, isotropic_moments, spectral_moments
from mmdgs.moments import FLOOR, CalibratedMoments, IsotropicMoments, SpectralMoments
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.randomness import Streams

run = CliRunner().invoke
IMAGES = 30
KEPT = 1e-5  # logarithms are kept in float32


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MMDGS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def data(tmp_path: Path) -> FitData:
    folder = save_pictures(tmp_path / "pictures" / "train", random_images(IMAGES, (3, 2, 2)))
    shutil.copytree(folder, folder.parent / "test")
    return FitData(str(folder.parent), IMAGES, seed=3)


class Counting:
    """The denoiser of uniform noise in [-1, 1], as if Gaussian; it notes the levels asked for."""

    def __init__(self) -> None:
        self.asked: list[NoiseLevel] = []

    def __call__(self, x_t: Tensor, level: NoiseLevel) -> Tensor:
        self.asked.append(level)
        return level.alpha / 3 / (level.alpha**2 / 3 + level.sigma**2) * x_t


def model_of(denoiser: mmdgs.Denoiser, folder: Path | None = None, weight: float = 1.0) -> Model:
    network = Weights()
    torch.nn.init.constant_(network.weight, weight)
    model = Model(denoiser, network, LEVELS, SHAPE, (-1.0, 1.0), str(folder or "a test"))
    model.folder = folder
    return model


def fitted(
    denoiser: Counting,
    levels: Sequence[NoiseLevel],
    data: FitData | None,
    folder: Path | None = None,
) -> LevelTable:
    """The isotropic variances."""
    model = model_of(denoiser, folder)
    return isotropic_moments(model, levels, data, progress=None).variances


def same(one: LevelTable, other: LevelTable) -> bool:
    return torch.equal(one.ratios, other.ratios) and torch.equal(one.values, other.values)


def files(kind: str, folder: Path | None = None) -> list[Path]:
    return FitStore(model_of(Counting(), folder), kind).files()


# --- isotropic


def test_the_variances_are_those_of_the_data_in_the_models_interval(data: FitData) -> None:
    denoiser = Counting()
    variances = fitted(denoiser, LEVELS, data)
    x = 2 * midpoints(random_images(IMAGES, SHAPE)) - 1
    for level in LEVELS:
        streams = Streams(3, IMAGES, purpose="fit")
        by_hand = IsotropicMoments.fit(denoiser, x, level, generator=streams).variances
        assert variances[level] == pytest.approx(by_hand[level], rel=KEPT)
    cleanest = LEVELS[-1]
    expected = cleanest.sigma**2 / 3 / (1 / 3 + cleanest.sigma**2)  # of a Gaussian of variance 1/3
    # 30 images of 12 numbers.
    assert variances[cleanest] == pytest.approx(expected, rel=3 * (2 / 360) ** 0.5)
    fewer = FitData(data.name, 5, seed=3)
    assert fitted(denoiser, LEVELS[-1:], fewer)[cleanest] != variances[cleanest]


def test_they_are_estimated_once(data: FitData) -> None:
    first = Counting()
    three = fitted(first, LEVELS[:3], data)
    assert first.asked == list(LEVELS[:3])
    again = Counting()
    assert same(fitted(again, LEVELS[:3], data), three)
    rescaled = tuple(NoiseLevel(alpha=0.3, sigma=0.3 * level.sigma) for level in LEVELS[:3])
    fitted(again, rescaled, data)  # only sigma / alpha counts
    assert again.asked == []
    more = Counting()
    all_of_them = fitted(more, LEVELS, data)
    assert more.asked == list(LEVELS[3:])  # what was missing, and no more
    assert all(all_of_them[level] == three[level] for level in LEVELS[:3])
    # In another order they come out the same: a level's variance is its own.
    (path,) = files("isotropic")
    path.unlink()
    assert same(fitted(Counting(), LEVELS[::-1], data), all_of_them)
    # Another seed: other variances, kept beside the first.
    other = Counting()
    fitted(other, LEVELS[:2], FitData(data.name, IMAGES, seed=4))
    assert other.asked == list(LEVELS[:2])


def test_images_that_were_replaced_are_fitted_anew(data: FitData) -> None:
    """A fit is known by the images themselves: also those of another folder are the same data."""
    model, covariance = model_of(Counting()), mmdgs.covariances.Spectral(calibrated=False)
    before = model.posterior(covariance, data=data).variances
    moved = Path(data.name).rename(Path(data.name).with_name("elsewhere"))
    again = model.posterior(covariance, data=FitData(str(moved), IMAGES, seed=3)).variances
    assert same(again, before)
    assert len(files("spectral")) == 1
    for file in moved.rglob("*.png"):
        Image.new("RGB", (2, 2), (200, 10, 10)).save(file)
    now = model.posterior(covariance, data=FitData(str(moved), IMAGES, seed=3)).variances
    assert not torch.allclose(now.values, before.values)


def test_without_data_what_is_kept_will_do_and_is_interpolated(data: FitData) -> None:
    with pytest.raises(UsageError, match="isotropic"):
        fitted(Counting(), LEVELS[:2], None)
    fitted(Counting(), LEVELS[:2], FitData(data.name, 5, seed=3))
    best = fitted(Counting(), LEVELS[:2], data)
    kept = Counting()
    assert same(fitted(kept, LEVELS[:2], None), best)  # of the most images
    between = NoiseLevel(sigma=math.sqrt(LEVELS[0].sigma * LEVELS[1].sigma))
    mean = fitted(kept, (between,), None)[between]
    assert mean**2 == pytest.approx(best[LEVELS[0]] * best[LEVELS[1]])
    assert kept.asked == []
    with pytest.raises(UsageError, match="such as --data cifar10"):
        fitted(Counting(), LEVELS[:3], None)
    fitted(kept, (between,), data)  # with data it is fitted where it is asked for
    assert kept.asked == [between]


def test_levels_of_a_models_own_choice(data: FitData) -> None:
    denoiser = Counting()
    moments = model_of(denoiser).posterior("isotropic", data=data)
    assert len(denoiser.asked) == KNOTS
    assert moments.variances.covers(LEVELS)


def test_a_variance_that_was_lifted_is_reported_as_such(data: FitData) -> None:
    for file in Path(data.name).rglob("*.png"):
        Image.new("RGB", (2, 2), (127, 127, 127)).save(file)

    def knowing(x_t: Tensor, level: NoiseLevel) -> Tensor:
        return torch.full_like(x_t, 2 * 127.5 / 256 - 1)  # the one image there is: no error at all

    for _ in range(2):  # fitted, and read back
        moments = isotropic_moments(model_of(knowing), LEVELS[:1], data, progress=None)
        floor = FLOOR * LEVELS[0].variance
        assert moments.variances[LEVELS[0]] == pytest.approx(floor, rel=KEPT)
        q = moments(torch.zeros(2, *SHAPE), LEVELS[0])
        assert q.repaired is not None
        assert q.repaired.tolist() == [1, 1]


# --- spectra


def test_a_spectrum_is_fitted_between_the_ends_of_the_models_range(data: FitData) -> None:
    denoiser = Counting()
    table = spectral_moments(model_of(denoiser), data, progress=None).variances
    ends = sorted(level.ratio for level in (LEVELS[0], LEVELS[-1]))
    assert len(table.ratios) == KNOTS
    assert table.ratios[[0, -1]].tolist() == pytest.approx(ends)
    x = 2 * midpoints(random_images(IMAGES, SHAPE)) - 1
    level = NoiseLevel(sigma=table.ratios[7].item())
    streams = Streams(3, IMAGES, purpose="fit")
    by_hand = SpectralMoments.fit(denoiser, x, [level], generator=streams)
    torch.testing.assert_close(table[level], by_hand.variances[level], rtol=KEPT, atol=0)


# --- models of any size


@pytest.fixture
def photographs(tmp_path: Path) -> FitData:
    """Images of three sizes, in parts for training and for testing."""
    for part, seed in (("train", 0), ("test", 1)):
        sizes = enumerate([(CROP, CROP), (CROP + 9, CROP), (CROP, CROP + 30)], 10 * seed)
        images = (random_images(1, (3, *size), seed=i)[0] for i, size in sizes)
        save_pictures(tmp_path / "photographs" / part, images)
    return FitData(str(tmp_path / "photographs"), 10, seed=3)


def test_crops_are_spread_over_the_photographs(photographs: FitData) -> None:
    crops = photographs.crops("train", 3)
    assert crops.shape == (10, 3, CROP, CROP)
    assert torch.equal(crops, photographs.crops("train", 3))
    pictures = load_pictures(photographs.name, "train")
    for first, stop, picture in zip((0, 4, 7), (4, 7, 10), pictures, strict=True):
        parts = picture.unfold(1, CROP, 1).unfold(2, CROP, 1)  # every place, (3, rows, columns, ..)
        same = (parts == crops[first:stop, :, None, None]).all(-1).all(-1).all(1)
        assert same.flatten(1).any(1).all()
    assert not torch.equal(crops[4], crops[5])
    assert not torch.equal(crops, photographs.crops("test", 3))
    assert not torch.equal(crops, FitData(photographs.name, 10, seed=4).crops("train", 3))


def test_one_fit_serves_images_of_every_size(photographs: FitData, cache: Path) -> None:
    model = any_size_model()
    spectral = model.posterior("spectral", data=photographs)
    assert spectral.variances.values.shape == (KNOTS, 3, CROP, CROP)
    isotropic = model.posterior("isotropic", data=photographs)
    level = NoiseLevel(sigma=1.0)
    for size in ((16, 40), (33, 17)):
        view = model.sized(*size)
        x_t = torch.zeros(1, 3, *size)
        q = view.posterior("spectral")(x_t, level)  # what is kept
        expected = resampled(spectral.variances[level], size).float()
        torch.testing.assert_close(q.cov.variances[0], expected, rtol=1e-4, atol=0)
        assert view.posterior("isotropic").variances[level] == isotropic.variances[level]
    other = Model.build(replace(model.config, shape=(3, 8, 8)), model.network)
    with pytest.raises(UsageError, match="no spectral variances are kept"):
        other.posterior("spectral")  # the same weights for one size alone


@pytest.mark.usefixtures("untrained")
def test_a_calibration_serves_images_of_every_size(photographs: FitData) -> None:
    model = any_size_model()
    moments = model.posterior("diagonal")
    assert not isinstance(moments, CalibratedMoments)
    calibrated = mmdgs.calibrate(moments, photographs, NoiseLevel(sigma=1.0), progress=None)
    view = model.sized(20, 30).posterior("diagonal")
    assert isinstance(view, CalibratedMoments)
    assert view.fit_digest == calibrated.fit_digest
    x = model.scaled(midpoints(random_images(8, (3, 20, 30))))  # or images of another size
    assert mmdgs.calibrate(moments, x, NoiseLevel(sigma=1.0), progress=None).report
    with pytest.raises(ValueError, match="shape"):
        mmdgs.calibrate(moments, x[:, :1], NoiseLevel(sigma=1.0))


def test_images_smaller_than_a_crop(photographs: FitData) -> None:
    Image.new("RGB", (CROP, CROP - 1)).save(Path(photographs.name) / "train" / "9.png")
    with pytest.raises(UsageError, match=rf"9\.png is {CROP} x {CROP - 1}"):
        any_size_model().posterior("spectral", data=photographs)


# --- the store


def test_they_lie_beside_the_model_or_in_the_cache(
    data: FitData, cache: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    fitted(Counting(), LEVELS[:1], data, folder)
    spectral_moments(model_of(Counting(), folder), data, progress=None)
    names = {path.name for path in folder.iterdir()}
    assert names == {"isotropic.safetensors", "spectral.safetensors"}
    assert not cache.exists()
    # Other data: the file beside the model stays.
    fitted(Counting(), LEVELS[:1], FitData(data.name, 5), folder)
    assert len(list((cache / "isotropic").iterdir())) == 1
    kept = Counting()
    fitted(kept, LEVELS[:1], data, folder)
    assert kept.asked == []
    (folder / "isotropic.safetensors").unlink()
    folder.chmod(0o555)
    fitted(Counting(), LEVELS[:1], data, folder)
    assert [path.name for path in folder.iterdir()] == ["spectral.safetensors"]
    fitted(kept, LEVELS[:1], data, folder)
    assert kept.asked == []
    assert len(list((cache / "isotropic").iterdir())) == 2


def test_a_folder_of_the_hub_is_left_as_it_is(data: FitData, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "snapshot"
    folder.mkdir()
    model = model_of(Counting(), folder)
    model.source = "someone/faces"
    isotropic_moments(model, LEVELS[:1], data, progress=None)
    assert list(folder.iterdir()) == []
    assert len(list((cache / "isotropic").iterdir())) == 1


def test_other_weights_have_other_variances(data: FitData, tmp_path: Path) -> None:
    folder = tmp_path / "model"  # of one that was trained on: the file beside it is the same
    folder.mkdir()
    fitted(Counting(), LEVELS[:1], data, folder)
    other = Counting()
    changed = model_of(other, folder, weight=0.0)
    with pytest.raises(UsageError, match="isotropic"):
        isotropic_moments(changed, LEVELS[:1], progress=None)
    isotropic_moments(changed, LEVELS[:1], data, progress=None)
    assert other.asked == [LEVELS[0]]
    isotropic_moments(changed, LEVELS[:1], progress=None)
    assert other.asked == [LEVELS[0]]


def rewritten(file: Path, key: bool = True, **tensors: Tensor) -> None:
    """Change the tensors of a fit, or leave out what it says of its data."""
    with safe_open(file, "pt") as stored:
        notes = stored.metadata()
    save_file(load_file(file) | tensors, file, notes if key else {"digest": notes["digest"]})


DAMAGES = {
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-3]),
    "no key": lambda file: rewritten(file, key=False),
    "not a number": lambda file: rewritten(file, log_variances=torch.tensor([1.0, math.nan])),
    "too few": lambda file: rewritten(file, log_variances=torch.tensor([1.0])),
    "falling ratios": lambda file: rewritten(file, ratios=torch.tensor([2.0, 1.0])),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_made_anew(
    damage, data: FitData, caplog: pytest.LogCaptureFixture
) -> None:
    before = fitted(Counting(), LEVELS[:2], data)
    (path,) = files("isotropic")
    damage(path)
    again = Counting()
    with caplog.at_level(logging.WARNING, "mmdgs"):
        assert same(fitted(again, LEVELS[:2], data), before)
    assert again.asked == list(LEVELS[:2])
    assert path.name in caplog.text


def test_data_that_do_not_fit_the_model(data: FitData) -> None:
    points = Model(Counting(), Weights(), LEVELS, (12,), (-1.0, 1.0), "a test")
    with pytest.raises(UsageError, match=re.escape("(12,)")):
        isotropic_moments(points, LEVELS, data, progress=None)


def test_the_command_fits_once_and_then_needs_no_data(data: FitData, tmp_path: Path) -> None:
    folder = mmdgs.save(many_level_model((3, 8, 8)), tmp_path / "model")
    common = ["sample", str(folder), "--covariance", "isotropic", "--sweeps=1", "--n=2"]
    common += ["--device", "cpu"]
    result = run(cli.app, [*common, "--out", str(tmp_path / "a.npz")])
    assert result.exit_code == 2
    assert "such as --data cifar10" in " ".join(result.output.split())
    fit = ["--data", data.name, "--fit-images", "6"]
    result = run(cli.app, [*common, *fit, "--out", str(tmp_path / "a.npz")])
    assert result.exit_code == 0, result.output
    assert "0 Jacobian products each" in result.output
    record = json.loads((tmp_path / "a.samples.json").read_text())
    assert record["settings"]["isotropic"] == {"data": data.name, "images": 6, "seed": 0}
    assert (folder / "isotropic.safetensors").is_file()
    result = run(cli.app, [*common, "--out", str(tmp_path / "b.npz")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()

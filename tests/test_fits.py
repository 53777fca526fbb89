"""Fitted variances, isotropic and spectral: estimated once from data, kept, and only what is missing estimated anew."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from nets import random_images, tiny_model
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from toy_models import LEVELS, SHAPE, Weights, many_level_model
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli, moments
from mmdgs.data import midpoints
from mmdgs.errors import UsageError
from mmdgs.models import FitData, Model
from mmdgs.models.fits import KNOTS, FitStore, isotropic_moments, spectral_moments
from mmdgs.moments import IsotropicMoments, SpectralMoments
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


def model_of(denoiser: mmdgs.Denoiser, folder: Path | None = None, weight: float = 1.0) -> Model:
    network = Weights()
    torch.nn.init.constant_(network.weight, weight)
    model = Model(denoiser, network, LEVELS, SHAPE, (-1.0, 1.0), str(folder or "a test"))
    model.folder = folder
    return model


def fitted(
    denoiser: Counting, levels: tuple[NoiseLevel, ...], data: FitData | None, folder: Path | None = None
) -> IsotropicMoments:
    return isotropic_moments(model_of(denoiser, folder), levels, data, progress=None)


def spectrum(denoiser: Counting, data: FitData | None, folder: Path | None = None) -> SpectralMoments:
    return spectral_moments(model_of(denoiser, folder), data, progress=None)


def same(one: LevelTable, other: LevelTable) -> bool:
    return torch.equal(one.ratios, other.ratios) and torch.equal(one.values, other.values)


def files(kind: str, folder: Path | None = None) -> list[Path]:
    return FitStore(model_of(Counting(), folder), kind).files()


# --- isotropic --------------------------------------------------------------------------------------------------


def test_the_variances_are_those_of_the_data_in_the_models_interval(data: FitData) -> None:
    denoiser = Counting()
    found = fitted(denoiser, LEVELS, data)
    x = 2 * midpoints(random_images(IMAGES, SHAPE)) - 1
    for level in LEVELS:
        by_hand = IsotropicMoments.fit(denoiser, x, level, generator=Streams(3, IMAGES, purpose="fit"))
        assert found.variances[level] == pytest.approx(by_hand.variances[level], rel=KEPT)
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
    assert same(fitted(again, LEVELS[:3], data).variances, found.variances)
    rescaled = tuple(NoiseLevel(alpha=0.3, sigma=0.3 * level.sigma) for level in LEVELS[:3])
    fitted(again, rescaled, data)  # only sigma / alpha counts
    assert again.asked == []
    more = Counting()
    all_of_them = fitted(more, LEVELS, data)
    assert more.asked == list(LEVELS[3:])  # what was missing, and no more
    assert all(all_of_them.variances[level] == found.variances[level] for level in LEVELS[:3])
    # In another order they come out the same: a level's variance is its own.
    (path,) = files("isotropic")
    path.unlink()
    assert same(fitted(Counting(), LEVELS[::-1], data).variances, all_of_them.variances)
    # Other data, another count, another seed: other variances, kept beside the first.
    for other in (FitData(data.name, IMAGES, seed=4), FitData(data.name, 7, seed=3)):
        one = Counting()
        fitted(one, LEVELS[:2], other)
        assert one.asked == list(LEVELS[:2])
    unasked = Counting()
    fitted(unasked, LEVELS, data)
    assert unasked.asked == []


@pytest.mark.parametrize("kind", ["isotropic", "spectral"])
def test_images_that_were_replaced_are_fitted_anew(data: FitData, kind: str) -> None:
    """A fit is known by the images themselves: also those of another folder are the same data."""
    model = model_of(Counting())
    before = model.posterior(kind, data=data, calibrated=False).variances
    moved = Path(data.name).rename(Path(data.name).with_name("elsewhere"))
    again = model.posterior(kind, data=FitData(str(moved), IMAGES, seed=3), calibrated=False).variances
    assert same(again, before)
    assert len(files(kind)) == 1
    for file in moved.rglob("*.png"):
        Image.new("RGB", (2, 2), (200, 10, 10)).save(file)
    now = model.posterior(kind, data=FitData(str(moved), IMAGES, seed=3), calibrated=False).variances
    assert not torch.allclose(now.values, before.values)


def test_without_data_what_is_kept_will_do_and_is_interpolated(data: FitData) -> None:
    with pytest.raises(UsageError, match="no isotropic variances are kept for a test that cover these 2 levels"):
        fitted(Counting(), LEVELS[:2], None)
    fitted(Counting(), LEVELS[:2], FitData(data.name, 5, seed=3))
    best = fitted(Counting(), LEVELS[:2], data)
    kept = Counting()
    assert same(fitted(kept, LEVELS[:2], None).variances, best.variances)  # of the most images
    between = NoiseLevel(sigma=math.sqrt(LEVELS[0].sigma * LEVELS[1].sigma))
    found = fitted(kept, (between,), None).variances[between]
    assert found**2 == pytest.approx(best.variances[LEVELS[0]] * best.variances[LEVELS[1]])
    assert kept.asked == []
    with pytest.raises(UsageError, match="such as --data cifar10"):
        fitted(Counting(), LEVELS[:3], None)
    fitted(kept, (between,), data)  # with data it is fitted where it is asked for
    assert kept.asked == [between]


def test_levels_of_a_models_own_choice(data: FitData) -> None:
    denoiser = Counting()
    found = model_of(denoiser).posterior("isotropic", data=data)
    assert isinstance(found, IsotropicMoments)
    assert len(denoiser.asked) == KNOTS
    assert found.variances.covers(LEVELS)


def test_a_variance_that_was_lifted_is_reported_as_such(data: FitData) -> None:
    for file in Path(data.name).rglob("*.png"):
        Image.new("RGB", (2, 2), (127, 127, 127)).save(file)

    def knowing(x_t: Tensor, level: NoiseLevel) -> Tensor:
        return torch.full_like(x_t, 2 * 127.5 / 256 - 1)  # the one image there is: no error at all

    for _ in range(2):  # fitted, and read back
        found = isotropic_moments(model_of(knowing), LEVELS[:1], data, progress=None)
        assert found.variances[LEVELS[0]] == pytest.approx(moments.FLOOR * LEVELS[0].variance, rel=KEPT)
        q = found(torch.zeros(2, *SHAPE), LEVELS[0])
        assert q.repaired is not None
        assert q.repaired.tolist() == [1, 1]


def test_the_variance_of_a_configuration(data: FitData) -> None:
    known = tiny_model(isotropic_variance=0.25)
    found = known.posterior("isotropic")
    assert isinstance(found, IsotropicMoments)
    assert found.variances[known.level] == 0.25
    with pytest.raises(UsageError, match="no isotropic variances are kept"):
        tiny_model().posterior("isotropic")


# --- spectra ----------------------------------------------------------------------------------------------------


def test_a_spectrum_is_fitted_between_the_ends_of_the_models_range(data: FitData) -> None:
    denoiser = Counting()
    found = spectrum(denoiser, data).variances
    ends = sorted(level.ratio for level in (LEVELS[0], LEVELS[-1]))
    assert len(found.ratios) == KNOTS
    assert found.ratios[[0, -1]].tolist() == pytest.approx(ends)
    x = 2 * midpoints(random_images(IMAGES, SHAPE)) - 1
    level = NoiseLevel(sigma=found.ratios[7].item())
    by_hand = SpectralMoments.fit(denoiser, x, [level], generator=Streams(3, IMAGES, purpose="fit"))
    torch.testing.assert_close(found[level], by_hand.variances[level], rtol=KEPT, atol=0)


def test_a_spectrum_of_the_same_data_is_not_fitted_again(data: FitData) -> None:
    found = spectrum(Counting(), data).variances
    again = Counting()
    assert same(spectrum(again, data).variances, found)
    other = Counting()
    spectrum(other, FitData(data.name, 5, seed=3))
    assert len(other.asked) == KNOTS
    assert same(spectrum(again, None).variances, found)  # of the most images
    assert again.asked == []


def test_the_spectrum_of_a_model_that_ships_is_read_as_it_is() -> None:
    model = mmdgs.load("cifar10-score")
    found = model.posterior("spectral", calibrated=False)
    assert isinstance(found, SpectralMoments)
    assert found.variances.values.shape == (1, 3, 32, 32)


# --- the store --------------------------------------------------------------------------------------------------


def test_they_lie_beside_the_model_or_in_the_cache(data: FitData, cache: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    fitted(Counting(), LEVELS[:1], data, folder)
    spectrum(Counting(), data, folder)
    assert sorted(path.name for path in folder.iterdir()) == ["isotropic.safetensors", "spectral.safetensors"]
    assert not cache.exists()
    fitted(Counting(), LEVELS[:1], FitData(data.name, 5), folder)  # other data: the file beside the model stays
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


def test_a_folder_that_ships_or_is_the_hubs_is_left_as_it_is(
    data: FitData, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mmdgs.models.shipped.__file__", str(tmp_path / "src" / "mmdgs" / "models" / "shipped.py"))
    ships, hub = tmp_path / "weights" / "mine", tmp_path / "snapshot"
    for folder, source in ((ships, str(ships)), (hub, "someone/faces")):
        folder.mkdir(parents=True)
        model = model_of(Counting(), folder, weight=float(len(source)))
        model.source = source
        isotropic_moments(model, LEVELS[:1], data, progress=None)
        assert list(folder.iterdir()) == []
    assert len(list((cache / "isotropic").iterdir())) == 2


def test_other_weights_have_other_variances(data: FitData, tmp_path: Path) -> None:
    folder = tmp_path / "model"  # of one that was trained on: the file beside it is the same
    folder.mkdir()
    fitted(Counting(), LEVELS[:1], data, folder)
    other = Counting()
    changed = model_of(other, folder, weight=0.0)
    with pytest.raises(UsageError, match="no isotropic variances are kept"):
        isotropic_moments(changed, LEVELS[:1], progress=None)
    isotropic_moments(changed, LEVELS[:1], data, progress=None)
    assert other.asked == [LEVELS[0]]
    isotropic_moments(changed, LEVELS[:1], progress=None)
    assert other.asked == [LEVELS[0]]


def rewritten(file: Path, **changes: Tensor | None) -> None:
    """Change the tensors of a fit, or with None its notes of the data."""
    with safe_open(file, "pt") as stored:
        notes, tensors = stored.metadata(), {key: stored.get_tensor(key) for key in stored.keys()}  # noqa: SIM118
    tensors |= {key: value for key, value in changes.items() if value is not None}
    save_file(tensors, file, {key: value for key, value in notes.items() if changes.get(key, 0) is not None})


DAMAGES = {
    "empty": lambda file: file.write_bytes(b""),
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-3]),
    "no safetensors": lambda file: file.write_bytes(b"{}" * 100),
    "no key": lambda file: rewritten(file, key=None),
    "infinite": lambda file: rewritten(file, log_variances=torch.tensor([1.0, math.inf])),
    "not a number": lambda file: rewritten(file, log_variances=torch.tensor([1.0, math.nan])),
    "zero": lambda file: rewritten(file, log_variances=torch.tensor([1.0, -math.inf])),
    "far too large": lambda file: rewritten(file, log_variances=torch.tensor([1.0, 500.0])),
    "too few": lambda file: rewritten(file, log_variances=torch.tensor([1.0])),
    "another shape": lambda file: rewritten(file, log_variances=torch.ones(2, 3)),
    "falling ratios": lambda file: rewritten(file, ratios=torch.tensor([2.0, 1.0])),
    "negative ratios": lambda file: rewritten(file, ratios=torch.tensor([-2.0, 1.0])),
    "infinite ratios": lambda file: rewritten(file, ratios=torch.tensor([2.0, math.inf])),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_damaged_file_is_made_anew(damage, data: FitData, caplog: pytest.LogCaptureFixture) -> None:
    found = fitted(Counting(), LEVELS[:2], data)
    (path,) = files("isotropic")
    damage(path)
    again = Counting()
    with caplog.at_level(logging.WARNING, "mmdgs"):
        assert same(fitted(again, LEVELS[:2], data).variances, found.variances)
    assert again.asked == list(LEVELS[:2])
    assert any("cannot be read" in record.message and path.name in record.message for record in caplog.records)
    kept = Counting()
    fitted(kept, LEVELS[:2], data)
    assert kept.asked == []


def test_data_that_do_not_fit_the_model(data: FitData) -> None:
    points = Model(Counting(), Weights(), LEVELS, (12,), (-1.0, 1.0), "a test")
    with pytest.raises(UsageError, match=re.escape("estimated from images, and this model's are (12,)")):
        isotropic_moments(points, LEVELS, data, progress=None)
    oblong = Model(Counting(), Weights(), LEVELS, (3, 2, 4), (-1.0, 1.0), "a test")
    with pytest.raises(UsageError, match=re.escape("are (3, 2, 2), and the model's (3, 2, 4)")):
        isotropic_moments(oblong, LEVELS, data, progress=None)


@pytest.mark.parametrize("covariance", ["isotropic", "spectral"])
def test_the_command_fits_once_and_then_needs_no_data(covariance: str, data: FitData, tmp_path: Path) -> None:
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
    assert record["settings"][covariance] == {"data": data.name, "images": 6, "seed": 0}
    assert (folder / f"{covariance}.safetensors").is_file()
    result = run(cli.app, [*common, "--out", str(tmp_path / "b.npz")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()

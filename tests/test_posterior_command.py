"""`mmdgs posterior`: what it writes, images of any size, calibration, resuming, and what it
refuses.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor
from toy_models import InDouble, Weights, many_level_model
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli
from mmdgs.errors import UsageError
from mmdgs.jacobians import mean_and_jacobian
from mmdgs.models import Model
from mmdgs.operators import Mask, estimated_noise, measurements
from mmdgs.targets import GaussianMixture
from mmdgs.uncertainty import folder as posterior_folder, pictures as shown, tiles
from mmdgs.uncertainty.conformal import calibrated_factors, conformal_factor
from mmdgs.uncertainty.image import PosteriorWork, image_posterior, scores_of
from mmdgs.uncertainty.settings import PosteriorSettings
from mmdgs.uncertainty.tiles import TiledDenoiser, weights_along

FILES = ["arrays.npz", "components", "draws", "mean.png", "overview.png", "page.html", "std.png"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 8x8 images in colour, and images for it."""
    root = tmp_path_factory.mktemp("posterior")
    many_level_model((3, 8, 8)).save_pretrained(root / "model")
    pixels = numpy.random.default_rng(0).integers(0, 256, (12, 8, 8, 3), dtype=numpy.uint8)
    numpy.savez(root / "clean.npz", arr_0=numpy.concatenate([pixels, 255 - pixels]))
    (root / "pictures" / "b").mkdir(parents=True)
    Image.fromarray(pixels[0]).save(root / "pictures" / "same.png")
    Image.fromarray(pixels[1, :, :, 0]).save(root / "pictures" / "b" / "grey.png")
    wide = 1.5 * numpy.random.default_rng(1).standard_normal((5, 13, 3)).astype("float32")
    numpy.save(root / "wide.npy", wide)
    (root / "broken.png").write_bytes(b"no image")
    Image.fromarray(pixels[0, :1, :1]).save(root / "dot.png")
    return root


def run(
    folder: Path, out: Path, *more: str, images: tuple[str, ...] = ("pictures",), **options: str
) -> Any:
    settings = {"sigma": "0.3", "draws": "2", "components": "2", "krylov-steps": "3", **options}
    words = [word for name, value in settings.items() for word in (f"--{name}", value)]
    words = [str(folder / "model"), *(str(folder / image) for image in images), *words, *more]
    return CliRunner().invoke(cli.app, ["posterior", *words, "--out", str(out), "-q"])


def arrays_of(folder: Path) -> dict[str, numpy.ndarray]:
    with numpy.load(folder / "arrays.npz") as arrays:
        return dict(arrays)


def test_it_writes_pictures_arrays_and_pages(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(folder, out, "--simulate", images=("pictures", "pictures/same.png"))
    assert result.exit_code == 0, result.output
    assert "repeated in all three channels" in result.output
    names = ["b-grey", "same", "same-2"]
    written = sorted(path.name for path in out.iterdir() if path.name[0] != ".")
    assert written == sorted([*names, "index.html", "posterior.json"])
    for name in names:
        assert sorted(path.name for path in (out / name).iterdir()) == FILES
        with Image.open(out / name / "mean.png") as picture:
            assert picture.size == (8, 8)
        for kind in ("draws", "components"):
            assert len(list((out / name / kind).iterdir())) == 2
        html = (out / name / "page.html").read_text()
        assert not re.search(r'(src|href)="(?!data:)', html)  # nothing is loaded from elsewhere
        assert "repeated" in html or name != "b-grey"
        assert f'href="{name}/page.html"' in (out / "index.html").read_text()
    arrays = arrays_of(out / "same")
    image = (3, 8, 8)
    shapes = dict.fromkeys(("noisy", "mean", "std", "low", "high", "truth"), image)
    shapes |= {"sigma": (), "draws": (2, *image), "directions": (2, *image)}
    of_each = ("variances", "residuals", "skewness", "excess_kurtosis", "reach")
    shapes |= dict.fromkeys(of_each, (2,))
    assert shapes.items() <= {name: array.shape for name, array in arrays.items()}.items()
    mass = numpy.trapezoid(arrays["density"], arrays["grid"], axis=1)
    numpy.testing.assert_allclose(mass, 1, atol=1e-4)
    assert (arrays["residuals"] <= 0.01).all()
    record = json.loads((out / "posterior.json").read_text())
    assert record["finished"] is True
    scores = {"psnr_mean", "z_variance", "coverage_90", "explained"}
    assert scores <= record["images"][0]["scores"].keys()


def test_arrays_are_what_the_library_says(folder: Path, tmp_path: Path) -> None:
    """Mean and components of the command against the estimators themselves."""
    model: Model = mmdgs.load(folder / "model")
    assert run(folder, tmp_path / "out", images=("pictures/same.png",)).exit_code == 0
    arrays = {
        name: torch.from_numpy(array)[None]
        for name, array in arrays_of(tmp_path / "out" / "same").items()
        if array.ndim
    }
    x_t, level = arrays["noisy"], mmdgs.NoiseLevel(0.3)
    expected = mmdgs.moments.components(model, x_t, level, 2)
    torch.testing.assert_close(arrays["mean"], model(x_t, level).detach())
    torch.testing.assert_close(arrays["variances"], expected.variances, rtol=1e-3, atol=0)


def gaussian_model(
    shape: tuple[int, int, int] = (1, 8, 8), interval: tuple[float, float] = (0.0, 1.0)
) -> Model:
    """The exact denoiser of independent normal pixels around the middle, a third of the interval's
    width wide.
    """
    low, high = interval
    middle, spread = (low + high) / 2, (high - low) / 3

    def denoiser(x_t: Tensor, level: mmdgs.NoiseLevel) -> Tensor:
        gain = level.alpha * spread**2 / (level.alpha**2 * spread**2 + level.sigma**2)
        return middle + gain * (x_t - level.alpha * middle)

    levels = mmdgs.schedules.geometric(5, 4.0, 0.05)
    return Model(denoiser, Weights(), levels, shape, interval, "exact")


@pytest.mark.parametrize("interval", [(0.0, 1.0), (-1.0, 1.0)])
@pytest.mark.parametrize("size", [(8, 8), (11, 20), (3, 5)], ids=["own", "larger", "smaller"])
def test_an_exact_model_at_any_size(size: tuple[int, int], interval: tuple[float, float]) -> None:
    """Pixels are independent, so tiles and reflections must change nothing: variance 1 / (9 + 1 /
    sigma^2).
    """
    model = gaussian_model(interval=interval)
    generator = torch.Generator().manual_seed(0)
    truth = 0.5 + torch.randn(1, *size, generator=generator) / 3
    noisy = truth + 0.3 * torch.randn(1, *size, generator=generator)
    seen = image_posterior(model, noisy, PosteriorSettings(0.3, components=2, draws=2))
    variance = 1 / (9 + 1 / 0.09)
    mean, std = 0.5 + variance / 0.09 * (noisy - 0.5), torch.full_like(truth, math.sqrt(variance))
    torch.testing.assert_close(seen.mean, mean, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen.std, std, rtol=1e-3, atol=0)
    torch.testing.assert_close(seen.variances, torch.full((2,), variance), rtol=1e-3, atol=0)
    assert seen.excess_kurtosis.abs().max() < 1e-3
    assert scores_of(replace(seen, truth=truth))["z_variance"] == pytest.approx(1, abs=0.6)
    pull = (seen.draws - seen.mean).square().mean().item()
    assert pull == pytest.approx(variance, rel=0.5)
    moves = 2 * seen.stds[:, None, None, None] * seen.directions
    torch.testing.assert_close(seen.walk((0.0, 2.0))[:, 1] - seen.mean, moves)


def test_weights_of_tiles_sum_to_one_and_fade() -> None:
    for size in (8, 9, 12, 20, 31):
        weights = weights_along(size, 8)
        torch.testing.assert_close(weights.sum(0), torch.ones(size, dtype=torch.float64))
        for row in weights[:-1]:
            assert row[row.nonzero().max()] < 0.2  # a tile ends softly


def test_tiles_are_one_denoiser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mean is the blend of the tiles' means, and its covariance that of this function,
    symmetrised.
    """
    model = many_level_model()
    model.network.double()
    level = mmdgs.NoiseLevel(0.5)
    x_t = torch.rand(1, 1, 8, 14, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = TiledDenoiser(model, 8, 14)
    expected, jacobian = torch.zeros_like(x_t), torch.zeros(8, 14, 8, 14, dtype=torch.float64)
    for weights, begin in zip(weights_along(14, 8), (0, 6), strict=True):
        tile = slice(begin, begin + 8)
        mean, own = mean_and_jacobian(model, x_t[..., tile], level)
        expected[..., tile] += weights[tile] * mean
        jacobian[:, tile, :, tile] += weights[tile, None, None] * own.reshape(8, 8, 8, 8)
    torch.testing.assert_close(whole(x_t, level).detach(), expected)
    matrix = level.tweedie * jacobian.reshape(112, 112)
    values = torch.linalg.eigvalsh(0.5 * (matrix + matrix.T))[-3:].flip(0)
    for at_once in (100, 1):  # all tiles are kept, or computed again for each product
        monkeypatch.setitem(tiles.AT_ONCE, "cpu", at_once)
        components = mmdgs.moments.components(whole, x_t, level, 3, tolerance=1e-4)
        torch.testing.assert_close(components.variances[0], values, rtol=1e-6, atol=0)


def test_a_region_and_values_beyond_the_interval(folder: Path, tmp_path: Path) -> None:
    result = run(folder, tmp_path / "out", images=("wide.npy",), region="2,1,4,3")
    assert result.exit_code == 0, result.output
    arrays = arrays_of(tmp_path / "out" / "wide")
    assert arrays["noisy"].shape == (3, 5, 13)
    assert arrays["noisy"].max() > 1.5  # floating-point images keep their noise
    arrays["directions"][:, :, 1:4, 2:6] = 0
    assert (arrays["directions"] == 0).all()


def test_a_run_that_was_stopped_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    clean = ("--calibrate", str(folder / "clean.npz"), "--calibration-images", "20")
    few = {"draws": "1", "components": "0"}
    assert run(folder, whole, *clean, **few).exit_code == 0
    posterior, fit = PosteriorWork.posterior, posterior_folder.calibrated_factors
    calls: list[Any] = []

    def interrupted(work: PosteriorWork, i: int, *args: Any) -> Any:
        calls.append(i)
        if calls == ["fit", 0, 1]:
            raise KeyboardInterrupt
        return posterior(work, i, *args)

    def fitted(*args: Any) -> Any:
        calls.append("fit")
        return fit(*args)

    monkeypatch.setattr(PosteriorWork, "posterior", interrupted)
    monkeypatch.setattr(posterior_folder, "calibrated_factors", fitted)
    first = run(folder, stopped, *clean, **few)
    assert (first.exit_code, "--resume" in first.output) == (130, True)
    assert run(folder, stopped, *clean, **few).exit_code == 2  # it exists
    other = run(folder, stopped, *clean, "--resume", sigma="0.2", **few)
    assert (other.exit_code, "sigma was 0.3, now 0.2" in other.output) == (2, True)
    second = run(folder, stopped, *clean, "--resume", **few)
    assert second.exit_code == 0, second.output
    assert "calibrated 90% intervals" in second.output
    assert calls == ["fit", 0, 1, 1]
    for name in ("b-grey", "same"):
        expected, arrays = arrays_of(whole / name), arrays_of(stopped / name)
        for key, array in expected.items():
            numpy.testing.assert_array_equal(arrays[key], array)
    again = run(folder, stopped, "--overwrite", images=("pictures/same.png",), **few)
    assert again.exit_code == 0
    assert not (stopped / "b-grey").exists()


@pytest.mark.parametrize(
    ("options", "images", "says"),
    [
        ({"sigma": "much"}, "pictures", "got 'much'"),
        ({"sigma": "0"}, "pictures", "sigma must be a positive number, got 0"),
        ({"sigma": "4.5"}, "pictures", "sigma from 0.1 to 4"),
        ({"sigma": "estimate", "simulate": ""}, "pictures", "simulated noise"),
        ({"region": "1,2,3"}, "pictures", "x,y,width,height"),
        ({"region": "4,4,8,8"}, "pictures", "8 wide and 8 high"),
        ({}, "broken.png", "broken.png cannot be read"),
        ({}, "absent.png", "absent.png"),
        ({"components": "5"}, "dot.png", "dot: 5 components are asked for"),
        ({"components": "5", "region": "0,0,1,1"}, "pictures", "take at most 3"),
        ({"calibrate": "nothing"}, "pictures", "'nothing'"),
    ],
)
def test_what_is_refused_in_one_line(
    folder: Path, tmp_path: Path, options: dict[str, str], images: str, says: str
) -> None:
    simulate = ["--simulate"] * ("simulate" in options)
    options = {name: value for name, value in options.items() if name != "simulate"}
    result = run(folder, tmp_path / "out", *simulate, images=(images,), **options)
    assert result.exit_code == 2, result.output
    assert says in result.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_standard_deviations_are_shown_on_a_scale_that_ends_at_a_round_number() -> None:
    for most, top in ((0.19, 0.2), (0.23, 0.3), (0.0111, 0.015), (0.99, 1.0), (7.0, 8.0)):
        assert shown.top_of(torch.full((1, 4, 4), most)) == pytest.approx(top)
    spike = torch.full((1, 40, 40), 0.2)
    spike[0, 0, 0] = 9.0
    assert shown.top_of(spike) == pytest.approx(0.2), "single pixels do not set the scale"
    colours = shown.in_colours(torch.tensor([[0.0, 0.2, 5.0]]), 0.2)
    assert colours.tolist() == [[list(shown.COLOURS[i]) for i in (0, -1, -1)]]
    each = torch.tensor([3.0, 0.0, 4.0])[:, None, None]
    assert shown.pooled(each).item() == pytest.approx(math.sqrt(25 / 3)), "root mean square"


def test_an_image_of_one_pixel(folder: Path, tmp_path: Path) -> None:
    result = run(folder, tmp_path / "out", images=("dot.png",))
    assert result.exit_code == 0, result.output
    assert arrays_of(tmp_path / "out" / "dot")["draws"].shape == (2, 3, 1, 1)


def test_an_image_of_too_many_tiles_is_refused() -> None:
    with pytest.raises(UsageError, match="the limit is 400"):
        TiledDenoiser(gaussian_model(), 500, 500)


def test_the_conformal_factor_is_the_quantile_with_one_image_more() -> None:
    scores = torch.arange(1.0, 101).reshape(20, 5)
    # 0.9 * 21 * 5 = 94.5 of the 100 scores, and the 21st image is infinite.
    assert conformal_factor(scores, 0.9) == 95
    assert conformal_factor(scores[:5], 0.9) == math.inf


def test_conformal_intervals_cover_where_the_model_is_wrong() -> None:
    """A model whose data are three times as wide as it thinks: its intervals cover too little."""
    model, pixels_alone = gaussian_model(), PosteriorSettings(0.3, components=0)
    x = 0.5 + torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    wide = calibrated_factors(model, x, PosteriorSettings(0.3, components=3))
    assert wide.before_pixel < 0.8
    assert wide.coverage_pixel == pytest.approx(0.9, abs=0.03)
    assert wide.coverage_component == pytest.approx(0.9, abs=0.09)
    assert wide.pixel > 2
    right = calibrated_factors(model, 0.5 + (x - 0.5) / 3, pixels_alone)
    # Thirty images were fitted to: the quantile 0.9 * 31 / 30 = 0.93 of |z|.
    assert right.pixel == pytest.approx(1.81, abs=0.08)
    with pytest.raises(UsageError, match="got 10"):
        calibrated_factors(model, x[:10], pixels_alone)


def test_noise_is_simulated_and_estimated_by_the_call_too() -> None:
    model, truth = gaussian_model(), torch.full((1, 24, 24), 0.5)
    settings = PosteriorSettings(0.3, simulate=True, components=0, draws=0)
    seen = image_posterior(model, truth, settings)
    torch.testing.assert_close(seen.truth, truth)
    assert (seen.noisy - truth).std().item() == pytest.approx(0.3, rel=0.1)
    assert seen.scores["psnr_mean"] > seen.scores["psnr_noisy"]
    unknown = replace(settings, sigma="estimate", simulate=False)
    assert image_posterior(model, seen.noisy, unknown).sigma == pytest.approx(0.3, rel=0.2)
    for sigma in ("much", 0.0, math.nan):
        with pytest.raises(UsageError, match="sigma must be"):
            replace(settings, sigma=sigma)


@pytest.mark.parametrize("most", [1 << 19, 400])
@pytest.mark.parametrize("channels", [1, 3])
def test_estimated_noise_of_detailed_images(
    channels: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stripes and edges: the estimate must not take them for noise; by some of the patches too."""
    monkeypatch.setattr(measurements, "MOST_PATCHES", most)
    grid = torch.linspace(0, 1, 48)
    stripes = 0.4 * (30 * grid).sin()[None] * (20 * grid).cos()[:, None]
    detail = 0.5 + stripes + 0.3 * ((grid[None] + grid[:, None]) > 1)
    clean = torch.stack([detail, 0.8 * detail, 0.5 * detail + 0.1])[:channels]

    def estimate(y: Tensor) -> float:
        return estimated_noise(y, Mask(torch.ones(y.shape[1:]))).item()

    generator = torch.Generator().manual_seed(0)
    for sigma in (0.05, 0.1, 0.3):
        y = (clean + sigma * torch.randn(clean.shape, generator=generator))[None]
        assert estimate(y) == pytest.approx(sigma, rel=0.12 if most > 400 else 0.3)
    patches = measurements.patches_of(y[0], torch.ones(1, 48, 48, dtype=torch.bool), 3)
    assert patches is not None
    assert len(patches) <= min(most, 46**2)
    grey = y[:, :1]
    assert estimate(grey.expand(-1, 3, -1, -1)) == pytest.approx(estimate(grey))


def test_two_modes_are_seen() -> None:
    """Halfway between two images the posterior has two modes along the line that joins them."""
    means = torch.stack([torch.full((64,), 0.3), torch.full((64,), 0.7)]).double()
    denoiser = InDouble(GaussianMixture([0.5, 0.5], means, 0.05).denoiser())
    levels = mmdgs.schedules.geometric(5, 4.0, 0.05)
    model = Model(denoiser, Weights(), levels, (1, 8, 8), source="two")
    settings = PosteriorSettings(1.0, components=1, draws=0)
    seen = image_posterior(model, torch.full((1, 8, 8), 0.5), settings)
    joined = torch.full((1, 8, 8), 0.125)
    torch.testing.assert_close(seen.directions[0].abs(), joined, rtol=1e-2, atol=1e-3)
    assert seen.excess_kurtosis.item() < -1.5
    assert seen.density[0][seen.grid.abs().argmin()] < 0.2 * seen.density.max()

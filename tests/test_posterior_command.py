"""`mmdgs posterior`: what it writes, images of any size, calibration, resuming, and what it refuses."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from torch import Tensor
from toy_models import Weights, many_level_model
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli
from mmdgs.errors import UsageError
from mmdgs.generation import posterior_folder, tiles
from mmdgs.generation.conformal import calibrated_factors, conformal_factor
from mmdgs.generation.posteriors import PosteriorSettings, image_posterior, scores_of
from mmdgs.generation.tiles import TiledDenoiser, weights_along
from mmdgs.jacobians import mean_and_jacobian
from mmdgs.models import Model
from mmdgs.operators import Mask, estimated_noise
from mmdgs.targets import GaussianMixture

run = CliRunner().invoke
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
    numpy.save(root / "wide.npy", 1.5 * numpy.random.default_rng(1).standard_normal((5, 13, 3)).astype("float32"))
    (root / "broken.png").write_bytes(b"no image")
    return root


def command(folder: Path, out: Path, *more: str, images: tuple[str, ...] = ("pictures",), **given: str) -> list[str]:
    settings = {"sigma": "0.3", "draws": "2", "components": "2", "krylov-steps": "3", **given}
    options = [word for name, value in settings.items() for word in (f"--{name}", value)]
    sources = [str(folder / one) for one in images]
    return ["posterior", str(folder / "model"), *sources, "--out", str(out), *options, "-q", *more]


def test_it_writes_pictures_arrays_and_pages(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run(cli.app, command(folder, out, "--simulate", images=("pictures", "pictures/same.png")))
    assert result.exit_code == 0, result.output
    assert "repeated in all three channels" in result.output
    names = ["b-grey", "same", "same-2"]
    assert sorted(one.name for one in out.iterdir() if one.name[0] != ".") == sorted(
        [*names, "index.html", "posterior.json"]
    )
    for name in names:
        assert sorted(one.name for one in (out / name).iterdir()) == FILES
        with Image.open(out / name / "mean.png") as picture:
            assert picture.size == (8, 8)
        assert len(list((out / name / "draws").iterdir())) == len(list((out / name / "components").iterdir())) == 2
        html = (out / name / "page.html").read_text()
        assert not re.search(r'(src|href)="(?!data:)', html)  # nothing is loaded from elsewhere
        assert "repeated" in html or name != "b-grey"
        assert f'href="{name}/page.html"' in (out / "index.html").read_text()
    with numpy.load(out / "same" / "arrays.npz") as found:
        arrays = {name: found[name] for name in found.files}
    image = (3, 8, 8)
    shapes = {"noisy": image, "mean": image, "std": image, "low": image, "high": image, "truth": image, "sigma": ()}
    shapes |= {"draws": (2, *image), "directions": (2, *image)}
    shapes |= dict.fromkeys(("variances", "residuals", "skewness", "excess_kurtosis", "reach"), (2,))
    assert shapes.items() <= {name: array.shape for name, array in arrays.items()}.items()
    numpy.testing.assert_allclose(numpy.trapezoid(arrays["density"], arrays["grid"], axis=1), 1, atol=1e-4)
    assert (arrays["residuals"] <= 0.01).all()
    record = json.loads((out / "posterior.json").read_text())
    assert record["finished"] is True
    assert {"psnr_mean", "z_variance", "coverage_90", "explained"} <= record["images"][0]["scores"].keys()


def test_arrays_are_what_the_library_says(folder: Path, tmp_path: Path) -> None:
    """Mean and components of the command against the estimators themselves, in another interval than [0, 1]."""
    model: Model = mmdgs.load(folder / "model")
    assert run(cli.app, command(folder, tmp_path / "out", images=("pictures/same.png",))).exit_code == 0
    with numpy.load(tmp_path / "out" / "same" / "arrays.npz") as found:
        x_t, level = torch.from_numpy(found["noisy"])[None], mmdgs.NoiseLevel(0.3)
        expected = mmdgs.components(model, x_t, level, 2)
        torch.testing.assert_close(torch.from_numpy(found["mean"])[None], model(x_t, level).detach())
        torch.testing.assert_close(torch.from_numpy(found["variances"])[None], expected.variances, rtol=1e-3, atol=0)


def gaussian_model(shape: tuple[int, int, int], interval: tuple[float, float] = (0.0, 1.0)) -> Model:
    """The exact denoiser of independent normal pixels around the middle, a third of the interval's width wide."""
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
    """Pixels are independent, so tiles and reflections must change nothing: variance 1 / (9 + 1 / sigma^2)."""
    model = gaussian_model((1, 8, 8), interval)
    generator = torch.Generator().manual_seed(0)
    truth = 0.5 + torch.randn(1, *size, generator=generator) / 3
    noisy = truth + 0.3 * torch.randn(1, *size, generator=generator)
    seen = image_posterior(model, noisy, 0.3, PosteriorSettings(components=2, draws=2), truth=truth)
    variance = 1 / (9 + 1 / 0.09)
    torch.testing.assert_close(seen.mean, 0.5 + variance / 0.09 * (noisy - 0.5), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(seen.std, torch.full_like(truth, math.sqrt(variance)), rtol=1e-3, atol=0)
    torch.testing.assert_close(seen.variances, torch.full((2,), variance), rtol=1e-3, atol=0)
    assert seen.excess_kurtosis.abs().max() < 1e-3
    assert scores_of(seen)["z_variance"] == pytest.approx(1, abs=0.6)
    pull = (seen.draws - seen.mean).square().mean().item()
    assert pull == pytest.approx(variance, rel=0.5)
    torch.testing.assert_close(
        seen.walk((0.0, 2.0))[:, 1] - seen.mean, 2 * seen.stds[:, None, None, None] * seen.directions
    )


def test_weights_of_tiles_sum_to_one_and_fade() -> None:
    for size in (8, 9, 12, 20, 31):
        weights = weights_along(size, 8)
        torch.testing.assert_close(weights.sum(0), torch.ones(size, dtype=torch.float64))
        for row in weights[:-1]:
            last = row.nonzero().max()
            assert row[last] < 0.2  # a tile ends softly


def test_tiles_are_one_denoiser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mean is the blend of the tiles' means, and its covariance that of this function, symmetrised."""
    model = many_level_model()
    model.network.double()
    level = mmdgs.NoiseLevel(0.5)
    x_t = torch.rand(1, 1, 8, 14, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole, begins = TiledDenoiser(model, 8, 14), (0, 6)
    weights = [row[begin : begin + 8] for row, begin in zip(weights_along(14, 8), begins, strict=True)]
    expected, jacobian = torch.zeros_like(x_t), torch.zeros(8, 14, 8, 14, dtype=torch.float64)
    for weight, begin in zip(weights, begins, strict=True):
        mean, own = mean_and_jacobian(model, x_t[..., begin : begin + 8], level)
        expected[..., begin : begin + 8] += weight * mean
        part = weight[:, None, None] * own.reshape(8, 8, 8, 8)
        jacobian[:, begin : begin + 8, :, begin : begin + 8] += part
    torch.testing.assert_close(whole(x_t, level).detach(), expected)
    matrix = level.tweedie * jacobian.reshape(112, 112)
    values = torch.linalg.eigvalsh(0.5 * (matrix + matrix.T))[-3:].flip(0)
    for at_once in (100, 1):  # all tiles are kept, or computed again for each product
        monkeypatch.setitem(tiles.AT_ONCE, "cpu", at_once)
        found = mmdgs.components(whole, x_t, level, 3, tolerance=1e-4)
        torch.testing.assert_close(found.variances[0], values, rtol=1e-6, atol=0)


def test_a_region_and_values_beyond_the_interval(folder: Path, tmp_path: Path) -> None:
    result = run(cli.app, command(folder, tmp_path / "out", images=("wide.npy",), region="2,1,4,3"))
    assert result.exit_code == 0, result.output
    with numpy.load(tmp_path / "out" / "wide" / "arrays.npz") as found:
        assert found["noisy"].shape == (3, 5, 13)
        assert found["noisy"].max() > 1.5  # floating-point images keep their noise
        directions = found["directions"].copy()
    directions[:, :, 1:4, 2:6] = 0
    assert (directions == 0).all()


def test_a_run_that_was_stopped_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    given = ("--calibrate", str(folder / "clean.npz"), "--calibration-images", "20", "--tolerance", "0.9")
    few = {"draws": "1", "components": "1"}
    assert run(cli.app, command(folder, whole, *given, **few)).exit_code == 0
    real, calls, fits = posterior_folder.image_posterior, [], []
    real_fit = posterior_folder.calibrated_factors

    def interrupted(*args: object, **given: object) -> object:
        calls.append(given["number"])
        if calls == [0, 1]:
            raise KeyboardInterrupt
        return real(*args, **given)  # type: ignore[arg-type]

    def fit(*args: object, **given: object) -> object:
        fits.append(1)
        return real_fit(*args, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(posterior_folder, "image_posterior", interrupted)
    monkeypatch.setattr(posterior_folder, "calibrated_factors", fit)
    first = run(cli.app, command(folder, stopped, *given, **few))
    assert first.exit_code == 130
    assert "--resume" in first.output
    assert run(cli.app, command(folder, stopped, *given, **few)).exit_code == 2  # it exists
    other = run(cli.app, command(folder, stopped, *given, "--resume", sigma="0.2", **few))
    assert other.exit_code == 2
    assert "sigma was 0.3, now 0.2" in other.output
    second = run(cli.app, command(folder, stopped, *given, "--resume", **few))
    assert second.exit_code == 0, second.output
    assert calls == [0, 1, 1]
    assert len(fits) == 1
    for name in ("b-grey", "same"):
        with numpy.load(whole / name / "arrays.npz") as a, numpy.load(stopped / name / "arrays.npz") as b:
            for key in a.files:
                numpy.testing.assert_array_equal(a[key], b[key])
    assert "calibrated 90% intervals cover" in second.output
    again = run(cli.app, command(folder, stopped, "--overwrite", images=("pictures/same.png",), **few))
    assert again.exit_code == 0
    assert not (stopped / "b-grey").exists()


@pytest.mark.parametrize(
    ("given", "more", "images", "says"),
    [
        ({"sigma": "much"}, (), ("pictures",), "--sigma must be a number, or estimate, got 'much'"),
        ({"sigma": "0"}, (), ("pictures",), "sigma must be a positive number, got 0"),
        ({"sigma": "4.5"}, (), ("pictures",), "the model knows sigma from 0.1 to 4"),
        ({"sigma": "estimate"}, ("--simulate",), ("pictures",), "simulated noise needs sigma as a number"),
        ({"region": "1,2,3"}, (), ("pictures",), "four whole numbers x,y,width,height"),
        ({"region": "4,4,8,8"}, (), ("pictures",), "does not lie within the image, which is 8 wide and 8 high"),
        ({}, (), ("broken.png",), "broken.png cannot be read: not an image"),
        ({}, (), ("absent.png",), "there are no images at"),
        ({"calibrate": "nothing"}, (), ("pictures",), "there are no images at 'nothing'"),
    ],
)
def test_what_is_refused_in_one_line(
    folder: Path, tmp_path: Path, given: dict[str, str], more: tuple[str, ...], images: tuple[str, ...], says: str
) -> None:
    result = run(cli.app, command(folder, tmp_path / "out", *more, images=images, **given))
    assert result.exit_code == 2, result.output
    assert says in result.output.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_an_image_of_too_many_tiles_is_refused() -> None:
    with pytest.raises(UsageError, match=r"takes .* tiles of 8 x 8, and the limit is 400: crop it"):
        TiledDenoiser(gaussian_model((1, 8, 8)), 500, 500)


def test_the_conformal_factor_is_the_quantile_with_one_image_more() -> None:
    scores = torch.arange(1.0, 101).reshape(20, 5)
    assert conformal_factor(scores, 0.9) == 95  # 0.9 * 21 * 5 = 94.5 of the 100 scores, and the 21st image is infinite
    assert conformal_factor(scores[:5], 0.9) == math.inf


def test_conformal_intervals_cover_where_the_model_is_wrong() -> None:
    """A model whose data are three times as wide as it thinks: its own intervals cover too little."""
    model = gaussian_model((1, 8, 8))
    x = 0.5 + torch.randn(60, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    found = calibrated_factors(model, x, 0.3, components=3, progress=None)
    assert found.before_pixel < 0.8
    assert found.coverage_pixel == pytest.approx(0.9, abs=0.03)
    assert found.coverage_component == pytest.approx(0.9, abs=0.09)
    assert found.pixel > 2
    right = calibrated_factors(model, 0.5 + (x - 0.5) / 3, 0.3, components=3, progress=None)
    # Thirty images were fitted to: the quantile 0.9 * 31 / 30 = 0.93 of |z|.
    assert right.pixel == pytest.approx(1.81, abs=0.08)
    with pytest.raises(UsageError, match="needs 20 images or more"):
        calibrated_factors(model, x[:10], 0.3)


@pytest.mark.parametrize("channels", [1, 3])
def test_estimated_noise_of_detailed_images(channels: int) -> None:
    """Stripes and edges: the estimate must not take them for noise."""
    grid = torch.linspace(0, 1, 48)
    detail = 0.5 + 0.4 * (30 * grid).sin()[None] * (20 * grid).cos()[:, None] + 0.3 * ((grid[None] + grid[:, None]) > 1)
    clean = torch.stack([detail, 0.8 * detail, 0.5 * detail + 0.1])[:channels]
    generator = torch.Generator().manual_seed(0)
    for sigma in (0.05, 0.1, 0.3):
        y = (clean + sigma * torch.randn(clean.shape, generator=generator))[None]
        found = estimated_noise(y, Mask(torch.ones_like(clean))).item()
        assert found == pytest.approx(sigma, rel=0.12)
    grey = y[:, :1].expand(-1, 3, -1, -1)
    expected = estimated_noise(y[:, :1], Mask(torch.ones(1, 48, 48))).item()
    assert estimated_noise(grey, Mask(torch.ones(3, 48, 48))).item() == pytest.approx(expected)


def test_two_modes_are_seen() -> None:
    """Halfway between two images the posterior has two modes along the direction that joins them."""
    means = torch.stack([torch.full((64,), 0.3), torch.full((64,), 0.7)]).double()
    denoiser = GaussianMixture([0.5, 0.5], means, 0.05).denoiser()
    model = Model(
        lambda x_t, level: denoiser(x_t.double(), level).to(x_t.dtype),
        Weights(),
        mmdgs.schedules.geometric(5, 4.0, 0.05),
        (1, 8, 8),
        source="two",
    )
    seen = image_posterior(model, torch.full((1, 8, 8), 0.5), 1.0, PosteriorSettings(components=1, draws=0))
    torch.testing.assert_close(seen.directions[0].abs(), torch.full((1, 8, 8), 0.125), rtol=1e-2, atol=1e-3)
    assert seen.excess_kurtosis.item() < -1.5
    middle = seen.density[0][seen.grid.abs().argmin()]
    assert middle < 0.2 * seen.density.max()

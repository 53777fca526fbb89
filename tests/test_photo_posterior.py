"""Posteriors of images of any size: whole, in large tiles, of a region by its surroundings, and
what is refused.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from click.testing import Result
from PIL import Image
from test_any_size import FILES, field_model, huge_png, photographs_and_model, picture, spectrum
from torch import Tensor
from toy_models import any_size_model, many_level_model
from typer.testing import CliRunner

import mmdgs
from mmdgs import cli
from mmdgs.covariances import Diagonal, Krylov, Spectral
from mmdgs.data import single
from mmdgs.data.single import NamedImage
from mmdgs.errors import UsageError
from mmdgs.linalg.spectral import from_cosines, to_cosines
from mmdgs.models.fits import FitStore
from mmdgs.models.memory import bytes_kept
from mmdgs.moments import SpectralMoments
from mmdgs.noise import LevelTable, NoiseLevel
from mmdgs.randomness import Streams
from mmdgs.uncertainty import regions, tiles
from mmdgs.uncertainty.estimators import Estimators, with_strength
from mmdgs.uncertainty.image import PosteriorWork
from mmdgs.uncertainty.regions import around, most_seen, most_uncertain
from mmdgs.uncertainty.settings import PosteriorSettings
from mmdgs.uncertainty.tiles import TiledDenoiser, bytes_needed, fitted_denoiser

SIGMA = 0.2


def noisy(*sides: int, channels: int = 1) -> Tensor:
    return torch.rand(channels, *sides, generator=torch.Generator().manual_seed(0))


def posterior_covariance(height: int, width: int) -> Tensor:
    """Of a field of tests/test_any_size.py under noise SIGMA, (d, d)."""
    d, prior = height * width, spectrum(height, width)
    basis = to_cosines(torch.eye(d, dtype=torch.float64).reshape(d, 1, height, width)).flatten(1)
    return basis @ (SIGMA**2 * prior / (prior + SIGMA**2)).flatten().diag() @ basis.mT


# --- sizes


def test_a_field_at_its_own_size() -> None:
    """Mean, standard deviation and components of an image of a size that is no fit's."""
    x, sides = noisy(24, 20), (24, 20)
    prior = spectrum(*sides)
    seen = mmdgs.image_posterior(
        field_model(), x, PosteriorSettings(SIGMA, components=2, diagonal=Diagonal(probes=60))
    )
    mean = from_cosines(prior / (prior + SIGMA**2) * to_cosines(x[None].double()))[0]
    torch.testing.assert_close(seen.mean, mean.float(), rtol=1e-4, atol=1e-5)
    covariance = posterior_covariance(*sides)
    std = covariance.diagonal().sqrt().reshape(1, *sides).float()
    assert (seen.std / std - 1).abs().mean() < 0.05
    torch.testing.assert_close(
        seen.variances, torch.linalg.eigvalsh(covariance)[-2:].flip(0).float(), rtol=1e-3, atol=0
    )
    assert (seen.tiles, seen.region) == (1, None)


@pytest.mark.parametrize(("x", "y"), [(40, 32), (80, 72)])
def test_a_region_sees_its_surroundings_alone(x: int, y: int) -> None:
    """Components of a region by a part of the image are those by all of it: of this field, whose
    correlations fall with the square of the distance, variances within 0.5% and directions within 2
    degrees.
    """
    sides, region = (96, 112), (x, y, 6, 5)
    seen = mmdgs.image_posterior(
        field_model(),
        noisy(*sides),
        PosteriorSettings(SIGMA, draws=0, region=region, tolerance=1e-4),
    )
    places = torch.arange(sides[0] * sides[1]).reshape(sides)[y : y + 5, x : x + 6].flatten()
    prior = spectrum(*sides)
    unit = torch.zeros(len(places), sides[0] * sides[1], dtype=torch.float64)
    unit[torch.arange(len(places)), places] = 1
    basis = to_cosines(unit.reshape(-1, 1, *sides)).flatten(1)
    covariance = (basis * (SIGMA**2 * prior / (prior + SIGMA**2)).flatten()) @ basis.mT
    values, vectors = torch.linalg.eigh(covariance)
    variances = values[-3:].flip(0).float()
    torch.testing.assert_close(seen.variances, variances, rtol=5e-3, atol=0)
    inside = seen.directions[:, 0, y : y + 5, x : x + 6].flatten(1).double()
    cosine = (inside * vectors[:, -3:].flip(1).mT).sum(1).abs()
    assert (cosine > math.cos(math.radians(2))).all()
    assert seen.directions.square().sum((1, 2, 3)) == pytest.approx(torch.ones(3), abs=1e-5)


def test_work_on_a_region_does_not_grow_with_the_image() -> None:
    """And a denoiser sees parts that begin at multiples of 32 pixels, which its pyramid needs."""
    assert around((40, 32, 6, 5), 96, 112, margin=32) == (0, 0, 96, 96)
    assert around((400, 300, 64, 64), 1000, 1000, margin=32) == (352, 256, 160, 160)
    assert around((990, 0, 10, 1), 1000, 1000, margin=0) == (960, 0, 40, 32)
    assert around((32, 0, 1, 1), 20, 33, margin=0) == (0, 0, 33, 20)
    assert most_seen((400, 300, 64, 64), 1000, 1000, margin=32) == 160**2
    assert most_seen(None, 120, 130, margin=32) == 120 * 130
    for place in range(0, 936, 8):
        *_, w, h = around((place, place, 64, 64), 1000, 1000, margin=32)
        assert w * h <= most_seen(None, 1000, 1000, margin=32) == 192**2
    sizes: list[Any] = []
    model = field_model()
    bytes_kept(model)  # asks it for small images, once
    inner = model._denoiser
    model._denoiser = lambda x_t, level: (sizes.append(tuple(x_t.shape[2:])), inner(x_t, level))[1]
    mmdgs.image_posterior(model, noisy(200, 300), PosteriorSettings(SIGMA, draws=0, components=1))
    assert set(sizes) == {(200, 300), sizes[-1]}
    assert max(sizes[-1]) <= 192


def test_the_most_uncertain_window() -> None:
    std = torch.ones(3, 40, 50)
    std[1, 20:28, 30:40] = 5
    x, y, w, h = most_uncertain(std, side=16)
    assert (w, h) == (16, 16)
    assert 40 - w <= x <= 30
    assert 28 - h <= y <= 20
    assert most_uncertain(std, side=64) == (0, 0, 50, 40)


def test_large_images_have_a_region_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regions, "LARGE", 40 * 40)
    monkeypatch.setattr("mmdgs.uncertainty.estimators.LARGE", 40 * 40)
    settings = PosteriorSettings(0.3, components=1, draws=0)
    model = any_size_model()
    for sides, large in (((40, 40), False), ((41, 70), True)):
        seen = PosteriorWork(model, [NamedImage("a", noisy(*sides, channels=3))], settings)
        posterior = seen.posterior(0)
        assert (posterior.region is not None) == large
        if large:
            assert posterior.region == most_uncertain(posterior.std)
    chosen = "This region was chosen as the most uncertain one."
    from mmdgs.uncertainty.page import page

    assert chosen in page(posterior)
    given = mmdgs.image_posterior(
        model, noisy(41, 70, channels=3),
        PosteriorSettings(0.3, components=1, draws=0, region=(1, 2, 8, 8)),
    )  # fmt: skip
    assert chosen not in page(given)


def test_tiles_of_a_side_are_one_denoiser(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above WHOLE pixels a local network's tiles give its mean of the whole, and products the
    Jacobian of the blend.
    """
    model, level = any_size_model(), NoiseLevel(0.3)
    model.network.double().reach = None  # not known: tiles overlap
    x = noisy(96, 120, channels=3)[None].double()
    whole = fitted_denoiser(model, 96, 120)
    assert not isinstance(whole, TiledDenoiser)
    monkeypatch.setattr(tiles, "WHOLE", 96 * 100)
    monkeypatch.setattr(tiles, "TILES", (64,))
    tiled = fitted_denoiser(model, 96, 120)
    assert isinstance(tiled, TiledDenoiser)
    assert tiled.tiles == 6
    torch.testing.assert_close(tiled(x, level), whole(x, level), rtol=0, atol=0.02)
    v = torch.randn(x.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    at = x.clone().requires_grad_(True)
    (product,) = torch.autograd.grad(tiled(at, level), at, v)
    step = 1e-6 * torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).double()
    change = tiled(x + step, level) - tiled(x - step, level)
    torch.testing.assert_close((v * change).sum(), 2 * (product * step).sum(), rtol=1e-5, atol=0)


def test_memory_says_whether_an_image_goes_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = any_size_model()
    model.network.reach = None
    graph = tiles.GRAPH * bytes_kept(model)
    for pixels, expected in (
        (1200 * 900 + 1, None),
        (1200 * 900 - 1, 1024),
        (600**2, 512),
        (300**2, 256),
        (1, 256),
    ):
        there = pixels * graph / tiles.NETWORK
        monkeypatch.setattr(tiles, "memory_of", lambda device, there=there: there)
        assert getattr(fitted_denoiser(model, 900, 1200), "side", None) == expected


def test_the_formula_of_memory() -> None:
    model = any_size_model()
    settings = PosteriorSettings(0.3, draws=4, components=3, draws_by=Spectral())
    needed = bytes_needed(model, (3, 512, 512), 160 * 160, settings)
    numbers = 24 + 3 * 4 + 2 * 3
    kept = bytes_kept(model)
    network = kept * (tiles.GRAPH * 512**2 + tiles.DERIVATIVES * 160**2)
    assert needed == round(network) + 512**2 * 12 * numbers
    by_krylov = PosteriorSettings(0.3, draws=1, components=0, draws_by=Krylov(7))
    needed = bytes_needed(model, (3, 512, 512), 160 * 160, by_krylov)
    assert needed == round(512**2 * tiles.SYMMETRISED * kept) + 512**2 * 12 * (24 + 3 + 14)
    fixed = bytes_needed(many_level_model((3, 8, 8)), (3, 512, 512), 160 * 160, settings)
    assert fixed == 512**2 * 12 * numbers


# --- draws


def test_draws_by_a_spectrum_have_the_strength_of_the_diagonal() -> None:
    """Of a stationary field whose variances change slowly: draws spread as these say, with the
    spectrum's correlations, and take no evaluation of the network.
    """
    sides = (48, 48)
    level, prior = NoiseLevel(SIGMA), spectrum(16, 16)
    exact = prior * level.variance / (prior + level.variance)
    moments = SpectralMoments(field_model(), LevelTable.of({level: exact}))
    ramp = torch.linspace(0.5, 2.0, 48)[:, None].expand(1, 1, *sides).square() * 0.01
    law = with_strength(moments.covariance(torch.zeros(1, 1, *sides), level), ramp)
    torch.testing.assert_close(law.diagonal()[0, 0, 8:-8, 8:-8], ramp[0, 0, 8:-8, 8:-8],
                               rtol=0.12, atol=0)  # fmt: skip
    draws = torch.stack([
        law.root(torch.randn(1, 1, *sides, generator=torch.Generator().manual_seed(i)))[0, 0]
        for i in range(300)
    ])  # fmt: skip
    ratio = draws.square().mean(0)[8:-8].mean(1) / ramp[0, 0, 8:-8, 0]
    assert (ratio - 1).abs().max() < 0.15
    neighbours = (draws[:, :, 1:] * draws[:, :, :-1]).mean((0, 2)) / draws.square().mean((0, 2))
    plain = moments.covariance(torch.zeros(1, 1, *sides), level)
    impulse = torch.zeros(1, 1, *sides)
    impulse[..., 24, 24] = 1
    expected = plain.apply(impulse)[0, 0, 24, 25] / plain.diagonal()[0, 0, 24, 24]
    torch.testing.assert_close(neighbours[8:-8], expected.expand(32), rtol=0, atol=0.05)


def test_a_spectrum_that_is_kept_draws(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = mmdgs.load(folder / "model"), noisy(24, 20, channels=3)
    work = PosteriorWork(model, [NamedImage("a", x)], PosteriorSettings(0.3, components=0))
    assert (work.settings.draws_by, work.settings.draws) == (Spectral(), 4)
    posterior = work.posterior(0)
    assert (posterior.cost.forwards, posterior.cost.products) == (1, 3)
    spread = (posterior.draws - posterior.mean).square().mean().sqrt()
    assert spread == pytest.approx(posterior.std.square().mean().sqrt().item(), rel=0.15)
    none = PosteriorWork(any_size_model(), [NamedImage("a", x)], PosteriorSettings(0.3))
    assert none.settings.draws_by == Krylov()
    fixed = PosteriorWork(
        many_level_model(), [NamedImage("a", noisy(8, 8))], PosteriorSettings(0.3)
    )
    assert (fixed.settings.draws_by, fixed.settings.components) == (Krylov(), 5)
    assert fixed.settings.diagonal == Diagonal(probes=10)


def test_a_calibration_that_is_kept_serves_every_size(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "model", tmp_path / "model")
    table = LevelTable.of({NoiseLevel(sigma=0.3): [1e-6, 4.0, *[1.5] * 12]})
    model = mmdgs.load(tmp_path / "model")
    file = tmp_path / "model" / "calibration-lattice-3.safetensors"
    FitStore(model, "calibration-lattice-3").write(file, {"images": 2}, table)
    noise, settings = noisy(24, 20, channels=3), PosteriorSettings(0.3, components=0, draws=1)
    plain = mmdgs.image_posterior(
        mmdgs.load(folder / "model"), noise, replace(settings, diagonal=Diagonal(3, floor=1e-6))
    )
    seen = mmdgs.image_posterior(model, noise, settings)
    torch.testing.assert_close(seen.std, 2 * plain.std)
    torch.testing.assert_close(seen.high - seen.mean, 1.5 * 1.6448536 * seen.std)
    torch.testing.assert_close(seen.draws - seen.mean, 2 * (plain.draws - plain.mean),
                               rtol=1e-3, atol=1e-5)  # fmt: skip


def test_parts_are_told_as_they_begin(folder: Path) -> None:
    model, told = mmdgs.load(folder / "model"), []
    work = PosteriorWork(
        model, [NamedImage("a", noisy(24, 20, channels=3))], PosteriorSettings(0.3, components=1)
    )
    work.posterior(0, None, lambda count: told.append(count), lambda words: told.append(words))
    assert told == ["mean and uncertainty", 1, "draws", 1, 1, 1, 1, "components", 2]
    assert sum(part for part in told if isinstance(part, int)) == work.settings.parts


# --- the command


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return photographs_and_model(tmp_path_factory.mktemp("photo-posterior"))


def run(folder: Path, images: Path | str, out: Path, *more: str) -> Result:
    words = ["posterior", "--model", str(folder / "model"), str(images), "--out", str(out)]
    return CliRunner().invoke(cli.app, [*words, "--device", "cpu", *more])


def record_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "posterior.json").read_text())


def test_a_folder_of_photographs_each_at_its_size(folder: Path, tmp_path: Path) -> None:
    words = ("--simulate", "--sigma", "0.3", "--components", "1", "--draws", "2")
    result = run(folder, folder / "photos", tmp_path / "out", *words)
    assert result.exit_code == 0, result.output
    for name, size in {"a": (17, 20), "b": (21, 33), "c": (17, 20)}.items():
        with numpy.load(tmp_path / "out" / name / "arrays.npz") as arrays:
            assert arrays["mean"].shape == (3, *size)
            assert arrays["draws"].shape == (2, 3, *size)
    record = record_of(tmp_path / "out")
    assert record["settings"]["draws_by"] == {"name": "spectral"}
    assert [(image["region"], image["tiles"]) for image in record["images"]] == 3 * [(None, 1)]
    again = run(folder, folder / "photos", tmp_path / "out", *words, "--resume")
    assert again.exit_code == 0, again.output
    alone = run(folder, folder / "photos" / "a.png", tmp_path / "alone", *words)
    assert alone.exit_code == 0, alone.output
    with (
        numpy.load(tmp_path / "alone" / "a" / "arrays.npz") as alone_arrays,
        numpy.load(tmp_path / "out" / "a" / "arrays.npz") as arrays,
    ):
        numpy.testing.assert_array_equal(alone_arrays["draws"], arrays["draws"])


def test_quick_is_the_mean_its_uncertainty_and_two_draws(folder: Path, tmp_path: Path) -> None:
    result = run(folder, folder / "photos" / "a.png", tmp_path / "out", "--quick", "--sigma", "0.3")
    assert result.exit_code == 0, result.output
    with numpy.load(tmp_path / "out" / "a" / "arrays.npz") as arrays:
        assert (len(arrays["draws"]), len(arrays["directions"])) == (2, 0)
    assert record_of(tmp_path / "out")["settings"]["diagonal"]["probes"] == 3
    more = (
        "--quick",
        "--sigma",
        "0.3",
        "--draws",
        "1",
        "--draws-by",
        "krylov",
        "--krylov-steps",
        "2",
    )
    result = run(folder, folder / "photos" / "a.png", tmp_path / "more", *more)
    assert result.exit_code == 0, result.output
    settings = record_of(tmp_path / "more")["settings"]
    assert (settings["draws"], settings["draws_by"]["steps"]) == (1, 2)


def test_the_noise_is_estimated_unless_it_is_said(folder: Path, tmp_path: Path) -> None:
    pixels = picture((64, 64), seed=3)
    array = numpy.asarray(pixels, dtype="float32") / 255
    array += 0.25 * numpy.random.default_rng(0).standard_normal(array.shape).astype("float32")
    numpy.save(tmp_path / "noisy.npy", array)
    result = run(folder, tmp_path / "noisy.npy", tmp_path / "out", "--quick")
    assert result.exit_code == 0, result.output
    assert record_of(tmp_path / "out")["images"][0]["sigma"] == pytest.approx(0.25, rel=0.2)
    assert "The noise was estimated from the image" in result.output


def test_a_clean_photograph_has_the_least_noise_that_the_model_knows(
    folder: Path, tmp_path: Path
) -> None:
    result = run(folder, folder / "photos" / "a.png", tmp_path / "out", "--quick")
    assert result.exit_code == 0, result.output
    assert record_of(tmp_path / "out")["images"][0]["sigma"] == pytest.approx(0.1)
    assert "cleaner than that" in " ".join(result.output.split())


def test_calibration_on_photographs_of_several_sizes(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "clean").mkdir()
    for i in range(20):
        picture((20 + i, 30 - i % 7), seed=50 + i).save(tmp_path / "clean" / f"{i}.png")
    result = run(
        *(folder, folder / "photos" / "a.png", tmp_path / "out", "--quick", "--sigma", "0.3"),
        *("--calibrate", str(tmp_path / "clean")),
    )
    assert result.exit_code == 0, result.output
    assert "calibrated 90% intervals cover" in result.output


def test_the_page_plays_draws_and_says_how_to_see_a_place(folder: Path, tmp_path: Path) -> None:
    words = ("--simulate", "--sigma", "0.3", "--components", "1", "--seed", "7")
    result = run(folder, folder / "photos" / "b.png", tmp_path / "out", *words)
    assert result.exit_code == 0, result.output
    html = (tmp_path / "out" / "b" / "page.html").read_text()
    assert not re.search(r'(src|href)="(?!data:)', html)
    assert not re.search(r"https?://|@import|url\(", html)
    assert html.count('class="draw"') == 4
    for word in ('id="play"', 'id="fade"', "prefers-reduced-motion", "PSNR", "90% intervals"):
        assert word in html
    command = re.search(r'<code class="line">(.*?)<span id="region">', html, re.DOTALL)
    assert command is not None
    said = f"mmdgs posterior {folder / 'model'} {folder / 'photos' / 'b.png'} --sigma 0.3"
    assert command[1] == f"{said} --simulate --seed 7 --components 3 --region "


def test_pictures_of_a_page_stay_small() -> None:
    """A page of 1,400 x 1,200 pixels of pure noise has no picture above 1,024 pixels a side."""
    from mmdgs.data.pictures import jpeg
    from mmdgs.uncertainty.page import MOST_SIDE, image_tag

    noise = numpy.random.default_rng(0).integers(0, 256, (1200, 1400, 3), dtype=numpy.uint8)
    content = jpeg(noise, MOST_SIDE)
    assert len(content) < 2_000_000
    with Image.open(io.BytesIO(content)) as image:
        assert image.size == (1024, 878)
    tag = image_tag("noise", noise)
    assert 'width="1400" height="1200"' in tag
    assert base64.b64encode(content).decode() in tag
    assert image_tag("small", noise[:8, :8]).count("data:image/png") == 1


# --- files


@pytest.mark.parametrize("name", FILES)
def test_files_of_every_kind(
    name: str, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    FILES[name](tmp_path / name)
    result = run(folder, tmp_path / name, tmp_path / "out", "--quick", "--sigma", "0.3")
    assert result.exit_code == 0, result.output
    with numpy.load(tmp_path / "out" / Path(name).stem / "arrays.npz") as arrays:
        assert arrays["mean"].shape == (1 if name in ("grey.png", "deep.png") else 3, 17, 20)
    assert ("the first was taken" in caplog.text) == (name == "moving.gif")


@pytest.mark.parametrize(
    ("make", "more", "says"),
    [
        (lambda file: picture((1, 1)).save(file), [], "it: an image of 1 x 1 pixels is too small"),
        (lambda file: picture((1, 1)).save(file), ["--sigma", "estimate"], "1 x 1 pixels"),
        (lambda file: picture((400, 15)).save(file), [], "400 x 15 pixels is too small"),
        (lambda file: huge_png(file, 20_000), [], "400000000 pixels"),
        (lambda file: huge_png(file, 5_000), [], "5000 x 5000 pixels, and"),
        (lambda file: file.write_bytes(b"none"), [], "cannot be read"),
        (lambda file: picture((20, 17)).save(file), ["--sigma", "4.5"], "sigma from 0.1 to 4"),
        (lambda file: picture((20, 17)).save(file), ["--sigma", "much"], "got 'much'"),
        (
            lambda file: picture((20, 17)).save(file),
            ["--region", "9,9,40,4"],
            "20 wide and 17 high",
        ),
        (lambda file: picture((20, 17)).save(file), ["--draws-by", "kryl"], "krylov"),
        (lambda file: picture((600, 600)).save(file), [], "GB of memory"),
    ],
    ids=[
        *("one pixel", "one pixel estimated", "thin", "bomb", "large", "no image", "sigma", "word"),
        *("region", "draws", "memory"),
    ],
)
def test_what_is_refused_in_one_line(
    make: Any, more: list[str], says: str, folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(tiles, "memory_of", lambda device: 1 << 27)
    make(tmp_path / "it.png")
    more = more if "--sigma" in more else [*more, "--sigma", "0.3"]
    result = run(folder, tmp_path / "it.png", tmp_path / "out", *more)
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.output.split())
    assert result.output.count("error:") == 1
    assert not (tmp_path / "out").exists()


def test_simulated_noise_needs_a_number(folder: Path, tmp_path: Path) -> None:
    result = run(folder, folder / "photos", tmp_path / "out", "--simulate")
    assert result.exit_code == 2
    assert "say how much, such as --sigma 0.1" in " ".join(result.output.split())


def test_many_large_images_are_refused_before_they_fill_memory(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(single, "memory_of", lambda device: 2 * 12 * 700)
    result = run(folder, folder / "photos", tmp_path / "out", "--sigma", "0.3")
    assert result.exit_code == 2
    assert "fewer at a time (--n 1)" in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_estimators_of_one_size_leave_the_model_as_it_is() -> None:
    model = any_size_model()
    estimators = Estimators.of(model, (3, 20, 24), PosteriorSettings(0.3, draws=0))
    x = noisy(20, 24, channels=3)[None]
    estimates = estimators.at(x, NoiseLevel(0.3), lambda purpose: Streams(0, 1, purpose=purpose))
    torch.testing.assert_close(estimates.q.mean, model.sized(20, 24)(x, NoiseLevel(0.3)).detach())
    assert model.shape == (3, None, None)
    with pytest.raises(UsageError, match="too small"):
        Estimators.of(model, (3, 8, 24), PosteriorSettings(0.3))
